"""Why a client's answer cannot be used, in words that fit a journal whatever the client has sent."""

from collections.abc import Iterable

LARGEST_COUNT = 2.0**53
"""Up to here a float counts one by one: nobody has more samples, and sums over clients stay finite."""
LONGEST_REASON, LONGEST_NAME, NAMES_SHOWN = 500, 60, 5


def weight_fault(weight: float) -> str | None:
    """Return why a weight, the size of a client's shard, cannot be one; an empty shard has the weight 0."""
    return None if 0 <= weight <= LARGEST_COUNT else f"its weight is {weight}"


def some_names(names: Iterable[str]) -> str:
    """Return names as a list: all of a few, or the first of many and how many there are besides."""
    ordered = sorted(names)
    more = len(ordered) - NAMES_SHOWN
    return f"{[_cut(name, LONGEST_NAME) for name in ordered[:NAMES_SHOWN]]}" + (f" and {more} more" if more > 0 else "")


def plain_reason(text: str) -> str:
    """Return a reason as it may be written and shown: of bounded length, and with no character that acts."""
    return "".join(c if c.isprintable() else "?" for c in _cut(text, LONGEST_REASON))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
