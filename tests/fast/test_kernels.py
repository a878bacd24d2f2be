"""The operations of stacks in plain torch, against autograd and formulas: two clients, each with its own numbers."""

import pytest
import torch
import torch.nn.functional as F

from fedprophet.fast.kernels import BatchNorm, Kernels, Statistics, gathered

KERNELS = Kernels()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filters(taps: torch.Tensor, side: int = 3) -> torch.Tensor:
    """Return taps (taps×in×out) as out×in×side×side, position by position."""
    result = torch.empty(taps.shape[2], taps.shape[1], side, side)
    for tap in range(side * side):
        result[:, :, tap // side, tap % side] = taps[tap].t()
    return result


def plain(images: torch.Tensor) -> torch.Tensor:
    return images.permute(0, 3, 1, 2)


def plain_rows(images: torch.Tensor) -> torch.Tensor:
    """Return each client's positions one below the other."""
    return images.flatten(1, 3)


@pytest.fixture
def x() -> torch.Tensor:
    return draw(2, 3, 4, 6, 5)


@pytest.fixture
def weight() -> torch.Tensor:
    return draw(2, 9, 5, 7, seed=1)


def test_one_tap_moves_the_image_by_one():
    """The nine taps lie row by row, and a tap reads the neighbour in its own direction."""
    image = torch.arange(9.0).view(1, 1, 3, 3, 1)
    for tap, expected in {0: [0, 0, 0, 0, 0, 1, 0, 3, 4], 4: list(range(9)), 5: [1, 2, 0, 4, 5, 0, 7, 8, 0]}.items():
        weight = torch.zeros(1, 9, 1, 1)
        weight[0, tap] = 1
        assert KERNELS.convolve(image, weight).flatten().tolist() == expected


def test_convolution(x, weight):
    found = KERNELS.convolve(x, weight)
    for client in range(2):
        expected = F.conv2d(plain(x[client]), filters(weight[client]), padding=1)
        torch.testing.assert_close(plain(found[client]), expected, rtol=1e-5, atol=1e-5)


def test_the_turned_convolution_takes_gradients_back(x, weight):
    gradient, mask = draw(2, 3, 4, 6, 7, seed=3), draw(2, 3, 4, 6, 5, seed=4)
    images = plain(x[1]).clone().requires_grad_()
    outputs = F.conv2d(images, filters(weight[1]), padding=1)
    (expected,) = torch.autograd.grad(outputs, images, plain(gradient[1]))
    out = torch.empty_like(x)
    found = KERNELS.convolve(gradient, weight, mask=mask, turned=True, out=out)
    assert found is out
    torch.testing.assert_close(plain(out[1]), expected * (plain(mask[1]) > 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("side", "stride"), [(1, 2), (3, 2), (7, 2), (5, 1)])
def test_other_kernels_and_strides(x, side, stride):
    weight = draw(2, side * side, 5, 7, seed=1)
    found = KERNELS.convolve(x, weight, stride=stride)
    gradient = draw(*found.shape, seed=3)
    back, change = (
        KERNELS.convolve(gradient, weight, turned=True, stride=stride),
        KERNELS.weight_gradient(x, gradient, side, stride),
    )
    for client in range(2):
        images = plain(x[client]).clone().requires_grad_()
        taps = filters(weight[client], side).requires_grad_()
        expected = F.conv2d(images, taps, stride=stride, padding=side // 2)
        torch.testing.assert_close(plain(found[client]), expected, rtol=1e-5, atol=1e-5)
        one, other = torch.autograd.grad(expected, (images, taps), plain(gradient[client]))
        torch.testing.assert_close(plain(back[client]), one, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(filters(change[client], side), other, rtol=1e-5, atol=1e-5)


def test_what_is_added_comes_before_the_relu_and_the_mask(x, weight):
    add, shift, mask = draw(2, 3, 4, 6, 7, seed=5), draw(2, 7, seed=2), draw(2, 3, 4, 6, 7, seed=3)
    bare = KERNELS.convolve(x, weight)
    found = KERNELS.convolve(x, weight, shift, add=add)
    torch.testing.assert_close(found, (bare + add + shift.view(2, 1, 1, 1, 7)).relu())
    found = KERNELS.convolve(x, weight, mask=mask, add=add)
    torch.testing.assert_close(found, torch.where(mask > 0, bare + add, torch.zeros(())))


def test_shift_and_relu(x, weight):
    shift = draw(2, 7, seed=2)
    bare, found = KERNELS.convolve(x, weight), KERNELS.convolve(x, weight, shift)
    torch.testing.assert_close(found, (bare + shift.view(2, 1, 1, 1, 7)).clamp(min=0))
    assert not torch.equal(found[0] == 0, found[1] == 0)


def test_a_mask_keeps_where_it_is_positive(x, weight):
    mask = draw(2, 3, 4, 6, 7, seed=3)
    mask[mask.abs() < 0.3] = 0
    bare, found = KERNELS.convolve(x, weight), KERNELS.convolve(x, weight, mask=mask)
    assert torch.equal(found, torch.where(mask > 0, bare, torch.zeros(())))


def test_weight_gradient(x):
    gradient = draw(2, 3, 4, 6, 7, seed=4)
    found = KERNELS.weight_gradient(x, gradient)
    assert found.shape == (2, 9, 5, 7)
    for client in range(2):
        weight = torch.zeros(7, 5, 3, 3, requires_grad=True)
        F.conv2d(plain(x[client]), weight, padding=1).backward(plain(gradient[client]))
        assert weight.grad is not None
        torch.testing.assert_close(filters(found[client]), weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", [2, 3])
def test_pool(x, side):
    x = x.relu()
    found, _ = KERNELS.pool(x, side)
    assert found.shape == (2, 3, 2, 3, 5)
    for client in range(2):
        assert torch.equal(plain(found[client]), F.max_pool2d(plain(x[client]), side, 2, side - 2))


@pytest.mark.parametrize("side", [2, 3])
def test_the_gradient_of_a_relu_and_a_pool(side):
    before = draw(2, 3, 4, 6, 5, seed=5)
    gradient = draw(2, 3, 2, 3, 5, seed=6)
    _, winners = KERNELS.pool(before.relu(), side)
    found = KERNELS.unpool(winners, gradient, side)
    assert found.is_contiguous()
    for client in range(2):
        source = before[client].clone().requires_grad_()
        F.max_pool2d(plain(source.relu()), side, 2, side - 2).backward(plain(gradient[client]))
        assert source.grad is not None
        torch.testing.assert_close(found[client], source.grad)


def test_a_position_that_wins_in_several_windows_adds_up():
    active = torch.zeros(1, 1, 4, 4, 1)
    active[0, 0, 1, 1] = 5
    _, winners = KERNELS.pool(active, 3)
    assert winners.flatten().tolist() == [8, 6, 2, 0]  # its last, its lower left, its upper right, its first position
    found = KERNELS.unpool(winners, torch.tensor([1.0, 2.0, 4.0, 8.0]).view(1, 1, 2, 2, 1), 3)
    assert float(found[0, 0, 1, 1]) == float(found.sum()) == 15


def test_the_first_of_equal_positions_takes_the_whole_gradient():
    active = torch.tensor([[2.0, 2.0], [2.0, 1.0]]).view(1, 1, 2, 2, 1)
    gradient = torch.full((1, 1, 1, 1, 1), 3.0)
    assert KERNELS.unpool(KERNELS.pool(active)[1], gradient).flatten().tolist() == [3, 0, 0, 0]
    _, nobody = KERNELS.pool(torch.zeros(1, 1, 2, 2, 1))
    assert nobody.dtype == torch.uint8
    assert KERNELS.unpool(nobody, gradient).flatten().tolist() == [0, 0, 0, 0]


def test_what_taps_send_is_gathered_as_the_turned_convolution_does(weight):
    gradient = draw(2, 3, 4, 6, 7, seed=3)
    senders = F.pad(weight.flatten(1, 2).transpose(1, 2), (0, 3))
    spread = torch.bmm(gradient.flatten(1, 3), senders).view(2, 3, 4, 6, 48)
    expected = KERNELS.convolve(gradient, weight, turned=True)
    torch.testing.assert_close(gathered(spread, 5), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("side", "masked"), [(1, False), (2, True), (4, True)])
def test_averages_and_their_gradient(side, masked):
    x, gradient = draw(2, 3, 4, 4, 5), draw(2, 3, side * side * 5, seed=1)
    found = KERNELS.average(x, side)
    out = torch.empty_like(x)
    back = KERNELS.average_gradient(gradient, x, side, 0.3, masked, out)
    assert back is out
    for client in range(2):
        source = x[client].clone().requires_grad_()
        means = F.adaptive_avg_pool2d(plain(source), side).permute(0, 2, 3, 1).flatten(1)
        torch.testing.assert_close(found[client], means.detach())
        ((means * gradient[client]).sum() + 0.15 * source.square().sum()).backward()
        assert source.grad is not None
        expected = source.grad * (x[client] > 0) if masked else source.grad
        torch.testing.assert_close(back[client], expected)


@pytest.mark.parametrize(("side", "masked"), [(1, False), (2, True), (2, False), (4, True)])
def test_maxima_and_their_gradient(side, masked):
    """Against torch's own; many numbers are equal."""
    x, gradient = draw(2, 3, 4, 4, 5).round(), draw(2, 3, side * side * 5, seed=1)
    found = KERNELS.maximum(x, side)
    out = torch.empty_like(x)
    assert KERNELS.maximum_gradient(gradient, x, side, masked, out) is out
    assert torch.equal(KERNELS.maximum_gradient(gradient, x, side, masked), out)
    for client in range(2):
        source = x[client].clone().requires_grad_()
        tops = F.adaptive_max_pool2d(plain(source), side).permute(0, 2, 3, 1).flatten(1)
        assert torch.equal(found[client], tops.detach())
        (tops * gradient[client]).sum().backward()
        assert source.grad is not None
        expected = source.grad * (x[client] > 0) if masked else source.grad
        assert torch.equal(out[client], expected)


def test_the_first_of_equal_maxima_takes_the_whole_gradient():
    """Of four columns two parts: the left one has 5 in its second row, then again; in the right one all are 0."""
    x = torch.tensor([[1.0, 4.0, 0.0, 0.0], [5.0, 5.0, 0.0, 0.0], [2.0, 3.0, -1.0, -2.0], [3.0, 1.0, -4.0, -3.0]])
    x, gradient = x.view(1, 1, 4, 4, 1), torch.tensor([[[2.0, 3.0, 7.0, 11.0]]])
    assert KERNELS.maximum(x, 2).tolist() == [[[5, 0, 3, -1]]]
    found = KERNELS.maximum_gradient(gradient, x, 2, masked=False).view(4, 4).tolist()
    assert found == [[0, 0, 3, 0], [2, 0, 0, 0], [0, 7, 11, 0], [0, 0, 0, 0]]
    found = KERNELS.maximum_gradient(gradient, x, 2, masked=True).view(4, 4).tolist()
    assert found == [[0, 0, 0, 0], [2, 0, 0, 0], [0, 7, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("masked", [False, True])
def test_the_gradient_at_a_head(masked):
    x, weight, bias = draw(2, 3, 4, 4, 5), draw(2, 5, 6, seed=1), draw(2, 6, seed=2)
    labels = torch.tensor([[0, 5, 2], [1, 1, 4]])
    out = torch.empty_like(x)
    found = KERNELS.head_gradient(x, weight, bias, F.one_hot(labels, 6).float(), 0.3, masked, out)
    assert found is out
    for client in range(2):
        source = x[client].clone().requires_grad_()
        scores = source.mean(dim=(1, 2)) @ weight[client] + bias[client]
        (F.cross_entropy(scores, labels[client], reduction="sum") + 0.15 * source.square().sum()).backward()
        assert source.grad is not None
        expected = source.grad * (x[client] > 0) if masked else source.grad
        torch.testing.assert_close(found[client], expected)


def norm_layer(clients: int, channels: int, biased: bool = True) -> BatchNorm:
    """Return norm layers with running statistics of their own, behind convolutions with or without a bias."""
    weight, bias, before, mean = (draw(clients, channels, seed=seed) for seed in (14, 15, 16, 17))
    variance = draw(clients, channels, seed=18).exp()
    return BatchNorm(weight, bias, before if biased else None, mean, variance, 1e-3, 0.3)


def test_statistics_by_hand():
    """1, 3 and 5 have the mean 3, the variance 8/3, and 4 where they are a sample of more."""
    x = torch.tensor([1.0, 3.0, 5.0]).view(1, 3, 1, 1, 1)
    one = torch.ones(1, 1)
    norm = BatchNorm(2 * one, 7 * one, 10 * one, 4 * one, 8 * one, 0.0, 0.25)
    found = KERNELS.norm_statistics(x, norm)
    inverse = (3 / 8) ** 0.5
    assert float(found.mean) == pytest.approx(3)
    assert float(found.inverse) == pytest.approx(inverse)
    assert float(found.scale) == pytest.approx(2 * inverse)
    assert float(found.shift) == pytest.approx(7 - 6 * inverse)
    assert float(norm.running_mean) == pytest.approx(4 + (13 - 4) / 4)
    assert float(norm.running_var) == pytest.approx(8 + (4 - 8) / 4)


@pytest.mark.parametrize("biased", [True, False])
def test_statistics_are_those_of_a_batch_norm(x, biased):
    x, norm = 3 * x + 2, norm_layer(2, 5, biased)
    expected = norm_layer(2, 5, biased)  # torch changes the statistics of this one
    found = KERNELS.norm_statistics(x, norm)
    for k in range(2):
        rows = x[k].reshape(-1, 5).double()
        torch.testing.assert_close(found.mean[k].double(), rows.mean(dim=0), rtol=1e-5, atol=1e-6)
        variance = found.inverse[k].double() ** -2 - norm.epsilon
        torch.testing.assert_close(variance, rows.var(dim=0, correction=0), rtol=1e-5, atol=1e-6)
        read = rows if expected.before is None else rows + expected.before[k]
        mean, var = expected.running_mean[k].double(), expected.running_var[k].double()
        weight, bias = expected.weight[k].double(), expected.bias[k].double()
        normed = F.batch_norm(read, mean, var, weight, bias, True, norm.momentum, norm.epsilon)
        torch.testing.assert_close(rows * found.scale[k] + found.shift[k], normed, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(norm.running_mean[k].double(), mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(norm.running_var[k].double(), var, rtol=1e-5, atol=1e-6)


def test_statistics_of_numbers_far_from_zero():
    x, norm = draw(1, 8, 4, 4, 3) + 1000, norm_layer(1, 3)
    found = KERNELS.norm_statistics(x, norm)
    expected = x.double().view(-1, 3).var(dim=0, correction=0)
    torch.testing.assert_close(found.inverse[0].double() ** -2 - norm.epsilon, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("biased", [True, False])
def test_a_folded_norm_layer_is_a_batch_norm_in_evaluation_mode(x, weight, biased):
    norm, out, shift = norm_layer(2, 7, biased), torch.empty_like(weight), draw(2, 7, seed=19)
    there = shift.clone()
    KERNELS.fold(weight, norm, out, shift, add=True)
    once = torch.empty_like(shift)
    KERNELS.fold(weight, norm, out, once, add=False)
    torch.testing.assert_close(shift, there + once)
    for k in range(2):
        before = None if norm.before is None else norm.before[k]
        convolved = F.conv2d(plain(x[k]), filters(weight[k]), before, padding=1)
        values = (value[k] for value in (norm.running_mean, norm.running_var, norm.weight, norm.bias))
        expected = F.batch_norm(convolved, *values, eps=norm.epsilon)
        found = F.conv2d(plain(x[k]), filters(out[k]), once[k], padding=1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_scale_shift(x):
    scale, shift, add = draw(2, 5, seed=7), draw(2, 5, seed=8), draw(2, 3, 4, 6, 5, seed=9)
    found, bare = KERNELS.scale_shift(x, scale, shift), KERNELS.scale_shift(x, scale, shift, relu=False)
    both = KERNELS.scale_shift(x, scale, shift, add)
    for client in range(2):
        expected = x[client] * scale[client] + shift[client]
        torch.testing.assert_close(bare[client], expected)
        torch.testing.assert_close(found[client], expected.relu())
        torch.testing.assert_close(both[client], (expected + add[client]).relu())


def test_the_gradient_of_a_norm_layer_is_put_together(x):
    gradient, active = draw(2, 3, 4, 6, 5, seed=9), draw(2, 3, 4, 6, 5, seed=10)
    a, b, c = (draw(2, 5, seed=seed) for seed in (11, 12, 13))
    found = KERNELS.norm_gradient(gradient, active, x, a, b, c)
    for client in range(2):
        g = torch.where(active[client] > 0, gradient[client], torch.zeros(()))
        torch.testing.assert_close(found[client], a[client] * g + b[client] * x[client] + c[client])


def test_slopes_by_hand():
    """x̂ is −1, 1 and 0; the last gradient is not let through, so that Σ g = 3 and Σ g · x̂ = 1."""
    x, gradient, active = (
        torch.tensor(values).view(1, 3, 1, 1, 1) for values in ([3.0, 7.0, 5.0], [1.0, 2.0, 9.0], [4.0, 0.5, 0.0])
    )
    mean, inverse, scale, unused = (torch.tensor([[value]]) for value in (5.0, 0.5, 6.0, float("nan")))
    found = KERNELS.norm_slopes(gradient, active, x, Statistics(mean, inverse, scale, unused))
    assert float(found.bias) == pytest.approx(3)
    assert float(found.weight) == pytest.approx(1)
    assert float(found.b) == pytest.approx(-6 * 0.5 / 3)
    # At the mean nothing is left of x̂: scale · (g − Σ g / 3).
    assert float(found.b * mean + found.c) == pytest.approx(-6)


def test_the_way_back_through_a_norm_layer_is_autograds(x):
    x, norm = 3 * x + 2, norm_layer(2, 5)
    gradient = draw(2, 3, 4, 6, 5, seed=9)
    statistics = KERNELS.norm_statistics(x, norm)
    active = KERNELS.scale_shift(x, statistics.scale, statistics.shift)
    slopes = KERNELS.norm_slopes(gradient, active, x, statistics)
    found = KERNELS.norm_gradient(gradient, active, x, statistics.scale, slopes.b, slopes.c)
    for k in range(2):
        inputs = [value[k].double().requires_grad_() for value in (plain_rows(x), norm.weight, norm.bias)]
        normed = F.batch_norm(inputs[0], None, None, *inputs[1:], training=True, eps=norm.epsilon)
        expected = torch.autograd.grad(normed.relu(), inputs, plain_rows(gradient)[k].double())
        for one, other in zip((plain_rows(found)[k], slopes.weight[k], slopes.bias[k]), expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_bf16_goes_in_and_out_and_sums_stay_float32():
    x, weight = draw(2, 2, 4, 4, 8).bfloat16(), draw(2, 9, 8, 8, seed=1).bfloat16()
    gradient = draw(2, 2, 4, 4, 8, seed=2).bfloat16()
    ones = torch.ones(2, 8)
    assert KERNELS.convolve(x, weight, ones).dtype == torch.bfloat16
    assert KERNELS.scale_shift(x, ones, ones).dtype == torch.bfloat16
    assert KERNELS.norm_gradient(gradient, x, x, ones, ones, ones).dtype == torch.bfloat16
    statistics = KERNELS.norm_statistics(x, norm_layer(2, 8))
    slopes = KERNELS.norm_slopes(gradient, x, x, statistics)
    assert {value.dtype for found in (statistics, slopes) for value in vars(found).values()} == {torch.float32}
    assert KERNELS.weight_gradient(x, gradient).dtype == torch.float32
