"""Time spans as people read them: `4.3 s`, `7.2 h`, and `2:03:40` where a clock runs down."""

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
"""From how many seconds on people use a unit: a day is too coarse for a few days, a minute for two of them."""


def unit_of(seconds: float) -> Unit:
    """Return the unit that suits a time span."""
    return next((unit for enough, unit in _FROM if seconds >= enough), SECOND)


def format_duration(seconds: float) -> str:
    """Return a time span in the unit that suits it; of less than a tenth of a second two digits."""
    unit = unit_of(seconds)
    return f"{seconds:.2g} s" if 0 < seconds < 0.1 else f"{seconds / unit.seconds:.1f} {unit.name}"


def clock(seconds: float, with_hours: bool = False) -> str:
    """Return a time span as a clock shows it: `1:05` or `2:03:40`; with hours in any case, `0:01:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours or with_hours else f"{minutes}:{rest:02}"
