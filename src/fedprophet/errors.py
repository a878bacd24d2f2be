"""Errors that a user can act on.

Everything a user can get wrong raises a `FedProphetError`, whose text says what is wrong, where, and what to do. The
command line prints that text without a traceback and exits with code 2; any other exception is a defect of ours.
"""

import difflib
from collections.abc import Iterable


class FedProphetError(Exception):
    """The base of every error that is the input's or the machine's fault, not the program's."""


class ConfigError(FedProphetError):
    """A configuration key, preset or command-line value that does not fit."""


class ModelError(FedProphetError):
    """A model that is unknown or that cannot be cut into a chain of atoms."""


class BudgetError(FedProphetError):
    """A memory budget below what the largest atom needs."""


class DataError(FedProphetError):
    """A dataset that is missing, malformed or too small for what is asked of it."""


class CheckpointError(FedProphetError):
    """A run directory or checkpoint that is missing, truncated or made by another configuration."""


class TrainingError(FedProphetError):
    """A run that cannot go on, its last checkpoint intact."""


def unknown(kind: str, given: str, known: Iterable[str]) -> str:
    """Return the text for an unknown name: the nearest match where there is one, then all that is known."""
    names = sorted(known)
    nearest = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown {kind} {given!r}.{hint} Known: {', '.join(names) or 'none'}"
