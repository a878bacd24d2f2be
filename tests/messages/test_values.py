"""The sizes of local batches, and which version of a client's own layers counts."""

import pytest

from fedprophet.messages.values import Timeline, batch_sizes


def test_the_newest_version_before_a_round_counts() -> None:
    versions = dict.fromkeys((2, 5, 9))
    assert Timeline().newest(versions, before=9) == 5
    assert Timeline().newest(versions, before=10) == 9
    assert Timeline().newest(versions, before=2) is None


def test_rounds_after_a_stages_best_are_discarded() -> None:
    """Stage 1 ran to round 10 and its best was round 6: what was trained in 7 … 10 never happened."""
    timeline = Timeline(discarded=((6, 10),))
    assert timeline.newest(dict.fromkeys((3, 6, 8, 10)), before=20) == 6
    assert timeline.newest(dict.fromkeys((3, 8)), before=20) == 3
    assert timeline.newest(dict.fromkeys((8, 11)), before=20) == 11


@pytest.mark.parametrize(
    ("samples", "batch", "iterations", "expected"),
    [
        (400, 64, 9, (64, 64, 64, 64, 64, 64, 16, 64, 64)),
        (128, 64, 3, (64, 64, 64)),
        (10, 64, 3, (10, 10, 10)),
        (65, 64, 1, (64,)),
        (0, 64, 30, ()),
    ],
)
def test_the_sizes_of_batches(samples: int, batch: int, iterations: int, expected: tuple[int, ...]) -> None:
    assert batch_sizes(samples, batch, iterations) == expected
