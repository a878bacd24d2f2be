"""A fleet of real devices: certificates, keys, the folders a pilot is started from, and what a device can spare."""

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from fedprophet.errors import ConfigError, FedProphetError

OFFLINE: Mapping[str, str] = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""What keeps Flower and Ray from calling home and from installing packages while a run goes on."""
QUICK: Mapping[str, str] = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
"""How often Flower looks, on the same machine, for work to start a process for; a second is its own choice."""


class DeployError(FedProphetError):
    """A pilot's folder, key, certificate or server that is missing, damaged or does not answer."""


def require_flower() -> None:
    """Refuse in a sentence where Flower is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError("a deployment needs Flower, which is not installed. Do: pip install 'fedprophet[flower]'")


def environment(flower_home: Path, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a Flower process: offline unless the user said otherwise, its files in `flower_home`.

    Flower starts its own programs by their bare names, so those of this installation must come first in the path.
    """
    given = os.environ if given is None else given
    path = given.get("PATH", os.defpath).split(os.pathsep)
    programs = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    return {
        **OFFLINE,
        **QUICK,
        **given,
        "FLWR_HOME": str(flower_home),
        "PATH": os.pathsep.join(dict.fromkeys([*programs, *path])),
    }
