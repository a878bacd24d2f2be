"""FedProphet on Flower: tasks and updates travel as messages, in a simulation or between machines.

Flower is an extra, so nothing outside this package imports it before a run asks for it. Whoever imports this package
first has Flower and Ray stay offline and on this machine, unless the environment says otherwise.
"""

import os
import shlex
import sys

from fedprophet.deploy import OFFLINE, require_flower
from fedprophet.errors import ConfigError

CLUSTER = "RAY_ADDRESS"
"""Where this is set, a simulation uses that Ray cluster, which is on other machines too."""
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Despite its name: "0" has Ray listen on loopback alone, on Linux as well."""


def stay_offline() -> None:
    """Set what keeps Flower and Ray from calling home; what the user has set stays."""
    for name, value in OFFLINE.items():
        if not (name == _LOOPBACK and CLUSTER in os.environ):
            os.environ.setdefault(name, value)


def expect_startable_python() -> None:
    """Refuse a simulation that would wait in vain: Ray hands the path of Python to a shell as it is, on this machine.

    On a cluster of the user's, workers are started there.
    """
    if CLUSTER not in os.environ and shlex.quote(sys.executable) != sys.executable:
        raise ConfigError(
            f"Ray, on which Flower's simulation runs, cannot start {sys.executable}: it cuts paths at blanks and the "
            "like. Install fedprophet into an environment whose path has none, or use another engine"
        )


require_flower()
stay_offline()
