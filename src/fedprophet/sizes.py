"""Sizes as people write them: `60MB`, `1.5GB`, `64MiB` or plain bytes. MB is 10^6 bytes, as in the paper."""

import math
import re
from fractions import Fraction

from fedprophet.errors import ConfigError

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
MOST_BYTES = 10**18
MOST_SIDE, MOST_ELEMENTS = 10**6, 10**9
"""Limits of an input: larger ones could not be counted in 64 bits."""
_PATTERN = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")
_SHARE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})\s*%\s*")


def parse_size(text: str | int) -> int:
    """Return a size in bytes; raise ConfigError if the text is not a positive size."""
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise ConfigError(f"{text!r} is not a size. Allowed: 60MB, 1.5GB, 64MiB or a number of bytes")
    if isinstance(text, int):
        return _checked_size(text, text)
    match = _PATTERN.fullmatch(text)
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is not a size. Allowed: 60MB, 1.5GB, 64MiB or a number of bytes")
    return _checked_size(round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit, text)


def _checked_size(size: int, text: str | int) -> int:
    if size <= 0:
        raise ConfigError(f"a size must be positive, not {str(text)!r}")
    if size > MOST_BYTES:
        raise ConfigError(f"a size must be at most {MOST_BYTES} bytes")
    return size


def parse_share(text: str | int) -> Fraction | None:
    """Return a share such as `25%`; None if the text is not one."""
    match = _SHARE.fullmatch(text) if isinstance(text, str) else None
    return Fraction(match[1]) / 100 if match else None


def parse_budget(text: str | int, whole: int) -> int:
    """Return a memory budget in bytes: a size, or a share of what the whole model takes, as in `25%`."""
    share = parse_share(text)
    try:
        budget = parse_size(text) if share is None else int(share * whole)
    except ConfigError:
        budget = 0
    if budget <= 0:
        raise ConfigError(
            f"{text!r} is not a memory budget. Allowed: a size (60MB, 1.5GB, 64MiB or a number of bytes), "
            "or a share of what the whole model takes, as in 25%; more than nothing"
        )
    return budget


def parse_shape(text: str) -> tuple[int, ...]:
    """Return the shape of one input, as in `3x32x32`; raise ConfigError if the text is not one."""
    sides = text.strip().lower().split("x")
    fits = all(side.isascii() and side.isdigit() and len(side) < 10 and 0 < int(side) <= MOST_SIDE for side in sides)
    if not fits or math.prod(map(int, sides)) > MOST_ELEMENTS:
        raise ConfigError(
            f"{text!r} is not an input shape. Allowed: positive numbers joined by x, as in 3x32x32; at most "
            f"{MOST_ELEMENTS} values in all"
        )
    return tuple(map(int, sides))


def format_size(size: int, decimals: int = 1) -> str:
    """Return a size for people, in decimal units: `55.8 MB`."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.{decimals}f} {name}"
    return f"{size} B"


def format_count(count: int) -> str:
    """Return a number of FLOPs or parameters for people: `20.17 G`."""
    for unit, name in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return str(count)
