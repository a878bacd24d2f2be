"""Differentiated Module Assignment (Section 6.3): which modules a client trains this round."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from fedprophet.cascade.cost import ChainCost
from fedprophet.cascade.partition import Module
from fedprophet.messages.values import Resources
from fedprophet.settings.section import Section, section


@section("assignment")
class AssignmentSettings(Section):
    """Differentiated Module Assignment (Eq. 14 and 15)."""

    enabled: bool = Field(
        default=True, description="Give clients with memory left later modules too; false: module m alone."
    )
    heads: Literal["trained", "passed"] = Field(
        default="trained",
        description="Whose copy of a head enters its average: of clients that trained it (Eq. 17), or also of those "
        "that trained later modules, as they were given it (as in the paper's runs).",
    )

    def idle(self, config: Any) -> Iterator[tuple[str, str]]:
        if not self.enabled:
            yield "heads", "assignment.enabled = false"


def last_module(cost: ChainCost, modules: Sequence[Module], stage: int, resources: Resources, slowest: float) -> int:
    """Return M_k, the last module that a client with these resources trains together with module m = `stage`.

    It is the largest one that fits both constraints, and never less than m:
    MemReq(w_m ∘ … ∘ w_M ∘ θ_M) ≤ R_k (Eq. 14) and FLOPs(w_m ∘ … ∘ w_M ∘ θ_M) ≤ P_k / P_min · FLOPs(w_m ∘ θ_m) (Eq. 15).

    The paper's right side is P_k / P_min · FLOPs(w_m), without θ_m. Here the head counts on both, because the bound is
    the time that module m takes on the slowest client, which trains it with its head: else that one would exceed it.
    """
    first = modules[stage].first
    allowed_flops = resources.performance / slowest * cost.flops(first, modules[stage].last)
    fitting = [
        module.index
        for module in modules[stage:]
        if cost.memory(first, module.last) <= resources.memory and cost.flops(first, module.last) <= allowed_flops
    ]
    return max(fitting, default=stage)


def assign(
    cost: ChainCost, modules: Sequence[Module], stage: int, available: Mapping[int, Resources]
) -> dict[int, int]:
    """Return M_k for every client of the round; P_min is the lowest performance among them."""
    slowest = min((resources.performance for resources in available.values()), default=1.0)
    return {client: last_module(cost, modules, stage, resources, slowest) for client, resources in available.items()}
