"""Messages between processes: what is sent arrives, tensors as they were, and shared ones once."""

import socket
import threading
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from fedprophet.engines.channel import Channel, ClosedError
from fedprophet.messages.task import ClientTask, FrozenModule
from fedprophet.threat import input_threat

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


@pytest.fixture
def ends():
    channels = tuple(map(Channel, socket.socketpair()))
    yield channels
    for channel in channels:
        channel.close()


def _passed(ends, *messages, shared=None):
    """Send messages, as another process would: while the other end is read."""
    here, there = ends
    sender = threading.Thread(target=lambda: [here.send(message, shared or {}) for message in messages])
    sender.start()
    received = [there.receive() for _ in messages]
    sender.join()
    return received


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(ends, name):
    (arrived,) = _passed(ends, TENSORS[name])
    assert arrived.dtype == TENSORS[name].dtype
    assert torch.equal(arrived, TENSORS[name])
    assert arrived.is_contiguous()
    assert not arrived.requires_grad


def test_tasks_and_read_only_tables_arrive(ends):
    task = ClientTask("train", 3, 7, 11, frozen=(FrozenModule(0, 2, "ab"),), threat=input_threat(0.1, 0.02, 5))
    task = replace(task, parameters=MappingProxyType({"w": torch.ones(2)}), kept={"g": torch.tensor([1, 5])})
    (arrived,) = _passed(ends, task)
    assert replace(arrived, parameters={}, kept={}) == replace(task, parameters={}, kept={})
    assert arrived.parameters["w"].tolist() == [1, 1]
    assert arrived.kept["g"].tolist() == [1, 5]


def test_what_arrives_has_memory_of_its_own(ends):
    tensors = [torch.ones(3), torch.ones(3)]
    (arrived,) = _passed(ends, tensors)
    arrived[0].zero_()
    assert arrived[1].tolist() == tensors[0].tolist() == [1, 1, 1]


def test_many_and_large_tensors_arrive_in_order(ends):
    """More pieces than one call takes, and more bytes than a socket holds."""
    tensors = [torch.full((n % 7,), float(n)) for n in range(1500)]
    tensors.insert(700, torch.arange(3_000_000))
    (arrived,) = _passed(ends, tensors)
    assert all(torch.equal(a, b) for a, b in zip(arrived, tensors, strict=True))


class _Counted(socket.socket):
    """Counts what is sent through a socket."""

    sent = 0

    def sendmsg(self, parts):
        count = super().sendmsg(parts)
        self.sent += count
        return count


def test_a_shared_tensor_travels_once_until_it_is_forgotten():
    ours, theirs = socket.socketpair()
    counted = _Counted(fileno=ours.detach())
    ends = here, _ = Channel(counted), Channel(theirs)
    common, other = torch.randn(100_000), torch.randn(100_000)
    shared = {id(common): 0}
    first, second, third = _passed(ends, [common, other], [common, other], [common], shared=shared)
    assert second[0] is first[0]
    assert third[0] is first[0]
    assert second[1] is not first[1]
    assert 1_200_000 < counted.sent < 1_201_000
    here.forget()
    (fourth,) = _passed(ends, [common], shared=shared)
    assert fourth[0] is not first[0]
    assert torch.equal(fourth[0], common)
    assert counted.sent > 1_600_000


def test_a_connection_that_is_closed_is_noticed_by_both_ends(ends):
    here, there = ends
    here.close()
    with pytest.raises(ClosedError):
        there.receive()
    with pytest.raises(ClosedError):
        there.send(torch.zeros(1))


def test_a_message_that_breaks_off_is_noticed(ends):
    here, there = ends
    here._socket.sendall(b"\x05")
    here.close()
    with pytest.raises(ClosedError):
        there.receive()
