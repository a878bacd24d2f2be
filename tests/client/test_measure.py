"""Accuracy counts and the perturbation magnitude against values that are known exactly."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedprophet.attacks import ATTACKS, AttackEntry, Outcome
from fedprophet.attacks.pgd import random_start
from fedprophet.cascade.atoms import explicit_chain
from fedprophet.client import measure
from fedprophet.client.measure import evaluate, evaluated_positions, perturbation_magnitude
from fedprophet.client.part import ModelPart
from fedprophet.data.examples import LocalExamples, TensorExamples
from fedprophet.messages.tasks import Evaluate, Measure
from fedprophet.randomness import generator
from fedprophet.threat import ThreatModel, feature_threat, input_threat

TASK = Measure(round=1, client=0, seed=0, batch=3, threat=input_threat(0.1, 0.05, 20))


def _threshold() -> ModelPart:
    """Class 1 where the one pixel is above 0.5."""
    layer = nn.Linear(1, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0], [10.0]]))
        layer.bias.copy_(torch.tensor([0.0, -5.0]))
    return ModelPart(explicit_chain([("layer", layer)]), 0, 1, None)


def test_evaluation_counts_clean_and_attacked_hits() -> None:
    pixels = torch.tensor([[0.1], [0.45], [0.55], [0.9], [0.2]])
    examples = LocalExamples(TensorExamples(pixels, torch.tensor([0, 0, 1, 1, 1])), np.arange(5))
    task = Evaluate(round=1, client=0, seed=0, batch=3, threat=input_threat(0.1, 0.05, 10))
    # 0.2 is wrong already; 0.45 and 0.55 lie within 0.1 of the threshold and fall to the attack.
    assert evaluate(task, _threshold(), examples) == (4, 2, {})
    assert evaluate(task, _threshold(), examples, attacked=False) == (4, 0, {})
    assert evaluate(replace(task, threat=None), _threshold(), examples) == (4, 0, {})


EVALUATION = Evaluate(round=3, client=2, seed=1, batch=4, threat=input_threat(0.1, 0.03, 3))


def _ramp(count: int) -> LocalExamples:
    """Pixels around the threshold: the sample's number is in its pixel, and most attacks are a matter of luck."""
    pixels = 0.42 + 0.16 * torch.arange(count).view(-1, 1) / count
    return LocalExamples(TensorExamples(pixels, (pixels[:, 0] > 0.5).long()), np.arange(count))


@pytest.mark.parametrize("samples", [None, 17])
def test_parts_meet_the_attacks_of_the_whole(samples: int | None) -> None:
    """However the samples are dealt to tasks, the counts add up to the same."""
    task, examples = replace(EVALUATION, samples=samples), _ramp(30)
    whole = evaluate(task, _threshold(), examples)
    assert 0 < whole[1] < whole[0] == (samples or 30)
    total = 30 if samples is None else samples
    parts = [
        evaluate(replace(task, part=(first, min(first + 8, total))), _threshold(), examples)
        for first in range(0, total, 8)
    ]
    assert tuple(sum(part[index] for part in parts) for index in (0, 1)) == whole[:2]


@pytest.mark.parametrize("batch", [1, 3, 4, 8])
def test_fewer_samples_at_a_time_meet_the_same_attacks(batch: int, monkeypatch) -> None:
    """Whether a sample of the ramp falls is a matter of where its attack starts."""
    task, examples, sizes = replace(EVALUATION, batch=8), _ramp(30), []
    whole = evaluate(task, _threshold(), examples)
    part = _threshold()
    part.chain.atoms[0].register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    assert evaluate(replace(task, batch=batch, drawn=8), part, examples) == whole
    assert max(sizes) == batch
    parts = [
        evaluate(replace(task, batch=batch, drawn=8, part=(first, min(first + 16, 30))), _threshold(), examples)
        for first in (0, 16)
    ]
    assert tuple(map(sum, zip(*(each[:2] for each in parts), strict=True))) == whole[:2]


def test_other_draws_lead_to_other_counts() -> None:
    """So that the test above could fail."""
    task, examples = replace(EVALUATION, batch=8), _ramp(30)
    assert evaluate(replace(task, batch=3), _threshold(), examples) != evaluate(task, _threshold(), examples)


def test_an_attack_that_cannot_be_cut_draws_for_what_it_attacks(monkeypatch) -> None:
    sizes = []

    def attack(logits, images, labels, threat, seed) -> Outcome:
        sizes.append(len(images))
        return Outcome(torch.ones(len(labels), dtype=torch.bool))

    monkeypatch.setattr(measure, "ATTACKS", {**ATTACKS, "fake": AttackEntry(attack, "Fake")})
    evaluate(replace(EVALUATION, attack="fake", batch=4, drawn=8), _threshold(), _ramp(10))
    assert sizes == [4, 4, 2]


def test_which_samples_are_evaluated():
    task = Evaluate(round=1, client=3, seed=0, samples=5, part=(2, 9))
    chosen = evaluated_positions(replace(task, part=None), 20)
    assert len(chosen) == 5
    assert torch.equal(evaluated_positions(task, 20), chosen[2:])
    assert torch.equal(evaluated_positions(replace(task, samples=None, part=None), 4), torch.arange(4))


class Seen(LocalExamples):
    def __init__(self, count: int) -> None:
        super().__init__(TensorExamples(torch.arange(count).view(-1, 1) / count, [0] * count), np.arange(count))
        self.positions: list[int] = []

    def fetch(self, indices: torch.Tensor) -> torch.Tensor:
        self.positions += indices.tolist()
        return super().fetch(indices)


def _positions(**changes: object) -> list[int]:
    seen = Seen(50)
    evaluate(replace(EVALUATION, threat=None, **changes), _threshold(), seen)
    return seen.positions


def test_drawn_samples_are_the_same_in_every_round_and_for_every_attack() -> None:
    ten = _positions(samples=10)
    assert len(set(ten)) == 10
    assert ten == sorted(ten) != list(range(10))
    assert _positions(samples=10, round=9, attack="autoattack") == ten
    assert set(ten) < set(_positions(samples=20)), "more samples are these and others"
    assert _positions(samples=10, client=3) != ten
    assert _positions(samples=10, seed=2) != ten
    assert _positions(samples=50) == _positions(samples=60) == _positions() == list(range(50))


def test_an_attack_is_an_entry_in_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told where its randomness comes from; what its components broke is added up."""
    seeds = []

    def attack(logits, images, labels, threat, seed):
        seeds.append(seed)
        return Outcome(torch.zeros(len(labels), dtype=torch.bool), {"this": len(labels), "that": 1})

    monkeypatch.setattr(measure, "ATTACKS", {**ATTACKS, "fake": AttackEntry(attack, "Fake")})
    counts = evaluate(replace(EVALUATION, attack="fake"), _threshold(), _ramp(6))
    assert counts == (6, 0, {"this": 6, "that": 2})
    assert len(set(seeds)) == 2
    evaluate(replace(EVALUATION, attack="fake"), _threshold(), _ramp(6))
    assert seeds[:2] == seeds[2:]


def test_autoattack_on_a_client() -> None:
    pixels = torch.tensor([[0.1], [0.45], [0.55], [0.9], [0.2]])
    examples = LocalExamples(TensorExamples(pixels, torch.tensor([0, 0, 1, 1, 1])), np.arange(5))
    part = _threshold()
    part.chain.atoms[0].train()
    counts = evaluate(replace(EVALUATION, batch=5, attack="aa-fast"), part, examples)
    assert counts == (4, 2, {"apgd-ce": 2})
    assert part.chain.atoms[0].training, "its flag is as it was found"


def test_magnitude_of_a_linear_map_is_its_largest_singular_value() -> None:
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
    part = ModelPart(explicit_chain([("layer", layer)]), 0, 1, None)
    task = replace(TASK, threat=feature_threat(0.5, 40, (-math.inf, math.inf)))
    found = perturbation_magnitude(task, part, torch.randn(7, 2, generator=torch.Generator().manual_seed(0)))
    assert found == pytest.approx(1.5, rel=0.01)
    assert found <= 1.5 + 1e-5


@pytest.mark.parametrize("batch", [8, 4, 3, 1])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_magnitude_does_not_depend_on_how_many_samples_are_measured_at_a_time(norm: str, batch: int) -> None:
    """By steps of no length the random starts alone are measured: those of eight samples at a time."""
    part = ModelPart(explicit_chain(nn.Sequential(nn.Flatten())), 0, 1, None)
    threat = ThreatModel(norm, 0.5, 0.0, 1, (-math.inf, math.inf))
    inputs = torch.zeros(20, 3)
    expected = 0.0
    for number, size in enumerate((8, 8, 4)):
        draw = generator(5, "measuring attack", 1, 2, number)
        expected += float(random_start(torch.zeros(size, 3), threat, draw).norm(dim=1).sum())
    task = Measure(round=1, client=2, seed=5, last=1, batch=batch, drawn=8, threat=threat)
    assert perturbation_magnitude(task, part, inputs) == pytest.approx(expected / 20, rel=1e-5)


def test_magnitude_is_a_mean_of_per_sample_norms() -> None:
    """z = relu(2x − 0.5): within 0.1 of x = 0.5 it moves by 0.2, within 0.1 of x = 0 it stays 0; their mean is 0.1."""
    layer = nn.Linear(1, 1)
    with torch.no_grad():
        layer.weight.fill_(2.0)
        layer.bias.fill_(-0.5)
    part = ModelPart(explicit_chain([("layer", nn.Sequential(layer, nn.ReLU()))]), 0, 1, None)
    assert perturbation_magnitude(TASK, part, torch.tensor([[0.5], [0.0]])) == pytest.approx(0.1, abs=1e-6)
