"""FedRolex (Alam et al., 2022), trained adversarially: a window of ⌊r · C⌋ channels that rolls on with the rounds.

In round t it starts at channel t mod C and wraps around, so all channels are trained equally often.
"""

from functools import partial

from fedprophet.cascade.channels import ChannelChoice, rolling_channels
from fedprophet.methods.baseline import BaselineState
from fedprophet.methods.partial import PartialTraining
from fedprophet.methods.registry import method


@method(
    "fedrolex",
    "sub-networks as wide as memory allows, made of a window that rolls over the channels",
    paper="FedRolex-AT",
    row=6,
)
class FedRolex(PartialTraining):
    """Partial training of a rolling window of channels."""

    def choice(self, state: BaselineState, client: int) -> ChannelChoice:
        """Return the window of this round, the same for all clients."""
        return partial(rolling_channels, start=state.round)
