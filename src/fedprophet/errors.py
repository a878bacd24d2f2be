"""Errors that a user can act on.

Everything a user can get wrong raises a `FedProphetError`, whose text says what is wrong, where, and what to do. The
command line prints that text without a traceback and exits with code 2; any other exception is a defect of ours.
"""

import difflib
from collections.abc import Iterable, Sequence


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
    """A run that cannot continue; its last checkpoint is intact."""


def nearest(given: str, known: Iterable[str]) -> list[str]:
    """Return the known name that is most like the given one, or nothing if none is."""
    return difflib.get_close_matches(given, sorted(known), n=1, cutoff=0.5)


def did_you_mean(guesses: Sequence[str]) -> str:
    """Return the question about the first guess, after a blank; "" if there is none."""
    return f" Did you mean {guesses[0]!r}?" if guesses else ""


def unknown(kind: str, given: str, known: Iterable[str]) -> str:
    """Return the text for an unknown name: the nearest match if there is one, then all that is known."""
    names = sorted(known)
    return f"unknown {kind} {given!r}.{did_you_mean(nearest(given, names))} Known: {', '.join(names) or 'none'}"
