"""How a training set is dealt out: every sample goes to exactly one client.

A kind of sharding names the owner of each sample. So the work and the memory follow the number of samples, and clients
that own nothing cost eight bytes each.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field
from torch import Tensor

from fedprophet.errors import ConfigError
from fedprophet.randomness import numpy_generator
from fedprophet.settings.section import Section
from fedprophet.settings.toml import shown
from fedprophet.settings.values import OneOf

Integers = npt.NDArray[np.int64]


class ShardSettings(Section):
    """How the training set is spread over the clients."""

    kind: Annotated[str, OneOf(lambda: {name: kind.help for name, kind in KINDS.items()})] = Field(
        default="skewed", description="How samples are dealt out."
    )
    classes_per_client: int = Field(
        default=2, ge=1, description='"skewed": label-sorted pieces that each client draws.'
    )
    iid_fraction: float = Field(
        default=0.2, ge=0, le=1, description='"skewed": share of the data that is spread evenly.'
    )
    concentration: float = Field(default=0.5, gt=0, description='"dirichlet": the smaller, the more skewed.')

    def idle(self, config: Any) -> Iterator[tuple[str, str]]:
        of_kinds = {"classes_per_client": "skewed", "iid_fraction": "skewed", "concentration": "dirichlet"}
        yield from ((key, f"shards.kind = {shown(self.kind)}") for key, kind in of_kinds.items() if kind != self.kind)


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
    owners = KINDS[settings.kind].owners(deal, numpy_generator(seed, "shards"))
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
    count = held_out(len(indices), validation)
    return shuffled[count:], shuffled[:count]


def held_out(size: int, validation: float) -> int:
    """Return how many samples of a shard are its validation part."""
    return max(min(round(size * validation), size - 1), 0)


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
    """Deal at random, the same number of samples to every client (to within one)."""
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
    """Return owners in equal numbers, to within one; chance decides which clients get one more."""
    return rng.permutation(clients)[np.arange(samples) % clients]


@dataclass(frozen=True)
class Kind:
    """A kind of sharding: a function that names the owner of each sample, and its line of help."""

    owners: Callable[[Deal, np.random.Generator], Integers]
    help: str


KINDS: Mapping[str, Kind] = {
    "skewed": Kind(_skewed, "each client holds mostly a few classes, as in the paper"),
    "iid": Kind(_iid, "evenly spread"),
    "dirichlet": Kind(_dirichlet, "the share of each class is drawn from a Dirichlet distribution"),
}
