"""A fleet of real devices: certificates, keys, the folders of a pilot, and a device's available resources."""

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
"""Keeps Flower and Ray from calling home, and from installing packages during a run."""
QUICK: Mapping[str, str] = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
"""How often, in seconds, Flower looks for work to start a process for; its own choice is 1."""


class DeployError(FedProphetError):
    """A pilot's folder, key, certificate or server is missing, damaged or does not answer."""


def require_flower() -> None:
    """Raise ConfigError if Flower is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError("a deployment needs Flower, which is not installed: pip install 'fedprophet[flower]'")


def environment(flower_home: Path, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a Flower process: offline by default, with its files in `flower_home`.

    Flower starts its own programs by name, so this installation's programs must come first in the path.
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
