"""Logs of a run as it is trained: to TensorBoard, MLflow, Weights & Biases, or a tracker of the user's own."""

from fedprophet.settings.registry import import_modules
from fedprophet.tracking.registry import TRACKERS, TrackedRun, Tracker, open_trackers
from fedprophet.tracking.telling import Tracking

import_modules(__name__, __path__)

__all__ = ["TRACKERS", "TrackedRun", "Tracker", "Tracking", "open_trackers"]
