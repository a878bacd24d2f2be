"""Which channels belong together: small models worked out by hand."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fedprophet.cascade.channel_flow import channels_of
from fedprophet.cascade.channels import Channels
from fedprophet.errors import ModelError
from fedprophet.models import build
from fedprophet.models.resnet import BasicBlock


class Made(nn.Module):
    """A model from layers and a function of them and the input."""

    def __init__(self, function, **layers) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            if isinstance(layer, nn.Parameter):
                self.register_parameter(name, layer)
            elif isinstance(layer, torch.Tensor):
                self.register_buffer(name, layer)
            else:
                self.add_module(name, layer)

    def forward(self, x):
        return self.function(self, x)


def conv(inputs: int, outputs: int, **options) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


def test_convolutions_norms_and_the_last_layer():
    model = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.append(nn.Linear(6, 5))
    a, b = (0, "0", 1), (0, "3", 1)
    assert channels_of(model, (3, 4, 4)) == Channels(
        {"0": 4, "3": 6},
        {
            "0.weight": (a,),
            "0.bias": (a,),
            "1.weight": (a,),
            "1.bias": (a,),
            "1.running_mean": (a,),
            "1.running_var": (a,),
            "3.weight": (b, (1, "0", 1)),
            "3.bias": (b,),
            "6.weight": ((1, "3", 1),),  # its outputs are the classes; its bias is never cut
        },
    )


def test_partners_of_a_residual_sum_are_one_group():
    """The stem, the end of the first block and the second block's end are summed; the third has a shortcut layer."""
    model = nn.Sequential()
    for name, part in {
        "stem": conv(1, 4),
        "one": BasicBlock(4, 4, 1),
        "two": BasicBlock(4, 4, 1),
        "three": BasicBlock(4, 8, 2),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "fc": nn.Linear(8, 3),
    }.items():
        model.add_module(name, part)
    found = channels_of(model, (1, 8, 8))
    shortcut = "three.downsample.0"  # runs before the block's own convolutions
    assert found.groups == {
        "stem": 4,
        "one.conv1": 4,
        "two.conv1": 4,
        shortcut: 8,
        "three.conv1": 8,
    }
    assert found.axes["one.conv2.weight"] == ((0, "stem", 1), (1, "one.conv1", 1))
    assert found.axes["two.conv2.weight"] == ((0, "stem", 1), (1, "two.conv1", 1))
    assert found.axes["two.bn2.running_var"] == ((0, "stem", 1),)
    assert found.axes[f"{shortcut}.weight"] == ((0, shortcut, 1), (1, "stem", 1))
    assert found.axes["three.downsample.1.bias"] == ((0, shortcut, 1),)
    assert found.axes["three.conv1.weight"] == ((0, "three.conv1", 1), (1, "stem", 1))
    assert found.axes["three.conv2.weight"] == ((0, shortcut, 1), (1, "three.conv1", 1))
    assert found.axes["fc.weight"] == ((1, shortcut, 1),)


@pytest.mark.parametrize(
    ("name", "shape", "groups", "weight", "axes"),
    [
        ("cnn3", (3, 8, 8), 2, "classifier.0.weight", ((1, "features.3", 4),)),
        ("cnn4", (3, 49, 49), 3, "classifier.0.weight", ((0, "classifier.0", 1), (1, "features.4", 49))),
        ("vgg-small", (1, 8, 8), 7, "classifier.0.weight", ((1, "features.20", 1),)),
        ("vgg16", (3, 32, 32), 15, "classifier.3.weight", ((0, "classifier.3", 1), (1, "classifier.0", 1))),
        # One for each layer's shortcut, the stem's included, and one inside each of the 16 blocks.
        ("resnet34", (3, 16, 16), 20, "fc.weight", ((1, "layer4.0.downsample.0", 1),)),
    ],
)
def test_registry_models(name, shape, groups, weight, axes):
    model = build(name, shape, 5)
    found = channels_of(model, shape)
    assert len(found.groups) == groups
    assert found.axes[weight] == axes
    state = model.state_dict()
    for tensor, places in found.axes.items():
        for axis, group, repeat in places:
            assert state[tensor].shape[axis] == found.groups[group] * repeat
    uncut = {n for n in set(state) - set(found.axes) if not n.endswith("num_batches_tracked")}
    assert uncut == {[n for n in state if n.endswith("bias") and state[n].shape == (5,)][-1]}


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.fc(F.relu(F.max_pool2d(m.a(x), 2)).view(x.size(0), -1)),
        lambda m, x: m.fc(torch.flatten(F.dropout(F.lp_pool2d(m.a(x), 2, 2).relu_(), 0.5, m.training), 1)),
        lambda m, x: m.fc(F.adaptive_avg_pool2d(m.a(x), 2).reshape(x.shape[0], -1)),
        lambda m, x: m.fc(F.avg_pool2d(2 * torch.sigmoid(m.a(x)) + 1, 2).flatten(1)),
        lambda m, x: F.log_softmax(m.fc(m.pool(x)), dim=1),
        lambda m, x: m.fc(m.pool(x)).view(-1, 5).squeeze(),
        lambda m, x: m.fc(m.pool(x)) * m.temperature,
        lambda m, x: m.fc(m.pool((x - m.mean) / 2)),
    ],
)
def test_functions_and_methods_are_layers_too(function):
    pool = nn.Sequential(convolution := conv(3, 4), nn.Hardtanh(), nn.MaxPool2d(2), nn.Flatten())
    model = Made(
        function,
        a=convolution,
        pool=pool,
        fc=nn.Linear(16, 5),
        temperature=nn.Parameter(torch.ones(5)),
        mean=torch.zeros(1, 3, 1, 1),
    )
    found = channels_of(model, (3, 4, 4))
    (group,) = found.groups.items()
    assert group in (("a", 4), ("pool.0", 4))
    # Two names of one layer are cut alike.
    assert found.axes["a.weight"] == found.axes["pool.0.weight"] == ((0, group[0], 1),)
    assert found.axes["fc.weight"] == ((1, group[0], 4),)


def test_a_mean_over_positions_keeps_channels():
    model = Made(lambda m, x: m.fc(m.a(x).mean((2, 3))), a=conv(1, 4), fc=nn.Linear(4, 2))
    assert channels_of(model, (1, 4, 4)).axes["fc.weight"] == ((1, "a", 1),)
    model = Made(lambda m, x: m.fc(m.a(x).amax(-1, keepdim=True).sum(2).squeeze(-1)), a=conv(1, 4), fc=nn.Linear(4, 2))
    assert channels_of(model, (1, 4, 4)).axes["fc.weight"] == ((1, "a", 1),)


def test_a_mean_over_tokens_moves_channels():
    """A linear layer on 4 tokens of 3 numbers gives channels in the last dimension; their mean has them in the next."""
    model = Made(lambda m, x: m.fc(m.a(x).mean(1)), a=nn.Linear(3, 6), fc=nn.Linear(6, 2))
    assert channels_of(model, (4, 3)).axes["fc.weight"] == ((1, "a", 1),)


def test_reshaping_in_steps():
    """4 channels of 2×2 positions, each channel 4 neighbours in a row in the end; a softmax over positions is fine."""
    for function in (
        lambda m, x: m.fc(m.a(x).flatten(1).unsqueeze(2).flatten(1)),
        lambda m, x: m.fc(m.a(x).flatten(1, 2).flatten(1)),
        lambda m, x: m.fc((y := m.a(x)).flatten(2).softmax(2).view(x.shape[0], y.shape[1], -1).flatten(1)),
        lambda m, x: m.fc((y := m.a(x)).view(-1, y.size(-3), 4).flatten(1)),
    ):
        model = Made(function, a=conv(1, 4), fc=nn.Linear(16, 2))
        assert channels_of(model, (1, 2, 2)).axes["fc.weight"] == ((1, "a", 4),)


def test_layers_with_a_number_for_each_channel_behind_a_flatten():
    model = nn.Sequential(conv(1, 4), nn.PReLU(4), nn.PReLU(), nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 2))
    axes = channels_of(model, (1, 2, 2)).axes
    assert axes["1.weight"] == ((0, "0", 1),)
    assert "2.weight" not in axes  # one number for all
    assert axes["4.running_mean"] == ((0, "0", 4),)
    assert axes["5.weight"] == ((1, "0", 4),)


def test_a_layer_used_twice_and_a_tied_one():
    """What a convolution gives is what it takes the second time: one group. A tied weight is cut like its twin."""
    layers = {"a": conv(1, 4), "b": conv(4, 4), "c": conv(4, 4), "d": conv(4, 4), "fc": nn.Linear(4, 2)}
    layers["d"].weight = layers["c"].weight
    model = Made(lambda m, x: m.fc(m.d(m.c(m.b(m.b(m.a(x))))).mean((2, 3))), **layers)
    found = channels_of(model, (1, 4, 4))
    assert found.groups == {"a": 4}
    assert found.axes["b.weight"] == found.axes["c.weight"] == found.axes["d.weight"] == ((0, "a", 1), (1, "a", 1))


def test_what_is_added_to_the_input_or_the_classes_is_never_cut():
    layers = {"a": conv(3, 8), "b": conv(8, 3), "c": nn.Linear(48, 5), "d": nn.Linear(48, 5)}
    model = Made(lambda m, x: m.c(y := (m.b(m.a(x)) + x).flatten(1)) + m.d(y), **layers)
    found = channels_of(model, (3, 4, 4))
    assert found.groups == {"a": 8}
    assert found.axes == {
        "a.weight": ((0, "a", 1),),
        "a.bias": ((0, "a", 1),),
        "b.weight": ((1, "a", 1),),
    }


def test_what_is_added_to_something_that_is_never_cut_is_not_either():
    """The first layer is made before the sum of the second and the input, and added to it behind that."""
    layers = {"a": conv(3, 3), "b": conv(3, 3), "c": conv(3, 4), "fc": nn.Linear(16, 2)}
    model = Made(lambda m, x: m.fc(m.c((y := m.a(x)) * 0 + (m.b(x) + x) + y).flatten(1)), **layers)
    assert channels_of(model, (3, 2, 2)).groups == {"c": 4}


def test_a_layer_that_also_reads_the_input_is_never_cut_there():
    """The convolution and the norm run on the three channels of the input first, then on those of other layers."""
    layers = {"a": conv(3, 3), "n": nn.BatchNorm2d(3), "b": conv(3, 3), "c": conv(3, 4), "fc": nn.Linear(16, 2)}
    model = Made(lambda m, x: m.fc(m.c(m.n(m.b(m.a(m.a(m.n(x)))))).flatten(1)), **layers)
    found = channels_of(model, (3, 2, 2))
    assert found.groups == {"c": 4}
    assert set(found.axes) == {"c.weight", "c.bias", "fc.weight"}


def test_an_input_of_one_channel_is_spread_too():
    model = Made(lambda m, x: m.fc((m.a(x) + x).flatten(1)), a=conv(1, 4), fc=nn.Linear(16, 2))
    assert channels_of(model, (1, 2, 2)).groups == {"a": 4}


def test_a_single_channel_is_spread_over_its_partner():
    model = Made(lambda m, x: m.fc((m.a(x) * m.mask(x)).flatten(1)), a=conv(3, 4), mask=conv(3, 1), fc=nn.Linear(16, 2))
    found = channels_of(model, (3, 2, 2))
    assert found.groups == {"a": 4, "mask": 1}
    assert found.axes["fc.weight"] == ((1, "a", 4),)


class Moody(nn.Module):
    """Adds its shortcut in evaluation only."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.fc = conv(1, 4), conv(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.a(x)
        x = self.b(x) if self.training else self.b(x) + x
        return self.fc(x.mean((2, 3)))


def refuse(function, **layers):
    return Made(function, a=conv(1, 4), fc=nn.Linear(64, 2), **layers)


@pytest.mark.parametrize(
    ("model", "where"),
    [
        (build("vit", (1, 4, 4), 2, depth=1), "'transpose' in the model itself"),
        (refuse(lambda m, x: m.fc(m.g(m.a(x)).flatten(1)), g=conv(4, 4, groups=2)), "at 'g' .Conv2d.: .* 2 groups"),
        (refuse(lambda m, x: m.fc(torch.cat([m.a(x), m.a(x)], 1)[:, :4].flatten(1))), "operation 'cat'"),
        (refuse(lambda m, x: m.fc(m.a(x).view(-1, 64))), "operation 'view' in the model itself: .* open"),
        (refuse(lambda m, x: m.fc(m.a(x).reshape(x.shape[0], 64))), "operation 'reshape'"),
        (refuse(lambda m, x: m.fc(m.a(x).reshape(-1, x.shape[1] * 64))), "operation 'reshape'"),
        (refuse(lambda m, x: m.fc((y := m.a(x)).reshape(-1, y.shape[2], 16).flatten(1))), "operation 'reshape'"),
        (refuse(lambda m, x: m.fc(m.a(x).view((y := m.b(x)).size(0), y.size(1))), b=conv(1, 64)), "operation 'view'"),
        (refuse(lambda m, x: m.fc(m.a(x).view(-1, m.b(x).size(1), 16).flatten(1)), b=conv(1, 4)), "operation 'view'"),
        (refuse(lambda m, x: m.fc(m.a(x).view(-1, 2, 2, 16).flatten(1))), "operation 'view'.*2×4×4×4 becomes 2×2×2×16"),
        (refuse(lambda m, x: m.fc(m.n(m.a(x)).flatten(1)), n=nn.GroupNorm(2, 4)), "at 'n' .GroupNorm."),
        (refuse(lambda m, x: m.fc(m.n(m.a(x)).flatten(1)), n=nn.LayerNorm(4)), "at 'n' .LayerNorm."),
        (refuse(lambda m, x: m.fc(m.a(x).chunk(1, 1)[0].flatten(1))), "operation 'chunk'"),
        (refuse(lambda m, x: m.fc((m.a(x) + m.a(x).mean(1, True)).flatten(1))), "operation 'mean'.*over the channels"),
        (refuse(lambda m, x: m.fc(m.a(x).softmax(1).flatten(1))), "operation 'softmax'"),
        (refuse(lambda m, x: m.fc((m.a(x) * m.s).flatten(1)), s=nn.Parameter(torch.ones(4, 1, 1))), "'mul'.* with 's'"),
        (refuse(lambda m, x: m.fc((m.a(x) * (m.s + 1)).flatten(1)), s=torch.ones(4, 1, 1)), "'mul'.* no layer"),
        (
            refuse(lambda m, x: m.fc(F.conv2d(x, m.w).flatten(1)), w=nn.Parameter(torch.ones(4, 1, 1, 1))),
            "'conv2d'.*'w'",
        ),
        (
            refuse(lambda m, x: m.fc(F.conv2d(x, 2 * m.w).flatten(1)), w=nn.Parameter(torch.ones(4, 1, 1, 1))),
            "'conv2d'",
        ),
        (refuse(lambda m, x: m.fc(m.w(x).flatten(1)), w=weight_norm(conv(1, 4))), "at 'w'.*computed"),
        (refuse(lambda m, x: m.fc(m.t(x).flatten(1)), t=nn.ConvTranspose2d(1, 4, 1)), "at 't' .ConvTranspose2d."),
        (refuse(lambda m, x: m.fc(m.l(m.a(x)).flatten(1)), l=nn.Linear(4, 4)), "at 'l' .Linear.: .* dimension 3"),
        (refuse(lambda m, x: m.fc(m.a(x).squeeze().flatten(1))), "operation 'squeeze'"),
        (refuse(lambda m, x: m.p(m.fc(m.a(x).flatten(1))), p=nn.AvgPool1d(1)), "at 'p' .AvgPool1d.: it pools"),
        (refuse(lambda m, x: m.b(m.l(x.squeeze(1))), l=nn.Linear(4, 4), b=nn.BatchNorm1d(4)), "at 'b' .BatchNorm1d."),
        (refuse(lambda m, x: m.fc(m.a(x).view(-1, 8, 8).flatten(1))), "operation 'view'.*2×4×4×4 becomes 2×8×8"),
        (
            refuse(lambda m, x: m.fc(F.prelu(m.a(x), m.w).flatten(1)), w=nn.Parameter(torch.ones(4))),
            "operation 'prelu'",
        ),
        (refuse(lambda m, x: m.fc((m.a(x) + m.l(x)).flatten(1)), l=nn.Linear(4, 4)), "'add'.* different places"),
        (
            refuse(lambda m, x: m.fc(m.a(x).flatten(1)) + m.fc(F.max_pool2d(m.b(x), 2).flatten(1)), b=conv(1, 16)),
            "at 'fc' .Linear.: .* two ways",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), "no layer is left to cut"),
        (Moody(), "in training and in evaluation"),
    ],
)
def test_models_that_cannot_be_narrowed_say_where(model, where):
    with pytest.raises(ModelError, match=f"cannot be narrowed.*{where}"):
        channels_of(model, (1, 4, 4))


def test_an_error_names_the_block():
    block = Made(lambda m, x: torch.cat([m.a(x), x], 1), a=conv(4, 4))
    model = nn.Sequential(conv(1, 4), nn.Sequential(block), nn.Flatten(), nn.Linear(128, 2))
    with pytest.raises(ModelError, match=r"operation 'cat' in submodule '1\.0': .*does not cut channels"):
        channels_of(model, (1, 4, 4))


def test_a_wrong_input_shape_is_an_error():
    with pytest.raises(ModelError, match="CNN does not run on inputs of shape 1×8×8"):
        channels_of(build("cnn3", (3, 8, 8), 5), (1, 8, 8))


def test_the_model_is_left_alone():
    model = build("resnet10", (1, 8, 8), 3).double()
    model.layer2.eval()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate()
    channels_of(model, (1, 8, 8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
