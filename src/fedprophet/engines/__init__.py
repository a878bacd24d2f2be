"""Engines carry tasks to clients and bring their answers back. Every module here that defines one registers it."""

from fedprophet.config.choices import CHOICES
from fedprophet.engines.registry import (
    ENGINES,
    EngineParts,
    chosen_engine,
    cores,
    expect_engine,
    make_engine,
    place_of,
    threads_of,
)
from fedprophet.settings.registry import import_modules

import_modules(__name__, __path__)
CHOICES["engine"] = lambda: {name: entry.line for name, entry in sorted(ENGINES.items())}

__all__ = ["ENGINES", "EngineParts", "chosen_engine", "cores", "expect_engine", "make_engine", "place_of", "threads_of"]
