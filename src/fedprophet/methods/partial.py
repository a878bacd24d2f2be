"""Partial training: each client trains a sub-network as wide as its memory allows (HeteroFL, FedDrop, FedRolex).

A client that can spare m bytes trains the width fraction r = min(m / R_max, 1) of the output channels of every layer
but the last, R_max being what the whole model takes. The three methods differ in which channels those are, and in
nothing else. Each coordinate is averaged over the clients that trained it; what nobody trained stays.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fedprophet.cascade.channels import Channels, Kept, Rule, channels_of, first_channels, kept_channels
from fedprophet.cascade.cost import ChainCost, cost_of
from fedprophet.cascade.narrow import merge_local, narrow_chain, scatter_average, slice_state
from fedprophet.errors import ModelError
from fedprophet.messages.task import ClientTask, ClientUpdate, Resources
from fedprophet.methods.base import World, usable
from fedprophet.methods.baseline import Baseline, BaselineState, Joining
from fedprophet.server.aggregate import Parameters
from fedprophet.server.coordinator import Record
from fedprophet.server.robust import RULES, mean

COSTS_KEPT = 1024
"""Costs of sub-networks that are remembered: clients' widths come back."""


class PartialTraining(Baseline[BaselineState]):
    """Real sub-networks: sent, trained and counted at their own width."""

    state = BaselineState

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.channels = self._find_channels()
        """The channels that sub-networks are cut along."""
        self._cost_of_widths = lru_cache(COSTS_KEPT)(self._count)

    def rule(self, state: BaselineState, client: int) -> Rule:
        """Return how a client's channels are chosen in this round."""
        raise NotImplementedError

    def width(self, resources: Resources) -> float:
        """Return r, the fraction of the channels that a client can train."""
        return min(resources.memory / self.world.cost.total_memory, 1.0)

    def assign(self, state: BaselineState, available: Mapping[int, Resources], record: Record) -> list[ClientTask]:
        """Cut a sub-network for each client."""
        widths = {client: self.width(resources) for client, resources in available.items()}
        record["widths"] = {str(client): r for client, r in widths.items()}
        tasks = []
        for client, r in widths.items():
            kept = kept_channels(self.channels, r, self.rule(state, client))
            parameters = slice_state(self.channels, kept, state.model)
            tasks.append(replace(self.train_task(state, client), kept=kept, parameters=parameters))
        return tasks

    def cost(self, task: ClientTask) -> ChainCost:
        """Return the cost of a network that really has the kept channels alone."""
        return self._cost_of_widths(tuple(len(channels) for channels in task.kept.values()))

    def _find_channels(self) -> Channels:
        try:
            return channels_of(self.world.chain.model, self.world.cost.input[1:])
        except ModelError as error:
            raise ModelError(f"method {self.world.config.method} trains narrow sub-networks: {error}") from None

    def _count(self, widths: tuple[int, ...]) -> ChainCost:
        whole, groups = self.world.cost, self.channels.groups
        kept: dict[str, Tensor] = {g: first_channels(groups[g], n) for g, n in zip(groups, widths, strict=True)}
        chain = narrow_chain(self.world.chain, self.channels, kept)
        return cost_of(chain, whole.input[1:], whole.batch, whole.classes, whole.copies)

    def join(
        self, state: BaselineState, tasks: Sequence[ClientTask], updates: Sequence[ClientUpdate], record: Record
    ) -> Joining[BaselineState]:
        """Average each coordinate over the clients whose sub-network has it."""
        yield from ()
        kept: dict[int, Kept] = {task.client: task.kept for task in tasks}
        found = usable(self.world, tasks, updates, record)
        if not found:
            return None
        parts = [(update.weight, kept[update.client], update.parameters) for update in found]
        return replace(state, model=self._scattered(state.model, parts))

    def _scattered(self, model: Parameters, parts: Sequence[tuple[float, Kept, Parameters]]) -> Parameters:
        """Join sub-networks coordinate by coordinate, by the configured rule."""
        if RULES[self.world.config.aggregate.rule] is mean:
            return scatter_average(self.channels, model, parts)  # the same without a full tensor for each client
        return self.world.joined(model, [(w, _Spread(self.channels, kept, model, part)) for w, kept, part in parts])


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
