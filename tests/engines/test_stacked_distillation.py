"""Predictions and distillation on the stacked engine, and whole rounds of FedDF and FedET, against the plain one."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedprophet.fast.kernels import Kernels
from fedprophet.fast.rounds import TrainingPlan
from fedprophet.messages.answers import Answer
from fedprophet.messages.tasks import Distill, Predict, Task
from fedprophet.messages.values import BACKBONE, SERVER, LocalTraining
from fedprophet.methods.feddf import mean_prediction
from fedprophet.methods.fedet import consensus
from fedprophet.runs.session import Session
from fedprophet.server.coordinator import Engine, play_round

SMALL = ["cnn3", "vgg-small-3", "vgg-small"]
LIKE = ["vgg-small-3", "vgg-small-5", "vgg-small"]
"""Models whose last layers are of one shape, as FedET needs."""
PUBLIC = 40
SETTINGS = {
    "method": "feddf",
    "distillation.family": SMALL,
    "distillation.public": PUBLIC,
    "distillation.iterations": 5,
    "train.warmup": 3,  # nothing is attacked
    "rounds": 4,
    "population.cohort": 6,
    "evaluate.clients": 2,
}
HYPER = LocalTraining(5, 16, learning_rate=0.1, momentum=0.9, weight_decay=0.01, strong_convexity=0.02)
"""Batches of 16, 16 and 8, and two more."""


@pytest.fixture(scope="module")
def session(session_of) -> Session:
    return session_of(SETTINGS)


def drawn(value: Tensor, draw: torch.Generator) -> Tensor:
    """Return a tensor of a shape: weights by what they read, numbers of channels around 0.8, a count of 5."""
    if value.ndim > 1:
        return torch.randn(value.shape, generator=draw) * (2 / value[0].numel()) ** 0.5
    return 0.6 + 0.4 * torch.rand(value.shape, generator=draw) if value.ndim else torch.tensor(5)


def model_of(session: Session, name: str, seed: int = 0) -> dict[str, Tensor]:
    """Return a whole model of the family, whatever its chain has learned in other tests."""
    draw = torch.Generator().manual_seed(seed)
    return {tensor: drawn(value, draw) for tensor, value in session.world.family[name].chain.tensors.items()}


def fields_of(session: Session, name: str) -> dict:
    return {
        "round": 3,
        "client": SERVER,
        "seed": 7,
        "architecture": name,
        "last": len(session.world.family[name].chain),
    }


def predictions_of(session: Session, names: Iterable[str], **changes) -> list[Predict]:
    return [
        Predict(**fields_of(session, name), number=number, parameters=model_of(session, name, number), **changes)
        for number, name in enumerate(names)
    ]


def distillations_of(session: Session, targets: dict[str, Tensor], names: Iterable[str], **changes) -> list[Distill]:
    given = {"training": replace(HYPER, **changes), "targets": targets}
    return [
        Distill(**fields_of(session, name), number=number, parameters=model_of(session, name), **given)
        for number, name in enumerate(names)
    ]


def scores(models: int = 3, seed: int = 2) -> Tensor:
    """Return what models say of the public samples, of which they see some alike."""
    draw = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(PUBLIC, 10, generator=draw) + 0.5 * torch.randn(models, PUBLIC, 10, generator=draw)


# Predicting.


@pytest.mark.parametrize("kernels", [Kernels(), Kernels(16)], ids=["exact", "padded"])
def test_predictions(session, kernels, stacked, paired, caplog):
    """Of several models of each architecture."""
    tasks = predictions_of(session, ["cnn3", BACKBONE, "vgg-small-3", "cnn3", BACKBONE])
    with caplog.at_level(logging.WARNING, "fedprophet"):
        pairs = paired(stacked(session, kernels=kernels).map(tasks), session.engine.map(tasks))
    assert not caplog.records
    for mine, theirs in pairs:
        assert (mine.kind, mine.round, mine.weight) == (theirs.kind, theirs.round, theirs.weight)
        assert mine.logits.shape == (PUBLIC, 10)
        assert mine.logits.dtype == torch.float32
        torch.testing.assert_close(mine.logits, theirs.logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(pairs[0][0].logits, pairs[3][0].logits, atol=1e-2)


def test_predictions_in_pieces_are_those_of_all_samples_at_once(session, stacked, paired):
    tasks = predictions_of(session, ["cnn3", "cnn3", BACKBONE], batch=PUBLIC + 1)
    in_pieces = [replace(task, batch=16) for task in tasks]  # 16, 16 and 8
    engine = stacked(session)
    assert [engine._job(task).at_once for task in (*tasks, *in_pieces)] == [PUBLIC] * 3 + [16] * 3
    for mine, theirs in paired(engine.map(in_pieces), engine.map(tasks)):
        torch.testing.assert_close(mine.logits, theirs.logits, rtol=1e-5, atol=1e-6)


def test_images_of_the_public_set_are_fetched_once(session, stacked):
    """For all models, predictions and distillation, round after round."""
    engine = stacked(session)
    tasks = [*predictions_of(session, SMALL[:2]), *distillations_of(session, mean_prediction(scores()), SMALL[:2])]
    list(engine.map(tasks))
    kept = engine._inputs.resident.get(("images", SERVER, "train"))
    assert len(kept) == PUBLIC
    assert engine._inputs.resident.size == kept.nbytes
    list(engine.map(tasks))
    assert engine._inputs.resident.get(("images", SERVER, "train")) is kept


# Distilling.


@pytest.fixture
def assert_same_distillation(stacked, paired, close, caplog):
    """Return a function that distils on both engines and compares losses and whole models."""

    def check(session: Session, tasks: list[Distill], engine: Engine | None = None) -> list[Answer]:
        with caplog.at_level(logging.WARNING, "fedprophet"):
            pairs = paired((engine or stacked(session)).map(tasks), session.engine.map(tasks))
        assert not caplog.records
        for (mine, theirs), task in zip(pairs, tasks, strict=True):
            assert (mine.kind, mine.round, mine.number, mine.weight) == (
                theirs.kind, theirs.round, theirs.number, theirs.weight
            )  # fmt: skip
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
            assert list(mine.parameters) == list(theirs.parameters)
            for name, value in theirs.parameters.items():
                found = mine.parameters[name]
                assert (found.shape, found.dtype) == (value.shape, value.dtype)
                assert found.is_contiguous()
                assert close(found.float(), value.float()), name
                assert not torch.equal(value, task.parameters[name]) or "bias" in name, name
        return [mine for mine, _ in pairs]

    return check


@pytest.mark.parametrize("kernels", [Kernels(), Kernels(16)], ids=["exact", "padded"])
def test_towards_the_mean_prediction(session, kernels, stacked, assert_same_distillation):
    """FedDF's targets; the third batch has 8 samples, counters went up by 5."""
    tasks = distillations_of(session, mean_prediction(scores()), ["cnn3", "vgg-small-3", BACKBONE])
    found = assert_same_distillation(session, tasks, stacked(session, kernels=kernels))
    counters = [value for name, value in found[0].parameters.items() if name.endswith("num_batches_tracked")]
    assert [int(value) for value in counters] == [10, 10]


def test_towards_a_consensus_and_those_that_disagree(session, assert_same_distillation):
    """FedET's targets."""
    targets = consensus(scores(), 0.5)
    assert set(targets["weights"].unique().tolist()) == {0.0, 0.5}
    assert_same_distillation(session, distillations_of(session, targets, ["cnn3", BACKBONE]))


def test_towards_a_consensus_that_no_model_disagrees_with(session, assert_same_distillation):
    """Then the divergence has no part: probabilities and weights are 0."""
    targets = consensus(scores()[:1].expand(3, -1, -1), 0.5)
    assert not targets["weights"].any()
    assert not targets["probabilities"].any()
    found = assert_same_distillation(session, distillations_of(session, targets, [BACKBONE]))
    assert found[0].loss > 0.5


@pytest.mark.parametrize(
    "changes",
    [{"momentum": 0.0, "weight_decay": 0.0}, {"proximal": 2.0}, {"iterations": 1}, {"batch": PUBLIC}],
    ids=str,
)
def test_other_hyper_parameters(session, changes, assert_same_distillation):
    assert_same_distillation(session, distillations_of(session, mean_prediction(scores()), ["vgg-small-3"], **changes))


def test_a_plan_is_kept_and_takes_what_the_next_round_brings(session, stacked, assert_same_distillation, plans):
    """Other targets, labels where there were none, another learning rate."""
    engine = stacked(session)
    names = ["cnn3", BACKBONE]
    assert_same_distillation(session, distillations_of(session, consensus(scores(), 0.5), names), engine)
    later = distillations_of(session, mean_prediction(scores(seed=3)), names, learning_rate=0.05)
    assert_same_distillation(session, [replace(task, round=4) for task in later], engine)
    assert [(plan.taught, plan.ladder.clients) for plan in plans] == [(True, 1), (True, 1)]


def test_models_of_one_architecture_are_distilled_together(session, assert_same_distillation, plans):
    tasks = distillations_of(session, mean_prediction(scores()), ["vgg-small-3", "vgg-small-3"])
    tasks[1] = replace(tasks[1], targets=consensus(scores(seed=9), 0.5))
    assert_same_distillation(session, tasks)
    assert [plan.ladder.clients for plan in plans] == [2]


def test_dropout_is_drawn_anew_for_each_model(session, stacked, monkeypatch):
    """Its draws differ from the plain path's, and are the same for the same task."""
    used, run = [], TrainingPlan.run

    def noted(plan: TrainingPlan, batches: Iterable[Tensor], seeds: Sequence[int]) -> None:
        used.append(list(seeds))
        run(plan, batches, seeds)

    monkeypatch.setattr(TrainingPlan, "run", noted)
    tasks = distillations_of(session, mean_prediction(scores()), ["vgg-small-3", "vgg-small-3"])
    for _ in range(2):
        list(stacked(session).map(tasks))
    list(stacked(session).map([replace(task, round=4) for task in tasks]))
    first, again, next_round = used
    assert first == again
    assert len({*first, *next_round}) == 4


def test_a_model_that_is_no_number_says_so_in_its_loss(session, stacked):
    (task,) = distillations_of(session, mean_prediction(scores()), ["cnn3"])
    first = next(iter(task.parameters))
    spoilt = {**task.parameters, first: task.parameters[first] * torch.nan}
    (answer,) = stacked(session).map([replace(task, parameters=spoilt)])
    assert not torch.isfinite(torch.tensor(answer.loss))


def test_what_is_left_to_the_plain_path(session, stacked, caplog):
    engine, given = stacked(session), mean_prediction(scores())
    (task,), (predicts,) = distillations_of(session, given, ["cnn3"]), predictions_of(session, ["cnn3"])

    def refused(task: Task) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fedprophet"):
            assert engine._job(task) is None
        return caplog.messages[0].removeprefix("the GPU engine leaves this to the plain path: ")

    assert engine._job(task) is not None
    assert refused(replace(task, training=replace(HYPER, batch=13))) == "a batch of a single sample"
    assert refused(replace(task, training=replace(HYPER, fixed_statistics=True))).startswith("distilling with what")
    assert refused(replace(task, last=task.last - 1)) == "distilling a part of the model"
    assert refused(replace(task, first=1)) == "Distill.first"
    assert refused(replace(predicts, first=1)) == "Predict.first"
    assert refused(replace(predicts, last=predicts.last - 1)) == "a model without a linear layer"


# Rounds.


@pytest.mark.parametrize(
    ("method", "family", "options"),
    [
        ("feddf", SMALL, {}),
        ("feddf", SMALL, {"distillation.norm_layers": "kept", "norm.layers": "shared"}),
        ("fedet", LIKE, {"distillation.diversity": 0.5}),
    ],
    ids=["feddf", "feddf-kept", "fedet"],
)
def test_a_round_ends_with_the_plain_engines_model(session_of, method, family, options, stacked, dealt, close, caplog):
    """Nothing of it is left to the plain path: not the reports, which do not compute."""
    caplog.set_level(logging.WARNING, "fedprophet")
    changes = {**SETTINGS, "method": method, "distillation.family": family, "train.learning_rate": 0.05, **options}
    ends = []
    for fast in (False, True):
        session = session_of(changes)
        engine = dealt(session, stacked(session) if fast else session.engine)
        ends.append(play_round(session.method.round(session.method.initial()), engine))
    (plain, expected), (fast, found) = ends
    assert not caplog.records
    assert len(set(expected["architectures"].values())) == 3
    assert found["architectures"] == expected["architectures"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["distillation"] == {
        name: pytest.approx(loss, rel=1e-4) for name, loss in expected["distillation"].items()
    }
    assert found["dropped"] == expected["dropped"] == {}
    assert set(fast.models) == set(plain.models)
    for name, model in plain.models.items():
        assert all(close(fast.models[name][n].float(), value.float(), 1e-3) for n, value in model.items()), name
    assert close(fast.model["features.0.weight"], plain.model["features.0.weight"])
