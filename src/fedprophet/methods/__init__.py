"""The methods, one file each: FedProphet and the paper's baselines."""

from fedprophet.config.choices import CHOICES
from fedprophet.methods.registry import METHODS, MethodEntry, find_method
from fedprophet.settings.registry import import_modules

import_modules(__name__, __path__)
for _name in sorted(METHODS, key=lambda name: METHODS[name].row):
    METHODS[_name] = METHODS.pop(_name)
CHOICES["method"] = lambda: {name: entry.help for name, entry in METHODS.items()}

__all__ = ["METHODS", "MethodEntry", "find_method"]
