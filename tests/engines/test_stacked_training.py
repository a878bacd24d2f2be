"""Training on the stacked engine: parameter by parameter what the plain engine makes of the same tasks."""

import logging
import math
from dataclasses import replace

import pytest
import torch

from fedprophet.fast.kernels import Kernels
from fedprophet.threat import ThreatModel


@pytest.mark.parametrize("stage", [1, 2])
def test_a_stage_behind_frozen_modules(cascade, stage, stacked, assert_same_training):
    """Features of the frozen prefix, each client's own layers in it, and a head: all at once."""
    session, last = cascade.session, cascade.states[-1]
    state = replace([s for s in cascade.states if s.stage == stage][-1], round=last.round + 1)
    tasks = [replace(session.method._train_task(state, client, stage), threat=None) for client in range(6)]
    assert len(tasks[0].frozen) == stage
    for kernels in (Kernels(), Kernels(16)):
        assert_same_training(session, tasks, stacked(session, kernels=kernels))


def test_different_assignments_in_one_round(cascade, assert_same_training):
    session, state = cascade.session, replace(cascade.states[2], stage=0, round=9, perturbation=None)
    tasks = [session.method._train_task(state, client, client % 3) for client in range(6)]
    tasks = [replace(task, threat=None) for task in tasks]
    found = assert_same_training(session, tasks)
    sent = {update.client: set(update.parameters) for update in found}
    assert "heads/1.weight" in sent[1]
    assert "heads/1.weight" not in sent[0]
    assert sent[0] < sent[2] | {"heads/0.weight", "heads/0.bias"}


def test_gradients_of_heads_that_are_summed(cascade, stacked, assert_same_training):
    """Sums begin anew in every round, also in a plan that was used before; the last module has no head."""
    session, state = cascade.session, replace(cascade.states[2], stage=0, perturbation=None)
    engine = stacked(session)
    for number in (9, 10):
        tasks = [session.method._train_task(replace(state, round=number), k, k % 3) for k in range(6)]
        training = replace(tasks[0].training, iterations=4, summed_heads=True)
        summed = assert_same_training(session, [replace(t, threat=None, training=training) for t in tasks], engine)
    fresh = engine.map([replace(tasks[0], threat=None, training=replace(training, summed_heads=False))])
    assert not torch.allclose(next(iter(fresh)).parameters["heads/0.weight"], summed[0].parameters["heads/0.weight"])


def test_calibrated_training(cascade, stacked, assert_same_training, plans):
    """Clients of a ladder, each with its own label frequencies at its own exit."""
    session, state = cascade.session, replace(cascade.states[2], stage=0, perturbation=None, round=9)
    tasks = [replace(session.method._train_task(state, k, k % 3), threat=None, calibration=0.5) for k in range(6)]
    engine = stacked(session)
    losses = {update.client: update.loss for update in assert_same_training(session, tasks, engine)}
    assert any(len(plan.ladder.exits) > 1 for plan in plans)
    for update in engine.map([replace(task, calibration=0.0) for task in tasks]):
        assert abs(update.loss - losses[update.client]) > 0.05


def test_a_client_that_lacks_labels_is_calibrated(session_of, stacked, joint, assert_same_training):
    session = session_of({"method": "jfat", "shards.iid_fraction": 0.0})
    tasks = joint(session, clients=range(4), threat=None, calibration=0.5)
    for task in tasks:
        labels = session.population.client_data(task.client).train.labels
        assert len(labels.unique()) < 10
        prior = stacked(session)._job(task).prior
        expected = [math.log((int((labels == y).sum()) + 0.5) / (len(labels) + 5)) for y in range(10)]
        assert prior.tolist() == pytest.approx(expected, rel=1e-6)
    assert_same_training(session, tasks)


def test_a_kept_plan_takes_the_label_frequencies_of_other_clients(session_of, stacked, joint, same_tensors, plans):
    session = session_of({"method": "jfat", "train.warmup": 0})
    sizes = [len(session.population.client_data(client).train) for client in range(6)]
    same = [client for client in range(6) if sizes[client] == max(sizes, key=sizes.count)]
    half = len(same) // 2
    assert half
    engine, asked = stacked(session), []
    for number, clients in enumerate((same[:half], same[half : 2 * half]), start=1):
        asked = joint(session, number, clients=clients, calibration=1.0)
        found = {update.client: update for update in engine.map(asked)}
    assert len(plans) == 1
    for update in stacked(session).map(asked):
        assert same_tensors(update.parameters, found[update.client].parameters)
        assert update.loss == found[update.client].loss


def test_calibrated_and_other_tasks_are_groups_of_their_own(session_of, joint, assert_same_training, plans):
    session = session_of({"method": "jfat", "shards.kind": "iid", "population.clients": 10})
    tasks = joint(session, clients=range(6), threat=None)
    assert len({len(session.population.client_data(task.client).train) for task in tasks}) == 1
    # However many samples are counted beside a client's own, its row is its own.
    smoothing = (0.0, 1.0, 0.1, 0.0, 5.0, 1.0)
    assert_same_training(session, [replace(t, calibration=s) for t, s in zip(tasks, smoothing, strict=True)])
    assert sorted((plan.calibrated, plan.ladder.clients) for plan in plans) == [(False, 2), (True, 4)]


def test_steps_that_are_drawn_back(cascade, stacked, assert_same_training, plans):
    """To where each round began, the heads of all exits as well; a client's own norm layers go where they will."""
    session, engine = cascade.session, stacked(cascade.session)
    for number, start in ((9, cascade.states[2]), (10, cascade.states[0])):
        state = replace(start, stage=0, perturbation=None, round=number, stage_round=1)
        tasks = [session.method._train_task(state, k, k % 3) for k in range(6)]
        training = replace(tasks[0].training, iterations=4, proximal=3.0)
        drawn = assert_same_training(session, [replace(t, threat=None, training=training) for t in tasks], engine)
    assert any(len(plan.ladder.exits) > 1 for plan in plans)
    free = engine.map([replace(task, threat=None, training=replace(training, proximal=0.0)) for task in tasks])
    lengths = []
    for updates in (drawn, list(free)):
        moved = [value - tasks[u.client].parameters[n] for u in updates for n, value in u.parameters.items()]
        lengths.append(sum(float(each.square().sum()) for each in moved))
    assert lengths[0] < 0.7 * lengths[1]


def test_clients_that_train_ahead_are_carried_out_with_the_others(cascade, assert_same_training, plans):
    """Modules m … M_k differ from client to client (Section 6.3); all of them are one ladder."""
    session = cascade.session
    state = cascade.states[0]
    sizes = {client: len(session.population.client_data(client).train) for client in range(session.population.size)}
    same = [client for client in sizes if list(sizes.values()).count(sizes[client]) >= 4]
    ahead = dict(zip([client for client in same if sizes[client] == sizes[same[0]]], (1, 2, 0, 2), strict=False))
    assert len(ahead) == 4
    tasks = [replace(session.method._train_task(state, client, last), threat=None) for client, last in ahead.items()]
    assert_same_training(session, tasks)
    assert [plan.ladder.clients for plan in plans] == [4]
    assert len(plans[0].ladder.exits) == 3


def test_features_follow_a_clients_own_layers(play_cascade, stacked, assert_same_training):
    """The cached features of a frozen prefix are those of the client's own norm layers in it."""
    cascade = play_cascade()
    session = cascade.session
    state = replace(cascade.states[-1], round=cascade.states[-1].round + 3)
    (task,) = [replace(session.method._train_task(state, 0, 2), threat=None)]
    engine = stacked(session)
    assert_same_training(session, [task], engine)
    layers = session.engine.workspaces["backbone"].layers
    own = dict(layers.get("backbone", 0, task.timeline, task.round))
    own["features.1.running_mean"] = own["features.1.running_mean"] + 0.5
    layers.put("backbone", 0, task.round, own, task.timeline)
    assert_same_training(session, [replace(task, round=task.round + 1)], engine)


def test_training_changes_nothing_that_tasks_brought(session_of, stacked, joint):
    session = session_of({"method": "jfat"})
    tasks, engine = joint(session), stacked(session)
    before = {name: value.clone() for name, value in tasks[0].parameters.items()}
    for number in (1, 2):
        list(engine.map([replace(task, round=number) for task in tasks]))
    list(engine.map([tasks[0]]))  # a group of one: its stack could be a view
    assert all(torch.equal(before[name], value) for name, value in tasks[0].parameters.items())


def test_groups_have_clients_of_one_size(session_of, joint, assert_same_training, plans):
    session = session_of({"method": "jfat", "population.clients": 7})
    sizes = {k: len(session.population.client_data(k).train) for k in range(7)}
    assert len(set(sizes.values())) == 2
    assert_same_training(session, joint(session, clients=range(7), threat=None))
    expected = {size: list(sizes.values()).count(size) for size in sizes.values()}
    assert {plan.samples: plan.ladder.clients for plan in plans} == expected


def test_batches_of_two_sizes_and_several_passes(session_of, joint, assert_same_training):
    session = session_of({"method": "jfat", "train.batch": 80, "train.iterations": 7})
    assert_same_training(session, joint(session, threat=None))


def test_a_batch_of_a_single_sample_goes_to_the_plain_path(session_of, caplog, joint, assert_same_training):
    session = session_of({"method": "jfat", "population.clients": 7})
    sizes = [len(session.population.client_data(k).train) for k in range(7)]
    batch = max(sizes) - 1
    tasks = joint(session, clients=range(7), threat=None)
    tasks = [replace(t, training=replace(t.training, batch=batch), wants_local=True) for t in tasks]
    with caplog.at_level(logging.WARNING, "fedprophet"):
        found = assert_same_training(session, tasks)
    assert [r.getMessage() for r in caplog.records] == [
        "the GPU engine leaves this to the plain path: a batch of a single sample"
    ]
    exact = {u.client: u for u in session.engine.map(tasks)}
    for update in found:
        same = all(torch.equal(value, exact[update.client].parameters[n]) for n, value in update.parameters.items())
        assert same is (sizes[update.client] % batch == 1)


def test_own_layers_are_those_of_the_round_before(session_of, same_tensors, stacked, joint, paired):
    """As after a resume: a repeated task starts where the first try started."""
    session = session_of({"method": "jfat"})
    engine, tasks = stacked(session), joint(session)
    first, second = (paired(engine.map(tasks), engine.map(tasks)) for _ in range(2))
    for (a, b), (c, d) in zip(first, second, strict=True):
        assert same_tensors(a.parameters, b.parameters)
        assert same_tensors(c.parameters, d.parameters)
        assert same_tensors(a.parameters, c.parameters)
    later = paired(engine.map([replace(task, round=2) for task in tasks]), engine.map(tasks))
    assert not any(same_tensors(a.parameters, b.parameters) for a, b in later)


def test_a_client_that_diverges_leaves_the_others_alone(session_of, stacked, joint):
    session = session_of({"method": "jfat", "train.iterations": 3})
    tasks = joint(session, clients=(0, 1, 2))
    usual = {update.client: update for update in stacked(session).map(tasks)}
    spoilt = {
        **tasks[1].parameters,
        "features.3.weight": torch.full_like(tasks[1].parameters["features.3.weight"], 1e38),
    }
    later = [replace(task, round=2) for task in tasks]
    fresh = {update.client: update for update in stacked(session).map(later)}
    again = [later[0], replace(later[1], parameters=spoilt), later[2]]
    layers = session.engine.workspaces["backbone"].layers
    layers._clients.get(("backbone", 1)).versions.pop(2)
    found = {update.client: update for update in stacked(session).map(again)}
    assert math.isnan(found[1].loss)
    assert 2 not in layers._clients.get(("backbone", 1)).versions  # it keeps what it had
    assert 2 in layers._clients.get(("backbone", 0)).versions
    for client in (0, 2):
        assert found[client].loss == fresh[client].loss
        assert all(torch.equal(v, fresh[client].parameters[n]) for n, v in found[client].parameters.items())
    assert math.isfinite(usual[1].loss)


def test_layers_that_overflow_in_the_last_step_are_not_kept(session_of, stacked, joint):
    """The loss was still finite; it has to tell the server all the same."""
    session = session_of({"method": "jfat"})
    (task,) = joint(session, clients=(0,), threat=None)
    hyper = replace(task.training, iterations=1, learning_rate=3e38, weight_decay=1e3)
    for engine in (session.engine, stacked(session)):
        (update,) = engine.map([replace(task, training=hyper)])
        assert math.isnan(update.loss)
    assert session.layers.get("backbone", 0, task.timeline, 99) is None


def test_momentum_of_zero_and_no_decay(session_of, joint, assert_same_training):
    session = session_of({"method": "jfat", "train.momentum": 0.0, "train.weight_decay": 0.0})
    assert_same_training(session, joint(session, threat=None))


@pytest.mark.parametrize("kernels", [Kernels(), Kernels(16)], ids=["exact", "padded"])
def test_two_sets_of_statistics_follow_clean_and_attacked_batches(
    session_of, kernels, stacked, joint, assert_same_training
):
    session = session_of({"method": "fedrbn"})
    tasks = joint(session, adversarial_statistics=True)
    engine = stacked(session, kernels=kernels)
    assert_same_training(session, [replace(task, threat=None) for task in tasks], engine)  # nobody has a second set yet
    list(session.engine.map([replace(task, threat=session.world.image_threat(2)) for task in tasks]))
    later = [replace(task, round=2, threat=None) for task in tasks]
    found = assert_same_training(session, later, engine)
    local = found[0].local
    clean, attacked = local["features.1.running_mean"], local["adversarial.features.1.running_mean"]
    assert float((clean - attacked).norm()) > 1e-4 * float(clean.norm())  # the attack has moved one of them
    assert local["adversarial.features.1.num_batches_tracked"] == local["features.1.num_batches_tracked"] > 0


@pytest.mark.usefixtures("same_starts")
@pytest.mark.parametrize("calibration", [0.0, 0.1])
@pytest.mark.parametrize("run", ["learned", "learned_cnn3"])
def test_attacks_in_training_find_losses_as_high(run, stacked, paired, calibration, request, caplog):
    caplog.set_level(logging.WARNING, "fedprophet")
    learned = request.getfixturevalue(run)
    session, state = learned.session, replace(learned.states[-1], round=9)
    tasks = [replace(session.method.train_task(state, k), calibration=calibration) for k in range(6)]
    hyper = replace(tasks[0].training, iterations=4, learning_rate=1e-9)
    threat = ThreatModel("linf", 0.1, 0.04, 5, (0.0, 1.0))
    tasks = [replace(task, training=hyper, threat=threat) for task in tasks]
    clean = [u.loss for u in session.engine.map([replace(task, threat=None) for task in tasks])]
    pairs = paired(stacked(session).map(tasks), session.engine.map(tasks))
    raised = [mine.loss - floor for (mine, _), floor in zip(pairs, clean, strict=True)]
    expected = [theirs.loss - floor for (_, theirs), floor in zip(pairs, clean, strict=True)]
    assert min(expected) > 0.2
    assert raised == pytest.approx(expected, rel=0.02)
    assert not caplog.records  # nothing was left to the plain path


@pytest.mark.usefixtures("same_starts")
def test_calibrated_attacks_at_the_exits_of_a_ladder(cascade, stacked, paired):
    """Heads have a kernel of their own for the attack's gradient."""
    session, state = cascade.session, replace(cascade.states[-1], stage=0, perturbation=None, round=9)
    tasks = [replace(session.method._train_task(state, k, k % 3), calibration=0.1) for k in range(6)]
    hyper = replace(tasks[0].training, iterations=4, learning_rate=1e-9)
    tasks = [replace(t, training=hyper, threat=ThreatModel("linf", 0.2, 0.05, 5, (0.0, 1.0))) for t in tasks]
    clean = [u.loss for u in session.engine.map([replace(task, threat=None) for task in tasks])]
    pairs = paired(stacked(session).map(tasks), session.engine.map(tasks))
    raised, expected = ([u.loss - c for u, c in zip(side, clean, strict=True)] for side in zip(*pairs, strict=True))
    assert min(expected) > 0.01
    assert raised == pytest.approx(expected, rel=0.02)


def test_moved_images(session_of, joint, assert_same_training):
    """Images move by the same offsets on both engines."""
    usual, moved = (session_of({"method": "jfat", "data.shift": value}) for value in (0, 2))
    before = {update.client: update for update in usual.engine.map(joint(usual, threat=None))}
    for update in assert_same_training(moved, joint(moved, threat=None)):
        assert update.samples == before[update.client].samples
        assert abs(update.loss - before[update.client].loss) > 1e-3


def test_features_of_moved_images(cascade, stacked, assert_same_training, monkeypatch):
    """Behind frozen modules, where features would be kept from round to round, each round has its own."""
    session, last = cascade.session, cascade.states[-1]
    monkeypatch.setattr(session.population, "_shift", 2)
    engine, losses = stacked(session), []
    for number in (last.round + 1, last.round + 2):
        tasks = [session.method._train_task(replace(last, round=number), client, 2) for client in range(6)]
        still = replace(tasks[0].training, learning_rate=1e-9)
        tasks = [replace(task, threat=None, training=still) for task in tasks]
        losses.append([update.loss for update in assert_same_training(session, tasks, engine)])
    assert all(abs(first - second) > 1e-3 for first, second in zip(*losses, strict=True))


def test_mirror_images(session_of, joint, assert_same_training):
    """Batches are drawn from twice as many samples, from the same ones on both engines."""
    plain, mirrored = (session_of({"method": "jfat", "data.mirror": value}) for value in (False, True))
    usual = {update.client: update for update in plain.engine.map(joint(plain, threat=None))}
    for update in assert_same_training(mirrored, joint(mirrored, threat=None)):
        before = usual[update.client]
        assert (update.samples, update.weight) == (2 * before.samples, before.weight)
        assert abs(update.loss - before.loss) > 1e-3
