"""A client's sub-network: really as small as it is wide, trained as such, its norm layers put back in their place."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedprophet.cascade.atoms import chain_of, explicit_chain
from fedprophet.cascade.channels import kept_channels, random_channels
from fedprophet.cascade.narrow import slice_state
from fedprophet.client.features import FeatureCache
from fedprophet.client.layer_store import ClientStore
from fedprophet.client.run import Client, run_client
from fedprophet.client.subnetwork import NarrowLayers, narrowed
from fedprophet.client.workspace import Workspace
from fedprophet.data.dataset import ClientData
from fedprophet.data.examples import LocalExamples, TensorExamples
from fedprophet.messages.modules import ModuleStore
from fedprophet.messages.tasks import Evaluate, Task, Train
from fedprophet.messages.values import LocalTraining, Resources, Timeline
from fedprophet.models import build
from fedprophet.threat import input_threat

ONE_STEP = LocalTraining(1, 6, learning_rate=0.1, momentum=0.0, weight_decay=0.0, strong_convexity=0.0)


def workspace_of(chain, shape, classes) -> Workspace:
    return Workspace(chain, shape, classes, ModuleStore(), ClientStore(None, 10**6), FeatureCache(10**6, 10**6))


def client_of(images, labels) -> Client:
    examples = TensorExamples(images, labels)
    everything = LocalExamples(examples, np.arange(len(labels)))
    return Client(ClientData(everything, everything), lambda _: Resources(1, 1.0, 1.0))


def index(*values) -> torch.Tensor:
    return torch.tensor(values)


# By hand -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def workspace() -> Workspace:
    """Convolutions 1 → 3 → 4 of single pixels, each with a norm layer, and a linear layer to two classes."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3))
    two = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    chain = explicit_chain([("one", one), ("two", two)])
    with torch.no_grad():
        chain.tensors["one.0.weight"].copy_(torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1, 1))
        chain.tensors["one.0.bias"].copy_(torch.tensor([0.5, 0.0, -1.0]))
    return workspace_of(chain, (1, 1, 1), 2)


@pytest.fixture
def client() -> Client:
    images = torch.tensor([0.0, 0.2, 0.4, 0.6, 0.8, 1.0]).view(6, 1, 1, 1)
    return client_of(images, torch.tensor([0, 0, 1, 0, 1, 1]))


def task_of(workspace, kept, round=1, **more) -> Task:
    tensors = workspace.chain.tensors
    shared = {name: tensors[name].detach() for name in workspace.chain.shared()}
    parameters = slice_state(workspace.channels, kept, shared)
    return Train(
        round=round, client=0, seed=0, last=2, training=ONE_STEP, kept_channels=kept, parameters=parameters, **more
    )


def own(workspace, before=99):
    return workspace.layers.get("backbone", 0, Timeline(), before)


KEPT = {"one.0": index(0, 2), "two.0": index(1, 2, 3)}


def test_statistics_of_the_kept_channels_by_hand(workspace, client):
    """x has mean 0.5 and (unbiased) variance 0.14; channels 0 and 2 of the first layer are x + 0.5 and 4 x − 1."""
    run_client(task_of(workspace, KEPT), client, workspace)
    found = own(workspace)
    torch.testing.assert_close(found["one.1.running_mean"], torch.tensor([0.1 * 1.0, 0.0, 0.1 * 1.0]))
    torch.testing.assert_close(found["one.1.running_var"], torch.tensor([0.9 + 0.014, 1.0, 0.9 + 16 * 0.014]))
    assert float(found["one.1.running_mean"][1]) == 0.0
    assert float(found["one.1.running_var"][1]) == 1.0


def test_activations_of_a_layer_whose_inputs_are_cut_are_scaled(workspace, client):
    """Two of three inputs are left, so the second layer's statistics are those of 3/2 times what it computes."""
    tensors = {name: value.detach().clone() for name, value in workspace.chain.tensors.items()}
    run_client(task_of(workspace, KEPT), client, workspace)
    x = client.data.train.fetch(torch.arange(6)).flatten()
    z = torch.stack([x + 0.5, 4 * x - 1], dim=1)
    z = (z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt()
    rows, columns = KEPT["two.0"], KEPT["one.0"]
    weight = tensors["two.0.weight"].flatten(1)[rows][:, columns]
    z = 1.5 * (z @ weight.t() + tensors["two.0.bias"][rows])
    found = own(workspace)
    torch.testing.assert_close(found["two.1.running_mean"][rows], 0.1 * z.mean(0))
    torch.testing.assert_close(found["two.1.running_var"][rows], 0.9 + 0.1 * z.var(0))
    assert float(found["two.1.running_mean"][0]) == 0.0


def test_channels_that_a_round_leaves_out_keep_an_earlier_rounds_layers(workspace, client):
    run_client(task_of(workspace, KEPT), client, workspace)
    first = own(workspace)
    second_kept = {"one.0": index(1, 2), "two.0": index(0, 3)}
    run_client(task_of(workspace, second_kept, round=2), client, workspace)
    second = own(workspace)
    for part in ("weight", "bias", "running_mean", "running_var"):
        assert torch.equal(second[f"one.1.{part}"][:1], first[f"one.1.{part}"][:1])
        assert torch.equal(second[f"two.1.{part}"][1:3], first[f"two.1.{part}"][1:3])
    # Channel 1 is 2 x: new in this round. Channel 2 had 0.1 in the first round and goes on from there.
    torch.testing.assert_close(second["one.1.running_mean"][1:], torch.tensor([0.1, 0.9 * 0.1 + 0.1]))
    assert int(second["one.1.num_batches_tracked"]) == 2
    assert second["one.1.running_mean"].shape == (3,)
    assert torch.equal(own(workspace, before=2)["one.1.running_mean"], first["one.1.running_mean"])


def test_a_round_that_is_repeated_starts_from_the_layers_before_it(workspace, client):
    run_client(task_of(workspace, KEPT), client, workspace)
    run_client(task_of(workspace, {"one.0": index(1), "two.0": index(0)}, round=2), client, workspace)
    once = own(workspace)
    run_client(task_of(workspace, {"one.0": index(1), "two.0": index(0)}, round=2), client, workspace)
    twice = own(workspace)
    assert all(torch.equal(once[name], twice[name]) for name in once)
    run_client(task_of(workspace, {"one.0": index(0), "two.0": index(1)}, round=2), client, workspace)
    other = own(workspace)
    assert float(other["one.1.running_mean"][1]) == 0.0, "what the first try of the round left is gone"


def test_the_narrow_network_is_what_is_attacked_and_trained(workspace, client):
    widths = []
    hook = workspace.chain.atoms[0].register_forward_hook(lambda atom, x, z: widths.append(z.shape[1]))
    task = task_of(workspace, KEPT, threat=input_threat(0.1, 0.05, 2))
    before = {name: value.detach().clone() for name, value in workspace.chain.tensors.items()}
    update = run_client(task, client, workspace)
    hook.remove()
    assert widths == [2, 2, 2], "two steps of the attack and one of SGD (a copy of an atom has its hooks)"
    assert all(torch.equal(value, before[name]) for name, value in workspace.chain.tensors.items())
    assert {name: value.shape for name, value in update.parameters.items()} == {
        "one.0.weight": (2, 1, 1, 1),
        "one.0.bias": (2,),
        "two.0.weight": (3, 2, 1, 1),
        "two.0.bias": (3,),
        "two.3.weight": (2, 3),
        "two.3.bias": (2,),
    }
    change = update.parameters["two.3.bias"] - task.parameters["two.3.bias"]
    assert float(change.abs().max()) > 0
    assert float(change.sum()) == pytest.approx(0.0, abs=1e-6)


def test_evaluation_of_the_full_model_after_narrow_training(workspace, client):
    run_client(task_of(workspace, KEPT), client, workspace)
    tensors = workspace.chain.tensors
    shared = {name: tensors[name].detach().clone() for name in workspace.chain.shared()}
    evaluate = Evaluate(round=1, client=0, seed=0, last=2, parameters=shared)
    seen = []
    hook = workspace.chain.atoms[0].register_forward_hook(
        lambda *_: seen.append(tensors["one.1.running_mean"].detach().clone())
    )
    update = run_client(evaluate, client, workspace)
    hook.remove()
    assert update.samples == 6
    assert torch.equal(seen[0], own(workspace)["one.1.running_mean"])


def test_a_client_that_has_not_trained_starts_from_the_initial_layers(workspace, client):
    """Whatever another client's evaluation left in the full model before it."""
    initial = {name: workspace.chain.tensors[name].detach().clone() for name in workspace.chain.local()}
    shared = {name: workspace.chain.tensors[name].detach().clone() for name in workspace.chain.shared()}
    strange = {name: torch.full_like(value, 7) for name, value in initial.items()}
    workspace.layers.put("backbone", 5, 0, strange, Timeline())
    run_client(Evaluate(round=1, client=5, seed=0, last=2, parameters=shared), client, workspace)
    assert float(workspace.chain.tensors["one.1.running_mean"][0]) == 7
    run_client(task_of(workspace, KEPT), client, workspace)
    torch.testing.assert_close(own(workspace)["one.1.running_mean"], torch.tensor([0.1, 0.0, 0.1]))


def test_a_diverged_client_keeps_its_layers(workspace, client):
    run_client(task_of(workspace, KEPT), client, workspace)
    first = own(workspace)
    task = task_of(workspace, KEPT, round=2)
    broken = {**task.parameters, "one.0.weight": torch.full((2, 1, 1, 1), math.inf)}
    update = run_client(replace(task, parameters=broken), client, workspace)
    assert math.isnan(update.loss)
    assert all(torch.equal(value, first[name]) for name, value in own(workspace).items())


def test_layers_seen_through_a_sub_network():
    """A store of two channels a and b of a norm layer, of which a sub-network has b alone."""
    chain = chain_of(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2)))
    workspace = workspace_of(chain, (1, 1, 1), 2)
    view = NarrowLayers(workspace.layers, workspace.channels, {"0": index(1)}, workspace.initial)
    assert view.get("backbone", 0, Timeline(), 9) is None
    view.put("backbone", 0, 3, {"1.running_mean": torch.tensor([7.0])}, Timeline())
    full = workspace.layers.get("backbone", 0, Timeline(), 9)
    assert full["1.running_mean"].tolist() == [0, 7]
    assert full["1.running_var"].tolist() == [1, 1], "a client's first layers are whole"
    assert view.get("backbone", 0, Timeline(), 9)["1.running_mean"].tolist() == [7]
    assert view.get("backbone", 0, Timeline(), 3) is None
    assert workspace.initial["1.running_mean"].tolist() == [0, 0]


# Counted -------------------------------------------------------------------------------------------------------------


def counted(chain, x):
    """Return parameters, elements read by layers with a weight (a tensor once), and multiply-accumulates of a run."""
    inputs, products = {}, []

    def note(layer, args, result):
        inputs[id(args[0])] = args[0]
        if not isinstance(layer, nn.BatchNorm2d):
            positions = result[0, 0].numel() if result.ndim == 4 else 1
            products.append(len(result) * positions * layer.weight.numel())

    layers = [layer for layer in chain.model.modules() if isinstance(layer, nn.Conv2d | nn.Linear | nn.BatchNorm2d)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    with chain.mode(0, None, training=True):
        chain.run(x)
    for hook in hooks:
        hook.remove()
    parameters = sum(parameter.numel() for parameter in chain.model.parameters())
    return parameters, sum(value.numel() for value in inputs.values()), sum(products)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("vgg16", (3, 32, 32)),
        ("vgg-small", (3, 8, 8)),
        ("cnn3", (3, 8, 8)),
        ("cnn4", (3, 56, 56)),
        ("resnet18", (3, 16, 16)),
    ],
)
def test_a_sub_network_runs_at_the_size_of_a_model_built_that_wide(name, shape):
    """With 6 of 16 channels drawn at random, what is run has the tensors of a model that is built with 6."""
    workspace = workspace_of(chain_of(build(name, shape, 10, width=16)), shape, 10)
    draw = torch.Generator().manual_seed(0)
    kept = kept_channels(workspace.channels, 6 / 16, lambda width, count: random_channels(width, count, draw))
    small, built = narrowed(workspace, kept).chain, chain_of(build(name, shape, 10, width=6))
    x = torch.rand(2, *shape)
    assert counted(small, x) == counted(built, x)
    assert counted(small, x)[0] < 0.3 * counted(workspace.chain, x)[0]


def test_a_residual_network_is_trained_narrow():
    """The partners of each sum keep the same channels, and what comes back lies where it was cut out."""
    torch.manual_seed(0)
    workspace = workspace_of(chain_of(build("resnet10", (1, 8, 8), 4, width=4)), (1, 8, 8), 4)
    draw = torch.Generator().manual_seed(1)
    kept = kept_channels(workspace.channels, 0.5, lambda width, count: random_channels(width, count, draw))
    full = {name: workspace.chain.tensors[name].detach().clone() for name in workspace.chain.shared()}
    task = Train(
        round=1,
        client=0,
        seed=0,
        last=len(workspace.chain),
        training=ONE_STEP,
        kept_channels=kept,
        parameters=slice_state(workspace.channels, kept, full),
        threat=input_threat(0.1, 0.05, 1),
    )
    update = run_client(task, client_of(torch.rand(6, 1, 8, 8), torch.arange(6) % 4), workspace)
    assert update.parameters["layer2.0.downsample.0.weight"].shape == (4, 2, 1, 1)
    assert update.parameters["layer2.0.conv2.weight"].shape == (4, 4, 3, 3)
    assert all(bool(torch.isfinite(value).all()) for value in update.parameters.values())
    stored = own(workspace)
    two = next(kept[name] for name in ("layer2.0.downsample.0", "layer2.0.conv2") if name in kept)
    for norm in ("layer2.0.downsample.1", "layer2.0.bn2"):
        changed = stored[f"{norm}.running_var"] != 1
        assert torch.equal(changed.nonzero().flatten(), two)
