"""Norm statistics measured anew: what each norm layer of a trained model reads, over all of a client's samples."""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedprophet.cascade.atoms import Chain
from fedprophet.cascade.norms import MEAN, VARIANCE, norm_modules
from fedprophet.cascade.trace import flags
from fedprophet.client.captured import Ascent
from fedprophet.client.part import ModelPart
from fedprophet.client.trainer import attacked
from fedprophet.data.examples import Examples
from fedprophet.messages.tasks import Refresh
from fedprophet.randomness import generator


def fresh_statistics(task: Refresh, part: ModelPart, written: Chain, examples: Examples) -> dict[str, Tensor]:
    """Return mean and variance, channel by channel, of what norm layers of the part read; images may be attacked.

    With a `task.layer` that one is measured, behind layers as they are. Else it is all of the task's own, each behind
    layers that normalise by their batch: with statistics that no longer fit, one layer would spoil the next one's.
    The part may run by a plan that has no norm layers in evaluation mode; `written` is the chain as the model has it.
    """
    own = norm_modules(written, task.first, task.last)
    chosen = {task.layer: own[task.layer]} if task.layer else own
    moments = {name: _Moments() for name in chosen}
    # Batches of about one size, of two samples at least: a single one would have none to be normalised with.
    pieces = max(1, min(math.ceil(len(examples) / task.batch), len(examples) // 2))
    batches = torch.arange(len(examples)).tensor_split(pieces)
    for number, positions in enumerate(batches):
        x = part.take(examples.fetch(positions))
        if task.threat is not None:
            labels = examples.labels[positions].to(x.device)
            draw = generator(task.seed, "refreshing attack", task.round, task.client, number)
            x = attacked(part, x, labels, task.threat, draw, len(x), Ascent(part, task.threat, strong_convexity=0.0))
        normalising = _by_batch(() if task.layer or len(positions) < 2 else chosen.values())
        with torch.no_grad(), written.mode(0, task.last, training=False), normalising, _watched(chosen, moments):
            written.run(x, 0, task.last)
    return {
        f"{name}.{ending}": value
        for name, found in moments.items()
        for ending, value in ((MEAN, found.mean.float()), (VARIANCE, found.variance.float()))
    }


@contextmanager
def _by_batch(layers: Collection[nn.Module]) -> Iterator[None]:
    """Let norm layers normalise by their batch within a `with` block, and keep the statistics they have: attacks on
    the batches that follow read these.
    """
    kept = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers()]
    try:
        with flags(layers, training=True):
            yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


@contextmanager
def _watched(layers: Mapping[str, nn.Module], moments: Mapping[str, "_Moments"]) -> Iterator[None]:
    """Let moments see what layers read within a `with` block."""
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, seen=moments[name]: seen.add(inputs[0]))
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class _Moments:
    """Count, mean and squared distance from the mean, in float64, merged batch by batch (Chan et al., 1979)."""

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    squares: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def add(self, x: Tensor) -> None:
        """Count a batch, whose second dimension are the channels. Only its moments leave the device."""
        over = [dim for dim in range(x.ndim) if dim != 1]
        variance, mean = (moment.cpu() for moment in torch.var_mean(x.detach().double(), over, correction=0))
        count = x.numel() // x.shape[1]
        total, apart = self.count + count, mean - self.mean
        self.squares = self.squares + variance * count
        self.squares = self.squares + apart.square() * (self.count * count / total)
        self.mean = self.mean + apart * (count / total)
        self.count = total

    @property
    def variance(self) -> Tensor:
        return self.squares / max(self.count, 1)
