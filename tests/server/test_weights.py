"""How much clients count that claim too much, by hand."""

from collections.abc import Iterator

from fedprophet.messages.answers import Reported
from fedprophet.server.weights import believed, no_sizes


def _claims(*weights: float) -> Iterator[Reported]:
    return (Reported(round=1, client=client, weight=weight) for client, weight in enumerate(weights))


def test_claims_are_cut_to_the_size_of_the_shard() -> None:
    """Nobody gains by claiming more, and what is claimed less stays."""
    record: dict[str, object] = {}
    sizes = {0: 5, 1: 0, 2: 7}
    assert [answer.weight for answer in believed(_claims(5, 3, 6.5), sizes.get, record)] == [5, 0, 6.5]
    assert record == {"capped": {"1": 3}}


def test_claims_of_unknown_shards_are_cut_to_their_median() -> None:
    """Of an even number the lower one: with two clients, the larger claim counts like the smaller."""
    record: dict[str, object] = {}
    assert [answer.weight for answer in believed(_claims(5, 2.0**53, 7, 1), no_sizes, record)] == [5, 5, 5, 1]
    assert record == {"capped": {"1": 2.0**53, "2": 7}}
    assert [answer.weight for answer in believed(_claims(4, 100), no_sizes, {})] == [4, 4]


def test_empty_shards_do_not_draw_the_median_down() -> None:
    assert [answer.weight for answer in believed(_claims(0, 0, 0, 8, 8), no_sizes, {})] == [0, 0, 0, 8, 8]


def test_the_first_claim_of_a_client_in_a_round_is_noted() -> None:
    record: dict[str, object] = {"capped": {"0": 9}}
    list(believed(_claims(4), lambda client: 1, record))
    assert record == {"capped": {"0": 9}}


def test_where_sizes_are_known_no_answer_waits_for_the_others() -> None:
    """The layers of many clients are never in memory together."""
    arrived = _claims(1, 2, 3)
    assert next(believed(arrived, lambda client: 2, {})).client == 0
    assert next(arrived).client == 1
