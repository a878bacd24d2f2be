"""The rules that join what clients have trained, one file each. All but the mean limit what a few bad clients can do.

As in Eq. 16 and 17, each parameter is joined over the clients that sent it, and what nobody sent stays. A coordinate
that is NaN was not sent: a sub-network leaves such holes for the channels that it does not have. Rules compute in
float64, in the order given, so that the result depends on nothing but its inputs.
"""

from fedprophet.server.rules.registry import RULES
from fedprophet.settings.registry import import_modules

import_modules(__name__, __path__)

__all__ = ["RULES"]
