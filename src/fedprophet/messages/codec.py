"""A frozen dataclass as JSON and tensors, and back, exactly.

A state's fields are plain JSON values, tuples, mappings, dataclasses and tensors, nested as one likes. The JSON part
names each tensor by its path ("model/features.0.weight"); a tensor that occurs twice is kept once. Floats that JSON
lacks are written as {"float": "inf"}. Reading follows the dataclass's type hints and accepts nothing that does not fit
them; no class or code is ever named in the data.
"""

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor

S = TypeVar("S")
Tensors = dict[str, Tensor]


class StateMisfitError(ValueError):
    """Data that does not fit the dataclass it is read into."""


def pack(state: object) -> tuple[dict[str, Any], Tensors]:
    """Return a state as a JSON-able table and named tensors."""
    tensors: Tensors = {}
    names: dict[int, str] = {}
    data: dict[str, Any] = _encode(state, "", tensors, names)
    return data, tensors


def unpack(kind: type[S], data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> S:
    """Return the state that was packed; raise StateMisfitError where it does not fit the class."""
    state: S = _decode(kind, data, tensors, "")
    return state


def plain(value: Any) -> Any:
    """Return JSON with its marked floats put back."""
    if isinstance(value, list):
        return [plain(part) for part in value]
    if not isinstance(value, dict):
        return value
    number = _marked_float(value)
    return {key: plain(part) for key, part in value.items()} if number is None else number


def _encode(value: Any, path: str, tensors: Tensors, names: dict[int, str]) -> Any:
    def part(key: object, inner: Any) -> Any:
        return _encode(inner, f"{path}/{key}" if path else str(key), tensors, names)

    if isinstance(value, Tensor):
        return _name_tensor(value, path, tensors, names)
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [part(index, inner) for index, inner in enumerate(value)]
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return {str(key): part(key, inner) for key, inner in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: part(field.name, getattr(value, field.name)) for field in fields(value)}
    raise TypeError(f"a state cannot hold a {type(value).__name__} ({path})")


def _name_tensor(value: Tensor, path: str, tensors: Tensors, names: dict[int, str]) -> str:
    name = names.setdefault(id(value), path)
    if tensors.setdefault(name, value) is not value:
        raise TypeError(f"two tensors of the state have the same path {path!r}")
    return name


def _decode(hint: Any, value: Any, tensors: Mapping[str, Tensor], path: str) -> Any:
    if hint is Tensor:
        return _take(tensors, value, path)
    if is_dataclass(hint):
        return _decode_dataclass(hint, value, tensors, path)
    decode = _SHAPES.get(get_origin(hint))
    if decode is not None:
        return decode(get_args(hint), value, tensors, path)
    fits = _SCALARS.get(hint)
    if fits is None:
        return plain(value)
    number = _marked_float(value) if hint is float else None
    if number is not None:
        return number
    if not fits(value):
        raise StateMisfitError(f"{path} holds {value!r}, not {getattr(hint, '__name__', hint)}")
    return value


def _marked_float(value: Any) -> float | None:
    marked = isinstance(value, dict) and value.keys() == {"float"} and value["float"] in ("inf", "-inf", "nan")
    return float(value["float"]) if marked else None


def _take(tensors: Mapping[str, Tensor], name: Any, path: str) -> Tensor:
    if not isinstance(name, str) or name not in tensors:
        raise StateMisfitError(f"the tensor {path} is missing")
    return tensors[name]


def _decode_dataclass(kind: Any, value: Any, tensors: Mapping[str, Tensor], path: str) -> Any:
    hints = get_type_hints(kind)
    expected = [field.name for field in fields(kind)]
    if not isinstance(value, dict) or set(value) != set(expected):
        keys = sorted(value) if isinstance(value, dict) else value
        raise StateMisfitError(f"{path or 'the state'} has the fields {keys!r}, not {sorted(expected)!r}")
    return kind(**{name: _decode(hints[name], value[name], tensors, f"{path}/{name}".strip("/")) for name in expected})


def _decode_tuple(hints: tuple[Any, ...], value: Any, tensors: Mapping[str, Tensor], path: str) -> tuple[Any, ...]:
    endless = len(hints) == 2 and hints[1] is Ellipsis
    if not isinstance(value, list) or not (endless or len(value) == len(hints)):
        raise StateMisfitError(f"{path} holds {value!r}, not a tuple of its length")
    kinds = [hints[0]] * len(value) if endless else hints
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(_decode(kind, part, tensors, f"{path}/{index}") for index, (kind, part) in pairs)


def _decode_mapping(hints: tuple[Any, ...], value: Any, tensors: Mapping[str, Tensor], path: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise StateMisfitError(f"{path} holds {value!r}, not a table")
    key_kind, kind = hints
    try:
        return {key_kind(key): _decode(kind, part, tensors, f"{path}/{key}") for key, part in value.items()}
    except (TypeError, ValueError) as error:
        raise StateMisfitError(str(error)) from error


def _decode_union(hints: tuple[Any, ...], value: Any, tensors: Mapping[str, Tensor], path: str) -> Any:
    reasons = []
    for hint in hints:
        try:
            return _decode(hint, value, tensors, path)
        except StateMisfitError as misfit:
            reasons.append(str(misfit))
    raise StateMisfitError("; ".join(reasons))


def _decode_literal(choices: tuple[Any, ...], value: Any, tensors: Mapping[str, Tensor], path: str) -> Any:
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise StateMisfitError(f"{path} holds {value!r}, not one of {choices}")
    return value


_SHAPES: Mapping[Any, Callable[[tuple[Any, ...], Any, Mapping[str, Tensor], str], Any]] = {
    tuple: _decode_tuple,
    dict: _decode_mapping,
    Mapping: _decode_mapping,
    Union: _decode_union,
    types.UnionType: _decode_union,
    Literal: _decode_literal,
}
_SCALARS: Mapping[Any, Callable[[Any], bool]] = {
    bool: lambda value: isinstance(value, bool),
    int: lambda value: isinstance(value, int) and not isinstance(value, bool),
    float: lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    str: lambda value: isinstance(value, str),
    type(None): lambda value: value is None,
}
