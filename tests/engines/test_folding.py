"""Batch norm folded into convolutions: the equation by hand, when layers follow, and what is left alone."""

import pytest
import torch
from torch import nn

from fedprophet.cascade.atoms import chain_of
from fedprophet.engines.cpu_plan import planned
from fedprophet.engines.folding import FoldedConvolution, Pointwise, fold, folded, held


def seasoned(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """Give a norm layer statistics and an affine map as if it had been trained."""
    with torch.no_grad():
        if norm.running_mean is not None:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.2, 3.0)
        if norm.affine:
            norm.weight.normal_(1.0, 0.5)
            norm.bias.normal_()
    return norm


def test_the_equation_by_hand():
    convolution, norm = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1, eps=1.0)
    with torch.no_grad():
        for tensor, value in (
            (convolution.weight, 2.0),
            (convolution.bias, 1.0),
            (norm.running_mean, 3.0),
            (norm.running_var, 8.0),
            (norm.weight, 6.0),
            (norm.bias, 5.0),
        ):
            tensor.fill_(value)
    # s = 6 / sqrt(8 + 1) = 2, so the weight is 2 · 2 and the bias 2 · (1 − 3) + 5.
    weight, bias = fold(convolution, norm)
    assert (weight.item(), bias.item()) == (4.0, 1.0)


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"stride": 2, "padding": 1}, {"groups": 2}, {"dilation": 2}, {"padding": "same"}],
)
@pytest.mark.parametrize("affine", [True, False])
def test_one_layer_does_the_work_of_two(options, affine):
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(4, 6, 3, **options), seasoned(nn.BatchNorm2d(6, affine=affine)).eval()
    x = torch.randn(5, 4, 9, 7)
    both = folded(convolution, norm)
    assert torch.allclose(both(x), norm(convolution(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("bias", [True, False])
def test_a_strided_pointwise_convolution_without_its_stride(memory_format, bias):
    """Channels last with 4 of them: what oneDNN writes past its memory for where it is given the stride."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(4, 8, 1, stride=(2, 3), bias=bias)
    x = torch.randn(16, 4, 33, 32)
    expected = torch.autograd.grad(convolution(x).square().sum(), tuple(convolution.parameters()))
    convolution.weight.data = convolution.weight.data.contiguous(memory_format=memory_format)
    result = Pointwise(convolution)(x.contiguous(memory_format=memory_format))
    found = torch.autograd.grad(result.square().sum(), tuple(convolution.parameters()))
    assert result.shape == (16, 8, 17, 11)
    assert all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(found, expected, strict=True))


def small_chain():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), seasoned(nn.BatchNorm2d(3)), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    return planned(chain_of(model))


def test_a_folded_layer_follows_until_it_is_held_and_again_after_that():
    chain = small_chain()
    (layer,) = (layer for layer in chain.modules() if isinstance(layer, FoldedConvolution))
    x = torch.randn(2, 2, 4, 4)

    def moved() -> bool:
        before = layer(x)
        layer.norm.running_mean += 1.0
        return not torch.equal(layer(x), before)

    assert moved()
    with held(chain, 0, len(chain)):
        assert not moved()
        assert not layer(x).requires_grad
    assert moved()
    with pytest.raises(KeyError), held(chain, 0, len(chain)):
        raise KeyError
    assert moved()
    assert layer(x).requires_grad


def test_only_the_atoms_asked_for_are_held():
    chain = small_chain()
    (layer,) = (layer for layer in chain.modules() if isinstance(layer, FoldedConvolution))
    with held(chain, 1, len(chain)):
        assert layer.held is None


def test_a_folded_layer_that_is_not_held_can_be_trained():
    """A batch of one sample is trained with norm layers in evaluation mode."""
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(2, 3, 3), seasoned(nn.BatchNorm2d(3)).eval()
    x = torch.randn(1, 2, 5, 5)
    parameters = (*convolution.parameters(), *norm.parameters())
    expected = torch.autograd.grad(norm(convolution(x)).square().sum(), parameters)
    found = torch.autograd.grad(folded(convolution, norm)(x).square().sum(), parameters)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(found, expected, strict=True))


class Own(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("convolution", "norm"),
    [
        (Own(2, 3, 3), nn.BatchNorm2d(3)),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(3)),
        (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, track_running_stats=False)),
        (nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3)),
        (nn.ConvTranspose2d(2, 3, 3), nn.BatchNorm2d(3)),
        (hooked(nn.Conv2d(2, 3, 3)), nn.BatchNorm2d(3)),
        (nn.Conv2d(2, 3, 3), hooked(nn.BatchNorm2d(3))),
    ],
)
def test_what_the_equation_does_not_cover_is_left_alone(convolution, norm):
    assert folded(convolution, norm) is None
