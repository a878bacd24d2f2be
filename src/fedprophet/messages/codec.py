"""A frozen dataclass as JSON and tensors, and back, exactly: the one codec of messages and of checkpoints.

Fields are plain JSON values, tuples, mappings, dataclasses and tensors, nested to any depth. The JSON part names each
tensor by its path ("model/features.0.weight"); a tensor that occurs twice is kept once. Floats that JSON lacks are
written as {"float": "inf"}. Reading follows the type hints of the dataclass and accepts nothing that does not fit them:
a missing field, an unknown field and a tensor that no field names are errors. The data never name a class or code.
"""

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor

T = TypeVar("T")
Tensors = dict[str, Tensor]

NON_FINITE = ("inf", "-inf", "nan")
INTEGERS = range(-(2**63), 2**64)
"""Larger numbers could not be stored in 64 bits by other readers."""
SHOWN = 80
"""Characters of a value that an error quotes."""


class CodecError(ValueError):
    """Data that does not fit the dataclass it is read into."""


def encode(value: object) -> tuple[dict[str, Any], Tensors]:
    """Return a dataclass as a JSON-able table and named tensors."""
    writer = _Writer()
    table: dict[str, Any] = writer.write(value, "")
    return table, writer.tensors


def decode(kind: type[T], table: object, tensors: Mapping[str, Tensor]) -> T:
    """Return the dataclass that was encoded; CodecError where data do not fit the class."""
    reader = _Reader(tensors)
    value: T = reader.read(kind, table, "")
    unknown = tensors.keys() - reader.taken
    if unknown:
        raise CodecError(f"there is a tensor that no field names: {quoted(min(unknown))}")
    return value


def quoted(value: object) -> str:
    """Return any value as short printable text for an error."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # integers of more than 4300 digits cannot be written
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


# Writing -------------------------------------------------------------------------------------------------------------


@dataclass
class _Writer:
    tensors: Tensors = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)

    def write(self, value: Any, path: str) -> Any:
        def part(key: object, inner: Any) -> Any:
            return self.write(inner, _join(path, key))

        if isinstance(value, Tensor):
            return self._name(value, path)
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": repr(float(value))}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, tuple | list):
            return [part(index, inner) for index, inner in enumerate(value)]
        if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
            return {str(key): part(key, inner) for key, inner in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            return {each.name: part(each.name, getattr(value, each.name)) for each in fields(value)}
        raise TypeError(f"a {type(value).__name__} cannot be encoded ({path})")

    def _name(self, value: Tensor, path: str) -> str:
        name = self._names.setdefault(id(value), path)
        if self.tensors.setdefault(name, value) is not value:
            raise TypeError(f"two tensors have the same path {path!r}")
        return name


# Reading -------------------------------------------------------------------------------------------------------------


@dataclass
class _Reader:
    tensors: Mapping[str, Tensor]
    taken: set[str] = field(default_factory=set)

    def read(self, hint: Any, value: object, path: str) -> Any:
        if hint is Tensor:
            return self._tensor(value, path)
        if is_dataclass(hint):
            return self._dataclass(hint, value, path)
        shape = _SHAPES.get(get_origin(hint))
        if shape is not None:
            return shape(self, get_args(hint), value, path)
        if hint not in _SCALARS:
            raise TypeError(f"a field of type {hint} cannot be decoded ({path})")
        return _SCALARS[hint](value, path)

    def _tensor(self, value: object, path: str) -> Tensor:
        if not isinstance(value, str) or value not in self.tensors:
            raise CodecError(f"the tensor {quoted(path)} is missing")
        self.taken.add(value)
        return self.tensors[value]

    def _dataclass(self, kind: Any, value: object, path: str) -> Any:
        hints = _hints(kind)
        table = _table(value, path)
        odd = table.keys() ^ hints.keys()
        if odd:
            name = min(odd)
            problem = f"lacks {name!r}" if name in hints else f"has {quoted(name)}, which is no field of it"
            raise CodecError(f"{path or kind.__name__} {problem}")
        return kind(**{name: self.read(hint, table[name], _join(path, name)) for name, hint in hints.items()})

    def tuple_(self, hints: tuple[Any, ...], value: object, path: str) -> tuple[Any, ...]:
        endless = len(hints) == 2 and hints[1] is Ellipsis
        if not isinstance(value, list) or not (endless or len(value) == len(hints)):
            raise _wrong(value, path, "a list" if endless else f"a list of {len(hints)}")
        kinds = [hints[0]] * len(value) if endless else hints
        pairs = enumerate(zip(kinds, value, strict=True))
        return tuple(self.read(kind, part, _join(path, index)) for index, (kind, part) in pairs)

    def mapping(self, hints: tuple[Any, ...], value: object, path: str) -> dict[Any, Any]:
        key_kind, kind = hints
        return {
            _key(key_kind, key, path): self.read(kind, part, _join(path, key))
            for key, part in _table(value, path).items()
        }

    def union(self, hints: tuple[Any, ...], value: object, path: str) -> Any:
        reasons = []
        for hint in hints:
            try:
                return self.read(hint, value, path)
            except CodecError as misfit:
                reasons.append(str(misfit))
        raise CodecError("; ".join(reasons))

    def literal(self, choices: tuple[Any, ...], value: object, path: str) -> Any:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise _wrong(value, path, f"one of {', '.join(map(repr, choices))}")
        return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def _wrong(value: object, path: str, expected: str) -> CodecError:
    return CodecError(f"{path or 'the data'} is {quoted(value)}, not {expected}")


def _join(path: str, name: object) -> str:
    return f"{path}/{name}" if path else str(name)


def _table(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(value, path, "a table")
    return value


def _key(kind: Any, key: str, path: str) -> Any:
    if kind is str:
        return text(key, path)
    try:
        return kind(key)
    except (TypeError, ValueError):
        raise _wrong(key, path, f"a key of type {kind.__name__}") from None


def _truth(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(value, path, "true or false")
    return value


def integer(value: object, path: str) -> int:
    """Return a whole number of 64 bits."""
    if type(value) is not int or value not in INTEGERS:
        raise _wrong(value, path, "an integer of 64 bits")
    return value


def _number(value: object, path: str) -> float:
    marked = _marked_float(value)
    if marked is not None:
        return marked
    if type(value) is float or (type(value) is int and value in INTEGERS):
        return value  # an integer stays one, as it was written
    raise _wrong(value, path, "a number")


def text(value: object, path: str) -> str:
    """Return a text. Half of a surrogate pair is none: it could not be printed or written to a file."""
    if not isinstance(value, str) or value.encode(errors="replace").decode() != value:
        raise _wrong(value, path, "a text")
    return value


def _nothing(value: object, path: str) -> None:
    if value is not None:
        raise _wrong(value, path, "null")


def _anything(value: Any, path: str) -> Any:
    """Return JSON with its marked floats put back."""
    if isinstance(value, list):
        return [_anything(part, path) for part in value]
    if not isinstance(value, dict):
        return value
    marked = _marked_float(value)
    return {key: _anything(part, path) for key, part in value.items()} if marked is None else marked


def _marked_float(value: object) -> float | None:
    if isinstance(value, dict) and value.keys() == {"float"} and value["float"] in NON_FINITE:
        return float(value["float"])
    return None


_SHAPES: Mapping[Any, Callable[[_Reader, tuple[Any, ...], object, str], Any]] = {
    tuple: _Reader.tuple_,
    dict: _Reader.mapping,
    Mapping: _Reader.mapping,
    Union: _Reader.union,
    types.UnionType: _Reader.union,
    Literal: _Reader.literal,
}
_SCALARS: Mapping[Any, Callable[[object, str], Any]] = {
    bool: _truth,
    int: integer,
    float: _number,
    str: text,
    type(None): _nothing,
    Any: _anything,
}
