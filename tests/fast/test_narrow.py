"""Sub-networks of different widths in one stack against each of them alone, as a chain of its own with autograd."""

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedprophet import models
from fedprophet.cascade.atoms import Chain, chain_of
from fedprophet.cascade.channel_flow import channels_of
from fedprophet.cascade.channels import Channels, kept_channels, random_channels
from fedprophet.cascade.narrow import narrow_chain
from fedprophet.client.aims import Labels
from fedprophet.client.descent import batches
from fedprophet.client.part import ModelPart
from fedprophet.client.trainer import train
from fedprophet.fast import narrow
from fedprophet.fast.folded import FoldedStack
from fedprophet.fast.kernels import Kernels, gathered
from fedprophet.fast.narrow import (
    WHOLE,
    Squares,
    cut_out,
    factors_of,
    fitted,
    room,
    run_at,
    scalable,
    shapes_in,
    width_of,
    work,
)
from fedprophet.fast.program import Block, Convolution, Ladder, LayerProgram
from fedprophet.fast.reading import read_program
from fedprophet.fast.rounds import Backend, TrainingPlan, uncaptured
from fedprophet.messages.tasks import Task, Train
from fedprophet.messages.values import LocalTraining
from fedprophet.models.normalize import Normalize

CPU = torch.device("cpu")
CLASSES = 10
HYPER = LocalTraining(iterations=4, batch=4, learning_rate=0.05, momentum=0.9, weight_decay=0.01, strong_convexity=0.0)
FRACTIONS = (0.3, 1.0, 0.6)
SAMPLES = 6


def unlike(model: nn.Module, draw: torch.Generator) -> nn.Module:
    """Move every number of a model, so that nothing is 0 or 1 by chance."""
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.2 * torch.rand(tensor.shape, generator=draw))
    return model


def tensors_of(segment: ModelPart) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in segment.chain.tensors.items()}


@dataclass(frozen=True)
class Group:
    """Clients that keep different channels of one model, as segments of their own and in the shapes they share."""

    chain: Chain
    channels: Channels
    kept: list[dict[str, Tensor]]
    segments: list[ModelPart]
    width: int
    x: Tensor
    labels: Tensor

    @cached_property
    def room(self) -> dict[str, Tensor]:
        return room(self.chain.model, self.channels, self.width, tile=1)

    @cached_property
    def program(self) -> LayerProgram:
        chain = narrow_chain(self.chain, self.channels, self.room, scaled=False)
        return read_program(chain, 0, len(chain), None, tuple(self.x.shape[2:]), CLASSES)

    @property
    def ladder(self) -> Ladder:
        return Ladder((self.program,) * len(self.kept))

    @property
    def factors(self) -> list[dict[str, float]]:
        return [factors_of(self.channels, kept) for kept in self.kept]

    def parameters(self) -> list[dict[str, Tensor]]:
        return [tensors_of(segment) for segment in self.segments]

    def fitted(self) -> list[dict[str, Tensor]]:
        used = {name: self.chain.tensors[name] for name in self.program.tensors}
        return fitted(self.parameters(), self.factors, shapes_in(self.channels, self.room, used), CPU)

    @property
    def stacked(self) -> Tensor:
        return self.x.permute(0, 1, 3, 4, 2).contiguous()

    @property
    def targets(self) -> Tensor:
        return torch.eye(CLASSES)[self.labels]


MODELS = [
    (name, *widths) for name in ("vgg-small", "resnet10") for widths in ((FRACTIONS, WHOLE), ((0.3, 0.6, 0.5), 5))
]
every_model = pytest.mark.parametrize(("name", "fractions", "width"), MODELS)


@cache
def traced(name: str, shape: tuple[int, int, int], **options: Any) -> tuple[Chain, Channels]:
    torch.manual_seed(0)
    model = models.build(name, shape, CLASSES, **options)
    return chain_of(model, Normalize((0.4,) * shape[0], (0.3,) * shape[0])), channels_of(model, shape)


def group_of(name="vgg-small", shape=(1, 8, 8), fractions=FRACTIONS, width=WHOLE, seed=0, **options) -> Group:
    draw = torch.Generator().manual_seed(seed)
    chain, channels = deepcopy(traced(name, shape, **{"width": 4, **options}))
    unlike(chain.model, draw)
    kept = [
        kept_channels(channels, r, lambda width, count: random_channels(width, count, generator=draw))
        for r in fractions
    ]
    x = torch.rand(len(fractions), SAMPLES, *shape, generator=draw)
    parts = [narrow_chain(chain, channels, own) for own in kept]
    segments = [ModelPart(part, 0, len(part), None) for part in parts]
    labels = torch.randint(CLASSES, (len(fractions), SAMPLES), generator=draw)
    return Group(chain, channels, kept, segments, width, x, labels)


@pytest.fixture(params=[Kernels(), Kernels(4)], ids=["exact", "padded"])
def kernels(request) -> Kernels:
    return request.param


# By hand.

TWO = Channels({"a": 16, "b": 6}, {})


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(16, 6, 8), (2, 0, 1), (3, 0, 2), (2, 1, 2), (4, 3, 4), (15, 1, 8), (1, 5, 7)],
)
def test_the_least_width_that_has_room(a, b, expected):
    assert width_of(TWO, {"a": torch.arange(a), "b": torch.arange(b)}) == expected


def test_room_is_in_eighths_in_tiles_and_whole_behind_linear_layers():
    model = models.build("vgg11", (3, 32, 32), CLASSES, width=16)
    channels = channels_of(model, (3, 32, 32))
    full = dict(channels.groups)
    assert [full[g] for g in ("features.0", "features.4", "classifier.0")] == [16, 32, 128]
    sizes = {group: len(own) for group, own in room(model, channels, 3, tile=1).items()}
    assert [sizes[g] for g in ("features.0", "features.4", "features.22")] == [6, 12, 48]
    assert sizes["classifier.0"] == sizes["classifier.3"] == 128
    tiles = {group: len(own) for group, own in room(model, channels, 3, tile=32).items()}
    # 6 of 16 become the 16 that there are, 12 of 32 a tile, 48 two of them.
    assert [tiles[g] for g in ("features.0", "features.4", "features.22")] == [16, 32, 64]
    assert {g: len(own) for g, own in room(model, channels, WHOLE, tile=64).items()} == full


def test_every_sub_network_has_room_at_its_width():
    group = group_of()
    for r in (0.01, 0.124, 0.125, 0.126, 0.33, 0.5, 0.51, 0.99, 1.0):
        kept = kept_channels(group.channels, r, lambda width, count: torch.arange(count))
        found = room(group.chain.model, group.channels, width_of(group.channels, kept), tile=1)
        assert all(len(found[name]) >= len(own) for name, own in kept.items())


def test_work_by_hand():
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 4),
    )  # fmt: skip
    program = read_program(chain_of(model), 0, len(chain_of(model)), None, (2, 4, 4), 4)
    assert work(program) == 9 * (16 * 2 * 3 + 4 * 3 * 5)


def test_work_of_shortcuts_and_strides_by_hand():
    blocks = (
        Block("a", "b", 2, 3, False, 1e-5, 0.1, kernel=7, stride=2, pool=3),
        Block("c", "d", 3, 5, False, 1e-5, 0.1, stride=2),
        Block(
            "e",
            "f",
            5,
            5,
            False,
            1e-5,
            0.1,
            residual=True,
            projection=Convolution("g", "h", 3, 5, False, 1e-5, 0.1, 1, 2),
        ),
    )
    first, second, third = 16 * 16 * 49 * 2 * 3, 4 * 4 * 9 * 3 * 5, 4 * 4 * (9 * 5 * 5 + 3 * 5)
    assert work(LayerProgram((2, 32, 32), None, blocks, None, (), False)) == first + second + third


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({8: 3}, {8: 8}),
        # One more group costs 10 here. Ten narrow clients beside full ones: alone they cost 10 + 10/16, with them 10.
        ({8: 30, 2: 10}, {8: 8, 2: 8}),
        # Eleven of them: 10 + 11/16 is less than 11.
        ({8: 30, 2: 11}, {8: 8, 2: 2}),
        # 40·(6/8)² + 40·(4/8)² + 20 = 52.5 against 80·(6/8)² + 10 = 55; with 31 of them 50.25 against 49.94.
        ({6: 40, 4: 40}, {6: 6, 4: 4}),
        ({6: 40, 4: 31}, {6: 6, 4: 6}),
        # Neighbours are joined, the ends kept apart.
        ({8: 50, 7: 10, 3: 40, 2: 10}, {8: 8, 7: 8, 3: 3, 2: 3}),
        # A round of the paper, ten clients of any widths, is one group.
        ({8: 1, 5: 2, 3: 3, 2: 4}, {8: 8, 5: 8, 3: 8, 2: 8}),
    ],
)
def test_what_is_run_together(counts, expected, monkeypatch):
    monkeypatch.setattr(narrow, "APART", 10.0)
    assert run_at(counts, lambda width: (width / WHOLE) ** 2) == expected


def test_small_networks_are_run_together_and_large_ones_apart():
    """For the multiplications of a whole VGG16 at 32×32 and of a ResNet34 at 224×224, ten clients of the paper."""
    counts = {8: 1, 5: 2, 3: 3, 2: 4}
    assert set(run_at(counts, lambda width: 3.1e8 * (width / WHOLE) ** 2).values()) == {8}
    # In whole clients: 1 + 2 · (5/8)² + 7 · (3/8)² + 3 · 0.83 = 5.3; all together 10.8, each width apart 5.8.
    assert run_at(counts, lambda width: 3.6e9 * (width / WHOLE) ** 2) == {8: 8, 5: 5, 3: 3, 2: 3}


def test_factors_by_hand():
    group = group_of(fractions=(0.5,))
    (factors,), (kept,) = group.factors, group.kept
    first, second = list(group.channels.groups)[:2]
    assert f"{first}.weight" not in factors  # images are never cut
    expected = group.channels.groups[first] / len(kept[first])
    assert factors[f"{second}.weight"] == factors[f"{second}.bias"] == expected
    assert "classifier.0.weight" in factors
    assert not any("features.1." in name for name in factors)
    assert group_of(fractions=(1.0,)).factors == [{}]
    assert set(factors) == set(scalable(group.channels, group.ladder))


# Into the common shapes and back.


@pytest.mark.parametrize("width", [5, WHOLE])
def test_every_tensor_comes_back_as_it_was(width):
    group = group_of(fractions=(0.3, 0.6, 0.5), width=width)
    padded = group.fitted()
    shapes = {name: value.shape for name, value in padded[0].items()}
    for own, factors, tensors in zip(padded, group.factors, group.parameters(), strict=True):
        assert {name: value.shape for name, value in own.items()} == shapes
        used = {name: value for name, value in tensors.items() if name in own}
        for name, value in cut_out(own, tensors, factors).items():
            torch.testing.assert_close(value, used[name], rtol=1e-6, atol=0)
            assert value.is_contiguous()
            assert own[name].count_nonzero() == used[name].count_nonzero()
    if width < WHOLE:
        assert shapes["features.0.weight"][0] < len(group.chain.tensors["features.0.weight"])


def test_tensors_that_are_not_scaled_come_back_to_the_bit():
    group = group_of(fractions=(1.0, 0.5))
    (whole, _), (tensors, _) = group.fitted(), group.parameters()
    assert all(torch.equal(value, tensors[name]) for name, value in whole.items())


# In evaluation mode.


def folded(group: Group, kernels) -> FoldedStack:
    network = FoldedStack(group.ladder, kernels, torch.float32)
    network.fold(network.layout.stacked(group.fitted(), CPU))
    return network


@every_model
def test_scores_and_gradients(kernels, name, fractions, width, distance):
    group = group_of(name, fractions=fractions, width=width)
    network = folded(group, kernels)
    z = network.prepare(group.stacked)
    scores, sent = network.scores(z), network.loss_gradient(z, group.targets, 0.0)
    found = network.scaling(CPU).back(gathered(sent, 1) if network.spreads else sent)
    for client, segment in enumerate(group.segments):
        x = group.x[client].clone().requires_grad_()
        with segment.mode(training=False):
            assert distance(scores[client], segment.logits(x).detach()) < 1e-5
            losses = segment.exit_losses(segment.features(x), Labels(group.labels[client]), 0.0)
            (expected,) = torch.autograd.grad(losses.sum(), x)
        assert distance(found[client].permute(0, 3, 1, 2), expected) < 1e-5


# In training.


def plan_of(group: Group, kernels=None, threat=None) -> TrainingPlan:
    backend = Backend(CPU, kernels or Kernels(), torch.float32, uncaptured)
    ladder = group.ladder
    return TrainingPlan(ladder, backend, SAMPLES, HYPER, threat, scalable(group.channels, ladder))


def play(plan: TrainingPlan, group: Group, hyper: LocalTraining = HYPER):
    """Train the clients as a group; return each one's tensors in its own shapes, and the losses."""
    data = list(zip(group.stacked, group.labels, strict=True))
    plan.load(group.fitted(), data, hyper, None, group.factors)
    drawn = [list(batches(SAMPLES, hyper.batch, hyper.iterations, task_of(k))) for k in range(len(data))]
    plan.run((torch.stack(positions) for positions in zip(*drawn, strict=True)), range(len(data)))
    stacks, losses, sound = plan.results()
    assert all(sound)
    parts = zip(stacks, group.parameters(), group.factors, strict=True)
    return [cut_out(own, like, factors) for own, like, factors in parts], losses


def task_of(client: int) -> Task:
    return Train(round=1, client=client, seed=0, training=HYPER)


def assert_as_plainly(group: Group, plan: TrainingPlan, hyper=HYPER) -> None:
    """Train on a stack, then each segment by itself, and compare."""
    before = group.parameters()
    found, losses = play(plan, group, hyper)
    for client, segment in enumerate(group.segments):
        task = replace(task_of(client), training=hyper)
        loss = train(task, segment, group.x[client], group.labels[client])
        assert losses[client] == pytest.approx(loss, rel=1e-5)
        tensors = tensors_of(segment)
        for name, value in found[client].items():
            assert value.shape == tensors[name].shape
            error, moved = (float((v - tensors[name]).norm()) for v in (value, before[client][name]))
            # Four steps of a narrow network multiply what the sums of another processor round otherwise: 8e-5 was seen.
            assert error <= 2e-4 * float(tensors[name].norm()) + 1e-6, name
            # A convolution's bias before a batch norm moves by noise, and by its decay.
            assert error <= 1e-3 * max(moved, 1e-3), name


@every_model
def test_steps_equal_the_plain_trainers(kernels, name, fractions, width):
    # Four samples at a single position, as a ResNet has them in the end, magnify rounding with every step.
    changes = {"iterations": 2 if name == "resnet10" else 4}
    if kernels.multiple == 1:
        changes |= {"momentum": 0.0, "weight_decay": 0.0}
    group, hyper = group_of(name, fractions=fractions, width=width), replace(HYPER, **changes)
    plan = plan_of(group, kernels)
    assert_as_plainly(group, replace(plan, hyper=hyper), hyper)


def test_a_plan_serves_narrower_clients_after_wider_ones():
    """Channels, velocities and factors of a round must not reach into the next."""
    wide, narrow = group_of(fractions=(1.0, 1.0, 0.9)), group_of(fractions=(0.2, 0.5, 1.0), seed=4)
    plan = plan_of(wide)
    for group in (wide, narrow, group_of(fractions=(0.7, 0.2, 0.3), seed=5)):
        assert_as_plainly(group, plan)


def test_padding_stays_zero(kernels):
    group = group_of(fractions=(0.2, 0.4, 0.7))
    plan = plan_of(group, kernels)
    play(plan, group)
    real = [cut_out(own, like, {}) for own, like in zip(plan.results()[0], group.parameters(), strict=True)]
    for name, stack in plan.training.stacks.items():
        assert stack.count_nonzero() == sum(own[name].count_nonzero() for own in real)
        assert stack.numel() > sum(own[name].numel() for own in real) or name.startswith("classifier.0.bias")
    for name, stack in plan.training.velocity.items():
        assert stack.count_nonzero() <= sum(own[name].numel() for own in real)


def test_a_client_that_is_not_finite_leaves_narrower_ones_alone():
    group = group_of(fractions=(0.4, 0.9))
    spoilt = replace(group, x=torch.stack([group.x[0], group.x[1] * torch.inf]))
    plan, data = plan_of(group), list(zip(spoilt.stacked, spoilt.labels, strict=True))
    plan.load(spoilt.fitted(), data, HYPER, None, spoilt.factors)
    plan.run(iter([torch.arange(4).repeat(2, 1)]), (1, 2))
    assert plan.results()[2] == [True, False]
    assert_as_plainly(group, plan)


def test_squares_reach_the_clients_that_have_a_tensor():
    long, short = (
        LayerProgram((1, 4, 4), None, group_of().program.blocks[:depth], None, (), False) for depth in (2, 1)
    )
    ladder = Ladder((long, short))
    names = [f"{block.convolution}.weight" for block in long.blocks]
    squares = Squares(names, ladder, CPU)
    squares.set([{names[0]: 2.0, names[1]: 3.0}, {names[0]: 5.0}])
    gradients = {names[0]: torch.ones(2, 9, 2, 2), names[1]: torch.ones(1, 9, 2, 2), "other": torch.ones(2)}
    squares.apply(gradients)
    assert gradients[names[0]][:, 0, 0, 0].tolist() == [4.0, 25.0]
    assert gradients[names[1]].unique().tolist() == [9.0]
    assert gradients["other"].tolist() == [1.0, 1.0]
    squares.set([{}, {}])
    squares.apply(gradients)
    assert gradients[names[0]][:, 0, 0, 0].tolist() == [4.0, 25.0]


def test_dropout_of_a_client_does_not_depend_on_the_width_it_is_run_at(distance):
    """At its own width, and beside wider clients: the same numbers are drawn."""
    ends = []
    for width in (4, WHOLE):
        group = group_of("vgg11", (3, 32, 32), fractions=(0.5, 0.25), width=width, dropout=0.5)
        plan = plan_of(group)
        found, losses = play(plan, group, replace(HYPER, iterations=1))
        ends.append((found, losses))
    (narrow, expected), (wide, losses) = ends
    assert losses == pytest.approx(expected, rel=1e-5)
    for one, other in zip(narrow, wide, strict=True):
        assert all(distance(one[name], other[name]) < 1e-4 for name in one)
