"""Devices and the pools they are drawn from. A pool is a TOML file; those that ship lie in `pools/`."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from fedprophet.errors import ConfigError, unknown
from fedprophet.settings.toml import parse_toml
from fedprophet.sizes import parse_size

POOLS: Mapping[str, Traversable] = {
    entry.name.removesuffix(".toml"): entry
    for entry in files("fedprophet.fleet").joinpath("pools").iterdir()
    if entry.name.endswith(".toml")
}
LEAST, MOST = 1e-9, 1e24
"""Limits of FLOP/s, bytes and bytes/s: a time made of them is a finite number."""
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_PERFORMANCE = re.compile(
    r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*([kMGTP]?)FLOP(?:S|/s)\s*", re.IGNORECASE
)


@dataclass(frozen=True)
class Device:
    """The peaks of a device: FLOP/s, bytes of memory, and bytes/s to its storage."""

    name: str
    performance: float
    memory: int
    bandwidth: float


@dataclass(frozen=True)
class Pool:
    """The devices that a client may have."""

    name: str
    description: str
    devices: tuple[Device, ...]


def load_pool(pool: str | Path) -> Pool:
    """Return a pool by its name, or from a TOML file by its path (a text that ends in `.toml` or has a slash)."""
    source, where = _source(pool)
    return _parse(_read(source, where), Path(source.name).stem, where)


def pool_text(pool: str | Path) -> str:
    """Return the TOML of a pool as it is written, to be copied and edited."""
    return _read(*_source(pool))


def _source(pool: str | Path) -> tuple[Traversable | Path, str]:
    """Return the file of a pool, and what errors call it."""
    if isinstance(pool, Path) or pool.endswith(".toml") or "/" in pool:
        return Path(pool), str(pool)
    if pool not in POOLS:
        raise ConfigError(f"{unknown('device pool', pool, POOLS)}, or the path of a .toml file")
    return POOLS[pool], f"{pool}.toml"


def _read(source: Traversable | Path, where: str) -> str:
    try:
        return source.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the device pool {where}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the device pool {where} is not a TOML file: {error}") from error


def parse_performance(value: object) -> float:
    """Return FLOP/s from a number or a text such as `1.3 TFLOPS`."""
    if isinstance(value, str) and (match := _PERFORMANCE.fullmatch(value)):
        value = float(match[1]) * _PREFIXES[match[2].upper()]
    return _positive(value, "a performance", "'1.3 TFLOPS', '200 GFLOPS' or a number of FLOP/s")


def parse_bandwidth(value: object) -> float:
    """Return bytes/s from a number or a text such as `1.5GB/s`."""
    if isinstance(value, str):
        return float(parse_size(value.removesuffix("/s")))
    return _positive(value, "a bandwidth", "'1.5GB/s', '50MB/s' or a number of bytes/s")


def parse_memory(value: object) -> int:
    """Return bytes from a number or a text such as `4GB`."""
    if isinstance(value, str):
        return parse_size(value)
    size = _positive(value, "a memory", "'4GB', '64MiB' or a number of bytes")
    if not size.is_integer():
        raise ConfigError(f"{value!r} is not a whole number of bytes")
    return int(size)


def _positive(value: object, what: str, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST:
        raise ConfigError(f"{value!r} is not {what}. Allowed: {allowed}, at most {MOST:g}")
    if value < LEAST:
        raise ConfigError(f"must be positive, not {value!r}" + (f": at least {LEAST:g}" if value > 0 else ""))
    return float(value)


def _name(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{value!r} is not a name. Allowed: a text")
    return value


_FIELDS: Mapping[str, Callable[[object], Any]] = {
    "name": _name,
    "performance": parse_performance,
    "memory": parse_memory,
    "bandwidth": parse_bandwidth,
}


def _parse(text: str, name: str, where: str) -> Pool:
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"the device pool {where} is not a TOML file: {error}") from error
    where = f"device pool {where}"
    _check_keys(table, ("description", "device"), where)
    entries, description = table.get("device", []), table.get("description", "")
    if not isinstance(description, str):
        raise ConfigError(f"{where}: description must be a text, not {description!r}")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{where} has no devices: give each one a [[device]] table with {', '.join(_FIELDS)}")
    devices = tuple(_device(entry, number, where) for number, entry in enumerate(entries, start=1))
    names = [device.name for device in devices]
    for twice in (name for name in names if names.count(name) > 1):
        raise ConfigError(f"{where} has more than one device {twice!r}: give each its own name")
    return Pool(name, description, devices)


def _device(entry: Mapping[str, object], number: int, where: str) -> Device:
    where = f"{where}, device {entry.get('name', number)!r}"
    _check_keys(entry, _FIELDS, where)
    values = {}
    for field, parse in _FIELDS.items():
        if field not in entry:
            raise ConfigError(f"{where}: {field} is missing. A device has {', '.join(_FIELDS)}")
        try:
            values[field] = parse(entry[field])
        except ConfigError as error:
            raise ConfigError(f"{where}, {field}: {error}") from error
    return Device(**values)


def _check_keys(table: Mapping[str, object], known: Mapping[str, Any] | tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: {unknown('key', key, known)}")
