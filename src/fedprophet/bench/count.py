"""How many floating-point operations a task takes, on any engine.

A multiply-accumulate is two operations, so a forward pass takes twice the count of the cost model (`cascade.cost`),
auxiliary head included; what the model counts for norm layers and pools is doubled too (0.5 % of VGG16's). An attack
step is a forward pass and one back to the input, without gradients of weights.
"""

from fedprophet.cascade.cost import ChainCost
from fedprophet.messages.tasks import Evaluate, Train

PER_MULTIPLY_ACCUMULATE = 2
ATTACK_STEP, TRAINING_STEP = 2, 3
"""How many forward passes each counts as."""
RULE = (
    "FLOP: 2 per multiply-accumulate of the cost model; an attack step counts as 2 forward passes, a training step as "
    "3, an evaluated sample as 1 clean, 2 per attack step and 1 attacked"
)


def task_flops(cost: ChainCost, task: Train | Evaluate, samples: int) -> float:
    """Return the FLOPs of a task on `samples` samples: those it trains on, or those it evaluates."""
    steps = 0 if task.threat is None or task.threat.harmless else task.threat.steps
    if isinstance(task, Train):
        first, seen = task.first, sum(task.training.batch_sizes(samples))
        passes = ATTACK_STEP * steps + TRAINING_STEP
    else:
        first, seen = 0, samples
        passes = ATTACK_STEP * steps + (1 if task.threat is None else 2)
    return seen * passes * (PER_MULTIPLY_ACCUMULATE * cost.flops(first, task.last) / cost.batch)
