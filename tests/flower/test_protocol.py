"""How messages travel: every field of every kind arrives, and whatever is malformed is refused in a sentence."""

import hashlib
import json
import math
import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedprophet.flower.protocol import (
    PROTOCOL,
    Hello,
    Lacking,
    Order,
    ProtocolError,
    Refusal,
    hello_request,
    is_hello,
    pack_answer,
    pack_hello,
    pack_lacking,
    pack_refusal,
    pack_task,
    unpack_answer,
    unpack_task,
    wire_bytes,
)
from fedprophet.messages.answers import (
    ANSWERS,
    Adopted,
    Answer,
    Distilled,
    Evaluated,
    Measured,
    Predicted,
    Refreshed,
    Reported,
    Trained,
)
from fedprophet.messages.tasks import TASKS, Adopt, Distill, Evaluate, Measure, Predict, Refresh, Report, Task, Train
from fedprophet.messages.values import FrozenModule, LocalTraining, Resources, Timeline
from fedprophet.storage.files import tensors_to_bytes
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
    "weiß/λ.0 \n": torch.ones(1),
}
THREAT = ThreatModel("l2", 0.1, 0.1 / 3, 10, (-INF, 0.3))
TRAINING = LocalTraining(30, 64, 0.1, 0.9, 1e-4, 1e-5, boundary_weights=True, consistency=0.5)
COMMON: dict[str, Any] = {
    "round": 7,
    "client": 3,
    "seed": 2**63 - 1,
    "number": 2,
    "architecture": "cnn-3",
    "timeline": Timeline(((1, 3), (8, 12)), 5),
}
PART: dict[str, Any] = {
    "first": 4,
    "last": 6,
    "head": 0,
    "frozen": (FrozenModule(0, 2, "ab" * 16), FrozenModule(2, 4, "0f" * 16)),
    "batch": 17,
    "parameters": TENSORS,
}
CHANNELS = {"z": torch.tensor([5, 1, 3]), "a": torch.tensor([], dtype=torch.int64)}
SUBNETWORK: dict[str, Any] = {"adversarial_statistics": True, "kept_channels": CHANNELS}
TASK = Train(**COMMON, **PART, **SUBNETWORK, training=TRAINING, threat=THREAT, wants_local=True, memory=60_000_000)
EVERY_TASK = (
    TASK,
    Report(**COMMON, wants_local=True),
    Adopt(**COMMON, parameters=TENSORS),
    Evaluate(**COMMON, **PART, **SUBNETWORK, threat=THREAT, attack="autoattack", samples=0, part=(0, 100)),
    Measure(**COMMON, **PART, threat=THREAT),
    Refresh(**COMMON, **PART, threat=THREAT, calibration=0.5, layer="bn.0", keeps=True),
    Predict(**COMMON, **PART),
    Distill(**COMMON, **PART, training=TRAINING, targets={"weights": torch.tensor([0.25])}),
    Report(round=0, client=-1, seed=0),
    Evaluate(round=1, client=0, seed=0, head=None, samples=None),
)
FROM: dict[str, Any] = {"round": 7, "client": 3, "number": 4, "weight": 120.5}
LOCAL = {"bn.1.running_mean": torch.tensor([1 + 2**-20]), "bn.0.num_batches_tracked": torch.tensor(9)}
TRAINED = Trained(**FROM, loss=NAN, samples=12, parameters=TENSORS, local=LOCAL, plan="plain", peak=2**40)
EVERY_ANSWER = (
    TRAINED,
    Reported(**FROM, resources=Resources(2**40 + 1, 1e12 / 3, INF), local=LOCAL),
    Adopted(**FROM),
    Evaluated(**FROM, samples=9, clean=8, adversarial=7, broken={"z": 1, "a": 0}),
    Measured(**FROM, samples=3, magnitude=5e-324),
    Refreshed(**FROM, samples=3, statistics=LOCAL),
    Predicted(**FROM, logits=torch.ones(2, 3)),
    Distilled(**FROM, loss=-INF, parameters=TENSORS),
    Reported(round=0, client=-1, weight=3),  # an integer in a float's place stays one: it is journalled
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


def task_record(task: Task = TASK, **modules: Mapping[str, Tensor]) -> RecordDict:
    return pack_task(task, run="0123abcd", manifest='{"rounds": 3}', modules=modules)


def answer_record() -> RecordDict:
    return pack_answer(TRAINED)


@pytest.fixture(autouse=True)
def _no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# Every field travels --------------------------------------------------------------------------------------------------


def test_every_kind_of_task_and_answer_is_tried_here() -> None:
    assert {task.kind for task in EVERY_TASK} == set(TASKS)
    assert {answer.kind for answer in EVERY_ANSWER} == set(ANSWERS)


@pytest.mark.parametrize("task", EVERY_TASK, ids=lambda task: task.kind)
def test_a_task_arrives_as_it_was(task: Task) -> None:
    arrived = order(task_record(task))
    assert (arrived.run, arrived.manifest, dict(arrived.modules)) == ("0123abcd", '{"rounds": 3}', {})
    assert bits(arrived.task) == bits(task)


@pytest.mark.parametrize("answer", EVERY_ANSWER, ids=lambda answer: answer.kind)
def test_an_answer_arrives_as_it_was(answer: Answer) -> None:
    assert bits(unpack_answer(sent(pack_answer(answer)))) == bits(answer)


def test_modules_arrive_by_their_digest_in_order() -> None:
    modules = {"b" * 32: {"z": torch.tensor([1.5]), "a": torch.tensor([NAN])}, "a" * 32: {}}
    arrived = order(task_record(**modules))
    assert bits(arrived.modules) == bits(modules)
    assert bits(arrived.task) == bits(TASK)


def test_a_hello() -> None:
    assert is_hello(sent(hello_request()))
    assert unpack_answer(sent(pack_hello(0))) == Hello(PROTOCOL, __version__, 0)
    assert not any(map(is_hello, (pack_hello(0), task_record(), pack_refusal(""), RecordDict())))


def test_what_is_lacking() -> None:
    assert unpack_answer(sent(pack_lacking(["f" * 32, "a" * 32]))) == Lacking(("f" * 32, "a" * 32))


def test_a_refusal_gets_through_whatever_its_text() -> None:
    for text in ("", "zwölf λ\n\0", "x" * 100_000):
        assert unpack_answer(sent(pack_refusal(text))) == Refusal(text)
    # File names that are no UTF-8 end up in error texts like this.
    assert unpack_answer(sent(pack_refusal("cannot read \udcff.png"))) == Refusal("cannot read ?.png")


# Tensors --------------------------------------------------------------------------------------------------------------


def tensor_after(tensor: Tensor) -> Tensor:
    task = order(task_record(replace(TASK, parameters={"w": tensor}))).task
    assert isinstance(task, Train)
    return task.parameters["w"]


def test_tensors_as_models_have_them() -> None:
    parameter = torch.nn.Parameter(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    arrived = tensor_after(parameter)
    assert (type(arrived), arrived.requires_grad, arrived.tolist()) == (Tensor, False, [[1, 2, 3], [4, 5, 6]])
    assert tensor_after(parameter.T).tolist() == [[1, 4], [2, 5], [3, 6]]
    assert tensor_after(torch.arange(5)[1::2]).tolist() == [1, 3]
    assert tensor_after(torch.tensor([1.0, 2.0]).expand(3, 2)).tolist() == [[1, 2]] * 3
    images = torch.arange(24.0).reshape(1, 2, 3, 4)
    assert torch.equal(tensor_after(images.to(memory_format=torch.channels_last)), images)


def test_a_tensor_that_arrives_is_writable_and_shares_nothing() -> None:
    tensor = torch.tensor([1.0])
    record = task_record(replace(TASK, parameters={"w": tensor, "v": torch.ones(3)}))
    tensor.zero_()
    first, second = unpack_task(record).task, unpack_task(record).task
    assert isinstance(first, Train)
    assert isinstance(second, Train)
    first.parameters["w"].fill_(7)
    assert second.parameters["w"].item() == 1
    assert all(tensor.data_ptr() % 64 == 0 for tensor in second.parameters.values())


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


def test_bfloat16_rounds_trained_parameters_alone() -> None:
    exact = {"z": torch.tensor(math.pi, dtype=torch.float64), "n": torch.tensor([2**60 + 1])}
    shared = torch.tensor(math.pi)
    parameters = {"w": torch.tensor([*ROUNDED]), **exact, "a": shared}
    answer = replace(TRAINED, parameters=parameters, local={"bn.running_mean": shared}, loss=math.pi, weight=math.pi)
    arrived = unpack_answer(sent(pack_answer(answer, "bfloat16")))
    expected = {"w": torch.tensor([*ROUNDED.values()]), **exact, "a": torch.tensor(3.140625)}
    assert bits(arrived) == bits(replace(answer, parameters=expected))
    reported = EVERY_ANSWER[1]
    assert bits(unpack_answer(sent(pack_answer(reported, "bfloat16")))) == bits(reported)


def test_what_is_no_number_is_none_after_rounding() -> None:
    """The server has to see that a client's training diverged."""
    answer = unpack_answer(pack_answer(replace(TRAINED, parameters={"w": torch.tensor([NAN, 1.0, -NAN])}), "bfloat16"))
    assert isinstance(answer, Trained)
    assert torch.isnan(answer.parameters["w"]).tolist() == [True, False, True]


def test_what_is_bfloat16_by_itself_stays_so() -> None:
    answer = replace(TRAINED, parameters={"w": torch.ones(2, dtype=torch.bfloat16), "v": torch.tensor([math.pi])})
    assert bits(unpack_answer(pack_answer(answer, "bfloat16"))) == bits(answer)


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
    assert wire_bytes(pack_hello(3)) == 8 + len(__version__) + len("hello") + 8


def test_bfloat16_halves_the_bytes() -> None:
    answer = replace(TRAINED, parameters={"w": torch.zeros(10, 100), "n": torch.zeros(3).long()}, local={})
    saved = wire_bytes(pack_answer(answer)) - wire_bytes(pack_answer(answer, "bfloat16"))
    assert 2000 - 8 <= saved <= 2000 + 8  # safetensors fills its header up to eight bytes


def test_the_size_of_an_answer_is_checked_first() -> None:
    record = answer_record()
    names = sum(len(name) for part in record.values() for name in part) + sum(len(name) for name in record)
    size = wire_bytes(record) + names
    assert bits(unpack_answer(record, size)) == bits(TRAINED)
    del record["header"]["protocol"]  # an integer, of eight bytes, and its name
    with pytest.raises(ProtocolError, match=f"has {size - 16} bytes, and no more than {size - 17} were expected"):
        unpack_answer(record, size - 17)
    with pytest.raises(ProtocolError, match="protocol"):
        unpack_answer(record, size - 16)
    with pytest.raises(ProtocolError, match="no more than 1000 were expected"):
        unpack_answer(RecordDict({"x" * 500: ConfigRecord({"y" * 600: 1})}), 1000)


# Other versions -------------------------------------------------------------------------------------------------------


def with_header(record: RecordDict, **values: Any) -> RecordDict:
    record["header"].update(values)
    return record


def test_other_fields_are_another_protocol():
    """Tasks, answers and the values in them as version 9 has them. Where this fails, raise PROTOCOL, too."""
    kinds = [*TASKS.values(), *ANSWERS.values(), FrozenModule, LocalTraining, Resources, Timeline, ThreatModel]
    described = sorted((kind.__name__, [field.name for field in fields(kind)]) for kind in kinds)
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]
    assert (PROTOCOL, digest) == (9, "ef593f445f7ef0bc")


@pytest.mark.parametrize("theirs", [1, PROTOCOL + 1])
@pytest.mark.parametrize(
    ("record", "unpack"),
    [
        (task_record, unpack_task),
        (answer_record, unpack_answer),
        (lambda: pack_lacking(["a" * 32]), unpack_answer),
        (lambda: RecordDict({"header": ConfigRecord({"kind": "a kind of the future"})}), unpack_answer),
    ],
    ids=["task", "answer", "lacking", "unknown"],
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
    assert bits(unpack_answer(with_header(answer_record(), version="9.8.7"))) == bits(TRAINED)


def test_hellos_and_refusals_of_any_protocol_are_understood() -> None:
    """These texts are for ever: the other side may be of any version."""
    header = {"protocol": 7, "version": "9.8.7", "something": "new"}
    assert is_hello(RecordDict({"header": ConfigRecord({**header, "kind": "who"}), "new": ArrayRecord()}))
    hello = RecordDict({"header": ConfigRecord({**header, "kind": "hello", "client": 5})})
    assert unpack_answer(hello) == Hello(7, "9.8.7", 5)
    refusal = RecordDict({"header": ConfigRecord({**header, "kind": "refusal", "text": "no"}), "new": ArrayRecord()})
    assert unpack_answer(refusal) == Refusal("no")
    ours = {"protocol": PROTOCOL, "version": __version__}
    assert {name: dict(part) for name, part in hello_request().items()} == {"header": {**ours, "kind": "who"}}
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


def without(record: RecordDict, key: str) -> RecordDict:
    del record["header"][key]
    return record


def with_array(**attributes: Any) -> RecordDict:
    """A task whose array is not what it should be."""
    record = task_record()
    for name, value in attributes.items():
        setattr(record["tensors"]["safetensors"], name, value)
    return record


def with_entry(**entry: Any) -> RecordDict:
    """A task whose only parameter, of 12 bytes, is described by the given entry of safetensors' header."""
    record = task_record(replace(TASK, parameters={"w": torch.zeros(1, 3)}, kept_channels={}))
    header = {"parameters/w": {"dtype": "F32", "shape": [1, 3], "data_offsets": [0, 12], **entry}}
    text = json.dumps(header).encode()
    record["tensors"]["safetensors"].data = len(text).to_bytes(8, "little") + text + b"\0\1\2" * 4
    return record


def with_tensors(**tensors: Tensor) -> RecordDict:
    return with_array(data=tensors_to_bytes(tensors))


def with_part(record: RecordDict, name: str, part: Any) -> RecordDict:
    record[name] = part
    return record


def no_array() -> RecordDict:
    record = task_record()
    raw(record["tensors"], "safetensors", 5)
    return record


BAD_TASKS: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: None, "no header"),
    "a dict": (lambda: {"header": {"protocol": 1}}, "no header"),
    "empty": (RecordDict, "no header"),
    "header of another type": (lambda: RecordDict({"header": ArrayRecord()}), "no header"),
    "no protocol": (lambda: without(task_record(), "protocol"), "protocol is None"),
    "protocol a text": (lambda: with_header(task_record(), protocol="1"), "protocol is '1'"),
    "protocol true": (lambda: with_header(task_record(), protocol=True), "protocol is True"),
    "no version": (lambda: without(task_record(), "version"), "version is None"),
    "version bytes": (lambda: with_header(task_record(), version=b"1"), "version is b'1', not a text"),
    "kind a list": (lambda: with_header(task_record(), kind=["task"]), "kind is"),
    "an answer": (answer_record, "a task was expected.*'answer'"),
    "no work": (lambda: without(task_record(), "work"), "work is None, not a text"),
    "unknown work": (lambda: with_header(task_record(), work="attack"), "work is 'attack', not one of report, adopt"),
    "other work": (lambda: with_header(task_record(), work="report"), "Report has 'adversarial_statistics'"),
    "no run": (lambda: without(task_record(), "run"), "the run id None does not fit"),
    "run with a path": (lambda: with_header(task_record(), run="../../etc"), "the run id '../../etc' does not fit"),
    "run with a newline": (lambda: with_header(task_record(), run="abc\n"), "run id"),
    "run too long": (lambda: with_header(task_record(), run="a" * 65), "run id"),
    "no manifest": (lambda: without(task_record(), "manifest"), "manifest is None, not a text"),
    "no fields": (lambda: without(task_record(), "fields"), "fields is None, not a text"),
    "fields no JSON": (lambda: with_header(task_record(), fields="{'round': 1}"), "cannot be understood: Expecting"),
    "fields too deep": (lambda: with_header(task_record(), fields="[" * 100_000), "recursion"),
    "fields a list": (lambda: with_header(task_record(), fields="[]"), r"is \[\], not a table"),
    "NaN as a word": (lambda: with_header(task_record(), fields='{"seed": NaN}'), "NaN is no JSON number"),
    "endless digits": (lambda: with_header(task_record(), fields='{"seed": ' + "1" * 5000 + "}"), "Exceeds the limit"),
    "missing field": (lambda: with_fields(task_record(), lambda t: t.pop("seed")), "Train lacks 'seed'"),
    "foreign field": (lambda: with_fields(task_record(), lambda t: t.update(zeal=1)), "Train has 'zeal'"),
    "round a text": (lambda: with_fields(task_record(), lambda t: t.update(round="7")), "round is '7', not an int"),
    "norm unknown": (
        lambda: with_fields(task_record(), lambda t: t["threat"].update(norm="l1")),
        "threat/norm is 'l1'",
    ),
    "no modules": (lambda: without(task_record(), "modules"), "modules is None, not a text"),
    "modules a list": (lambda: with_header(task_record(), modules='{"modules":[]}'), r"modules is \[\], not a table"),
    "a module missing": (
        lambda: with_header(task_record(), modules='{"modules":{"ab":{"w":"modules/ab/w"}}}'),
        "the tensor 'modules/ab/w' is missing",
    ),
    "foreign part": (lambda: with_part(task_record(), "other", ArrayRecord()), "a part 'other', which nothing reads"),
    "no tensors": (lambda: without_tensors(), "the tensor 'parameters/z.weight' is missing"),
    "a stray tensor": (lambda: with_tensors(stray=torch.ones(1)), "is missing"),
    "tensors of values": (lambda: with_part(task_record(), "tensors", ConfigRecord()), "not one array of safetensors"),
    "two arrays": (lambda: with_part(task_record(), "tensors", two_arrays()), "not one array of safetensors"),
    "no array": (no_array, "not one array of safetensors"),
    "another form": (lambda: with_array(stype="numpy.ndarray"), "not one array of safetensors"),
    "no bytes": (lambda: with_array(data=None), "not one array of safetensors"),
    "empty bytes": (lambda: with_array(data=b""), "the tensors of the message cannot be read"),
    "a huge header": (lambda: with_array(data=b"\xff" * 8 + b"{}"), "cannot be read"),
    "a header of nonsense": (lambda: with_array(data=b"\4" + b"\0" * 7 + b"[[[["), "cannot be read"),
    "a header too deep": (
        lambda: with_array(data=(10**5).to_bytes(8, "little") + b"[" * 10**5),
        "cannot be read",
    ),
    "unknown dtype": (lambda: with_entry(dtype="F33"), "cannot be read"),
    "a dtype that no message has": (lambda: with_tensors(w=torch.zeros(1, dtype=torch.complex64)), "complex64, which"),
    "a dtype of another size": (lambda: with_entry(dtype="F64"), "cannot be read"),
    "too few bytes": (lambda: with_entry(data_offsets=[0, 8], shape=[1, 2]), "cannot be read"),
    "too many bytes": (lambda: with_entry(data_offsets=[0, 16], shape=[1, 4]), "cannot be read"),
    "bytes from behind": (lambda: with_entry(data_offsets=[12, 0]), "cannot be read"),
    "shape a number": (lambda: with_entry(shape=3), "cannot be read"),
    "negative sizes": (lambda: with_entry(shape=[-1, -3]), "cannot be read"),
    "sizes that overflow": (lambda: with_entry(shape=[2**40, 2**40]), "cannot be read"),
    "an empty tensor that overflows": (lambda: overflowing(), "cannot be read"),
    "too many sizes": (lambda: with_tensors(w=torch.ones((1,) * 65)), "65 sizes"),
    "neither true nor false": (lambda: with_entry(dtype="BOOL", shape=[12]), "neither true nor false"),
}


def without_tensors() -> RecordDict:
    record = task_record()
    del record["tensors"]
    return record


def two_arrays() -> ArrayRecord:
    array = task_record()["tensors"]["safetensors"]
    return ArrayRecord({"safetensors": array, "more": array})


def overflowing() -> RecordDict:
    header = b'{"w":{"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}}'
    return with_array(data=len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize("case", BAD_TASKS)
def test_a_malformed_task_is_refused_in_a_sentence(case: str) -> None:
    make, text = BAD_TASKS[case]
    record = make()
    with pytest.raises(ProtocolError, match=text) as caught:
        unpack_task(record)
    assert len(str(caught.value)) < 600


BAD_ANSWERS: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: None, "no header"),
    "empty": (RecordDict, "no header"),
    "a task": (task_record, "an answer was expected.*'task'"),
    "a question": (hello_request, "an answer was expected.*'who'"),
    "unknown kind": (lambda: with_header(answer_record(), kind="gossip"), "an answer was expected.*'gossip'"),
    "hello of nobody": (lambda: without(pack_hello(1), "client"), "client is None"),
    "hello of a text": (lambda: with_header(pack_hello(1), client="1"), "client is '1', not an integer"),
    "hello of true": (lambda: with_header(pack_hello(1), client=True), "client is True"),
    "refusal without text": (lambda: without(pack_refusal("no"), "text"), "text is None"),
    "refusal of bytes": (lambda: with_header(pack_refusal("no"), text=b"no"), "text is b'no'"),
    "lacking a number": (lambda: with_header(pack_lacking([]), fields='{"digests":[1]}'), "digests/0 is 1, not a text"),
    "lacking with tensors": (
        lambda: with_part(pack_lacking([]), "tensors", task_record()["tensors"]),
        "no field names",
    ),
    "weight a text": (lambda: with_fields(answer_record(), lambda t: t.update(weight="1")), "weight is '1'"),
    "a long name": (lambda: with_fields(evaluated(), lambda t: t.update(broken={"x" * 10**6: []})), "broken/xxx"),
    "a tensor missing": (
        lambda: with_fields(answer_record(), lambda t: t.update(local={"w": "local/w"})),
        "'local/w' is missing",
    ),
    "not rounded or not": (lambda: without(answer_record(), "rounded"), "rounded is None"),
    "rounded a number": (lambda: with_header(answer_record(), rounded=1), "rounded is 1"),
    "a report rounded": (lambda: with_header(pack_answer(EVERY_ANSWER[1]), rounded=True), "does not fit 'report'"),
}


def evaluated() -> RecordDict:
    return pack_answer(EVERY_ANSWER[3])


@pytest.mark.parametrize("case", BAD_ANSWERS)
def test_a_malformed_answer_is_refused_in_a_sentence(case: str) -> None:
    make, text = BAD_ANSWERS[case]
    record = make()
    with pytest.raises(ProtocolError, match=text) as caught:
        unpack_answer(record)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("run", ["", "a/b", "..", "a b", "ü"])
def test_a_run_id_that_a_node_would_refuse_is_not_sent(run: str) -> None:
    with pytest.raises(ProtocolError, match="run id"):
        pack_task(TASK, run=run, manifest="{}")


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


@settings(max_examples=30)
@given(st.floats(), st.floats(), mappings, mappings)
def test_any_answer_arrives_as_it_was(
    weight: float, loss: float, parameters: dict[str, Tensor], local: dict[str, Tensor]
) -> None:
    answer = replace(TRAINED, weight=weight, loss=loss, parameters=parameters, local=local)
    assert bits(unpack_answer(sent(pack_answer(answer)))) == bits(answer)


@settings(max_examples=30)
@given(st.floats(), st.floats(), mappings, mappings)
def test_any_task_arrives_as_it_was(
    radius: float, low: float, parameters: dict[str, Tensor], module: dict[str, Tensor]
) -> None:
    task = replace(TASK, threat=ThreatModel("linf", radius, 0.1, 0, (low, INF)), parameters=parameters)
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
        self.draw(st.sampled_from([self.entry, self.bytes_, self.text, self.json, self.part]))(record)
        return record

    def entry(self, record: RecordDict) -> None:
        """Delete or replace an entry of a record, past Flower's checks."""
        part = record[self.draw(st.sampled_from(sorted(record)))]
        if part:
            key = self.draw(st.sampled_from(sorted(part, key=str)))
            raw(part, key, self.draw(values)) if self.draw(st.booleans()) else part.pop(key)

    def bytes_(self, record: RecordDict) -> None:
        """Change a few of the tensors' bytes, mostly in the header that describes them."""
        arrays = [a for part in record.values() if isinstance(part, ArrayRecord) for a in part.values()]
        if arrays and isinstance(arrays[0], Array) and arrays[0].data:
            data = bytearray(arrays[0].data)
            for _ in range(self.draw(st.integers(1, 3))):
                data[self.draw(st.integers(0, len(data) - 1))] = self.draw(st.sampled_from(b'0129[]{}",:\0\xff'))
            arrays[0].data = bytes(data[: self.draw(st.sampled_from([None, None, len(data) // 2]))])

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
        name = self.draw(st.sampled_from([*record, "other"]))
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


SMALL_ANSWERS = [
    lambda: pack_answer(replace(TRAINED, parameters={"w": torch.ones(2), "n": torch.tensor(1)}), "bfloat16"),
    evaluated,
    lambda: pack_hello(3),
    lambda: pack_lacking(["a" * 32, "b" * 32]),
    lambda: pack_refusal("no"),
]


@settings(max_examples=100)
@given(mutated([small_task]))
def test_a_mutated_task_is_refused_or_sound(record: RecordDict) -> None:
    """What is accepted has to be as it should be in every type: it can be sent on and arrives as it is."""
    try:
        arrived = unpack_task(record)
    except ProtocolError:
        return
    again = pack_task(arrived.task, run=arrived.run, manifest=arrived.manifest, modules=arrived.modules)
    assert bits(order(again)) == bits(arrived)


@settings(max_examples=100)
@given(mutated(SMALL_ANSWERS))
def test_a_mutated_answer_is_refused_or_sound(record: RecordDict) -> None:
    wire_bytes(record)
    is_hello(record)
    try:
        arrived = unpack_answer(record)
    except ProtocolError:
        return
    if isinstance(arrived, Answer):
        assert bits(unpack_answer(sent(pack_answer(arrived)))) == bits(arrived)
    elif isinstance(arrived, Hello):
        assert isinstance(arrived.client, int)
        assert isinstance(arrived.version, str)
    elif isinstance(arrived, Lacking):
        assert all(isinstance(digest, str) for digest in arrived.digests)
    else:
        assert isinstance(arrived.text, str)
