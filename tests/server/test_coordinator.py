"""Playing a round on an engine: who is asked, and in which order answers arrive at the method."""

from collections.abc import Iterable, Iterator, Sequence

from fedprophet.messages.answers import Answer, Reported, Trained
from fedprophet.messages.tasks import Report, Task
from fedprophet.messages.values import SERVER
from fedprophet.server.coordinator import play_round


class Listed:
    """An engine that answers in the order of a list of (client, number)."""

    def __init__(self, order: Sequence[tuple[int, int]]) -> None:
        self.order = order
        self.asked: list[list[tuple[int, int]]] = []

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        given = {(task.client, task.number): task for task in tasks}
        self.asked.append(list(given))
        for client, number in [name for name in self.order if name in given]:
            task = given[client, number]
            yield Reported(round=task.round, client=client, number=number, weight=1.0)


def _conversation(rounds: list[list[tuple[int, int]]]):
    heard = []
    for names in rounds:
        answers = yield [Report(round=1, client=client, seed=0, number=number) for client, number in names]
        heard.append([(answer.client, answer.number) for answer in answers])
    return "the next state", {"heard": heard}


def test_answers_arrive_by_client_and_then_by_number_whatever_the_engine_does() -> None:
    names = [(2, 1), (10, 0), (SERVER, 2), (2, 0), (SERVER, 10), (SERVER, 0)]
    expected = [(SERVER, 0), (SERVER, 2), (SERVER, 10), (2, 0), (2, 1), (10, 0)]
    for order in (names, names[::-1], sorted(names, key=lambda name: name[::-1])):
        engine = Listed([*order, (5, 0)])
        state, record = play_round(_conversation([names, [(5, 0)]]), engine)
        assert state == "the next state"
        assert record == {"heard": [expected, [(5, 0)]]}
        assert engine.asked == [names, [(5, 0)]]


def test_those_who_do_not_answer_are_named_by_what_they_were_asked() -> None:
    engine = Listed([(3, 0), (1, 0)])
    _, record = play_round(_conversation([[(1, 0), (2, 0), (3, 0)], [(3, 0)], [(5, 0), (4, 0), (4, 1)]]), engine)
    assert record == {"heard": [[(1, 0), (3, 0)], [(3, 0)], []], "missing": {"report": [2, 4, 5]}}


def test_a_method_never_hears_an_answer_that_it_did_not_ask_for() -> None:
    """An answer of a stranger, a second one, one of another kind and one of an earlier round are left out and named."""

    class Confused:
        def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
            list(tasks)
            yield Reported(round=1, client=1, weight=1.0)
            yield Reported(round=1, client=9, weight=1.0)
            yield Reported(round=1, client=1, weight=2.0)
            yield Trained(round=1, client=2, weight=1.0, loss=0.0, samples=1)
            yield Reported(round=0, client=3, weight=1.0)
            yield Reported(round=1, client=3, weight=1.0, number=7)

    def conversation():
        answers = yield [Report(round=1, client=client, seed=0) for client in (1, 2, 3)]
        return None, {"heard": [(answer.client, answer.weight) for answer in answers]}

    _, record = play_round(conversation(), Confused())
    assert record == {
        "heard": [(1, 1.0)],
        "missing": {"report": [2, 3]},
        "unasked": {"report": [1, 3, 9], "train": [2]},
    }


def test_what_an_engine_accounts_for_is_laid_over_the_record() -> None:
    class Counting(Listed):
        def account(self) -> dict[str, object]:
            return {"wire": {"sent": len(self.asked)}, "faults": {"3": "it hung"}}

    _, record = play_round(_conversation([[(1, 0)], [(1, 0)]]), Counting([(1, 0)]))
    assert list(record.items()) == [
        ("heard", [[(1, 0)], [(1, 0)]]),
        ("wire", {"sent": 2}),
        ("faults", {"3": "it hung"}),
    ]


def test_a_round_without_questions_is_over_at_once() -> None:
    engine = Listed([])
    assert play_round(_conversation([]), engine) == ("the next state", {"heard": []})
    assert engine.asked == []
