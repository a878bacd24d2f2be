"""The stacked engine against the plain one: the same tasks, the same answers, on groups of clients of any kind."""

import logging
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedprophet.cascade.atoms import explicit_chain
from fedprophet.client.task import SERVER, ClientTask, Resources
from fedprophet.data.dataset import from_tensors
from fedprophet.engines import stacked as stacked_module
from fedprophet.engines.stacked import Limits, StackedEngine, _sizes
from fedprophet.fast import narrow
from fedprophet.fast.kernels import TorchKernels
from fedprophet.fast.narrow import WHOLE
from fedprophet.fast.rounds import Backend, TrainingPlan, uncaptured
from fedprophet.methods import METHODS
from fedprophet.models.normalize import Normalize
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import hold
from fedprophet.threat import ThreatModel

PLENTY = 10**9
ROOMY = Limits(PLENTY, PLENTY)
PARTIAL = ("heterofl", "feddrop", "fedrolex")


def stacked(session, limits=ROOMY, kernels=None) -> StackedEngine:
    """Return the stacked engine on the CPU, on the workspaces of a session."""
    backend = Backend(torch.device("cpu"), kernels or TorchKernels(), torch.float32, uncaptured)
    return StackedEngine(session.population, session.engine._workspaces, session.budget, backend, limits)


@pytest.fixture(scope="module")
def settings(tiny):
    """Return a configuration whose session has the plain engine, wherever the tests run."""
    return lambda changes=None: tiny({"engine": "plain", "population.cohort": 3, **(changes or {})})


@pytest.fixture(scope="module")
def session_of(settings):
    return lambda changes=None: assemble(settings(changes))


@pytest.fixture(scope="module")
def cascade(settings, play_in_memory):
    """A run of FedProphet that has come to its second module, played on the plain engine."""
    changes = {"rounds": 2, "train.warmup": 1, "convergence.patience": 1}
    played = play_in_memory(settings(changes), rounds=5)
    assert played.states[-1].stage == 2
    return played


def joint(session, round=1, clients=(0, 1, 2, 3), **changes):
    """Return the training tasks of jFAT in a round."""
    state = replace(session.method.initial(), round=round)
    return [replace(session.method.train_task(state, client), **changes) for client in clients]


def paired(one, other):
    """Return the updates of two engines side by side; both must have answered the same tasks."""
    mine, theirs = ({(u.client, u.number): u for u in updates} for updates in (one, other))
    assert set(mine) == set(theirs)
    return [(mine[key], theirs[key]) for key in sorted(mine)]


def close(found, expected, tolerance=1e-4, noise=1e-6) -> bool:
    """Whether two tensors are equal to 1e-4 relative. A convolution's bias before a batch norm is nothing but noise."""
    return float((found - expected).norm()) <= tolerance * float(expected.norm()) + noise


def assert_same_training(session, tasks, engine=None, tolerance=1e-4, noise=1e-6):
    """Train on both engines; compare parameter by parameter what comes back and what clients keep."""
    tasks = [replace(task, wants_local=True) for task in tasks]

    def assert_same_tensors(one, other):
        assert set(one) == set(other)
        for name in other:
            assert one[name].shape == other[name].shape
            assert one[name].dtype == other[name].dtype
            assert one[name].is_contiguous()
            if name.endswith("num_batches_tracked"):
                assert one[name] == other[name]
            else:
                assert close(one[name], other[name], tolerance, noise), name

    def trained(engine):
        updates = list(engine.map(tasks))
        return updates, [session.layers.get(t.architecture, t.client, t.timeline, t.round + 1) for t in tasks]

    (expected, plain_layers), (found, layers) = trained(session.engine), trained(engine or stacked(session))
    for mine, theirs in paired(found, expected):
        assert (mine.kind, mine.round, mine.weight) == (theirs.kind, theirs.round, theirs.weight)
        assert mine.metrics["samples"] == theirs.metrics["samples"]
        assert mine.metrics["loss"] == pytest.approx(theirs.metrics["loss"], rel=1e-5)
        assert_same_tensors(mine.parameters, theirs.parameters)
        assert_same_tensors(mine.local, theirs.local)
    for mine, theirs in zip(layers, plain_layers, strict=True):
        assert_same_tensors(mine, theirs)
    return found


# Training.


@pytest.mark.parametrize("kernels", [TorchKernels(), TorchKernels(16)], ids=["exact", "padded"])
@pytest.mark.parametrize("model", ["vgg-small", "resnet10"])
@pytest.mark.parametrize("method", ["jfat", "fedprophet", *PARTIAL])
def test_rounds_without_an_attack_equal_the_plain_engines(session_of, method, model, kernels, caplog):
    caplog.set_level(logging.WARNING, "fedprophet")
    changes = {"method": method, "model.name": model, "memory.budget": "50%"}
    # In a narrow network a ReLU that rounding switches on or off is seen by everything behind it: one step is compared.
    changes |= {"rounds": 4, "train.warmup": 3, "train.iterations": 1 if method in PARTIAL else 3}
    ends = []
    for fast in (False, True):
        session = session_of(changes)
        state, engine = session.method.initial(), stacked(session, kernels=kernels) if fast else session.engine
        records = []
        for _ in range(2):
            state, record = hold(session.method.round(state), engine)
            records.append(record)
        ends.append((state, records))
    (plain, plain_records), (fast, fast_records) = ends
    for one, other in zip(plain_records, fast_records, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["clean"] == one["clean"]
        assert other["times"] == one["times"]
        assert other.get("widths") == one.get("widths")
        assert other["dropped"] == one["dropped"] == {}
    assert not caplog.records  # nothing was left to the plain path
    start = session.method.initial()
    for name in plain.model:
        assert close(fast.model[name], plain.model[name]), name
    first = next(name for name in start.model if name.endswith("weight"))
    assert not torch.equal(fast.model[first], start.model[first])


@pytest.mark.parametrize("stage", [1, 2])
def test_a_stage_behind_frozen_modules(cascade, stage):
    """Features of the frozen prefix, each client's own layers in it, and a head: all at once."""
    session, last = cascade.session, cascade.states[-1]
    state = replace([s for s in cascade.states if s.stage == stage][-1], round=last.round + 1)
    tasks = [replace(session.method._train_task(state, client, stage), threat=None) for client in range(6)]
    assert len(tasks[0].frozen) == stage
    for kernels in (TorchKernels(), TorchKernels(16)):
        assert_same_training(session, tasks, stacked(session, kernels=kernels))


def test_features_that_are_driven_out_while_others_are_made(cascade):
    session, last = cascade.session, cascade.states[-1]
    state = replace([s for s in cascade.states if s.stage == 1][-1], round=last.round + 1)
    tasks = [replace(session.method._train_task(state, client, 1), threat=None) for client in range(6)]
    engine = stacked(session, Limits(PLENTY, 300_000))
    list(engine.map(tasks[3:]))
    features = engine._features(engine._jobs(tasks[:1], WHOLE))[0]
    assert engine._inputs.nbytes <= 300_000 < 6 * features.nbytes
    assert_same_training(session, tasks, engine)


def test_different_assignments_in_one_round(cascade):
    session, state = cascade.session, replace(cascade.states[2], stage=0, round=9, perturbation=None)
    tasks = [session.method._train_task(state, client, client % 3) for client in range(6)]
    tasks = [replace(task, threat=None) for task in tasks]
    found = assert_same_training(session, tasks)
    sent = {update.client: set(update.parameters) for update in found}
    assert "heads.1.weight" in sent[1]
    assert "heads.1.weight" not in sent[0]
    assert sent[0] < sent[2] | {"heads.0.weight", "heads.0.bias"}


def test_training_changes_nothing_that_tasks_brought(session_of):
    session = session_of({"method": "jfat"})
    tasks, engine = joint(session), stacked(session)
    before = {name: value.clone() for name, value in tasks[0].parameters.items()}
    for number in (1, 2):
        list(engine.map([replace(task, round=number) for task in tasks]))
    list(engine.map([tasks[0]]))  # a group of one: its stack could be a view
    assert all(torch.equal(before[name], value) for name, value in tasks[0].parameters.items())


def test_groups_have_clients_of_one_size(session_of, monkeypatch):
    session = session_of({"method": "jfat", "population.clients": 7})
    sizes = {k: len(session.population.client_data(k).train) for k in range(7)}
    assert len(set(sizes.values())) == 2
    made = []
    real = TrainingPlan.__post_init__
    monkeypatch.setattr(TrainingPlan, "__post_init__", lambda self: (made.append(self), real(self))[1])
    assert_same_training(session, joint(session, clients=range(7), threat=None))
    expected = {size: list(sizes.values()).count(size) for size in sizes.values()}
    assert {plan.samples: plan.ladder.clients for plan in made} == expected


def test_batches_of_two_sizes_and_several_passes(session_of):
    session = session_of({"method": "jfat", "train.batch": 80, "train.iterations": 7})
    assert_same_training(session, joint(session, threat=None))


@pytest.mark.parametrize(
    ("samples", "batch", "iterations", "expected"),
    [
        (10, 4, 5, {4, 2}),  # 4, 4, 2, 4, 4
        (10, 4, 2, {4}),
        (10, 4, 3, {4, 2}),
        (8, 4, 9, {4}),
        (3, 4, 1, {3}),
        (9, 4, 2, {4}),
        (9, 4, 3, {4, 1}),
        (1, 1, 1, {1}),
    ],
)
def test_the_sizes_of_batches(session_of, samples, batch, iterations, expected):
    from fedprophet.client.trainer import batches

    hyper = replace(joint(session_of({"method": "jfat"}))[0].training, batch=batch, iterations=iterations)
    task = ClientTask("train", 1, 0, 0, training=hyper)
    assert _sizes(task, samples) == expected == {len(b) for b in batches(samples, batch, iterations, task)}


def test_a_batch_of_a_single_sample_goes_to_the_plain_path(session_of, caplog):
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


def test_own_layers_are_those_of_the_round_before(session_of, same_tensors):
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


def test_draws_depend_on_nobody_else(session_of, same_tensors):
    """In any order, in groups of any size: the same numbers, attacked as well."""
    session = session_of({"method": "jfat", "model.options": {"width": 2}})
    tasks = joint(session, clients=(0, 1, 2, 3, 4))
    sizes = {len(session.population.client_data(k).train) for k in range(5)}
    whole = list(stacked(session).map(tasks))
    one = stacked(session)._activations(tasks[0], max(sizes))
    single = list(stacked(session, Limits(one, PLENTY)).map(tasks))
    backwards = list(stacked(session).map(tasks[::-1]))
    for a, b in (*paired(whole, single), *paired(whole, backwards)):
        assert a.metrics["loss"] == pytest.approx(b.metrics["loss"], rel=1e-6)
        assert all(close(a.parameters[name], b.parameters[name], 1e-5) for name in a.parameters)
    assert len({update.metrics["loss"] for update in whole}) == 5


def test_chunks_are_of_one_size(session_of):
    session = session_of({"method": "jfat"})
    tasks = joint(session, clients=range(6), threat=None)
    one = stacked(session)._activations(tasks[0], 1000)
    chunks = list(stacked(session, Limits(4 * one, PLENTY))._chunks(tasks))
    assert [len(chunk) for chunk in chunks] == [3, 3]
    assert [task.client for chunk in chunks for task in chunk] == list(range(6))


def test_a_client_that_does_not_fit_goes_to_the_plain_path(session_of, caplog):
    session = session_of({"method": "jfat"})
    tasks = [session.method.evaluation_task(session.method.initial(), 0, None)]
    with caplog.at_level(logging.WARNING, "fedprophet"):
        (update,) = stacked(session, Limits(1, PLENTY)).map(tasks)
    assert update == next(iter(session.engine.map(tasks)))
    assert "samples of one client at once, which need more memory than there is" in caplog.text


def test_a_client_that_diverges_leaves_the_others_alone(session_of):
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
    layers = session.engine._workspaces["backbone"].layers
    layers._clients[("backbone", 1)].versions.pop(2)
    found = {update.client: update for update in stacked(session).map(again)}
    assert math.isnan(found[1].metrics["loss"])
    assert 2 not in layers._clients[("backbone", 1)].versions  # it keeps what it had
    assert 2 in layers._clients[("backbone", 0)].versions
    for client in (0, 2):
        assert found[client].metrics == fresh[client].metrics
        assert all(torch.equal(v, fresh[client].parameters[n]) for n, v in found[client].parameters.items())
    assert math.isfinite(usual[1].metrics["loss"])


def test_layers_that_overflow_in_the_last_step_are_not_kept(session_of):
    """The loss was still finite; it has to tell the server all the same."""
    session = session_of({"method": "jfat"})
    (task,) = joint(session, clients=(0,), threat=None)
    hyper = replace(task.training, iterations=1, learning_rate=3e38, weight_decay=1e3)
    for engine in (session.engine, stacked(session)):
        (update,) = engine.map([replace(task, training=hyper)])
        assert math.isnan(update.metrics["loss"])
    assert session.layers.get("backbone", 0, task.timeline, 99) is None


def test_momentum_of_zero_and_no_decay(session_of):
    session = session_of({"method": "jfat", "train.momentum": 0.0, "train.weight_decay": 0.0})
    assert_same_training(session, joint(session, threat=None))


# Evaluation and measuring.


def evaluations(session, state, clients, threat, **changes):
    return [replace(session.method.evaluation_task(state, client, threat), **changes) for client in clients]


def assert_same_evaluation(session, tasks, engine=None):
    for mine, theirs in paired((engine or stacked(session)).map(tasks), session.engine.map(tasks)):
        assert (mine.weight, mine.kind, mine.round) == (theirs.weight, theirs.kind, theirs.round)
        assert set(mine.metrics) == set(theirs.metrics)
        assert mine.metrics["samples"] == theirs.metrics["samples"]
        if "clean" in theirs.metrics:
            assert mine.metrics["clean"] == theirs.metrics["clean"]
        if "adversarial" in theirs.metrics:
            assert abs(mine.metrics["adversarial"] - theirs.metrics["adversarial"]) <= 0.1 * theirs.metrics["samples"]


@pytest.fixture(scope="module")
def learned(settings, play_in_memory):
    """A run of jFAT that knows something."""
    changes = {"method": "jfat", "train.iterations": 12, "train.batch": 32, "rounds": 4, "model.options": {"width": 6}}
    played = play_in_memory(settings(changes), rounds=3)
    assert played.records[-1]["clean"] > 0.3
    return played


@pytest.mark.parametrize("kernels", [TorchKernels(), TorchKernels(16)], ids=["exact", "padded"])
def test_evaluation(learned, kernels):
    session, state = learned.session, learned.states[-1]
    threat = ThreatModel("linf", 0.05, 0.02, 5, (0.0, 1.0))
    tasks = evaluations(session, state, (*range(6), SERVER), threat)
    assert_same_evaluation(session, tasks, stacked(session, kernels=kernels))
    assert_same_evaluation(session, evaluations(session, state, range(6), None), stacked(session, kernels=kernels))


def test_the_device_works_on_some_clients_while_others_are_prepared(learned, monkeypatch):
    monkeypatch.setattr("fedprophet.engines.stacked.BEGINNING", 1)
    session, state = learned.session, learned.states[-1]
    order: list[tuple[str, int]] = []
    real_evaluation, real_answers = StackedEngine._evaluation, stacked_module._answers

    def evaluation(self, jobs, *inputs):
        order.append(("asked", len(jobs)))
        return real_evaluation(self, jobs, *inputs)

    def answers(jobs, *found):
        order.append(("answered", len(jobs)))
        yield from real_answers(jobs, *found)

    monkeypatch.setattr(StackedEngine, "_evaluation", evaluation)
    monkeypatch.setattr(stacked_module, "_answers", answers)
    assert_same_evaluation(session, evaluations(session, state, range(6), None), stacked(session))
    assert order == [("asked", 1), ("asked", 5), ("answered", 1), ("answered", 5)]


# Two sets of norm statistics.


@pytest.mark.parametrize("kernels", [TorchKernels(), TorchKernels(16)], ids=["exact", "padded"])
def test_two_sets_of_statistics_follow_clean_and_attacked_batches(session_of, kernels):
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


def test_attacked_images_are_judged_with_the_adversarial_statistics(session_of):
    session = session_of({"method": "fedrbn", "train.iterations": 40, "train.batch": 32, "shards.kind": "iid"})
    state = session.method.initial()
    trained = joint(session, clients=range(6), threat=None, adversarial_statistics=True, wants_local=True)
    layers = session.engine._workspaces["backbone"].layers
    for update in session.engine.map(trained):
        own = {
            name: v + 9 * name.startswith("adversarial.") if v.is_floating_point() else v
            for name, v in update.local.items()
        }
        layers.put("backbone", update.client, 1, own, trained[0].timeline)
    state = replace(state, round=1, model={**state.model, **update.parameters})
    weak = ThreatModel("linf", 1e-6, 1e-6, 2, (0.0, 1.0))
    tasks = evaluations(session, state, range(6), weak)
    assert all(task.adversarial_statistics for task in tasks)
    assert_same_evaluation(session, tasks)
    answers = [update.metrics for update in stacked(session).map(tasks)]
    assert sum(a["clean"] for a in answers) > 2 * sum(a["adversarial"] for a in answers)  # as the second set is wrong


def test_attacks_in_training_find_losses_as_high(learned):
    session, state = learned.session, replace(learned.states[-1], round=9)
    tasks = [session.method.train_task(state, client) for client in range(6)]
    hyper = replace(tasks[0].training, iterations=4, learning_rate=1e-9)
    threat = ThreatModel("linf", 0.1, 0.04, 5, (0.0, 1.0))
    tasks = [replace(task, training=hyper, threat=threat) for task in tasks]
    clean = [u.metrics["loss"] for u in session.engine.map([replace(task, threat=None) for task in tasks])]
    pairs = paired(stacked(session).map(tasks), session.engine.map(tasks))
    raised = [mine.metrics["loss"] - floor for (mine, _), floor in zip(pairs, clean, strict=True)]
    expected = [theirs.metrics["loss"] - floor for (_, theirs), floor in zip(pairs, clean, strict=True)]
    assert min(expected) > 0.2
    assert raised == pytest.approx(expected, rel=0.1)
    assert sum(raised) == pytest.approx(sum(expected), rel=0.03)


def test_a_harmless_threat_counts_twice(learned):
    session, state = learned.session, learned.states[-1]
    tasks = evaluations(session, state, range(3), ThreatModel("linf", 0.0, 0.1, 5, (0.0, 1.0)))
    assert all(u.metrics["clean"] == u.metrics["adversarial"] for u in stacked(session).map(tasks))
    assert_same_evaluation(session, tasks)


def test_parts_and_samples_of_the_servers_test_set(learned):
    session, state = learned.session, learned.states[-1]
    threat = ThreatModel("linf", 0.05, 0.02, 3, (0.0, 1.0))
    (whole,) = evaluations(session, state, (SERVER,), threat, samples=150)
    parts = [replace(whole, part=(a, b), number=n) for n, (a, b) in enumerate([(0, 64), (64, 128), (128, 192)])]
    assert_same_evaluation(session, [*parts, replace(whole, number=9)])
    found = sorted(stacked(session).map(parts), key=lambda update: update.number)
    assert [update.metrics["samples"] for update in found] == [64, 64, 22]
    (once,) = stacked(session).map([whole])
    assert sum(update.metrics["clean"] for update in found) == once.metrics["clean"]


def test_a_part_meets_the_same_attack_whatever_else_is_asked(learned):
    session, state = learned.session, learned.states[-1]
    (whole,) = evaluations(session, state, (SERVER,), ThreatModel("linf", 0.1, 0.04, 3, (0.0, 1.0)))
    parts = [replace(whole, part=(64 * n, 64 * n + 64), number=n) for n in range(4)]
    together = {u.number: u.metrics for u in stacked(session).map(parts)}
    (alone,) = stacked(session).map([replace(parts[2], number=0)])
    assert alone.metrics == together[2]


def test_evaluations_of_different_exits(cascade):
    """No method asks for them in one breath, but an engine may be asked for anything."""
    session, state = cascade.session, cascade.states[-1]
    earlier = next(s for s in cascade.states if s.stage == 1)
    threat = session.world.image_threat(2)
    tasks = [*evaluations(session, state, (0, 1), threat), *evaluations(session, earlier, (2, 3), threat)]
    assert len({task.last for task in tasks}) == 2
    assert_same_evaluation(session, tasks)


def test_clients_without_held_out_samples(session_of, caplog):
    session = session_of({"method": "jfat", "data.validation": 0.001})
    assert len(session.population.client_data(0).validation) == 0
    tasks = evaluations(session, session.method.initial(), (0, 1), session.world.image_threat(2))
    with caplog.at_level(logging.WARNING, "fedprophet"):
        assert [u.metrics for u in stacked(session).map(tasks)] == [{"samples": 0.0}] * 2
    assert not caplog.records


def test_a_cascade_is_evaluated_from_the_image_on(cascade):
    session, state = cascade.session, cascade.states[-1]
    tasks = evaluations(session, state, range(6), session.world.image_threat(3))
    assert tasks[0].frozen
    assert_same_evaluation(session, tasks)


@pytest.mark.parametrize("kernels", [TorchKernels(), TorchKernels(16)], ids=["exact", "padded"])
def test_measuring(cascade, kernels):
    asked = [
        task
        for pairs in cascade.exchanges
        for tasks, _ in pairs
        for task in tasks
        if task.kind == "measure" and task.frozen
    ]
    assert len(asked) == 6
    pairs = paired(stacked(cascade.session, kernels=kernels).map(asked), cascade.session.engine.map(asked))
    for mine, theirs in pairs:
        assert (mine.weight, mine.metrics["samples"]) == (theirs.weight, theirs.metrics["samples"])
        assert mine.metrics["magnitude"] == pytest.approx(theirs.metrics["magnitude"], rel=0.05)
    means = [sum(update.metrics["magnitude"] for update in updates) / 6 for updates in zip(*pairs, strict=True)]
    assert means[0] == pytest.approx(means[1], rel=0.02)
    still = [replace(task, threat=replace(task.threat, radius=0.0)) for task in asked]
    assert {u.metrics["magnitude"] for u in stacked(cascade.session).map(still)} == {0.0}


def test_features_follow_a_clients_own_layers(cascade):
    """The cached features of a frozen prefix are those of the client's own norm layers in it."""
    session = cascade.session
    state = replace(cascade.states[-1], round=cascade.states[-1].round + 3)
    (task,) = [replace(session.method._train_task(state, 0, 2), threat=None)]
    engine = stacked(session)
    assert_same_training(session, [task], engine)
    layers = session.engine._workspaces["backbone"].layers
    own = dict(layers.get("backbone", 0, task.timeline, task.round))
    own["features.1.running_mean"] = own["features.1.running_mean"] + 0.5
    layers.put("backbone", 0, task.round, own, task.timeline)
    assert_same_training(session, [replace(task, round=task.round + 1)], engine)


def test_features_are_computed_once(cascade, monkeypatch):
    session = cascade.session
    state = replace(cascade.states[-1], round=cascade.states[-1].round + 6)
    tasks = [replace(session.method._train_task(state, client, 2), threat=None) for client in range(3)]
    engine, computed = stacked(session), []
    real = StackedEngine._features
    monkeypatch.setattr(StackedEngine, "_features", lambda self, jobs: (computed.extend(jobs), real(self, jobs))[1])
    for later in range(3):
        list(engine.map([replace(task, round=task.round + later) for task in tasks]))
    assert [job.task.client for job in computed] == [0, 1, 2]


def test_clients_that_train_ahead_are_carried_out_with_the_others(cascade, monkeypatch):
    """Modules m … M_k differ from client to client (Section 6.3); all of them are one ladder."""
    session = cascade.session
    state = cascade.states[0]
    sizes = {client: len(session.population.client_data(client).train) for client in range(session.population.size)}
    same = [client for client in sizes if list(sizes.values()).count(sizes[client]) >= 4]
    ahead = dict(zip([client for client in same if sizes[client] == sizes[same[0]]], (1, 2, 0, 2), strict=False))
    assert len(ahead) == 4
    tasks = [replace(session.method._train_task(state, client, last), threat=None) for client, last in ahead.items()]
    made = []
    real = TrainingPlan.__post_init__
    monkeypatch.setattr(TrainingPlan, "__post_init__", lambda self: (made.append(self), real(self))[1])
    assert_same_training(session, tasks)
    assert [plan.ladder.clients for plan in made] == [4]
    assert len(made[0].ladder.exits) == 3


# Sub-networks.


EVEN = {"shards.kind": "iid", "population.clients": 10}
"""The first six clients own as many samples each, so that nothing but widths tells them apart."""


def partial_tasks(session, widths, round=1, clients=None, **changes):
    """Return training tasks of sub-networks of the given fractions, cut out of the initial model."""
    method = session.method
    state = replace(method.initial(), round=round)
    memory = session.world.cost.total_memory
    chosen = range(len(widths)) if clients is None else clients
    available = {c: Resources(int(r * memory) + 1, 1e9, 1e9) for c, r in zip(chosen, widths, strict=True)}
    return [replace(task, **changes) for task in method.assign(state, available, {})]


@pytest.fixture
def plans(monkeypatch):
    """Return a list that every plan is put into when it is made."""
    made = []
    real = TrainingPlan.__post_init__
    monkeypatch.setattr(TrainingPlan, "__post_init__", lambda self: (made.append(self), real(self))[1])
    return made


SHARES = (0.25, 1.0, 0.6, 0.5, 0.99, 0.05)


@pytest.mark.parametrize(
    ("method", "apart", "kernels", "groups"),
    [
        ("heterofl", 0.0, TorchKernels(), [1, 1, 1, 1, 2]),  # each width apart
        ("heterofl", 1.0, TorchKernels(16), [2, 4]),  # 2 + 4 · (5/8)² + 2 is less than 2 + 2 · (5/8)² + 2 · (2/8)² + 3
        ("heterofl", 100.0, TorchKernels(), [6]),
        ("feddrop", 1.0, TorchKernels(), [2, 4]),
        ("fedrolex", 100.0, TorchKernels(16), [6]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sub_networks_of_any_width(session_of, monkeypatch, plans, method, apart, kernels, groups):
    """Two rounds: a plan is used again for other channels, and clients begin with what they kept of the first."""
    monkeypatch.setattr(narrow, "APART", apart)
    session = session_of({"method": method, **EVEN, "model.options": {"width": 8}})
    engine = stacked(session, kernels=kernels)
    for number, widths in enumerate((SHARES, SHARES[::-1]), start=1):
        tasks = partial_tasks(session, widths, number, threat=None)
        assert len({tuple(map(len, task.kept.values())) for task in tasks}) == len(SHARES)
        # One channel of eight: whatever a layer gets is multiplied by eight, noise as well.
        assert_same_training(session, tasks, engine, noise=1e-5)
    assert sorted(plan.ladder.clients for plan in plans) == groups


def test_sub_networks_beside_whole_ones(session_of):
    """A task that names no channels trains the model itself, in a group of its own."""
    session = session_of({"method": "heterofl", **EVEN})
    whole = joint(session, clients=(0, 1), threat=None)
    cut = partial_tasks(session, (0.3, 0.7), clients=(2, 3), threat=None)
    assert_same_training(session, [whole[0], *cut, whole[1]])


def test_plans_of_sub_networks_leave_no_trace(session_of, monkeypatch, plans, same_tensors):
    """Attacked rounds on one engine, and the last of them on a fresh one: the same bytes."""
    session = session_of({"method": "feddrop", **EVEN, "train.warmup": 0})
    monkeypatch.setattr(narrow, "APART", 100.0)
    used = stacked(session)
    for number, widths in enumerate(((1.0, 0.9, 0.9), (0.5, 1.0, 0.25)), start=1):
        list(used.map(partial_tasks(session, widths, number)))
    made = len(plans)
    tasks = partial_tasks(session, (0.25, 1.0, 0.5), 3)
    found = list(used.map(tasks))
    assert len(plans) == made > 0
    for mine, fresh in paired(found, stacked(session).map(tasks)):
        assert same_tensors(mine.parameters, fresh.parameters)
        assert mine.metrics == fresh.metrics


def test_a_sub_network_does_not_depend_on_who_is_beside_it(session_of, monkeypatch):
    """Alone at its own width and in a stack of the full one, attacked: the same draws, so the same numbers."""
    session = session_of({"method": "feddrop", **EVEN, "train.warmup": 0, "model.options": {"width": 3}})
    tasks = partial_tasks(session, (0.4, 1.0, 0.7))
    tasks = [replace(task, training=replace(task.training, iterations=1)) for task in tasks]
    monkeypatch.setattr(narrow, "APART", 100.0)
    together = list(stacked(session).map(tasks))
    alone = [update for task in tasks for update in stacked(session).map([task])]
    for a, b in paired(together, alone):
        assert a.metrics["loss"] == pytest.approx(b.metrics["loss"], rel=1e-4)
        assert all(close(a.parameters[name], b.parameters[name], 1e-3) for name in a.parameters)


def test_attacks_on_sub_networks_find_losses_as_high(session_of):
    changes = {"train.iterations": 12, "train.batch": 32, "rounds": 4, "train.warmup": 3, "model.options": {"width": 6}}
    session = session_of({"method": "heterofl", **EVEN, **changes})
    state = session.method.initial()
    for _ in range(3):
        state, _ = hold(session.method.round(state), session.engine)
    session.method.initial = lambda: state
    tasks = partial_tasks(session, (0.3, 0.6, 1.0, 0.8), round=9)
    hyper = replace(tasks[0].training, iterations=4, learning_rate=1e-9)
    threat = ThreatModel("linf", 0.1, 0.04, 5, (0.0, 1.0))
    tasks = [replace(task, training=hyper, threat=threat) for task in tasks]
    clean = sum(u.metrics["loss"] for u in session.engine.map([replace(task, threat=None) for task in tasks]))
    pairs = paired(stacked(session).map(tasks), session.engine.map(tasks))
    mine, theirs = (sum(update.metrics["loss"] for update in side) - clean for side in zip(*pairs, strict=True))
    assert theirs > 1.0
    assert mine == pytest.approx(theirs, rel=0.05)


def test_a_sub_network_is_evaluated_as_such(session_of):
    session = session_of({"method": "fedrolex", **EVEN})
    trained = partial_tasks(session, (0.3, 0.6, 1.0), threat=None)
    list(session.engine.map(trained))
    threat = ThreatModel("linf", 0.02, 0.01, 2, (0.0, 1.0))
    assert_same_evaluation(session, [replace(task, kind="evaluate", threat=threat) for task in trained])


def test_a_sub_network_that_diverges_leaves_the_others_alone(session_of, same_tensors):
    session = session_of({"method": "heterofl", **EVEN})
    tasks = partial_tasks(session, (0.9, 0.9, 0.95))
    usual = {update.client: update for update in stacked(session).map(tasks)}
    layers = session.engine._workspaces["backbone"].layers
    layers._clients[("backbone", 1)].versions.pop(1)
    weight = tasks[1].parameters["features.3.weight"]
    spoilt = {**tasks[1].parameters, "features.3.weight": torch.full_like(weight, 1e38)}
    again = [tasks[0], replace(tasks[1], parameters=spoilt), tasks[2]]
    found = {update.client: update for update in stacked(session).map(again)}
    assert math.isnan(found[1].metrics["loss"])
    assert 1 not in layers._clients[("backbone", 1)].versions
    for client in (0, 2):
        assert found[client].metrics == usual[client].metrics
        assert same_tensors(found[client].parameters, usual[client].parameters)


# What cannot be fused.


def said(caplog) -> list[str]:
    return [r.getMessage().removeprefix("the GPU engine leaves this to the plain path: ") for r in caplog.records]


def test_other_models_go_to_the_plain_path_and_it_is_said_once(session_of, caplog, same_tensors):
    session = session_of({"method": "jfat", "model.name": "cnn3", "model.options": {}})
    tasks, engine = joint(session, clients=(0, 1)), stacked(session)
    with caplog.at_level(logging.WARNING, "fedprophet"):
        for _ in range(2):
            for mine, theirs in paired(engine.map(tasks), session.engine.map(tasks)):
                assert same_tensors(mine.parameters, theirs.parameters)
    (reason,) = said(caplog)
    assert reason == "layer AdaptiveMaxPool2d"


def test_a_prefix_that_cannot_be_fused_takes_its_module_with_it(settings, caplog, same_tensors):
    """The module in training is of the right form; what lies in front of it is not."""
    torch.manual_seed(0)

    def block(inputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()]

    stem = nn.Sequential(nn.Conv2d(1, 6, 1), nn.BatchNorm2d(6), nn.Tanh())
    end = nn.Sequential(*block(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10))
    parts = [("stem", stem), ("body", nn.Sequential(*block(6))), ("end", end)]
    chain = explicit_chain(parts, Normalize((0.5,), (0.5,)))
    session = assemble(settings({"rounds": 1, "train.warmup": 0, "memory.budget": "70%"}), model=chain)
    assert len(session.world.modules) > 1
    state = session.method.initial()
    while state.stage == 0:
        state, _ = hold(session.method.round(state), session.engine)
    task = session.method._train_task(replace(state, round=7), 0, state.stage)
    assert task.frozen
    with caplog.at_level(logging.WARNING, "fedprophet"):
        (mine,), (theirs,) = stacked(session).map([task]), session.engine.map([task])
    assert same_tensors(mine.parameters, theirs.parameters)
    assert len(said(caplog)) == 1


def test_other_attacks_and_kinds_of_work(session_of, caplog):
    session = session_of({"method": "jfat"})
    task = session.method.evaluation_task(session.method.initial(), 0, session.world.image_threat(1))
    clean = replace(task, attack="autoattack", threat=None)
    predict = replace(task, kind="predict", client=SERVER)
    engine = stacked(session)
    with caplog.at_level(logging.WARNING, "fedprophet"):
        assert engine._kind_of(clean) is not None  # without a threat the attack does not matter
        assert engine._kind_of(replace(task, attack="autoattack")) is None
        assert engine._kind_of(replace(task, kind="report")) is None
        assert engine._kind_of(replace(task, kind="adopt")) is None
        assert engine._kind_of(replace(predict, client=0)) is None
        assert engine._kind_of(replace(task, kept={"features.0": torch.arange(2)}, head=0)) is None
        kept = {"features.0": torch.arange(2)}
        assert engine._kind_of(replace(task, kept=kept, adversarial_statistics=True)) is None
    assert said(caplog) == [
        "attack 'autoattack'", "tasks of the kind 'predict'", "sub-networks of a part of the model",
        "two sets of norm statistics in a sub-network or a cascade",
    ]  # fmt: skip


def test_a_model_without_a_linear_layer_and_scores_that_are_measured(session_of, settings, caplog):
    session = session_of({"method": "jfat"})
    engine, task = stacked(session), joint(session)[0]
    with caplog.at_level(logging.WARNING, "fedprophet"):
        assert engine._kind_of(replace(task, last=4)) is None
        assert engine._kind_of(replace(task, kind="measure", threat=session.world.image_threat(1))) is None
    assert said(caplog) == ["a model without a linear layer", "measuring class scores"]


# What stays between rounds.


def test_plans_serve_rounds_whose_radius_and_rate_change(session_of, same_tensors):
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


def test_plans_make_room_for_others(session_of):
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


def test_inputs_that_do_not_stay_are_fetched_again(session_of, same_tensors):
    session = session_of({"method": "jfat"})
    tasks = joint(session)
    for mine, theirs in paired(stacked(session, Limits(PLENTY, 1)).map(tasks), stacked(session).map(tasks)):
        assert same_tensors(mine.parameters, theirs.parameters)


# Whole runs.


@pytest.mark.parametrize("method", METHODS)
def test_every_method_plays_on_it(session_of, method):
    """The first round is without an attack: its loss is the plain engine's, whatever part of it was fused."""
    changes = {
        "method": method,
        "rounds": 3,
        "train.warmup": 1,
        "distillation.public": 40,
        "distillation.iterations": 2,
    }
    changes = changes if METHODS[method].distills else {k: v for k, v in changes.items() if "distill" not in k}
    plain, fast = session_of(changes), session_of(changes)
    _, expected = hold(plain.method.round(plain.method.initial()), plain.engine)
    state, engine = fast.method.initial(), stacked(fast)
    state, first = hold(fast.method.round(state), engine)
    _, second = hold(fast.method.round(state), engine)
    assert first["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert first["clean"] == pytest.approx(expected["clean"], abs=0.02)
    assert not first["dropped"]
    assert not second["dropped"]
    assert math.isfinite(second["loss"])


@pytest.mark.parametrize("method", ["jfat", "fedprophet"])
def test_runs_learn_as_much_as_on_the_plain_engine(session_of, method):
    """Three attacked rounds: their draws differ, so they are compared by what they learn."""
    changes = {
        "method": method,
        "rounds": 3,
        "train.warmup": 0,
        "train.iterations": 8,
        "train.batch": 16,
        "shards.kind": "iid",
        "attack.radius": 0.05,
    }
    runs = []
    for fast in (False, True):
        session = session_of(changes)
        state, engine = session.method.initial(), stacked(session) if fast else session.engine
        records = []
        for _ in range(3):
            state, record = hold(session.method.round(state), engine)
            records.append(record)
        runs.append(records)
    for plain, mine in zip(*runs, strict=True):
        assert mine["loss"] == pytest.approx(plain["loss"], rel=0.04)
        assert mine["clean"] == pytest.approx(plain["clean"], abs=0.12)
        assert mine["adversarial"] == pytest.approx(plain["adversarial"], abs=0.12)
    first, _, last = runs[0]
    assert last["loss"] < 0.95 * first["loss"]


def test_a_round_that_is_played_again_ends_in_the_same_bytes(session_of, same_tensors):
    """A fresh engine that goes on from a state, as after a resume, and one that has played before it."""
    session = session_of({"rounds": 4, "train.warmup": 1})
    engine, state = stacked(session), session.method.initial()
    for _ in range(2):
        before, (state, record) = state, hold(session.method.round(state), engine)
    again, repeated = hold(session.method.round(before), stacked(session))
    assert same_tensors(state.model, again.model)
    assert same_tensors(state.heads, again.heads)
    assert record == repeated


def test_images_that_are_no_images(settings):
    """Whatever the data looks like, what is not an image is left to the plain path."""
    images, labels = torch.rand(60, 4), torch.arange(60) % 3
    data = from_tensors(images, labels, images[:12], labels[:12])
    model = explicit_chain([("one", nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU())), ("two", nn.Linear(8, 3))])
    changes = {"method": "jfat", "population.clients": 3, "shards.kind": "iid"}
    session = assemble(settings(changes), model=model, dataset=data)
    _, record = hold(session.method.round(session.method.initial()), stacked(session))
    assert math.isfinite(record["loss"])
