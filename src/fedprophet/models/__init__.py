"""The models that ship. One is a module here: its builder is registered with `registry.model`."""

from fedprophet.models.registry import FAMILIES, MODELS, ModelSettings, build, family_of
from fedprophet.settings.registry import import_modules

import_modules(__name__, __path__)

__all__ = ["FAMILIES", "MODELS", "ModelSettings", "build", "family_of"]
