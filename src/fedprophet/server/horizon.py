"""The mean of a model over its last rounds, which may be judged, kept and exported in the place of the last one.

What a cohort sends draws the model to the labels that its clients happen to have, and the next cohort draws it
elsewhere. With a horizon of n rounds, the mean w̄ of the models w follows them by

    w̄_t = w̄_{t−1} + (w_t − w̄_{t−1}) / min(t, n),

t counting the rounds from the one on that trains under the whole attack. It is the mean of all rounds up to the n-th,
and from then on earlier ones fade: a round counts (1 − 1/n) times as much as the one after it. Training goes on from
w itself. So nothing is asked of the clients, and the server holds one model more.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprophet.server.rules.registry import Parameters


@dataclass(frozen=True)
class RunningMean:
    """The mean of so many rounds."""

    parameters: Parameters
    rounds: int = 1

    def after(self, latest: Parameters, horizon: int) -> "RunningMean":
        """Return the mean when a further round is over.

        A parameter that the mean shares with the model, since no round has moved it yet, stays the same tensor.
        """
        rounds = self.rounds + 1
        share = 1.0 / min(rounds, horizon)
        moved = {name: _towards(self.parameters[name], value, share) for name, value in latest.items()}
        return RunningMean(moved, rounds)


def _towards(mean: Tensor, value: Tensor, share: float) -> Tensor:
    """Return the mean moved by a share of the way to a value; what is counted, and not measured, is the latest."""
    if value is mean or not value.is_floating_point():
        return value
    before = mean.to(value.device, torch.float64)
    return torch.lerp(before, value.detach().double(), share).to(value.dtype)
