"""Norm layers that keep statistics: which of their tensors clients keep to themselves, and which are federated.

The paper leaves them with the clients, as in FedBN (Li et al., 2021). That makes each client's model its own, and the
one model that is exported an average of layers that never met.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from torch import Tensor, nn

from fedprophet.cascade.atoms import Chain, statistics_layers

NormLayers = Literal["local", "shared", "statistics-local", "frozen"]
"""Where norm layers live: all with the client; all with the server, perhaps with statistics that are fixed at some
point (frozen); or the affine transformation with the server and the statistics with the client.
"""
MEAN, VARIANCE = "running_mean", "running_var"
STATISTICS = (MEAN, VARIANCE)
COUNTER = "num_batches_tracked"
"""How many batches the statistics have seen, by which a norm layer without a momentum weighs the next one."""


def share_norm_layers(chain: Chain, layers: NormLayers) -> Chain:
    """Return the chain with those tensors of its norm layers among the shared ones that are to be federated."""
    if layers == "local":
        return chain
    tensors, inside = chain.tensors, set(norm_names(chain))
    moved = {name for name in inside if layers != "statistics-local" or isinstance(tensors[name], nn.Parameter)}
    spans = list(zip(chain.shared_names, chain.local_names, strict=True))
    return replace(
        chain,
        shared_names=tuple((*shared, *(name for name in local if name in moved)) for shared, local in spans),
        local_names=tuple(tuple(name for name in local if name not in moved) for _, local in spans),
    )


def norm_names(chain: Chain) -> tuple[str, ...]:
    """Return the names of all tensors in norm layers that keep statistics."""
    layers = statistics_layers(chain.model)
    return tuple(name for name in chain.tensors if name.rpartition(".")[0] in layers)


def statistics_names(chain: Chain, endings: tuple[str, ...] = STATISTICS) -> tuple[str, ...]:
    """Return the names of the statistics that norm layers keep: running means and variances."""
    return tuple(name for name in norm_names(chain) if name.rpartition(".")[2] in endings)


def variances(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the variances among tensors that come with their mean, each with the mean's name."""
    means = {name: name.removesuffix(VARIANCE) + MEAN for name in tensors if name.rpartition(".")[2] == VARIANCE}
    return {name: mean for name, mean in means.items() if mean in tensors}


def hidden_norm_layers(chain: Chain) -> tuple[str, ...]:
    """Return the norm layers that keep statistics but are no layers of the chain: their forward is traced."""
    seen = set(norm_modules(chain).values())
    return tuple(name for name, layer in statistics_layers(chain.model).items() if layer not in seen)


def norm_modules(chain: Chain, first: int = 0, last: int | None = None) -> dict[str, nn.Module]:
    """Return the norm layers that keep statistics in a range of atoms, in the order they run, by their name."""
    layers = {layer: name for name, layer in statistics_layers(chain.model).items()}
    return {layers[leaf]: leaf for leaf in chain.modules(first, last) if leaf in layers}
