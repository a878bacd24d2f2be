"""AutoAttack through its wrapper: what it finds, and what it leaves as it was."""

import importlib
import logging
import random
import re
import sys

import pytest
import torch
from torch import nn

from fedprophet.attacks import ATTACKS
from fedprophet.attacks.autoattack import STANDARD, Samples, aa_fast, attack_rows, autoattack
from fedprophet.attacks.draws import GroupDraws
from fedprophet.attacks.square import square
from fedprophet.threat import feature_threat, input_threat

MODULE = importlib.import_module("fedprophet.attacks.autoattack")


def _threat(radius: float):
    return input_threat(radius, 0.01, 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Fewer queries and iterations: the library's numbers are for results, not for tests."""
    original = MODULE._suite

    monkeypatch.setattr(MODULE, "_suite", lambda *arguments: _shortened(original(*arguments)))


def _shortened(suite):
    suite.square.n_queries = 200
    suite.fab.n_iter, suite.apgd.n_iter = 5, 10
    suite.apgd_targeted.n_iter = 25
    return suite


def _net(classes: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, classes))


def _images(count: int, seed: int) -> torch.Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
def test_with_ten_classes_it_is_the_librarys_standard_version_bit_for_bit(caplog):
    """Which samples stand, and how many each component broke, as the library's own run logs it."""
    from pyautoattack import AutoAttack

    net, x = _net(10, 1), _images(12, 2)
    y = net(x).argmax(1)
    y[3] = (y[3] + 1) % 10  # one is wrong to begin with
    outcome = autoattack(net, x, y, _threat(0.018), seed=5)
    reference = AutoAttack(net, norm="Linf", eps=0.018, version="standard", seed=5)
    _shortened(reference)
    tracing = sys.gettrace()
    with caplog.at_level(logging.DEBUG, logger="auto-attack"):
        _, found = reference.run_standard_evaluation(x, y, batch_size=12)
    sys.settrace(tracing)  # its own run switches tracing off, and with it the measurement of coverage
    assert outcome.correct.tolist() == (found == y).tolist()
    logged = re.findall(r"([a-z-]+) - 1/1 - (\d+) out of", caplog.text)
    assert outcome.broken == {name: int(count) for name, count in logged}
    assert list(outcome.broken) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert 0 < sum(outcome.broken.values()) < 11
    assert outcome.broken["apgd-t"] > 0, "or the comparison would show little"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("components", "radius"),
    [(STANDARD, 0.018), (("fab-t",), 0.018), (("square",), 0.025)],
    ids=["all", "fab", "square"],
)
def test_rows_of_several_networks_have_the_verdicts_that_the_library_gives_each_network_alone(components, radius):
    """Sample by sample and component by component, in groups of different sizes with seeds of their own."""
    from pyautoattack import AutoAttack

    nets, sizes, seeds = [_net(10, seed) for seed in (1, 2, 3)], (7, 4, 9), [5, 6, 2**62 + 1]
    groups = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    x = _images(sum(sizes), 4)

    def logits(images, rows):
        scores = images.new_zeros((len(images), 10))
        for number, net in enumerate(nets):
            own = (groups[rows] == number).nonzero().flatten()
            scores = scores.index_copy(0, own, net(images[own]))
        return scores

    y = logits(x, torch.arange(len(x))).argmax(1)
    y[8] = (y[8] + 1) % 10
    found = attack_rows(components, logits, Samples(x, y, groups, seeds), _threat(radius))
    tracing = sys.gettrace()
    for number, (net, seed) in enumerate(zip(nets, seeds, strict=True)):
        own = groups == number
        reference = _shortened(AutoAttack(net, norm="Linf", eps=radius, version="standard", seed=seed))
        standing = net(x[own]).argmax(1) == y[own]
        assert found.clean[own].tolist() == standing.tolist()
        for name in components:
            reference.attacks_to_run = [name]
            at = standing.nonzero().flatten()
            _, labels = reference.run_standard_evaluation(x[own][at], y[own][at], batch_size=99)
            broken = torch.zeros_like(standing)
            broken[at] = labels != y[own][at]
            assert found.broken[name][own].tolist() == broken.tolist(), name
            standing &= ~broken
        assert found.correct[own].tolist() == standing.tolist()
        assert standing.any()
    sys.settrace(tracing)
    assert all(int(found.broken[name].sum()) for name in components[:2]), "or it would show little"


def test_square_paints_each_group_its_own_squares():
    """Groups differ in their draws alone: each ends where it ends when it is attacked by itself."""
    x, labels = torch.full((4, 1, 6, 6), 0.6), torch.zeros(4, dtype=torch.long)
    weights = torch.linspace(-1, 1, 36).view(6, 6)

    def margin(images, _):
        return 40 + (images.squeeze(1) * weights).sum((1, 2))

    def best(numbers, seeds):
        groups = torch.tensor(numbers)
        return square(margin, x[: len(groups)], groups, GroupDraws(seeds), 0.1, 60, lambda query: 0.8 / (1 + query))

    together = best([0, 0, 1, 1], [3, 4])
    assert torch.equal(together, torch.cat([best([0, 0], [3]), best([0, 0], [4])]))
    assert not torch.equal(together[0], together[2])
    assert float((together - x).abs().max()) == pytest.approx(0.1)
    assert bool((margin(together, labels) < margin(x, labels)).all())


class Threshold(nn.Module):
    """Class 0 where the mean pixel is above 0.5, class 1 below; further classes never win."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(20.0))
        self.classes = classes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = self.scale * (x.flatten(1).mean(1) - 0.5)
        others = [score.new_full(score.shape, -30.0 - k) + 0 * score for k in range(self.classes - 2)]
        return torch.stack([score, -score, *others], dim=1)


NAMES = {
    3: ["apgd-ce", "fab", "square"],
    4: ["apgd-ce", "apgd-t", "fab-t", "square"],
}


@pytest.mark.parametrize("classes", NAMES)
def test_the_ball_decides_whatever_the_number_of_classes(classes):
    """An image at mean 0.5 ± d falls to a radius above d and stands below it."""
    means = torch.tensor([0.45, 0.55, 0.35, 0.65, 0.55])
    x, y = means.view(-1, 1, 1, 1).expand(-1, 1, 8, 8).clone(), torch.tensor([1, 0, 1, 0, 1])
    outcome = autoattack(Threshold(classes), x, y, _threat(0.1), seed=0)
    assert outcome.correct.tolist() == [False, False, True, True, False]
    assert list(outcome.broken) == NAMES[classes]
    assert sum(outcome.broken.values()) == 2, "the last one was wrong already"
    fast = aa_fast(Threshold(classes), x, y, _threat(0.1), seed=0)
    assert list(fast.broken) == [name for name in NAMES[classes] if name.startswith("apgd")]
    assert fast.correct.tolist() == outcome.correct.tolist()


def test_only_samples_that_are_right_are_attacked():
    means = torch.tensor([0.55, 0.3, 0.8])
    x, y = means.view(-1, 1, 1, 1).expand(-1, 1, 4, 4).clone(), torch.tensor([0, 0, 0])
    model, seen = Threshold(4), []

    def logits(images):
        seen.append(images.detach().clone())
        return model(images)

    autoattack(logits, x, y, _threat(0.04), seed=0)
    assert len(seen) > 300
    asked = torch.cat(seen[1:])  # the first pass finds out who is right
    assert bool(((asked - 0.3).abs().amax((1, 2, 3)) > 0.1).all())
    assert autoattack(model, x, y, _threat(0.04), seed=0).correct.tolist() == [True, False, True]


def test_it_leaves_generators_gradients_and_parameters_as_they_were():
    net, x = _net(4, 3), _images(4, 4)
    y = net(x).argmax(1)
    net[0].weight.grad = torch.ones_like(net[0].weight)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    before, plain = torch.random.get_rng_state(), random.getstate()
    first = autoattack(net, x, y, _threat(0.03), seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert random.getstate() == plain
    assert bool((net[0].weight.grad == 1).all())
    assert all(p.grad is None for p in list(net.parameters())[1:])
    assert all(p.requires_grad for p in net.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
    torch.manual_seed(99)
    again = autoattack(net, x, y, _threat(0.03), seed=7)
    assert torch.equal(first.correct, again.correct)
    assert first.broken == again.broken
    with torch.no_grad():
        assert autoattack(net, x, y, _threat(0.03), seed=7).broken == first.broken


class Stairs(nn.Module):
    """An honest classifier behind a quantiser, which has no gradient."""

    def __init__(self, inner: nn.Module, hard: bool) -> None:
        super().__init__()
        self.inner, self.hard = inner, hard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = 100 * x
        return self.inner((steps.detach().round() if self.hard else steps.round()) / 100)


@pytest.mark.parametrize("hard", [True, False], ids=["cut off", "zero"])
def test_square_sees_through_a_model_without_gradients_and_nothing_is_printed(hard, capfd):
    means = torch.tensor([0.525, 0.53, 0.475, 0.9])
    x, y = means.view(-1, 1, 1, 1).expand(-1, 1, 8, 8).clone(), torch.tensor([0, 0, 1, 0])
    outcome = autoattack(Stairs(Threshold(4), hard), x, y, _threat(0.1), seed=0)
    assert outcome.correct.tolist() == [False, False, False, True]
    assert outcome.broken == {"apgd-ce": 0, "apgd-t": 0, "fab-t": 0, "square": 3}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("shape", [(5,), (3, 5), (1, 8, 8), (2, 2, 2, 2)])
def test_images_of_any_shape(shape):
    x = torch.stack([torch.full(shape, value) for value in (0.52, 0.9)])
    assert autoattack(Threshold(4), x, torch.tensor([0, 0]), _threat(0.05), 0).correct.tolist() == [False, True]


def test_half_precision_is_attacked_in_single_precision():
    net, x = _net(4, 3).bfloat16(), _images(3, 4).bfloat16()
    outcome = aa_fast(net, x, net(x).argmax(1), _threat(0.3), seed=0)
    assert outcome.correct.tolist() == [False, False, False]


def test_nothing_to_attack():
    x, y = torch.full((2, 1, 4, 4), 0.6), torch.tensor([0, 1])
    nothing = autoattack(Threshold(4), x, y, _threat(0.0), seed=0)
    assert (nothing.correct.tolist(), sum(nothing.broken.values())) == ([True, False], 0)
    wrong = autoattack(Threshold(4), x, 1 - torch.tensor([0, 0]), _threat(0.5), seed=0)
    assert (wrong.correct.tolist(), sum(wrong.broken.values())) == ([False, False], 0)


def test_another_threat_is_refused():
    with pytest.raises(ValueError, match="l_inf ball in"):
        autoattack(Threshold(4), torch.rand(1, 1, 4, 4), torch.tensor([0]), feature_threat(1.0, 5, (0, 1)), 0)


def test_the_table_of_attacks():
    assert list(ATTACKS) == ["pgd", "autoattack", "aa-fast"]
    assert [name for name, entry in ATTACKS.items() if entry.takes_steps] == ["pgd"]
    assert {entry.extra for entry in ATTACKS.values() if entry.module == "pyautoattack"} == {"attacks"}
