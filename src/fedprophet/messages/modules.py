"""Frozen modules by the hash of their shared parameters, so that each travels once and is checked when it arrives."""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def digest(parameters: Mapping[str, Tensor]) -> str:
    """Return the hash of names, shapes, types and bytes. A module's is that of what is shared, not of own layers."""
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(parameters):
        tensor = parameters[name].detach().cpu().contiguous()
        hasher.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        hasher.update(tensor.view(-1).numpy().tobytes())
    return hasher.hexdigest()


def kinds_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the type and the shape of each: tables with the same ones may stand in for each other."""
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


class ModuleStore:
    """Shared parameters of frozen modules. The server adds them; engines bring them to their clients.

    `kept` returns what is kept of a tensor: itself, or a copy of it elsewhere.
    """

    def __init__(self, kept: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        self._kept = kept
        self._modules: dict[str, Mapping[str, Tensor]] = {}

    def add(self, parameters: Mapping[str, Tensor]) -> str:
        """Keep a frozen module and return its digest."""
        name = digest(parameters)
        if name not in self._modules:
            self._modules[name] = {key: self._kept(value) for key, value in parameters.items()}
        return name

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def __getitem__(self, name: str) -> Mapping[str, Tensor]:
        return self._modules[name]
