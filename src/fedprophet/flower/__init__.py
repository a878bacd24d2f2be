"""FedProphet on Flower: tasks and updates travel as messages, in a simulation or between machines.

Flower is an extra, so nothing outside this package imports it before a run asks for it. Whoever imports this package
first has Flower and Ray stay offline and on this machine, unless the environment says otherwise.
"""

import os

from fedprophet.deploy import OFFLINE, require_flower

CLUSTER = "RAY_ADDRESS"
"""Where this is set, a simulation uses that Ray cluster, which is on other machines too."""
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Despite its name: "0" has Ray listen on loopback alone, on Linux as well."""


def stay_offline() -> None:
    """Set what keeps Flower and Ray from calling home; what the user has set stays."""
    for name, value in OFFLINE.items():
        if not (name == _LOOPBACK and CLUSTER in os.environ):
            os.environ.setdefault(name, value)


require_flower()
stay_offline()
