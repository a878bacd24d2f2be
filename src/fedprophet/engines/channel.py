"""Messages between two processes of one run: Python objects, and after each the bytes of its tensors.

Both ends are this program, one forked from the other, and nothing that was read from a file or from another machine
is unpickled here. Tensors are left out of the pickle, and those that several messages share are sent once.
"""

import io
import pickle
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

CLOSED = (EOFError, OSError)
"""What `send` and `receive` raise when the other end is gone."""

_PIECE = 2**17
"""Tensors are sent in pieces of this many bytes: a connection copies what it receives, and small copies are cheap."""

Shared = Mapping[int, int]
"""Tensors that several messages have in common: the number of each, by its id()."""


class Channel:
    """One end of a connection. `send` blocks until the other end has taken the message, `receive` until one comes."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self.connection = connection
        self._sent: set[int] = set()
        self._received: dict[int, Tensor] = {}
        self._forget = False

    def forget(self) -> None:
        """Let both ends forget the shared tensors, with the next message."""
        self._sent.clear()
        self._forget = True

    def send(self, message: object, shared: Shared = MappingProxyType({})) -> None:
        """Send a message. A shared tensor is sent the first time, and only named from then on."""
        file = io.BytesIO()
        packer = _Packer(file, shared, self._sent)
        packer.dump(message)
        if self._forget:
            self.connection.send_bytes(b"")
            self._forget = False
        self.connection.send_bytes(file.getbuffer())
        for memory in packer.tensors:
            for offset in range(0, len(memory), _PIECE):
                self.connection.send_bytes(memory[offset : offset + _PIECE])

    def receive(self) -> Any:
        """Return the next message."""
        while not (text := self.connection.recv_bytes()):
            self._received.clear()
        return _Unpacker(io.BytesIO(text), self.connection, self._received).load()


class _Packer(pickle.Pickler):
    """Leaves tensors out of the pickle: `tensors` has their bytes, in the order in which they are met."""

    def __init__(self, file: io.BytesIO, shared: Shared, sent: set[int]) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[memoryview] = []
        self._shared, self._sent = shared, sent

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        number = self._shared.get(id(obj))
        if number in self._sent:
            return (number,)
        if number is not None:
            self._sent.add(number)
        value = obj.detach().contiguous()
        self.tensors.append(_bytes_of(value))
        return number, value.dtype, tuple(value.shape)

    def reducer_override(self, obj: Any) -> Any:
        return (dict, (dict(obj),)) if isinstance(obj, MappingProxyType) else NotImplemented


class _Unpacker(pickle.Unpickler):
    """Reads each tensor from the connection where the pickle has left it out."""

    def __init__(self, file: io.BytesIO, connection: "Connection[Any, Any]", received: dict[int, Tensor]) -> None:
        super().__init__(file)
        self._connection, self._received = connection, received

    def persistent_load(self, pid: Any) -> Tensor:
        number, *kind = pid
        if not kind:
            return self._received[number]
        dtype, shape = kind
        tensor = torch.empty(shape, dtype=dtype)
        memory, filled = _bytes_of(tensor), 0
        while filled < len(memory):
            filled += self._connection.recv_bytes_into(memory, filled)
        if number is not None:
            self._received[number] = tensor
        return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    memory: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return memory
