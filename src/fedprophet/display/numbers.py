"""How numbers are written for people, everywhere. Sizes are in `fedprophet.sizes`, time spans in `durations`."""

NONE = "–"
"""A value that is not known."""


def percent(share: float | None) -> str:
    """Return a share as `79.7 %`."""
    return NONE if share is None else f"{100 * share:.1f} %"


def digits(value: float) -> str:
    """Return a number with three significant digits, but never fewer than its whole part: `0.148`, `12.3`, `1234`."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def factor(value: float) -> str:
    """Return how many times as fast: `2.40×`."""
    return f"{digits(value)}×"


def counted(number: int, what: str) -> str:
    """Return `1 node` or `3 nodes`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
