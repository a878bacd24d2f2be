"""FedDF (Lin et al., 2020), trained adversarially: ensemble distillation for robust model fusion.

Clients train architectures of different size. The server averages each architecture, and then lets every architecture
learn, on the public samples x, the mean of what all client models k of the round say:

    p(x) = softmax(1/K · Σ_k f_k(x)),    minimise KL(p(x) ‖ softmax(f(x)))
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedprophet.client.task import BACKBONE, ClientTask, ClientUpdate
from fedprophet.methods.base import usable
from fedprophet.methods.baseline import Joining
from fedprophet.methods.distillation import Distillation, DistillationState
from fedprophet.server.coordinator import Record


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
        found = usable(tasks, updates, record)
        if not found:
            return None
        logits = yield from self.predictions(state, tasks, found)
        averaged = self.average(state, tasks, found)
        models = yield from self.distil(state, averaged, mean_prediction(logits), record)
        return replace(state, model=models[BACKBONE], models=models)
