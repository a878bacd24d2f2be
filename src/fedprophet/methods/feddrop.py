"""FedDrop (Wen et al., 2022), trained adversarially: a client of width r keeps ⌊r · C⌋ channels drawn at random.

Every client draws anew in every round, so all channels are trained in the long run.
"""

from functools import partial

from fedprophet.cascade.channels import ChannelChoice, random_channels
from fedprophet.methods.baseline import BaselineState
from fedprophet.methods.partial import PartialTraining
from fedprophet.methods.registry import method
from fedprophet.randomness import generator


@method("feddrop", "sub-networks as wide as memory allows, made of random channels", paper="FedDrop-AT", row=5)
class FedDrop(PartialTraining):
    """Partial training of random channels."""

    def choice(self, state: BaselineState, client: int) -> ChannelChoice:
        """Return the client's own draw of this round: group after group from one stream."""
        draw = generator(self.world.config.seed, "channels", state.round, client)
        return partial(random_channels, generator=draw)
