"""The table of methods. A method is one file of this package: its class, name, help, and what tables show of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fedprophet.methods.base import Method


@dataclass(frozen=True)
class MethodEntry:
    """A method and its line in the listing.

    `paper` is its name in tables, `row` its row in the paper's main table and its place in listings. `cascade`: it
    trains modules that fit the budget, not the whole model. `distills`: its clients train a family of models, and the
    server learns from them on a public set. `reads` are keys, by how they begin, that only methods read which name
    them.
    """

    method: type[Method[Any]]
    help: str
    paper: str
    row: int = 1000
    cascade: bool = False
    distills: bool = False
    reads: tuple[str, ...] = ()


CASCADE_KEYS = (
    "perturbation.",
    "assignment.",
    "measure.",
    "convergence.",
    "memory.model",
    "norm.refresh_after",
    "train.head_gradients",
    "train.warmup_stages",
    "train.strong_convexity",
    "attack.feature_steps",
    "evaluate.before_gate",
)
DISTILLATION_KEYS = ("distillation.",)
"""Keys that only methods of that kind read, by how they begin."""
M = TypeVar("M", bound=type[Method[Any]])
METHODS: dict[str, MethodEntry] = {}
"""Every method by its name in the configuration."""


def reads(name: str, key: str) -> bool:
    """Whether a key says anything to a method."""
    entry = METHODS[name]
    named = {key for other in METHODS.values() for key in other.reads} - set(entry.reads)
    kinds = (*(() if entry.cascade else CASCADE_KEYS), *(() if entry.distills else DISTILLATION_KEYS))
    return not key.startswith((*kinds, *named))


def method(name: str, help: str, **about: Any) -> Callable[[M], M]:
    """Make a class a method that configurations can name; `about` are further fields of its `MethodEntry`."""

    def register(kind: M) -> M:
        METHODS[name] = MethodEntry(kind, help, **about)
        return kind

    return register
