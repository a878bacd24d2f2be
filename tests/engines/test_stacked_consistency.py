"""A draw to the predictions of what was received (`train.consistency`), on the stacked engine as on the plain one."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedprophet.fast.kernels import Kernels
from fedprophet.messages.tasks import Train
from fedprophet.threat import ThreatModel

EVEN = {"shards.kind": "iid", "population.clients": 10}


def drawn(tasks: Sequence[Train], strength: float, **changes: Any) -> list[Train]:
    """Return the tasks with a draw of some strength, and with other changes of their training."""
    return [replace(t, training=replace(t.training, consistency=strength, **changes)) for t in tasks]


@pytest.fixture(autouse=True)
def _nothing_is_left_to_the_plain_path(caplog):
    caplog.set_level(logging.WARNING, "fedprophet")
    yield
    assert not caplog.records


@pytest.mark.parametrize("calibration", [0.0, 0.5])
@pytest.mark.parametrize("model", ["vgg-small", "resnet10"])
def test_whole_models(session_of, model, calibration, stacked, joint, assert_same_training):
    """Two rounds in one plan: the second begins with layers, and so with predictions, of its own."""
    session = session_of({"method": "jfat", "model.name": model, "train.iterations": 3})
    for kernels in (Kernels(), Kernels(16)):
        engine = stacked(session, kernels=kernels)
        for number in (1, 2):
            tasks = joint(session, number, threat=None, calibration=calibration)
            # In some clients rounding turns an activation that is next to nothing; a wrong draw is off by 1e-2.
            found = assert_same_training(session, drawn(tasks, 1.5), engine, noise=1e-5)
    free = {update.client: update.loss for update in engine.map(tasks)}
    assert min(abs(update.loss - free[update.client]) for update in found) > 0.01


@pytest.mark.parametrize("calibration", [0.0, 0.5])
def test_modules_of_a_cascade(cascade, calibration, assert_same_training, plans):
    """Clients of a ladder, each drawn to what its own exit said: auxiliary heads, and the classifier."""
    session, state = cascade.session, replace(cascade.states[2], stage=0, perturbation=None, round=9)
    tasks = [session.method._train_task(state, client, client % 3) for client in range(6)]
    tasks = [replace(task, threat=None, calibration=calibration) for task in tasks]
    assert_same_training(session, drawn(tasks, 2.0, iterations=4))
    assert any(len(plan.ladder.exits) > 1 for plan in plans)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("calibration", [0.0, 0.5])
def test_modules_behind_frozen_ones(cascade, stage, calibration, assert_same_training):
    """What is predicted for are cached features, with the clients' own layers in front of them."""
    session, last = cascade.session, cascade.states[-1]
    state = replace([s for s in cascade.states if s.stage == stage][-1], round=last.round + 1)
    tasks = [session.method._train_task(state, client, stage) for client in range(6)]
    tasks = [replace(task, threat=None, calibration=calibration) for task in tasks]
    assert len(tasks[0].frozen) == stage
    assert_same_training(session, drawn(tasks, 2.0))


def test_batches_of_two_sizes(session_of, joint, assert_same_training):
    """80, 80 and 30 of 190 samples, and again."""
    session = session_of({"method": "jfat", "train.batch": 80, "train.iterations": 4})
    assert_same_training(session, drawn(joint(session, threat=None), 1.0))


def test_of_two_sets_of_statistics_the_clean_one_predicts(session_of, stacked, joint, assert_same_training):
    session = session_of({"method": "fedrbn"})
    tasks = joint(session, adversarial_statistics=True)
    list(session.engine.map([replace(task, threat=session.world.image_threat(2)) for task in tasks]))
    later = [replace(task, round=2, threat=None) for task in tasks]
    assert_same_training(session, drawn(later, 1.0), stacked(session))


def test_sub_networks(session_of, stacked, partial_tasks, assert_same_training):
    session = session_of({"method": "heterofl", **EVEN, "model.options": {"width": 8}})
    engine = stacked(session)
    for number, widths in enumerate(((0.3, 1.0, 0.6), (1.0, 0.6, 0.3)), start=1):
        tasks = partial_tasks(session, widths, number, threat=None, calibration=1.0)
        assert_same_training(session, drawn(tasks, 1.0, iterations=2, learning_rate=0.02), engine, noise=1e-5)


def test_draws_of_other_strengths_are_groups_of_their_own(session_of, joint, assert_same_training, plans):
    session = session_of({"method": "jfat", **EVEN})
    tasks = joint(session, clients=range(6), threat=None)
    mixed = [drawn([task], strength)[0] for task, strength in zip(tasks, (0.0, 1.0, 2.0, 0.0, 1.0, 1.0), strict=True)]
    assert_same_training(session, mixed)
    assert sorted((plan.hyper.consistency, plan.ladder.clients) for plan in plans) == [(0.0, 2), (1.0, 3), (2.0, 1)]


def test_a_kept_plan_takes_the_predictions_of_other_clients(session_of, stacked, joint, same_tensors, plans):
    """Attacked, and with other label frequencies: the same bytes as on a fresh engine."""
    session = session_of({"method": "jfat", "train.warmup": 0, **EVEN})
    engine, asked = stacked(session), []
    for number, clients in enumerate(((0, 1, 2), (3, 4, 5)), start=1):
        asked = drawn(joint(session, number, clients, calibration=1.0), 1.0)
        found = {update.client: update for update in engine.map(asked)}
    assert len(plans) == 1
    for update in stacked(session).map(asked):
        assert same_tensors(update.parameters, found[update.client].parameters)
        assert update.loss == found[update.client].loss


@pytest.mark.usefixtures("same_starts")
@pytest.mark.parametrize("calibration", [0.0, 0.1])
def test_attacks_find_losses_as_high(learned, stacked, paired, calibration):
    """Draws are to predictions on clean samples: under attack they are what the loss gains most by."""
    session, state = learned.session, replace(learned.states[-1], round=9)
    tasks = [replace(session.method.train_task(state, k), calibration=calibration) for k in range(6)]
    threat = ThreatModel("linf", 0.1, 0.04, 5, (0.0, 1.0))
    tasks = [replace(task, threat=threat) for task in drawn(tasks, 2.0, iterations=4, learning_rate=1e-9)]
    clean = [u.loss for u in session.engine.map([replace(task, threat=None) for task in tasks])]
    pairs = paired(stacked(session).map(tasks), session.engine.map(tasks))
    raised, expected = ([u.loss - c for u, c in zip(side, clean, strict=True)] for side in zip(*pairs, strict=True))
    assert min(expected) > 0.1
    assert raised == pytest.approx(expected, rel=0.02)
    assert all(torch.isfinite(value).all() for mine, _ in pairs for value in mine.parameters.values())
