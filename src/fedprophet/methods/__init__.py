"""The methods, one file each. A method joins the table here and nowhere else."""

from dataclasses import dataclass
from typing import Any

from fedprophet.errors import ConfigError, unknown
from fedprophet.methods.base import Method, World
from fedprophet.methods.feddf import FedDF
from fedprophet.methods.feddrop import FedDrop
from fedprophet.methods.fedet import FedET
from fedprophet.methods.fedprophet import FedProphet
from fedprophet.methods.fedrbn import FedRBN
from fedprophet.methods.fedrolex import FedRolex
from fedprophet.methods.heterofl import HeteroFL
from fedprophet.methods.jfat import JointTraining


@dataclass(frozen=True)
class Entry:
    """A method and its line in the listing.

    `cascade`: it trains modules that fit the budget, not the whole model. `distills`: its clients train a family of
    models, and the server learns from them on a public set.
    """

    method: type[Method[Any]]
    summary: str
    cascade: bool = False
    distills: bool = False


METHODS: dict[str, Entry] = {
    "fedprophet": Entry(
        FedProphet, "robust cascade of modules, each within the memory budget (the paper's method)", cascade=True
    ),
    "jfat": Entry(JointTraining, "joint adversarial training of the whole model, however much memory that takes"),
    "feddf": Entry(FedDF, "models as large as memory allows; each distils the mean scores of all", distills=True),
    "fedet": Entry(FedET, "models as large as memory allows; a server model distils their consensus", distills=True),
    "heterofl": Entry(HeteroFL, "sub-networks as wide as memory allows, made of the first channels"),
    "feddrop": Entry(FedDrop, "sub-networks as wide as memory allows, made of random channels"),
    "fedrolex": Entry(FedRolex, "sub-networks as wide as memory allows, made of a window that rolls over the channels"),
    "fedrbn": Entry(FedRBN, "whole model; only clients with enough memory attack, norm statistics spread robustness"),
}


def find_method(name: str) -> Entry:
    """Return the method of that name."""
    if name not in METHODS:
        raise ConfigError(unknown("method", name, METHODS))
    return METHODS[name]


__all__ = ["METHODS", "Entry", "Method", "World", "find_method"]
