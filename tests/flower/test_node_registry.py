"""Nodes of all kinds are asked who they are: which of them is taken for which client, who waits for whom, how long."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Error, RecordDict

from fedprophet.errors import FedProphetError
from fedprophet.flower.node_registry import KeyedClients, NodeRegistry
from fedprophet.flower.protocol import PROTOCOL, pack_hello, pack_refusal
from fedprophet.flower.transport import Ledger, Timeouts, Transport

CLIENTS = (0, 1, 2)
PATIENT = Timeouts(deadline=600, patience=60, greeting=30)
BRIEF = replace(PATIENT, patience=1)
"""The first phase is over before anybody is asked a second time."""
KEYS = {100: 0, 101: 1, 102: 2}
"""The client that each node's key was made for."""

Node = Callable[[RecordDict], Any]


def node(client: int, *first: Any) -> Node:
    """Return a node that says which client it is; the first times it is asked it answers something else."""
    answers = list(first)
    return lambda record: answers.pop(0) if answers else pack_hello(client)


def fleet(others: dict[int, Node] | None = None) -> dict[int, Node]:
    """Return the nodes 100, 101, 102 of clients 0, 1, 2, with others beside them or in their place."""
    return {100 + client: node(client) for client in CLIENTS} | (others or {})


def other_version(client: int, version: str = "9.9") -> RecordDict:
    hello = pack_hello(client)
    hello["header"]["protocol"], hello["header"]["version"] = 99, version
    return hello


class Desk:
    """A registry, what it is connected to, and what it notes."""

    def __init__(self, grid: Any, timeouts: Timeouts, keys: KeyedClients | None) -> None:
        self.grid, self.ledger = grid, Ledger()
        self.registry = NodeRegistry(Transport(lambda: grid, self.ledger), timeouts, self.ledger, len(CLIENTS), keys)

    def meet(self, clients: Iterable[int] = CLIENTS, look: Callable[[], None] = lambda: None) -> dict[int, int]:
        """Wait for clients; return the nodes of all that have one."""
        self.registry.meet(set(clients), look)
        found = {client: self.registry.node(client) for client in CLIENTS}
        return {client: node for client, node in found.items() if node is not None}

    def faults(self) -> dict[str, str]:
        """Return what was noted since the last call."""
        return self.ledger.close(0)["faults"]

    def asked(self, node: int) -> int:
        """Return how often a node was asked."""
        return [to for to, _ in self.grid.sent].count(node)


@pytest.fixture
def open_desk(fake_grid, clock) -> Callable[..., Desk]:
    """Return a function that makes a registry on nodes; it waits by the clock."""
    return lambda nodes, timeouts=PATIENT, keys=None: Desk(fake_grid(nodes), timeouts, keys)


def test_node_is_the_client_that_it_says_it_is(open_desk, clock):
    desk = open_desk({30: node(1), 10: node(2), 20: node(0)})
    assert desk.meet() == {0: 20, 1: 30, 2: 10}
    assert desk.meet() == {0: 20, 1: 30, 2: 10}
    assert [desk.asked(node) for node in (10, 20, 30)] == [1, 1, 1]
    assert desk.faults() == {}
    assert clock.now == 1000


def test_other_protocol_is_not_taken_and_the_reason_is_clear(open_desk):
    desk = open_desk(fleet({101: lambda record: other_version(1)}))
    for _ in range(2):
        assert desk.meet() == {0: 100, 2: 102}
        reason = desk.registry.why_not(1)
        assert "protocol 99 (fedprophet 9.9)" in reason
        assert f"protocol {PROTOCOL}" in reason
        assert "same version" in reason
    assert desk.faults() == {"1": reason}
    assert desk.asked(101) == 1


def test_who_claims_to_be_another_client_is_not_taken(open_desk):
    desk = open_desk(fleet({103: node(1), 104: node(3), 105: lambda record: pack_refusal("no partition-id")}))
    for _ in range(2):
        assert desk.meet() == {0: 100, 1: 101, 2: 102}
    assert desk.faults() == {
        "node 103": "it says that it is client 1, which node 101 is already",
        "node 104": "it says that it is client 3, and the run has 0 to 2",
        "node 105": "no partition-id",
    }


def test_node_is_the_client_that_its_key_was_made_for(open_desk):
    desk = open_desk(fleet(), keys=lambda: {**KEYS, 999: None})
    assert desk.meet() == {0: 100, 1: 101, 2: 102}
    assert desk.faults() == {}


def test_node_cannot_take_the_place_of_one_that_is_away(open_desk, caplog):
    desk = open_desk({100: node(0), 102: node(1)}, BRIEF, keys=lambda: KEYS)
    reason = "its node says that it is client 1, and its key was made for client 2. Set client = 2 in its node.toml"
    for _ in range(2):
        assert desk.meet() == {0: 100}
        assert [desk.registry.why_not(client) for client in (1, 2)] == ["not connected", reason]
    assert desk.faults() == {"2": reason}
    assert caplog.messages == [f"2 gets no tasks: {reason}"]
    assert desk.asked(102) == 1
    desk.grid.nodes[101] = node(1)
    assert desk.meet() == {0: 100, 1: 101}


def test_what_another_says_is_not_taken_for_a_clients_own_word(open_desk, clock):
    """A node that claims to be client 1, and in another version: nobody stops waiting for client 1 because of that."""
    desk = open_desk(fleet({102: lambda record: other_version(1)}), keys=lambda: KEYS)
    late = desk.grid.nodes.pop(101)

    def look() -> None:
        if clock.now > 1020:
            desk.grid.nodes[101] = late

    assert desk.meet(look=look) == {0: 100, 1: 101}
    assert "its key was made for client 2" in desk.faults()["2"]


def test_node_whose_client_was_set_right_is_taken(open_desk, clock):
    desk = open_desk(fleet({102: node(2, pack_hello(1))}), keys=lambda: KEYS)
    assert desk.meet() == {0: 100, 1: 101}
    clock.sleep(30)
    assert desk.meet() == {0: 100, 1: 101, 2: 102}


def test_node_whose_key_is_no_clients_is_not_even_asked(open_desk, clock):
    keys: dict[int, int | None] = {**KEYS, 102: None}
    desk = open_desk(fleet(), BRIEF, keys=lambda: keys)
    assert desk.meet() == {0: 100, 1: 101}
    ((who, reason),) = desk.faults().items()
    assert who == "node 102"
    assert "its key was made for no client" in reason
    assert desk.asked(102) == 0
    clock.sleep(30)
    keys[102] = 2  # a key may be registered in the middle of a run
    assert desk.meet() == {0: 100, 1: 101, 2: 102}
    assert desk.faults() == {}


def test_keys_that_cannot_be_read_let_nobody_in(open_desk, clock, caplog):
    broken = [FedProphetError("cannot read server/keys")]

    def keys() -> dict[int, int]:
        if broken:
            raise broken[0]
        return KEYS

    desk = open_desk(fleet(), replace(PATIENT, deadline=20), keys=keys)
    assert desk.meet() == {}
    reason = "its key cannot be checked: cannot read server/keys"
    assert desk.faults() == {f"node {node}": reason for node in KEYS}
    assert desk.grid.sent == []
    assert len(caplog.messages) == 3
    broken.clear()
    clock.sleep(30)
    assert desk.meet() == {0: 100, 1: 101, 2: 102}


def test_flower_that_does_not_tell_the_keys_for_a_while(open_desk):
    answers: list[Any] = [ConnectionError("gone"), {100: 0, 102: 2}]

    def keys() -> dict[int, int]:
        found = answers.pop(0) if answers else KEYS
        if isinstance(found, Exception):
            raise found
        return found

    desk = open_desk(fleet(), keys=keys)
    assert desk.meet() == {0: 100, 1: 101, 2: 102}
    assert desk.faults() == {}


def test_hello_of_another_node_is_dropped(open_desk):
    desk = open_desk(fleet(), BRIEF, keys=lambda: KEYS)
    desk.grid.forger = 100
    assert desk.meet() == {0: 100}
    assert desk.faults() == {f"node {node}": f"node 100 answered in place of node {node}" for node in (101, 102)}


@pytest.mark.parametrize("text", ["x" * 2**20, "é" * 2**19])
def test_word_without_end_in_place_of_a_name_is_not_read(open_desk, text):
    desk = open_desk(fleet({103: lambda record: pack_refusal(text)}))
    assert desk.meet() == {0: 100, 1: 101, 2: 102}
    assert "no more than 1048576 were expected" in desk.faults()["node 103"]


def test_missing_nodes_are_waited_for_at_first_only(open_desk, clock):
    desk = open_desk({100: node(0), 101: node(1)})
    assert desk.meet() == {0: 100, 1: 101}
    assert 60 <= clock.now - 1000 < 62
    assert desk.registry.why_not(2) == "not connected"
    began = clock.now
    assert desk.meet() == {0: 100, 1: 101}
    assert clock.now == began
    desk.grid.nodes[202] = node(2)
    assert desk.meet() == {0: 100, 1: 101, 2: 202}
    assert desk.faults() == {}


def test_client_comes_back_as_another_node(open_desk):
    desk = open_desk(fleet())
    desk.meet()
    desk.grid.nodes[200] = desk.grid.nodes.pop(101)
    assert desk.meet() == {0: 100, 1: 200, 2: 102}
    assert desk.faults() == {}


def test_window_bounds_how_many_are_asked_at_a_time(open_desk):
    desk = open_desk(fleet(), replace(PATIENT, simulated=True, window=2))
    assert desk.meet() == {0: 100, 1: 101, 2: 102}
    assert desk.grid.most_waiting == 2


@pytest.mark.parametrize(
    ("first", "who", "reason"),
    [
        (pack_refusal("no room on the disk"), "node 101", "no room on the disk"),
        (Error(code=2, reason="it broke"), "node 101", "it broke"),
        (RecordDict({"x": ConfigRecord({"y": 1})}), "node 101", "no header"),
        (pack_hello(7), "node 101", "it says that it is client 7"),
        (other_version(1), "1", "protocol 99"),
    ],
)
def test_node_that_could_not_say_who_it_is_is_asked_again(open_desk, clock, first, who, reason):
    desk = open_desk(fleet({101: node(1, first, first)}), BRIEF)
    assert desk.meet() == {0: 100, 2: 102}
    told = desk.faults()
    assert set(told) == {who}
    assert reason in told[who]
    assert desk.registry.why_not(1) == (told[who] if who == "1" else "not connected")
    desk.meet()
    assert desk.asked(101) == 1
    clock.sleep(30)
    assert desk.meet() == {0: 100, 2: 102}
    assert desk.asked(101) == 2
    assert desk.faults() == {}  # it has been said
    clock.sleep(30)
    assert desk.meet() == {0: 100, 1: 101, 2: 102}
    assert desk.faults() == {}


def test_node_that_cannot_be_used_is_asked_while_the_first_phase_waits(open_desk, clock):
    desk = open_desk({101: node(1, *[pack_refusal("not now")] * 3)})
    assert desk.meet({1}) == {1: 101}
    assert 90 <= clock.now - 1000 < 92


def test_node_that_never_says_who_it_is_delays_nobody(open_desk, clock):
    """It refuses every thirty seconds. The first phase waits for client 1 as long as without it, and no longer."""
    desk = open_desk(fleet({101: lambda record: pack_refusal("no")}))
    assert desk.meet() == {0: 100, 2: 102}
    assert 60 <= clock.now - 1000 < 62


def test_node_that_comes_and_goes_delays_nobody_for_long(open_desk, clock):
    desk = open_desk({100: node(0), 102: node(2)})

    def flap() -> None:
        if clock.now % 20 < 10:
            desk.grid.nodes.pop(102, None)
        else:
            desk.grid.nodes[102] = node(2)

    desk.meet(look=flap)
    assert 600 <= clock.now - 1000 < 602


def test_nobody_waits_for_a_node_that_is_asked_again(open_desk, clock):
    desk = open_desk(fleet({101: node(1, pack_refusal("no"), None)}), BRIEF)
    desk.meet()
    clock.sleep(30)
    began = clock.now
    assert desk.meet() == {0: 100, 2: 102}
    assert clock.now == began
    assert desk.asked(101) == 2


def test_replacement_takes_over_when_the_old_node_is_gone(open_desk):
    desk = open_desk(fleet())
    desk.meet()
    desk.grid.nodes[201] = node(1)
    assert desk.meet() == {0: 100, 1: 101, 2: 102}
    assert desk.faults() == {"node 201": "it says that it is client 1, which node 101 is already"}
    del desk.grid.nodes[101]  # Flower lists a node for a while after it has gone
    assert desk.meet() == {0: 100, 1: 201, 2: 102}
    assert desk.faults() == {}


def test_reason_of_a_node_that_was_a_client_before_is_its_clients(open_desk):
    answers = [pack_hello(1), pack_refusal("the disk is gone")]
    desk = open_desk(fleet({101: lambda record: answers.pop(0)}))
    assert desk.meet() == {0: 100, 1: 101, 2: 102}
    away = desk.grid.nodes.pop(101)
    desk.meet()
    assert desk.registry.why_not(1) == "not connected"
    desk.grid.nodes[101] = away
    for _ in range(2):
        assert desk.meet() == {0: 100, 2: 102}
        assert desk.registry.why_not(1) == "the disk is gone"
    assert desk.faults() == {"1": "the disk is gone"}


@pytest.mark.parametrize("failure", [pack_refusal, partial(Error, 2)])
def test_text_of_a_node_cannot_steer_a_terminal(open_desk, caplog, steering, failure):
    others = {102: lambda record: other_version(2, steering), 103: lambda record: failure(steering + "x" * 600)}
    desk = open_desk(fleet(others))
    assert desk.meet() == {0: 100, 1: 101}
    texts = desk.faults()
    assert set(texts) == {"2", "node 103"}
    assert all(text.isprintable() and len(text) <= 500 and "?[2J" in text for text in texts.values())
    assert desk.registry.why_not(2) == texts["2"]
    assert len(caplog.messages) == 2
    assert all(text.isprintable() and len(text) < 600 and "?[2J" in text for text in caplog.messages)
