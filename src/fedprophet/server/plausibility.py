"""Updates that are out of all proportion: no client that trains as it was asked to sends them, whatever its data.

Rules of aggregation limit what an update can do; these limits are for what no rule should have to deal with. A number
of 3·10³⁸ is finite, but nothing that is computed with it stays so.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedprophet.messages.answers import Trained
from fedprophet.messages.tasks import Train
from fedprophet.server.rules.registry import Parameters

MOST_TIMES = 100.0
"""By this factor a client's number may differ from the median of all clients'."""
MOST_MOVED = 1000.0
"""By this many times the size of the parameters, or of 1, an update may move them."""
MAJORITY = 3
"""Among this many clients, one can be told from the others."""


def implausible_updates(usable: Sequence[tuple[Train, Trained]]) -> dict[int, str]:
    """Return the clients whose update is far too large, each with the reason.

    The size of an update is the root mean square of what it moves each parameter by, so that clients which train
    more, or wider, modules than others can be compared with them.
    """
    reasons = {}
    sizes = {update.client: _moved(task.parameters, update.parameters) for task, update in usable}
    for task, update in usable:
        size = sizes[update.client]
        if size > MOST_MOVED and size > MOST_MOVED * (whole := _size(task.parameters)):
            reasons[update.client] = f"its update moves parameters of size {whole:.3g} by {size:.3g}"
    left = {client: size for client, size in sizes.items() if client not in reasons}
    own = {update.client: _size(update.local) for _, update in usable if update.local}
    return {
        **{client: f"the layers of its own that it sent are {text}" for client, text in outliers(own, False).items()},
        **{client: f"its update is {text}" for client, text in outliers(left, False).items()},
        **reasons,
    }


def implausible_statistics(sent: Mapping[int, Parameters]) -> dict[int, str]:
    """Return the clients whose norm statistics are far too large, each with the reason."""
    sizes = {client: _size(statistics) for client, statistics in sent.items()}
    return {client: f"the statistics that it sent are {text}" for client, text in outliers(sizes, False).items()}


def outliers(numbers: Mapping[int, float], below: bool = True) -> dict[int, str]:
    """Return the clients whose number is far above the median, or far `below` it; none where they are too few."""
    median = statistics.median(numbers.values()) if len(numbers) >= MAJORITY else 0.0
    if median <= 0:
        return {}
    return {
        client: f"{number / median:.3g} times the median of all clients'"
        for client, number in numbers.items()
        if number > MOST_TIMES * median or (below and number < median / MOST_TIMES)
    }


def _moved(given: Parameters, sent: Parameters) -> float:
    return _size({name: value - given[name].to(value.device, value.dtype) for name, value in sent.items()})


def _size(tensors: Parameters) -> float:
    """Return the root mean square of all fractions."""
    fractions = [value.detach() for value in tensors.values() if value.is_floating_point()]
    count = sum(value.numel() for value in fractions)
    norm = _norm(fractions, torch.float32) if count else 0.0
    # Squares of large numbers overflow in float32, which is many times as fast.
    return (norm if math.isfinite(norm) else _norm(fractions, torch.float64)) / math.sqrt(max(count, 1))


def _norm(tensors: Sequence[Tensor], dtype: torch.dtype) -> float:
    """Return the l2 norm of all numbers. A GPU is asked once: each answer is a wait."""
    norms = [
        torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, dtype)).double() for tensor in tensors
    ]
    return float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])))
