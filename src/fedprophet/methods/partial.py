"""Partial training: each client trains a sub-network as wide as its memory allows (HeteroFL, FedDrop, FedRolex).

A client with m bytes available trains the width fraction r = min(m / R_max, 1) of the output channels of every layer
but the last, R_max being what the whole model takes. The three methods differ only in which channels those are. Each
coordinate is averaged over the clients that trained it; what nobody trained stays.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fedprophet.cascade.channel_flow import channels_of
from fedprophet.cascade.channels import ChannelChoice, Channels, Kept, first_channels, kept_channels
from fedprophet.cascade.cost import ChainCost, cost_of
from fedprophet.cascade.narrow import merge_local, narrow_chain, slice_state
from fedprophet.errors import ModelError
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import Resources
from fedprophet.methods.base import Shown
from fedprophet.methods.baseline import Baseline, BaselineState
from fedprophet.methods.world import World, named
from fedprophet.server.aggregate import Usable
from fedprophet.server.coordinator import Conversation, Record
from fedprophet.server.pooling import means_of, others, widened
from fedprophet.server.rules.mean import scatter_average
from fedprophet.server.rules.registry import Join, Parameters

Part = tuple[float, Kept, Parameters]
"""A client's weight, the channels that it kept, and its tensors of them."""
NARROWER = 0.9
"""By how much a sub-network is made narrower until it fits."""
COSTS_KEPT = 1024
"""Costs of sub-networks that are remembered: clients' widths come back."""


def _widths(record: Record) -> str:
    shown = sorted({f"{width:.2f}" for width in record["widths"].values()})
    return "–".join(dict.fromkeys((*shown[:1], *shown[-1:])))


class PartialTraining(Baseline[BaselineState]):
    """Real sub-networks: sent, trained and counted at their own width."""

    state = BaselineState
    refreshes_own = True
    shown = Shown("width", _widths)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        try:
            self.channels = channels_of(world.chain.model, world.cost.input[1:])
        except ModelError as error:
            raise ModelError(f"method {world.config.method} trains narrow sub-networks: {error}") from None
        self._cost_of_widths = lru_cache(COSTS_KEPT)(self._count)

    @abstractmethod
    def choice(self, state: BaselineState, client: int) -> ChannelChoice:
        """Return how a client's channels are chosen in this round."""

    def assign(self, state: BaselineState, available: Mapping[int, Resources], record: Record) -> list[Train]:
        """Cut a sub-network for each client."""
        widths = {client: self._width(resources.memory) for client, resources in available.items()}
        record["widths"] = {str(client): r for client, r in widths.items()}
        tasks = []
        for client, r in widths.items():
            kept = kept_channels(self.channels, r, self.choice(state, client))
            parameters = slice_state(self.channels, kept, state.model)
            tasks.append(replace(self.train_task(state, client), kept_channels=kept, parameters=parameters))
        return tasks

    def poorest(self) -> Iterator[tuple[str, int]]:
        """Yield the sub-network of a client that has no more than R_min."""
        width = self._width(self.world.budget)
        yield f"a sub-network of width {width:.2g}", self._cost_of_widths(self._channels_at(width)).total_memory

    def _width(self, memory: int) -> float:
        """Return the width for a client's memory; where that is limited, one by whose plan it suffices.

        What a sub-network needs is not in proportion to its width.
        """
        width = min(memory / self.world.needs.total_memory, 1.0)
        if not self.world.enforces:
            return width
        while self._cost_of_widths(self._channels_at(width)).total_memory > max(memory, self.world.budget):
            if max(self._channels_at(width)) == 1:
                break
            width *= NARROWER
        return width

    def _channels_at(self, width: float) -> tuple[int, ...]:
        """Return how many channels of each group a sub-network of a width has."""
        return tuple(len(kept) for kept in kept_channels(self.channels, width, first_channels).values())

    def cost(self, task: Train) -> ChainCost:
        """Return the cost of a network that really has the kept channels alone."""
        return self._cost_of_widths(tuple(len(channels) for channels in task.kept_channels.values()))

    def join(self, state: BaselineState, usable: Usable, record: Record) -> Conversation[BaselineState]:
        """Join each coordinate over the clients whose sub-network has it."""
        yield from ()
        parts = [(update.weight, task.kept_channels, update.parameters) for task, update in usable]
        return replace(state, model=self._joined(state.model, parts, pools=self.world.aggregator.pools))

    def expected_layers(self, task: Train) -> Parameters:
        """Return the channels of the client's own layers that have to come with a task's update."""
        return slice_state(self.channels, task.kept_channels, super().expected_layers(task))

    def gathered(self, state: BaselineState, usable: Usable) -> Parameters:
        """Return what clients begin with, each channel from the clients whose sub-network has it."""
        if not self.world.gathers_layers:
            return state.starting
        parts = [
            (update.weight, task.kept_channels, named(update.local, self.expected_layers(task)))
            for task, update in usable
        ]
        return self._joined(state.starting, parts, pools=True)

    def _joined(self, current: Parameters, parts: Sequence[Part], pools: bool) -> Parameters:
        """Join sub-networks by the run's rule, with norm statistics pooled where they are to be (`server.pooling`)."""
        rule, numbers = self.world.aggregator.rule, self.world.aggregator.numbers
        if not pools:
            return self._scattered(rule, current, parts)
        means = [(weight, kept, means_of(part)) for weight, kept, part in parts]
        centred = self._scattered(numbers or rule, current, means)
        centres = named(centred, {name: None for _, _, part in means for name in part})
        wide = [(w, kept, widened(part, slice_state(self.channels, kept, centres))) for w, kept, part in parts]
        spread = self._scattered(numbers or rule, centred, wide)
        return self._scattered(rule, spread, [(weight, kept, others(part)) for weight, kept, part in parts])

    def _scattered(self, rule: Join, current: Parameters, parts: Sequence[Part]) -> Parameters:
        """Join each coordinate by a rule, over the sub-networks that have it."""
        if self.world.aggregator.is_mean:
            return scatter_average(self.channels, current, parts)
        return rule(current, [(weight, _Spread(self.channels, kept, current, part)) for weight, kept, part in parts])

    def _count(self, widths: tuple[int, ...]) -> ChainCost:
        whole, groups = self.world.cost, self.channels.groups
        kept: dict[str, Tensor] = {g: first_channels(groups[g], n) for g, n in zip(groups, widths, strict=True)}
        chain = narrow_chain(self.world.chain, self.channels, kept)
        counted = cost_of(chain, whole.input[1:], whole.batch, whole.classes, whole.copies)
        if self.world.enforces:
            chain.model.to("meta")  # a prediction needs no values, and many of them are kept
        return self.world.needed(counted, chain)


class _Spread(Mapping[str, Tensor]):
    """A sub-network's tensors in the full model's shapes, with NaN where it has no channel; each is made on demand."""

    def __init__(self, channels: Channels, kept: Kept, full: Parameters, part: Parameters) -> None:
        self._channels, self._kept, self._full, self._part = channels, kept, full, part

    def __getitem__(self, name: str) -> Tensor:
        holes = torch.full_like(self._full[name], math.nan, dtype=torch.float64)
        return merge_local(self._channels, self._kept, {name: holes}, {name: self._part[name]})[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._part)

    def __len__(self) -> int:
        return len(self._part)
