"""A disk in the place of memory, past the page cache: for saved tensors, parameters, gradients and momenta."""

import mmap
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memory_price.clock import finish


class SwapFile:
    """A file past the page cache: tensors are copied to an aligned buffer and from it to the disk, and back."""

    BUFFER = 8 * 2**20

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._buffer = mmap.mmap(-1, self.BUFFER)
        self._memory = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.end, self.seconds, self.written, self.read_bytes = 0, 0.0, 0, 0

    def write(self, tensor: Tensor) -> int:
        """Write a tensor's bytes; return where."""
        finish(tensor.device)
        started, place = time.perf_counter(), self.end
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, len(data), self.BUFFER):
            piece = data[start : start + self.BUFFER]
            self._memory[: len(piece)].copy_(piece)
            size = -(-len(piece) // mmap.PAGESIZE) * mmap.PAGESIZE
            os.pwrite(self._file, memoryview(self._buffer)[:size], place + start)
            self.end = place + start + size
        self.written += len(data)
        self.seconds += time.perf_counter() - started
        return place

    def read(self, place: int, like: Tensor, device: torch.device) -> Tensor:
        """Return what was written at a place, as a new tensor that is like another one (which may have no data)."""
        finish(device)
        started = time.perf_counter()
        result = torch.empty(like.shape, dtype=like.dtype, device=device)
        data = result.view(-1).view(torch.uint8)
        for start in range(0, len(data), self.BUFFER):
            piece = data[start : start + self.BUFFER]
            size = -(-len(piece) // mmap.PAGESIZE) * mmap.PAGESIZE
            os.preadv(self._file, [memoryview(self._buffer)[:size]], place + start)
            piece.copy_(self._memory[: len(piece)])
        self.read_bytes += len(data)
        self.seconds += time.perf_counter() - started
        return result


@dataclass
class Swap:
    """Saved tensors beyond an allowance of bytes, and parameters beyond what is left for them, on disk."""

    file: SwapFile
    allowance: int
    parameters: Sequence[Tensor]
    momenta: int = 0
    gradients: int = 0
    weights: int = 0
    """Bytes of them that do not fit: momenta are swapped once a step, gradients too, weights in every pass."""
    _places: dict[int, int] = field(default_factory=dict)
    _back: "weakref.WeakValueDictionary[int, Tensor]" = field(default_factory=weakref.WeakValueDictionary)
    kept: int = 0

    @contextmanager
    def one_pass(self, step: bool) -> Iterator[None]:
        """Swap during a forward and a backward pass."""
        self.kept, self.file.end = 0, 0
        known = {parameter.untyped_storage()._cdata for parameter in self.parameters}

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            name = storage._cdata
            if name in known or tensor.nbytes < mmap.PAGESIZE or tensor.nbytes != storage.nbytes():
                return tensor
            if name not in self._places:
                if self.kept + tensor.nbytes <= self.allowance:
                    self.kept += tensor.nbytes
                    return tensor
                self._places[name] = self.file.write(tensor)
                weakref.finalize(storage, self._places.pop, name, None)
            return self._places[name], torch.empty_like(tensor, device="meta")

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            place, like = packed
            found = self._back.get(place)
            if found is None:
                found = self._back[place] = self.file.read(place, like, self.parameters[0].device)
            return found.view(like.shape)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self._move(reads=2 * self.weights, writes=0)
        if step:
            moved = self.momenta + self.gradients
            self._move(reads=moved, writes=moved + self.weights)

    def _move(self, reads: int, writes: int) -> None:
        """Read and write so many bytes, a few at a time."""
        chunk = torch.empty(self.file.BUFFER, dtype=torch.uint8)
        for _ in range(-(-writes // len(chunk))):
            self.file.end = 0
            self.file.write(chunk)
        for _ in range(-(-reads // len(chunk))):
            self.file.read(0, chunk, chunk.device)
