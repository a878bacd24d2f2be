"""FedDF (Lin et al., 2020), trained adversarially: ensemble distillation for robust model fusion.

Clients train architectures of different size. The server averages each architecture, and then lets every architecture
learn, on the public samples x, the mean of what all client models k of the round say:

    p(x) = softmax(1/K · Σ_k f_k(x)),    minimise KL(p(x) ‖ softmax(f(x)))
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedprophet.messages.values import BACKBONE
from fedprophet.methods.distillation import Distillation, DistillationSettings, DistillationState
from fedprophet.methods.registry import method
from fedprophet.server.aggregate import Usable
from fedprophet.server.coordinator import Conversation, Record
from fedprophet.server.rules.registry import Parameters


def mean_prediction(logits: Tensor) -> dict[str, Tensor]:
    """Return the target of each sample from scores (models × samples × classes): softmax of the mean score."""
    probabilities = torch.softmax(logits.mean(dim=0), dim=1)
    return {"probabilities": probabilities, "weights": torch.ones(len(probabilities))}


@method(
    "feddf",
    "models as large as memory allows; each distils the mean scores of all",
    paper="FedDF-AT",
    row=2,
    distills=True,
    reads=("distillation.norm_layers",),
)
class FedDF(Distillation):
    """Every architecture distils the mean scores of all client models; the largest one is the result."""

    def join(self, state: DistillationState, usable: Usable, record: Record) -> Conversation[DistillationState]:
        """Average by architecture, then distil into each."""
        logits = yield from self.predictions(state, usable, record)
        models: Mapping[str, Parameters] = self.average(state, usable)
        if self.world.config.of(DistillationSettings).norm_layers == "kept":
            models = {name: {**averaged, **self.own_layers(state, name)} for name, averaged in models.items()}
        if len(logits):
            models = yield from self.distil(state, models, mean_prediction(self.agreed(logits)), record)
        return replace(state, model=models[BACKBONE], models=models)

    def agreed(self, logits: Tensor) -> Tensor:
        """Return scores whose mean is what the client models say together, by the configured rule.

        A rule other than the mean leaves one set of scores. "clip" measures a model's scores from zero.
        """
        if self.world.aggregator.is_mean:
            return logits
        nothing = {"scores": torch.zeros_like(logits[0])}
        joined = self.world.aggregator.join(nothing, [(1.0, {"scores": scores}) for scores in logits])
        return joined["scores"].unsqueeze(0)
