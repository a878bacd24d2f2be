"""The Flower engine on nodes of all kinds: the plain engine's updates from good ones, and a note on the others."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Error, RecordDict

from fedprophet.engines import EngineParts
from fedprophet.engines.plain import PlainEngine
from fedprophet.errors import CheckpointError, FedProphetError, TrainingError
from fedprophet.flower import protocol
from fedprophet.flower.engine import FlowerEngine
from fedprophet.flower.manifest import RunManifest
from fedprophet.flower.node import answer
from fedprophet.flower.protocol import (
    Order,
    hello_request,
    is_hello,
    pack_answer,
    pack_hello,
    pack_lacking,
    pack_refusal,
    unpack_task,
    wire_bytes,
)
from fedprophet.flower.transport import Timeouts
from fedprophet.messages.answers import Adopted, Answer, Evaluated, Reported, Trained
from fedprophet.messages.modules import digest
from fedprophet.messages.tasks import Adopt, Evaluate, Report, Task, Train
from fedprophet.messages.values import SERVER, FrozenModule, LocalTraining
from fedprophet.runs.session import assemble

QUICK = Timeouts(deadline=0.4, interval=0.01, patience=0.05, greeting=0.05)
CLIENTS = (0, 1, 2)
RUN = "0123456789abcdef"


@pytest.fixture(scope="module")
def parts(tiny) -> EngineParts:
    made: list[EngineParts] = []
    config = tiny({"method": "jfat", "population.clients": 3})

    def make(parts: EngineParts) -> PlainEngine:
        made.append(parts)
        return PlainEngine(parts.population, parts.workspaces, parts.reserve)

    assemble(config, engine=make)
    return made[0]


def report(client: int, round: int = 1, number: int = 0, **more: Any) -> Report:
    return Report(round=round, client=client, seed=0, number=number, **more)


def evaluate(client: int, *digests: str, round: int = 1) -> Evaluate:
    """Return a task that needs fixed modules."""
    frozen = tuple(FrozenModule(index, index + 1, digest) for index, digest in enumerate(digests))
    return Evaluate(round=round, client=client, seed=0, frozen=frozen)


def train(parts: EngineParts, client: int) -> Train:
    chain = parts.workspaces["backbone"].chain
    start = {name: chain.tensors[name].detach().clone() for name in chain.shared()}
    training = LocalTraining(1, 16, 0.1, 0.9, 0.0, 0.0)
    last = len(chain.atoms)
    return Train(round=1, client=client, seed=0, last=last, training=training, batch=16, parameters=start)


def reply_to(task: Task, **changes: Any) -> Answer:
    values = {"round": task.round, "client": task.client, "number": task.number, "weight": 5.0, **changes}
    if isinstance(task, Train):
        return Trained(loss=0.5, samples=5, **values)
    return Evaluated(samples=5, **values) if isinstance(task, Evaluate) else Reported(**values)


Respond = Callable[[Order], Any]


def node(client: int, respond: Respond | None = None) -> Callable[[RecordDict], Any]:
    """Return a node that says which client it is, and answers a task as it is told, by default well."""

    def receive(record: RecordDict) -> Any:
        if is_hello(record):
            return pack_hello(client)
        order = unpack_task(record)
        return respond(order) if respond else pack_answer(reply_to(order.task))

    return receive


def fleet(**others: Respond) -> dict[int, Callable[[RecordDict], Any]]:
    """Return the nodes 100, 101, 102 of clients 0, 1, 2; `_1=…` is how another one responds."""
    return {100 + client: node(client, others.get(f"_{client}")) for client in CLIENTS}


@pytest.fixture
def connect(fake_grid, parts, clock):
    """Return a function that makes an engine on nodes; its grid is `engine.grid`. It waits by the clock."""

    def make(nodes, timeouts: Timeouts = QUICK, **options):
        grid = fake_grid(nodes)
        engine = FlowerEngine(lambda: grid, parts, lambda: RUN, RunManifest.of(parts), timeouts, **options)
        engine.grid = grid
        return engine

    return make


def clients_of(updates: Iterable[Answer]) -> list[int]:
    return sorted(update.client for update in updates)


def test_updates_are_the_plain_engines(connect, parts, tmp_path, same_tensors):
    def real(client: int) -> Callable[[RecordDict], Any]:
        config = {"partition-id": client, "home": str(tmp_path / str(client)), "threads": 1}
        return lambda record: answer(record, config)

    tasks = [train(parts, client) for client in CLIENTS]
    engine = connect({100 + client: real(client) for client in CLIENTS}, Timeouts(deadline=60))
    found = {update.client: update for update in engine.map(tasks)}
    plain = PlainEngine(parts.population, parts.workspaces, parts.reserve)
    for expected in plain.map(tasks):
        ours = found[expected.client]
        assert same_tensors(ours.parameters, expected.parameters)
        assert (ours.loss, ours.samples, ours.weight) == (expected.loss, expected.samples, expected.weight)
    assert engine.account()["faults"] == {}


def test_server_tasks_need_no_node(connect):
    engine = connect({})
    (update,) = engine.map([Adopt(round=1, client=SERVER, seed=0)])
    assert (type(update), update.client) == (Adopted, SERVER)
    assert engine.grid.sent == []


def test_silent_node_is_left_out_at_the_deadline(connect, clock):
    engine = connect(fleet(_1=lambda order: None))
    began = clock.now
    assert clients_of(engine.map([report(client) for client in CLIENTS])) == [0, 2]
    assert 0.4 <= clock.now - began < 0.5
    assert engine.account()["faults"] == {"1": "no answer within 0.4 s"}


def test_late_answer_is_dropped_and_noted(connect):
    engine = connect(fleet())
    list(engine.map([report(0)]))
    engine.grid.holding = {101}
    assert clients_of(engine.map([report(0, 2), report(1, 2)])) == [0]
    assert engine.account()["faults"] == {"1": "no answer within 0.4 s"}
    engine.grid.holding = set()
    engine.grid.let_go()
    updates = list(engine.map([report(0, 3), report(1, 3)]))
    assert [(update.client, update.round) for update in updates] == [(0, 3), (1, 3)]
    assert engine.account()["faults"] == {"1": "its answer of round 2 (report) came too late"}


def test_second_answer_is_dropped(connect):
    def twice(order: Order) -> list[RecordDict]:
        return [pack_answer(reply_to(order.task)), pack_answer(reply_to(order.task, weight=9.0))]

    engine = connect(fleet(_2=twice))
    updates = list(engine.map([report(client) for client in CLIENTS]))
    assert [(update.client, update.weight) for update in updates] == [(0, 5.0), (1, 5.0), (2, 5.0)]
    assert engine.account()["faults"] == {"2": "it answered twice"}


ANOTHER = [reply_to(task) for task in (report(0), report(1, 7), report(1, number=3), evaluate(1))]


@pytest.mark.parametrize("answer", ANOTHER, ids=["client", "round", "number", "kind"])
def test_answer_for_another_task_is_dropped(connect, answer):
    engine = connect(fleet(_1=lambda order: pack_answer(answer)))
    assert clients_of(engine.map([report(0), report(1)])) == [0]
    assert "another task" in engine.account()["faults"]["1"]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (pack_refusal("no room\non the disk"), "no room on the disk"),
        (Error(code=2, reason="it broke"), "its node failed: it broke"),
        (Error(code=2), "its node failed: error 2"),
        (RecordDict({"x": ConfigRecord({"y": 1})}), "the message has no header: it was not made by fedprophet"),
        (pack_hello(1), "it sent a hello instead of an answer"),
        (hello_request(), "an answer was expected, but this is a message of kind 'who'"),
    ],
)
def test_what_is_no_update_is_noted(connect, response, reason):
    engine = connect(fleet(_1=lambda order: response))
    assert clients_of(engine.map([report(client) for client in CLIENTS])) == [0, 2]
    assert engine.account()["faults"] == {"1": reason}


def test_answer_of_another_node_is_dropped(connect):
    engine = connect(fleet())
    list(engine.map([report(client) for client in CLIENTS]))
    engine.grid.forger = 100
    assert clients_of(engine.map([report(0), report(1)])) == [0]
    assert engine.account()["faults"] == {"1": "node 100 answered in place of node 101"}


def test_modules_travel_when_they_are_lacking_and_once(connect, parts):
    module = {"weight": torch.arange(4.0)}
    name = parts.workspaces["backbone"].modules.add(module)
    assert name == digest(module)
    cached: dict[str, Any] = {}
    attached = []

    def caching(order: Order) -> RecordDict:
        cached.update(order.modules)
        attached.append(sorted(order.modules))
        lacking = [frozen.digest for frozen in order.task.frozen if frozen.digest not in cached]
        return pack_lacking(lacking) if lacking else pack_answer(reply_to(order.task))

    engine = connect(fleet(_0=caching))
    for turn in (1, 2):
        assert clients_of(engine.map([evaluate(0, name, round=turn)])) == [0]
    assert attached == [[], [name], []]
    assert torch.equal(cached[name]["weight"], torch.arange(4.0))
    assert engine.account()["faults"] == {}


def test_modules_are_not_sent_twice_nor_to_those_who_need_none(connect, parts):
    name = parts.workspaces["backbone"].modules.add({"weight": torch.arange(5.0)})
    engine = connect(fleet(_0=lambda order: pack_lacking([name]), _1=lambda order: pack_lacking([name])))
    assert clients_of(engine.map([evaluate(0, name), report(1)])) == []
    assert engine.account()["faults"] == {
        "0": "it asks again for modules that it was sent",
        "1": "it asks for modules that its task does not need",
    }


def test_node_that_lost_what_it_had_meanwhile_gets_all_modules(connect, parts):
    names = [parts.workspaces["backbone"].modules.add({"weight": torch.full((2,), float(i))}) for i in (7, 8)]
    attached = []

    def forgetful(order: Order) -> RecordDict:
        """Lack the second at first, then the first; with both it can begin."""
        attached.append(set(order.modules))
        wanted = {0: [names[1]], 1: [names[0]]}.get(len(order.modules))
        return pack_lacking(wanted) if wanted else pack_answer(reply_to(order.task))

    engine = connect(fleet(_0=forgetful))
    assert clients_of(engine.map([evaluate(0, *names)])) == [0]
    assert attached == [set(), {names[1]}, set(names)]
    assert engine.account()["faults"] == {}


def test_who_claims_to_be_another_client_gets_no_tasks(connect):
    engine = connect({**fleet(), 103: node(1), 104: node(3), 105: lambda record: pack_refusal("no partition-id")})
    assert clients_of(engine.map([report(client) for client in CLIENTS])) == [0, 1, 2]
    list(engine.map([report(client) for client in CLIENTS]))
    assert engine.account()["faults"] == {
        "node 103": "it says that it is client 1, which node 101 is already",
        "node 104": "it says that it is client 3, and the run has 0 to 2",
        "node 105": "no partition-id",
    }
    assert {to for to, record in engine.grid.sent if not is_hello(record)} == {100, 101, 102}


def test_node_cannot_take_the_place_of_one_that_is_away(connect):
    engine = connect({100: node(0), 102: node(1)}, keys=lambda: {100: 0, 102: 2})
    assert clients_of(engine.map([report(client) for client in CLIENTS])) == [0]
    reason = "its node says that it is client 1, and its key was made for client 2. Set client = 2 in its node.toml"
    assert engine.account()["faults"] == {"1": "not connected", "2": reason}
    assert {to for to, record in engine.grid.sent if not is_hello(record)} == {100}


def test_answer_that_is_too_large_is_dropped_before_a_tensor_is_made_of_it(connect, parts, monkeypatch):
    task = train(parts, 1)
    expected = sum(tensor.nbytes for tensor in task.parameters.values())

    def with_bytes(count: int) -> Respond:
        return lambda order: pack_answer(reply_to(order.task, parameters={"x": torch.zeros(count, dtype=torch.uint8)}))

    def too_large(order: Order) -> RecordDict:
        record = with_bytes(2 * expected + 2**20)(order)
        monkeypatch.setattr(protocol, "load", lambda _: pytest.fail("a tensor was made"))
        return record

    assert clients_of(connect(fleet(_1=with_bytes(2 * expected + 2**20 - 2000))).map([task])) == [1]
    engine = connect(fleet(_1=too_large))
    assert clients_of(engine.map([task])) == []
    reason = engine.account()["faults"]["1"]
    assert f"no more than {2 * expected + 2**20} were expected" in reason


def test_own_layers_count_where_they_were_asked_for(connect, parts):
    layers = {name: tensor.clone() for name, tensor in parts.workspaces["backbone"].initial.items()}
    both = {**layers, **{f"{name}.adversarial": tensor for name, tensor in layers.items()}}
    filling = torch.zeros(2**20, dtype=torch.uint8)  # so that it is the layers that decide
    asked = report(1, wants_local=True)
    for task, local, usable in [(asked, both, True), (report(1), both | {"x": filling}, False)]:
        engine = connect(fleet(_1=lambda order, local=local: pack_answer(reply_to(order.task, local=local))))
        assert clients_of(engine.map([task])) == ([1] if usable else [])


@pytest.mark.parametrize("failure", [pack_refusal, partial(Error, 2)])
def test_text_of_a_node_cannot_steer_a_terminal(connect, steering, failure):
    engine = connect(fleet(_1=lambda order: failure(steering + "x" * 600)))
    assert clients_of(engine.map([report(client) for client in CLIENTS])) == [0, 2]
    (reason,) = engine.account()["faults"].values()
    assert reason.isprintable()
    assert len(reason) <= 500
    assert "?[2J" in reason


def test_few_answers_are_in_memory_at_a_time(connect, clock):
    """There are 20 answers waiting, and 30 that nobody waits for any more: each fetch asks for eight at most."""
    engine = connect(fleet(), Timeouts(deadline=0.3, interval=0.01))
    list(engine.map([report(client) for client in CLIENTS]))
    engine.grid.holding = {100}
    list(engine.map([report(0, 2, number) for number in range(30)]))
    asked, pull = [], engine.grid.pull_messages

    def noted(ids):
        ids = list(ids)
        asked.append(len(ids))
        return pull(ids)

    engine.grid.pull_messages = noted
    assert clients_of(engine.map([report(1, 3, number) for number in range(20)])) == [1] * 20
    assert asked == [8, 8, 8, 4]  # 20 of this phase, and eight late ones
    engine.account()
    engine.grid.let_go()
    for turn in range(4, 8):  # all late ones have their turn
        list(engine.map([report(1, turn)]))
    assert not engine._late
    assert engine.account()["faults"] == {"0": "its answer of round 2 (report) came too late"}


def test_account_counts_contents_both_ways(connect, parts):
    engine = connect(fleet(_2=lambda order: None))
    tasks = [train(parts, client) for client in CLIENTS]
    answers = pack_answer(reply_to(tasks[0])), pack_answer(reply_to(tasks[1]))
    assert clients_of(engine.map(tasks)) == [0, 1]
    record = engine.account()["wire"]
    orders = [content for _, content in engine.grid.sent if not is_hello(content)]
    assert len(orders) == 3
    assert record["sent"] == sum(map(wire_bytes, orders)), "who a node is may be told in any round: it is not counted"
    assert record["sent"] > 3 * sum(tensor.nbytes for tensor in tasks[0].parameters.values())
    assert record["received"] == sum(map(wire_bytes, answers))
    # Three clients were asked to train: each would have had the whole model's shared parameters, there and back.
    assert record["whole_model"] == 3 * 2 * 4 * sum(tensor.numel() for tensor in tasks[0].parameters.values())
    assert engine.account() == {"wire": {"sent": 0, "received": 0, "whole_model": 0}, "faults": {}}


def test_evaluation_is_no_training_of_the_whole_model(connect):
    engine = connect(fleet())
    list(engine.map([report(0)]))
    assert engine.account()["wire"]["whole_model"] == 0


@pytest.mark.parametrize("ids", [[], [None]])
def test_message_that_flower_does_not_take(connect, ids):
    engine = connect(fleet())
    list(engine.map([report(client) for client in CLIENTS]))
    push = engine.grid.push_messages
    engine.grid.push_messages = lambda some: ids if next(iter(some)).metadata.dst_node_id == 101 else push(some)
    assert clients_of(engine.map([report(client) for client in CLIENTS])) == [0, 2]
    assert engine.account()["faults"] == {"1": "the task could not be sent"}


def test_connection_that_fails_for_a_while(connect):
    engine = connect(fleet(), Timeouts(deadline=30, interval=0.01))
    calls = {"pull_messages": 0, "get_node_ids": 0}

    def failing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            if calls[name] in (1, 3):
                raise ConnectionError("gone")
            return real(*args)

        return call

    for name in calls:
        setattr(engine.grid, name, failing(name, getattr(engine.grid, name)))
    assert clients_of(engine.map([report(client) for client in CLIENTS])) == [0, 1, 2]


def test_look_can_end_the_waiting(connect):
    def look() -> None:
        raise TrainingError("dead")

    engine = connect(fleet(_0=lambda order: None), Timeouts(deadline=60, interval=0.01), look=look)
    with pytest.raises(FedProphetError, match="dead"):
        list(engine.map([report(0)]))
    assert engine.busy


def test_own_layers_are_looked_at_before_any_task_goes_out(connect):
    def lend(task: Task) -> None:
        if task.client == 2:
            raise CheckpointError("the layers of client 2 are gone")

    engine = connect(fleet(), lend=lend)
    with pytest.raises(CheckpointError, match="client 2"):
        list(engine.map([report(client) for client in CLIENTS]))
    assert not engine.busy
    assert clients_of(engine.map([report(0)])) == [0]


def test_window_bounds_what_is_under_way(connect):
    timeouts = Timeouts(deadline=30, simulated=True, window=2, interval=0.01)
    engine = connect(fleet(), timeouts)
    tasks = [report(client, number=number) for client in CLIENTS for number in range(4)]
    assert clients_of(engine.map(tasks)) == [client for client in CLIENTS for _ in range(4)]
    assert engine.grid.most_waiting == 2


def test_simulation_in_which_everybody_refuses(connect):
    refuse = {f"_{client}": lambda order: pack_refusal("there is no such attack") for client in CLIENTS}
    timeouts = Timeouts(deadline=30, simulated=True, interval=0.01)
    with pytest.raises(TrainingError, match="there is no such attack"):
        list(connect(fleet(**refuse), timeouts).map([report(client) for client in CLIENTS]))
    del refuse["_1"]
    assert clients_of(connect(fleet(**refuse), timeouts).map([report(client) for client in CLIENTS])) == [1]


def test_deadline_of_a_simulation_counts_from_the_last_answer(connect, clock):
    def slow(order: Order) -> RecordDict:
        clock.sleep(0.15)
        return pack_answer(reply_to(order.task))

    timeouts = Timeouts(deadline=0.4, simulated=True, window=1, interval=0.01)
    engine = connect(fleet(_0=slow), timeouts)
    assert len(list(engine.map([report(0, number=number) for number in range(5)]))) == 5


def test_phase_that_nobody_finished_is_given_up(connect):
    engine = connect(fleet(), Timeouts(deadline=30, interval=0.01))
    phase = engine.map([report(client) for client in CLIENTS])
    next(phase)
    phase.close()
    assert clients_of(engine.map([report(client, 2) for client in CLIENTS])) == [0, 1, 2]
