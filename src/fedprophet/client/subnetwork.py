"""A client's sub-network: a workspace that really has the kept channels alone, for partial training."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from fedprophet.cascade.channels import Channels, Kept
from fedprophet.cascade.narrow import merge_local, narrow_chain, slice_state
from fedprophet.client.workspace import LocalLayers, Workspace
from fedprophet.messages.values import Timeline


@dataclass(frozen=True)
class NarrowLayers:
    """The own layers of a client's full model, seen through a sub-network: cut when read, written back when stored.

    So channels that a round leaves out keep the statistics of the last round that had them.
    """

    full: LocalLayers
    channels: Channels
    kept_channels: Kept
    initial: Mapping[str, Tensor]
    """The full model's layers of a client that has not trained yet."""

    def get(self, architecture: str, client: int, timeline: Timeline, before: int) -> Mapping[str, Tensor] | None:
        own = self.full.get(architecture, client, timeline, before)
        return None if own is None else slice_state(self.channels, self.kept_channels, own)

    def put(
        self, architecture: str, client: int, round: int, tensors: Mapping[str, Tensor], timeline: Timeline
    ) -> None:
        """Write the sub-network's part into the layers that the client had before this round."""
        own = self.full.get(architecture, client, timeline, round) or {}
        merged = merge_local(self.channels, self.kept_channels, {**self.initial, **own}, tensors)
        self.full.put(architecture, client, round, merged, timeline)


def narrowed(workspace: Workspace, kept_channels: Kept) -> Workspace:
    """Return the workspace of a sub-network: its model is built with the kept channels, nothing is masked."""
    narrow = replace(workspace, chain=narrow_chain(workspace.chain, workspace.channels, kept_channels))
    narrow.run_by(workspace.plan)
    return narrow
