"""The regularised early-exit loss (Eq. 9, 13) against an independent formula, and Lemma 1 as a property."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedprophet.cascade.atoms import explicit_chain
from fedprophet.cascade.heads import build_head
from fedprophet.client.aims import Labels
from fedprophet.client.part import ModelPart


@pytest.fixture
def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 3), nn.Flatten())


def test_early_exit_loss_is_cross_entropy_plus_half_mu_times_the_squared_norm(network: nn.Sequential) -> None:
    head = build_head((3, 4, 4), 5)
    part = ModelPart(explicit_chain(network), 0, 1, head)
    x, labels = torch.rand(6, 1, 4, 4), torch.tensor([0, 1, 2, 3, 4, 0])
    losses = part.exit_losses(part.features(x), Labels(labels), 0.25)
    z = network[0](x)
    width = math.ceil(math.sqrt(5 / 3))
    pooled = nn.functional.adaptive_avg_pool2d(z, width).flatten(1)
    logits = pooled @ head.weight.T + head.bias
    for i, label in enumerate(labels):
        cross_entropy = math.log(sum(math.exp(v) for v in logits[i].tolist())) - logits[i, label].item()
        assert losses[i].item() == pytest.approx(cross_entropy + 0.125 * z[i].square().sum().item(), rel=1e-5)


def test_the_backbones_own_classifier_has_no_mu_term(network: nn.Sequential) -> None:
    part = ModelPart(explicit_chain(network), 0, 3, None)
    x, labels = torch.rand(2, 1, 4, 4), torch.tensor([0, 7])
    expected = nn.functional.cross_entropy(network(x), labels, reduction="none")
    assert torch.allclose(part.exit_losses(part.features(x), Labels(labels), 100.0), expected)


def test_parameters_are_those_of_the_segment_and_its_head_alone(network: nn.Sequential) -> None:
    head = build_head((2, 2, 2), 3)
    part = ModelPart(explicit_chain(network), 1, 2, head)
    assert {id(p) for p in part.parameters()} == {id(p) for p in (*network[1].parameters(), head.weight, head.bias)}


@given(seed=st.integers(0, 100_000), mu=st.sampled_from([1e-3, 0.1, 1.0]), scale=st.floats(0.01, 3.0))
@settings(max_examples=25)
def test_lemma_1_bounds_how_far_features_move(seed: int, mu: float, scale: float) -> None:
    """‖Δz‖ ≤ ‖∇l‖/μ + sqrt(2c/μ + ‖∇l‖²/μ²) for every Δz whose loss rises by at most c, l being l_m on features z_m."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    head = build_head((4, 3, 3), 6).double()
    part = ModelPart(explicit_chain([("identity", nn.Identity())]), 0, 1, head)
    z = torch.randn(8, 4, 3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 6, (8,), generator=generator)
    clean = part.exit_losses(part.features(z), Labels(labels), mu)
    (gradient,) = torch.autograd.grad(clean.sum(), z)
    delta = scale * torch.randn(z.shape, generator=generator, dtype=torch.float64)
    rise = (part.exit_losses(part.features(z + delta), Labels(labels), mu) - clean).detach()
    slope = gradient.flatten(1).norm(dim=1) / mu
    bound = slope + (2 * rise / mu + slope.square()).clamp(min=0).sqrt()
    assert (delta.flatten(1).norm(dim=1) <= bound * (1 + 1e-9)).all()


def test_a_prior_is_added_to_the_scores_of_either_exit(network: nn.Sequential) -> None:
    """CE(s + log π, y) = −(s_y + log π_y) + log Σ_c π_c e^{s_c}, at the classifier and at an auxiliary head."""
    frequencies = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    head, x, labels = build_head((3, 4, 4), 5), torch.rand(6, 1, 4, 4), torch.tensor([0, 1, 2, 3, 4, 0])
    plain = ModelPart(explicit_chain(network), 0, 1, head)
    part = ModelPart(explicit_chain(network), 0, 1, head, prior=frequencies.log())
    scores = plain.logits(x)
    assert torch.allclose(part.logits(x), scores + frequencies.log())
    squares = network[0](x).flatten(1).square().sum(1)
    losses = part.exit_losses(part.features(x), Labels(labels), 0.5)
    for i, label in enumerate(labels):
        total = sum(p * math.exp(s) for p, s in zip(frequencies.tolist(), scores[i].tolist(), strict=True))
        expected = math.log(total) - scores[i, label].item() - math.log(frequencies[label])
        assert losses[i].item() == pytest.approx(expected + 0.25 * squares[i].item(), rel=1e-5)
    whole = ModelPart(explicit_chain(network[2:]), 0, 1, None, prior=torch.tensor([0.0, 1.0, 2.0]))
    assert whole.logits(torch.tensor([[5.0, 5.0, 5.0]])).tolist() == [[5.0, 6.0, 7.0]]
    assert torch.equal(part.features(x), plain.features(x)), "features are the model's own"
