"""How tasks and answers travel between machines: as Flower records that are checked when they arrive.

A record has a header, with the message's fields as JSON (see `messages.codec`), and the message's tensors as one
safetensors byte string. Nothing in it can run code. A malformed record raises a `ProtocolError`, whatever is wrong with
it: neither side may be stopped by what the other one sends.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, ConfigRecordValues, RecordDict
from safetensors.torch import load
from torch import Tensor

from fedprophet.cascade.norms import STATISTICS
from fedprophet.errors import FedProphetError
from fedprophet.messages.answers import ANSWERS, Answer, Trained
from fedprophet.messages.codec import decode, encode, integer, quoted, text
from fedprophet.messages.tasks import TASKS, Task
from fedprophet.server.rejections import plain_reason
from fedprophet.storage.files import tensors_to_bytes
from fedprophet.version import __version__

PROTOCOL: Final = 9
"""Raised whenever a record of this version could be misread by an older one, or the other way round.

The question who a node is, its hello and a refusal keep their form for ever, so that any two versions can tell each
other what is wrong.
"""

T = TypeVar("T")
Tensors = Mapping[str, Tensor]

_HEADER, _TENSORS, _SAFETENSORS = "header", "tensors", "safetensors"
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""A run id names a folder on the node: no other characters, so that it cannot name one elsewhere."""
_MOST_SIZES = 64  # of one tensor: what NumPy allows
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DTYPES = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


class ProtocolError(FedProphetError):
    """A message between server and node that cannot be understood or used."""


@dataclass(frozen=True)
class Order:
    """What a node is sent: a task, the run's id and manifest (JSON), and the frozen modules that it asked for."""

    task: Task
    run: str
    manifest: str
    modules: Mapping[str, Tensors]


@dataclass(frozen=True)
class Hello:
    """Who a node is: the protocol and version it speaks, and the client whose work it does."""

    protocol: int
    version: str
    client: int


@dataclass(frozen=True)
class Lacking:
    """The node cannot begin: it has to be sent these frozen modules first."""

    digests: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """The node did not do the work; the text says why."""

    text: str


@dataclass(frozen=True)
class _Attached:
    """The frozen modules of an order, by digest."""

    modules: Mapping[str, Mapping[str, Tensor]]


# The server's side ----------------------------------------------------------------------------------------------------


def pack_task(
    task: Task, *, run: str, manifest: str, modules: Mapping[str, Tensors] = MappingProxyType({})
) -> RecordDict:
    """Return the record of a task; `modules` are the fixed ones by digest that the node has asked for."""
    fields, tensors = encode(task)
    attached, more = encode(_Attached(modules))
    texts = {"fields": _dumps(fields), "modules": _dumps(attached)}
    return _record("task", tensors | more, work=task.kind, run=_run_id(run), manifest=manifest, **texts)


def unpack_task(record: RecordDict) -> Order:
    """Return what a node is to do; ProtocolError if the record is no task of this protocol."""
    header = _header(record)
    _expect_protocol(header)
    if header["kind"] != "task":
        raise ProtocolError(f"a task was expected, but this is a message of kind {quoted(header['kind'])}")
    run = _run_id(header.get("run"))
    tensors = _tensors(record)
    attached = {name: tensors.pop(name) for name in list(tensors) if name.startswith("modules/")}
    with _reading():
        manifest = text(header.get("manifest"), "manifest")
        modules = _loads(_Attached, header, "modules", attached).modules
        return Order(_loads(_class(TASKS, header), header, "fields", tensors), run, manifest, modules)


def hello_request() -> RecordDict:
    """Return the record that asks a node who it is."""
    return _record("who")


def unpack_answer(record: RecordDict, most: float = math.inf) -> Answer | Hello | Lacking | Refusal:
    """Return what a node answered; ProtocolError if it is no answer of this protocol, or has more bytes than `most`.

    Its size is checked first, before any tensor is made.
    """
    if isinstance(record, RecordDict):  # nothing else has a header
        names = sum(len(name) for part in record.values() for name in part) + sum(map(len, record))
        if (size := wire_bytes(record) + names) > most:
            raise ProtocolError(f"the message has {size} bytes, and no more than {most} were expected")
    header = _header(record)
    kind = header["kind"]
    with _reading():
        if kind == "hello":
            return Hello(header["protocol"], header["version"], integer(header.get("client"), "client"))
        if kind == "refusal":
            return Refusal(text(header.get("text"), "text"))
    _expect_protocol(header)
    if kind not in ("answer", "lacking"):
        raise ProtocolError(f"an answer was expected, but this is a message of kind {quoted(kind)}")
    tensors = _tensors(record)
    with _reading():
        if kind == "lacking":
            return _loads(Lacking, header, "fields", tensors)
        return _unrounded(_loads(_class(ANSWERS, header), header, "fields", tensors), header.get("rounded"))


def harmless(text: str) -> str:
    """Return a text from the other side, safe for a terminal and a journal: one line without control characters."""
    return plain_reason(" ".join(text.split()))


def other_protocol(protocol: object, version: object) -> str:
    """Return the error for a sender that speaks another protocol."""
    return (
        f"the sender speaks protocol {protocol} (fedprophet {str(version)[:40]}), but this side speaks protocol "
        f"{PROTOCOL} (fedprophet {__version__}). Install the same version of fedprophet on the server and on every node"
    )


def wire_bytes(record: RecordDict) -> int:
    """Return how many bytes a record's arrays and its other values take."""
    return sum(_size(value) for part in record.values() for value in part.values())


# The node's side ------------------------------------------------------------------------------------------------------


def is_hello(record: RecordDict) -> bool:
    """Whether a server, of any version, asks who this node is."""
    try:
        return bool(_header(record)["kind"] == "who")
    except ProtocolError:
        return False


def pack_hello(client: int) -> RecordDict:
    """Return the record of a node's answer to `hello_request`."""
    return _record("hello", client=client)


def pack_answer(answer: Answer, dtype: Literal["float32", "bfloat16"] = "float32") -> RecordDict:
    """Return the record of an answer.

    With bfloat16, trained float32 parameters are rounded to it for the journey, to half the bytes; the largest of all
    float32 numbers become infinite by that. Norm statistics and a client's own layers are never rounded.
    """
    rounded = False
    if dtype == "bfloat16" and isinstance(answer, Trained):
        # Parameters that are bfloat16 by themselves could not be told from rounded ones.
        rounded = all(value.dtype != torch.bfloat16 for value in answer.parameters.values())
        answer = _cast(answer, torch.float32, torch.bfloat16) if rounded else answer
    fields, tensors = encode(answer)
    return _record("answer", tensors, work=answer.kind, rounded=rounded, fields=_dumps(fields))


def pack_lacking(digests: Iterable[str]) -> RecordDict:
    """Return the record that asks for frozen modules."""
    return _record("lacking", fields=_dumps(encode(Lacking(tuple(digests)))[0]))


def pack_refusal(text: str) -> RecordDict:
    """Return the record of a refusal. What cannot be written as UTF-8 is replaced: a reason must always get through."""
    return _record("refusal", text=text.encode(errors="replace").decode())


# Headers --------------------------------------------------------------------------------------------------------------


def _record(kind: str, tensors: Tensors = MappingProxyType({}), **values: ConfigRecordValues) -> RecordDict:
    header = ConfigRecord({"protocol": PROTOCOL, "version": __version__, "kind": kind, **values})
    record = RecordDict({_HEADER: header})
    if tensors:
        data = tensors_to_bytes(tensors)
        record[_TENSORS] = ArrayRecord({_SAFETENSORS: Array("uint8", (len(data),), _SAFETENSORS, data)})
    return record


def _header(record: RecordDict) -> Mapping[str, Any]:
    """Return the header of a record, of any protocol."""
    header = record.get(_HEADER) if isinstance(record, RecordDict) else None
    if not isinstance(header, ConfigRecord):
        raise ProtocolError("the message has no header: it was not made by fedprophet")
    with _reading():
        integer(header.get("protocol"), "protocol")
        text(header.get("version"), "version")
        text(header.get("kind"), "kind")
    return header


def _expect_protocol(header: Mapping[str, Any]) -> None:
    if header["protocol"] != PROTOCOL:
        raise ProtocolError(other_protocol(header["protocol"], header["version"]))


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


def _run_id(value: object) -> str:
    if not isinstance(value, str) or not _RUN_ID.fullmatch(value):
        raise ProtocolError(
            f"the run id {quoted(value)} does not fit: it is made of 1 to 64 letters, digits, hyphens and underscores"
        )
    return value


# Fields ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _reading() -> Iterator[None]:
    """Turn what JSON and the codec say about malformed data into a ProtocolError."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the message cannot be understood: {harmless(str(error))}") from error


def _class(table: Mapping[str, type[T]], header: Mapping[str, Any]) -> type[T]:
    work = text(header.get("work"), "work")
    if work not in table:
        raise ValueError(f"work is {quoted(work)}, not one of {', '.join(table)}")
    return table[work]


def _loads(kind: type[T], header: Mapping[str, Any], name: str, tensors: Tensors) -> T:
    return decode(kind, json.loads(text(header.get(name), name), parse_constant=_no_constant), tensors)


def _dumps(table: Mapping[str, Any]) -> str:
    return json.dumps(table, separators=(",", ":"), allow_nan=False)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


# Tensors --------------------------------------------------------------------------------------------------------------


def _tensors(record: RecordDict) -> dict[str, Tensor]:
    """Return a record's tensors, each with memory of its own, aligned like any other; the record stays as it is."""
    unknown = set(record) - {_HEADER, _TENSORS}
    if unknown:
        raise ProtocolError(f"the message has a part {quoted(min(unknown))}, which nothing reads")
    if _TENSORS not in record:
        return {}
    part = record[_TENSORS]
    array = part.get(_SAFETENSORS) if isinstance(part, ArrayRecord) and len(part) == 1 else None
    if not isinstance(array, Array) or array.stype != _SAFETENSORS or not isinstance(array.data, bytes):
        raise ProtocolError("the tensors of the message are not one array of safetensors")
    try:
        found = load(array.data)
        problem = next(filter(None, map(_problem, found, found.values())), None)
        if problem is None:
            # Copies are aligned in memory like any other tensor. Each original goes at once: there may be many bytes.
            return {name: found.pop(name).clone() for name in list(found)}
    except Exception as error:  # the readers of safetensors and of torch raise all kinds of errors at nonsense
        problem = str(error)
    raise ProtocolError(f"the tensors of the message cannot be read: {harmless(problem)}")


def _problem(name: str, tensor: Tensor) -> str | None:
    """Return what is wrong with a tensor that has arrived."""
    if tensor.dtype not in _DTYPES:
        return f"{quoted(name)} is of type {tensor.dtype}, which no tensor of a message has"
    if tensor.dim() > _MOST_SIZES:
        return f"{quoted(name)} has {tensor.dim()} sizes, and at most {_MOST_SIZES} are possible"
    if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        return f"{quoted(name)} has an entry that is neither true nor false"
    return None


def _cast(answer: Trained, old: torch.dtype, new: torch.dtype) -> Trained:
    """Return an answer with its parameters of one type cast to another, but for norm statistics."""

    def cast(name: str, value: Tensor) -> Tensor:
        return value.to(new) if value.dtype == old and name.rpartition(".")[2] not in STATISTICS else value

    return replace(answer, parameters={name: cast(name, value) for name, value in answer.parameters.items()})


def _unrounded(answer: Answer, rounded: object) -> Answer:
    if rounded is False:
        return answer
    if rounded is not True or not isinstance(answer, Trained):
        raise ValueError(f"rounded is {quoted(rounded)}, which does not fit {quoted(answer.kind)}")
    return _cast(answer, torch.bfloat16, torch.float32)
