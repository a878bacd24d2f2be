"""Values that tasks and answers are made of."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

SERVER = -1
"""The client id of the server's own data: work on the test set or the public set goes through the engine too."""
BACKBONE = "backbone"
"""The architecture of the run's own model. Other models that clients train are called by their model's name."""


@dataclass(frozen=True)
class Resources:
    """What a device has available right now: bytes of memory, FLOP/s, and bytes/s to its storage."""

    memory: int
    performance: float
    bandwidth: float


def batch_sizes(samples: int, batch: int, iterations: int) -> tuple[int, ...]:
    """Return the sizes of a client's local batches in a round: whole passes, each one's last batch may be smaller."""
    if samples < 1:
        return ()
    full, rest = divmod(samples, batch)
    a_pass = (batch,) * full + ((rest,) if rest else ())
    return (a_pass * math.ceil(iterations / len(a_pass)))[:iterations]


@dataclass(frozen=True)
class LocalTraining:
    """The hyper-parameters of one client's local training (Eq. 9 and 13)."""

    iterations: int
    batch: int
    learning_rate: float
    momentum: float
    weight_decay: float
    strong_convexity: float
    """The paper's mu. It acts on the feature before an auxiliary head; the backbone's own classifier has none."""
    summed_heads: bool = False
    """Whether an auxiliary head steps along the sum of the gradients of all iterations so far."""
    fixed_statistics: bool = False
    """Whether norm layers normalise with the statistics they have, which then stay as they are."""
    proximal: float = 0.0
    """FedProx's μ: the weight of ½ ‖w − w₀‖² in the loss, w₀ being the shared parameters that training starts from."""
    boundary_weights: bool = False
    """Whether attacked samples near the decision boundary weigh more (`client.boundary`)."""
    consistency: float = 0.0
    """β: the weight of KL(p ‖ q) in the loss, from the clean predictions that training starts with to the attacked."""

    def batch_sizes(self, samples: int) -> tuple[int, ...]:
        """Return the sizes of the batches that so many samples are trained in, one for each iteration."""
        return batch_sizes(samples, self.batch, self.iterations)


@dataclass(frozen=True)
class Timeline:
    """Which versions of a client's own layers count: a version is the round that made it.

    When a stage ends, its best round is restored: the rounds after it, up to the end of the stage, are `discarded`.
    Versions older than the newest one at or before `floor` can never be asked for again.
    """

    discarded: tuple[tuple[int, int], ...] = ()
    floor: int = 0

    def newest(self, versions: Mapping[int, object], before: int) -> int | None:
        """Return the newest version that counts, made before round `before`; None where there is none."""
        alive = (v for v in versions if v < before and not any(after < v <= last for after, last in self.discarded))
        return max(alive, default=None)


EVERY_VERSION = Timeline()


@dataclass(frozen=True)
class FrozenModule:
    """A frozen module: its atoms `first` … `last` − 1, and the hash of its shared parameters."""

    first: int
    last: int
    digest: str
