"""Messages between two processes of one run: Python objects, and behind each the bytes of its tensors.

Both ends are this program, one forked from the other, and nothing that was read from a file or from another machine
is unpickled here. A tensor goes from its memory into the socket and from there into new memory, without a copy between.
"""

import io
import pickle
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

_HEADER = struct.Struct("<Q?")
"""The length of the pickle, and whether the tensors that were remembered so far are to be forgotten."""
_MOST_PARTS = 512
"""So many pieces of memory go into one call; systems allow 1024."""

Shared = Mapping[int, int]
"""Tensors that several messages have in common: the number of each, by its id()."""


class ClosedError(Exception):
    """The other end is gone."""


class Channel:
    """One end of a connection. `send` blocks until the other end has taken the message, as `receive` does for one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sent: set[int] = set()
        self._kept: dict[int, Tensor] = {}
        self._fresh = False

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def forget(self) -> None:
        """Let both ends forget the shared tensors, with the next message."""
        self._sent.clear()
        self._fresh = True

    def send(self, message: object, shared: Shared = MappingProxyType({})) -> None:
        """Send a message; a shared tensor travels the first time and is only named from then on."""
        file = io.BytesIO()
        packer = _Packer(file, shared, self._sent)
        packer.dump(message)
        text = file.getbuffer()
        parts = [memoryview(_HEADER.pack(len(text), self._fresh)), text, *packer.tensors]
        self._fresh = False
        try:
            while parts:
                done = self._socket.sendmsg(parts[:_MOST_PARTS])
                while parts and done >= len(parts[0]):
                    done -= len(parts.pop(0))
                if done:
                    parts[0] = parts[0][done:]
        except (BrokenPipeError, ConnectionResetError):
            raise ClosedError from None

    def receive(self) -> Any:
        """Return the next message; ClosedError where there is none to come."""
        header = bytearray(_HEADER.size)
        self.fill(memoryview(header))
        length, fresh = _HEADER.unpack(header)
        if fresh:
            self._kept.clear()
        text = bytearray(length)
        self.fill(memoryview(text))
        return _Unpacker(io.BytesIO(text), self, self._kept).load()

    def fill(self, memory: memoryview) -> None:
        """Read as many bytes as fit."""
        while memory:
            try:
                count = self._socket.recv_into(memory)
            except ConnectionResetError:
                raise ClosedError from None
            if not count:
                raise ClosedError
            memory = memory[count:]

    def drop(self) -> None:
        """Let go of this process's copy of the connection, which stays open for others."""
        self._socket.close()

    def close(self) -> None:
        """Hang up. The other end notices, even where a third process holds a copy of the connection."""
        with suppress(OSError):  # it was gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


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
    """Reads each tensor where the pickle has left it out."""

    def __init__(self, file: io.BytesIO, channel: Channel, kept: dict[int, Tensor]) -> None:
        super().__init__(file)
        self._channel, self._kept = channel, kept

    def persistent_load(self, pid: Any) -> Tensor:
        number, *kind = pid
        if not kind:
            return self._kept[number]
        dtype, shape = kind
        tensor = torch.empty(shape, dtype=dtype)
        self._channel.fill(_bytes_of(tensor))
        if number is not None:
            self._kept[number] = tensor
        return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    memory: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return memory
