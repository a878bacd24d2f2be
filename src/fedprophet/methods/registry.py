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
    server learns from them on a public set.
    """

    method: type[Method[Any]]
    help: str
    paper: str
    row: int = 1000
    cascade: bool = False
    distills: bool = False


M = TypeVar("M", bound=type[Method[Any]])
METHODS: dict[str, MethodEntry] = {}
"""Every method by its name in the configuration."""


def method(name: str, help: str, **about: Any) -> Callable[[M], M]:
    """Make a class a method that configurations can name; `about` are further fields of its `MethodEntry`."""

    def register(kind: M) -> M:
        METHODS[name] = MethodEntry(kind, help, **about)
        return kind

    return register
