"""FedDF (Lin et al., 2020), trained adversarially: ensemble distillation for robust model fusion.

Clients train architectures of different size. The server averages each architecture, and then lets every architecture
learn, on the public samples x, the mean of what all client models k of the round say:

    p(x) = softmax(1/K · Σ_k f_k(x)),    minimise KL(p(x) ‖ softmax(f(x)))
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedprophet.messages.task import BACKBONE, ClientTask, ClientUpdate
from fedprophet.methods.base import usable
from fedprophet.methods.baseline import Joining
from fedprophet.methods.distillation import Distillation, DistillationState
from fedprophet.server.aggregate import Parameters
from fedprophet.server.coordinator import Record
from fedprophet.server.robust import RULES, mean


def mean_prediction(logits: Tensor) -> dict[str, Tensor]:
    """Return the target of each sample from scores (models × samples × classes): softmax of the mean score."""
    probabilities = torch.softmax(logits.mean(dim=0), dim=1)
    return {"probabilities": probabilities, "weights": torch.ones(len(probabilities))}


class FedDF(Distillation):
    """Every architecture distils the mean scores of all client models; the largest one is the result."""

    def join(
        self, state: DistillationState, tasks: Sequence[ClientTask], updates: Sequence[ClientUpdate], record: Record
    ) -> Joining[DistillationState]:
        """Average by architecture, then distil into each."""
        found = usable(self.world, tasks, updates, record, self.layers)
        if not found:
            return None
        logits = yield from self.predictions(state, tasks, found, record)
        models: Mapping[str, Parameters] = self.average(state, tasks, found)
        if len(logits):
            models = yield from self.distil(state, models, mean_prediction(self.agreed(logits)), record)
        return replace(state, model=models[BACKBONE], models=models)

    def agreed(self, logits: Tensor) -> Tensor:
        """Return scores whose mean is what the client models say together, by the configured rule.

        A rule other than the mean leaves one set of scores. "clip" measures a model's scores from zero.
        """
        if RULES[self.world.config.aggregate.rule] is mean:
            return logits
        nothing = {"scores": torch.zeros_like(logits[0])}
        return self.world.joined(nothing, [(1.0, {"scores": scores}) for scores in logits])["scores"].unsqueeze(0)
