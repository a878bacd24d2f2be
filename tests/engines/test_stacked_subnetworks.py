"""Sub-networks of different widths on the stacked engine: grouped, padded, and as good as alone."""

import math
from dataclasses import fields, replace

import pytest
import torch

from fedprophet.engines.stack_job import AtomSpan
from fedprophet.fast import narrow
from fedprophet.fast.kernels import Kernels
from fedprophet.messages.tasks import Evaluate, ModelTask, Train
from fedprophet.messages.values import BACKBONE
from fedprophet.server.coordinator import play_round
from fedprophet.threat import ThreatModel

EVEN = {"shards.kind": "iid", "population.clients": 10}
"""The first six clients own as many samples each, so that nothing but widths tells them apart."""
SHARES = (0.25, 1.0, 0.6, 0.5, 0.99, 0.05)


@pytest.mark.parametrize(
    ("method", "apart", "kernels", "groups"),
    [
        pytest.param("heterofl", 0.0, Kernels(), [1, 1, 1, 1, 2], marks=pytest.mark.slow),  # each width apart
        ("heterofl", 1.0, Kernels(16), [2, 4]),  # 2 + 4 · (5/8)² + 2 is less than 2 + 2 · (5/8)² + 2 · (2/8)² + 3
        pytest.param("heterofl", 100.0, Kernels(), [6], marks=pytest.mark.slow),
        ("feddrop", 1.0, Kernels(), [2, 4]),
        pytest.param("fedrolex", 100.0, Kernels(16), [6], marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sub_networks_of_any_width(
    session_of, monkeypatch, plans, method, apart, kernels, groups, stacked, partial_tasks, assert_same_training
):
    """Two rounds: a plan is used again for other channels, and clients begin with what they kept of the first."""
    session = session_of({"method": method, **EVEN, "model.options": {"width": 8}})
    engine = stacked(session, kernels=kernels)
    whole = engine._fusing.program(AtomSpan(BACKBONE, 0, len(session.world.chain)))
    monkeypatch.setattr(narrow, "APART", apart * narrow.work(whole))
    for number, widths in enumerate((SHARES, SHARES[::-1]), start=1):
        tasks = partial_tasks(session, widths, number, threat=None)
        assert len({tuple(map(len, task.kept_channels.values())) for task in tasks}) == len(SHARES)
        # One channel of eight: whatever a layer gets is multiplied by eight, noise as well.
        assert_same_training(session, tasks, engine, noise=1e-5)
    assert sorted(plan.ladder.clients for plan in plans) == groups


@pytest.mark.parametrize("changes", [{"proximal": 5.0}, {"proximal": 5.0, "fixed_statistics": True}], ids=str)
@pytest.mark.parametrize("model", ["vgg-small", "resnet10"])
def test_sub_networks_that_are_drawn_back(session_of, model, changes, stacked, partial_tasks, assert_same_training):
    """What a stack holds is multiplied by a client's factor s, and so is what it is drawn back to: s · μ (w − w₀)."""
    session = session_of({"method": "heterofl", **EVEN, "model.name": model, "model.options": {"width": 8}})
    engine = stacked(session)
    for number, widths in enumerate(((0.3, 1.0, 0.6), (1.0, 0.6, 0.3)), start=1):
        tasks = partial_tasks(session, widths, number, threat=None, calibration=1.0)
        training = replace(tasks[0].training, iterations=2, learning_rate=0.02, **changes)
        tasks = [replace(task, training=training) for task in tasks]
        assert any(stacked(session)._job(task).factors for task in tasks)
        assert_same_training(session, tasks, engine, noise=1e-5)


def test_sub_networks_beside_whole_ones(session_of, joint, partial_tasks, assert_same_training):
    """A task that names no channels trains the model itself, in a group of its own."""
    session = session_of({"method": "heterofl", **EVEN})
    whole = joint(session, clients=(0, 1), threat=None)
    cut = partial_tasks(session, (0.3, 0.7), clients=(2, 3), threat=None)
    assert_same_training(session, [whole[0], *cut, whole[1]])


def test_plans_of_sub_networks_leave_no_trace(
    session_of, monkeypatch, plans, same_tensors, stacked, partial_tasks, paired
):
    """Attacked rounds on one engine, and the last of them on a fresh one: the same bytes."""
    session = session_of({"method": "feddrop", **EVEN, "train.warmup": 0})
    used = stacked(session)
    for number, widths in enumerate(((1.0, 0.9, 0.9), (0.5, 1.0, 0.25)), start=1):
        list(used.map(partial_tasks(session, widths, number)))
    made = len(plans)
    tasks = partial_tasks(session, (0.25, 1.0, 0.5), 3)
    found = list(used.map(tasks))
    assert len(plans) == made > 0
    for mine, fresh in paired(found, stacked(session).map(tasks)):
        assert same_tensors(mine.parameters, fresh.parameters)
        assert mine.loss == fresh.loss


def test_a_sub_network_does_not_depend_on_who_is_beside_it(
    session_of, monkeypatch, stacked, partial_tasks, paired, close
):
    """Alone at its own width and in a stack of the full one, attacked: the same draws, so the same numbers."""
    session = session_of({"method": "feddrop", **EVEN, "train.warmup": 0, "model.options": {"width": 3}})
    tasks = partial_tasks(session, (0.4, 1.0, 0.7))
    tasks = [replace(task, training=replace(task.training, iterations=1)) for task in tasks]
    together = list(stacked(session).map(tasks))
    alone = [update for task in tasks for update in stacked(session).map([task])]
    for a, b in paired(together, alone):
        assert a.loss == pytest.approx(b.loss, rel=1e-4)
        assert all(close(a.parameters[name], b.parameters[name], 1e-3) for name in a.parameters)


@pytest.mark.slow
@pytest.mark.usefixtures("same_starts")
def test_attacks_on_sub_networks_find_losses_as_high(session_of, stacked, partial_tasks, paired):
    changes = {"train.iterations": 12, "train.batch": 32, "rounds": 4, "train.warmup": 3, "model.options": {"width": 6}}
    session = session_of({"method": "heterofl", **EVEN, **changes})
    state = session.method.initial()
    for _ in range(3):
        state, _ = play_round(session.method.round(state), session.engine)
    session.method.initial = lambda: state
    tasks = partial_tasks(session, (0.3, 0.6, 1.0, 0.8), round=9)
    hyper = replace(tasks[0].training, iterations=4, learning_rate=1e-9)
    threat = ThreatModel("linf", 0.1, 0.04, 5, (0.0, 1.0))
    tasks = [replace(task, training=hyper, threat=threat) for task in tasks]
    clean = sum(u.loss for u in session.engine.map([replace(task, threat=None) for task in tasks]))
    pairs = paired(stacked(session).map(tasks), session.engine.map(tasks))
    mine, theirs = (sum(update.loss for update in side) - clean for side in zip(*pairs, strict=True))
    assert theirs > 1.0
    # Apart only where a gradient is so small that its sign is noise: by 0.3 % in the worst of eight seeds.
    assert mine == pytest.approx(theirs, rel=0.02)


def as_evaluation(task: Train, threat: ThreatModel) -> Evaluate:
    same = {each.name: getattr(task, each.name) for each in fields(ModelTask)}
    return Evaluate(**same, threat=threat, kept_channels=task.kept_channels)


def test_a_sub_network_is_evaluated_as_such(session_of, partial_tasks, assert_same_evaluation):
    session = session_of({"method": "fedrolex", **EVEN})
    trained = partial_tasks(session, (0.3, 0.6, 1.0), threat=None)
    list(session.engine.map(trained))
    threat = ThreatModel("linf", 0.02, 0.01, 2, (0.0, 1.0))
    assert_same_evaluation(session, [as_evaluation(task, threat) for task in trained])


def test_a_sub_network_that_diverges_leaves_the_others_alone(session_of, same_tensors, stacked, partial_tasks):
    session = session_of({"method": "heterofl", **EVEN})
    tasks = partial_tasks(session, (0.9, 0.9, 0.95))
    usual = {update.client: update for update in stacked(session).map(tasks)}
    layers = session.engine.workspaces["backbone"].layers
    layers._clients.get(("backbone", 1)).versions.pop(1)
    weight = tasks[1].parameters["features.3.weight"]
    spoilt = {**tasks[1].parameters, "features.3.weight": torch.full_like(weight, 1e38)}
    again = [tasks[0], replace(tasks[1], parameters=spoilt), tasks[2]]
    found = {update.client: update for update in stacked(session).map(again)}
    assert math.isnan(found[1].loss)
    assert 1 not in layers._clients.get(("backbone", 1)).versions
    for client in (0, 2):
        assert found[client].loss == usual[client].loss
        assert same_tensors(found[client].parameters, usual[client].parameters)
