"""FedProphet: federated adversarial training of large models by devices with little memory."""

from fedprophet.version import __version__  # isort: skip  (the modules below read it)

from fedprophet.api import TrainedRun, evaluate, export, resume, train
from fedprophet.cascade.atoms import Chain, chain_of, explicit_chain
from fedprophet.cascade.cost import ChainCost, cost_of
from fedprophet.cascade.partition import Module, partition, smallest_budget
from fedprophet.config.config import Config
from fedprophet.config.load import load_config
from fedprophet.data.dataset import Dataset, from_datasets, from_tensors
from fedprophet.errors import FedProphetError
from fedprophet.flower import register as _flower  # noqa: F401 (Flower adds an engine and a table of settings)
from fedprophet.threat import ThreatModel
from fedprophet.tracking import Tracker

__all__ = [
    "Chain",
    "ChainCost",
    "Config",
    "Dataset",
    "FedProphetError",
    "Module",
    "ThreatModel",
    "Tracker",
    "TrainedRun",
    "__version__",
    "chain_of",
    "cost_of",
    "evaluate",
    "explicit_chain",
    "export",
    "from_datasets",
    "from_tensors",
    "load_config",
    "partition",
    "resume",
    "smallest_budget",
    "train",
]
