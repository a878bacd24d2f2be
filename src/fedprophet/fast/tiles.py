"""How convolutions are cut into tiles: what was fastest on an H200."""

from typing import Any

import torch

Tiles = tuple[int, int, int, int, int]
"""Positions, outputs and inputs of a tile, warps and pipeline stages."""


def block_tiles(rows: int, height: int, width: int, inputs: int, outputs: int, turned: bool) -> Tiles:
    """Return the tiles of a convolution that the copy engine fetches in blocks."""
    block_n = divisor(outputs, 128)
    if block_n <= 64:
        return 256, block_n, 64, 8, 3
    if width > 64:  # a tile has a line at least
        return 128, 128, 64, 8, 3
    # Where there are fewer tiles than processors, they should be many or quick.
    tiles, block_k = (rows // 128) * (outputs // block_n), divisor(inputs, 128)
    if turned:
        return _turned(tiles, rows, height, block_k, outputs % 256 == 0)
    if tiles <= 64:
        return 64, 64, block_k, 4, 3
    return 128, 128, block_k if tiles <= 132 else 64, 8, 3


def _turned(tiles: int, rows: int, height: int, block_k: int, wide: bool) -> Tiles:
    if tiles <= 64:
        return 64, 128, block_k, 4, 3
    if wide and (tiles <= 132 or 300 < tiles < 1000):
        return 64, 256, 64, 4, 4
    if wide and height <= 4 and tiles >= 1000:
        return 128, 256, 64, 8, 3
    return (128, 128, 64, 4, 4) if rows < 300_000 or height >= 16 else (128, 128, 64, 8, 3)


def sides(positions: int, height: int, width: int) -> tuple[int, int, int]:
    """Return how many images, lines of an image and places of a line a tile of so many positions has.

    They are powers of two, as `positions` is: a tile may reach beyond an image, and a long line takes several tiles.
    """
    across = min(_power_of_two(width), positions)
    lines = min(_power_of_two(height), positions // across)
    return positions // (lines * across), lines, across


def row_tiles(rows: int, inputs: int, outputs: int, dtype: Any) -> Tiles:
    """Return the tiles of a convolution whose threads compute addresses."""
    if dtype == torch.float32:
        return 64, divisor(outputs, 64), divisor(inputs, 32), 4, 2
    block_n, block_k = divisor(outputs, 128), divisor(inputs, 64)
    if rows <= 512:  # few rows for each client: smaller tiles fill the device
        return 64, block_n, block_k, 4, 4
    return (128, block_n, block_k, 8, 3) if block_n >= 64 else (128, block_n, block_k, 4, 4)


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is not below a size."""
    return 1 << (size - 1).bit_length()


def divisor(size: int, most: int) -> int:
    """Return the largest power of two, at most `most`, that divides a multiple of 16."""
    return min(most, size & -size)
