"""How much a client counts. Its weight q_k is the size of its shard, and that is only what the client claims.

So a client counts for no more than the server can know: the size of its shard where the server knows it, and else the
median of what the clients that are joined with it claim. A client gains nothing by claiming more.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from fedprophet.messages.answers import Answer
from fedprophet.server.coordinator import Record

A = TypeVar("A", bound=Answer)
Sizes = Callable[[int], int | None]
"""Returns the size of a client's shard; None where the server does not know it."""


def no_sizes(client: int) -> None:
    """Know the size of no shard."""


def believed(answers: Iterable[A], sizes: Sizes, record: Record) -> Iterator[A]:
    """Yield the answers with weights that can be believed, and note the claims of those that had to be cut.

    Where sizes are known, no answer waits for the others.
    """

    def cut(answer: A, most: float) -> A:
        if answer.weight <= most:
            return answer
        record.setdefault("capped", {}).setdefault(str(answer.client), answer.weight)
        return replace(answer, weight=most)

    unknown: list[A] = []
    for answer in answers:
        size = sizes(answer.client)
        if size is None:
            unknown.append(answer)
        else:
            yield cut(answer, float(size))
    median = statistics.median_low([answer.weight for answer in unknown if answer.weight > 0] or [0.0])
    yield from (cut(answer, median) for answer in unknown)
