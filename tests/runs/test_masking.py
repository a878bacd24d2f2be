"""Signs of gradient masking, on models that really mask and on one that does not."""

import numpy as np
import pytest
import torch
from torch import nn

from fedprophet.cascade.atoms import explicit_chain
from fedprophet.client.measure import evaluate
from fedprophet.client.part import ModelPart
from fedprophet.data.examples import LocalExamples, TensorExamples
from fedprophet.messages.answers import Evaluated
from fedprophet.messages.tasks import Evaluate
from fedprophet.runs.masking import Tally, beyond_chance, black_box_alone, larger_radius, tally, weaker_than
from fedprophet.threat import input_threat

RADIUS = 0.1


class Bright(nn.Module):
    """Class 0 where the mean pixel is above 0.5, class 1 below: as honest as a model can be."""

    def __init__(self, scale: float = 20.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = self.scale * (x.flatten(1).mean(1) - 0.5)
        return torch.stack([score, -score, score - 90, score - 91], dim=1)


class Stairs(Bright):
    """The same behind a quantiser, whose gradient is zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((100 * x).round() / 100)


class Gap(Bright):
    """Wrong only where the whole image has moved towards the boundary by 0.022 to 0.065, and robust before and after.

    An attack of small steps falls into the gap; one that jumps to the edge of its ball leaps over it and sees a smooth
    loss on both sides.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bright = (x.flatten(1).mean(1) > 0.5).float()
        moved = (x.flatten(1).mean(1) - (0.1 + 0.8 * bright)) * (1 - 2 * bright)
        inside = ((moved > 0.022) & (moved < 0.065)).float()
        shift = 20 * inside * (2 * bright - 1)
        scores = super().forward(x)
        return torch.cat([scores[:, :1] - shift[:, None], scores[:, 1:2] + shift[:, None], scores[:, 2:]], dim=1)


def measured(model, attack, radius=RADIUS, steps=10, step=0.02, pixels=(0.45, 0.55)):
    """Attack eight images, four dark and four bright, as a client would."""
    means = torch.tensor(list(pixels) * 4)
    images = means.view(-1, 1, 1, 1).expand(-1, 1, 8, 8).clone()
    examples = LocalExamples(TensorExamples(images, (means < 0.5).long()), np.arange(8))
    part = ModelPart(explicit_chain([("model", model)]), 0, 1, None)
    task = Evaluate(round=1, client=0, seed=0, batch=8, attack=attack, threat=input_threat(radius, step, steps))
    clean, adversarial, broken = evaluate(task, part, examples)
    header = {"round": 1, "client": 0, "weight": 8.0, "samples": 8}
    return [Evaluated(**header, clean=clean, adversarial=adversarial, broken=broken)]


def test_a_quantiser_is_seen_through_by_the_black_box_attack():
    answers = measured(Stairs(), "autoattack")
    [text] = black_box_alone("AutoAttack", "global", answers)
    assert "AutoAttack's gradient attacks left 8 of 8 (100.0 %) samples correct" in text
    assert "Square after them only 0 of 8 (0.0 %)" in text
    assert "may hide its gradients" in text


def test_an_honest_model_falls_to_gradients_and_gives_no_sign():
    answers = measured(Bright(), "autoattack")
    assert tally(answers) == Tally(0, 8)
    assert answers[0].broken["apgd-ce"] == 8
    assert not list(black_box_alone("AutoAttack", "global", answers))
    pgd = {radius: tally(measured(Bright(), "pgd", radius, 20, radius / 8)) for radius in (0.02, 0.08, 0.5)}
    assert pgd == {0.02: Tally(8, 8), 0.08: Tally(0, 8), 0.5: Tally(0, 8)}
    assert not list(larger_radius("PGD-20", 0.02, pgd[0.02], 0.08, pgd[0.08]))
    assert not list(beyond_chance("PGD-20", 0.5, pgd[0.5], 0.5))
    assert not list(weaker_than("AutoAttack", tally(answers), "PGD-20", pgd[0.02], "global"))


def test_logits_so_large_that_the_gradient_vanishes_resist_any_radius():
    """The cross-entropy of a margin of 10⁴ is flat in 32 bits: PGD stays at its random start."""
    found = tally(measured(Bright(1e5), "pgd", radius=0.5, steps=20, step=0.0625))
    [text] = beyond_chance("PGD-20", 0.5, Tally(160 * found.correct // 8, 160), 0.5)
    honest = tally(measured(Bright(), "pgd", radius=0.5, steps=20, step=0.0625))
    assert found.correct > 4 > honest.correct == 0
    assert "where chance is 50.0 %" in text


def test_a_larger_ball_that_does_worse():
    pgd = tally(measured(Gap(), "pgd", 0.05, 10, 0.004, (0.1, 0.9)))
    wider = tally(measured(Gap(), "pgd", 0.2, 20, 0.025, (0.1, 0.9)))
    assert (pgd, wider) == (Tally(0, 8), Tally(8, 8))
    [text] = larger_radius("PGD-10", 0.05, pgd, 0.2, wider)
    assert "PGD-10 with the larger radius 0.2 left 8 of 8 (100.0 %) test samples correct, more than with 0.05" in text
    assert "which left 0 of 8 (0.0 %)" in text


def test_autoattack_that_is_weaker_than_pgd():
    pgd = tally(measured(Gap(), "pgd", 0.1, 10, 0.004, (0.1, 0.9)))
    strong = tally(measured(Gap(), "aa-fast", 0.1, pixels=(0.1, 0.9)))
    assert pgd.correct <= 2
    assert strong == Tally(8, 8)
    [text] = weaker_than("AA-fast", strong, "PGD-10", pgd, "personalised")
    assert text.startswith("personalised: AA-fast left 8 of 8 (100.0 %) samples correct, more than PGD-10")
    assert f"which left {pgd}" in text
    assert not list(weaker_than("AA-fast", Tally(140, 288), "PGD-20", Tally(130, 289), "global")), "other samples"


@pytest.mark.parametrize(
    ("more", "samples", "clear"),
    [(1, 10, False), (2, 10, True), (2, 200, False), (3, 200, True), (10, 1000, False), (11, 1000, True)],
)
def test_a_difference_counts_from_two_samples_and_more_than_one_percent(more, samples, clear):
    usual, found = Tally(0, samples), Tally(more, samples)
    assert len(list(larger_radius("PGD-20", 0.1, usual, 0.4, found))) == clear
    assert len(list(weaker_than("AutoAttack", found, "PGD-20", usual, "global"))) == clear
    answer = Evaluated(round=1, client=0, weight=1.0, samples=samples, broken={"square": more})
    assert len(list(black_box_alone("AutoAttack", "global", [answer]))) == clear


def test_chance_and_its_noise():
    """10 of 100 are chance; the lower end of Wilson's interval passes 10 % with 18 of 100 (0.1170)."""
    assert not list(beyond_chance("PGD-20", 0.5, Tally(10, 100), 0.1))
    assert not list(beyond_chance("PGD-20", 0.5, Tally(15, 100), 0.1))
    assert list(beyond_chance("PGD-20", 0.5, Tally(18, 100), 0.1))
