"""Decision-boundary based federated adversarial training (DBFAT; Zhang et al., AAAI 2023): weights, and a draw back.

The loss of a batch of B attacked samples x̃_i with labels y_i at an exit's class scores f (the mu term of Eq. 9 aside):

    L = 1/B Σ_i [ w_i · CE(f(x̃_i), y_i) + β · KL(p_i ‖ softmax f(x̃_i)) ]

Weights. κ_i of the K steps of the attack began where the sample was still classified rightly. A sample that the attack
leads over the decision boundary early is near it, and weighs more. DBFAT weighs by nearness to the boundary; this
function of the steps is that of GAIRAT (Zhang et al., ICLR 2021):

    ω_i = (1 + tanh(λ + 5 (1 − 2 κ_i / K))) / 2        w_i = ω_i / (1/B Σ_j ω_j)

They are constants of a step. κ is counted by the scores of which the attack takes its gradients, so it costs no pass of
its own, and not those of where the attack ends. Where nothing is attacked all samples weigh the same.

The draw. p_i are the probabilities of the part as the server sent it, in evaluation mode, on the clean sample. What is
drawn are the local ones on the attacked sample: a label that the server's model believes in must not get lost on the
client (the direction of the KL that distillation has). The attack does not see this term.

Where labels are calibrated, all scores are those with the client's prior.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprophet.client.aims import Aim, Drawn, Labels, Weighted
from fedprophet.client.inputs import Inputs
from fedprophet.client.memory_plan import MemoryPlan
from fedprophet.client.part import ModelPart
from fedprophet.client.sliced import by_slices
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import LocalTraining
from fedprophet.storage.mapped import empty_in_file
from fedprophet.threat import ThreatModel

SHIFT = -1.0
"""λ, as in GAIRAT. The lower it is, the fewer samples have most of the weight."""


@dataclass(frozen=True)
class Counted:
    """The aim of an attack that also counts κ: `withstood` grows by one where the scores are right."""

    labels: Tensor
    withstood: Tensor

    def __call__(self, scores: Tensor) -> Tensor:
        self.withstood.add_(scores.detach().argmax(dim=1) == self.labels)
        return Labels(self.labels)(scores)

    def __getitem__(self, samples: slice) -> "Counted":
        return Counted(self.labels[samples], self.withstood[samples])


def counter(training: LocalTraining, threat: ThreatModel | None, labels: Tensor) -> Tensor | None:
    """Return zeros that an attack can count κ in; None where nothing depends on it, or nothing is attacked."""
    if not training.boundary_weights or threat is None or threat.harmless:
        return None
    return torch.zeros_like(labels)


def boundary_weights(withstood: Tensor, steps: int) -> Tensor:
    """Return w, given κ and K."""
    # (1 + tanh x) / 2, without what is lost where tanh x is close to −1.
    weights = torch.sigmoid(2 * (SHIFT + 5 * (1 - 2 * withstood / steps)))
    return weights / weights.mean()


def aim_of(
    training: LocalTraining, threat: ThreatModel | None, labels: Tensor, withstood: Tensor | None, server: Tensor | None
) -> Aim:
    """Return what a whole batch is trained towards, given κ and p of its samples, where they are asked for."""
    aim: Aim = Labels(labels)
    if withstood is not None and threat is not None:
        aim = Weighted(aim, boundary_weights(withstood, threat.steps))
    return aim if server is None else Drawn(aim, server, training.consistency)


def server_probabilities(task: Train, part: ModelPart, inputs: Inputs, plan: MemoryPlan) -> Tensor | None:
    """Return p of every sample, before anything is trained; None where nothing is drawn to it.

    Where memory is limited the rows lie in a file, as all does that is not in training, and as many samples are
    computed at a time as the plan has room for: as many as it attacks or, without an attack, as its step sees.
    """
    if not task.training.consistency:
        return None
    size = plan.attack or (plan.piece if task.threat is None and not part.mixes_samples else 0) or task.training.batch
    kept: Tensor | None = None
    with torch.no_grad(), part.still(), by_slices(plan.sliced or plan.attack_sliced):
        for positions in torch.split(torch.arange(len(inputs)), size):
            rows = part.logits(inputs[positions]).softmax(dim=1)
            if kept is None:
                shape = len(inputs), *rows.shape[1:]
                kept = empty_in_file(shape, rows.dtype) if task.memory else rows.new_empty(shape)
            kept[positions] = rows.to(kept.device)
    return kept
