"""The methods, one file each: FedProphet and the paper's baselines."""

from fedprophet.config.choices import CHOICES, READS
from fedprophet.methods.registry import METHODS, MethodEntry, reads
from fedprophet.settings.registry import import_modules

import_modules(__name__, __path__)
CHOICES["method"] = lambda: {name: METHODS[name].help for name in sorted(METHODS, key=lambda name: METHODS[name].row)}
READS["method"] = reads

__all__ = ["METHODS", "MethodEntry", "reads"]
