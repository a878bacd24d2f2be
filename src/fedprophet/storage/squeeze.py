"""Numbers made smaller without loss, for where every byte counts.

A trained parameter has a random mantissa, of which nothing can be saved, and an exponent that is one of a few. So the
bits of each number are turned until its exponent has a byte of its own, and the bytes of the same place in all numbers
are compressed together. Where similar numbers are known already, what is compressed is the distance to these.
"""

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTHS = (1, 2, 4, 8)
"""Bytes of a number. What is no sequence of numbers has width 1."""
Numbers = NDArray[Any]
"""Numbers as unsigned integers of their width."""
_LENGTH = 8
_PLAIN, _DEFLATED = b"\0", b"\1"


def squeeze(data: bytes | memoryview, width: int, like: bytes | memoryview | None = None) -> bytes:
    """Return data in as few bytes as possible; `like` are as many numbers that may be similar."""
    if width == 1 or len(data) % width:
        return _deflated(bytes(data), (zlib.Z_DEFAULT_STRATEGY,))
    numbers = _numbers(data, width)
    mixed = _turned(numbers) if like is None else _folded(numbers - _numbers(like, width))
    planes = np.ascontiguousarray(mixed.view(np.uint8).reshape(-1, width).T)
    return b"".join(_deflated(plane.tobytes(), (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE)) for plane in planes)


def expand(data: memoryview, length: int, width: int, like: bytes | memoryview | None = None) -> bytes:
    """Return the `length` bytes that were squeezed; ValueError if the data are no such thing."""
    if width not in WIDTHS or (like is not None and len(like) != length):
        raise ValueError("unknown form")
    whole = width == 1 or length % width
    planes = []
    for _ in range(1 if whole else width):
        plane, data = _inflated(data, length if whole else length // width)
        planes.append(plane)
    if data:
        raise ValueError("too long")
    if whole:
        return planes[0]
    columns = np.stack([np.frombuffer(plane, np.uint8) for plane in planes], axis=1)
    mixed = np.ascontiguousarray(columns).reshape(-1).view(f"<u{width}")
    numbers = _turned_back(mixed) if like is None else _unfolded(mixed) + _numbers(like, width)
    return numbers.tobytes()


def _numbers(data: bytes | memoryview, width: int) -> Numbers:
    return np.frombuffer(data, f"<u{width}")


def _turned(numbers: Numbers) -> Numbers:
    """Move the sign behind the last bit, so that the exponent of a float32 begins the number."""
    one, last = _shifts(numbers)
    turned: Numbers = (numbers << one) | (numbers >> last)
    return turned


def _turned_back(numbers: Numbers) -> Numbers:
    one, last = _shifts(numbers)
    back: Numbers = (numbers >> one) | (numbers << last)
    return back


def _folded(numbers: Numbers) -> Numbers:
    """Turn 0, −1, 1, −2, … into 0, 1, 2, 3, …: what is near zero has leading zeros."""
    one, last = _shifts(numbers)
    folded: Numbers = (numbers << one) ^ (np.zeros_like(numbers) - (numbers >> last))
    return folded


def _unfolded(numbers: Numbers) -> Numbers:
    one, _ = _shifts(numbers)
    unfolded: Numbers = (numbers >> one) ^ (np.zeros_like(numbers) - (numbers & one))
    return unfolded


def _shifts(numbers: Numbers) -> tuple[Any, Any]:
    kind = numbers.dtype.type
    return kind(1), kind(8 * numbers.itemsize - 1)


def _deflated(data: bytes, strategies: tuple[int, ...]) -> bytes:
    """Return data compressed by the best of the strategies, or as they are, behind what they are and their length."""
    forms = [(_PLAIN, data)]
    for strategy in strategies:
        packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, strategy)
        forms.append((_DEFLATED, packer.compress(data) + packer.flush()))
    form, best = min(forms, key=lambda pair: len(pair[1]))
    return form + len(best).to_bytes(_LENGTH, "little") + best


def _inflated(data: memoryview, length: int) -> tuple[bytes, memoryview]:
    """Return the first bytes that were deflated, which must be so many, and what follows them."""
    start = 1 + _LENGTH
    end = start + int.from_bytes(data[1:start], "little")
    form, body = bytes(data[:1]), data[start:end]
    if end > len(data) or form not in (_PLAIN, _DEFLATED):
        raise ValueError("cut or unknown")
    if form == _PLAIN:
        content = bytes(body)
    else:
        unpacker = zlib.decompressobj()
        try:
            content = unpacker.decompress(body, length + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from None
    if len(content) != length:
        raise ValueError("another length")
    return content, data[end:]
