"""Keys that have a new name. The old one is read for one version, with a note.

A run's folder holds every key, so an old one that has its old default was not chosen by anybody: it is read silently.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fedprophet.errors import ConfigError

logger = logging.getLogger("fedprophet")


@dataclass(frozen=True)
class Renamed:
    """A key's new name and old default, which is left out under the new name if `drop` says so."""

    key: str
    default: Any
    drop: bool = False


RENAMED: Mapping[str, Renamed] = {
    "flower.minimum": Renamed("aggregate.minimum", 1),
    "aggregate.clip": Renamed("clip.norm", 0.0),
    "aggregate.trim": Renamed("trimmed_mean.trim", 0.2),
    "budget.enforce": Renamed("memory.enforce", False),
    "data.size": Renamed("data.options.size", 0, drop=True),
    "data.test_per_class": Renamed("data.options.test_per_class", 0, drop=True),
    "data.cache": Renamed("data.options.cache", "", drop=True),
}
ABSENT = object()
"""The value of a key that is not set."""


def with_new_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested table in which every renamed key has its new name."""
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()}
    for old in RENAMED:
        section, _, key = old.partition(".")
        if isinstance(result.get(section), dict) and key in result[section]:
            path, value = renamed_path((section, key), result[section].pop(key))
            if not result[section]:
                del result[section]  # a table that had nothing but this key may have no name any more
            if value is not ABSENT and assign(result, path, value) is not ABSENT:
                raise ConfigError(f"{old} is now called {'.'.join(path)}, and both are set: remove {old}")
    return result


def renamed_path(path: Sequence[str], value: Any) -> tuple[Sequence[str], Any]:
    """Return a key's path and value under its new name; the value is ABSENT if it used to mean the default."""
    old = ".".join(path)
    new = RENAMED.get(old)
    if new is None:
        return path, value
    path = new.key.split(".")
    if value == new.default:
        return path, ABSENT if new.drop else value
    _note(old, new.key)
    return path, value


@cache
def _note(old: str, new: str) -> None:
    logger.warning("%s is now called %s; the old name will not be read by the next version", old, new)


def assign(data: dict[str, Any], path: Sequence[str], value: Any) -> Any:
    """Set a key in a nested table, or remove it with ABSENT; return its old value. Inner tables are copied."""
    for name in path[:-1]:
        inner = data.get(name)
        data[name] = dict(inner) if isinstance(inner, Mapping) else {}
        data = data[name]
    before = data.pop(path[-1], ABSENT)
    if value is not ABSENT:
        data[path[-1]] = value
    return before
