"""Local iterations that tests of plans and of memory share."""

import torch
from torch import Tensor, nn

from fedprophet.cascade.atoms import Chain, explicit_chain
from fedprophet.cascade.cost import ChainCost, cost_of
from fedprophet.client.captured import ascent_of
from fedprophet.client.iteration import LocalIteration, iteration_of
from fedprophet.client.memory_plan import PLAIN, MemoryPlan, Step
from fedprophet.client.part import ModelPart
from fedprophet.client.trainer import perturb
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import LocalTraining
from fedprophet.threat import ThreatModel, input_threat

HYPER = LocalTraining(1, 8, learning_rate=0.1, momentum=0.9, weight_decay=1e-4, strong_convexity=1e-5)
STEPS = [MemoryPlan(step=step) for step in (Step.WHOLE, Step.FUSED, Step.ATOMS)] + [
    MemoryPlan(step=Step.PIECES, piece=piece) for piece in (4, 2)
]
THREAT = input_threat(0.1, 0.05, 3)


def block(channels: int, outputs: int, **options: bool) -> nn.Sequential:
    norm = nn.BatchNorm2d(outputs, **options)
    return nn.Sequential(nn.Conv2d(channels, outputs, 3, padding=1), norm, nn.ReLU(inplace=True))


def network(**options: bool) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (block(3, 32, **options), block(32, 32, **options), nn.MaxPool2d(2), block(32, 64, **options))
    return nn.Sequential(*blocks, nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)))


def perturbed(
    task: Train, part: ModelPart, x: Tensor, labels: Tensor, plan: MemoryPlan = PLAIN, withstood: Tensor | None = None
) -> Tensor:
    """Return a batch as the first iteration of a task attacks it."""
    ascend = ascent_of(part, task.threat, task.training.strong_convexity, plan.attack, plan.attack_sliced)
    return perturb(task, part, x, labels, 0, plan, ascend, withstood)


def iteration_on(model: nn.Sequential | None = None, threat: ThreatModel | None = THREAT) -> LocalIteration:
    chain = explicit_chain(model or network())
    return LocalIteration(ModelPart(chain, 0, len(chain), None), (3, 32, 32), HYPER, threat)


SHAPE = (3, 16, 16)
"""What a small chain reads."""


def small_chain() -> Chain:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()) for i, o in ((3, 16), (16, 16))
    ]
    return explicit_chain(nn.Sequential(*blocks, nn.Sequential(nn.Flatten(), nn.Linear(16 * 256, 10))))


def paper_cost(chain: Chain) -> ChainCost:
    return cost_of(chain, SHAPE, HYPER.batch, 10)


def planned_iteration(chain: Chain) -> LocalIteration:
    """Return the iteration on the whole of a small chain."""
    return iteration_of(chain, paper_cost(chain), 0, len(chain), HYPER)
