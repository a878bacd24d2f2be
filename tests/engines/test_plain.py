"""The plain engine: tasks in, answers out, nothing made for clients that take no part."""

from dataclasses import replace

import pytest
import torch

from fedprophet.engines import plain
from fedprophet.errors import OutOfMemoryError
from fedprophet.messages.tasks import Report
from fedprophet.messages.values import SERVER
from fedprophet.runs.session import assemble


@pytest.fixture
def session(tiny):
    return assemble(tiny())


def _training(session, round=1):
    method = session.method
    conversation = method.round(replace(method.initial(), round=round - 1))
    return conversation.send(list(session.engine.map(next(conversation))))


def test_tasks_are_carried_out_one_by_one_as_they_are_asked_for(session):
    given = []

    def tasks():
        for client in (3, 1, 2):
            given.append(client)
            yield Report(round=1, client=client, seed=0)

    answers = session.engine.map(tasks())
    assert given == []
    assert next(answers).client == 3
    assert given == [3]
    assert [answer.client for answer in answers] == [1, 2]


def test_only_the_clients_that_are_named_are_made(session, monkeypatch):
    made = []
    real = session.population.client_data
    monkeypatch.setattr(session.population, "client_data", lambda number: made.append(number) or real(number))
    list(session.engine.map([Report(round=1, client=4, seed=0)]))
    assert made == [4]


def test_the_device_of_a_client_can_spare_at_least_the_budget(session):
    reports = list(session.engine.map(Report(round=r, client=k, seed=0) for r in (1, 2) for k in range(6)))
    assert all(report.resources.memory >= session.budget for report in reports)
    assert reports[0].resources == session.population.resources(0, 1, session.budget)
    assert len({report.resources.performance for report in reports}) == 12
    assert [report.weight for report in reports[:6]] == [session.population.samples(k) for k in range(6)]


def test_a_client_that_runs_out_of_memory_ends_in_a_sentence(session, monkeypatch):
    monkeypatch.setattr(plain, "run_client", lambda *_: torch.empty(10**15))
    with pytest.raises(OutOfMemoryError, match=r"client 2 was to report \(4.* bytes .*threads.*train\.batch"):
        next(session.engine.map([Report(round=1, client=2, seed=0)]))


def test_the_server_evaluates_on_the_test_set(session):
    method = session.method
    (answer,) = session.engine.map([method.evaluation_task(method.initial(), SERVER, None)])
    assert answer.samples == answer.weight == len(session.dataset.test)


def test_updates_do_not_depend_on_what_ran_before(session, tiny, same_tensors):
    tasks = _training(session)
    forward = {update.client: update for update in session.engine.map(tasks)}
    fresh = assemble(tiny())
    _training(fresh)
    backward = {update.client: update for update in fresh.engine.map(reversed(tasks))}
    assert len(forward) == 2
    for client, update in forward.items():
        assert same_tensors(update.parameters, backward[client].parameters)
        assert update.loss == backward[client].loss


def test_a_repeated_task_starts_from_the_layers_of_the_round_before(session, same_tensors):
    """As after a resume: the layers that the first attempt left behind must not be the start of the second."""
    tasks = _training(session)
    first, second = (list(session.engine.map(tasks)) for _ in range(2))
    assert all(same_tensors(a.parameters, b.parameters) for a, b in zip(first, second, strict=True))
    later = [replace(task, round=2) for task in tasks]
    third = list(session.engine.map(later))
    assert not any(same_tensors(a.parameters, b.parameters) for a, b in zip(first, third, strict=True))


def test_every_update_has_tensors_of_its_own(session):
    tasks = _training(session)
    updates = list(session.engine.map(tasks))
    kept = [{name: value.clone() for name, value in update.parameters.items()} for update in updates]
    list(session.engine.map(replace(task, round=3) for task in tasks))
    for update, copy in zip(updates, kept, strict=True):
        assert all(torch.equal(update.parameters[name], copy[name]) for name in copy)
