"""Holding a round on an engine: who is asked, and in which order answers arrive at the method."""

from collections.abc import Iterable, Iterator, Sequence

from fedprophet.client.task import SERVER, ClientTask, ClientUpdate
from fedprophet.server.coordinator import hold


class Listed:
    """An engine that answers in the order of a list of (client, number)."""

    def __init__(self, order: Sequence[tuple[int, int]]) -> None:
        self.order = order
        self.asked: list[list[tuple[int, int]]] = []

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[ClientUpdate]:
        given = {(task.client, task.number): task for task in tasks}
        self.asked.append(list(given))
        for client, number in [name for name in self.order if name in given]:
            task = given[client, number]
            yield ClientUpdate(task.kind, task.round, client, weight=1.0, number=number)


def _conversation(rounds: list[list[tuple[int, int]]]):
    heard = []
    for names in rounds:
        answers = yield [ClientTask("report", 1, client, 0, number=number) for client, number in names]
        heard.append([(answer.client, answer.number) for answer in answers])
    return "the next state", {"heard": heard}


def test_answers_arrive_by_client_and_then_by_number_whatever_the_engine_does() -> None:
    names = [(2, 1), (10, 0), (SERVER, 2), (2, 0), (SERVER, 10), (SERVER, 0)]
    expected = [(SERVER, 0), (SERVER, 2), (SERVER, 10), (2, 0), (2, 1), (10, 0)]
    for order in (names, names[::-1], sorted(names, key=lambda name: name[::-1])):
        engine = Listed([*order, (5, 0)])
        state, record = hold(_conversation([names, [(5, 0)]]), engine)
        assert state == "the next state"
        assert record == {"heard": [expected, [(5, 0)]]}
        assert engine.asked == [names, [(5, 0)]]


def test_those_who_do_not_answer_are_simply_missing() -> None:
    _, record = hold(_conversation([[(1, 0), (2, 0), (3, 0)]]), Listed([(3, 0), (1, 0)]))
    assert record == {"heard": [[(1, 0), (3, 0)]]}


def test_a_round_without_questions_is_over_at_once() -> None:
    engine = Listed([])
    assert hold(_conversation([]), engine) == ("the next state", {"heard": []})
    assert engine.asked == []
