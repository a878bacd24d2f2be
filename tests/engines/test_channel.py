"""Messages between processes: what is sent arrives, tensors as they were, and shared ones once."""

import multiprocessing
import os
import threading
from types import MappingProxyType

import pytest
import torch

from fedprophet.engines.channel import CLOSED, Channel
from fedprophet.messages.values import FrozenModule

TENSORS = {
    "float32": torch.randn(3, 4),
    "bfloat16": torch.randn(5).bfloat16(),
    "int64": torch.tensor(2**40),
    "bool": torch.tensor([[True], [False]]),
    "empty": torch.zeros(0, 7),
    "turned": torch.arange(6.0).reshape(2, 3).T,
    "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "parameter": torch.nn.Parameter(torch.randn(2)),
}


class Counted:
    """A connection that counts the bytes that are sent through it."""

    def __init__(self, connection) -> None:
        self.connection, self.sent = connection, 0

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def send_bytes(self, part):
        self.sent += len(part)
        self.connection.send_bytes(part)


@pytest.fixture
def ends():
    connections = tuple(map(Counted, multiprocessing.Pipe()))
    yield tuple(map(Channel, connections))
    for connection in connections:
        connection.close()


def _passed(ends, *messages, shared=None):
    """Send messages, as another process would: while the other end is read."""
    here, there = ends
    sender = threading.Thread(target=lambda: [here.send(message, shared or {}) for message in messages])
    sender.start()
    received = [there.receive() for _ in messages]
    sender.join()
    return received


def test_tensors_of_every_kind_arrive_as_they_were(ends):
    (arrived,) = _passed(ends, TENSORS)
    assert arrived.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert arrived[name].dtype == tensor.dtype, name
        assert torch.equal(arrived[name], tensor), name
        assert arrived[name].is_contiguous(), name
        assert not arrived[name].requires_grad, name


def test_dataclasses_and_read_only_tables_arrive(ends):
    module, table = FrozenModule(0, 2, "ab"), MappingProxyType({"w": torch.ones(2), "n": 3})
    ((module_there, table_there),) = _passed(ends, (module, table))
    assert module_there == module
    assert (table_there["w"].tolist(), table_there["n"]) == ([1, 1], 3)


def test_what_arrives_has_memory_of_its_own(ends):
    tensors = [torch.ones(3), torch.ones(3)]
    (arrived,) = _passed(ends, tensors)
    arrived[0].zero_()
    assert arrived[1].tolist() == tensors[0].tolist() == [1, 1, 1]


def test_more_bytes_than_a_connection_holds_arrive_in_order(ends):
    tensors = [torch.full((n % 7,), float(n)) for n in range(100)]
    tensors.insert(70, torch.arange(3_000_000))
    (arrived,) = _passed(ends, tensors)
    assert all(torch.equal(a, b) for a, b in zip(arrived, tensors, strict=True))


def test_a_shared_tensor_is_sent_once_until_it_is_forgotten(ends):
    here, _ = ends
    common, other = torch.randn(100_000), torch.randn(100_000)
    shared = {id(common): 0}
    first, second, third = _passed(ends, [common, other], [common, other], [common], shared=shared)
    assert second[0] is first[0]
    assert third[0] is first[0]
    assert second[1] is not first[1]
    assert 1_200_000 < here.connection.sent < 1_201_000
    here.forget()
    (fourth,) = _passed(ends, [common], shared=shared)
    assert fourth[0] is not first[0]
    assert torch.equal(fourth[0], common)
    assert here.connection.sent > 1_600_000


def test_a_connection_that_is_closed_is_noticed_by_both_ends(ends):
    here, there = ends
    here.connection.close()
    with pytest.raises(CLOSED):
        there.receive()
    with pytest.raises(CLOSED):
        there.send(torch.zeros(1))


def test_a_message_that_breaks_off_is_noticed(ends):
    here, there = ends
    os.write(here.connection.fileno(), b"\0\0\0\x05ab")
    here.connection.close()
    with pytest.raises(CLOSED):
        there.receive()
