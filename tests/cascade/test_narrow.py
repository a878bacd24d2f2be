"""Sub-networks: as large as a narrow network, computing what the kept channels compute, and written back in place."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedprophet.cascade.atoms import chain_of, explicit_chain
from fedprophet.cascade.channel_flow import channels_of
from fedprophet.cascade.channels import (
    ChannelAxis,
    Channels,
    first_channels,
    kept_channels,
    random_channels,
    rolling_channels,
)
from fedprophet.cascade.cost import cost_of
from fedprophet.cascade.narrow import Scaler, merge_local, narrow_chain, slice_state
from fedprophet.errors import ModelError
from fedprophet.models import build
from fedprophet.models.cnn import CNN
from fedprophet.models.normalize import Normalize
from fedprophet.models.resnet import BasicBlock
from fedprophet.models.vgg import POOL, VGG, WIDTHS, convolutions


class SmallResNet(nn.Module):
    """A ResNet of any width: a block with a plain shortcut and one with a down-sampling one."""

    def __init__(self, width: int, classes: int = 5) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.one, self.two = BasicBlock(width, width, 1), BasicBlock(width, 2 * width, 2)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(2 * width, classes)

    def forward(self, x):
        return self.fc(self.pool(self.two(self.one(F.relu(self.bn1(self.conv1(x)))))).flatten(1))


PARTNERS = {
    "conv1": ("conv1", "bn1", "one.conv2", "one.bn2"),
    "one.conv1": ("one.conv1", "one.bn1"),
    "two.downsample.0": ("two.downsample.0", "two.downsample.1", "two.conv2", "two.bn2"),
    "two.conv1": ("two.conv1", "two.bn1"),
}
"""The layers of SmallResNet that give the channels of each group."""


def cnn(one: int, two: int, hidden: int, pooled: int, kernel: int = 3) -> nn.Module:
    """Two convolutions, an adaptive pool, and a classifier with or without a hidden layer."""
    features = nn.Sequential(
        nn.Conv2d(3, one, kernel, padding=kernel // 2),
        nn.BatchNorm2d(one),
        nn.ReLU(inplace=True),
        nn.Conv2d(one, two, kernel, stride=2, padding=kernel // 2),
        nn.BatchNorm2d(two),
        nn.ReLU(inplace=True),
        nn.AdaptiveMaxPool2d(pooled),
    )
    inputs = two * pooled * pooled
    layers = [nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 5)] if hidden else [nn.Linear(inputs, 5)]
    return CNN(features, nn.Sequential(*layers))


def vgg_small(width: int) -> nn.Module:
    return build("vgg-small", (1, 8, 8), 5, width=width)


def vgg16(divisor: int) -> nn.Module:
    hidden = 512 // divisor
    first, second = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
    drop, relu = partial(nn.Dropout, 0.5), partial(nn.ReLU, inplace=True)
    classifier = nn.Sequential(first, relu(), drop(), second, relu(), drop(), nn.Linear(hidden, 5))
    widths = [width if width == POOL else width // divisor for width in WIDTHS["vgg16"]]
    return VGG(convolutions(3, widths), nn.AdaptiveAvgPool2d(1), classifier)


def randomize(model: nn.Module) -> nn.Module:
    """Give every tensor values of its own, statistics and biases included."""
    generator = torch.Generator().manual_seed(3)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            spread = torch.rand(tensor.shape, generator=generator)
            tensor.copy_(spread + 0.5 if name.endswith("running_var") else spread - 0.4)
    return model


def narrowed(model: nn.Module, shape, r: float, rule=first_channels):
    channels = channels_of(model, shape)
    kept = kept_channels(channels, r, rule)
    return narrow_chain(chain_of(model), channels, kept).model, channels, kept


RULES = {
    "first": first_channels,
    "random": partial(random_channels, generator=torch.Generator().manual_seed(5)),
    "rolling": partial(rolling_channels, start=7),
}


@pytest.mark.parametrize(
    ("full", "half", "shape"),
    [
        (lambda: vgg_small(16), lambda: vgg_small(8), (1, 8, 8)),
        (lambda: SmallResNet(8), lambda: SmallResNet(4), (3, 8, 8)),
        (lambda: build("cnn3", (3, 8, 8), 5), lambda: cnn(32, 64, 0, 2), (3, 8, 8)),
        (lambda: cnn(8, 6, 10, 3), lambda: cnn(4, 3, 5, 3), (3, 8, 8)),
        (lambda: build("vgg16", (3, 32, 32), 5), lambda: vgg16(2), (3, 32, 32)),
    ],
    ids=["vgg-small", "resnet", "cnn3", "cnn", "vgg16"],
)
def test_half_the_width_costs_what_a_network_of_half_the_width_costs(full, half, shape):
    full, half = full(), half()
    narrow, _, _ = narrowed(full, shape, 0.5, RULES["random"])
    assert {name: value.shape for name, value in narrow.state_dict().items()} == {
        name: value.shape for name, value in half.state_dict().items()
    }
    # Parameters, activations, FLOPs, output shapes and ranges of each atom, and the atoms' names.
    cost = cost_of(chain_of(narrow), shape, 4, 5)
    assert cost == cost_of(chain_of(half), shape, 4, 5)
    assert cost.total_memory < 0.6 * cost_of(chain_of(full), shape, 4, 5).total_memory
    assert str(narrow) == str(half)


def test_count_by_hand():
    """3×3 convolutions 3→7→5 on 4×4 images, a linear layer 5·4→2; at r = 0.5 they keep 3 and 2 channels."""
    model = nn.Sequential(
        nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7), nn.Conv2d(7, 5, 3, padding=1), nn.MaxPool2d(2), nn.Flatten()
    ).append(nn.Linear(20, 2))
    narrow, _, _ = narrowed(model, (3, 4, 4), 0.5)
    cost = cost_of(chain_of(narrow), (3, 4, 4), 1, 2)
    assert cost.total_parameters == (27 * 3 + 3) + 6 + (27 * 2 + 2) + (8 * 2 + 2)
    assert cost.activations(0, len(cost.atoms)) == 16 * 3 + 16 * 3 + 16 * 3 + 8
    assert cost.total_flops == 16 * 27 * 3 + 5 * 16 * 3 + 16 * 27 * 2 + 16
    assert list(narrow[2]._forward_hooks.values()) == [Scaler(7 / 3)]
    assert list(narrow[5]._forward_hooks.values()) == [Scaler(5 / 2)]


def unscale(narrow):
    for layer in narrow.modules():
        layer._forward_hooks.clear()


@pytest.mark.parametrize("rule", RULES)
def test_the_sub_network_computes_what_its_channels_compute(rule):
    """Unscaled, it is the full network with every other channel silenced: weights, biases and norms set to zero."""
    model = randomize(SmallResNet(6)).eval()
    narrow, channels, kept = narrowed(model, (3, 8, 8), 0.5, RULES[rule])
    assert set(channels.groups) == set(PARTNERS)
    masked = copy.deepcopy(model)
    for group, layers in PARTNERS.items():
        gone = torch.ones(channels.groups[group], dtype=torch.bool)
        gone[kept[group]] = False
        for layer in map(masked.get_submodule, layers):
            layer.weight.data[gone] = 0
            if layer.bias is not None:
                layer.bias.data[gone] = 0
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    unscale(narrow)
    torch.testing.assert_close(narrow(x), masked(x))
    assert not torch.allclose(narrow(x), model(x))


@pytest.mark.parametrize("rule", RULES)
def test_channels_behind_a_flatten(rule):
    """A channel that is not kept takes its 3×3 inputs of the linear layer with it."""
    model = randomize(cnn(6, 4, 6, 3)).eval()
    narrow, _, kept = narrowed(model, (3, 8, 8), 0.5, RULES[rule])
    masked = copy.deepcopy(model)
    inner, outer = masked.features[3], masked.classifier[0]
    for layer, group in ((masked.features[0], "features.0"), (inner, "features.3"), (outer, "classifier.0")):
        gone = [channel for channel in range(len(layer.weight)) if channel not in kept[group]]
        layer.weight.data[gone], layer.bias.data[gone] = 0, 0
    # The norms give other channels a value of their own: shut it out where they are read.
    for layer, group, width in ((inner, "features.0", 1), (outer, "features.3", 9)):
        total = layer.weight.shape[1] // width
        for channel in set(range(total)) - set(kept[group].tolist()):
            layer.weight.data[:, channel * width : (channel + 1) * width] = 0
    x = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    unscale(narrow)
    torch.testing.assert_close(narrow(x), masked(x))


def test_full_width_is_the_model_itself():
    model = randomize(SmallResNet(4))
    narrow, _, _ = narrowed(model, (3, 8, 8), 1.0)
    assert not any(module._forward_hooks for module in narrow.modules())
    assert [type(module) for module in narrow.modules()] == [type(module) for module in model.modules()]
    x = torch.randn(4, 3, 8, 8)
    for training in (True, False):
        model.train(training)
        narrow.train(training)
        assert torch.equal(narrow(x), model(x))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in narrow.state_dict().items())


def test_the_copy_is_apart_and_keeps_settings():
    model = SmallResNet(4).double()
    model.conv1.weight.requires_grad_(False)
    model.one.eval()
    before = copy.deepcopy(model.state_dict())
    narrow, _, _ = narrowed(model, (3, 8, 8), 0.5)
    assert type(narrow) is SmallResNet
    assert narrow.conv1.weight.dtype == torch.float64
    assert not narrow.conv1.weight.requires_grad
    assert narrow.fc.weight.requires_grad
    assert isinstance(narrow.one.conv1.weight, nn.Parameter)
    assert [m.training for m in narrow.modules()] == [m.training for m in model.modules()]
    with torch.no_grad():
        for tensor in narrow.state_dict().values():
            tensor.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    sizes = [(m.in_channels, m.out_channels) for m in narrow.modules() if isinstance(m, nn.Conv2d)]
    assert sizes == [(3, 2), (2, 2), (2, 2), (2, 4), (4, 4), (2, 4)]
    assert [m.num_features for m in narrow.modules() if isinstance(m, nn.BatchNorm2d)] == [2, 2, 2, 4, 4, 4]
    assert (narrow.fc.in_features, narrow.fc.out_features) == (4, 5)
    again = copy.deepcopy(narrow)
    assert list(again.two.conv1._forward_hooks.values()) == [Scaler(2)]


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].weight = model[1].weight
    narrow, channels, kept = narrowed(model, (2,), 0.5)
    assert narrow[2].weight is narrow[1].weight
    assert narrow[1].weight.shape == (2, 2)
    assert set(slice_state(channels, kept, model.state_dict())) == set(model.state_dict())


def test_activations_are_scaled_in_both_modes():
    """Each layer's output by full over kept inputs: 1 in the first layer, 4/2 in the second, 5/2 in the third."""
    model = randomize(nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 5, 2), nn.Flatten(), nn.Linear(5, 3)))
    narrow, _, kept = narrowed(model, (1, 2, 2), 0.5, partial(rolling_channels, start=3))
    a, b = kept["0"].tolist(), kept["2"].tolist()
    assert (a, b) == ([0, 3], [3, 4])
    x = torch.randn(3, 1, 2, 2)
    for training in (True, False):
        narrow.train(training)
        inner = F.relu(F.conv2d(x, model[0].weight[a], model[0].bias[a]))
        inner = F.conv2d(inner, model[2].weight[b][:, a], model[2].bias[b]) * 2.0
        expected = F.linear(inner.flatten(1), model[4].weight[:, b], model[4].bias) * 2.5
        torch.testing.assert_close(narrow(x), expected)


@pytest.mark.parametrize("normalize", [None, Normalize([0.5] * 3, [0.2] * 3)])
def test_a_chain_of_the_sub_network(normalize):
    """Outputs and gradients are the sub-network's own in both modes, and what was cut out can be loaded."""
    model = randomize(SmallResNet(4))
    narrow, channels, kept = narrowed(model, (3, 8, 8), 0.5)
    chain, full = chain_of(narrow, normalize), chain_of(model, normalize)
    assert (chain.shared(), chain.local()) == (full.shared(), full.local())
    assert [(atom.name, atom.layers) for atom in chain.atoms] == [(atom.name, atom.layers) for atom in full.atoms]
    x = torch.rand(4, 3, 8, 8)
    for training in (True, False):
        found = []
        narrow.train(training)
        for run in (lambda x: narrow(x if normalize is None else normalize(x)), chain.run):
            narrow.zero_grad()
            with chain.mode(0, None, training):
                output = run(x)
            output.square().sum().backward()
            found.append([output, *(parameter.grad for parameter in narrow.parameters())])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    chain.load(slice_state(channels, kept, randomize(copy.deepcopy(model)).state_dict()))
    with pytest.raises(ModelError, match="shape"):
        chain.load(model.state_dict())


@pytest.mark.parametrize("explicit", [False, True])
def test_a_chain_is_narrowed_with_its_atoms(explicit):
    """Cutting the chain gives what a chain of the cut model gives, and leaves the full one alone."""
    model = randomize(cnn(6, 4, 6, 3).eval())
    parts = [("features", model.features), ("flat", nn.Flatten()), ("classifier", model.classifier)]
    normalize = Normalize([0.5] * 3, [0.2] * 3)
    full = explicit_chain(parts, normalize) if explicit else chain_of(model, normalize)
    before = {name: value.clone() for name, value in full.tensors.items()}
    channels = channels_of(full.model, (3, 8, 8))
    kept = kept_channels(channels, 0.5, first_channels)
    chain, expected = narrow_chain(full, channels, kept), narrow_chain(chain_of(full.model), channels, kept).model
    x = torch.rand(2, 3, 8, 8)
    with chain.mode(0, None, training=False):
        torch.testing.assert_close(chain.run(x), expected.eval()(normalize(x)))
    assert (chain.shared(), chain.local()) == (full.shared(), full.local())
    assert {n: v.shape for n, v in chain.tensors.items()} == {n: v.shape for n, v in expected.state_dict().items()}
    with torch.no_grad():
        for tensor in chain.tensors.values():
            tensor.zero_()
    assert all(torch.equal(value, before[name]) for name, value in full.tensors.items())


@pytest.mark.parametrize("model", [SmallResNet(4), build("cnn3", (3, 8, 8), 5), cnn(3, 5, 2, 2)])
def test_no_layer_is_ever_empty(model):
    narrow, _, kept = narrowed(model, (3, 8, 8), 1e-6)
    assert all(len(indices) == 1 for indices in kept.values())
    loss = narrow.train()(torch.randn(4, 3, 8, 8)).square().sum()
    loss.backward()
    assert all(p.numel() > 0 and p.grad is not None for p in narrow.parameters())
    assert narrow.eval()(torch.randn(1, 3, 8, 8)).shape == (1, 5)


FOUR = Channels(
    {"a": 4, "b": 3},
    {
        "bias": (ChannelAxis(0, "a", 1),),
        "flat": (ChannelAxis(1, "a", 2),),
        "matrix": (ChannelAxis(0, "b", 1), ChannelAxis(1, "a", 1)),
        "kernel": (ChannelAxis(0, "a", 1), ChannelAxis(1, "b", 1)),
    },
)


def numbers(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def index(*values) -> torch.Tensor:
    return torch.tensor(values)


def test_slice_by_hand():
    tensors = {
        "bias": numbers(10, 20, 30, 40),
        "flat": numbers([0, 1, 2, 3, 4, 5, 6, 7]),
        "matrix": numbers([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]),
        "other": numbers(1, 2),
    }
    part = slice_state(FOUR, {"a": index(1, 3), "b": index(0, 2)}, tensors)
    assert {name: value.tolist() for name, value in part.items()} == {
        "bias": [20, 40],
        "flat": [[2, 3, 6, 7]],
        "matrix": [[2, 4], [10, 12]],
        "other": [1, 2],
    }
    part["other"][0] = 7
    assert tensors["other"].tolist() == [1, 2]


def test_merge_local_by_hand():
    full = {"bias": numbers(10, 20, 30, 40), "counter": torch.tensor(3), "mine": numbers(1)}
    part = {"bias": numbers(1, 2), "counter": torch.tensor(8)}
    merged = merge_local(FOUR, {"a": index(0, 3), "b": index(0)}, full, part)
    assert {name: value.tolist() for name, value in merged.items()} == {
        "bias": [1, 20, 30, 2],
        "counter": 8,
        "mine": [1],
    }
    assert full["bias"].tolist() == [10, 20, 30, 40]
    assert full["counter"].item() == 3


def test_a_clients_norm_layers_go_back_where_they_came_from():
    model = randomize(SmallResNet(4))
    channels = channels_of(model, (3, 8, 8))
    kept = kept_channels(channels, 0.5, partial(rolling_channels, start=3))  # channels 0 and 3 of four
    local = {name: model.state_dict()[name] for name in chain_of(model).local()}
    narrow = chain_of(narrow_chain(chain_of(model), channels, kept).model)
    with narrow.mode(0, None, True):
        narrow.run(torch.randn(8, 3, 8, 8))
    merged = merge_local(channels, kept, local, {name: narrow.tensors[name] for name in narrow.local()})
    mean = merged["bn1.running_mean"]
    assert torch.equal(mean[[0, 3]], narrow.tensors["bn1.running_mean"])
    assert torch.equal(mean[[1, 2]], local["bn1.running_mean"][[1, 2]])
    assert not torch.equal(mean[[0, 3]], local["bn1.running_mean"][[0, 3]])
    assert not merged["bn1.weight"].requires_grad
    assert merged["bn1.num_batches_tracked"] == 1


def test_tensors_that_do_not_fit_are_errors():
    kept = {"a": index(0, 1), "b": index(0)}
    full = {"bias": numbers(1, 2, 3, 4)}
    with pytest.raises(ModelError, match=r"'bias' has shape \(2,\); a full one has 4 in dimension 0"):
        slice_state(FOUR, kept, {"bias": numbers(1, 2)})
    with pytest.raises(ModelError, match=r"'bias' of a sub-network has shape \(1,\) instead of \(2,\)"):
        merge_local(FOUR, kept, full, {"bias": numbers(1)})
    with pytest.raises(ModelError, match=r"unknown tensor of the full model 'bais'\. Did you mean 'bias'"):
        merge_local(FOUR, kept, full, {"bais": numbers(1, 2)})


def test_a_model_without_data_can_be_narrowed():
    """For counting alone no tensor needs values."""
    with torch.device("meta"):
        model = SmallResNet(64)
    narrow, _, _ = narrowed(model, (3, 8, 8), 0.25)
    assert narrow.fc.weight.shape == (5, 32)
    assert narrow.fc.weight.is_meta
