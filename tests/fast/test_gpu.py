"""The Triton kernels against those in plain torch, in both precisions, at sizes that fit no tile; whole networks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedprophet.attacks.pgd import pgd
from fedprophet.fast.aims import UNLABELLED, Teacher
from fedprophet.fast.draws import Draws
from fedprophet.fast.folded import FoldedStack
from fedprophet.fast.kernels import Ball, BatchNorm, Kernels, Scaling, Statistics
from fedprophet.fast.rounds import Backend, TrainingPlan, uncaptured
from fedprophet.fast.training import TrainingStack
from fedprophet.messages.values import LocalTraining
from fedprophet.randomness import generator
from fedprophet.threat import ThreatModel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

GPU, CPU = "cuda", "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SIZES = [
    # clients, samples, side, inputs, outputs
    pytest.param((1, 5, 6, 16, 48), id="180-rows"),
    pytest.param((3, 9, 8, 48, 16), id="576-rows"),
    pytest.param((3, 3, 2, 64, 512), id="12-rows"),
    pytest.param((1, 37, 4, 512, 64), id="592-rows"),
    # Sides that are no powers of two, as a ResNet's: blocks reach beyond the images.
    pytest.param((2, 3, 7, 64, 128), id="147-rows"),
    pytest.param((2, 2, 14, 128, 64), id="392-rows"),
    pytest.param((1, 1, 56, 64, 64), id="3136-rows"),
]
HYPER = LocalTraining(iterations=2, batch=3, learning_rate=0.05, momentum=0.9, weight_decay=0.01, strong_convexity=0.02)
FIXED = {"fixed_statistics": True, "learning_rate": 0.002}
"""Nothing holds activations back where the batch does not, so that a step is shorter."""


@pytest.fixture(params=TOLERANCE, ids=["float32", "bf16"])
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(params=SIZES)
def size(request) -> tuple[int, int, int, int, int]:
    return request.param


@pytest.fixture(scope="module")
def triton():
    from fedprophet.fast.gpu import TritonKernels

    return TritonKernels()


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers that are the same in float32 and in `dtype`, in float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).float()


def images(size, channels: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    clients, samples, side, _, _ = size
    return draw(clients, samples, side, side, channels, seed=seed, dtype=dtype)


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of a client: one that is wrong must not hide behind the others."""
    differences = (found.float().cpu() - expected).flatten(1).norm(dim=1)
    return float((differences / expected.flatten(1).norm(dim=1).clamp(min=1e-9)).max())


def on_gpu(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(GPU, dtype) for tensor in tensors]


# Kernel by kernel.


def test_convolution(triton, size, dtype):
    clients, _, _, inputs, outputs = size
    x, weight = images(size, inputs, dtype), draw(clients, 9, inputs, outputs, seed=1, dtype=dtype)
    shift, mask = draw(clients, outputs, seed=2), images(size, outputs, dtype, seed=3)
    one, two, three = on_gpu(dtype, x, weight, mask)
    plain = Kernels()
    assert error(triton.convolve(one, two), plain.convolve(x, weight)) < TOLERANCE[dtype]
    back = triton.convolve(three, two, turned=True)
    assert error(back, plain.convolve(mask, weight, turned=True)) < TOLERANCE[dtype]
    shift = shift * inputs**0.5
    found = triton.convolve(one, two, shift.to(GPU))
    assert found.dtype == dtype
    assert error(found, plain.convolve(x, weight, shift)) < TOLERANCE[dtype]
    found = triton.convolve(one, two, mask=three)
    assert error(found, plain.convolve(x, weight, mask=mask)) < TOLERANCE[dtype]
    assert not found.cpu()[mask <= 0].any()
    found = triton.convolve(one, two, shift.to(GPU), add=three)
    assert error(found, plain.convolve(x, weight, shift, add=mask)) < TOLERANCE[dtype]
    found = triton.convolve(three, two, mask=one, turned=True, add=one)
    assert error(found, plain.convolve(mask, weight, mask=x, turned=True, add=x)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("side", "stride"), [(1, 2), (3, 2), (7, 2)])
def test_rare_convolutions(triton, dtype, side, stride):
    x, weight = draw(2, 3, 8, 8, 16, dtype=dtype), draw(2, side * side, 16, 32, seed=1, dtype=dtype)
    gradient = draw(2, 3, 4, 4, 32, seed=2, dtype=dtype)
    one, two, three = on_gpu(dtype, x, weight, gradient)
    plain = Kernels()
    found = triton.convolve(one, two, stride=stride)
    assert found.is_contiguous()
    assert error(found, plain.convolve(x, weight, stride=stride)) < TOLERANCE[dtype]
    found = triton.convolve(three, two, turned=True, stride=stride)
    assert found.is_contiguous()
    assert error(found, plain.convolve(gradient, weight, turned=True, stride=stride)) < TOLERANCE[dtype]
    found = triton.weight_gradient(one, three, side, stride)
    assert error(found, plain.weight_gradient(x, gradient, side, stride)) < TOLERANCE[dtype]


def test_what_convolutions_end_with(triton, size, dtype):
    x, mask = images(size, 48, dtype), images(size, 48, dtype, seed=1)
    shift = draw(size[0], 48, seed=2)
    one, two = on_gpu(dtype, x, mask)
    rectified, masked = (Kernels().finish(x.clone(), shift, each) for each in (None, mask))
    out = torch.empty_like(one)
    assert triton.finish(one, shift.to(GPU), two, out) is out
    assert error(out, masked) < TOLERANCE[dtype]
    assert error(triton.finish(one, shift.to(GPU)), rectified) < TOLERANCE[dtype]


def test_weight_gradient(triton, size, dtype):
    _, _, _, inputs, outputs = size
    x, gradient = images(size, inputs, dtype), images(size, outputs, dtype, seed=4)
    found = triton.weight_gradient(*on_gpu(dtype, x, gradient))
    assert found.dtype == torch.float32
    assert error(found, Kernels().weight_gradient(x, gradient)) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [2, 3])
def test_pool_and_its_gradient(triton, size, dtype, window):
    _, _, side, _, channels = size
    if side % 2:
        pytest.skip("does not halve")
    x = images(size, channels, dtype, seed=5).relu().mul(2).round().div(2)  # many positions are equal
    gradient = images((*size[:2], side // 2, 0, 0), channels, dtype, seed=6)
    one, two = on_gpu(dtype, x, gradient)
    (top, winners), (expected, winning) = triton.pool(one, window), Kernels().pool(x, window)
    assert torch.equal(top.float().cpu(), expected)
    assert torch.equal(winners.cpu(), winning)
    # A window on the border of 2×2 positions sees no more than these four.
    some = {4, 5, 7, 8, 9} if (side, window) == (2, 3) else set(range(window**2 + 1))
    assert set(winning.unique().tolist()) == some
    back = triton.unpool(winners, two, window)
    assert error(back, Kernels().unpool(winning, gradient, window)) < TOLERANCE[dtype]


def dividing(side: int) -> list[int]:
    """Return into how many parts a side can be pooled."""
    return [parts for parts in (1, 2) if side % parts == 0]


def test_averages(triton, size, dtype):
    _, _, side, _, channels = size
    x, plain = images(size, channels, dtype, seed=5), Kernels()
    for parts in dividing(side):
        gradient = draw(*size[:2], parts * parts * channels, seed=6, dtype=dtype)
        one, two = on_gpu(dtype, x, gradient)
        assert error(triton.average(one, parts), plain.average(x, parts)) < TOLERANCE[dtype]
        for weight, masked in ((0.0, False), (0.3, True)):
            out = torch.empty_like(one)
            assert triton.average_gradient(two, one, parts, weight, masked, out) is out
            assert error(out, plain.average_gradient(gradient, x, parts, weight, masked)) < TOLERANCE[dtype]


def test_maxima(triton, size, dtype):
    _, _, side, _, channels = size
    x = images(size, channels, dtype, seed=5).relu().mul(2).round().div(2)  # many positions are equal
    plain = Kernels()
    for parts in dividing(side):
        gradient = draw(*size[:2], parts * parts * channels, seed=6, dtype=dtype)
        one, two = on_gpu(dtype, x, gradient)
        assert torch.equal(triton.maximum(one, parts).float().cpu(), plain.maximum(x, parts))
        for masked in (False, True):
            out = torch.empty_like(one)
            assert triton.maximum_gradient(two, one, parts, masked, out) is out
            assert torch.equal(out.float().cpu(), plain.maximum_gradient(gradient, x, parts, masked))


@pytest.mark.parametrize("wide", [False, True], ids=["bias-like-weights", "bias-in-float32"])
@pytest.mark.parametrize("classes", [2, 10, 257])
def test_the_gradient_at_a_head(triton, size, dtype, classes, wide):
    """A calibrated head's bias is in float32, whatever its weights are in."""
    clients, samples, _, _, channels = size
    x, weight = images(size, channels, dtype, seed=5), draw(clients, channels, classes, seed=6, dtype=dtype)
    bias = 5 * draw(clients, classes, seed=7) if wide else draw(clients, classes, seed=7, dtype=dtype)
    targets = torch.eye(classes)[torch.arange(clients * samples).view(clients, samples) % classes]
    one, two = on_gpu(dtype, x, weight)
    three = bias.to(GPU, torch.float32 if wide else dtype)
    for weighted, masked in ((0.0, False), (0.3, True)):
        out = torch.empty_like(one)
        assert triton.head_gradient(one, two, three, targets.to(GPU), weighted, masked, out) is out
        expected = Kernels().head_gradient(x, weight, bias, targets, weighted, masked)
        assert error(out, expected) < TOLERANCE[dtype]


def test_norms(triton, size, dtype):
    clients, _, _, _, channels = size
    x, gradient, active = (images(size, channels, dtype, seed=seed) for seed in (7, 8, 9))
    x = (2 * x + 1).to(dtype).float()
    a, b, c = (draw(clients, channels, seed=seed) for seed in (10, 11, 12))
    plain, tensors = Kernels(), on_gpu(dtype, gradient, active, x)
    numbers = [values.to(GPU) for values in (a, b, c)]
    for add, relu in ((None, True), (gradient, True), (None, False)):
        extra = None if add is None else tensors[0]
        found = triton.scale_shift(tensors[2], numbers[1], numbers[2], extra, relu)
        assert error(found, plain.scale_shift(x, b, c, add, relu)) < TOLERANCE[dtype]
    found = triton.norm_gradient(*tensors, *numbers)
    assert error(found, plain.norm_gradient(gradient, active, x, a, b, c)) < TOLERANCE[dtype]


def norm_layer(clients: int, channels: int, biased: bool, device: str) -> BatchNorm:
    weight, bias, before, mean = (draw(clients, channels, seed=seed).to(device) for seed in (14, 15, 16, 17))
    variance = draw(clients, channels, seed=18).exp().to(device)
    return BatchNorm(weight, bias, before if biased else None, mean, variance, 1e-3, 0.3)


# One part of the rows, several, as many as there may be; channels that fill no block.
BATCHES = [(1, 5, 4, 4, 16), (3, 2, 8, 8, 48), (2, 5, 11, 9, 100), (2, 3, 56, 56, 5), (2, 3, 2, 2, 33)]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", BATCHES, ids=str)
def test_statistics_and_slopes_of_a_norm_layer(triton, dtype, shape, biased):
    clients, channels = shape[0], shape[-1]
    x, gradient, active = (draw(*shape, seed=seed, dtype=dtype) for seed in (7, 8, 9))
    x = (2 * x + 1).to(dtype).float()
    norm, expected = (norm_layer(clients, channels, biased, device) for device in (GPU, CPU))
    on_device = on_gpu(dtype, gradient, active, x)
    found, statistics = triton.norm_statistics(on_device[2], norm), Kernels().norm_statistics(x, expected)
    # Statistics and sums are float32 whatever they are of.
    for one, other in zip(vars(found).values(), vars(statistics).values(), strict=True):
        assert one.is_contiguous()
        assert error(one, other) < 1e-5
    assert error(norm.running_mean, expected.running_mean) < 1e-5
    assert error(norm.running_var, expected.running_var) < 1e-5
    untouched = norm_layer(clients, channels, biased, GPU)
    assert torch.equal(norm.weight, untouched.weight)
    assert torch.equal(norm.bias, untouched.bias)
    given = Statistics(*(value.to(GPU) for value in vars(statistics).values()))
    slopes = triton.norm_slopes(*on_device, given)
    wanted = Kernels().norm_slopes(gradient, active, x, statistics)
    for one, other in zip(vars(slopes).values(), vars(wanted).values(), strict=True):
        assert one.is_contiguous()
        assert error(one, other) < 1e-4


@pytest.mark.parametrize("first", [None, 1000.0], ids=["all-far", "the-first-one-far"])
def test_statistics_of_numbers_far_from_zero(triton, first):
    """Also where one number is far from the others: their differences must not drown in it."""
    x = draw(2, 8, 28, 28, 3) + 1000
    if first is not None:
        x[:, 0, 0, 0] += first
    found = triton.norm_statistics(x.to(GPU), norm_layer(2, 3, True, GPU))
    deviations = x.double().flatten(1, 3).std(dim=1, correction=0)
    torch.testing.assert_close(1 / found.inverse.double().cpu(), (deviations**2 + 1e-3).sqrt(), rtol=1e-5, atol=0)


def test_statistics_of_what_is_no_number_are_none(triton):
    x, norm = draw(2, 3, 8, 8, 16).to(GPU), norm_layer(2, 16, True, GPU)
    x[0, 1, 2, 3] = float("nan")
    found = triton.norm_statistics(x, norm)
    for values in (*vars(found).values(), norm.running_mean, norm.running_var):
        assert bool(values[0].isnan().all())
        assert bool(values[1].isfinite().all())


@pytest.mark.parametrize(("biased", "add"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("shape", [(1, 9, 16, 16), (3, 9, 5, 100), (2, 1, 70, 48)], ids=str)
def test_folding_a_norm_layer(triton, dtype, shape, biased, add):
    clients, channels = shape[0], shape[-1]
    weight, shift = draw(*shape, seed=1), draw(clients, channels, seed=2)
    results = []
    for kernels, device in ((Kernels(), CPU), (triton, GPU)):
        norm, there = norm_layer(clients, channels, biased, device), shift.clone().to(device)
        out = torch.empty(shape, dtype=dtype, device=device)
        kernels.fold(weight.to(device), norm, out, there, add)
        results.append((out.cpu(), there.cpu()))
    (expected, added), (found, there) = results
    assert error(found, expected.float()) < TOLERANCE[dtype]
    assert error(there, added) < 1e-5
    assert error(there, shift) > 0.1


def test_folding_what_clients_share(triton):
    weight = draw(1, 9, 16, 32).to(GPU)
    norm = norm_layer(1, 32, True, GPU)
    shared = BatchNorm(*(v.expand(3, -1) if isinstance(v, Tensor) else v for v in vars(norm).values()))
    out, shift = torch.empty(3, 9, 16, 32, device=GPU), torch.empty(3, 32, device=GPU)
    triton.fold(weight.expand(3, -1, -1, -1), shared, out, shift, False)
    one, alone = torch.empty_like(weight), torch.empty(1, 32, device=GPU)
    triton.fold(weight, norm, one, alone, False)
    torch.testing.assert_close(out, one.expand_as(out))
    torch.testing.assert_close(shift, alone.expand_as(shift))


@pytest.mark.parametrize(("channels", "spread"), [(3, False), (3, True), (40, False)])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_step_of_an_attack(triton, norm, channels, spread):
    """With bounds, a normalisation, padded channels, and sums over a sample that are cut into parts."""
    shape = (2, 3, 30, 20, channels)
    clean = draw(*shape).sigmoid()
    x, gradient = clean + 0.01 * draw(*shape, seed=1), draw(*shape[:-1], 32 if spread else 48, seed=2)
    mean, std = draw(channels, seed=3).sigmoid(), draw(channels, seed=4).exp()
    found = []
    for kernels, device in ((Kernels(), CPU), (triton, GPU)):
        radius, step = (torch.tensor(value, device=device) for value in (0.05, 0.03))
        scaling = Scaling(mean.to(device), std.to(device), torch.float32, 48)
        moved = x.to(device).clone()
        z = torch.zeros((*shape[:-1], 48), device=device)
        ball = Ball(norm, radius, step, 0.0, float("inf"))
        kernels.ascend(moved, z, clean.to(device), gradient.to(device), ball, scaling, spread)
        found.append((moved.cpu(), z.cpu()))
    (expected, scaled), (moved, z) = found
    assert float((moved - x).abs().max()) > 1e-5
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(z, scaled, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("side", [1, 2, 4, 7, 8, 14, 16, 28, 32, 56])
def test_convolutions_in_blocks(triton, side, turned):
    """Sizes that the copy engine fetches: lines of an image, or whole images, the last tile not full."""
    clients, samples, inputs, outputs = 2, 9, 64, 192
    weight = draw(clients, 9, inputs, outputs, seed=1, dtype=torch.bfloat16)
    read, written = (outputs, inputs) if turned else (inputs, outputs)
    x = draw(clients, samples, side, side, read, dtype=torch.bfloat16)
    mask, shift = draw(clients, samples, side, side, written, seed=2), draw(clients, written, seed=3)
    options = {"mask": mask, "turned": True} if turned else {"shift": 20 * shift}
    expected = Kernels().convolve(x, weight, **options)
    on_device = {name: value.to(GPU) if isinstance(value, Tensor) else value for name, value in options.items()}
    if turned:
        on_device["mask"] = mask.to(GPU, torch.bfloat16)
    found = triton.convolve(*on_gpu(torch.bfloat16, x, weight), **on_device)
    assert error(found, expected) < TOLERANCE[torch.bfloat16]


SHAPES = [
    # samples, side, inputs, outputs, whether turned: one for each kind of tile that `tiles.block_tiles` chooses
    pytest.param(9, 8, 128, 256, False, id="few"),
    pytest.param(65, 8, 128, 256, False, id="some"),
    pytest.param(301, 8, 64, 256, False, id="many"),
    pytest.param(9, 8, 128, 256, True, id="few-turned"),
    pytest.param(9, 8, 64, 256, True, id="few-turned-with-few-inputs"),
    pytest.param(51, 8, 64, 256, True, id="some-turned"),
    pytest.param(101, 8, 64, 256, True, id="more-turned"),
    pytest.param(2001, 4, 64, 256, True, id="many-turned"),
    pytest.param(101, 16, 64, 128, True, id="large-turned"),
    pytest.param(1, 72, 64, 256, True, id="long-lines-turned"),
]


@pytest.mark.parametrize(("samples", "side", "inputs", "outputs", "turned"), SHAPES)
def test_every_kind_of_tile(triton, samples, side, inputs, outputs, turned):
    clients, taps = 2, (outputs, inputs) if turned else (inputs, outputs)
    x, weight = draw(clients, samples, side, side, inputs), draw(clients, 9, *taps, seed=1)
    x, weight = on_gpu(torch.bfloat16, x, weight)
    # Not in bfloat16: that would have errors of its own, about as large.
    expected = Kernels().convolve(x.float(), weight.float(), turned=turned)
    assert error(triton.convolve(x, weight, turned=turned), expected.cpu()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("channels", [1, 3])
def test_convolutions_of_few_channels(triton, channels, dtype):
    clients, samples, side, outputs = 2, 7, 10, 48
    x, weight = draw(clients, samples, side, side, 16, dtype=dtype), draw(clients, 9, 16, outputs, seed=1, dtype=dtype)
    x[..., channels:] = 0
    weight[:, :, channels:] = 0
    shift = 2 * draw(clients, outputs, seed=2)
    found = triton.convolve(*on_gpu(dtype, x, weight), shift.to(GPU), channels=channels)
    assert error(found, Kernels().convolve(x, weight, shift)) < TOLERANCE[dtype]
    found = triton.convolve(*on_gpu(dtype, x, weight), channels=channels)
    assert error(found, Kernels().convolve(x, weight)) < TOLERANCE[dtype]


# Networks.


NETWORKS = [
    # Channels 24, 48 and 96 (of which the first is padded), pools, and a head.
    pytest.param({"name": "vgg-small-3", "span": (0, 3, 0), "clients": 1, "width": 24}, id="vgg-of-one"),
    pytest.param({"name": "vgg-small-3", "span": (0, 3, 0), "clients": 3, "width": 24}, id="vgg"),
    pytest.param({"name": "resnet10", "shape": (1, 16, 16), "clients": 3, "width": 24}, id="resnet"),
    # A stride, and an exit that takes maxima.
    pytest.param({"name": "cnn3", "shape": (1, 16, 16), "clients": 3, "width": 24}, id="cnn3"),
]


@pytest.fixture(params=NETWORKS)
def case(request, make_case):
    return make_case(**request.param)


@pytest.mark.parametrize("calibrated", [False, True], ids=["plain", "calibrated"])
def test_networks_in_evaluation_mode(case, triton, calibrated):
    reference, network = (FoldedStack(case.ladder, kernels, torch.float32) for kernels in (Kernels(), triton))
    if calibrated:
        reference.prior = case.calibrate()
        network.prior = reference.prior.to(GPU)
    reference.fold(case.stacks())
    network.fold({name: value.to(GPU) for name, value in case.stacks(triton.multiple).items()})
    x, z = network.prepare(case.stacked.to(GPU)), reference.prepare(case.stacked)
    assert error(network.scores(x), reference.scores(z)) < 1e-4
    expected = reference.loss_gradient(z, case.targets, 0.02)
    found = network.loss_gradient(x, case.targets.to(GPU), 0.02)
    assert network.spreads  # images of one channel
    assert error(found, expected) < 1e-4


@pytest.mark.parametrize("calibrated", [False, True], ids=["plain", "calibrated"])
@pytest.mark.parametrize(
    "changes", [{}, {"proximal": 2.0}, {"consistency": 1.5}, FIXED, {"proximal": 2.0, **FIXED}], ids=str
)
def test_steps_of_training(case, triton, changes, calibrated):
    # Rounding decides what a ReLU at zero lets through; a deeper network enlarges that in its next step.
    steps = 2 if len(case.program.blocks) < 5 else 1
    hyper, prior, trainings = replace(HYPER, **changes), case.calibrate(), []
    server = torch.rand(case.targets.shape, generator=torch.Generator().manual_seed(2)).softmax(dim=2)
    for kernels, device in ((Kernels(), CPU), (triton, GPU)):
        stacks = {name: value.to(device) for name, value in case.stacks(kernels.multiple).items()}
        training = TrainingStack(case.ladder, kernels, torch.float32, stacks, hyper)
        training.prior = prior.to(device) if calibrated else None
        anchored = training.layout.parameters() if hyper.proximal else ()
        training.anchors = {name: stacks[name].clone() for name in anchored}
        for _ in range(steps):
            z = training.prepare(case.stacked.to(device))
            strength = torch.full(server.shape[:2], hyper.consistency)
            drawn_to = Teacher(server.to(device), strength.to(device)) if hyper.consistency else None
            training.step(z, case.targets.to(device), Draws(torch.device(device)), drawn_to)
        found = {name: training.layout.unstacked(name, stack) for name, stack in training.stacks.items()}
        trainings.append((training.losses.cpu(), found))
    (losses, expected), (mine, found) = trainings
    torch.testing.assert_close(mine, losses, rtol=1e-5, atol=1e-5)
    for name, values in expected.items():
        assert error(found[name], values) < 1e-4, name


# Plans.


def backend(triton, captures: bool, compute: torch.dtype = torch.float32) -> Backend:
    from fedprophet.engines.cuda import Captured

    return Backend(torch.device(GPU), triton, compute, Captured if captures else uncaptured)


THREAT = ThreatModel("linf", 0.1, 0.04, 3, (0.0, 1.0))


def play(plan: TrainingPlan, case, threat=THREAT, hyper=HYPER, prior=None, teachers=()):
    data = [(x.to(GPU), labels.to(GPU)) for x, labels in zip(case.stacked, case.labels, strict=True)]
    plan.load(case.parameters(), data, hyper, threat, prior=prior, teachers=teachers)
    clients, samples = case.labels.shape
    half = samples // 2 + 1
    order = torch.stack([torch.randperm(samples, generator=torch.Generator().manual_seed(k)) for k in range(clients)])
    # Often enough that graphs are captured.
    plan.run(iter((order[:, :half].to(GPU), order[:, half:].to(GPU)) * 6), range(clients))
    tensors, losses, sound = plan.results()
    return [{name: value.cpu() for name, value in own.items()} for own in tensors], losses, sound


def training_plan(triton, case, captures: bool, hyper=HYPER, calibrated: bool = False) -> TrainingPlan:
    anchored = ("features.0.weight", "features.0.bias") if hyper.proximal else ()
    new = {"calibrated": calibrated, "anchored": anchored}
    return TrainingPlan(case.ladder, backend(triton, captures), case.labels.shape[1], hyper, THREAT, **new)


def assert_equal_results(one, other) -> None:
    assert one[1] == pytest.approx(other[1], rel=1e-6)
    assert one[2] == other[2]
    for mine, theirs in zip(one[0], other[0], strict=True):
        for name, values in mine.items():
            assert error(values.unsqueeze(0), theirs[name].unsqueeze(0)) < 1e-6, name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"span": (3, 6, 1)},
        {"name": "resnet10", "shape": (3, 72, 72), "span": (0, 3, 0)},
        {"name": "cnn3", "shape": (3, 16, 16)},
    ],
    ids=["whole", "later-module", "resnet", "cnn3"],
)
def test_a_captured_plan_does_what_it_does_uncaptured(make_case, triton, options):
    case = make_case(clients=3, **options)
    plan = training_plan(triton, case, captures=True)
    direct = training_plan(triton, case, captures=False)
    for threat, rate in ((THREAT, 0.05), (replace(THREAT, radius=0.02, step=0.01), 0.2), (THREAT, 0.05)):
        hyper = replace(HYPER, learning_rate=rate)
        found, expected = (play(each, case, threat, hyper) for each in (plan, direct))
        assert_equal_results(found, expected)
    assert found[2] == [True] * 3
    assert all(piece.graph is not None for iteration in plan._iterations.values() for piece in iteration.pieces)


@pytest.mark.parametrize("span", [(0, None, None), (0, 4, 0)], ids=["whole", "first-module"])
def test_a_captured_plan_reads_priors_anchors_statistics_and_predictions_anew(make_case, triton, span):
    """A graph reads fixed memory: what a round brings must be there, and nothing of the last one."""
    case, other = (make_case(clients=3, span=span, samples=samples) for samples in (5, 5))
    other.segments.reverse()
    hyper = replace(HYPER, proximal=1.0, consistency=1.5, **FIXED)
    plan, direct = (training_plan(triton, case, captures, hyper, calibrated=True) for captures in (True, False))
    prior = case.calibrate().to(GPU)
    for each, own in ((case, prior), (other, prior.flip(0)), (case, prior.flip(0))):
        found, expected = (play(one, each, hyper=hyper, prior=own) for one in (plan, direct))
        assert_equal_results(found, expected)
        fresh = play(training_plan(triton, case, False, hyper, calibrated=True), each, hyper=hyper, prior=own)
        assert_equal_results(found, fresh)
    assert found[2] == [True] * 3
    assert all(piece.graph is not None for iteration in plan._iterations.values() for piece in iteration.pieces)


@pytest.mark.parametrize("name", ["vgg-small", "cnn3"])
def test_a_captured_plan_takes_other_teachers(make_case, triton, name):
    """In distillation: with labels and without, and with weights of zero, round after round in one plan."""
    case = make_case(name, shape=(3, 16, 16), clients=2, samples=5)
    plan, direct = (
        TrainingPlan(case.ladder, backend(triton, captures), 5, HYPER, None, taught=True) for captures in (True, False)
    )
    unlabelled = replace(case, labels=torch.full_like(case.labels, UNLABELLED))
    drawn = torch.Generator().manual_seed(4)
    for each, weight in ((case, 0.5), (unlabelled, 1.0), (case, 0.0)):
        p = torch.randn(2, 5, 10, generator=drawn).softmax(dim=2)
        # Targets come from the host.
        teachers = [Teacher(own, torch.full((5,), weight)) for own in p]
        found, expected = (play(one, each, None, teachers=teachers) for one in (plan, direct))
        assert_equal_results(found, expected)
        assert found[2] == [True] * 2
    assert all(iteration.pieces[2].graph is not None for iteration in plan._iterations.values())


def test_captured_plans_that_take_turns_do_not_disturb_each_other(make_case, triton):
    """All graphs compute in one pool of memory."""
    cases = [make_case(clients=2), make_case(clients=2, span=(0, 4, 0)), make_case(clients=3, span=(3, 6, 1))]
    plans = [training_plan(triton, case, captures=True) for case in cases]
    expected = [play(training_plan(triton, case, captures=False), case) for case in cases]
    for _ in range(2):
        for plan, case, each in zip(plans, cases, expected, strict=True):
            assert_equal_results(play(plan, case), each)


def test_bf16_learns_what_float32_learns(make_case, triton):
    case = make_case("vgg-small-3", clients=3, samples=5, width=16)
    before = case.parameters()
    found = []
    for compute in (torch.float32, torch.bfloat16):
        plan = TrainingPlan(case.ladder, backend(triton, True, compute), 5, HYPER, None)
        found.append(play(plan, case, None))
    (exact, losses, _), (rough, rough_losses, _) = found
    assert rough_losses == pytest.approx(losses, rel=0.03)
    moved, off = 0.0, 0.0
    for start, mine, theirs in zip(before, exact, rough, strict=True):
        for name in (name for name in mine if name.endswith(".weight")):
            moved += float((mine[name] - start[name]).square().sum())
            off += float((theirs[name] - mine[name]).square().sum())
    assert (off / moved) ** 0.5 < 0.2


def test_draws_on_a_gpu_are_the_clients_own():
    both, alone = Draws(torch.device(GPU)), Draws(torch.device(GPU))
    both.renew([3, 7])
    alone.renew([7])
    before = torch.cuda.get_rng_state()
    assert torch.equal(both.uniform("start", (2, 1000))[1], alone.uniform("start", (1, 1000))[0])
    assert torch.equal(torch.cuda.get_rng_state(), before)
    first = both.uniform("start", (2, 1000)).clone()
    both.renew([3, 7])
    assert torch.equal(both.uniform("start", (2, 1000)), first)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_plain_attack_starts_where_it_starts_on_the_cpu(norm):
    """Its draws come from the generator's device, wherever the images are."""
    clean, threat = torch.rand(4, 3, 8, 8), ThreatModel(norm, 0.1, 0.05, 1)
    on_cpu, on_gpu = (
        pgd(lambda x: 0 * x.sum(), images, threat, generator(0, "attack")) for images in (clean, clean.to(GPU))
    )
    torch.testing.assert_close(on_gpu.cpu(), on_cpu)
    assert float((on_cpu - clean).abs().max()) > 0.001
