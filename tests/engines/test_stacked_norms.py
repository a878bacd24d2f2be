"""Norm layers on the stacked engine, wherever they live: shared, in part, fixed, or sent for who has none."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedprophet.cascade.norms import norm_names
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import FrozenModule
from fedprophet.runs.session import Session
from fedprophet.threat import ThreatModel

COUNTER = "num_batches_tracked"
SHARING = ("shared", "frozen", "statistics-local")
EVEN = {"shards.kind": "iid", "population.clients": 10}


def unlike(tensors: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return norm layers drawn anew, so that nothing is 0 or 1 by chance."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, value in tensors.items():
        around = 1.0 if name.endswith(("weight", "running_var")) else 0.0
        drawn = around + 0.5 * torch.rand(value.shape, generator=draw)
        found[name] = torch.full_like(value, 7 + seed) if name.endswith(COUNTER) else drawn
    return found


def stirred(session: Session, state: Any, seed: int = 0) -> Any:
    """Return a state whose shared norm layers are drawn anew."""
    names = [name for name in norm_names(session.world.chain) if name in state.model]
    return replace(state, model={**state.model, **unlike({name: state.model[name] for name in names}, seed)})


def frozen_tasks(session: Session, start: Any, stage: int, clients: tuple[int, ...], seed: int = 0) -> list[Train]:
    """Return the training of a module behind frozen ones, the norm layers of all drawn anew as far as they are shared.

    Clients have no layers of their own by then.
    """
    method, modules = session.method, session.world.modules
    state = stirred(session, replace(start, round=1, stage_round=1), seed)
    parts = [(m.first, m.last, method._parameters(state, m.first, m.last)) for m in modules[:stage]]
    frozen = tuple(FrozenModule(first, last, session.world.frozen.add(part)) for first, last, part in parts)
    tasks = [method._train_task(replace(state, stage=stage), client, stage) for client in clients]
    return [replace(task, threat=None, frozen=frozen) for task in tasks]


# Shared.


@pytest.mark.parametrize("layers", SHARING)
@pytest.mark.parametrize("model", ["vgg-small", "resnet10"])
def test_answers_have_the_norm_layers_that_are_shared(
    session_of, layers, model, stacked, joint, assert_same_training, caplog
):
    caplog.set_level(logging.WARNING, "fedprophet")
    session = session_of({"method": "jfat", "norm.layers": layers, "model.name": model, "train.iterations": 2})
    chain, engine = session.world.chain, stacked(session)
    model = stirred(session, session.method.initial()).model
    for number in (1, 2):
        tasks = joint(session, number, clients=(0, 1, 2), threat=None, parameters=model)
        found = assert_same_training(session, tasks, engine, noise=1e-5)
        for update in found:
            assert set(update.parameters) == set(chain.shared())
            assert set(update.local) == set(chain.local())
            counts = {v.item() for n, v in {**update.parameters, **update.local}.items() if n.endswith(COUNTER)}
            # Those that are frozen are so from the second round of three on.
            steps = 0 if layers == "frozen" and number == 2 else 2
            assert counts == {2 * number if layers == "statistics-local" else 7 + steps}
            stored = session.layers.get("backbone", update.client, tasks[0].timeline, number + 1)
            assert (stored is not None) is bool(chain.local())
    assert not caplog.records


@pytest.mark.parametrize("model", ["vgg-small", "resnet10"])
def test_statistics_that_are_fixed_stay(session_of, model, joint, assert_same_training):
    session = session_of({"method": "jfat", "norm.layers": "frozen", "model.name": model})
    state = stirred(session, session.method.initial())
    tasks = joint(session, clients=(0, 1, 2), threat=None, parameters=state.model)
    training = replace(tasks[0].training, iterations=3, learning_rate=0.01, weight_decay=0.0, fixed_statistics=True)
    for update in assert_same_training(session, [replace(task, training=training) for task in tasks]):
        for name, value in update.parameters.items():
            stays = name.endswith((COUNTER, "running_mean", "running_var"))
            assert torch.equal(value, state.model[name]) is stays, name


def test_the_second_set_of_statistics_is_fixed_as_well(session_of, joint, assert_same_training):
    session = session_of({"method": "fedrbn"})
    tasks = joint(session, clients=(0, 1), threat=None, adversarial_statistics=True)
    tasks = [replace(task, training=replace(task.training, fixed_statistics=True)) for task in tasks]
    for update in assert_same_training(session, tasks):
        assert {float(v) for n, v in update.local.items() if n.endswith(COUNTER)} == {0.0}
        assert {float(v.norm()) for n, v in update.local.items() if n.endswith("running_mean")} == {0.0}


def test_a_ladder_that_shares_norm_layers(session_of, assert_same_training, plans):
    """Clients that train ahead send the norm layers of all that they trained."""
    session = session_of({"norm.layers": "shared", "train.iterations": 3, **EVEN})
    state = stirred(session, replace(session.method.initial(), round=1, stage_round=1))
    tasks = [session.method._train_task(state, client, client % 3) for client in range(6)]
    assert {task.threat for task in tasks} == {None}
    for update in assert_same_training(session, tasks):
        last = session.world.modules[update.client % 3].last
        heads = {f"heads/{update.client % 3}.{n}" for n in ("weight", "bias")} if update.client % 3 < 2 else set()
        assert set(update.parameters) == {*session.world.chain.shared(0, last), *heads}
    assert [len(plan.ladder.exits) for plan in plans] == [3]


@pytest.mark.parametrize("layers", SHARING)
def test_features_are_those_of_the_frozen_modules_own_statistics(session_of, layers, stacked, assert_same_training):
    session = session_of({"norm.layers": layers})
    engine, start = stacked(session), session.method.initial()
    losses = set()
    for seed in (0, 1):
        found = assert_same_training(session, frozen_tasks(session, start, 2, (0, 1, 2), seed), engine)
        assert "features.1.weight" not in found[0].parameters
        losses |= {update.loss for update in found}
    (task,) = frozen_tasks(session, start, 2, (0,), 1)
    inside = {name: value for part in task.frozen for name, value in session.world.frozen[part.digest].items()}
    chain, images = session.world.chain, session.population.client_data(0).train
    chain.load({**session.world.initial_layers, **inside})
    with torch.no_grad(), chain.mode(0, task.first, training=False):
        expected = chain.run(images.fetch(torch.arange(len(images))), 0, task.first)
    (features,) = engine._read([engine._job(task)])
    torch.testing.assert_close(features.permute(0, 3, 1, 2), expected, rtol=1e-4, atol=1e-5)
    assert len(losses) == 6


@pytest.mark.parametrize("layers", SHARING)
def test_sub_networks_that_share_norm_layers(session_of, layers, stacked, partial_tasks, assert_same_training):
    session = session_of({"method": "heterofl", "norm.layers": layers, **EVEN, "model.options": {"width": 8}})
    state = stirred(session, session.method.initial())
    session.method.initial = lambda: state
    engine = stacked(session)
    for number, widths in enumerate(((0.25, 1.0, 0.6), (1.0, 0.5, 0.25)), start=1):
        tasks = partial_tasks(session, widths, number, threat=None)
        found = {update.client: update for update in assert_same_training(session, tasks, engine, noise=1e-5)}
        for task in tasks:
            update = found[task.client]
            assert {n: v.shape for n, v in update.parameters.items()} == {
                n: v.shape for n, v in task.parameters.items()
            }
            if layers != "statistics-local":
                steps = 0 if layers == "frozen" and number == 2 else 2
                assert {v.item() for n, v in update.parameters.items() if n.endswith(COUNTER)} == {7 + steps}
                assert session.layers.get("backbone", task.client, task.timeline, 9) is None


@pytest.mark.parametrize("layers", SHARING)
def test_evaluation_with_shared_norm_layers(session_of, layers, evaluations, assert_same_evaluation):
    session = session_of({"method": "jfat", "norm.layers": layers})
    state = stirred(session, session.method.initial())
    threat = ThreatModel("linf", 0.02, 0.01, 2, (0.0, 1.0))
    assert_same_evaluation(session, evaluations(session, state, range(6), threat))


# Sent for clients that have none.


def test_a_client_without_layers_starts_with_those_that_were_sent(
    session_of, stacked, joint, assert_same_training, evaluations, assert_same_evaluation, paired, same_tensors
):
    session = session_of({"method": "jfat"})
    starting = unlike(session.world.initial_layers)
    tasks = joint(session, clients=(0, 1), threat=None)
    plain = {update.client: update for update in stacked(session).map(tasks)}
    later = session_of({"method": "jfat"})
    for update in assert_same_training(later, [replace(task, starting=starting) for task in tasks]):
        assert update.loss != plain[update.client].loss
        assert update.local[f"features.1.{COUNTER}"] == 7 + tasks[0].training.iterations
    # Those of round 1 are their own now; only the third client has none.
    second = joint(later, 2, clients=(0, 1, 2), threat=None)
    sent = [replace(task, starting=unlike(session.world.initial_layers, 1)) for task in second]
    for engine in (later.engine, stacked(later)):
        pairs = paired(engine.map(second), engine.map(sent))
        assert [same_tensors(one.parameters, other.parameters) for one, other in pairs] == [True, True, False]
    state = replace(later.method.initial(), round=2)
    asked = evaluations(later, state, range(6), ThreatModel("linf", 0.02, 0.01, 2, (0.0, 1.0)), starting=starting)
    assert_same_evaluation(later, asked)
    without = stacked(later).map([replace(task, starting={}) for task in asked])
    same = [a.clean == b.clean for a, b in paired(stacked(later).map(asked), without)]
    assert same[:3] == [True] * 3
    assert not all(same)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_features_follow_the_layers_that_were_sent(session_of, engine, stacked):
    """Both engines keep features; those of another start must not be among them."""
    session, fresh = session_of(), session_of()
    used = stacked(session) if engine == "stacked" else session.engine
    (tasks, again) = (frozen_tasks(each, each.method.initial(), 1, (0, 1)) for each in (session, fresh))
    losses = []
    for seed in (1, 2, 1):
        starting = unlike(session.world.initial_layers, seed)
        losses.append([update.loss for update in used.map([replace(task, starting=starting) for task in tasks])])
        fresh.features.clear()
        expected = fresh.engine.map([replace(task, starting=starting) for task in again])
        assert losses[-1] == pytest.approx([update.loss for update in expected], rel=1e-5)
    assert losses[0] == losses[2]
    assert losses[0] != losses[1]


def test_a_sub_network_starts_with_its_channels_of_the_layers_that_were_sent(
    session_of, partial_tasks, assert_same_training
):
    session = session_of({"method": "heterofl", **EVEN, "model.options": {"width": 8}})
    starting = unlike(session.world.initial_layers)
    tasks = partial_tasks(session, (0.3, 1.0, 0.6), threat=None, starting=starting)
    assert_same_training(session, tasks, noise=1e-5)
    own = session.layers.get("backbone", 0, tasks[0].timeline, 2)
    last = "features.1.running_mean"
    kept = len(tasks[0].kept_channels["features.0"])
    assert 0 < kept < len(own[last])
    assert torch.equal(own[last][kept:], starting[last][kept:])
    assert not torch.equal(own[last][:kept], starting[last][:kept])
