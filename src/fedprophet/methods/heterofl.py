"""HeteroFL (Diao et al., 2021), trained adversarially: a client of width r keeps the first ⌊r · C⌋ channels.

The sub-networks are nested, so the first channels are trained by all clients and the last ones by strong clients alone.
"""

from fedprophet.cascade.channels import ChannelChoice, first_channels
from fedprophet.methods.baseline import BaselineState
from fedprophet.methods.partial import PartialTraining
from fedprophet.methods.registry import method


@method("heterofl", "sub-networks as wide as memory allows, made of the first channels", paper="HeteroFL-AT", row=4)
class HeteroFL(PartialTraining):
    """Partial training of the first channels."""

    def choice(self, state: BaselineState, client: int) -> ChannelChoice:
        """Return the first channels, for every client and round."""
        return first_channels
