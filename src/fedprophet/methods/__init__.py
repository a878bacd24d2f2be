"""The methods, one file each. A method joins the table here and nowhere else."""

from dataclasses import dataclass
from typing import Any

from fedprophet.errors import ConfigError, unknown
from fedprophet.methods.base import Method, World
from fedprophet.methods.fedprophet import FedProphet
from fedprophet.methods.jfat import JointTraining


@dataclass(frozen=True)
class Entry:
    """A method and its line in the listing; `cascade`: it trains modules that fit the budget, not the whole model."""

    method: type[Method[Any]]
    summary: str
    cascade: bool = False


METHODS: dict[str, Entry] = {
    "fedprophet": Entry(
        FedProphet, "robust cascade of modules, each within the memory budget (the paper's method)", cascade=True
    ),
    "jfat": Entry(JointTraining, "joint adversarial training of the whole model, however much memory that takes"),
}


def find_method(name: str) -> Entry:
    """Return the method of that name."""
    if name not in METHODS:
        raise ConfigError(unknown("method", name, METHODS))
    return METHODS[name]


__all__ = ["METHODS", "Entry", "Method", "World", "find_method"]
