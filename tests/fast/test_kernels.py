"""The operations of stacks in plain torch, against autograd and formulas: two clients, each with its own numbers."""

import pytest
import torch
import torch.nn.functional as F

from fedprophet.fast.kernels import TorchKernels, gathered

KERNELS = TorchKernels()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filters(taps: torch.Tensor) -> torch.Tensor:
    """Return 9×in×out taps as out×in×3×3, position by position."""
    result = torch.empty(taps.shape[2], taps.shape[1], 3, 3)
    for tap in range(9):
        result[:, :, tap // 3, tap % 3] = taps[tap].t()
    return result


def plain(images: torch.Tensor) -> torch.Tensor:
    return images.permute(0, 3, 1, 2)


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


def test_pool(x):
    found, _ = KERNELS.pool(x)
    assert found.shape == (2, 3, 2, 3, 5)
    for client in range(2):
        assert torch.equal(plain(found[client]), F.max_pool2d(plain(x[client]), 2))


def test_the_gradient_of_a_relu_and_a_pool(x):
    before = draw(2, 3, 4, 6, 5, seed=5)
    gradient = draw(2, 3, 2, 3, 5, seed=6)
    _, winners = KERNELS.pool(before.relu())
    found = KERNELS.unpool(winners, gradient)
    for client in range(2):
        source = before[client].clone().requires_grad_()
        F.max_pool2d(plain(source.relu()), 2).backward(plain(gradient[client]))
        assert source.grad is not None
        assert torch.equal(found[client], source.grad)


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


def test_moments(x):
    x = 3 * x + 2
    mean, variance = KERNELS.moments(x)
    for client in range(2):
        rows = x[client].reshape(-1, 5).double()
        torch.testing.assert_close(mean[client].double(), rows.mean(dim=0), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(variance[client].double(), rows.var(dim=0, correction=0), rtol=1e-5, atol=1e-6)


def test_moments_of_numbers_far_from_zero():
    x = draw(1, 8, 4, 4, 3) + 1000
    _, variance = KERNELS.moments(x)
    expected = x.double().view(-1, 3).var(dim=0, correction=0)
    torch.testing.assert_close(variance[0].double(), expected, rtol=1e-4, atol=0)


def test_scale_shift_relu(x):
    scale, shift = draw(2, 5, seed=7), draw(2, 5, seed=8)
    found = KERNELS.scale_shift_relu(x, scale, shift)
    for client in range(2):
        torch.testing.assert_close(found[client], (x[client] * scale[client] + shift[client]).relu())


def test_sums_and_gradient_of_a_norm(x):
    gradient, active = draw(2, 3, 4, 6, 5, seed=9), draw(2, 3, 4, 6, 5, seed=10)
    a, b, c = (draw(2, 5, seed=seed) for seed in (11, 12, 13))
    total, product = KERNELS.norm_sums(gradient, active, x)
    found = KERNELS.norm_gradient(gradient, active, x, a, b, c)
    for client in range(2):
        g = torch.where(active[client] > 0, gradient[client], torch.zeros(()))
        torch.testing.assert_close(total[client], g.sum(dim=(0, 1, 2)), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(product[client], (g * x[client]).sum(dim=(0, 1, 2)), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[client], a[client] * g + b[client] * x[client] + c[client])


def test_bf16_goes_in_and_out_and_sums_stay_float32():
    x, weight = draw(2, 2, 4, 4, 8).bfloat16(), draw(2, 9, 8, 8, seed=1).bfloat16()
    gradient = draw(2, 2, 4, 4, 8, seed=2).bfloat16()
    ones = torch.ones(2, 8)
    assert KERNELS.convolve(x, weight, ones).dtype == torch.bfloat16
    assert KERNELS.scale_shift_relu(x, ones, ones).dtype == torch.bfloat16
    assert KERNELS.norm_gradient(gradient, x, x, ones, ones, ones).dtype == torch.bfloat16
    assert {t.dtype for t in (*KERNELS.moments(x), *KERNELS.norm_sums(gradient, x, x))} == {torch.float32}
    assert KERNELS.weight_gradient(x, gradient).dtype == torch.float32
