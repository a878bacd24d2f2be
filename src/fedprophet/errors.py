"""Errors that a user can act on.

Everything a user can get wrong raises a `FedProphetError`, whose text says what is wrong, where, and what to do. The
command line prints that text without a traceback and exits with code 2; any other exception is a defect of ours.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

_NO_MEMORY = re.compile("can't allocate memory|not enough memory|out of memory|size calculation overflowed")
_ASKED = re.compile(r"to allocate ([0-9.]+ \w+)")
"""How much memory could not be had, as torch and NumPy tell it."""


class FedProphetError(Exception):
    """The base of every error that is the input's or the machine's fault, not the program's."""


class ConfigError(FedProphetError):
    """A configuration key, preset or command-line value that does not fit."""


class ModelError(FedProphetError):
    """A model that is unknown or that cannot be cut into a chain of atoms."""


class BudgetError(FedProphetError):
    """A memory budget below what something needs that is to be trained, or training that takes more than it may."""


class DataError(FedProphetError):
    """A dataset that is missing, malformed or too small for what is asked of it."""


class CheckpointError(FedProphetError):
    """A run directory or checkpoint that is missing, truncated or made by another configuration."""


class TrainingError(FedProphetError):
    """A run that cannot continue; its last checkpoint is intact."""


class OutOfMemoryError(TrainingError):
    """The machine's memory does not suffice."""


class TemporaryFileError(TrainingError):
    """What stands in for memory, a temporary file, cannot be written."""


@contextmanager
def memory_for(work: str, advice: str) -> Iterator[None]:
    """Raise OutOfMemoryError where the memory does not suffice: what it was for, and what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        asked = _ASKED.search(str(error))
        amount = f" ({asked[1]} could not be had)" if asked else ""
        raise OutOfMemoryError(f"out of memory while {work}{amount}. {advice}") from error


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
