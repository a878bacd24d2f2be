"""What a task starts from at a client: its label frequencies, and the layers of a client that has none of its own."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedprophet.attacks.pgd import climb
from fedprophet.cascade.atoms import explicit_chain
from fedprophet.cascade.heads import build_head
from fedprophet.client.features import FeatureCache
from fedprophet.client.job import Job
from fedprophet.client.layer_store import ClientStore
from fedprophet.client.run import Client, run_client
from fedprophet.client.workspace import Workspace
from fedprophet.data.augmented import shifted
from fedprophet.data.dataset import ClientData
from fedprophet.data.examples import LocalExamples, TensorExamples
from fedprophet.messages.codec import encode
from fedprophet.messages.modules import ModuleStore
from fedprophet.messages.tasks import Evaluate, Measure, Predict, Refresh, Train
from fedprophet.messages.values import FrozenModule, LocalTraining, Resources
from fedprophet.threat import feature_threat, input_threat

HYPER = LocalTraining(2, 4, learning_rate=0.1, momentum=0.0, weight_decay=0.0, strong_convexity=0.0)
LABELS = (0, 0, 0, 1, 0, 0)
"""Of the training samples: five of label 0, one of label 1, none of label 2."""
THREAT = input_threat(0.1, 0.05, 2)


@pytest.fixture
def workspace() -> Workspace:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    chain = explicit_chain([("one", first), ("two", nn.Sequential(nn.Flatten(), nn.Linear(8, 3)))])
    return Workspace(chain, (1, 2, 2), 3, ModuleStore(), ClientStore(None, 10**6), FeatureCache(10**6, 10**6))


@pytest.fixture
def client() -> Client:
    torch.manual_seed(1)
    examples = TensorExamples(torch.rand(8, 1, 2, 2), torch.tensor([*LABELS, 2, 2]))
    data = ClientData(LocalExamples(examples, np.arange(6)), LocalExamples(examples, np.arange(6, 8)))
    return Client(data, lambda number: Resources(1, 1.0, 1.0))


def fields(workspace, **more):
    parameters = {name: workspace.chain.tensors[name].detach().clone() for name in workspace.chain.shared()}
    return {"round": 1, "client": 0, "seed": 0, "last": 2, "parameters": parameters, **more}


@pytest.mark.parametrize(
    ("smoothing", "frequencies"),
    [(1.0, (6 / 9, 2 / 9, 1 / 9)), (0.25, (5.25 / 6.75, 1.25 / 6.75, 0.25 / 6.75)), (1e6, (1 / 3, 1 / 3, 1 / 3))],
)
def test_the_prior_by_hand(workspace, client, smoothing, frequencies):
    task = Train(**fields(workspace), training=HYPER, calibration=smoothing)
    prior = Job(task, client, workspace).prior
    assert prior.exp().tolist() == pytest.approx(frequencies, rel=1e-5)
    assert prior.exp().sum().item() == pytest.approx(1.0)
    for other in (Evaluate(**fields(workspace), calibration=smoothing), Refresh(**fields(workspace), calibration=1.0)):
        assert bool(torch.isfinite(Job(other, client, workspace).prior).all()), "a label never seen stays possible"


def test_without_calibration_there_is_no_prior(workspace, client):
    assert Job(Train(**fields(workspace), training=HYPER), client, workspace).prior is None
    assert Job(Evaluate(**fields(workspace)), client, workspace).prior is None


def test_a_client_without_samples_knows_nothing(workspace, client):
    nobody = LocalExamples(TensorExamples(torch.rand(1, 1, 2, 2), torch.tensor([0])), np.arange(0))
    alone = replace(client, data=replace(client.data, own=nobody))
    prior = Job(Evaluate(**fields(workspace), calibration=1.0), alone, workspace).prior
    assert prior.exp().tolist() == pytest.approx([1 / 3] * 3)


def test_frequencies_are_those_of_training_samples_alone(workspace, client):
    """Label 2 is held out: knowing that would be knowing the answer."""
    prior = Job(Evaluate(**fields(workspace), calibration=1.0), client, workspace).prior
    assert math.exp(prior[2]) == pytest.approx(1 / 9)


def undecided(workspace):
    """Return parameters of a model that scores every label alike."""
    parameters = fields(workspace)["parameters"]
    return {name: torch.zeros_like(v) if name.startswith("two.") else v for name, v in parameters.items()}


def test_personalised_predictions_are_calibrated(workspace, client):
    """Scores are 0.1 for label 2 and else 0: with frequencies 6/9, 2/9 and 1/9, label 0 is predicted."""
    parameters = undecided(workspace)
    parameters["two.1.bias"] = torch.tensor([0.0, 0.0, 0.1])
    task = Evaluate(**{**fields(workspace), "parameters": parameters}, threat=THREAT)
    # Held out are two samples of label 2; an attack cannot move constant scores.
    found = [run_client(replace(task, calibration=c), client, workspace) for c in (0.0, 1.0)]
    assert [(answer.clean, answer.adversarial) for answer in found] == [(2, 2), (0, 0)]


def test_loss_and_attack_see_the_prior(workspace, client, monkeypatch):
    """Two samples, one step: the loss is that of scores 0 + log π, and the attack climbs that very loss."""
    attacked = []

    def watched(losses, x, perturbed, threat):
        attacked.append(float(losses(x).detach()))
        return climb(losses, x, perturbed, threat)

    monkeypatch.setattr("fedprophet.client.captured.climb", watched)
    one = replace(HYPER, iterations=1, batch=6)
    task = Train(**{**fields(workspace), "parameters": undecided(workspace)}, training=one, threat=THREAT)
    cases = ((0.0, math.log(3)), (1.0, -(5 * math.log(6 / 9) + math.log(2 / 9)) / 6))
    for calibration, expected in cases:
        loss = run_client(replace(task, calibration=calibration), client, workspace).loss
        assert loss == pytest.approx(expected, rel=1e-5)
        assert attacked.pop() == pytest.approx(6 * expected, rel=1e-5)


def test_an_auxiliary_head_is_calibrated_too(workspace, client):
    head = {f"heads/0.{name}": torch.zeros_like(p) for name, p in build_head((2, 2, 2), 3).named_parameters()}
    parameters = {**{n: v for n, v in fields(workspace)["parameters"].items() if n.startswith("one.")}, **head}
    one = replace(HYPER, iterations=1, batch=6)
    task = Train(**{**fields(workspace), "last": 1, "head": 0, "parameters": parameters}, training=one)
    found = [run_client(replace(task, calibration=c), client, workspace) for c in (0.0, 1.0)]
    assert found[0].loss == pytest.approx(math.log(3), rel=1e-5)
    assert found[1].loss == pytest.approx(-(5 * math.log(6 / 9) + math.log(2 / 9)) / 6, rel=1e-5)
    # The bias steps along frequency minus prior: 5/6 and 1/6 of the samples, against 1/3 each, or 6/9, 2/9, 1/9.
    steps = [(0.1 * (5 / 6 - 1 / 3), 0.1 * (1 / 6 - 1 / 3)), (0.1 * (5 / 6 - 6 / 9), 0.1 * (1 / 6 - 2 / 9))]
    for answer, expected in zip(found, steps, strict=True):
        assert answer.parameters["heads/0.bias"].tolist()[:2] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["train", "evaluate", "refresh"])
def test_no_answer_says_anything_of_the_frequencies(workspace, client, kind):
    """An answer has the same fields and tensors with calibration as without, and the prior is none of them."""
    task = {
        "train": Train(**fields(workspace), training=HYPER, threat=THREAT, wants_local=True),
        "evaluate": Evaluate(**fields(workspace), threat=THREAT),
        "refresh": Refresh(**fields(workspace), threat=THREAT),
    }[kind]
    prior = Job(replace(task, calibration=1.0), client, workspace).prior
    (plain, tensors), (table, others) = (
        encode(run_client(replace(task, calibration=c), client, workspace)) for c in (0.0, 1.0)
    )
    assert table.keys() == plain.keys()
    assert {name: value.shape for name, value in others.items()} == {name: v.shape for name, v in tensors.items()}
    assert not any(torch.equal(value, prior) or torch.equal(value, prior.exp()) for value in others.values())
    numbers = json.dumps(table)
    assert not any(f"{value:.4f}"[:6] in numbers for value in (*prior.tolist(), *prior.exp().tolist()))


@pytest.mark.parametrize("kind", [Predict, Measure])
def test_what_is_asked_of_a_bare_model_knows_no_calibration(kind, workspace):
    assert "calibration" not in kind.__dataclass_fields__
    if kind is Measure:
        assert kind(**fields(workspace), threat=feature_threat(1.0, 1, (0.0, 1.0)))


# Layers of a client that has none ------------------------------------------------------------------------------------


def starting(workspace):
    """Return layers that are neither the initial ones nor any that a client has trained."""
    return {name: torch.full_like(workspace.initial[name], 2) for name in workspace.chain.local()}


def test_a_client_without_layers_takes_those_it_is_sent(workspace, client):
    given = starting(workspace)
    task = Evaluate(**fields(workspace, starting=given))
    assert all(torch.equal(Job(task, client, workspace).local[name], value) for name, value in given.items())
    assert all(torch.equal(Job(task, client, workspace).tensors[name], value) for name, value in given.items())
    without = Job(replace(task, starting={}), client, workspace).local
    assert all(torch.equal(without[name], value) for name, value in workspace.initial.items())


def test_a_client_with_layers_keeps_them(workspace, client):
    task = Train(**fields(workspace, starting=starting(workspace)), training=HYPER, wants_local=True)
    own = run_client(task, client, workspace).local
    assert int(own["one.1.num_batches_tracked"]) == 2 + 2, "it began with those it was sent"
    later = Job(Evaluate(**fields(workspace, starting=starting(workspace))), client, workspace)
    assert all(torch.equal(later.local[name], value) for name, value in own.items())


def test_adversarial_statistics_may_be_sent_too(workspace, client):
    given = {**starting(workspace), "adversarial.one.1.running_mean": torch.full((2,), 7.0)}
    job = Job(Evaluate(**fields(workspace, starting=given), adversarial_statistics=True), client, workspace)
    assert job.tensors["adversarial.one.1.running_mean"].tolist() == [7.0, 7.0]
    assert job.tensors["adversarial.one.1.running_var"].tolist() == [2.0, 2.0], "else the clean ones"


def test_features_behind_other_starting_layers_are_other_features(workspace, client):
    task = Train(**fields(workspace, first=1, starting=starting(workspace)), training=HYPER)
    others = {name: value + 1 for name, value in starting(workspace).items()}
    keys = {Job(replace(task, starting=given), client, workspace).features_key for given in ({}, task.starting, others)}
    assert len(keys) == 3


def test_mirror_images_change_neither_weights_nor_frequencies(workspace, client):
    """Six own samples, twelve to train on, two held out: the weight is 8, and frequencies stay 6/9, 2/9, 1/9."""
    mirrored = replace(client, data=replace(client.data, mirrored=True))
    task = Train(**fields(workspace), training=HYPER, calibration=1.0)
    assert Job(task, mirrored, workspace).prior.exp().tolist() == pytest.approx((6 / 9, 2 / 9, 1 / 9), rel=1e-5)
    trained = run_client(task, mirrored, workspace)
    assert (trained.samples, trained.weight) == (12, 8.0)
    refreshed = run_client(Refresh(**fields(workspace)), mirrored, workspace)
    assert (refreshed.samples, refreshed.weight) == (12, 6.0)
    measured = run_client(Measure(**fields(workspace), threat=THREAT), mirrored, workspace)
    assert (measured.samples, measured.weight) == (12, 6.0)
    assert run_client(Evaluate(**fields(workspace)), mirrored, workspace).samples == 2


def test_training_images_move_by_other_offsets_in_each_round_and_client(workspace, client):
    shifting = replace(client, data=replace(client.data, mirrored=True, shift=2))
    task = Train(**fields(workspace), training=HYPER)
    others = (
        replace(task, round=task.round + 1),
        replace(task, client=task.client + 1),
        replace(task, seed=task.seed + 1),
    )
    first, *rest = (Job(each, shifting, workspace).offsets for each in (task, *others))
    assert first.shape == (12, 2)
    assert {int(offset) for offsets in (first, *rest) for offset in offsets.flatten()} == {-2, -1, 0, 1, 2}
    assert torch.equal(first, Job(task, shifting, workspace).offsets)
    assert not any(torch.equal(first, other) for other in rest)


def test_only_training_sees_moved_images(workspace, client):
    shifting = replace(client, data=replace(client.data, shift=1))
    for task in (
        Refresh(**fields(workspace)),
        Measure(**fields(workspace), threat=THREAT),
        Evaluate(**fields(workspace)),
    ):
        job = Job(task, shifting, workspace)
        assert job.offsets is None
        assert job.examples is shifting.data.train
    assert Job(Train(**fields(workspace), training=HYPER), client, workspace).examples is client.data.train


@pytest.mark.parametrize("first", [0, 1])
def test_batches_have_moved_images_behind_frozen_modules_too(workspace, client, first):
    """One batch of all six: the trained part reads each image as it was moved, or its features; none are kept."""
    seen = []
    shifting = replace(client, data=replace(client.data, shift=1))
    shared = fields(workspace)["parameters"]
    module = FrozenModule(0, 1, workspace.modules.add({n: shared.pop(n) for n in workspace.chain.shared(0, first)}))
    hyper = replace(HYPER, iterations=1, batch=6)
    task = Train(**fields(workspace, first=first, parameters=shared, frozen=(module,) * first), training=hyper)
    hook = workspace.chain.atoms[first].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    run_client(task, shifting, workspace)
    hook.remove()
    images = shifted(client.data.own.fetch(torch.arange(6)), Job(task, shifting, workspace).offsets)
    moved = TensorExamples(images, client.data.own.labels)
    expected = workspace.part(0, 1).run_over(moved, 6) if first else images
    assert sorted(seen[-1].flatten(1).tolist()) == sorted(expected.flatten(1).tolist())
    assert not workspace.features.memory.size


def test_batches_have_mirror_images(workspace, client):
    """One batch of all twelve: the model reads each image and its mirror image once."""
    seen = []
    mirrored = replace(client, data=replace(client.data, mirrored=True))
    hook = workspace.chain.atoms[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    run_client(Train(**fields(workspace), training=replace(HYPER, iterations=1, batch=12)), mirrored, workspace)
    hook.remove()
    own = client.data.own.fetch(torch.arange(6))
    expected = torch.cat([own, own.flip(3)])
    assert sorted(seen[-1].flatten(1).tolist()) == sorted(expected.flatten(1).tolist())
