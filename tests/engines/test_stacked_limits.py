"""What the stacked engine holds at once and keeps between rounds; neither makes a difference to what it answers."""

import gc
import logging
import weakref
from dataclasses import replace

import pytest

from fedprophet.engines.stacked import Limits, StackedEngine

PLENTY = 10**9


def test_draws_depend_on_nobody_else(session_of, same_tensors, stacked, joint, paired, close):
    """In any order, in groups of any size: the same numbers, attacked as well."""
    session = session_of({"method": "jfat", "model.options": {"width": 2}})
    tasks = joint(session, clients=(0, 1, 2, 3, 4))
    engine = stacked(session)
    whole = list(engine.map(tasks))
    one = max(engine._fusing._activations(engine._job(task)) for task in tasks)
    single = list(stacked(session, Limits(one, PLENTY)).map(tasks))
    backwards = list(stacked(session).map(tasks[::-1]))
    for a, b in (*paired(whole, single), *paired(whole, backwards)):
        assert a.loss == pytest.approx(b.loss, rel=1e-6)
        assert all(close(a.parameters[name], b.parameters[name], 1e-5) for name in a.parameters)
    assert len({update.loss for update in whole}) == 5


def test_chunks_are_of_one_size(session_of, stacked, joint):
    session = session_of({"method": "jfat"})
    tasks = joint(session, clients=range(6), threat=None)
    one = stacked(session)._fusing._activations(stacked(session)._job(tasks[0]))
    engine = stacked(session, Limits(4 * one, PLENTY))
    chunks = list(engine._fusing._chunks([engine._job(task) for task in tasks]))
    assert [len(chunk) for chunk in chunks] == [3, 3]
    assert [job.task.client for chunk in chunks for job in chunk] == list(range(6))


def test_a_client_that_does_not_fit_goes_to_the_plain_path(session_of, caplog, stacked):
    session = session_of({"method": "jfat"})
    tasks = [session.method.evaluation_task(session.method.initial(), 0, None)]
    with caplog.at_level(logging.WARNING, "fedprophet"):
        (update,) = stacked(session, Limits(1, PLENTY)).map(tasks)
    assert update == next(iter(session.engine.map(tasks)))
    assert "samples of one client at once, which need more memory than there is" in caplog.text


def test_features_are_computed_once(cascade, monkeypatch, stacked):
    session = cascade.session
    state = replace(cascade.states[-1], round=cascade.states[-1].round + 6)
    tasks = [replace(session.method._train_task(state, client, 2), threat=None) for client in range(3)]
    engine, computed = stacked(session), []
    real = StackedEngine._features
    monkeypatch.setattr(StackedEngine, "_features", lambda self, jobs: (computed.extend(jobs), real(self, jobs))[1])
    for later in range(3):
        list(engine.map([replace(task, round=task.round + later) for task in tasks]))
    assert [job.task.client for job in computed] == [0, 1, 2]


def test_features_that_are_driven_out_while_others_are_made(cascade, stacked, assert_same_training):
    session, last = cascade.session, cascade.states[-1]
    state = replace([s for s in cascade.states if s.stage == 1][-1], round=last.round + 1)
    tasks = [replace(session.method._train_task(state, client, 1), threat=None) for client in range(6)]
    engine = stacked(session, Limits(PLENTY, 300_000))
    list(engine.map(tasks[3:]))
    features = engine._features([engine._job(tasks[0])])[0]
    assert engine._inputs.resident.size <= 300_000 < 6 * features.nbytes
    assert_same_training(session, tasks, engine)


def test_inputs_that_do_not_stay_are_fetched_again(session_of, same_tensors, stacked, joint, paired):
    session = session_of({"method": "jfat"})
    tasks = joint(session)
    for mine, theirs in paired(stacked(session, Limits(PLENTY, 1)).map(tasks), stacked(session).map(tasks)):
        assert same_tensors(mine.parameters, theirs.parameters)


def test_plans_serve_rounds_whose_radius_and_rate_change(session_of, same_tensors, stacked, joint, paired, plans):
    session = session_of({"method": "jfat"})
    engine, tasks = stacked(session), joint(session, round=2)
    other = [
        replace(t, threat=replace(t.threat, radius=0.02, step=0.01), training=replace(t.training, learning_rate=0.3))
        for t in tasks
    ]
    list(engine.map(other))
    plans = len(engine._plans)
    for mine, fresh in paired(engine.map(tasks), stacked(session).map(tasks)):
        assert same_tensors(mine.parameters, fresh.parameters)
    assert len(engine._plans) == plans
    steps = [replace(t, threat=replace(t.threat, steps=3)) for t in tasks]
    list(engine.map(steps))
    assert len(engine._plans) > plans


def test_plans_make_room_for_others(session_of, stacked, joint):
    session = session_of({"method": "jfat"})
    tasks = joint(session, clients=(0, 1, 2))
    groups = [tasks[:1], tasks[1:], tasks]
    keen, roomy = stacked(session, Limits(PLENTY, PLENTY, plans=0)), stacked(session)
    for group in groups:
        list(keen.map(group))
        list(roomy.map(group))
    assert len(keen._plans) == 1
    assert len(roomy._plans) > 1
    assert all(plan.nbytes > 0 for plan in roomy._plans.values())


def test_a_plan_that_made_room_is_gone_at_once(session_of, stacked, joint):
    """Python's search for cycles knows nothing of a GPU's memory, so nothing may wait for it."""
    session = session_of({"method": "jfat"})
    tasks = joint(session, clients=(0, 1, 2))
    engine = stacked(session, Limits(PLENTY, PLENTY, plans=0))
    list(engine.map(tasks[:1]))
    (plan,) = map(weakref.ref, engine._plans.values())
    gc.disable()
    try:
        list(engine.map(tasks[1:]))
        assert plan() is None
    finally:
        gc.enable()
