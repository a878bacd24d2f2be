"""Answers in the order of their tasks, and the accounts of a watched engine."""

from fedprophet.messages.answers import Evaluated, Reported
from fedprophet.messages.tasks import Evaluate
from fedprophet.messages.values import SERVER
from fedprophet.runs.asking import WatchedEngine, in_order


def task(client, number=0):
    return Evaluate(round=1, client=client, seed=0, number=number)


def answer(client, number=0, weight=1.0):
    return Evaluated(round=1, client=client, number=number, weight=weight, samples=1)


class Backwards:
    def map(self, tasks):
        yield from (answer(each.client, each.number) for each in reversed(list(tasks)))


def test_answers_come_in_the_order_of_the_tasks_also_where_a_client_has_several() -> None:
    tasks = [task(client, number) for client in (SERVER, 4) for number in range(3)]
    found = [(found.client, found.number) for found in in_order(tasks, Backwards(), Evaluated)]
    assert found == [(each.client, each.number) for each in tasks]


def test_answers_that_are_missing_doubled_or_of_strangers_do_not_disturb_the_order() -> None:
    class Disturbed:
        def map(self, tasks):
            yield Reported(round=1, client=4, weight=1.0)
            for client, weight in ((3, 1.0), (1, 1.0), (9, 1.0), (1, 2.0), (4, 1.0), (3, 2.0)):
                yield answer(client, weight=weight)

    found = in_order([task(client) for client in (1, 4, 2, 3)], Disturbed(), Evaluated)
    assert [(each.client, each.weight) for each in found] == [(1, 1.0), (4, 1.0), (3, 1.0)]


def test_a_watched_engine_reports_each_task_and_keeps_the_accounts() -> None:
    class Counting(Backwards):
        def account(self):
            return {"wire": {"sent": 3}}

    seen = []
    engine = WatchedEngine(Counting(), lambda *what: seen.append(what))
    assert [found.client for found in engine.map([task(1), task(2)])] == [2, 1]
    assert seen == [("evaluate", 1, 2), ("evaluate", 2, 2)]
    assert engine.account() == {"wire": {"sent": 3}}
    assert WatchedEngine(Backwards(), print).account() == {}
