"""Time spans as people read them: `4.3 s`, `7.2 h`, and `2:03:40` on a clock."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """A unit of time."""

    name: str
    seconds: int


SECOND = Unit("s", 1)
_FROM = (
    (10 * 86_400, Unit("days", 86_400)),
    (2 * 3_600, Unit("h", 3_600)),
    (2 * 60, Unit("min", 60)),
)
"""The seconds from which a unit is used: days are too coarse for a few days, minutes for one or two."""


def unit_of(seconds: float) -> Unit:
    """Return the unit that suits a time span."""
    return next((unit for enough, unit in _FROM if seconds >= enough), SECOND)


def format_duration(seconds: float) -> str:
    """Return a time span in the unit that suits it, with two digits if it is below a tenth of a second."""
    unit = unit_of(seconds)
    return f"{seconds:.2g} s" if 0 < seconds < 0.1 else f"{seconds / unit.seconds:.1f} {unit.name}"


def clock(seconds: float, with_hours: bool = False) -> str:
    """Return a time span as a clock shows it: `1:05` or `2:03:40`; `with_hours`, always `0:01:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours or with_hours else f"{minutes}:{rest:02}"
