"""Messages go out and come back in small portions, a broken connection is survived, and all is counted."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Error

from fedprophet.errors import TrainingError
from fedprophet.flower.protocol import hello_request, pack_hello, wire_bytes
from fedprophet.flower.transport import Ledger, Transport


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def grid(fake_grid):
    """Return a connection to two nodes that say who they are, and one that fails."""
    answers = {10: pack_hello(0), 11: pack_hello(1), 12: Error(code=2)}
    return fake_grid({node: lambda record, answer=answer: answer for node, answer in answers.items()})


@pytest.fixture
def transport(grid, ledger) -> Transport:
    return Transport(lambda: grid, ledger)


CALLS: dict[str, tuple[str, Callable[[Transport], Any], Any]] = {
    "send": ("push_messages", lambda transport: transport.send(hello_request(), 10, "7"), None),
    "fetch": ("pull_messages", lambda transport: list(transport.fetch(["message 0"])), []),
    "online": ("get_node_ids", lambda transport: transport.online(), None),
}
"""What a transport does, the call of Flower's that it makes, and what it returns where that fails."""


def breaks_with(error: Exception) -> Callable[..., Any]:
    def broken(*_: object) -> Any:
        raise error

    return broken


def test_message_reaches_its_node_and_its_answer_comes_back(transport, grid):
    name = transport.send(hello_request(), 11, "7")
    assert [to for to, _ in grid.sent] == [11]
    (reply,) = transport.fetch([name])
    assert reply.metadata.reply_to_message_id == name
    assert (reply.metadata.message_type, reply.metadata.group_id) == ("query", "7")
    assert reply.content["header"] == pack_hello(1)["header"]
    assert list(transport.fetch([name])) == []
    assert transport.online() == {10, 11, 12}


def test_contents_are_counted_both_ways(transport, ledger):
    names = [transport.send(hello_request(), node, "7") for node in (10, 11, 12)]
    assert ledger.sent == 3 * wire_bytes(hello_request()) > 0
    assert ledger.received == 0
    replies = list(transport.fetch(names))
    assert [reply.has_content() for reply in replies] == [True, True, False]
    assert ledger.received == wire_bytes(pack_hello(0)) + wire_bytes(pack_hello(1))


def test_what_is_about_the_federation_is_not_counted(transport, ledger):
    name = transport.send(hello_request(), 10, "7", counted=False)
    assert [reply.has_content() for reply in transport.fetch([name], counted=False)] == [True]
    assert (ledger.sent, ledger.received) == (0, 0)


@pytest.mark.parametrize("ids", [[], [None], [""]])
def test_message_that_flower_does_not_take_is_not_counted(transport, grid, ledger, ids):
    grid.push_messages = lambda some: ids
    assert transport.send(hello_request(), 10, "7") is None
    assert ledger.sent == 0


def test_few_answers_are_in_memory_at_a_time(transport, grid):
    names = [transport.send(hello_request(), 10, "7") for _ in range(20)]
    asked, pull = [], grid.pull_messages

    def noted(ids):
        asked.append(list(ids))
        return pull(ids)

    grid.pull_messages = noted
    replies = transport.fetch(names)
    next(replies)
    assert asked == [names[:8]]
    assert len(list(replies)) == 19
    assert asked == [names[:8], names[8:16], names[16:]]


@pytest.mark.parametrize("what", CALLS)
def test_broken_connection_is_told_and_cannot_steer_a_terminal(transport, grid, ledger, caplog, steering, what):
    name, call, nothing = CALLS[what]
    setattr(grid, name, breaks_with(ConnectionError(steering)))
    assert call(transport) == nothing
    (text,) = caplog.messages
    assert text.isprintable()
    assert "?[2J" in text
    assert ledger == Ledger()


@pytest.mark.parametrize("what", CALLS)
def test_failure_is_logged_once_until_it_works_again(transport, grid, caplog, what):
    name, call, _ = CALLS[what]
    works = getattr(grid, name)
    for _ in range(2):
        setattr(grid, name, breaks_with(ConnectionError("gone")))
        call(transport)
        call(transport)
        setattr(grid, name, works)
        call(transport)
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("what", CALLS)
def test_what_cannot_be_mended_is_not_swallowed(transport, grid, what):
    name, call, _ = CALLS[what]
    setattr(grid, name, breaks_with(TrainingError("the simulation is gone")))
    with pytest.raises(TrainingError, match="the simulation is gone"):
        call(transport)


def test_reasons_are_short_and_noted_once(ledger):
    ledger.fault(3, "a  reason\n" * 2)
    ledger.fault(3, "a reason a reason")
    ledger.fault(3, "x" * 5000)
    assert ledger.close(0)["faults"] == {"3": "a reason a reason; " + "x" * 499 + "…"}


def test_account_is_of_one_round(ledger):
    ledger.sent, ledger.received, ledger.trainers = 30, 40, {0, 5}
    ledger.fault("node 9", "no")
    # Two clients would have had the whole model, of 100 bytes, there and back.
    assert ledger.close(100) == {"wire": {"sent": 30, "received": 40, "whole_model": 400}, "faults": {"node 9": "no"}}
    assert ledger.close(100) == {"wire": {"sent": 0, "received": 0, "whole_model": 0}, "faults": {}}
