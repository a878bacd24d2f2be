"""Losses of samples against numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from fedprophet.client.aims import Aim, Drawn, Labels, Weighted

SCORES = torch.log(torch.tensor([[0.5, 0.5], [0.8, 0.2], [0.1, 0.9]]))
"""Of these probabilities."""
LABELS = torch.tensor([0, 1, 1])
PLAIN = [math.log(2), math.log(5), -math.log(0.9)]
TARGETS = torch.tensor([[0.9, 0.1], [0.8, 0.2], [1.0, 0.0]])
DIVERGENCES = [0.9 * math.log(1.8) + 0.1 * math.log(0.2), 0.0, math.log(10)]


class Nothing:
    """An aim that asks for nothing."""

    def __call__(self, scores: Tensor) -> Tensor:
        return scores.new_zeros(len(scores))

    def __getitem__(self, samples: slice) -> "Nothing":
        return self


def test_labels_are_met_by_cross_entropy() -> None:
    assert Labels(LABELS)(SCORES).tolist() == pytest.approx(PLAIN)
    assert torch.equal(Labels(LABELS)(SCORES), torch.nn.functional.cross_entropy(SCORES, LABELS, reduction="none"))


def test_weights_multiply_what_they_wrap() -> None:
    weights = torch.tensor([2.0, 0.0, 0.5])
    assert Weighted(Labels(LABELS), weights)(SCORES).tolist() == pytest.approx([2 * PLAIN[0], 0.0, PLAIN[2] / 2])


def test_the_draw_is_from_the_servers_probabilities_to_the_local_ones() -> None:
    """KL(p ‖ q) and not KL(q ‖ p), which is 0.51 for the first sample; a probability of 0 adds nothing."""
    drawn = Drawn(Nothing(), TARGETS, 2.0)(SCORES).tolist()
    assert drawn == pytest.approx([2 * value for value in DIVERGENCES], abs=1e-6)
    assert DIVERGENCES[0] == pytest.approx(0.368064, abs=1e-6)


def test_nothing_draws_a_model_to_what_it_predicts_itself() -> None:
    scores = torch.randn(20, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = Drawn(Nothing(), scores.detach().softmax(dim=1), 3.0)(scores)
    assert loss.abs().max() < 1e-6
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    assert gradient.abs().max() < 1e-6


def test_an_aim_is_cut_like_its_batch() -> None:
    aim: Aim = Drawn(Weighted(Labels(LABELS), torch.tensor([2.0, 0.0, 0.5])), TARGETS, 1.0)
    whole = aim(SCORES).tolist()
    assert whole == pytest.approx([2 * PLAIN[0] + DIVERGENCES[0], 0.0, PLAIN[2] / 2 + DIVERGENCES[2]], abs=1e-6)
    for piece in (slice(0, 2), slice(2, 3)):
        assert aim[piece](SCORES[piece]).tolist() == pytest.approx(whole[piece])
