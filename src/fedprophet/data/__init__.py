"""Datasets, and how a training set is dealt out to clients.

A dataset that ships is one module here: its loader is registered with `registry.dataset`.
"""

from fedprophet.data.dataset import ClientData, Dataset, Examples, LocalExamples, from_datasets, from_tensors
from fedprophet.data.registry import DATASETS, DataSettings, Findings, check, find_dataset, load
from fedprophet.data.shards import KINDS, Shards, ShardSettings, make_shards, split
from fedprophet.settings.registry import import_modules

import_modules(__name__, __path__)

__all__ = [
    "DATASETS",
    "KINDS",
    "ClientData",
    "DataSettings",
    "Dataset",
    "Examples",
    "Findings",
    "LocalExamples",
    "ShardSettings",
    "Shards",
    "check",
    "find_dataset",
    "from_datasets",
    "from_tensors",
    "load",
    "make_shards",
    "split",
]
