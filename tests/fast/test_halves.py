"""Convolutions whose float32 products are made of halves, against float64 and against torch's own, on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprophet.cascade.atoms import chain_of
from fedprophet.client.part import ModelPart
from fedprophet.engines.row_model import RowModel
from fedprophet.models.registry import build
from fedprophet.precision import exact_products

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
ROUNDING = 1e-6
"""Four times what was measured on an H200, and less than long sums have that tensor cores add up."""


@pytest.fixture(scope="module")
def halves():
    from fedprophet.fast import halves

    return halves


def convolution(inputs: int, outputs: int, **options) -> nn.Conv2d:
    torch.manual_seed(1)
    return nn.Conv2d(inputs, outputs, **{"kernel_size": 3, "padding": 1, **options}).cuda()


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def errors_by_row(found: Tensor, exact: Tensor) -> Tensor:
    found, exact = found.detach(), exact.detach()
    return (found - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)


@pytest.mark.parametrize(
    ("samples", "inputs", "outputs", "side"),
    [
        (5, 64, 128, 8),
        (3, 128, 64, 32),
        (37, 512, 512, 2),
        (9, 256, 512, 4),
        (2, 64, 64, 7),
        (1, 64, 192, 14),
        (3, 64, 64, 1),
        (1, 64, 64, 130),
    ],
)
def test_exact_as_float32(halves, samples, inputs, outputs, side):
    layer, x = convolution(inputs, outputs), images(samples, inputs, side, side).requires_grad_()
    y = halves.HalvesConvolution(layer)(x)
    gradient = images(*y.shape, seed=2)
    (back,) = torch.autograd.grad(y, x, gradient)
    precise = x.detach().double().requires_grad_()
    exact = F.conv2d(precise, layer.weight.double(), layer.bias.double(), padding=1)
    (exact_back,) = torch.autograd.grad(exact, precise, gradient.double())
    assert y.dtype == back.dtype == torch.float32
    assert float(errors_by_row(y, exact).max()) < ROUNDING
    assert float(errors_by_row(back, exact_back).max()) < ROUNDING


def test_every_row_keeps_its_bits_however_small_it_is(halves):
    layer = convolution(64, 64, bias=False)
    x = images(6, 64, 4, 4) * torch.tensor([1.0, 1e-6, 1e-12, 1e-20, 1e-30, 1e6]).cuda().view(-1, 1, 1, 1)
    exact = F.conv2d(x.double(), layer.weight.double(), padding=1)
    assert float(errors_by_row(halves.HalvesConvolution(layer)(x), exact).max()) < ROUNDING


def test_a_row_of_zeros_stays_one(halves):
    x = images(2, 64, 4, 4)
    x[1] = 0.0
    found = halves.HalvesConvolution(convolution(64, 64, bias=False))(x)
    assert float(found[1].abs().max()) == 0.0


def test_no_rows_are_none(halves):
    assert halves.HalvesConvolution(convolution(64, 128))(images(0, 64, 4, 4)).shape == (0, 128, 4, 4)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_what_follows_may_work_in_place(halves, memory_format):
    layer = convolution(64, 64)
    x = images(2, 64, 4, 4).contiguous(memory_format=memory_format).requires_grad_()
    found = halves.HalvesConvolution(layer)(x)
    assert found.is_contiguous(memory_format=memory_format)
    found += x
    found.relu_()
    (gradient,) = torch.autograd.grad(found.sum(), x)
    with exact_products():
        expected = (layer(x) + x).relu()
        (expected_gradient,) = torch.autograd.grad(expected.sum(), x)
    assert float(errors_by_row(found, expected).max()) < ROUNDING
    assert float(errors_by_row(gradient, expected_gradient).max()) < ROUNDING


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_no_number_around_it_and_nowhere_else(halves, number):
    """A position reaches the nine around it, in every channel, behind a ReLU too; all others are as without it."""
    layer, x = convolution(64, 64), images(2, 64, 4, 4)
    with exact_products():
        expected = layer(x).relu()
    x[1, 3, 1, 1] = number
    found = halves.HalvesConvolution(layer, relu=True)(x)
    assert found.isnan().sum(dim=(1, 2, 3)).tolist() == [0, 9 * 64]
    elsewhere = ~found.isnan()
    assert float((found - expected)[elsewhere].norm() / expected[elsewhere].norm()) < ROUNDING


@pytest.mark.parametrize(
    "options",
    [{"stride": 2}, {"kernel_size": 1, "padding": 0}, {"padding": 0}, {"groups": 2}, {"padding_mode": "reflect"}],
)
def test_other_convolutions_are_left_to_torch(halves, options):
    assert halves.fits(convolution(64, 64))
    assert not halves.fits(convolution(64, 64, **options))
    assert not halves.fits(convolution(16, 64))
    assert not halves.fits(convolution(64, 64).double())


def test_rows_of_two_clients_have_the_scores_of_their_own_models():
    torch.manual_seed(0)
    model = build("vgg16", (3, 32, 32), 10).cuda().eval()
    others = {
        name: value * (1.3 if name.endswith("running_var") else 1.0) for name, value in model.state_dict().items()
    }
    chain = chain_of(model)
    clients = [{name: value.clone() for name, value in model.state_dict().items()}, others]
    rows = RowModel(ModelPart(chain, 0, len(chain), None), clients, None)
    x, owners = images(6, 3, 32, 32).requires_grad_(), torch.tensor([0, 1, 1, 0, 0, 1]).cuda()
    with exact_products(), rows.still():
        scores = rows.logits(x, owners)
        (gradient,) = torch.autograd.grad(scores.square().sum(), x)
        for client, tensors in enumerate(clients):
            model.load_state_dict(tensors)
            own = x.detach()[owners == client].requires_grad_()
            expected = model(own)
            (expected_gradient,) = torch.autograd.grad(expected.square().sum(), own)
            torch.testing.assert_close(scores[owners == client], expected, rtol=1e-4, atol=1e-5)
            assert float(errors_by_row(gradient[owners == client], expected_gradient).max()) < 1e-3
