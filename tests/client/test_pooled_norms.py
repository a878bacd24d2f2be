"""Batch norms that see their batch in pieces."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedprophet.client.pooled_norms import EnoughError, Moments, PooledNorm, PooledNorms

FIRST, SECOND = torch.tensor([[1.0], [3.0]]), torch.tensor([[8.0]])
"""One batch of one channel in two pieces: mean 4, and a variance of (9 + 1 + 16)/3."""


def _pooled(weight: Tensor | None = None, running: tuple[Tensor, Tensor] | None = None) -> PooledNorm:
    """Return the norm layer that the two pieces are gathered for."""
    moments = Moments()
    for piece in (FIRST, SECOND):
        with pytest.raises(EnoughError), PooledNorms([], moments):
            F.batch_norm(piece, *(running or (None, None)), weight, training=True, momentum=0.1, eps=0.0)
    assert moments.layer is not None
    return moments.layer.pooled(moments)


def test_pieces_of_different_sizes_have_the_moments_of_the_batch() -> None:
    norm = _pooled()
    assert norm.mean.tolist() == [4.0]
    assert norm.var.tolist() == pytest.approx([26 / 3])


def test_each_piece_is_normalised_by_the_moments_of_the_batch() -> None:
    with PooledNorms([_pooled()]):
        found = F.batch_norm(SECOND, None, None, training=True, eps=0.0)
    assert found.item() == pytest.approx(4 / (26 / 3) ** 0.5)


def test_running_statistics_move_a_tenth_of_the_way_to_the_mean_and_to_the_unbiased_variance() -> None:
    running = torch.zeros(1), torch.ones(1)
    _pooled(running=running).remember(3)
    assert [tensor.item() for tensor in running] == pytest.approx([0.4, 1 + 0.1 * (26 / 2 - 1)])


def test_evaluation_mode_is_left_alone() -> None:
    with PooledNorms([]):
        found = F.batch_norm(SECOND, torch.tensor([2.0]), torch.tensor([4.0]), training=False, eps=0.0)
    assert found.item() == 3.0


def test_the_gradient_of_a_piece_knows_the_rest_of_the_batch() -> None:
    """With γ = 2 and g = (1, 0, 2): mean(g) = 1, and mean(g · x̂) = (−3 + 2 · 4)/(3σ) = 5/(3σ)."""
    weight, sigma = torch.tensor([2.0]), (26 / 3) ** 0.5
    norm = _pooled(weight)
    norm.gradient_means = torch.tensor([1.0]), torch.tensor([5 / (3 * sigma)])
    x = SECOND.clone().requires_grad_()
    with PooledNorms([norm]):
        F.batch_norm(x, None, None, weight, training=True, eps=0.0).backward(torch.tensor([[2.0]]))
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(2 / sigma * (2 - 1 - 4 / sigma * 5 / (3 * sigma)))

    batch = torch.cat([FIRST, SECOND]).requires_grad_()
    F.batch_norm(batch, None, None, weight, training=True, eps=1e-12).backward(torch.tensor([[1.0], [0.0], [2.0]]))
    assert batch.grad is not None
    assert x.grad.item() == pytest.approx(batch.grad[2].item(), rel=1e-5)
