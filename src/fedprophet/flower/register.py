"""The engine "flower-sim": Flower's simulation. Flower and Ray are imported when a run asks for it, not before."""

import importlib.util

from fedprophet.engines.registry import EngineParts, cores, engine
from fedprophet.errors import ConfigError
from fedprophet.flower import settings as _settings  # noqa: F401 (registers the table [flower])
from fedprophet.flower.offline import stay_offline
from fedprophet.server.coordinator import Engine


@engine("flower-sim", "Flower's simulation on Ray, on this machine or a cluster", single_threaded=True)
def flower_sim(parts: EngineParts) -> Engine:
    """Return the engine of a run in Flower's simulation."""
    if any(importlib.util.find_spec(name) is None for name in ("flwr", "ray")):
        raise ConfigError(
            "engine = \"flower-sim\" needs Flower and Ray, which are not installed: pip install 'fedprophet[flower]'"
        )
    stay_offline()
    from fedprophet.flower.simulation import SimulationEngine

    return SimulationEngine(parts, cores(parts.config))
