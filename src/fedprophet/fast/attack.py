"""PGD on stacks of clients: the same steps as `attacks.pgd`, with gradients that are written out."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedprophet.fast.draws import Draws
from fedprophet.fast.folded import FoldedStack
from fedprophet.fast.kernels import TINY, Ball, sample_norms
from fedprophet.threat import ThreatModel

Gradient = Callable[[Tensor], Tensor]
"""Of an objective, for inputs as the first block reads them; perhaps still spread (`FoldedStack.spreads`)."""


class StackAttack:
    """A threat whose radius and step may change between uses of a captured graph."""

    def __init__(self, threat: ThreatModel, device: torch.device) -> None:
        low, high = threat.bounds
        self.steps = threat.steps
        self.ball = Ball(threat.norm, torch.empty((), device=device), torch.empty((), device=device), low, high)

    def set(self, threat: ThreatModel) -> None:
        """Take over radius and step."""
        self.ball.radius.fill_(threat.radius)
        self.ball.step.fill_(threat.step)

    def __call__(self, gradient: Gradient, clean: Tensor, network: FoldedStack, draws: Draws) -> Tensor:
        """Return inputs (K×N×H×W×C) perturbed so that the objective is high, as the first block reads them."""
        perturbed = self.start(clean, draws)
        scaled = network.scaling(clean.device)(perturbed)
        for _ in range(self.steps):
            self.climb(gradient, clean, perturbed, scaled, network)
        return scaled

    def start(self, clean: Tensor, draws: Draws) -> Tensor:
        """Return inputs moved somewhere in the ball."""
        ball = self.ball
        return (clean + STARTS[ball.norm](clean, ball, draws)).clamp_(ball.low, ball.high)

    def climb(self, gradient: Gradient, clean: Tensor, perturbed: Tensor, scaled: Tensor, network: FoldedStack) -> None:
        """Move perturbed inputs one step up the gradient, in place, and what the first block reads with them."""
        scaling = network.scaling(clean.device)
        network.kernels.ascend(perturbed, scaled, clean, gradient(scaled), self.ball, scaling, network.spreads)


def _linf_start(clean: Tensor, ball: Ball, draws: Draws) -> Tensor:
    return (2 * draws.uniform("start", tuple(clean.shape)) - 1) * ball.radius


def _l2_start(clean: Tensor, ball: Ball, draws: Draws) -> Tensor:
    direction = draws.normal("direction", tuple(clean.shape))
    share = draws.uniform("share", (*clean.shape[:2], 1, 1, 1))
    return direction / (sample_norms(direction) + TINY) * ball.radius * share


STARTS = {"linf": _linf_start, "l2": _l2_start}
