"""Why a client's answer cannot be used, in words that fit a journal whatever the client has sent."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from fedprophet.messages.answers import Answer
from fedprophet.server.coordinator import Record

LARGEST_COUNT = 2.0**53
"""Up to here a float holds every whole number. No client has more samples, and sums over clients stay finite."""
LARGEST_NUMBER = 1e30
"""No loss or perturbation is larger. Weighted sums over clients stay finite, and so does what follows from them."""
LONGEST_REASON, LONGEST_NAME, NAMES_SHOWN = 500, 60, 5
A = TypeVar("A", bound=Answer)


def reject(record: Record, reasons: Mapping[int, str]) -> None:
    """Note why clients' answers were not used; the first reason of a client in a round stays."""
    earlier = record.get("dropped", {})
    new = {str(client): plain_reason(reason) for client, reason in reasons.items() if str(client) not in earlier}
    record["dropped"] = {**earlier, **new}


def sound_answers(answers: Sequence[A], fault: Callable[[A], str | None], record: Record) -> list[A]:
    """Return the answers that `fault` has nothing against, and note what it has against the others."""
    faults = {answer.client: reason for answer in answers if (reason := fault(answer)) is not None}
    if faults:
        reject(record, faults)
    return [answer for answer in answers if answer.client not in faults]


def weight_fault(weight: float) -> str | None:
    """Return why a weight, the size of a client's shard, is impossible; an empty shard has the weight 0."""
    return None if weight == 0 or 1 <= weight <= LARGEST_COUNT else f"its weight is {weight}"


def number_fault(name: str, number: float, least: float = -LARGEST_NUMBER) -> str | None:
    """Return why a number that a client has computed is impossible."""
    return None if least <= number <= LARGEST_NUMBER else f"its {name} is {number}"


def some_names(names: Iterable[str]) -> str:
    """Return a list of names: all of them if they are few, else the first ones and how many more there are."""
    ordered = sorted(names)
    more = len(ordered) - NAMES_SHOWN
    return f"{[_cut(name, LONGEST_NAME) for name in ordered[:NAMES_SHOWN]]}" + (f" and {more} more" if more > 0 else "")


def plain_reason(text: str) -> str:
    """Return a reason that is safe to write and show: of bounded length, without control characters."""
    return "".join(c if c.isprintable() else "?" for c in _cut(text, LONGEST_REASON))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
