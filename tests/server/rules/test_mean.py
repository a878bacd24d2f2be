"""Eq. 16 and 17, and the average of sub-networks, against hand-computed numbers."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprophet.cascade.channels import ChannelAxis, Channels, kept_channels, rolling_channels
from fedprophet.cascade.narrow import merge_local, slice_state
from fedprophet.errors import ModelError
from fedprophet.server.rules.mean import partial_average, scatter_average

FOUR = Channels(
    {"a": 4, "b": 3},
    {
        "bias": (ChannelAxis(0, "a", 1),),
        "flat": (ChannelAxis(1, "a", 2),),
        "matrix": (ChannelAxis(0, "b", 1), ChannelAxis(1, "a", 1)),
        "kernel": (ChannelAxis(0, "a", 1), ChannelAxis(1, "b", 1)),
    },
)
"""Two groups of channels: tensors that have one or both of them along different axes."""


def numbers(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def index(*values) -> torch.Tensor:
    return torch.tensor(values)


def test_each_parameter_is_averaged_over_those_who_trained_it() -> None:
    """Client 1 (q = 1) trains module 1, clients 2 (q = 3) and 3 (q = 4) modules 1 and 2; heads go to their own."""
    current = {
        "w1": numbers(0, 0),
        "w2": numbers(9.0),
        "w3": numbers(7.0),
        "heads/0.bias": numbers(5.0),
        "heads/1.bias": numbers(6.0),
    }
    updates = [
        (1.0, {"w1": numbers(8, 0), "heads/0.bias": numbers(1.0)}),
        (3.0, {"w1": numbers(0, 8), "w2": numbers(1.0), "heads/1.bias": numbers(2.0)}),
        (4.0, {"w1": numbers(4, 4), "w2": numbers(8.0), "heads/1.bias": numbers(9.0)}),
    ]
    new = partial_average(current, updates)
    assert torch.equal(new["w1"], numbers(24 / 8, 40 / 8))
    assert torch.equal(new["w2"], numbers(35 / 7))
    assert torch.equal(new["w3"], numbers(7.0))
    assert torch.equal(new["heads/0.bias"], numbers(1.0))
    assert torch.equal(new["heads/1.bias"], numbers(42 / 7))
    assert torch.equal(current["w1"], numbers(0, 0)), "the old state must not change"


def test_no_update_changes_nothing() -> None:
    current = {"w": numbers(1.0, 2.0)}
    assert torch.equal(partial_average(current, [])["w"], current["w"])


def test_what_nobody_has_yet_comes_in_as_it_was_sent() -> None:
    """Two of three clients send a name that the current state lacks: its mean is over those two, in their type."""
    half = torch.tensor([1.0, 4.0], dtype=torch.float16)
    updates = [
        (1.0, {"w": numbers(2.0), "new": half}),
        (9.0, {"w": numbers(4.0)}),
        (3.0, {"w": numbers(4.0), "new": 2 * half}),
    ]
    new = partial_average({"w": numbers(0.0)}, updates)
    assert set(new) == {"w", "new"}
    assert new["new"].tolist() == [7 / 4, 28 / 4]
    assert new["new"].dtype == torch.float16
    assert torch.equal(new["w"], numbers((2 + 36 + 12) / 13))
    assert list(partial_average({}, [(2.0, {"a": numbers(3.0)})])) == ["a"]


def test_types_are_kept() -> None:
    new = partial_average({"n": torch.tensor(5)}, [(1.0, {"n": torch.tensor(3)}), (1.0, {"n": torch.tensor(6)})])
    assert new["n"].dtype == torch.int64
    assert int(new["n"]) == 4


@given(st.lists(st.tuples(st.floats(0.5, 50), st.floats(-5, 5)), min_size=1, max_size=6))
def test_an_average_lies_between_its_terms(pairs: list[tuple[float, float]]) -> None:
    new = partial_average({"w": numbers(100.0)}, [(q, {"w": numbers(v)}) for q, v in pairs])
    low, high = min(v for _, v in pairs), max(v for _, v in pairs)
    assert low - 1e-5 <= float(new["w"]) <= high + 1e-5


# Sub-networks --------------------------------------------------------------------------------------------------------


def test_average_by_hand():
    current = {
        "bias": numbers(10, 20, 30, 40),
        "flat": numbers([1, 1, 2, 2, 3, 3, 4, 4]),
        "matrix": torch.full((3, 4), -1.0),
        "other": numbers(5, 5),
        "counter": torch.tensor(9),
        "untouched": numbers(6),
    }
    one = {
        "bias": numbers(1, 2),
        "flat": numbers([10, 11, 20, 21]),
        "matrix": numbers([1, 2], [3, 4]),
        "other": numbers(1, 2),
        "counter": torch.tensor(2),
    }
    two = {
        "bias": numbers(4, 6),
        "flat": numbers([40, 41, 60, 61]),
        "matrix": numbers([5, 6]),
        "other": numbers(5, 10),
        "counter": torch.tensor(6),
    }
    updates = [
        (1.0, {"a": index(0, 1), "b": index(0, 2)}, one),
        (3.0, {"a": index(1, 2), "b": index(2)}, two),
    ]
    before = copy.deepcopy(current)
    result = scatter_average(FOUR, current, iter(updates))
    assert {name: value.tolist() for name, value in result.items()} == {
        "bias": [1, 3.5, 6, 40],  # (1·2 + 3·4) / 4
        "flat": [[10, 11, 35, 36, 60, 61, 4, 4]],  # (20 + 3·40) / 4, (21 + 3·41) / 4
        "matrix": [[1, 2, -1, -1], [-1, -1, -1, -1], [3, 4.75, 6, -1]],  # (4 + 3·5) / 4
        "other": [4, 8],
        "counter": 5,
        "untouched": [6],
    }
    assert {name: value.dtype for name, value in result.items()} == {name: v.dtype for name, v in current.items()}
    assert all(torch.equal(current[name], before[name]) for name in current)


def test_average_of_kernels_by_hand():
    """The whole 1×2 kernel of a pair of channels is averaged."""
    current = {"kernel": torch.zeros(4, 3, 1, 2)}
    part = numbers([[[1, 2]], [[3, 4]]])  # output channel 2, input channels 0 and 1
    assert part.shape == (1, 2, 1, 2)
    result = scatter_average(FOUR, current, [(0.5, {"a": index(2), "b": index(0, 1)}, {"kernel": part})])["kernel"]
    expected = torch.zeros(4, 3, 1, 2)
    expected[2, 0, 0, 0], expected[2, 0, 0, 1], expected[2, 1, 0, 0], expected[2, 1, 0, 1] = 1, 2, 3, 4
    assert torch.equal(result, expected)


def test_average_of_full_width_is_the_partial_average():
    torch.manual_seed(0)
    current = {"bias": torch.randn(4), "matrix": torch.randn(3, 4), "other": torch.randn(5)}
    whole = {"a": index(0, 1, 2, 3), "b": index(0, 1, 2)}
    clients = [(0.1 * w, {n: v + k for n, v in current.items()}) for w, k in ((1, 0.1), (2, 0.7), (3, -0.3))]
    found = scatter_average(FOUR, current, [(weight, whole, client) for weight, client in clients])
    expected = partial_average(current, clients)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_average_is_taken_in_float64():
    channels = Channels({"a": 1}, {"w": (ChannelAxis(0, "a", 1),)})
    updates = [(1.0, {"a": index(0)}, {"w": numbers(value)}) for value in (1e8, 1.0, -1e8)]
    result = scatter_average(channels, {"w": numbers(0)}, updates)["w"]
    assert result.item() == pytest.approx(1 / 3)  # in float32 the 1 would vanish


@settings(max_examples=40)
@given(st.data())
def test_one_client_changes_kept_coordinates_alone(data):
    wide, high = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    repeat, r = data.draw(st.integers(1, 3)), data.draw(st.floats(0.01, 1))
    start, weight = data.draw(st.integers(0, 20)), data.draw(st.floats(1e-3, 1e3))
    channels = Channels(
        {"a": high, "b": wide},
        {"w": (ChannelAxis(0, "a", 1), ChannelAxis(1, "b", repeat)), "n": (ChannelAxis(0, "b", 1),)},
    )
    kept = kept_channels(channels, r, partial(rolling_channels, start=start))
    current = {"w": torch.randn(high, wide * repeat, 2), "n": torch.randn(wide)}
    part = {name: value + 1 for name, value in slice_state(channels, kept, current).items()}
    result = scatter_average(channels, current, [(weight, kept, part)])
    rows = torch.tensor([row in kept["a"].tolist() for row in range(high)])
    columns = torch.tensor([column // repeat in kept["b"].tolist() for column in range(wide * repeat)])
    trained = (rows[:, None] & columns[None, :])[:, :, None]
    assert torch.equal(result["w"], torch.where(trained, current["w"] + 1, current["w"]))
    assert torch.equal(result["n"], torch.where(columns[::repeat], current["n"] + 1, current["n"]))
    assert all(torch.equal(one, part[name]) for name, one in slice_state(channels, kept, result).items())
    merged = merge_local(channels, kept, current, part)
    assert all(torch.equal(merged[name], result[name]) for name in current)


def test_a_part_that_does_not_fit_is_an_error():
    kept, full = {"a": index(0, 1), "b": index(0)}, {"bias": numbers(1, 2, 3, 4)}
    with pytest.raises(ModelError, match=r"'bias' of a sub-network has shape \(4,\) instead of \(2,\)"):
        scatter_average(FOUR, full, [(1.0, kept, full)])
    with pytest.raises(ModelError, match=r"unknown tensor of the full model 'bais'\. Did you mean 'bias'"):
        scatter_average(FOUR, full, [(1.0, kept, {"bais": numbers(1, 2)})])
