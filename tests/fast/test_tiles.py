"""How convolutions are cut into tiles, by how many there are."""

import pytest
import torch

from fedprophet.fast.tiles import block_tiles, divisor, row_tiles, sides

TILES = [
    # samples of two clients, side, inputs, outputs, whether turned; positions, outputs and inputs of a tile
    pytest.param(9, 8, 128, 256, False, (64, 64, 128), id="few"),
    pytest.param(65, 8, 128, 256, False, (128, 128, 128), id="some"),
    pytest.param(301, 8, 64, 256, False, (128, 128, 64), id="many"),
    pytest.param(9, 8, 128, 64, True, (256, 64, 64), id="few-outputs"),
    pytest.param(9, 8, 128, 256, True, (64, 128, 128), id="few-turned"),
    pytest.param(9, 8, 64, 256, True, (64, 128, 64), id="few-turned-with-few-inputs"),
    pytest.param(51, 8, 64, 256, True, (64, 256, 64), id="some-turned"),
    pytest.param(101, 8, 64, 256, True, (128, 128, 64), id="more-turned"),
    pytest.param(2001, 4, 64, 256, True, (128, 256, 64), id="many-turned"),
    pytest.param(101, 16, 64, 128, True, (128, 128, 64), id="large-turned"),
    pytest.param(1, 72, 64, 256, True, (128, 128, 64), id="long-lines-turned"),
]


@pytest.mark.parametrize(("samples", "side", "inputs", "outputs", "turned", "tile"), TILES)
def test_tiles_of_blocks(samples, side, inputs, outputs, turned, tile):
    assert block_tiles(2 * samples * side * side, side, side, inputs, outputs, turned)[:3] == tile


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("width", [1, 4, 8, 32, 64, 100, 128])
def test_tiles_fit_what_they_are_cut_from(turned, width):
    """Whatever the shape: whole tiles of channels, a line at least, and a pipeline within a processor's own memory."""
    for rows in (1, 2_000, 20_000, 200_000, 2_000_000):
        for inputs in (64, 128, 192, 512):
            for outputs in (16, 64, 192, 256, 512):
                positions, block_n, block_k, _, stages = block_tiles(rows, width, width, inputs, outputs, turned)
                assert outputs % block_n == 0
                assert inputs % block_k == 0
                assert positions >= width
                assert 2 * stages * block_k * (positions + block_n) <= 200 * 1024


SIDES = [
    # positions, height and width; images, lines and places of a line
    pytest.param(128, 32, 32, (1, 4, 32), id="lines"),
    pytest.param(128, 4, 4, (8, 4, 4), id="images"),
    pytest.param(128, 7, 7, (2, 8, 8), id="odd"),
    pytest.param(128, 1, 1, (128, 1, 1), id="single-positions"),
    pytest.param(64, 2, 64, (1, 1, 64), id="a-line"),
    pytest.param(128, 9, 300, (1, 1, 128), id="part-of-a-line"),
]


@pytest.mark.parametrize(("positions", "height", "width", "tile"), SIDES)
def test_the_sides_of_a_tile(positions, height, width, tile):
    assert sides(positions, height, width) == tile


def test_other_tiles_and_divisors():
    assert [divisor(size, 128) for size in (16, 48, 192, 512)] == [16, 16, 64, 128]
    assert row_tiles(400, 64, 128, torch.bfloat16)[:3] == (64, 128, 64), "few rows"
    assert row_tiles(4000, 64, 48, torch.bfloat16) == (128, 16, 64, 4, 4)
    assert row_tiles(4000, 64, 128, torch.float32)[:3] == (64, 64, 32)
