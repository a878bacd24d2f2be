"""Other tensors in a model's place for a while: empty ones that cost nothing, or fake ones that allocate nothing."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def swapped(
    modules: Iterable[nn.Module], make: Callable[[Tensor], Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Swap every parameter and buffer for another one, tied ones for the same one, yield both, and put them back."""
    tables: list[dict[str, Any]] = [table for module in modules for table in (module._parameters, module._buffers)]
    found = [(table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None]
    others = {id(tensor): make(tensor) for _, _, tensor in found}
    try:
        for table, name, tensor in found:
            table[name] = others[id(tensor)]
        parameters = [others[id(tensor)] for _, _, tensor in found if isinstance(tensor, nn.Parameter)]
        yield parameters, [others[id(tensor)] for _, _, tensor in found if not isinstance(tensor, nn.Parameter)]
    finally:
        for table, name, tensor in found:
            table[name] = tensor
