"""The table of methods. A method is one file of this package: its class, name, help, and what tables show of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fedprophet.errors import ConfigError, unknown
from fedprophet.methods.base import Method, Shown


@dataclass(frozen=True)
class MethodEntry:
    """A method and its line in the listing.

    `paper` is its name in tables, `row` its row in the paper's main table. `cascade`: it trains modules that fit the
    budget, not the whole model. `distills`: its clients train a family of models, and the server learns from them on a
    public set.
    """

    method: type[Method[Any]]
    help: str
    paper: str
    row: int = 1000
    cascade: bool = False
    distills: bool = False

    @property
    def shown(self) -> Shown | None:
        """What the progress display shows of this method's rounds in addition to the common facts."""
        return self.method.shown


M = TypeVar("M", bound=type[Method[Any]])
METHODS: dict[str, MethodEntry] = {}
"""Every method by its name in the configuration, in the order of the paper's main table."""


def method(name: str, help: str, **about: Any) -> Callable[[M], M]:
    """Make a class a method that configurations can name; `about` are further fields of its `MethodEntry`."""

    def register(kind: M) -> M:
        METHODS[name] = MethodEntry(kind, help, **about)
        return kind

    return register


def find_method(name: str) -> MethodEntry:
    """Return the method of that name."""
    if name not in METHODS:
        raise ConfigError(unknown("method", name, METHODS))
    return METHODS[name]
