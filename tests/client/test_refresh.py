"""Statistics that a client measures anew, against the same written out in plain torch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedprophet.attacks.pgd import pgd
from fedprophet.cascade.atoms import chain_of
from fedprophet.cascade.norms import share_norm_layers
from fedprophet.client.features import FeatureCache
from fedprophet.client.layer_store import ClientStore
from fedprophet.client.run import Client, run_client
from fedprophet.client.workspace import Workspace, as_written
from fedprophet.data.dataset import ClientData
from fedprophet.data.examples import LocalExamples, TensorExamples
from fedprophet.engines.cpu_plan import fast_plan
from fedprophet.messages.modules import ModuleStore
from fedprophet.messages.tasks import Evaluate, Refresh, Report, Train
from fedprophet.messages.values import FrozenModule, LocalTraining, Resources
from fedprophet.randomness import generator
from fedprophet.threat import input_threat

SAMPLES, BATCH = 9, 4
SEED, ROUND, NUMBER = 5, 2, 3
THREAT = input_threat(0.2, 0.1, 3)
STATISTICS = {f"{layer}.{part}" for layer in ("first", "second") for part in ("running_mean", "running_var")}
HYPER = LocalTraining(2, 4, learning_rate=0.1, momentum=0.9, weight_decay=0.0, strong_convexity=0.0)


class TwoNorms(nn.Module):
    """Two norm layers with dropout between them, as a layer and as a function."""

    def __init__(self):
        super().__init__()
        self.one, self.first, self.drop = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout(0.5)
        self.two, self.second = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        x = F.dropout(self.drop(torch.relu(self.first(self.one(x)))), 0.5, self.training)
        return self.last(torch.relu(self.second(self.two(x))).flatten(1))


def make(plan, layers="local", samples=SAMPLES):
    """Return a workspace, its model and a client; the statistics of the model are far from those of the images."""
    torch.manual_seed(0)
    model = TwoNorms()
    with torch.no_grad():
        for norm in (model.first, model.second):
            norm.weight.uniform_(0.5, 2.0)
            norm.bias.uniform_(-0.5, 0.5)
            norm.running_mean.uniform_(-3.0, 3.0)
            norm.running_var.uniform_(0.01, 9.0)
    chain = share_norm_layers(chain_of(model), layers)
    features = FeatureCache(10**6, 10**6)
    workspace = Workspace(chain, (1, 4, 4), 3, ModuleStore(), ClientStore(None, 10**6), features)
    workspace.run_by(plan)
    examples = TensorExamples(torch.rand(12, 1, 4, 4), torch.tensor([0, 0, 1, 0, 1, 0, 0, 1, 0, 2, 2, 2]))
    data = ClientData(LocalExamples(examples, np.arange(samples)), LocalExamples(examples, np.arange(9, 12)))
    return workspace, model, Client(data, lambda number: Resources(1, 1.0, 1.0))


def refresh(workspace, **changes):
    parameters = {name: workspace.chain.tensors[name].detach().clone() for name in workspace.chain.shared()}
    task = Refresh(round=ROUND, client=NUMBER, seed=SEED, last=len(workspace.chain), batch=BATCH, parameters=parameters)
    return replace(task, **changes)


def same(one, other):
    """Whether two tables have the same tensors under the same names."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def moments(x):
    """Return mean and variance of each channel."""
    rows = x.double().transpose(0, 1).flatten(1)
    return rows.mean(1), rows.var(1, correction=0)


def normalised(norm, x, statistics):
    mean, variance = (value.view(1, -1, 1, 1).to(x) for value in statistics)
    scaled = (x - mean) / (variance + norm.eps).sqrt()
    return torch.relu(scaled * norm.weight.view(1, -1, 1, 1) + norm.bias.view(1, -1, 1, 1))


def seen_by_hand(model, client, threat, prior):
    """Return the client's training images in batches of at most four, of about one size, attacked or not."""
    n = len(client.data.train)
    sizes = {9: (3, 3, 3), 5: (3, 2), 1: (1,)}[n]
    images, labels = client.data.train.fetch(torch.arange(n)), client.data.train.labels
    found, start = [], 0
    model.eval()
    for number, size in enumerate(sizes):
        x, y = images[start : start + size], labels[start : start + size]
        if threat is not None:
            draw = generator(SEED, "refreshing attack", ROUND, NUMBER, number)
            x = pgd(lambda z, y=y: F.cross_entropy(model(z) + prior, y, reduction="sum"), x, threat, draw)
        found.append(x)
        start += size
    return found


@pytest.fixture(params=[as_written, fast_plan], ids=["plain", "fast"])
def plan(request):
    return request.param


def check(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], value.float(), rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("samples", [9, 5])
@pytest.mark.parametrize("threat", [None, THREAT], ids=["clean", "attacked"])
@pytest.mark.parametrize("calibration", [0.0, 0.5])
def test_all_layers_together_each_behind_layers_that_normalise_by_their_batch(plan, samples, threat, calibration):
    workspace, model, client = make(plan, samples=samples)
    counts = torch.bincount(client.data.train.labels, minlength=3) + calibration
    batches = seen_by_hand(model, client, threat, (counts / counts.sum()).log() if calibration else 0.0)
    with torch.no_grad():
        first = [model.one(x) for x in batches]
        second = [model.two(normalised(model.first, z, moments(z))) for z in first]
    expected = {}
    for name, z in (("first", first), ("second", second)):
        expected |= dict(zip((f"{name}.running_mean", f"{name}.running_var"), moments(torch.cat(z)), strict=True))
    answer = run_client(refresh(workspace, threat=threat, calibration=calibration), client, workspace)
    check(answer.statistics, expected)
    assert (answer.samples, answer.weight) == (samples, float(samples))


@pytest.mark.parametrize("threat", [None, THREAT], ids=["clean", "attacked"])
def test_layers_in_turn_the_second_behind_the_first_as_it_was_renewed(plan, threat):
    workspace, model, client = make(plan, layers="shared")
    task = refresh(workspace, threat=threat, layer="first")
    batches = seen_by_hand(model, client, threat, 0.0)
    with torch.no_grad():
        mean, variance = moments(model.one(torch.cat(batches)))
    found = run_client(task, client, workspace).statistics
    check(found, {"first.running_mean": mean, "first.running_var": variance})
    # The second pass: the server sends what it made of the first.
    parameters = {**task.parameters, **found}
    workspace.chain.load(found)
    batches = seen_by_hand(model, client, threat, 0.0)
    with torch.no_grad():
        read = model.two(normalised(model.first, model.one(torch.cat(batches)), (mean, variance)))
    found = run_client(replace(task, layer="second", parameters=parameters), client, workspace).statistics
    check(found, dict(zip(("second.running_mean", "second.running_var"), moments(read), strict=True)))


def test_a_module_is_measured_behind_the_frozen_ones_as_they_are(plan):
    workspace, model, client = make(plan, layers="shared")
    first = next(n for n in range(len(workspace.chain)) if "two.weight" in workspace.chain.shared(n, n + 1))
    names = workspace.chain.shared(0, first)
    frozen = {name: workspace.chain.tensors[name].detach().clone() for name in names}
    task = refresh(workspace)
    rest = {name: value for name, value in task.parameters.items() if name not in names}
    module = FrozenModule(0, first, workspace.modules.add(frozen))
    found = run_client(replace(task, first=first, frozen=(module,), parameters=rest), client, workspace).statistics
    with torch.no_grad():
        z = model.one(client.data.train.fetch(torch.arange(SAMPLES)))
        read = model.two(normalised(model.first, z, (frozen["first.running_mean"], frozen["first.running_var"])))
    check(found, dict(zip(("second.running_mean", "second.running_var"), moments(read), strict=True)))
    assert {"first.running_mean", "first.running_var"} <= frozen.keys()
    assert same({name: workspace.chain.tensors[name] for name in frozen}, frozen)


def test_statistics_that_no_longer_fit_do_not_matter_to_a_measurement_of_all_layers(plan):
    """Not even at the end of the samples: nine in batches of four leave no single one, which has no batch."""
    workspace, _, client = make(plan, layers="shared")
    task = refresh(workspace)
    spoilt = {name: value * 1e6 for name, value in task.parameters.items() if name.endswith("running_mean")}
    found = [
        run_client(replace(task, parameters={**task.parameters, **changed}), client, workspace).statistics
        for changed in ({}, spoilt)
    ]
    assert found[0].keys() == STATISTICS
    assert same(*found)


def test_one_sample_is_measured_behind_layers_as_they_are(plan):
    workspace, model, client = make(plan, samples=1)
    with torch.no_grad():
        z = model.one(client.data.train.fetch(torch.arange(1)))
        statistics = model.first.running_mean.clone(), model.first.running_var.clone()
        read = model.two(normalised(model.first, z, statistics))
    found = run_client(refresh(workspace), client, workspace).statistics
    expected = dict(zip(("first.running_mean", "first.running_var"), moments(z), strict=True))
    check(found, {**expected, **dict(zip(("second.running_mean", "second.running_var"), moments(read), strict=True))})


def test_without_samples_there_is_nothing_to_measure(plan):
    workspace, _, client = make(plan, samples=0)
    answer = run_client(refresh(workspace, keeps=True), client, workspace)
    assert (answer.statistics, answer.samples, answer.weight) == ({}, 0, 0.0)
    assert run_client(Report(round=ROUND, client=NUMBER, seed=SEED, wants_local=True), client, workspace).local == {}


def test_a_client_that_keeps_its_statistics_sends_none(plan):
    workspace, _, client = make(plan)
    sent = run_client(refresh(workspace), client, workspace)
    assert run_client(Report(round=ROUND, client=NUMBER, seed=SEED, wants_local=True), client, workspace).local == {}
    kept = run_client(refresh(workspace, keeps=True), client, workspace)
    assert (kept.statistics, kept.samples, kept.weight) == ({}, SAMPLES, float(SAMPLES))
    own = run_client(Report(round=ROUND, client=NUMBER, seed=SEED, wants_local=True), client, workspace).local
    assert own.keys() == STATISTICS
    assert same(own, sent.statistics)


def test_statistics_that_are_not_finite_are_not_kept(plan):
    workspace, _, client = make(plan)
    task = refresh(workspace, keeps=True)
    spoilt = {**task.parameters, "one.weight": task.parameters["one.weight"] * math.nan}
    assert run_client(replace(task, parameters=spoilt), client, workspace).samples == 0, "so the server knows"
    assert run_client(Report(round=ROUND, client=NUMBER, seed=SEED, wants_local=True), client, workspace).local == {}


def following(workspace, kind):
    task = refresh(workspace)
    common = {"round": ROUND, "client": NUMBER, "seed": SEED, "last": task.last, "parameters": task.parameters}
    if kind == "train":
        return Train(**common, training=HYPER, threat=THREAT, wants_local=True)
    return Evaluate(**common, threat=THREAT)


@pytest.mark.parametrize("layers", ["local", "shared", "statistics-local"])
@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize("layer", ["", "second"])
def test_the_next_task_does_not_notice(plan, layers, kind, layer):
    found = []
    for refreshes in (False, True):
        workspace, _, client = make(plan, layers=layers)
        task, measuring = following(workspace, kind), refresh(workspace, threat=THREAT, layer=layer)
        run_client(task, client, workspace)  # features and workspaces are there
        flags = [module.training for module in workspace.chain.model.modules()]
        if refreshes:
            run_client(measuring, client, workspace)
            assert flags == [module.training for module in workspace.chain.model.modules()]
            assert not any(module._forward_pre_hooks for module in workspace.chain.model.modules())
        found.append(run_client(task, client, workspace))
    if kind == "evaluate":
        assert found[0] == found[1]
        return
    assert found[0].loss == found[1].loss
    assert found[0].parameters.keys() == task.parameters.keys() != set()
    assert bool(found[0].local) == (layers != "shared")
    for part in ("parameters", "local"):
        assert same(*(getattr(answer, part) for answer in found))


def test_the_same_task_gives_the_same_answer_whatever_torch_has_drawn(plan):
    workspace, _, client = make(plan)
    task = refresh(workspace, threat=THREAT)
    one = run_client(task, client, workspace).statistics
    torch.manual_seed(99)
    torch.rand(7)
    other = run_client(task, client, workspace).statistics
    assert one.keys() == STATISTICS
    assert same(one, other)
