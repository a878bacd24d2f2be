"""How many floating-point operations a task takes, on any engine.

A multiply-accumulate is two operations, so a forward pass takes twice the count of the cost model (`cascade.cost`),
auxiliary head included; what the model counts for norm layers and pools is doubled too (0.5 % of VGG16's). An attack
step counts as 2 forward passes: forward, and back to the input without gradients of weights. A training step counts as
3. Evaluating a sample is one forward pass for the clean prediction and, under a threat, its attack steps and one more
for the attacked prediction.
"""

from fedprophet.cascade.cost import ChainCost
from fedprophet.fleet.latency import batch_sizes
from fedprophet.messages.tasks import Evaluate, Train

PER_MULTIPLY_ACCUMULATE = 2
ATTACK_STEP, TRAINING_STEP, ANSWER = 2, 3, 1
"""How many forward passes each counts as."""

RULE = (
    "FLOP: 2 per multiply-accumulate of the cost model; an attack step counts as 2 forward passes, a training step as "
    "3, an evaluated sample as 1 clean, 2 per attack step and 1 attacked"
)


def task_flops(cost: ChainCost, task: Train | Evaluate, samples: int) -> float:
    """Return the FLOPs of a task on `samples` samples: those it trains on, or those it evaluates."""
    steps = 0 if task.threat is None or task.threat.harmless else task.threat.steps
    if isinstance(task, Train):
        batches = batch_sizes(samples, task.training.batch, task.training.iterations)
        return sum(batches) * (ATTACK_STEP * steps + TRAINING_STEP) * _forward(cost, task.first, task.last)
    answers = ANSWER if task.threat is None else 2 * ANSWER
    return samples * (ATTACK_STEP * steps + answers) * _forward(cost, 0, task.last)


def _forward(cost: ChainCost, first: int, last: int) -> float:
    """Return the FLOPs of a forward pass of one sample through atoms `first` … `last` − 1."""
    return PER_MULTIPLY_ACCUMULATE * cost.flops(first, last) / cost.batch
