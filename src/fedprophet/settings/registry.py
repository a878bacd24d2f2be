"""Registries: tables of names that the modules of a package fill when they are imported."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from fedprophet.errors import unknown


def import_modules(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, so that each registers what it defines."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


def keyword_options(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's keyword-only arguments."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def unknown_options(owner: str, given: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """Yield a line for each option that its owner does not have."""
    for option in given:
        if option not in known:
            yield unknown(f"option of {owner}", option, known)
