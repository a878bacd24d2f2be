"""Datasets, and how a training set is dealt out to clients.

A dataset that ships is one module here: its loader is registered with `registry.dataset`.
"""

from fedprophet.data.registry import DATASETS, check, find_dataset, load
from fedprophet.settings.registry import import_modules

import_modules(__name__, __path__)

__all__ = ["DATASETS", "check", "find_dataset", "load"]
