import json
import math
import pickle
import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, make_dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedprophet.errors import FedProphetError
from fedprophet.flower import protocol
from fedprophet.flower.protocol import (
    PROTOCOL,
    Hello,
    Lacking,
    Order,
    ProtocolError,
    Refusal,
    hello_request,
    is_hello,
    pack_hello,
    pack_lacking,
    pack_refusal,
    pack_task,
    pack_update,
    unpack_answer,
    unpack_task,
    wire_bytes,
)
from fedprophet.messages.task import (
    ClientTask,
    ClientUpdate,
    FrozenModule,
    LocalTraining,
    Resources,
    Timeline,
)
from fedprophet.threat import ThreatModel
from fedprophet.version import __version__

INF, NAN = math.inf, math.nan

TENSORS = {
    # Neither sorted by name nor grouped by type: an order that changes on the way shows.
    "z.weight": torch.tensor([[1.0, -0.0, NAN], [INF, -INF, 1e-45]]),
    "a.double": torch.tensor([0.1, NAN], dtype=torch.float64),
    "m.half": torch.tensor([0.5], dtype=torch.float16),
    "b.brain": torch.tensor([3.140625, INF], dtype=torch.bfloat16),
    "y.long": torch.tensor([2**62 + 1, -(2**63)]),
    "c.int": torch.tensor([-7], dtype=torch.int32),
    "x.short": torch.tensor([-300, 300], dtype=torch.int16),
    "d.char": torch.tensor([-128], dtype=torch.int8),
    "w.byte": torch.tensor([255, 0], dtype=torch.uint8),
    "e.bool": torch.tensor([[True, False]]),
    "v.scalar": torch.tensor(5),
    "f.scalar": torch.tensor(-0.0),
    "u.empty": torch.empty(0, 3),
    "g.empty": torch.empty(2, 0, dtype=torch.int64),
    "weiß/λ.0 \n": torch.ones(1),
}

TASK = ClientTask(
    kind="train",
    round=7,
    client=3,
    seed=2**63 - 1,
    number=2,
    architecture="cnn-3",
    first=4,
    last=6,
    head=0,
    frozen=(FrozenModule(0, 2, "ab" * 16), FrozenModule(2, 4, "0f" * 16)),
    threat=ThreatModel("l2", 0.1, 0.1 / 3, 10, (-INF, 0.3)),
    training=LocalTraining(30, 64, 0.1, 0.9, 1e-4, 1e-5),
    batch=17,
    timeline=Timeline(((1, 3), (8, 12)), 5),
    wants_local=True,
    attack="autoattack",
    samples=0,
    part=(0, 100),
    adversarial_statistics=True,
    kept={"z": torch.tensor([5, 1, 3]), "a": torch.tensor([], dtype=torch.int64)},
    targets={"weights": torch.tensor([0.25]), "labels": torch.tensor([1])},
    parameters=TENSORS,
)
UPDATE = ClientUpdate(
    kind="train",
    round=7,
    client=3,
    weight=120.5,
    metrics={"z": NAN, "loss": 0.1 + 0.2, "a": -INF, "b": INF, "zero": -0.0, "tiny": 5e-324, "huge": 1.7e308},
    resources=Resources(2**40 + 1, 1e12 / 3, INF),
    local={"bn.1.running_mean": torch.tensor([1 + 2**-20]), "bn.0.num_batches_tracked": torch.tensor(9)},
    parameters=TENSORS,
    number=4,
)


def bits(value: Any) -> Any:
    """Return a value such that two are equal only if they are the same to the last bit, in type and in order."""
    if isinstance(value, Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        return "tensor", str(value.dtype), tuple(value.shape), data
    if is_dataclass(value):
        return type(value).__name__, [(f.name, bits(getattr(value, f.name))) for f in fields(value)]
    if isinstance(value, Mapping):
        return "mapping", [(name, bits(inner)) for name, inner in value.items()]
    if isinstance(value, tuple):
        return "tuple", [bits(inner) for inner in value]
    if isinstance(value, float) and not math.isnan(value):
        return "float", struct.pack(">d", value)
    return type(value).__name__, str(value)


def sent(record: RecordDict) -> RecordDict:
    """Return what arrives when Flower cuts a record into objects, as it does on the network, and puts it together."""
    objects = get_all_nested_objects(record)
    contents = {name: item.deflate() for name, item in objects.items()}
    arrived = inflate_object_from_contents(record.object_id, contents)
    assert isinstance(arrived, RecordDict)
    return arrived


def order(record: RecordDict) -> Order:
    return unpack_task(sent(record))


def task_record(task: ClientTask = TASK, **modules: Mapping[str, Tensor]) -> RecordDict:
    return pack_task(task, run="0123abcd", config='{"rounds": 3}', modules=modules)


def default(field: "Field[Any]") -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


@pytest.fixture(autouse=True)
def _no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# Every field travels --------------------------------------------------------------------------------------------------


def test_a_task_arrives_as_it_was() -> None:
    arrived = order(task_record())
    assert (arrived.run, arrived.config, dict(arrived.modules)) == ("0123abcd", '{"rounds": 3}', {})
    assert bits(arrived.task) == bits(TASK)


def test_an_update_arrives_as_it_was() -> None:
    assert bits(unpack_answer(sent(pack_update(UPDATE)))) == bits(UPDATE)


@pytest.mark.parametrize("message", [TASK, UPDATE], ids=["task", "update"])
def test_the_examples_above_say_something_in_every_field(message: ClientTask | ClientUpdate) -> None:
    """A new field has to be given a value above that is not its default: only then these tests show that it travels."""
    for field in fields(message):
        assert bits(getattr(message, field.name)) != bits(default(field)), field.name


@pytest.mark.parametrize("name", [f.name for f in fields(ClientTask) if default(f) is not MISSING])
def test_a_task_with_one_field_at_its_default(name: str) -> None:
    """None stays None beside 0, an empty mapping stays empty, and no other field lends its value."""
    (field,) = (f for f in fields(ClientTask) if f.name == name)
    task = replace(TASK, **{name: default(field)})
    assert bits(order(task_record(task)).task) == bits(task)


@pytest.mark.parametrize("name", [f.name for f in fields(ClientUpdate) if default(f) is not MISSING])
def test_an_update_with_one_field_at_its_default(name: str) -> None:
    (field,) = (f for f in fields(ClientUpdate) if f.name == name)
    update = replace(UPDATE, **{name: default(field)})
    assert bits(unpack_answer(sent(pack_update(update)))) == bits(update)


def test_the_least_that_a_task_and_an_update_can_say() -> None:
    task = ClientTask("report", 0, -1, 0)
    assert bits(order(task_record(task)).task) == bits(task)
    update = ClientUpdate("report", 0, -1, 0.0)
    assert bits(unpack_answer(sent(pack_update(update)))) == bits(update)


@pytest.mark.parametrize("kind", ["report", "train", "evaluate", "measure", "predict", "distill", "adopt"])
def test_every_kind(kind: Any) -> None:
    assert order(task_record(replace(TASK, kind=kind))).task.kind == kind


def test_none_and_zero_are_told_apart() -> None:
    for head, samples in ((None, 0), (0, None), (1, 1)):
        task = order(task_record(replace(TASK, head=head, samples=samples))).task
        assert (task.head, task.samples) == (head, samples)


def test_an_integer_in_a_float_field_stays_one() -> None:
    """It would be written to the journal as another text."""
    update = unpack_answer(pack_update(replace(UPDATE, weight=3, metrics={"samples": 5})))
    assert isinstance(update, ClientUpdate)
    assert (repr(update.weight), repr(update.metrics)) == ("3", "{'samples': 5}")


def test_a_field_that_is_added_later_travels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    added = [("note", tuple[float | None, ...], (0.5, None)), ("extra", Mapping[str, Tensor], None)]
    longer = make_dataclass("Longer", added, bases=(ClientTask,), frozen=True)
    monkeypatch.setattr(protocol, "ClientTask", longer)
    task = longer("report", 1, 2, 3, note=(None, INF), extra={"x": torch.ones(2)})
    assert bits(order(task_record(task)).task) == bits(task)


def test_a_field_that_cannot_travel_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = make_dataclass("Longer", [("ids", set[int], None)], bases=(ClientTask,), frozen=True)
    monkeypatch.setattr(protocol, "ClientTask", longer)
    with pytest.raises(TypeError, match="cannot travel"):
        order(task_record(longer("report", 1, 2, 3)))


def test_modules_arrive_by_their_digest_in_order() -> None:
    modules = {"b" * 32: {"z": torch.tensor([1.5]), "a": torch.tensor([NAN])}, "a" * 32: {}}
    arrived = order(task_record(**modules))
    assert bits(arrived.modules) == bits(modules)
    assert bits(arrived.task) == bits(TASK)


def test_identical_mappings_do_not_become_one() -> None:
    same = {"w": torch.ones(2)}
    task = order(task_record(replace(TASK, kept=same, targets=same, parameters={**same, "v": torch.ones(2)}))).task
    task.kept["w"].zero_()
    task.parameters["w"].zero_()
    assert task.targets["w"].tolist() == task.parameters["v"].tolist() == [1, 1]


def test_a_hello() -> None:
    request = sent(hello_request())
    assert is_hello(request)
    assert unpack_answer(sent(pack_hello(0))) == Hello(PROTOCOL, __version__, 0)
    assert not any(map(is_hello, (pack_hello(0), task_record(), pack_refusal(""), RecordDict())))


def test_what_is_lacking() -> None:
    assert unpack_answer(sent(pack_lacking(["f" * 32, "a" * 32]))) == Lacking(("f" * 32, "a" * 32))
    assert unpack_answer(sent(pack_lacking(()))) == Lacking(())


@pytest.mark.parametrize("text", ["the disk is full", "", "zwölf λ\n\0", "x" * 100_000])
def test_a_refusal(text: str) -> None:
    assert unpack_answer(sent(pack_refusal(text))) == Refusal(text)


def test_a_refusal_gets_through_whatever_its_text() -> None:
    """File names that are no UTF-8 end up in error texts like this."""
    assert unpack_answer(sent(pack_refusal("cannot read \udcff.png"))) == Refusal("cannot read ?.png")


# Tensors --------------------------------------------------------------------------------------------------------------


def tensor_after(tensor: Tensor) -> Tensor:
    return order(task_record(replace(TASK, parameters={"w": tensor}))).task.parameters["w"]


def test_tensors_as_models_have_them() -> None:
    parameter = torch.nn.Parameter(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    arrived = tensor_after(parameter)
    assert (type(arrived), arrived.requires_grad, arrived.tolist()) == (Tensor, False, [[1, 2, 3], [4, 5, 6]])
    assert tensor_after(parameter.T).tolist() == [[1, 4], [2, 5], [3, 6]]
    assert tensor_after(torch.arange(5)[1::2]).tolist() == [1, 3]
    assert tensor_after(torch.tensor([1.0, 2.0]).expand(3, 2)).tolist() == [[1, 2]] * 3
    images = torch.arange(24.0).reshape(1, 2, 3, 4)
    assert torch.equal(tensor_after(images.to(memory_format=torch.channels_last)), images)


def test_the_bytes_of_the_wire_are_the_raw_little_endian_ones() -> None:
    array = task_record(replace(TASK, parameters={"w": torch.tensor([[1, 258]], dtype=torch.int16)}))["parameters"]["w"]
    assert (array.dtype, array.shape, array.stype, array.data) == ("int16", (1, 2), "fedprophet.raw", b"\1\0\2\1")


def test_a_big_endian_machine_turns_the_bytes_round(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.tensor([1, 258], dtype=torch.int16)
    little = task_record(replace(TASK, parameters={"w": tensor}))
    monkeypatch.setattr(protocol, "sys", SimpleNamespace(byteorder="big"))
    big = task_record(replace(TASK, parameters={"w": tensor}))
    assert big["parameters"]["w"].data == b"\0\1\1\2"
    assert order(big).task.parameters["w"].tolist() == [1, 258]
    assert order(little).task.parameters["w"].tolist() == [256, 513]
    assert order(task_record()).task.parameters["g.empty"].shape == (2, 0)


def test_an_unpacked_tensor_is_writable_and_shares_nothing() -> None:
    record = task_record()
    before = record["parameters"]["z.weight"].data
    first, second = unpack_task(record).task.parameters, unpack_task(record).task.parameters
    first["z.weight"].fill_(7)
    assert record["parameters"]["z.weight"].data == before
    assert bits(second["z.weight"]) == bits(TENSORS["z.weight"])
    assert all(tensor.data_ptr() % 64 == 0 for tensor in second.values())


def test_packing_changes_nothing_and_shares_nothing() -> None:
    tensor = torch.tensor([1.0])
    record = task_record(replace(TASK, parameters={"w": tensor}))
    tensor.zero_()
    assert unpack_task(record).task.parameters["w"].item() == 1


def test_a_tensor_of_a_type_that_nobody_knows_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match=r"complex64 cannot be sent\. Known: float64, float32"):
        task_record(replace(TASK, parameters={"w": torch.zeros(1, dtype=torch.complex64)}))


# bfloat16 -------------------------------------------------------------------------------------------------------------

# A bfloat16 has 8 significant bits, ties go to the even one, and the largest is 2^128 − 2^120.
ROUNDED = {
    1 + 2**-7: 1 + 2**-7,
    1 + 2**-8: 1.0,
    1 + 3 * 2**-8: 1 + 2**-6,
    math.pi: 3.140625,
    -0.0: -0.0,
    INF: INF,
    -INF: -INF,
    2.0**-149: 0.0,
    3.4028234e38: INF,
}


def test_bfloat16_rounds_parameters_alone() -> None:
    exact = {"z": torch.tensor(math.pi, dtype=torch.float64), "n": torch.tensor([2**60 + 1])}
    parameters = {"w": torch.tensor([*ROUNDED]), **exact, "a": torch.tensor(math.pi)}
    local = {"bn.running_mean": torch.tensor([math.pi])}
    update = replace(UPDATE, parameters=parameters, local=local, metrics={"loss": math.pi}, weight=math.pi)
    arrived = unpack_answer(sent(pack_update(update, "bfloat16")))
    expected = {"w": torch.tensor([*ROUNDED.values()]), **exact, "a": torch.tensor(3.140625)}
    assert bits(arrived) == bits(replace(update, parameters=expected))


def test_what_is_no_number_is_none_after_rounding() -> None:
    """The server has to see that a client's training diverged."""
    parameters = {"w": torch.tensor([NAN, 1.0, -NAN])}
    arrived = unpack_answer(pack_update(replace(UPDATE, parameters=parameters), "bfloat16"))
    assert isinstance(arrived, ClientUpdate)
    assert torch.isnan(arrived.parameters["w"]).tolist() == [True, False, True]


def test_bfloat16_halves_the_bytes() -> None:
    update = ClientUpdate("train", 1, 2, 3.0, parameters={"w": torch.zeros(10, 100), "n": torch.zeros(3).long()})
    exact, rounded = pack_update(update), pack_update(update, "bfloat16")
    assert wire_bytes(exact) - wire_bytes(rounded) == 2000
    assert len(rounded["parameters"]["w"].data) == 2000
    assert wire_bytes(pack_update(update, "float32")) == wire_bytes(exact)


def test_what_is_bfloat16_by_itself_stays_so() -> None:
    update = replace(UPDATE, parameters={"w": torch.ones(2, dtype=torch.bfloat16), "empty": torch.empty(0)})
    assert bits(unpack_answer(pack_update(update, "bfloat16"))) == bits(update)


# Bytes ----------------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_arrays_and_values() -> None:
    record = RecordDict(
        {
            "c": ConfigRecord(
                {"i": 1, "f": 0.5, "b": True, "s": "äb", "y": b"123", "none": "", "l": [], "m": ["a", "bc"]}
            ),
            "a": ArrayRecord({"x": Array("uint8", (5,), "?", b"12345"), "y": Array("uint8", (0,), "?", b"")}),
            "m": MetricRecord({"x": [1, 2], "y": 0.5}),
        }
    )
    assert wire_bytes(record) == (8 + 8 + 1 + 3 + 3 + 0 + 0 + 3) + 5 + (16 + 8)
    assert wire_bytes(RecordDict()) == 0


def test_bytes_of_a_hello() -> None:
    assert wire_bytes(pack_hello(3)) == 8 + len(__version__) + len("hello") + 8


def test_bytes_of_a_task_grow_with_its_tensors_and_modules() -> None:
    small = wire_bytes(task_record(replace(TASK, parameters={})))
    assert wire_bytes(task_record(replace(TASK, parameters={"w": torch.zeros(5)}))) == small + 20
    assert (
        wire_bytes(task_record(replace(TASK, parameters={}), **{"a" * 32: {"w": torch.zeros(7).double()}}))
        == small + 56
    )


# Other versions -------------------------------------------------------------------------------------------------------


def with_header(record: RecordDict, **values: Any) -> RecordDict:
    record["header"].update(values)
    return record


@pytest.mark.parametrize("theirs", [0, 2])
@pytest.mark.parametrize(
    ("record", "unpack"),
    [
        (task_record, unpack_task),
        (lambda: pack_update(UPDATE), unpack_answer),
        (lambda: pack_lacking(["a" * 32]), unpack_answer),
        (lambda: RecordDict({"header": ConfigRecord({"kind": "a kind of the future"})}), unpack_answer),
    ],
    ids=["task", "update", "lacking", "unknown"],
)
def test_another_protocol_is_refused_in_a_sentence(
    record: Callable[[], RecordDict], unpack: Callable[[RecordDict], object], theirs: int
) -> None:
    with pytest.raises(ProtocolError) as caught:
        unpack(with_header(record(), protocol=theirs, version="9.8.7"))
    assert str(caught.value) == (
        f"the sender speaks protocol {theirs} (fedprophet 9.8.7), but this side speaks protocol {PROTOCOL} (fedprophet "
        f"{__version__}). Install the same version of fedprophet on the server and on every node"
    )


def test_another_version_of_the_same_protocol_is_welcome() -> None:
    assert bits(unpack_answer(with_header(pack_update(UPDATE), version="9.8.7"))) == bits(UPDATE)


def test_hellos_and_refusals_of_any_protocol_are_understood() -> None:
    """These texts are for ever: the other side may be of any version."""
    header = {"protocol": 7, "version": "9.8.7", "something": "new"}
    assert is_hello(RecordDict({"header": ConfigRecord({**header, "kind": "who"}), "new": ArrayRecord()}))
    hello = RecordDict({"header": ConfigRecord({**header, "kind": "hello", "client": 5})})
    assert unpack_answer(hello) == Hello(7, "9.8.7", 5)
    refusal = RecordDict({"header": ConfigRecord({**header, "kind": "refusal", "text": "no"})})
    assert unpack_answer(refusal) == Refusal("no")
    assert PROTOCOL == 1
    ours = {"protocol": 1, "version": __version__}
    assert dict(hello_request()["header"]) == {**ours, "kind": "who"}
    assert dict(pack_hello(5)["header"]) == {**ours, "kind": "hello", "client": 5}
    assert dict(pack_refusal("no")["header"]) == {**ours, "kind": "refusal", "text": "no"}


# What is malformed ----------------------------------------------------------------------------------------------------


def raw(record: Any, key: str, value: Any) -> None:
    """Set an item past Flower's own checks."""
    record.__dict__["_data"][key] = value


def with_fields(record: RecordDict, change: Callable[[dict[str, Any]], object]) -> RecordDict:
    table = json.loads(record["header"]["fields"])
    change(table)
    return with_header(record, fields=json.dumps(table))


def with_array(**attributes: Any) -> RecordDict:
    """A task whose only parameter, of 12 bytes, is not what it should be."""
    record = task_record(replace(TASK, parameters={"w": torch.zeros(1, 3)}))
    for name, value in attributes.items():
        setattr(record["parameters"]["w"], name, value)
    return record


def without(record: RecordDict, *path: str) -> RecordDict:
    inner: Any = record
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return record


def renamed(record: RecordDict, name: Any) -> RecordDict:
    raw(record["parameters"], name, record["parameters"].pop("z.weight"))
    return record


def field(*path: Any, to: Any) -> Callable[[], RecordDict]:
    def change(table: Any) -> None:
        for key in path[:-1]:
            table = table[key]
        table[path[-1]] = to

    return lambda: with_fields(task_record(), change)


BAD_TASKS: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: None, "no header"),
    "a dict": (lambda: {"header": {"protocol": 1}}, "no header"),
    "empty": (RecordDict, "no header"),
    "header of another type": (lambda: RecordDict({"header": ArrayRecord()}), "no header"),
    "no protocol": (lambda: without(task_record(), "header", "protocol"), "protocol of the message is None"),
    "protocol a text": (lambda: with_header(task_record(), protocol="1"), "protocol of the message is '1'"),
    "protocol true": (lambda: with_header(task_record(), protocol=True), "protocol of the message is True"),
    "no version": (lambda: without(task_record(), "header", "version"), "version of the message is None"),
    "version bytes": (lambda: with_header(task_record(), version=b"1"), "version of the message is b'1', not a text"),
    "no kind": (lambda: without(task_record(), "header", "kind"), "kind of the message is None"),
    "kind a list": (lambda: with_header(task_record(), kind=["task"]), "kind of the message is"),
    "an update": (lambda: pack_update(UPDATE), "a task was expected.*'update'"),
    "unknown kind": (lambda: with_header(task_record(), kind="work"), "a task was expected.*'work'"),
    "no run": (lambda: without(task_record(), "header", "run"), "the run id None does not fit"),
    "run with a path": (lambda: with_header(task_record(), run="../../etc"), "the run id '../../etc' does not fit"),
    "run with a newline": (lambda: with_header(task_record(), run="abc\n"), "run id"),
    "run too long": (lambda: with_header(task_record(), run="a" * 65), "run id"),
    "run empty": (lambda: with_header(task_record(), run=""), "run id"),
    "no config": (lambda: without(task_record(), "header", "config"), "config of the message is None, not a text"),
    "no fields": (lambda: without(task_record(), "header", "fields"), "fields of the message is None"),
    "fields no JSON": (lambda: with_header(task_record(), fields="{'round': 1}"), "no JSON"),
    "fields empty": (lambda: with_header(task_record(), fields=""), "no JSON"),
    "fields too deep": (lambda: with_header(task_record(), fields="[" * 100_000), "no JSON"),
    "fields a list": (lambda: with_header(task_record(), fields="[]"), r"fields of the message is \[\], not a table"),
    "NaN as a word": (lambda: with_header(task_record(), fields='{"seed": NaN}'), "NaN is no JSON number"),
    "digits without end": (lambda: with_header(task_record(), fields='{"seed": ' + "1" * 5000 + "}"), "no JSON"),
    "missing field": (lambda: with_fields(task_record(), lambda t: t.pop("seed")), "lacks 'seed'"),
    "foreign field": (lambda: with_fields(task_record(), lambda t: t.update(zeal=1)), "has 'zeal', which nobody knows"),
    "tensors in the header": (lambda: with_fields(task_record(), lambda t: t.update(kept={})), "has 'kept'"),
    "round a text": (field("round", to="7"), "fields.round of the message is '7', not an integer"),
    "round a float": (field("round", to=7.0), "fields.round of the message is 7.0, not an integer"),
    "round true": (field("round", to=True), "fields.round of the message is True, not an integer"),
    "round none": (field("round", to=None), "fields.round of the message is None, not an integer"),
    "round too large": (field("round", to=2**64), "fields.round of the message is 1844.*, not an integer of 64 bits"),
    "kind unknown": (field("kind", to="attack"), "fields.kind of the message is 'attack', not one of report, train"),
    "kind of the task a list": (field("kind", to=["train"]), "fields.kind"),
    "architecture a number": (field("architecture", to=1), "fields.architecture of the message is 1, not a text"),
    "half a pair": (field("architecture", to="\ud800"), "fields.architecture of the message is '.ud800', not a text"),
    "head a text": (field("head", to="0"), "fields.head"),
    "wants_local a number": (field("wants_local", to=1), "fields.wants_local of the message is 1, not true or false"),
    "part of three": (field("part", to=[1, 2, 3]), r"fields.part of the message is \[1, 2, 3\], not a list of 2"),
    "part a table": (field("part", to={"0": 1, "1": 2}), "fields.part"),
    "part with a text": (field("part", to=[1, "2"]), r"fields.part\[1\] of the message is '2'"),
    "frozen a text": (field("frozen", to="ab"), "fields.frozen of the message is 'ab', not a list"),
    "frozen none": (field("frozen", to=None), "fields.frozen"),
    "frozen of lists": (field("frozen", to=[[0, 1, "a"]]), r"fields.frozen\[0\] of the message is .*, not a table"),
    "frozen without digest": (field("frozen", 1, to={"first": 1, "last": 2}), r"fields.frozen\[1\].*lacks 'digest'"),
    "digest a number": (field("frozen", 0, "digest", to=5), r"fields.frozen\[0\].digest of the message is 5"),
    "discarded": (field("timeline", "discarded", to=[[1]]), r"fields.timeline.discarded\[0\].*not a list of 2"),
    "timeline none": (field("timeline", to=None), "fields.timeline of the message is None, not a table"),
    "radius a text": (field("threat", "radius", to="0.1"), "fields.threat.radius of the message is '0.1', not a num"),
    "radius true": (field("threat", "radius", to=True), "fields.threat.radius"),
    "radius none": (field("threat", "radius", to=None), "fields.threat.radius"),
    "radius too large": (field("threat", "radius", to=10**400), "fields.threat.radius of the message is 1000"),
    "bounds too short": (field("threat", "bounds", to=[0.0]), "fields.threat.bounds"),
    "norm unknown": (
        field("threat", "norm", to="l1"),
        "fields.threat.norm of the message is 'l1', not one of linf, l2",
    ),
    "training a list": (field("training", to=[]), "fields.training"),
    "no parameters": (lambda: without(task_record(), "parameters"), "has no arrays 'parameters'"),
    "foreign record": (lambda: with_record("other", ArrayRecord()), "a record that nobody knows: 'other'"),
    "module of values": (lambda: with_record("module/ab", ConfigRecord()), "has no arrays 'module/ab'"),
    "no array": (lambda: with_raw("parameters", "z.weight", 5), "parameters/z.weight.*is 5, not an array"),
    "name a number": (lambda: renamed(task_record(), 5), "a name in parameters of the message is 5, not a text"),
    "name half a pair": (lambda: renamed(task_record(), "\ud800"), "a name in parameters"),
    "unknown dtype": (lambda: with_array(dtype="complex64"), "the type of 'parameters/w'.*not one of float64"),
    "dtype of torch": (lambda: with_array(dtype=torch.float32), "the type of 'parameters/w'"),
    "dtype a list": (lambda: with_array(dtype=["float32"]), "the type of 'parameters/w'"),
    "a NumPy array": (lambda: with_numpy(np.zeros((1, 3), np.float32)), "the form of 'parameters/w'.*'numpy.ndarray'"),
    "a pickle": (lambda: with_array(stype="pickle", data=pickle.dumps([1, 2, 3])), "the form of 'parameters/w'"),
    "form a list": (lambda: with_array(stype=["fedprophet.raw"]), "the form of 'parameters/w'"),
    "rounded integers": (
        lambda: with_array(dtype="int64", stype="fedprophet.bfloat16", data=b"123456"),
        "the form of 'parameters/w'.*is 'fedprophet.bfloat16', not one of fedprophet.raw",
    ),
    "too few bytes": (
        lambda: with_array(data=b"1" * 11),
        r"'parameters/w' of the message has 11 bytes, not the 12 bytes of float32\(1, 3\)",
    ),
    "too many bytes": (lambda: with_array(data=b"1" * 13), "has 13 bytes, not the 12 bytes"),
    "no bytes": (lambda: with_array(data=None), "has None, not the 12 bytes"),
    "bytes a text": (lambda: with_array(data="1" * 12), "not the 12 bytes"),
    "bytes of another type": (lambda: with_array(dtype="float64"), "has 12 bytes, not the 24 bytes of float64"),
    "bytes unrounded": (lambda: with_array(stype="fedprophet.bfloat16"), "has 12 bytes, not the 6 bytes of float32"),
    "shape a list": (lambda: with_array(shape=[1, 3]), "the shape of 'parameters/w'"),
    "shape a number": (lambda: with_array(shape=3), "the shape of 'parameters/w'"),
    "negative sizes": (lambda: with_array(shape=(-1, -3)), "the shape of 'parameters/w'"),
    "true as a size": (lambda: with_array(shape=(True, 3)), "the shape of 'parameters/w'"),
    "a float as a size": (lambda: with_array(shape=(1.0, 3)), "the shape of 'parameters/w'"),
    "sizes that overflow": (lambda: with_array(shape=(0, 2**40, 2**40), data=b""), "the shape of 'parameters/w'"),
    "a size that overflows": (lambda: with_array(shape=(0, 2**70), data=b""), "the shape of 'parameters/w'"),
    "endless sizes": (lambda: with_array(shape=(2**62,) * 64), "has 12 bytes, not the"),
    "a size that cannot be written": (
        lambda: with_array(shape=(10**5000,)),
        "the shape of 'parameters/w' of the message is a tuple, not",
    ),
    "too many sizes": (lambda: with_array(shape=(1,) * 65, data=b"1234"), "at most 64 sizes"),
    "neither true nor false": (
        lambda: with_array(dtype="bool", data=b"\0\1\2"),
        "an entry of 'parameters/w' of the message is 2, not true or false",
    ),
}


def with_record(name: str, part: Any) -> RecordDict:
    record = task_record()
    record[name] = part
    return record


def with_raw(record: str, name: str, value: Any) -> RecordDict:
    made = task_record()
    raw(made[record], name, value)
    return made


def with_numpy(values: Any) -> RecordDict:
    record = with_array()
    record["parameters"]["w"] = Array(values)
    return record


@pytest.mark.parametrize("case", BAD_TASKS)
def test_a_malformed_task_is_refused_in_a_sentence(case: str) -> None:
    make, text = BAD_TASKS[case]
    record = make()
    with pytest.raises(ProtocolError, match=text) as caught:
        unpack_task(record)
    assert len(str(caught.value)) < 500


BAD_ANSWERS: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: None, "no header"),
    "empty": (RecordDict, "no header"),
    "a task": (task_record, "an answer was expected.*'task'"),
    "a question": (hello_request, "an answer was expected.*'who'"),
    "unknown kind": (lambda: with_header(pack_update(UPDATE), kind="gossip"), "an answer was expected.*'gossip'"),
    "hello of nobody": (lambda: without(pack_hello(1), "header", "client"), "client of the message is None"),
    "hello of a text": (lambda: with_header(pack_hello(1), client="1"), "client of the message is '1', not an integer"),
    "hello of true": (lambda: with_header(pack_hello(1), client=True), "client of the message is True"),
    "refusal without text": (lambda: without(pack_refusal("no"), "header", "text"), "text of the message is None"),
    "refusal of bytes": (lambda: with_header(pack_refusal("no"), text=b"no"), "text of the message is b'no'"),
    "lacking a number": (lambda: with_header(pack_lacking([]), fields='{"digests":[1]}'), r"fields.digests\[0\]"),
    "lacking a text": (lambda: with_header(pack_lacking([]), fields='{"digests":"ab"}'), "fields.digests"),
    "metrics a list": (lambda: with_fields(pack_update(UPDATE), lambda t: t.update(metrics=[])), "fields.metrics"),
    "a metric none": (
        lambda: with_fields(pack_update(UPDATE), lambda t: t["metrics"].update(loss=None)),
        "fields.metrics.'loss' of the message is None, not a number",
    ),
    "a long name": (
        lambda: with_fields(pack_update(UPDATE), lambda t: t["metrics"].update({"x" * 10**6: []})),
        "fields.metrics.'xxx",
    ),
    "weight a text": (lambda: with_fields(pack_update(UPDATE), lambda t: t.update(weight="1")), "fields.weight"),
    "weight a word": (lambda: with_fields(pack_update(UPDATE), lambda t: t.update(weight="Infinity")), "fields.weight"),
    "resources": (lambda: with_fields(pack_update(UPDATE), lambda t: t["resources"].pop("memory")), "lacks 'memory'"),
    "no local": (lambda: without(pack_update(UPDATE), "local"), "has no arrays 'local'"),
    "a module": (lambda: module_in_update(), "a record that nobody knows: 'module/ab'"),
}


def module_in_update() -> RecordDict:
    record = pack_update(UPDATE)
    record["module/ab"] = ArrayRecord()
    return record


@pytest.mark.parametrize("case", BAD_ANSWERS)
def test_a_malformed_answer_is_refused_in_a_sentence(case: str) -> None:
    make, text = BAD_ANSWERS[case]
    record = make()
    with pytest.raises(ProtocolError, match=text) as caught:
        unpack_answer(record)
    assert len(str(caught.value)) < 500


def test_a_protocol_error_is_one_that_a_user_can_read() -> None:
    assert issubclass(ProtocolError, FedProphetError)


@pytest.mark.parametrize("run", ["", "a/b", "..", "a b", "ü"])
def test_a_run_id_that_a_node_would_refuse_is_not_sent(run: str) -> None:
    with pytest.raises(ProtocolError, match="run id"):
        pack_task(TASK, run=run, config="{}")


# Any content, and any mutation ----------------------------------------------------------------------------------------

DTYPES = {tensor.dtype for tensor in TENSORS.values()} - {torch.bool}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A tensor of any bytes at all: every NaN there is, and subnormal numbers."""
    dtype = draw(st.sampled_from(sorted(DTYPES, key=str)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
mappings = st.dictionaries(names, tensors(), max_size=3)
updates = st.builds(
    ClientUpdate,
    kind=st.sampled_from(["train", "report"]),
    round=st.integers(0, 2**63),
    client=st.integers(-1, 10),
    weight=st.floats(),
    metrics=st.dictionaries(names, st.floats(), max_size=4),
    resources=st.none() | st.builds(Resources, st.integers(0, 2**62), st.floats(), st.floats()),
    local=mappings,
    parameters=mappings,
    number=st.integers(0, 3),
)


@settings(max_examples=60, deadline=None)
@given(updates)
def test_any_update_arrives_as_it_was(update: ClientUpdate) -> None:
    assert bits(unpack_answer(sent(pack_update(update)))) == bits(update)


@settings(max_examples=60, deadline=None)
@given(st.floats(), st.floats(), st.floats(), st.floats(), mappings, mappings)
def test_any_task_arrives_as_it_was(
    radius: float, step: float, low: float, high: float, targets: dict[str, Tensor], module: dict[str, Tensor]
) -> None:
    task = replace(TASK, threat=ThreatModel("linf", radius, step, 0, (low, high)), targets=targets)
    arrived = order(task_record(task, **{"c" * 32: module}))
    assert bits(arrived.task) == bits(task)
    assert bits(arrived.modules) == bits({"c" * 32: module})


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@dataclass
class Mutation:
    """One change at a place that Hypothesis chooses."""

    draw: st.DrawFn

    def __call__(self, record: RecordDict) -> RecordDict:
        self.draw(st.sampled_from([self.entry, self.attribute, self.text, self.json, self.part]))(record)
        return record

    def entry(self, record: RecordDict) -> None:
        """Delete or replace an entry of a record, past Flower's checks."""
        part = record[self.draw(st.sampled_from(sorted(record)))]
        if part:
            key = self.draw(st.sampled_from(sorted(part, key=str)))
            raw(part, key, self.draw(values)) if self.draw(st.booleans()) else part.pop(key)

    def attribute(self, record: RecordDict) -> None:
        """Change what an array says about itself."""
        arrays = [a for part in record.values() if isinstance(part, ArrayRecord) for a in part.values()]
        array = self.draw(st.sampled_from(arrays)) if arrays else None
        name = self.draw(st.sampled_from(["dtype", "shape", "stype", "data"]))
        forms = st.sampled_from(["float32", "bool", "int64", "fedprophet.bfloat16", (0, 2**63), (1,) * 70, (3,), ()])
        if isinstance(array, Array):
            setattr(array, name, self.draw(values | forms | st.lists(st.integers(-1, 2**65)).map(tuple)))

    def text(self, record: RecordDict) -> None:
        """Cut a piece out of the fields, or put one in."""
        text = str(record["header"].get("fields"))
        start, end = sorted(self.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        raw(record["header"], "fields", text[:start] + self.draw(st.text(max_size=3)) + text[end:])

    def json(self, record: RecordDict) -> None:
        """Replace, delete or add a value anywhere in the fields."""
        try:
            table = inner = json.loads(record["header"]["fields"])
        except (KeyError, TypeError, ValueError):  # an earlier mutation went before
            return
        key: Any = self.place(inner)
        while key is not None and isinstance(inner[key], dict | list) and inner[key] and self.draw(st.booleans()):
            inner = inner[key]
            key = self.place(inner)
        if key is not None and self.draw(st.booleans()):
            inner.pop(key)
        elif key is not None:
            inner[key] = self.draw(values)
        raw(record["header"], "fields", json.dumps(table, default=str))

    def place(self, table: Any) -> Any:
        places = sorted(table) if isinstance(table, dict) else range(len(table) if isinstance(table, list) else 0)
        return self.draw(st.sampled_from(places)) if places else None

    def part(self, record: RecordDict) -> None:
        """Delete, add or replace a whole record."""
        name = self.draw(st.sampled_from([*record, "module/", "other"]))
        record.pop(name, None)
        part = self.draw(st.sampled_from([None, ArrayRecord, ConfigRecord, MetricRecord]))
        if part is not None:
            record[name] = part()


@st.composite
def mutated(draw: st.DrawFn, packers: list[Callable[[], RecordDict]]) -> RecordDict:
    record = draw(st.sampled_from(packers))()
    for _ in range(draw(st.integers(1, 3))):
        record = Mutation(draw)(record) if isinstance(record.get("header"), ConfigRecord) else record
    return record


def small_task() -> RecordDict:
    parameters = {"w": torch.ones(2, 2), "b": torch.tensor([True])}
    return task_record(replace(TASK, parameters=parameters), **{"a" * 32: {"w": torch.ones(1)}})


ANSWERS = [
    lambda: pack_update(replace(UPDATE, parameters={"w": torch.ones(2), "n": torch.tensor(1)}), "bfloat16"),
    lambda: pack_hello(3),
    lambda: pack_lacking(["a" * 32, "b" * 32]),
    lambda: pack_refusal("no"),
]


@settings(max_examples=400, deadline=None)
@given(mutated([small_task]))
def test_a_mutated_task_is_refused_or_sound(record: RecordDict) -> None:
    """What is accepted has to be as it should be in every type: it can be sent on and arrives as it is."""
    try:
        arrived = unpack_task(record)
    except ProtocolError:
        return
    again = pack_task(arrived.task, run=arrived.run, config=arrived.config, modules=arrived.modules)
    assert bits(order(again)) == bits(arrived)


@settings(max_examples=400, deadline=None)
@given(mutated(ANSWERS))
def test_a_mutated_answer_is_refused_or_sound(record: RecordDict) -> None:
    wire_bytes(record)
    is_hello(record)
    try:
        arrived = unpack_answer(record)
    except ProtocolError:
        return
    if isinstance(arrived, ClientUpdate):
        assert bits(unpack_answer(sent(pack_update(arrived)))) == bits(arrived)
    elif isinstance(arrived, Hello):
        assert isinstance(arrived.client, int)
        assert isinstance(arrived.version, str)
    elif isinstance(arrived, Lacking):
        assert all(isinstance(digest, str) for digest in arrived.digests)
    else:
        assert isinstance(arrived.text, str)


def test_size_of_an_answer_is_looked_at_first():
    record = pack_update(UPDATE)
    names = sum(len(name) for part in record.values() for name in part) + sum(len(name) for name in record)
    size = wire_bytes(record) + names
    assert bits(unpack_answer(record, size)) == bits(UPDATE)
    del record["header"]["protocol"]  # an integer, of eight bytes, and its name
    with pytest.raises(ProtocolError, match=f"has {size - 16} bytes, and no more than {size - 17} were expected"):
        unpack_answer(record, size - 17)
    with pytest.raises(ProtocolError, match="protocol"):
        unpack_answer(record, size - 16)
    with pytest.raises(ProtocolError, match="no header"):
        unpack_answer(None, 0)  # type: ignore[arg-type]


def test_names_count_in_the_size_of_an_answer():
    with pytest.raises(ProtocolError, match="no more than 1000 were expected"):
        unpack_answer(RecordDict({"x" * 500: ConfigRecord({"y" * 600: 1})}), 1000)
