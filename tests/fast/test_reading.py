"""What is read from a model as a program for stacks, and what is refused, with which words."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from fedprophet import models
from fedprophet.cascade.atoms import chain_of, explicit_chain
from fedprophet.cascade.channel_flow import channels_of
from fedprophet.cascade.narrow import narrow_chain
from fedprophet.fast.program import Block, Convolution, Dense, LayerProgram
from fedprophet.fast.reading import NotFusableError, read_program
from fedprophet.models.normalize import Normalize


def read(model, shape=(3, 8, 8), first=0, last=None, head=None, classes=10):
    chain = model if hasattr(model, "atoms") else chain_of(model)
    return read_program(chain, first, len(chain) if last is None else last, head, shape, classes)


def refusal(model, **where) -> str:
    with pytest.raises(NotFusableError) as caught:
        read(model, **where)
    return str(caught.value)


def net(*layers, side: int = 8, channels: int = 4) -> nn.Sequential:
    """A block, the layers given, and an exit for what they leave of 8×8 positions."""
    block = (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(*block, *layers, nn.Flatten(), nn.Linear(channels * side * side, 10))


def two_blocks():
    """A chain of two atoms: a block, and another with the exit."""
    return chain_of(net(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()))


# What is read.


def test_a_small_vgg():
    model = models.build("vgg-small", (1, 8, 8), 10, width=4)
    program = read(chain_of(model, Normalize((0.5,), (0.25,))), (1, 8, 8))
    first = Block("features.0", "features.1", 1, 4, bias=True, epsilon=1e-5, momentum=0.1)
    assert program.blocks[0] == first
    assert [(b.inputs, b.outputs, b.pool) for b in program.blocks] == [
        (1, 4, 0), (4, 6, 2), (6, 8, 0), (8, 16, 2), (16, 16, 0), (16, 16, 0), (16, 16, 0)
    ]  # fmt: skip
    assert program == LayerProgram(
        (1, 8, 8), ((0.5,), (0.25,)), program.blocks, 1, (Dense("classifier.0", 16, 10, bias=True),), convex=False
    )
    assert program.feature == (16, 2, 2)


@pytest.mark.parametrize(
    ("name", "shape", "blocks", "side", "inputs"),
    [
        ("cnn3", (3, 32, 32), [(3, 1, 0, (32, 32)), (3, 2, 0, (16, 16))], 2, 32),
        ("cnn4", (3, 224, 224), [(7, 2, 2, (56, 56)), (7, 2, 0, (28, 28))], 7, 392),
    ],
)
def test_the_small_models_of_the_baselines(name, shape, blocks, side, inputs):
    """The exit takes the largest numbers of 2×2, or 7×7, parts."""
    program = read(models.build(name, shape, 10, width=4), shape)
    read_as = zip(program.blocks, program.sizes[1:], strict=True)
    assert [(block.kernel, block.stride, block.pool, left) for block, left in read_as] == blocks
    assert (program.side, program.maximum, program.convex) == (side, True, False)
    assert program.dense[0].inputs == inputs
    assert not read(models.build("vgg11", (3, 32, 32), 10, width=4), (3, 32, 32)).maximum


@pytest.mark.parametrize(("name", "blocks"), [("vgg11", 8), ("vgg16", 13)])
def test_the_published_vggs(name, blocks):
    model = models.build(name, (3, 32, 32), 10, width=8, dropout=0.25)
    program = read(model, (3, 32, 32))
    assert len(program.blocks) == blocks
    assert sum(block.pool == 2 for block in program.blocks) == 5
    assert program.feature == (64, 1, 1)
    assert program.dense == (
        Dense("classifier.0", 64, 64, bias=True, relu=True, dropout=0.25),
        Dense("classifier.3", 64, 64, bias=True, relu=True, dropout=0.25),
        Dense("classifier.6", 64, 10, bias=True),
    )
    assert program.normalize is None
    # Every tensor of the model but the counters is the program's.
    names = {name for name in model.state_dict() if not name.endswith("num_batches_tracked")}
    assert set(program.tensors) == names
    assert len(program.tensors) == len(names)


def test_a_segment_ends_in_the_head_that_the_plain_path_builds():
    chain = chain_of(models.build("vgg-small", (1, 8, 8), 10, width=4), Normalize((0.5,), (0.25,)))
    first = read(chain, (1, 8, 8), 0, 3, head=0)  # 6×4×4 behind the pool: two positions a side for ten classes
    assert (first.feature, first.side, first.convex) == ((6, 4, 4), 2, True)
    assert first.dense == (Dense("heads/0", 24, 10, bias=True),)
    later = read(chain, (6, 4, 4), 3, 5, head=1)
    assert (later.normalize, [b.convolution for b in later.blocks]) == (None, ["features.7", "features.10"])
    assert (later.feature, later.side, later.dense) == ((16, 2, 2), 1, (Dense("heads/1", 16, 10, bias=True),))


def test_a_head_that_reads_every_position_pools_nothing():
    program = read(two_blocks(), (3, 2, 2), 0, 1, head=0, classes=17)  # ceil(sqrt(17 / 4)) = 3 > 2 positions
    assert (program.side, program.dense) == (None, (Dense("heads/0", 16, 17, bias=True),))


def test_a_segment_without_an_exit_gives_out_its_feature():
    chain = chain_of(models.build("vgg-small", (1, 8, 8), 10, width=4))
    program = read(chain, (1, 8, 8), 0, 4)
    assert (program.side, program.dense, program.convex, program.feature) == (None, (), False, (16, 2, 2))


def test_an_explicit_chain_and_its_names():
    parts = [
        ("stem", nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, 1e-3, 0.2), nn.ReLU())),
        ("exit", nn.Sequential(nn.AdaptiveAvgPool2d((2, 2)), nn.Flatten(), nn.Linear(16, 10, bias=False))),
    ]
    program = read(explicit_chain(parts, Normalize((0.1,) * 3, (0.2,) * 3)))
    assert program.blocks == (Block("stem.0", "stem.1", 3, 4, bias=False, epsilon=1e-3, momentum=0.2),)
    assert (program.side, program.dense) == (2, (Dense("exit.2", 16, 10, bias=False),))
    assert program.normalize == ((0.1,) * 3, (0.2,) * 3)


def test_layers_without_tensors_may_be_used_again():
    relu = nn.ReLU(inplace=True)
    block = [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), relu]
    program = read(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), relu, *block, *net()[3:]))
    assert len(program.blocks) == 2


def test_a_resnet():
    model = models.build("resnet10", (3, 32, 32), 10, width=4)
    program = read(chain_of(model, Normalize((0.5,) * 3, (0.25,) * 3)), (3, 32, 32))
    stem, one, two, three, four = program.blocks[:5]
    assert stem == Block("conv1", "bn1", 3, 4, bias=False, epsilon=1e-5, momentum=0.1)
    assert (one.convolution, one.norm, one.residual) == ("layer1.0.conv1", "layer1.0.bn1", False)
    assert (two.convolution, two.norm, two.residual, two.projection) == ("layer1.0.conv2", "layer1.0.bn2", True, None)
    assert (three.inputs, three.outputs, three.stride, three.residual) == (4, 8, 2, False)
    assert four.projection == Convolution(
        "layer2.0.downsample.0",
        "layer2.0.downsample.1",
        4,
        8,
        bias=False,
        epsilon=1e-5,
        momentum=0.1,
        kernel=1,
        stride=2,
    )
    assert program.sizes == ((32, 32), (32, 32), (32, 32), (32, 32), (16, 16), (16, 16), (8, 8), (8, 8), (4, 4), (4, 4))
    assert (program.side, program.dense) == (1, (Dense("fc", 32, 10, bias=True),))
    names = {name for name in model.state_dict() if not name.endswith("num_batches_tracked")}
    assert set(program.tensors) == names
    assert len(program.tensors) == len(names)


def test_the_stem_of_a_resnet_for_large_images():
    program = read(models.build("resnet18", (3, 224, 224), 10, width=4), (3, 224, 224), last=2)
    stem = program.blocks[0]
    assert (stem.kernel, stem.stride, stem.pool, stem.shrinks) == (7, 2, 3, 4)
    assert program.feature == (4, 56, 56)


class Around(nn.Module):
    """Two blocks with something around them, or something else."""

    def __init__(self, main, shortcut, join=torch.add, last=None):
        super().__init__()
        self.stem, self.main, self.shortcut, self.join = net()[:3], main, shortcut, join
        self.end = nn.Sequential(last or nn.ReLU(), *net()[3:])

    def forward(self, x):
        x = self.stem(x)
        return self.end(self.join(self.main(x), self.shortcut(x)))


def normed(inputs=4, outputs=4, **options) -> nn.Sequential:
    options = {"kernel_size": 3, "padding": 1, **options}
    return nn.Sequential(nn.Conv2d(inputs, outputs, **options), nn.BatchNorm2d(outputs))


@pytest.mark.parametrize("join", [torch.add, lambda a, b: b + a, lambda a, b: a.__iadd__(b)])
def test_shortcuts_in_other_words(join):
    program = read(Around(two(), normed(kernel_size=1, padding=0), join))
    assert [block.residual for block in program.blocks] == [False, False, True]
    assert [block.convolution for block in program.blocks] == ["stem.0", "main.0", "main.3"]
    assert program.blocks[2].projection.convolution == "shortcut.0"


def two() -> nn.Sequential:
    return nn.Sequential(*normed(), nn.ReLU(), *normed())


@pytest.mark.parametrize(
    ("around", "said"),
    [
        (Around(normed(), nn.Identity()), "a sum of paths that is no residual block: one path has its end"),
        (Around(nn.Sequential(*normed(), *normed()), nn.Identity()), "a sum of paths that is no residual block"),
        (Around(two(), nn.ReLU()), "layer ReLU"),
        (Around(nn.Sequential(*two(), nn.ReLU()), nn.Identity()), "layer ReLU"),
        (Around(two(), nn.Identity(), torch.mul), "operation mul"),
        (Around(two(), nn.Identity(), lambda a, b: torch.add(a, b, alpha=2)), "operation add"),
        (Around(two(), nn.Identity(), lambda a, b: b.__iadd__(a) + b), "operation iadd"),
        (Around(two(), nn.Identity(), last=nn.Tanh()), "a batch norm that is followed by Tanh"),
    ],
)
def test_other_shortcuts(around, said):
    assert refusal(around).startswith(said)


class Twice(nn.Module):
    """Runs a norm layer on two paths, which changes its statistics twice."""

    def __init__(self):
        super().__init__()
        self.stem, self.first, self.rest, self.end = net()[:3], normed(), nn.Sequential(nn.ReLU(), *normed()), net()[2:]

    def forward(self, x):
        x = self.stem(x)
        return self.end(self.rest(self.first(x)) + self.first(x))


def test_a_layer_on_two_paths():
    assert refusal(Twice()) == "a layer, or a parameter of one, that is used twice"


class Aside(nn.Module):
    """Runs a norm layer whose output nobody reads: its statistics change all the same."""

    def __init__(self):
        super().__init__()
        self.stem, self.aside, self.end = net()[:3], nn.BatchNorm2d(4), net()[3:]

    def forward(self, x):
        x = self.stem(x)
        self.aside(x)
        return self.end(x)


def test_what_nobody_reads():
    assert refusal(Aside()) == "results that its output does not depend on"


class Methods(nn.Module):
    """Ends as torchvision's models do, or in another way."""

    def __init__(self, flatten):
        super().__init__()
        self.body, self.linear, self.flatten = net()[:3], nn.Linear(256, 10), flatten

    def forward(self, x):
        return self.linear(self.flatten(self.body(x)))


@pytest.mark.parametrize(
    "flatten",
    [
        lambda x: x.flatten(1),
        lambda x: x.flatten(start_dim=1),
        lambda x: torch.flatten(x, 1),
        lambda x: torch.flatten(x, 1, -1),
        lambda x: torch.flatten(x, start_dim=1),
    ],
)
def test_flattening_in_other_words(flatten):
    assert read(Methods(flatten)).dense == (Dense("linear", 256, 10, bias=True),)


@pytest.mark.parametrize(
    ("flatten", "said"),
    [
        (lambda x: x.view(-1, 256), "operation view"),
        (lambda x: torch.flatten(x, 1, 3), "operation flatten"),
        (lambda x: x.flatten(1, end_dim=3), "operation flatten"),
        (lambda x: torch.flatten(input=x, start_dim=1), "operation flatten"),
        (lambda x: torch.relu(x).flatten(1), "operation relu"),
        (lambda x: (x + 1).flatten(1), "operation add"),
    ],
)
def test_other_operations(flatten, said):
    assert refusal(Methods(flatten)) == said


# What is refused.


def test_other_models():
    model = models.build("vit", (3, 32, 32), 10)
    assert "a tensor that no layer of torch's own holds" in refusal(model, shape=(3, 32, 32))


def test_a_cnn3_of_an_odd_feature():
    assert refusal(models.build("cnn3", (3, 20, 12), 10), shape=(3, 20, 12)).startswith("a feature of 10×6 positions")
    assert refusal(models.build("cnn3", (3, 10, 10), 10), shape=(3, 10, 10)) == "a pool of 5×5 positions to 2×2"


def test_vectors_and_segments_that_begin_with_a_linear_layer():
    assert refusal(nn.Sequential(nn.Linear(4, 10)), shape=(4,)) == "inputs of shape (4,) are no images"
    assert refusal(nn.Sequential(nn.Flatten(), nn.Linear(192, 10))).startswith(
        "it begins with Flatten, not with a conv"
    )


def _convolution(**options) -> nn.Sequential:
    model = net()
    model[0] = nn.Conv2d(3, 4, **{"kernel_size": 3, "padding": 1, **options})
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 3},
        {"stride": (1, 2)},
        {"kernel_size": 2},
        {"kernel_size": 1},
        {"kernel_size": 5},
        {"padding": 0},
        {"dilation": 2, "padding": 2},
        {"padding_mode": "reflect"},
        {"kernel_size": (3, 1)},
    ],
)
def test_other_convolutions(options):
    assert refusal(_convolution(**options)).startswith("a convolution other than those of a VGG or a ResNet: Conv2d")


def test_padding_in_words():
    assert read(_convolution(padding="same")).blocks[0] == read(_convolution()).blocks[0]


def test_grouped_convolutions():
    model = nn.Sequential(*net()[:3], nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4), nn.ReLU(), *net()[3:])
    assert "groups=2" in refusal(model)


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        (nn.BatchNorm2d(4, affine=False), "a batch norm without an affine transformation"),
        (nn.BatchNorm2d(4, track_running_stats=False), "a batch norm that keeps no statistics"),
        (nn.BatchNorm2d(4, momentum=None), "a batch norm without a momentum"),
        (nn.BatchNorm2d(4, eps=0.0), "a batch norm without an epsilon, which would divide padding by zero"),
        (nn.GroupNorm(2, 4), "a convolution that is followed by GroupNorm"),
        (nn.Identity(), "a convolution that is followed by ReLU"),
    ],
)
def test_other_norms(norm, said):
    model = net()
    model[1] = norm
    assert refusal(model) == said


def test_other_activations():
    model = net()
    model[2] = nn.LeakyReLU()
    assert refusal(model) == "a batch norm that is followed by LeakyReLU"


@pytest.mark.parametrize(
    ("pool", "side"),
    [
        (nn.MaxPool2d(4), 2),
        (nn.MaxPool2d(3, 2, 0), 3),
        (nn.MaxPool2d(2, stride=1), 7),
        (nn.MaxPool2d(2, ceil_mode=True), 4),
        (nn.MaxPool2d((2, 1)), None),
    ],
)
def test_other_pools(pool, side):
    assert refusal(net(pool, side=side or 1)).startswith("a pool other than 2×2, or 3×3 with stride 2: MaxPool2d")


def test_positions_that_do_not_halve():
    assert refusal(net(nn.MaxPool2d(2), side=4), shape=(3, 9, 9)) == "a pool on 9×9 positions, which do not halve"
    assert refusal(_convolution(stride=2), shape=(3, 9, 9)) == "a stride on 9×9 positions, which do not halve"


@pytest.mark.parametrize(
    ("layers", "side", "said"),
    [
        ((nn.AdaptiveAvgPool2d(3),), 3, "a pool of 8×8 positions to 3×3"),
        ((nn.AdaptiveAvgPool2d(16),), 16, "a pool of 8×8 positions to 16×16"),
        ((nn.AdaptiveAvgPool2d((2, 4)),), 1, "a pool to a rectangle: AdaptiveAvgPool2d(output_size=(2, 4))"),
        ((nn.AdaptiveAvgPool2d((None, 2)),), 1, "a pool to a rectangle"),
        ((nn.AdaptiveMaxPool2d(3),), 3, "a pool of 8×8 positions to 3×3"),
        ((nn.AdaptiveMaxPool2d((2, 4)),), 1, "a pool to a rectangle: AdaptiveMaxPool2d(output_size=(2, 4))"),
        ((nn.AdaptiveMaxPool2d(2, return_indices=True),), 2, "a pool that says where its maxima were"),
        ((nn.AdaptiveAvgPool2d(None),), 8, "a pool to a rectangle"),
        ((nn.AvgPool2d(2),), 4, "layer AvgPool2d"),
        ((nn.Dropout2d(),), 8, "layer Dropout2d"),
    ],
)
def test_other_averages(layers, side, said):
    assert refusal(net(*layers, side=side)).startswith(said)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ((nn.Flatten(2), nn.Linear(64, 10)), "a flattening of other dimensions: Flatten(start_dim=2, end_dim=-1)"),
        ((nn.Linear(8, 10),), "a linear layer behind a feature that is not flattened"),
        ((nn.AdaptiveAvgPool2d(1), nn.Flatten()), "a pool or a flattening that is followed by its end"),
        ((nn.AdaptiveAvgPool2d(1), nn.Linear(1, 10)), "a linear layer behind a feature that is not flattened"),
        ((nn.Flatten(), nn.Dropout(), nn.Linear(256, 10)), "a pool or a flattening that is followed by Dropout"),
        ((nn.Flatten(), nn.Linear(256, 10), nn.Dropout(1.0)), "a dropout that keeps nothing"),
        ((nn.Flatten(), nn.Linear(256, 10), nn.Dropout(0.5), nn.ReLU()), "layer ReLU"),
        ((nn.Flatten(), nn.Linear(256, 10), nn.LogSoftmax(1)), "layer LogSoftmax"),
    ],
)
def test_other_exits(layers, said):
    assert refusal(nn.Sequential(*net()[:3], *layers)) == said


def test_rectangles():
    assert refusal(net(side=8), shape=(3, 8, 16)) == "a feature of 8×16 positions before its exit: no square"
    chain = two_blocks()
    assert refusal(chain, shape=(3, 1, 4), last=1, head=0) == "an auxiliary head that pools to a rectangle"  # 1×2
    assert refusal(chain, shape=(3, 2, 4), last=1, head=0) == "a feature of 2×4 positions before its exit: no square"
    assert read(chain, (3, 8, 16), 0, 1).feature == (4, 8, 16)  # a feature alone may have any shape


def test_heads_behind_what_is_no_feature():
    chain = explicit_chain([("body", net()), ("more", nn.Linear(10, 10))])
    assert refusal(chain, last=1, head=0) == "an auxiliary head behind a linear layer"
    pooled = explicit_chain([("body", nn.Sequential(*net()[:3], nn.AdaptiveAvgPool2d(2))), ("more", nn.Flatten())])
    assert refusal(pooled, last=1, head=0) == "a pool or a flattening that is followed by its end"


def test_sub_networks_scale_their_layers():
    chain = chain_of(models.build("vgg-small", (1, 8, 8), 10, width=4))
    channels = channels_of(chain.model, (1, 8, 8))
    half = {group: torch.arange(max(1, size // 2)) for group, size in channels.groups.items()}
    narrow = narrow_chain(chain, channels, half)
    assert refusal(narrow, shape=(1, 8, 8)) == "hooks on a layer Conv2d"


class OwnConvolution(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


class OwnNorm(nn.BatchNorm2d):
    def _check_input_dim(self, x):
        pass


class OwnLinear(nn.Linear):
    pass


class OwnSequential(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("place", "layer", "said"),
    [
        (0, OwnConvolution(3, 4, 3, padding=1), "it begins with OwnConvolution"),
        (1, OwnNorm(4), "followed by OwnNorm"),
        (4, OwnLinear(256, 10), "followed by OwnLinear"),
    ],
)
@pytest.mark.parametrize("explicit", [True, False])
def test_subclasses_may_do_anything(place, layer, said, explicit):
    model = net()
    model[place] = layer
    # A trace looks into a forward that is not torch's own, and meets the convolution's parameters there.
    said = "a tensor that no layer of torch's own holds" if place == 0 and not explicit else said
    assert said in refusal(explicit_chain([("all", model)]) if explicit else model)


def test_a_sequence_with_a_forward_of_its_own_is_not_looked_into():
    model = OwnSequential(*net())
    assert refusal(explicit_chain([("all", model)])).startswith("it begins with OwnSequential")
    assert refusal(model) == "operation mul"


def test_hooks_and_patched_layers():
    def hook(*_):
        return None

    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        model = net()
        getattr(model[1], register)(hook)
        assert refusal(explicit_chain([("all", model)])) == "hooks on a layer BatchNorm2d"
    outer = net()
    outer.register_forward_hook(hook)
    assert refusal(explicit_chain([("all", outer)])) == "hooks on a layer Sequential"
    patched = net()
    patched[0].forward = lambda x: x
    assert refusal(explicit_chain([("all", patched)])) == "hooks on a layer Conv2d"
    traced = chain_of(net())
    traced.model[1].register_forward_hook(hook)
    assert refusal(traced) == "hooks on a layer BatchNorm2d"


def test_layers_and_parameters_that_are_used_twice():
    block = [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    again = nn.Sequential(*net()[:3], *block, *block, *net()[3:])
    assert refusal(explicit_chain([("all", again)])) == "a layer, or a parameter of one, that is used twice"
    tied = nn.Sequential(*net()[:3], *block, *deepcopy(block), *net()[3:])
    tied[6].weight = tied[3].weight
    assert refusal(explicit_chain([("all", tied)])) == "a layer, or a parameter of one, that is used twice"


def test_tensors_that_a_stack_would_lose_or_train():
    spare = net()
    spare.register_parameter("spare", nn.Parameter(torch.zeros(2)))
    assert refusal(spare) == "tensor spare, which no layer computes with"
    buffer = net()
    buffer.register_buffer("seen", torch.zeros(2))
    assert refusal(buffer) == "tensor seen, which no layer computes with"
    fixed = net()
    fixed[0].weight.requires_grad_(False)
    assert refusal(fixed) == "parameter 0.weight, which is not to be trained"
    assert refusal(net().double()) == "tensor 0.weight of type torch.float64"


class TwoModes(nn.Module):
    """Does more in training than in evaluation."""

    def __init__(self):
        super().__init__()
        self.body, self.more = net()[:3], nn.ReLU()
        self.exit = net()[3:]

    def forward(self, x):
        x = self.body(x)
        return self.exit(self.more(x) if self.training else x)


def test_different_work_in_training_and_evaluation():
    assert refusal(TwoModes()).endswith("does other things in training than in evaluation")
