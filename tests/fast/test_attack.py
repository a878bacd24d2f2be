"""PGD on stacks: inside ball and bounds, and as strong as the plain one."""

import math
from dataclasses import dataclass

import pytest
import torch

from fedprophet.attacks.pgd import pgd
from fedprophet.client.aims import Labels
from fedprophet.fast.attack import StackAttack
from fedprophet.fast.draws import Draws
from fedprophet.fast.folded import FoldedStack
from fedprophet.fast.kernels import Kernels, Scaling
from fedprophet.randomness import generator
from fedprophet.threat import ThreatModel

CPU = torch.device("cpu")


@dataclass
class Plain:
    """A network of which the attack needs nothing but how it reads inputs."""

    read: Scaling
    kernels = Kernels()
    spreads = False

    def scaling(self, _):
        return self.read


def attacked(gradient, clean, threat: ThreatModel, seeds=(1, 2), network=None):
    """Return perturbed inputs; the gradient is given scaled ones, and the result is scaled back."""
    draws, attack = Draws(CPU), StackAttack(threat, CPU)
    draws.renew(seeds)
    attack.set(threat)
    channels = clean.shape[-1]
    network = network or Plain(Scaling(torch.zeros(channels), torch.ones(channels), torch.float32, channels))
    scaling = network.scaling(CPU)
    return attack(gradient, clean, network, draws) * scaling.std + scaling.mean


def constant(direction):
    return lambda x: torch.ones_like(x) * direction


def norms(delta):
    return delta.flatten(2).norm(dim=2)


@pytest.fixture
def clean():
    return torch.rand(2, 3, 4, 4, 2, generator=torch.Generator().manual_seed(0))


def test_an_linf_attack_ends_in_the_corner_that_the_gradient_points_to(clean):
    threat = ThreatModel("linf", 0.1, 0.05, 8, (0.0, 1.0))
    assert torch.allclose(attacked(constant(1.0), clean, threat), (clean + 0.1).clamp(max=1))
    assert torch.allclose(attacked(constant(-2.0), clean, threat), (clean - 0.1).clamp(min=0))


def test_an_l2_attack_ends_on_the_sphere_along_the_gradient(clean):
    threat = ThreatModel("l2", 0.5, 0.3, 60)
    found = attacked(constant(3.0), clean, threat)
    assert torch.allclose(found - clean, torch.full_like(clean, 0.5 / math.sqrt(32)), atol=1e-3)


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize(
    ("norm", "bounds"), [("linf", (0.0, 1.0)), ("l2", (0.0, math.inf)), ("l2", (-math.inf, math.inf))]
)
def test_inside_ball_and_bounds(clean, norm, bounds, steps):
    threat = ThreatModel(norm, 0.4, 0.3, steps, bounds)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    found = attacked(lambda x: noise * x, clean, threat)
    delta = found - clean
    size = delta.abs().amax() if norm == "linf" else norms(delta).max()
    assert 0.01 < float(size) <= 0.4 + 1e-6
    assert float(found.min()) >= bounds[0]
    assert float(found.max()) <= bounds[1]


def test_starts_are_spread_and_differ_between_samples_and_clients(clean):
    still = torch.full((2, 500, 2, 2, 1), 0.5)
    uniform = attacked(constant(0.0), still, ThreatModel("linf", 0.2, 0.1, 1)) - still
    assert float(uniform.abs().max()) <= 0.2
    assert abs(float(uniform.mean())) < 0.01
    assert float(uniform.std()) == pytest.approx(0.2 / math.sqrt(3), rel=0.05)
    inside = norms(attacked(constant(0.0), still, ThreatModel("l2", 0.2, 0.1, 1)) - still)
    # A share from U[0, 1) of the radius, in every direction.
    assert float(inside.mean()) == pytest.approx(0.1, rel=0.1)
    assert float(inside.max()) <= 0.2
    assert len(inside.flatten().unique()) == 1000
    assert not torch.equal(uniform[0], uniform[1])


def test_inputs_are_scaled_padded_and_their_gradient_scaled_back(clean):
    """The gradient is that of (x − mean) / std: in an l2 ball its direction depends on each channel's deviation."""
    scaling = Scaling(torch.tensor([0.5, 0.1]), torch.tensor([0.5, 0.25]), torch.float32, 4)
    seen = []

    def gradient(z):
        seen.append(z)
        return torch.ones_like(z)

    attack, draws = StackAttack(ThreatModel("l2", 1.0, 100.0, 1), CPU), Draws(CPU)
    draws.renew((1, 2))
    attack.set(ThreatModel("l2", 1.0, 100.0, 1))
    before = clean.clone()
    found = attack(gradient, clean, Plain(scaling), draws)
    assert torch.equal(clean, before)
    assert seen[0].shape[-1] == found.shape[-1] == 4
    assert not found[..., 2:].any()
    delta = found[..., :2] * scaling.std + scaling.mean - clean
    # A step of 100 along (1 / 0.5, 1 / 0.25) leaves nothing of the start.
    torch.testing.assert_close(delta[..., 1] / delta[..., 0], torch.full(delta.shape[:-1], 2.0), rtol=0.1, atol=0)
    torch.testing.assert_close(norms(delta), torch.ones(2, 3))


def test_a_gradient_of_zero_is_no_division_by_zero(clean):
    for norm in ("linf", "l2"):
        assert torch.isfinite(attacked(constant(0.0), clean, ThreatModel(norm, 0.1, 0.1, 3))).all()


def test_clients_do_not_depend_on_each_other(clean):
    threat = ThreatModel("l2", 0.5, 0.2, 3)
    both = attacked(lambda x: x - 0.3, clean, threat)
    alone = attacked(lambda x: x - 0.3, clean[1:], threat, seeds=(2,))
    assert torch.equal(both[1:], alone)


@pytest.mark.usefixtures("same_starts")
@pytest.mark.parametrize(
    ("threat", "span"),
    [
        (ThreatModel("linf", 0.1, 0.03, 10, (0.0, 1.0)), (0, None, None)),
        (ThreatModel("linf", 0.1, 0.03, 10, (0.0, 1.0)), (0, 4, 0)),
        (ThreatModel("l2", 1.0, 0.25, 10, (0.0, math.inf)), (3, 6, 1)),
    ],
    ids=["whole", "first-module", "features"],
)
def test_losses_are_as_high_as_the_plain_attacks(make_case, threat, span):
    case = make_case(span=span, samples=64)
    network = FoldedStack(case.ladder, Kernels(), torch.float32)
    network.fold(case.stacks())
    found = attacked(lambda z: network.loss_gradient(z, case.targets, 0.01), case.stacked, threat, network=network)
    for client, segment in enumerate(case.segments):
        x, labels = case.x[client], case.labels[client]

        def loss(z, segment=segment, labels=labels):
            return segment.exit_losses(segment.features(z), Labels(labels), 0.01).sum()

        with segment.mode(training=False):
            plainly = pgd(loss, x, threat, generator(0, "test", client))
            with torch.no_grad():
                mine, theirs, clean = (float(loss(z)) for z in (found[client].permute(0, 3, 1, 2), plainly, x))
        assert theirs - clean > 1
        assert mine - clean == pytest.approx(theirs - clean, rel=0.01)


@pytest.mark.usefixtures("same_starts")
def test_features_move_as_far_as_under_the_plain_attack(make_case):
    case, threat = make_case(span=(0, 4, None), samples=64), ThreatModel("linf", 0.1, 0.03, 10, (0.0, 1.0))
    network = FoldedStack(case.ladder, Kernels(), torch.float32)
    network.fold(case.stacks())
    clean = network.features(network.prepare(case.stacked))
    found = attacked(lambda z: network.shift_gradient(z, clean), case.stacked, threat, network=network)
    for client, segment in enumerate(case.segments):
        x = case.x[client]
        with segment.mode(training=False):
            before = segment.features(x).detach()
            plainly = pgd(
                lambda z, s=segment, b=before: (s.features(z) - b).square().sum(), x, threat, generator(0, "t")
            )
            with torch.no_grad():
                mine, theirs = (
                    float((segment.features(z) - before).flatten(1).norm(dim=1).mean())
                    for z in (found[client].permute(0, 3, 1, 2), plainly)
                )
        assert mine == pytest.approx(theirs, rel=0.01)
