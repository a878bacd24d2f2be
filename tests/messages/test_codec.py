"""A dataclass as JSON and tensors, and back: nothing is lost, and nothing that does not fit gets in."""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedprophet.messages.codec import CodecError, decode, encode
from fedprophet.storage.files import tensors_from_bytes, tensors_to_bytes


@dataclass(frozen=True)
class Inner:
    score: float
    where: tuple[int, str] = (1, "a")


@dataclass(frozen=True)
class State:
    round: int
    model: Mapping[str, Tensor] = field(default_factory=dict)
    best: Mapping[str, Tensor] = field(default_factory=dict)
    ratio: float = 1.0
    inner: Inner | None = None
    fixed: tuple[Inner, ...] = ()
    nested: tuple[tuple[int, ...], ...] = ()
    by_round: Mapping[int, float] = field(default_factory=dict)
    history: tuple[Mapping[str, Tensor], ...] = ()
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    note: str | None = None
    loose: Any = None


def bits(value: Any) -> Any:
    """Return a value such that two are equal only if they are the same to the last bit, in type and in order."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).tolist()
    if is_dataclass(value):
        return type(value).__name__, [(each.name, bits(getattr(value, each.name))) for each in fields(value)]
    if isinstance(value, Mapping):
        return [(key, bits(inner)) for key, inner in value.items()]
    if isinstance(value, tuple | list):
        return type(value).__name__, [bits(inner) for inner in value]
    if isinstance(value, float) and not math.isnan(value):
        return struct.pack(">d", value)
    return type(value).__name__, str(value)


def round_trip(state: State) -> State:
    data, tensors = encode(state)
    text = json.dumps(data, allow_nan=False)
    return decode(State, json.loads(text), tensors_from_bytes(tensors_to_bytes(tensors)))


def test_tensors_are_named_by_their_path() -> None:
    data, tensors = encode(State(1, model={"a.b": torch.zeros(1)}, history=({"w": torch.ones(2)},)))
    assert list(tensors) == ["model/a.b", "history/0/w"]
    assert data["model"] == {"a.b": "model/a.b"}
    assert (data["round"], data["inner"]) == (1, None)


def test_everything_comes_back_exactly() -> None:
    state = State(
        7,
        model={"z": torch.randn(3, 2), "a": torch.tensor(5), "empty": torch.zeros(0, 4)},
        best={"h": torch.randn(4).to(torch.bfloat16), "m": torch.tensor([True, False])},
        ratio=0.1 + 0.2,
        inner=Inner(-math.inf, (3, "ü")),
        fixed=(Inner(math.inf), Inner(1e-310), Inner(-0.0), Inner(math.nan), Inner(3)),
        nested=((1, 2), (), (3,)),
        by_round={3: 0.5, 10: math.inf},
        history=({"w": torch.zeros(1)}, {}),
        kind="b",
        flag=True,
        note="",
        loose={"x": [1, math.inf, None]},
    )
    assert bits(round_trip(state)) == bits(state)


def test_a_tensor_that_occurs_twice_is_kept_once() -> None:
    shared = torch.randn(3)
    state = State(1, model={"w": shared}, best={"w": shared})
    assert list(encode(state)[1]) == ["model/w"]
    again = round_trip(state)
    assert bits(again) == bits(state)
    assert again.best["w"] is again.model["w"]


def test_views_of_one_memory_are_kept_apart() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    state = State(1, model={"row": base[0], "all": base, "turned": base.t()})
    assert bits(round_trip(state)) == bits(state)


@given(st.floats(), st.lists(st.integers() | st.none(), max_size=4))
def test_any_float_comes_back(number: float, loose: list[Any]) -> None:
    state = State(1, ratio=number, loose=loose)
    assert bits(round_trip(state)) == bits(state)


@pytest.mark.parametrize("value", [object(), {1.5: 2}, {"a", "b"}, 1j, b"bytes"])
def test_what_cannot_be_encoded_is_refused_with_its_path(value: object) -> None:
    with pytest.raises(TypeError, match="loose"):
        encode(State(1, loose=value))


def test_two_tensors_of_one_path_are_refused() -> None:
    with pytest.raises(TypeError, match="same path"):
        encode(State(1, loose={"x/y": {"z": torch.zeros(1)}, "x": {"y/z": torch.ones(1)}}))


MISFITS: list[tuple[dict[str, object], str]] = [
    ({"round": "7"}, "round is '7', not an integer of 64 bits"),
    ({"round": 7.0}, "round is 7.0, not an integer"),
    ({"round": True}, "round is True, not an integer"),
    ({"round": 2**64}, "round is 1844.*, not an integer of 64 bits"),
    ({"ratio": "inf"}, "ratio is 'inf', not a number"),
    ({"ratio": None}, "ratio is None, not a number"),
    ({"ratio": True}, "ratio is True, not a number"),
    ({"ratio": 10**400}, "ratio is 1000"),
    ({"ratio": {"float": "1.0"}}, "ratio is .*, not a number"),
    ({"ratio": {"float": []}}, "ratio is .*, not a number"),
    ({"nested": 3}, "nested is 3, not a list"),
    ({"nested": [1]}, "nested/0 is 1, not a list"),
    ({"nested": [[1, "2"]]}, "nested/0/1 is '2'"),
    ({"kind": "c"}, "kind is 'c', not one of 'a', 'b'"),
    ({"kind": ["a"]}, "kind is"),
    ({"inner": {"score": 1.0}}, "inner lacks 'where'"),
    ({"inner": {"score": 1.0, "where": [1]}}, r"inner/where is \[1\], not a list of 2"),
    ({"fixed": [None]}, "fixed/0 is None, not a table"),
    ({"model": {"w": "model/other"}}, "the tensor 'model/w' is missing"),
    ({"model": {"w": 5}}, "the tensor 'model/w' is missing"),
    ({"model": []}, r"model is \[\], not a table"),
    ({"model": {"\ud800": "x"}}, r"model is '.ud800', not a text"),
    ({"by_round": {"x": 1.0}}, "by_round is 'x', not a key of type int"),
    ({"extra": 1}, "State has 'extra', which is no field of it"),
    ({"x" * 10**6: 1}, "State has 'xxxx"),
    ({"flag": 1}, "flag is 1, not true or false"),
    ({"note": 4}, "note is 4, not a text; note is 4, not null"),
    ({"note": "\udcff"}, "note is '.udcff', not a text"),
]


@pytest.mark.parametrize(("change", "text"), MISFITS, ids=[text for _, text in MISFITS])
def test_data_that_do_not_fit_are_refused(change: dict[str, object], text: str) -> None:
    data, tensors = encode(State(1))
    with pytest.raises(CodecError, match=text) as caught:
        decode(State, {**data, **change}, tensors)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("data", [[], None, "x", 3])
def test_data_that_are_no_table(data: object) -> None:
    with pytest.raises(CodecError, match=r"the data is .*, not a table"):
        decode(State, data, {})


def test_a_tensor_that_no_field_names_is_refused() -> None:
    data, tensors = encode(State(1))
    with pytest.raises(CodecError, match="a tensor that no field names: 'stray'"):
        decode(State, data, {**tensors, "stray": torch.zeros(1)})


def test_a_field_of_a_type_that_cannot_be_read_is_a_bug_of_ours() -> None:
    @dataclass(frozen=True)
    class Odd:
        ids: set[int]

    with pytest.raises(TypeError, match=r"a field of type set\[int\] cannot be decoded \(ids\)"):
        decode(Odd, {"ids": []}, {})
