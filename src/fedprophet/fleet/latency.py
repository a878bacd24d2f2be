"""The simulated clock of local training: computation, and access to storage if a workload does not fit in memory.

A device that cannot hold a workload swaps parameters, optimiser state and activations to its storage, in as many
pieces as its memory needs; each access costs a fixed time on top of the transfer. Attack steps keep neither
gradients nor optimiser state of the parameters, so they may fit where the training step does not.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fedprophet.cascade.cost import COPIES, ChainCost
from fedprophet.cascade.heads import BYTES
from fedprophet.errors import ConfigError
from fedprophet.fleet.network import Link, communication_time
from fedprophet.messages.values import Resources

ACCESS_SECONDS = 0.17
"""What one access to storage takes, however little is read or written."""


@dataclass(frozen=True)
class Workload:
    """What a client trains, for one full batch of `batch` samples; an auxiliary head is left out.

    `activations` are the inputs of all layers with a weight, plus the output; `flops` are those of one forward pass;
    `copies` is what the optimiser keeps for each parameter, the parameter itself included.
    """

    parameters: int
    activations: int
    flops: int
    input_elements: int
    batch: int
    copies: int = COPIES["sgd-momentum"]

    def training_bytes(self, samples: int) -> int:
        """Return the memory of a training step on a batch of this size."""
        return BYTES * (self._scaled(self.activations, samples) + self.copies * self.parameters)

    def attack_bytes(self, samples: int) -> int:
        """Return the memory of an attack step: no gradients of parameters, no optimiser state."""
        return BYTES * (self._scaled(self.activations, samples) + self.parameters)

    def step_seconds(self, samples: int, resources: Resources) -> float:
        """Return the computation of one forward and backward pass, which a training or an attack step is."""
        return 2 * self.flops * samples / self.batch / resources.performance

    def step_access_seconds(self, samples: int, resources: Resources) -> float:
        """Return the access to storage of one training step: its input if it fits, else all that is swapped."""
        need, memory = self.training_bytes(samples), resources.memory
        if need <= memory:
            return BYTES * self._scaled(self.input_elements, samples) / resources.bandwidth + ACCESS_SECONDS
        extra = BYTES * 2 * (self.copies - 2) * self.parameters  # optimiser state, read and written
        accesses = _pieces(self.attack_bytes(samples), memory) + _pieces(need, memory)
        return (self._swapped_bytes(samples) + extra) / resources.bandwidth + ACCESS_SECONDS * accesses

    def attack_access_seconds(self, samples: int, resources: Resources) -> float:
        """Return the access to storage of one attack step: none if it fits."""
        need = self.attack_bytes(samples)
        if need <= resources.memory:
            return 0.0
        return self._swapped_bytes(samples) / resources.bandwidth + ACCESS_SECONDS * 2 * _pieces(need, resources.memory)

    def _swapped_bytes(self, samples: int) -> int:
        return BYTES * (2 * self._scaled(self.activations, samples) + 4 * self.parameters)

    def _scaled(self, elements: int, samples: int) -> int:
        return _pieces(elements * samples, self.batch)


@dataclass(frozen=True)
class Time:
    """Simulated seconds of a client's local training in one round; `fits`: nothing had to be swapped in any step."""

    computation: float
    access: float
    fits: bool

    @property
    def total(self) -> float:
        """Both together: what the paper calls training time."""
        return self.computation + self.access


def workload_of(cost: ChainCost, first: int = 0, last: int | None = None) -> Workload:
    """Return the workload of atoms `first` … `last` − 1 of a chain, by default of the whole model."""
    last = len(cost.atoms) if last is None else last
    if not 0 <= first < last <= len(cost.atoms):
        raise ValueError(f"atoms {first} … {last - 1} are no part of a chain of {len(cost.atoms)}")
    return Workload(
        parameters=cost.parameters(first, last),
        activations=cost.activations(first, last) + math.prod(cost.atoms[last - 1].output),
        flops=sum(atom.flops for atom in cost.atoms[first:last]),
        input_elements=math.prod(cost.atoms[first - 1].output if first else cost.input),
        batch=cost.batch,
        copies=cost.copies,
    )


def local_time(workload: Workload, resources: Resources, batches: Sequence[int], attack_steps: int) -> Time:
    """Return the time of one round of local training on batches of these sizes, each attacked before its step.

    Parameters that fit are read once a round; if only the smaller batches fit, once for those.
    """
    _check(resources, batches, attack_steps)
    computation = access = 0.0
    sizes = Counter(batches)
    for samples, count in sizes.items():
        computation += count * (1 + attack_steps) * workload.step_seconds(samples, resources)
        access += count * workload.step_access_seconds(samples, resources)
        access += count * attack_steps * workload.attack_access_seconds(samples, resources)
    fitting = [samples for samples in sizes if workload.training_bytes(samples) <= resources.memory]
    if fitting:
        access += BYTES * workload.parameters / resources.bandwidth
    return Time(computation, access, fits=len(fitting) == len(sizes))


def client_seconds(
    workload: Workload,
    resources: Resources,
    batches: Sequence[int],
    attack_steps: int,
    link: Link,
    download_bytes: int,
    upload_bytes: int,
) -> dict[str, float]:
    """Return what the journal keeps of one client's training task. The paper's time leaves communication out."""
    time = local_time(workload, resources, batches, attack_steps)
    return {
        "computation_s": time.computation,
        "access_s": time.access,
        "communication_s": communication_time(download_bytes, upload_bytes, link),
    }


def _pieces(amount: int, size: int) -> int:
    """Return ⌈amount / size⌉, in whole numbers."""
    return -(-amount // size)


def _check(resources: Resources, batches: Sequence[int], attack_steps: int) -> None:
    for name, value in vars(resources).items():
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"the available {name} of a device must be positive, not {value}")
    if any(samples < 1 for samples in batches):
        raise ConfigError(f"a local batch has at least one sample, not {min(batches)}")
    if attack_steps < 0:
        raise ConfigError(f"the number of attack steps must be at least 0, not {attack_steps}")
