"""Which version of a client's own layers counts."""

from fedprophet.messages.values import Timeline


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
