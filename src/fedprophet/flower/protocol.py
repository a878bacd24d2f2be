"""How a `ClientTask` and a `ClientUpdate` travel between machines: as Flower records, checked when they arrive.

A record has a header, with the plain fields as JSON, and the raw bytes of each tensor. Nothing in it can run code. What
is malformed raises a `ProtocolError`, whatever is wrong with it: a server has to survive its clients, and they it.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, ConfigRecordValues, RecordDict
from torch import Tensor

from fedprophet.errors import FedProphetError
from fedprophet.messages.task import ClientTask, ClientUpdate
from fedprophet.server.rejections import plain_reason
from fedprophet.version import __version__

PROTOCOL: Final = 1
"""Raised whenever a record of this version could be misread by an older one, or the other way round.

What asks for a hello, the hello itself and a refusal keep their form for ever, so that any two versions can tell each
other what is wrong.
"""

T = TypeVar("T")
Tensors = Mapping[str, Tensor]
UpdateType = Literal["float32", "bfloat16"]

_HEADER = "header"
_MODULE = "module/"
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""A run id names a folder on the node: no other characters, so that it cannot name one elsewhere."""
_RAW, _ROUNDED = "fedprophet.raw", "fedprophet.bfloat16"
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MOST_SIZES = 64  # of one tensor: what NumPy allows
_INTEGERS = range(-(2**63), 2**64)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


class ProtocolError(FedProphetError):
    """A message between server and node that cannot be understood."""


@dataclass(frozen=True)
class Order:
    """What a node is sent: a task, the run's id and configuration (JSON), and the fixed modules that it asked for."""

    task: ClientTask
    run: str
    config: str
    modules: Mapping[str, Tensors]


@dataclass(frozen=True)
class Hello:
    """Who a node is: what it speaks, and the client whose work it does."""

    protocol: int
    version: str
    client: int


@dataclass(frozen=True)
class Lacking:
    """The node cannot begin: it has to be sent these fixed modules first."""

    digests: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """The node did not do the work; the text says why."""

    text: str


# The server's side ----------------------------------------------------------------------------------------------------


def pack_task(
    task: ClientTask, *, run: str, config: str, modules: Mapping[str, Tensors] = MappingProxyType({})
) -> RecordDict:
    """Return the record of a task; `modules` are the fixed ones by digest that the node has asked for."""
    record = _pack("task", task, run=_run_id(run), config=config)
    for name, tensors in modules.items():
        record[_MODULE + name] = _pack_tensors(tensors)
    return record


def unpack_task(record: RecordDict) -> Order:
    """Return what a node is to do; ProtocolError where the record is no task of this protocol."""
    header = _header(record)
    _expect_protocol(header)
    if header["kind"] != "task":
        raise ProtocolError(f"a task was expected, but this is a message of kind {_short(header['kind'])}")
    run, config = _run_id(header.get("run")), _text(header.get("config"), "config")
    names = tuple(name for name in record if name.startswith(_MODULE))
    modules = {name.removeprefix(_MODULE): _unpack_tensors(record, name) for name in names}
    return Order(_unpack(ClientTask, record, names), run, config, MappingProxyType(modules))


def hello_request() -> RecordDict:
    """Return the record that asks a node who it is."""
    return RecordDict({_HEADER: _make_header("who")})


def unpack_answer(record: RecordDict, most: float = math.inf) -> ClientUpdate | Hello | Lacking | Refusal:
    """Return what a node answered; ProtocolError where it is no answer of this protocol, or has more bytes than `most`.

    Its size is looked at before anything in it, and before any tensor is made.
    """
    _expect_size(record, most)
    header = _header(record)
    kind = header["kind"]
    if kind not in _EVER:
        _expect_protocol(header)
    answers = _EVER | _ANSWERS
    if kind not in answers:
        raise ProtocolError(f"an answer was expected, but this is a message of kind {_short(kind)}")
    return answers[kind](record)


def harmless(text: str) -> str:
    """Return a text of the other side for a terminal and a journal: one short line that cannot steer a terminal."""
    return plain_reason(" ".join(text.split()))


def wire_bytes(record: RecordDict) -> int:
    """Return how many bytes a record's arrays and its other values take."""
    return sum(_size(value) for part in record.values() for value in part.values())


# The node's side ------------------------------------------------------------------------------------------------------


def is_hello(record: RecordDict) -> bool:
    """Return whether a server, of whatever version, asks who this node is."""
    try:
        return bool(_header(record)["kind"] == "who")
    except ProtocolError:
        return False


def pack_hello(client: int) -> RecordDict:
    """Return the record of a node's answer to `hello_request`."""
    return RecordDict({_HEADER: _make_header("hello", client=client)})


def pack_update(update: ClientUpdate, dtype: UpdateType = "float32") -> RecordDict:
    """Return the record of an update.

    With bfloat16, float32 parameters are rounded to it for the journey, to half the bytes; the largest of all float32
    numbers become infinite by that. A client's own layers are never rounded.
    """
    return _pack("update", update, rounded=("parameters",) if dtype == "bfloat16" else ())


def pack_lacking(digests: Iterable[str]) -> RecordDict:
    """Return the record that asks for fixed modules."""
    return _pack("lacking", Lacking(tuple(digests)))


def pack_refusal(text: str) -> RecordDict:
    """Return the record of a refusal. What cannot be written as UTF-8 is replaced: a reason must always get through."""
    return RecordDict({_HEADER: _make_header("refusal", text=text.encode(errors="replace").decode())})


# Headers --------------------------------------------------------------------------------------------------------------


def _make_header(kind: str, **values: ConfigRecordValues) -> ConfigRecord:
    return ConfigRecord({"protocol": PROTOCOL, "version": __version__, "kind": kind, **values})


def _header(record: RecordDict) -> Mapping[str, Any]:
    """Return the header of a record, of whatever protocol."""
    header = record.get(_HEADER) if isinstance(record, RecordDict) else None
    if not isinstance(header, ConfigRecord):
        raise ProtocolError("the message has no header: it was not made by fedprophet")
    _integer(header.get("protocol"), "protocol")
    _text(header.get("version"), "version")
    _text(header.get("kind"), "kind")
    return header


def _expect_protocol(header: Mapping[str, Any]) -> None:
    if header["protocol"] != PROTOCOL:
        raise ProtocolError(
            f"the sender speaks protocol {header['protocol']} (fedprophet {header['version'][:40]}), but this side "
            f"speaks protocol {PROTOCOL} (fedprophet {__version__}). Install the same version of fedprophet on the "
            "server and on every node"
        )


def _expect_size(record: RecordDict, most: float) -> None:
    if not isinstance(record, RecordDict):
        return  # it has no header either, which is said in a moment
    names = sum(len(name) for part in record.values() for name in part) + sum(map(len, record))
    size = wire_bytes(record) + names
    if size > most:
        raise ProtocolError(f"the message has {size} bytes, and no more than {most} were expected")


def _run_id(value: object) -> str:
    if not isinstance(value, str) or not _RUN_ID.fullmatch(value):
        raise ProtocolError(
            f"the run id {_short(value)} does not fit: it is made of 1 to 64 letters, digits, hyphens and underscores"
        )
    return value


def _unpack_hello(record: RecordDict) -> Hello:
    header = _header(record)
    return Hello(header["protocol"], header["version"], _integer(header.get("client"), "client"))


def _unpack_refusal(record: RecordDict) -> Refusal:
    return Refusal(_text(_header(record).get("text"), "text"))


# Dataclasses ----------------------------------------------------------------------------------------------------------


def _pack(kind: str, message: Any, rounded: tuple[str, ...] = (), **values: ConfigRecordValues) -> RecordDict:
    """Return the record of a dataclass: mappings of tensors as array records, every other field in the header."""
    tensors = _tensor_fields(type(message))
    plain = {f.name: _plain(getattr(message, f.name)) for f in fields(message) if f.name not in tensors}
    text = json.dumps(plain, separators=(",", ":"), allow_nan=False)
    record = RecordDict({_HEADER: _make_header(kind, fields=text, **values)})
    for name in tensors:
        record[name] = _pack_tensors(getattr(message, name), rounded=name in rounded)
    return record


def _unpack(cls: type[T], record: RecordDict, others: Iterable[str] = ()) -> T:
    """Return the dataclass that `_pack` made a record of; `others` are records beside its own."""
    tensors = _tensor_fields(cls)
    foreign = set(record) - {_HEADER, *tensors, *others}
    if foreign:
        raise ProtocolError(f"the message has a record that nobody knows: {_short(min(foreign))}")
    text = _text(_header(record).get("fields"), "fields")
    try:
        values = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the fields of the message are no JSON: {error}") from error
    plain = _read_fields(cls, values, "fields", skip=tensors)
    return cls(**plain, **{name: _unpack_tensors(record, name) for name in tensors})


def _tensor_fields(cls: type) -> tuple[str, ...]:
    return tuple(name for name, hint in _hints(cls).items() if hint == Tensors)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def _plain(value: Any) -> Any:
    """Return a value as JSON can carry it; which type it had is known from the field's annotation."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


# Plain values, read by the annotation of the field they are for -------------------------------------------------------

Read = Callable[[object, str], Any]
"""Takes what JSON gave and the place it stands at; returns the value or raises a ProtocolError."""


def _wrong(value: object, where: str, expected: str) -> ProtocolError:
    return ProtocolError(f"{where} of the message is {_short(value)}, not {expected}")


def _short(value: object) -> str:
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # integers of more than 4300 digits cannot be written
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}…"


def _integer(value: object, where: str) -> int:
    if type(value) is not int or value not in _INTEGERS:
        raise _wrong(value, where, "an integer of 64 bits")
    return value


def _number(value: object, where: str) -> float:
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    if type(value) is float:
        return value
    if type(value) is int and value in _INTEGERS:
        return value  # it stays an integer, as it was when it was sent
    raise _wrong(value, where, "a number")


def _text(value: object, where: str) -> str:
    # Half of a surrogate pair is no text: it could not be printed or written to a file.
    if not isinstance(value, str) or value.encode(errors="replace").decode() != value:
        raise _wrong(value, where, "a text")
    return value


def _truth(value: object, where: str) -> bool:
    if type(value) is not bool:
        raise _wrong(value, where, "true or false")
    return value


def _tuple_reader(parts: tuple[Any, ...]) -> Read:
    endless = len(parts) == 2 and parts[1] is Ellipsis
    readers = [_reader(part) for part in (parts[:1] if endless else parts)]

    def read(value: object, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not (endless or len(value) == len(readers)):
            raise _wrong(value, where, "a list" if endless else f"a list of {len(readers)}")
        every = readers * len(value) if endless else readers
        return tuple(r(item, f"{where}[{i}]") for i, (r, item) in enumerate(zip(every, value, strict=True)))

    return read


def _optional_reader(parts: tuple[Any, ...]) -> Read:
    (inner,) = (_reader(part) for part in parts if part is not NoneType)
    return lambda value, where: None if value is None else inner(value, where)


def _literal_reader(parts: tuple[Any, ...]) -> Read:
    def read(value: object, where: str) -> Any:
        if not isinstance(value, str) or value not in parts:
            raise _wrong(value, where, f"one of {', '.join(parts)}")
        return value

    return read


def _mapping_reader(parts: tuple[Any, ...]) -> Read:
    read_value = _reader(parts[1])

    def read(value: object, where: str) -> dict[str, Any]:
        return {
            _text(name, where): read_value(v, f"{where}.{_short(name)}") for name, v in _table(value, where).items()
        }

    return read


def _table(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(value, where, "a table")
    return value


def _read_fields(cls: type, value: object, where: str, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields of a dataclass: every one has to be there, and no other."""
    hints = {name: hint for name, hint in _hints(cls).items() if name not in skip}
    table = _table(value, where)
    if table.keys() != hints.keys():
        name = min(table.keys() ^ hints.keys())
        problem = f"lacks {name!r}" if name in hints else f"has {_short(name)}, which nobody knows"
        raise ProtocolError(f"{where} of the message {problem}")
    return {name: _reader(hint)(table[name], f"{where}.{name}") for name, hint in hints.items()}


_PLAIN_READERS: dict[Any, Read] = {int: _integer, float: _number, str: _text, bool: _truth}
_READER_MAKERS: dict[Any, Callable[[tuple[Any, ...]], Read]] = {
    tuple: _tuple_reader,
    UnionType: _optional_reader,
    Literal: _literal_reader,
    Mapping: _mapping_reader,
}


@cache
def _reader(hint: Any) -> Read:
    """Return what reads a value of an annotated type; a type that cannot travel is a defect of ours."""
    if hint in _PLAIN_READERS:
        return _PLAIN_READERS[hint]
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value, where: hint(**_read_fields(hint, value, where))
    if get_origin(hint) not in _READER_MAKERS:
        raise TypeError(f"a field of type {hint} cannot travel: teach fedprophet.flower.protocol to read it")
    return _READER_MAKERS[get_origin(hint)](get_args(hint))


# Tensors --------------------------------------------------------------------------------------------------------------


def _pack_tensors(tensors: Tensors, rounded: bool = False) -> ArrayRecord:
    return ArrayRecord({name: _pack_tensor(tensor, rounded) for name, tensor in tensors.items()})


def _pack_tensor(tensor: Tensor, rounded: bool) -> Array:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ProtocolError(f"a tensor of type {dtype} cannot be sent. Known: {', '.join(_DTYPES)}")
    rounded = rounded and tensor.dtype == torch.float32
    written = tensor.detach().cpu().to(torch.bfloat16 if rounded else tensor.dtype).contiguous()
    data = _little_endian(_memory(written), written.itemsize).tobytes()
    return Array(dtype, tuple(tensor.shape), _ROUNDED if rounded else _RAW, data)


def _unpack_tensors(record: RecordDict, name: str) -> dict[str, Tensor]:
    arrays = record.get(name)
    if not isinstance(arrays, ArrayRecord):
        raise ProtocolError(f"the message has no arrays {_short(name)}")
    return {_text(key, f"a name in {name}"): _unpack_tensor(array, f"{name}/{key}") for key, array in arrays.items()}


def _unpack_tensor(array: Array, where: str) -> Tensor:
    """Return a tensor with memory of its own, aligned like any other; the array stays as it is."""
    if not isinstance(array, Array):
        raise _wrong(array, where, "an array")
    dtype, shape, data = array.dtype, array.shape, array.data
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _wrong(dtype, f"the type of {_short(where)}", f"one of {', '.join(_DTYPES)}")
    forms = {_RAW: _DTYPES[dtype]} | ({_ROUNDED: torch.bfloat16} if dtype == "float32" else {})
    if not isinstance(array.stype, str) or array.stype not in forms:
        raise _wrong(array.stype, f"the form of {_short(where)}", f"one of {', '.join(forms)}")
    form = forms[array.stype]
    sizes = shape if isinstance(shape, tuple) else (None,)
    if len(sizes) > _MOST_SIZES or not all(type(n) is int and 0 <= n < 2**63 for n in sizes):
        raise _wrong(shape, f"the shape of {_short(where)}", f"a list of at most {_MOST_SIZES} sizes")
    expected = math.prod(shape) * form.itemsize
    if not isinstance(data, bytes) or len(data) != expected:
        found = f"{len(data)} bytes" if isinstance(data, bytes) else _short(data)
        wanted = f"the {_short(expected)} bytes of {dtype}{_short(shape)}"
        raise ProtocolError(f"{_short(where)} of the message has {found}, not {wanted}")
    try:
        tensor = torch.empty(shape, dtype=form)
    except (RuntimeError, TypeError, ValueError) as error:  # one without entries, whose sizes overflow all the same
        raise _wrong(shape, f"the shape of {_short(where)}", "one that a tensor can have") from error
    source = np.frombuffer(data, dtype=np.uint8)
    if form == torch.bool and source.max(initial=0) > 1:
        raise _wrong(int(source.max()), f"an entry of {_short(where)}", "true or false")
    _memory(tensor)[:] = _little_endian(source, form.itemsize)
    return tensor.to(_DTYPES[dtype])


def _memory(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a contiguous tensor, not a copy of them."""
    memory: np.ndarray[Any, Any] = tensor.view(-1).view(torch.uint8).numpy()
    return memory


def _little_endian(data: np.ndarray[Any, Any], itemsize: int) -> np.ndarray[Any, Any]:
    """Return bytes of this machine's order in the order of the wire, or the other way round."""
    return data if sys.byteorder == "little" else data.reshape(-1, itemsize)[:, ::-1].reshape(-1)


def _size(value: object) -> int:
    if isinstance(value, Array):
        return _size(value.data)
    if isinstance(value, list):
        return sum(_size(item) for item in value)
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    if isinstance(value, bytes):
        return len(value)
    return 1 if isinstance(value, bool) else 8  # Flower sends integers and floats as 64 bits


_EVER: dict[str, Callable[[RecordDict], Hello | Refusal]] = {"hello": _unpack_hello, "refusal": _unpack_refusal}
"""Answers that can be read whatever protocol they were made by."""
_ANSWERS: dict[str, Callable[[RecordDict], ClientUpdate | Lacking]] = {
    "update": lambda record: _unpack(ClientUpdate, record),
    "lacking": lambda record: _unpack(Lacking, record),
}
