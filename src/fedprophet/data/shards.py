"""How a training set is dealt out: every sample goes to exactly one client.

A kind of sharding names the owner of each sample. So the work and the memory follow the number of samples, and clients
that own nothing cost eight bytes each.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedprophet.errors import ConfigError, unknown
from fedprophet.randomness import numpy_generator

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShardSettings:
    """How to deal. `classes_per_client` and `iid_fraction` belong to `skewed`, `concentration` to `dirichlet`."""

    kind: str = "skewed"
    classes_per_client: int = 2
    iid_fraction: float = 0.2
    concentration: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(unknown("kind of shards", self.kind, KINDS))
        if self.classes_per_client < 1:
            raise ConfigError(f"classes_per_client must be at least 1, not {self.classes_per_client}")
        if not 0 <= self.iid_fraction <= 1:
            raise ConfigError(f"iid_fraction must be between 0 and 1, not {self.iid_fraction}")
        if not (self.concentration > 0 and math.isfinite(self.concentration)):
            raise ConfigError(f"concentration must be a positive number, not {self.concentration}")


@dataclass(frozen=True, eq=False)
class Shards:
    """Who owns what: client k owns the samples `indices[offsets[k] : offsets[k + 1]]`, in ascending order."""

    indices: Integers
    offsets: Integers

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Integers:
        return np.diff(self.offsets)

    def client(self, client: int) -> Integers:
        """Return the samples of one client, as a read-only view."""
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        return self.indices[self.offsets[client] : self.offsets[client + 1]]


def make_shards(
    labels: Tensor | Integers, classes: int, clients: int, settings: ShardSettings, seed: int = 0
) -> Shards:
    """Deal the samples with these labels to clients 0 … clients − 1."""
    if clients < 1:
        raise ConfigError(f"the number of clients must be at least 1, not {clients}")
    deal = Deal(np.asarray(labels, dtype=np.int64), classes, clients, settings)
    owners = KINDS[settings.kind](deal, numpy_generator(seed, "shards"))
    indices = np.argsort(owners, kind="stable")
    offsets = np.zeros(clients + 1, dtype=np.int64)
    np.cumsum(np.bincount(owners, minlength=clients), out=offsets[1:])
    for array in (indices, offsets):
        array.setflags(write=False)
    return Shards(indices, offsets)


def split(indices: Integers, seed: int, client: int, validation: float = 0.2) -> tuple[Integers, Integers]:
    """Split a client's own samples into training and validation, in an order shuffled once for the run.

    The validation part is rounded to the nearest, but a client that owns anything has something to train on.
    """
    if not 0 <= validation < 1:
        raise ConfigError(f"the validation part of a shard must be at least 0 and below 1, not {validation}")
    shuffled = indices[numpy_generator(seed, "split", client).permutation(len(indices))]
    held_out = max(min(round(len(indices) * validation), len(indices) - 1), 0)
    return shuffled[held_out:], shuffled[:held_out]


@dataclass(frozen=True, eq=False)
class Deal:
    """What a kind of sharding works on."""

    labels: Integers
    classes: int
    clients: int
    settings: ShardSettings


def _skewed(deal: Deal, rng: np.random.Generator) -> Integers:
    """Deal as the paper's runs do: most of the data in pieces of few classes, the rest i.i.d.

    A random 1 − iid_fraction of the samples is sorted by label and cut into classes_per_client · clients pieces of
    equal size (to within one), of which each client draws classes_per_client.
    """
    each, clients = deal.settings.classes_per_client, deal.clients
    if each > deal.classes:
        raise ConfigError(
            f"shards.classes_per_client is {each}, but the dataset has only {deal.classes} classes: "
            f"choose at most {deal.classes}"
        )
    spread, sorted_part = np.split(
        rng.permutation(len(deal.labels)), [round(deal.settings.iid_fraction * len(deal.labels))]
    )
    owners = np.empty(len(deal.labels), dtype=np.int64)
    owners[spread] = _evenly(len(spread), clients, rng)
    ordered = sorted_part[np.argsort(deal.labels[sorted_part], kind="stable")]
    pieces = each * clients
    # Piece j holds the positions ⌊j · n / pieces⌋ … ⌊(j + 1) · n / pieces⌋ − 1; this is its inverse.
    piece = ((np.arange(len(ordered)) + 1) * pieces - 1) // max(len(ordered), 1)
    owners[ordered] = rng.permutation(pieces)[piece] // each
    return owners


def _iid(deal: Deal, rng: np.random.Generator) -> Integers:
    """Deal at random, the same number of samples to everybody (to within one)."""
    owners = np.empty(len(deal.labels), dtype=np.int64)
    owners[rng.permutation(len(deal.labels))] = _evenly(len(deal.labels), deal.clients, rng)
    return owners


def _dirichlet(deal: Deal, rng: np.random.Generator) -> Integers:
    """Deal each class in proportions over the clients that are drawn from Dirichlet(concentration).

    The class is cut at the cumulated proportions, so a count is its proportion to within one. The order of clients
    along the cuts is drawn for each class: with more clients than samples the same few would get one of every class.
    """
    owners = np.empty(len(deal.labels), dtype=np.int64)
    for label in range(deal.classes):
        samples = rng.permutation(np.flatnonzero(deal.labels == label))
        edges = np.cumsum(rng.dirichlet(np.full(deal.clients, deal.settings.concentration)))
        middles = (np.arange(len(samples)) + 0.5) / max(len(samples), 1)
        places = np.minimum(np.searchsorted(edges, middles, side="right"), deal.clients - 1)
        owners[samples] = rng.permutation(deal.clients)[places]
    return owners


def _evenly(samples: int, clients: int, rng: np.random.Generator) -> Integers:
    """Return owners in equal numbers, to within one; chance says who gets one more."""
    return rng.permutation(clients)[np.arange(samples) % clients]


KINDS: Mapping[str, Callable[[Deal, np.random.Generator], Integers]] = {
    "skewed": _skewed,
    "iid": _iid,
    "dirichlet": _dirichlet,
}
