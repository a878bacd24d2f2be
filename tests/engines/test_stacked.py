"""The stacked engine against the plain one: whole rounds and runs, and what it leaves to the plain path."""

import logging
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedprophet.cascade.atoms import explicit_chain
from fedprophet.data.dataset import from_tensors
from fedprophet.fast.kernels import TorchKernels
from fedprophet.messages.task import SERVER
from fedprophet.methods import METHODS
from fedprophet.models.normalize import Normalize
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import hold

PARTIAL = ("heterofl", "feddrop", "fedrolex")


def said(caplog) -> list[str]:
    return [r.getMessage().removeprefix("the GPU engine leaves this to the plain path: ") for r in caplog.records]


@pytest.mark.parametrize("kernels", [TorchKernels(), TorchKernels(16)], ids=["exact", "padded"])
@pytest.mark.parametrize("model", ["vgg-small", "resnet10"])
@pytest.mark.parametrize("method", ["jfat", "fedprophet", *PARTIAL])
def test_rounds_without_an_attack_equal_the_plain_engines(session_of, method, model, kernels, caplog, stacked, close):
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


def test_other_models_go_to_the_plain_path_and_it_is_said_once(
    session_of, caplog, same_tensors, stacked, joint, paired
):
    session = session_of({"method": "jfat", "model.name": "cnn3", "model.options": {}})
    tasks, engine = joint(session, clients=(0, 1)), stacked(session)
    with caplog.at_level(logging.WARNING, "fedprophet"):
        for _ in range(2):
            for mine, theirs in paired(engine.map(tasks), session.engine.map(tasks)):
                assert same_tensors(mine.parameters, theirs.parameters)
    (reason,) = said(caplog)
    assert reason == "layer AdaptiveMaxPool2d"


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
        state, _ = hold(session.method.round(state), session.engine)
    task = session.method._train_task(replace(state, round=7), 0, state.stage)
    assert task.frozen
    with caplog.at_level(logging.WARNING, "fedprophet"):
        (mine,), (theirs,) = stacked(session).map([task]), session.engine.map([task])
    assert same_tensors(mine.parameters, theirs.parameters)
    assert len(said(caplog)) == 1


def test_other_attacks_and_kinds_of_work(session_of, caplog, stacked):
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


def test_a_model_without_a_linear_layer_and_scores_that_are_measured(session_of, settings, caplog, stacked, joint):
    session = session_of({"method": "jfat"})
    engine, task = stacked(session), joint(session)[0]
    with caplog.at_level(logging.WARNING, "fedprophet"):
        assert engine._kind_of(replace(task, last=4)) is None
        assert engine._kind_of(replace(task, kind="measure", threat=session.world.image_threat(1))) is None
    assert said(caplog) == ["a model without a linear layer", "measuring class scores"]


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
def test_runs_learn_as_much_as_on_the_plain_engine(session_of, method, stacked):
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


def test_a_round_that_is_played_again_ends_in_the_same_bytes(session_of, same_tensors, stacked):
    """A fresh engine that goes on from a state, as after a resume, and one that has played before it."""
    session = session_of({"rounds": 4, "train.warmup": 1})
    engine, state = stacked(session), session.method.initial()
    for _ in range(2):
        before, (state, record) = state, hold(session.method.round(state), engine)
    again, repeated = hold(session.method.round(before), stacked(session))
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
    _, record = hold(session.method.round(session.method.initial()), stacked(session))
    assert math.isfinite(record["loss"])
