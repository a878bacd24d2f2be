"""The engine on a GPU against the plain one on the CPU; and what is said where there is no GPU."""

import importlib
import itertools
import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fedprophet.engines import cuda
from fedprophet.engines.cuda import cuda_backend
from fedprophet.errors import ConfigError
from fedprophet.messages.tasks import Predict
from fedprophet.messages.values import SERVER
from fedprophet.runs import session
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import play_round

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

SMALL = {"population.cohort": 3, "rounds": 4, "train.warmup": 2, "train.iterations": 3}


def test_without_a_gpu_it_says_what_to_do(monkeypatch, tiny):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(session, "load_dataset", lambda *_: pytest.fail("it takes its time first"))
    for ask in (lambda: cuda_backend(torch.float32), lambda: assemble(tiny({"engine": "cuda"}))):
        with pytest.raises(ConfigError, match='engine = "cuda" needs an NVIDIA GPU, and torch finds none'):
            ask()


def test_work_is_done_once_and_then_captured_and_replayed(monkeypatch):
    happened: list[str] = []
    graph = SimpleNamespace(replay=lambda: happened.append("replayed"))
    monkeypatch.setattr(cuda, "_capture", lambda work: happened.append("captured") or graph)
    run = cuda.Captured(lambda: happened.append("done"))
    for _ in range(3):
        run()
    assert happened == ["done", "captured", "replayed", "replayed"]


@pytest.fixture(scope="module")
def sessions(tiny):
    """Return a function that gives the same run on the plain engine and on the GPU's."""

    def both(changes=None, precision="float32"):
        changes = {**SMALL, **(changes or {})}
        return (
            assemble(tiny({**changes, "engine": "plain"})),
            assemble(tiny({**changes, "engine": "cuda", "precision": precision})),
        )

    return both


def play(session, rounds: int, engine=None):
    state, records = session.method.initial(), []
    for _ in range(rounds):
        state, record = play_round(session.method.round(state), engine or session.engine)
        records.append(record)
    return state, records


@needs_gpu
@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("jfat", "cnn3"),
        *itertools.product(("jfat", "fedprophet", "heterofl", "feddrop", "fedrolex"), ("vgg-small", "resnet10")),
    ],
)
def test_rounds_without_an_attack_equal_the_plain_engines(sessions, method, model, close):
    changes = {"method": method, "model.name": model, "memory.budget": "50%"}
    # In a narrow network a ReLU that rounding switches on or off is seen by everything behind it: one step is compared.
    changes |= {} if method in ("jfat", "fedprophet") else {"train.iterations": 1}
    (plain, expected), (fast, found) = (play(session, 2) for session in sessions(changes))
    for one, other in zip(expected, found, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["clean"] == pytest.approx(one["clean"], abs=0.005)
    for name in plain.model:
        assert close(fast.model[name], plain.model[name]), name


@needs_gpu
@pytest.mark.parametrize("rule", ["mean", "median"])
def test_heads_that_clients_pass_on_meet_those_that_others_trained(sessions, rule, close):
    """In the first round the server's heads are in the host's memory, and trained ones on the device."""
    changes = {"method": "fedprophet", "memory.budget": "50%", "assignment.heads": "passed", "aggregate.rule": rule}
    (plain, _), (fast, _) = (play(session, 2) for session in sessions(changes))
    for name in plain.heads:
        assert close(fast.heads[name], plain.heads[name]), name


@needs_gpu
@pytest.mark.parametrize("method", ["jfat", "fedprophet", "heterofl"])
def test_rounds_with_shared_layers_calibration_and_a_proximal_term(sessions, method, close):
    """Statistics are fixed in the second round; every client of a ladder has its own label frequencies."""
    changes = {"method": method, "norm.layers": "frozen", "norm.frozen_after": 1, "memory.budget": "50%"}
    changes |= {
        "train.calibration": "labels",
        "train.proximal": 0.5,
        "train.iterations": 1 if method == "heterofl" else 3,
    }
    (plain, expected), (fast, found) = (play(session, 2) for session in sessions(changes))
    for one, other in zip(expected, found, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["clean"] == pytest.approx(one["clean"], abs=0.005)
    assert "features.1.running_mean" in plain.model
    for name in plain.model:
        assert close(fast.model[name].float(), plain.model[name].float()), name


@needs_gpu
def test_fixed_statistics_and_label_frequencies_of_other_clients_in_a_used_plan(sessions, joint, close):
    """Often enough that graphs are used: the second group has other priors, anchors and statistics in the same plan."""
    plain, fast = sessions({"method": "jfat", "norm.layers": "shared", "shards.kind": "iid", "population.clients": 10})
    for number, clients in ((1, (0, 1, 2)), (2, (3, 4, 5))):
        tasks = joint(plain, number, clients, threat=None, calibration=0.5)
        given = tasks[0].parameters.items()
        parameters = {name: value + 0.01 * number if value.is_floating_point() else value for name, value in given}
        training = replace(tasks[0].training, iterations=4, learning_rate=0.01, proximal=1.0, fixed_statistics=True)
        tasks = [replace(task, parameters=parameters, training=training) for task in tasks]
        expected, found = ({u.client: u for u in session.engine.map(tasks)} for session in (plain, fast))
        for client, update in expected.items():
            assert found[client].loss == pytest.approx(update.loss, rel=1e-5)
            assert set(found[client].parameters) == set(update.parameters)
            for name, value in update.parameters.items():
                mine = found[client].parameters[name]
                assert mine.dtype == value.dtype
                assert close(mine.float(), value.float()), name
    assert len(fast.engine._plans) == 1


@needs_gpu
def test_batches_of_two_sizes(sessions, joint, close):
    plain, fast = sessions({"method": "jfat", "train.batch": 80, "train.iterations": 7})
    tasks = [replace(task, threat=None, wants_local=True) for task in joint(plain, 2, range(6))]
    expected, found = ({u.client: u for u in session.engine.map(tasks)} for session in (plain, fast))
    for client, update in expected.items():
        assert found[client].loss == pytest.approx(update.loss, rel=1e-5)
        assert {value.device.type for value in found[client].local.values()} == {"cpu"}
        for name, value in {**update.parameters, **update.local}.items():
            mine = {**found[client].parameters, **found[client].local}[name]
            assert mine.shape == value.shape
            assert close(mine.float(), value.float()), name


@needs_gpu
def test_sub_networks_of_any_width(sessions, partial_tasks, close):
    """Wide enough that narrow clients are run at widths of their own; six rounds, so that graphs are used again."""
    changes = {
        "model.options": {"width": 48},
        "shards.kind": "iid",
        "population.clients": 10,
        "train.iterations": 1,
    }
    plain, fast = sessions({"method": "feddrop", **changes})
    for number, widths in enumerate([(0.25, 1.0, 0.2, 0.5), (1.0, 0.2, 0.3, 0.4)] * 3, start=1):
        tasks = [replace(task, threat=None) for task in partial_tasks(plain, widths, number, wants_local=True)]
        expected, found = ({u.client: u for u in session.engine.map(tasks)} for session in (plain, fast))
        for client, update in expected.items():
            assert found[client].loss == pytest.approx(update.loss, rel=1e-4)
            for name, value in {**update.parameters, **update.local}.items():
                mine = {**found[client].parameters, **found[client].local}[name]
                assert mine.shape == value.shape
                assert close(mine.float(), value.float(), 3e-4, noise=1e-5), name


@needs_gpu
def test_sub_networks_leave_no_trace_in_a_plan(sessions, same_tensors, partial_tasks):
    changes = {"method": "heterofl", "train.warmup": 0, "shards.kind": "iid", "population.clients": 10}
    (_, used), (_, fresh) = sessions(changes), sessions(changes)
    list(used.engine.map(partial_tasks(used, (1.0, 0.9, 0.8, 0.9), 1, wants_local=True)))
    list(used.engine.map(partial_tasks(used, (0.9, 0.5, 1.0, 0.3), 2, wants_local=True)))
    tasks = partial_tasks(used, (0.3, 0.9, 0.5, 1.0), 1, wants_local=True)
    found = {update.client: update for update in used.engine.map(tasks)}
    for update in fresh.engine.map(tasks):
        assert same_tensors(update.parameters, found[update.client].parameters)
        assert update.loss == found[update.client].loss


@needs_gpu
def test_rounds_leave_no_trace_in_a_plan(sessions, tiny, same_tensors, joint):
    """Two rounds on one engine, and each of them on a fresh one: the same bytes."""
    _, used = sessions({"method": "jfat", "train.warmup": 0})
    tasks = joint(used, 2, range(4))
    other = [replace(t, round=3, training=replace(t.training, learning_rate=0.3)) for t in joint(used, 2, (2, 3, 4, 5))]
    list(used.engine.map(other))
    found = {update.client: update for update in used.engine.map(tasks)}
    _, fresh = sessions({"method": "jfat", "train.warmup": 0})
    for update in fresh.engine.map(tasks):
        assert same_tensors(update.parameters, found[update.client].parameters)
        assert update.loss == found[update.client].loss


@needs_gpu
def test_a_client_that_diverges_leaves_the_others_alone(sessions, joint):
    _, session = sessions({"method": "jfat"})
    tasks = joint(session, 2, (0, 1, 2))
    usual = {update.client: update for update in session.engine.map(tasks)}
    broken = {**tasks[1].parameters, "features.3.weight": tasks[1].parameters["features.3.weight"] * math.nan}
    spoilt = [tasks[0], replace(tasks[1], parameters=broken), tasks[2]]
    found = {update.client: update for update in session.engine.map(spoilt)}
    assert math.isnan(found[1].loss)
    for client in (0, 2):
        assert found[client].loss == pytest.approx(usual[client].loss, rel=1e-6)


@needs_gpu
def test_evaluation_and_a_whole_stage(sessions):
    """A cascade that goes on to its second module: attacks, evaluation, measuring, cached features."""
    changes = {"rounds": 2, "train.warmup": 1, "train.iterations": 6, "train.batch": 32, "shards.kind": "iid"}
    (_, expected), (state, found) = (play(session, 4) for session in sessions(changes))
    assert state.stage == 2
    for one, other in zip(expected, found, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=0.1)
        assert other["clean"] == pytest.approx(one["clean"], abs=0.15)
    magnitudes = [[r["fixed"]["magnitude"] for r in records if "fixed" in r] for records in (expected, found)]
    assert magnitudes[1] == pytest.approx(magnitudes[0], rel=0.3)


@needs_gpu
def test_bf16_learns(sessions):
    changes = {"method": "jfat", "train.iterations": 10, "train.batch": 32, "shards.kind": "iid", "train.warmup": 1}
    plain, fast = sessions(changes, precision="bfloat16")
    (_, expected), (_, found) = play(plain, 3), play(fast, 3)
    for one, other in zip(expected, found, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=0.06)
    assert found[-1]["clean"] == pytest.approx(expected[-1]["clean"], abs=0.15)


@needs_gpu
def test_two_sets_of_statistics(sessions, joint, close):
    plain, fast = sessions({"method": "fedrbn"})
    tasks = [replace(t, threat=None, adversarial_statistics=True, wants_local=True) for t in joint(plain, 2, range(4))]
    expected, found = ({u.client: u for u in session.engine.map(tasks)} for session in (plain, fast))
    for client, update in expected.items():
        assert set(found[client].local) == set(update.local)
        for name, value in {**update.parameters, **update.local}.items():
            mine = {**found[client].parameters, **found[client].local}[name]
            assert close(mine.float(), value.float()), name


@needs_gpu
def test_what_cannot_be_fused_runs_on_the_gpu_too(sessions, dealt):
    """Predictions of such a model are joined with those of others, which stacks made."""
    mixed = {"method": "feddf", "distillation.family": ["cnn3", "vit"], "population.cohort": 6, "train.warmup": 1}
    _, session = sessions({**mixed, "model.name": "vit", "model.options": {}})
    _, records = play(session, 2, dealt(session, session.engine))
    for record in records:
        assert set(record["architectures"].values()) == {"cnn3", "vit"}
        assert math.isfinite(record["loss"])
        assert not record["dropped"]
        assert None not in record["distillation"].values()


@needs_gpu
@pytest.mark.parametrize("method", ["feddf", "fedet"])
def test_rounds_of_distillation_equal_the_plain_engines(sessions, method, dealt, close, caplog):
    """Predictions and distillation too, often enough that graphs are used. The second begins with what is left."""
    caplog.set_level(logging.WARNING, "fedprophet")
    smallest = ["cnn3"] if method == "feddf" else []  # FedET needs last layers of one shape
    changes = {
        "method": method,
        "distillation.family": [*smallest, "vgg-small-3", "vgg-small"],
        "distillation.public": 40,
        "distillation.iterations": 6,
        "train.learning_rate": 0.02,
        "train.iterations": 2,
    }
    (plain, expected), (fast, found) = (play(each, 2, dealt(each, each.engine)) for each in sessions(changes))
    assert not caplog.records
    for mine, own in zip(found, expected, strict=True):
        assert mine["architectures"] == own["architectures"]
        assert mine["loss"] == pytest.approx(own["loss"], rel=1e-3)
        for name, loss in own["distillation"].items():
            assert mine["distillation"][name] == pytest.approx(loss, rel=2e-3), name
    for name, model in plain.models.items():
        for tensor, value in model.items():
            assert close(fast.models[name][tensor].float(), value.float(), 5e-3), (name, tensor)


@needs_gpu
def test_predictions_are_on_the_host_in_float32(sessions):
    _, session = sessions({"method": "feddf", "distillation.public": 40}, "bfloat16")
    model, last = session.method.initial().model, len(session.world.chain)
    (answer,) = session.engine.map([Predict(round=1, client=SERVER, seed=0, last=last, parameters=model)])
    assert (answer.logits.device.type, answer.logits.dtype) == ("cpu", torch.float32)
    assert answer.logits.shape == (40, 10)


@needs_gpu
@pytest.mark.parametrize("norms", ["local", "shared"])
def test_autoattack_on_rows_of_all_clients_has_the_verdicts_of_one_client_at_a_time(sessions, norms, monkeypatch):
    """In float32 also where the run is in bfloat16. Rounding may decide over one sample that is on the border."""
    pytest.importorskip("pyautoattack")
    suites = importlib.import_module("fedprophet.attacks.autoattack")
    original = suites._suite

    def shortened(*arguments):
        suite = original(*arguments)
        suite.square.n_queries, suite.fab.n_iter, suite.apgd.n_iter, suite.apgd_targeted.n_iter = 100, 5, 10, 10
        return suite

    monkeypatch.setattr(suites, "_suite", shortened)
    changes = {"method": "jfat", "norm.layers": norms, "train.calibration": "labels", "train.iterations": 20}
    _, session = sessions(changes, "bfloat16")
    state, _ = play(session, 4)
    threat = replace(session.world.image_threat(1), radius=0.05)
    tasks = [replace(session.method.evaluation_task(state, k, threat), attack="autoattack") for k in range(6)]
    together = {answer.client: answer for answer in session.engine.map(tasks)}
    alone = {answer.client: answer for answer in session.engine._plain.map(tasks)}
    names = suites.STANDARD
    differ = sum(abs(together[k].broken[name] - alone[k].broken[name]) for k in alone for name in names)
    assert differ <= 2, "a sample that falls to another component counts twice"
    assert sum(abs(together[k].adversarial - alone[k].adversarial) for k in alone) <= 1
    assert 0 < sum(answer.adversarial for answer in alone.values()) < sum(answer.clean for answer in alone.values())
