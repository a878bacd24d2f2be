"""Keeps Flower and Ray offline and on this machine, unless the environment says otherwise."""

import os
import shlex
import sys

from fedprophet.deploy import OFFLINE
from fedprophet.errors import ConfigError

CLUSTER = "RAY_ADDRESS"
"""If this is set, a simulation uses that Ray cluster, on other machines as well."""
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Despite its name: "0" makes Ray listen on loopback only, on Linux too."""


def stay_offline() -> None:
    """Set what keeps Flower and Ray from calling home; what the user has set stays. Call it before importing them."""
    for name, value in OFFLINE.items():
        if not (name == _LOOPBACK and CLUSTER in os.environ):
            os.environ.setdefault(name, value)


def expect_startable_python() -> None:
    """Refuse a simulation that would wait forever: Ray passes the path of Python to a shell without quoting it.

    On a cluster of the user's, workers are started there.
    """
    if CLUSTER not in os.environ and shlex.quote(sys.executable) != sys.executable:
        raise ConfigError(
            f"Ray, on which Flower's simulation runs, cannot start {sys.executable}: it cuts paths at blanks and other "
            "special characters. Install fedprophet into an environment whose path has none, or use another engine"
        )
