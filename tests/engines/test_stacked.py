"""The stacked engine against the plain one: whole rounds and runs, and what it leaves to the plain path."""

import logging
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fedprophet.cascade.atoms import explicit_chain
from fedprophet.data.dataset import from_tensors
from fedprophet.engines.fusing import at_width
from fedprophet.fast.kernels import Kernels
from fedprophet.fast.narrow import WHOLE
from fedprophet.messages.tasks import TASKS, Adopt, Measure, ModelTask, Refresh, Report, Train
from fedprophet.messages.values import LocalTraining
from fedprophet.methods import METHODS
from fedprophet.models.normalize import Normalize
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import play_round
from fedprophet.threat import ThreatModel

PARTIAL = ("heterofl", "feddrop", "fedrolex")
NEWER = {"norm.layers": "frozen", "norm.frozen_after": 1, "train.calibration": "labels", "train.proximal": 0.5}
NEWER |= {"train.consistency": 0.5}
"""Shared norm layers, whose statistics are fixed in the second round; label frequencies; both draws, to where training
started and to what was predicted there.
"""


def said(caplog) -> list[str]:
    return [r.getMessage().removeprefix("the GPU engine leaves this to the plain path: ") for r in caplog.records]


@pytest.mark.parametrize(
    ("method", "model", "multiple", "options"),
    [
        ("jfat", "vgg-small", 1, {}),
        ("jfat", "resnet10", 16, {}),
        ("jfat", "cnn3", 16, {}),
        ("jfat", "cnn3", 1, NEWER),
        ("fedprophet", "cnn3", 1, {"memory.budget": "80%"}),
        ("heterofl", "cnn3", 16, {}),
        ("fedrbn", "cnn3", 1, {}),
        ("jfat", "vgg-small", 16, NEWER),
        ("fedprophet", "vgg-small", 16, {}),
        ("fedprophet", "resnet10", 1, {}),
        ("fedprophet", "vgg-small", 1, NEWER),
        ("heterofl", "vgg-small", 16, {}),
        ("heterofl", "vgg-small", 16, NEWER),
        pytest.param("heterofl", "resnet10", 16, {}, marks=pytest.mark.slow),
        pytest.param("feddrop", "resnet10", 1, {}, marks=pytest.mark.slow),
        pytest.param("fedrolex", "vgg-small", 16, {}, marks=pytest.mark.slow),
    ],
)
def test_rounds_without_an_attack_equal_the_plain_engines(
    session_of, method, model, multiple, options, caplog, stacked, close
):
    """`multiple`: channels are padded to multiples of it."""
    caplog.set_level(logging.WARNING, "fedprophet")
    changes = {"method": method, "model.name": model, "memory.budget": "50%", **options}
    # In a narrow network a ReLU that rounding switches on or off is seen by everything behind it: one step is compared.
    changes |= {"rounds": 4, "train.warmup": 3, "train.iterations": 1 if method in PARTIAL else 3}
    ends = []
    for fast in (False, True):
        session = session_of(changes)
        state = session.method.initial()
        engine = stacked(session, kernels=Kernels(multiple)) if fast else session.engine
        records = []
        for _ in range(2):
            state, record = play_round(session.method.round(state), engine)
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
        assert close(fast.model[name].float(), plain.model[name].float()), name
    first = next(name for name in start.model if name.endswith("weight"))
    assert not torch.equal(fast.model[first], start.model[first])


def test_other_models_go_to_the_plain_path_and_it_is_said_once(
    session_of, caplog, same_tensors, stacked, joint, paired
):
    session = session_of({"method": "jfat", "model.name": "vit", "model.options": {"dim": 8, "depth": 1, "heads": 1}})
    tasks, engine = joint(session, clients=(0, 1)), stacked(session)
    with caplog.at_level(logging.WARNING, "fedprophet"):
        for _ in range(2):
            for mine, theirs in paired(engine.map(tasks), session.engine.map(tasks)):
                assert same_tensors(mine.parameters, theirs.parameters)
    (reason,) = said(caplog)
    assert reason == "a tensor that no layer of torch's own holds"


@pytest.mark.parametrize("consistency", [0.0, 0.5])
def test_weights_by_the_boundary_take_the_plain_path(
    consistency, session_of, caplog, same_tensors, stacked, joint, paired
):
    session = session_of({"method": "jfat"})
    threat = session.world.image_threat(2)
    tasks = [
        replace(task, threat=threat, training=replace(task.training, boundary_weights=True, consistency=consistency))
        for task in joint(session, clients=(0, 1))
    ]
    with caplog.at_level(logging.WARNING, "fedprophet"):
        for mine, theirs in paired(stacked(session).map(tasks), session.engine.map(tasks)):
            assert same_tensors(mine.parameters, theirs.parameters)
    assert said(caplog) == ["LocalTraining.boundary_weights"]


def test_without_an_attack_there_is_nothing_to_weight_and_stacks_are_not_left(session_of, caplog, stacked, joint):
    session = session_of({"method": "jfat"})
    training = replace(session.world.local_training(1), boundary_weights=True)
    tasks = [replace(task, threat=None, training=training) for task in joint(session, clients=(0, 1))]
    with caplog.at_level(logging.WARNING, "fedprophet"):
        list(stacked(session).map(tasks))
    assert not said(caplog)


def test_a_prefix_that_cannot_be_fused_takes_its_module_with_it(settings, caplog, same_tensors, stacked):
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
        state, _ = play_round(session.method.round(state), session.engine)
    task = session.method._train_task(replace(state, round=7), 0, state.stage)
    assert task.frozen
    with caplog.at_level(logging.WARNING, "fedprophet"):
        (mine,), (theirs,) = stacked(session).map([task]), session.engine.map([task])
    assert same_tensors(mine.parameters, theirs.parameters)
    assert len(said(caplog)) == 1


def test_other_attacks_and_kinds_of_work(session_of, caplog, stacked):
    session = session_of({"method": "jfat"})
    task = session.method.evaluation_task(session.method.initial(), 0, session.world.image_threat(1))
    where, kept = {"round": 1, "client": 0, "seed": 0}, {"features.0": torch.arange(2)}
    engine = stacked(session)
    with caplog.at_level(logging.WARNING, "fedprophet"):
        assert engine._job(replace(task, attack="autoattack", threat=None))  # then the attack does not matter
        assert engine._job(replace(task, attack="unheard-of")) is None
        assert engine._job(Report(**where)) is None
        assert engine._job(Adopt(**where)) is None
        assert engine._job(Refresh(**where, last=task.last)) is None
        assert engine._job(replace(task, kept_channels=kept, head=0)) is None
        assert engine._job(replace(task, kept_channels=kept, adversarial_statistics=True)) is None
    assert said(caplog) == [
        "attack 'unheard-of'", "tasks of the kind 'refresh'", "sub-networks of a part of the model",
        "two sets of norm statistics in a sub-network or a cascade",
    ]  # fmt: skip


def test_a_model_without_a_linear_layer_and_scores_that_are_measured(session_of, settings, caplog, stacked, joint):
    session = session_of({"method": "jfat"})
    engine, task = stacked(session), joint(session)[0]
    with caplog.at_level(logging.WARNING, "fedprophet"):
        assert engine._job(replace(task, last=4)) is None
        measure = Measure(round=1, client=0, seed=0, last=task.last, threat=session.world.image_threat(1))
        assert engine._job(measure) is None
    assert said(caplog) == ["a model without a linear layer", "measuring class scores"]


def test_what_a_task_says_is_known_or_left_to_the_plain_path(session_of, caplog, stacked, joint, same_tensors):
    """A field that somebody adds to a task is not ignored: where it is used, the client itself has to know it."""

    @dataclass(frozen=True, kw_only=True)
    class LaterTrain(Train):
        mixing: float = 0.0

    @dataclass(frozen=True)
    class LaterTraining(LocalTraining):
        nesterov: bool = False

    session = session_of({"method": "jfat"})
    (task,), engine = joint(session, clients=(0,)), stacked(session)
    as_before = LaterTrain(**vars(task))
    with caplog.at_level(logging.WARNING, "fedprophet"):
        assert engine._job(as_before) is not None
        (mine,), (theirs,) = (one.map([replace(as_before, mixing=0.5)]) for one in (engine, session.engine))
        assert engine._job(replace(task, training=LaterTraining(**vars(task.training)))) is None
        assert engine._job(replace(task, threat=ThreatModel("l1", 0.1, 0.1, 1))) is None
    assert same_tensors(mine.parameters, theirs.parameters)
    assert said(caplog) == ["LaterTrain.mixing", "LaterTraining", "norm 'l1'"]


def test_training_within_a_limit_of_memory_is_left_to_the_plain_path(session_of, caplog, stacked, joint):
    """A stack takes the memory of all its clients."""
    session = session_of({"method": "jfat"})
    (task,), engine = joint(session, clients=(0,)), stacked(session)
    with caplog.at_level(logging.WARNING, "fedprophet"):
        (answer,) = engine.map([replace(task, memory=10**9)])
    assert said(caplog) == ["Train.memory"]
    assert answer.plan == "plain"
    assert 0 < answer.peak <= 10**9


def test_a_new_kind_of_task_goes_to_the_plain_path(session_of, caplog, stacked, joint):
    session = session_of({"method": "jfat"})

    @dataclass(frozen=True, kw_only=True)
    class Rehearse(Train, kind="rehearse"):
        """It has no fields of its own, and means something else."""

    try:
        with caplog.at_level(logging.WARNING, "fedprophet"):
            assert stacked(session)._job(Rehearse(**vars(joint(session)[0]))) is None
    finally:
        del TASKS["rehearse"]
    assert said(caplog) == ["tasks of the kind 'rehearse'"]


def test_a_class_that_only_has_the_name_of_a_kind_goes_to_the_plain_path(session_of, caplog, stacked):
    """A kind that nobody registered, or that belongs to another class, says nothing about a task."""

    @dataclass(frozen=True, kw_only=True)
    class Nameless(ModelTask):
        """It has no kind."""

    class Disguised(ModelTask):
        kind = "train"

    engine = stacked(session_of({"method": "jfat"}))
    with caplog.at_level(logging.WARNING, "fedprophet"):
        assert engine._job(Nameless(round=1, client=0, seed=0)) is None
        assert engine._job(Disguised(round=1, client=0, seed=0)) is None
    assert said(caplog) == ["tasks of the kind 'Nameless'", "tasks of the kind 'train'"]


def test_a_job_keeps_what_it_has_cached_unless_its_width_changes(session_of, stacked, joint):
    session = session_of({"method": "jfat"})
    job = stacked(session)._job(joint(session)[0])
    assert at_width(job, WHOLE) is job
    assert at_width(job, 2).width == 2


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_plays_on_it(session_of, method, stacked):
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
    _, expected = play_round(plain.method.round(plain.method.initial()), plain.engine)
    state, engine = fast.method.initial(), stacked(fast)
    state, first = play_round(fast.method.round(state), engine)
    _, second = play_round(fast.method.round(state), engine)
    assert first["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert first["clean"] == pytest.approx(expected["clean"], abs=0.02)
    assert not first["dropped"]
    assert not second["dropped"]
    assert math.isfinite(second["loss"])


@pytest.mark.slow
@pytest.mark.usefixtures("same_starts")
@pytest.mark.parametrize("method", ["jfat", "fedprophet"])
def test_runs_learn_as_much_as_on_the_plain_engine(session_of, method, stacked):
    """Three attacked rounds: signs of small gradients differ, so they are compared by what they learn."""
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
            state, record = play_round(session.method.round(state), engine)
            records.append(record)
        runs.append(records)
    for plain, mine in zip(*runs, strict=True):
        assert mine["loss"] == pytest.approx(plain["loss"], rel=0.04)
        assert mine["clean"] == pytest.approx(plain["clean"], abs=0.12)
        assert mine["adversarial"] == pytest.approx(plain["adversarial"], abs=0.12)
    first, _, last = runs[0]
    assert last["loss"] < 0.95 * first["loss"]


def test_a_round_that_is_played_again_ends_in_the_same_bytes(session_of, same_tensors, stacked):
    """A fresh engine that goes on from a state, as after a resume, and one that has played before it."""
    session = session_of({"rounds": 4, "train.warmup": 1})
    engine, state = stacked(session), session.method.initial()
    for _ in range(2):
        before, (state, record) = state, play_round(session.method.round(state), engine)
    again, repeated = play_round(session.method.round(before), stacked(session))
    assert same_tensors(state.model, again.model)
    assert same_tensors(state.heads, again.heads)
    assert record == repeated


def test_images_that_are_no_images(settings, stacked):
    """Whatever the data looks like, what is not an image is left to the plain path."""
    images, labels = torch.rand(60, 4), torch.arange(60) % 3
    data = from_tensors(images, labels, images[:12], labels[:12])
    model = explicit_chain([("one", nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU())), ("two", nn.Linear(8, 3))])
    changes = {"method": "jfat", "population.clients": 3, "shards.kind": "iid"}
    session = assemble(settings(changes), model=model, dataset=data)
    _, record = play_round(session.method.round(session.method.initial()), stacked(session))
    assert math.isfinite(record["loss"])
