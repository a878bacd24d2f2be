"""PGD is tested by its own properties: inside the ball, inside the bounds, raises the loss, eps 0 changes nothing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedprophet.attacks.pgd import pgd
from fedprophet.threat import ThreatModel, feature_threat, input_threat, with_steps


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _norms(delta: Tensor) -> Tensor:
    return delta.flatten(1).norm(dim=1)


@given(
    norm=st.sampled_from(["linf", "l2"]),
    radius=st.floats(1e-3, 2.0),
    steps=st.integers(1, 6),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=40)
def test_stays_inside_ball_and_bounds(norm: str, radius: float, steps: int, seed: int) -> None:
    clean = torch.rand(5, 2, 3, generator=_generator(seed))
    weights = torch.randn(2, 3, generator=_generator(seed + 1))
    threat = ThreatModel(norm, radius, 0.7 * radius, steps, (0.0, 1.0))
    found = pgd(lambda x: (x * weights).sum(), clean, threat, _generator(seed + 2))
    size = (found - clean).abs().flatten(1).amax(dim=1) if norm == "linf" else _norms(found - clean)
    assert (size <= radius * (1 + 1e-5) + 1e-6).all()
    assert found.min() >= 0
    assert found.max() <= 1


def test_linf_finds_the_corner_of_a_linear_objective() -> None:
    clean = torch.zeros(1, 3)
    threat = ThreatModel("linf", 0.5, 0.25, 10)
    found = pgd(lambda x: (x * torch.tensor([1.0, -2.0, 3.0])).sum(), clean, threat, _generator())
    assert torch.allclose(found, torch.tensor([[0.5, -0.5, 0.5]]))


def test_l2_finds_the_gradient_direction_of_a_linear_objective_for_each_sample() -> None:
    clean = torch.zeros(2, 2)
    slopes = torch.tensor([[3.0, 4.0], [0.0, -1.0]])
    found = pgd(lambda x: (x * slopes).sum(), clean, ThreatModel("l2", 2.0, 1.0, 40), _generator())
    assert torch.allclose(found, torch.tensor([[1.2, 1.6], [0.0, -2.0]]), atol=1e-2)


def test_features_behind_a_relu_stay_non_negative() -> None:
    clean = torch.zeros(4, 6)
    found = pgd(lambda x: -x.sum(), clean, feature_threat(1.0, 5, (0.0, math.inf)), _generator())
    assert torch.equal(found, clean)


@pytest.mark.parametrize(
    "threat", [input_threat(0.0, 0.1, 5), input_threat(0.1, 0.1, 0), feature_threat(0.0, 5, (0, 1))]
)
def test_a_harmless_threat_changes_nothing_and_returns_a_copy(threat: ThreatModel) -> None:
    clean = torch.rand(2, 3)
    found = pgd(lambda x: x.sum(), clean, threat, _generator())
    assert torch.equal(found, clean)
    assert found.data_ptr() != clean.data_ptr()


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_raises_the_loss_of_a_network_more_than_noise_does(norm: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
    clean, labels = torch.rand(64, 20), torch.randint(0, 4, (64,))

    def loss(x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(network(x), labels, reduction="sum")

    radius = 0.2
    threat = ThreatModel(norm, radius, radius / 4, 10, (0.0, 1.0))
    attacked = pgd(loss, clean, threat, _generator())
    noise = pgd(loss, clean, ThreatModel(norm, radius, 0.0, 1, (0.0, 1.0)), _generator())
    assert loss(attacked) > loss(noise)
    assert loss(attacked) > loss(clean)
    more = pgd(loss, clean, with_steps(threat, 30), _generator())
    assert loss(more) >= 0.99 * loss(attacked)


def test_the_same_generator_gives_the_same_attack_and_no_gradient_is_left_behind() -> None:
    layer = nn.Linear(3, 2)
    clean = torch.rand(4, 3)
    threat = input_threat(0.1, 0.05, 3)
    first = pgd(lambda x: layer(x).square().sum(), clean, threat, _generator(7))
    second = pgd(lambda x: layer(x).square().sum(), clean, threat, _generator(7))
    other = pgd(lambda x: x.sum() * 0, clean, threat, _generator(8))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert layer.weight.grad is None
    assert not first.requires_grad


def test_l2_start_has_a_random_direction_and_a_uniform_radius() -> None:
    clean = torch.zeros(4000, 8)
    threat = ThreatModel("l2", 3.0, 0.0, 1)
    radii = _norms(pgd(lambda x: x.sum(), clean, threat, _generator()))
    assert radii.max() <= 3.0 + 1e-5
    assert radii.mean() == pytest.approx(1.5, abs=0.05)
    assert radii.std() == pytest.approx(3.0 / math.sqrt(12), abs=0.05)
