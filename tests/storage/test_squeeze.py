from contextlib import suppress

import numpy as np
import pytest

from fedprophet.storage.squeeze import expand, squeeze

RNG = np.random.default_rng(0)


def random(width, count=1000):
    return RNG.integers(0, 256, width * count, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_every_bit_comes_back(width, count):
    data, like = random(width, count), random(width, count)
    assert expand(memoryview(squeeze(data, width)), len(data), width) == data
    assert expand(memoryview(squeeze(data, width, like)), len(data), width, like) == data
    assert expand(memoryview(squeeze(data, width, data)), len(data), width, data) == data


def test_extreme_numbers_come_back():
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -3.4e38, 1.0], np.float32)
    for like in (None, values[::-1].tobytes(), np.full(8, -1.0, np.float32).tobytes()):
        assert expand(memoryview(squeeze(values.tobytes(), 4, like)), 32, 4, like) == values.tobytes()


def test_what_is_no_whole_number_of_numbers_comes_back():
    assert expand(memoryview(squeeze(b"seven b", 4)), 7, 4) == b"seven b"


def test_random_mantissas_stay_and_exponents_shrink():
    """3 of 4 bytes cannot be made smaller; normal numbers have an exponent of about 2.5 bits."""
    weights = RNG.normal(size=100_000).astype(np.float32).tobytes()
    assert 0.75 < len(squeeze(weights, 4)) / len(weights) < 0.85


def test_numbers_near_known_ones_take_less_and_the_same_ones_nothing():
    known = RNG.normal(size=100_000).astype(np.float32)
    near = (known * (1 + 1e-4 * RNG.normal(size=100_000))).astype(np.float32)
    assert len(squeeze(near.tobytes(), 4, known.tobytes())) < 0.6 * near.nbytes
    assert len(squeeze(known.tobytes(), 4, known.tobytes())) < 0.005 * near.nbytes


def test_what_was_altered_is_a_value_error_or_other_data_of_the_same_length():
    data = RNG.normal(size=50).astype(np.float32).tobytes()
    squeezed = squeeze(data, 4)
    for position in range(len(squeezed)):
        for broken in (squeezed[:position], squeezed[:position] + b"\xff" + squeezed[position + 1 :]):
            with suppress(ValueError):
                assert len(expand(memoryview(broken), len(data), 4)) == len(data)
    for other in (squeezed + b"x", b"", b"\2" + squeezed[1:]):
        with pytest.raises(ValueError, match=r"long|cut"):
            expand(memoryview(other), len(data), 4)


def test_a_short_text_that_expands_to_much_is_not_expanded_further():
    with pytest.raises(ValueError, match="another length"):
        expand(memoryview(squeeze(bytes(10**7), 1)), 100, 1)


@pytest.mark.parametrize(("width", "like"), [(3, None), (0, None), (4, b"1234")])
def test_a_form_that_nobody_writes(width, like):
    with pytest.raises(ValueError, match="unknown form"):
        expand(memoryview(squeeze(b"12345678", 4)), 8, width, like)
