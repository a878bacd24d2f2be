"""Simulated time against hand-computed numbers, the names of attacks, and which samples an evaluation asks about."""

import math
import sys
from dataclasses import replace

import pytest
import torch

from fedprophet.errors import ConfigError
from fedprophet.fleet.latency import batch_sizes, client_seconds, workload_of
from fedprophet.fleet.network import draw_link, payload_bytes
from fedprophet.messages.task import SERVER, ClientTask, ClientUpdate
from fedprophet.runs.results import (
    Evaluator,
    Watched,
    attack_label,
    average_local,
    evaluate,
    exported_model,
    fault_count,
    faulty_clients,
    in_order,
    parse_attacks,
    simulated_seconds,
    training_memory,
    wire_bytes,
)
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import hold


def _time(computation: float, access: float, communication: float = 100.0) -> dict[str, float]:
    return {"computation_s": computation, "access_s": access, "communication_s": communication}


def test_a_round_lasts_as_long_as_its_slowest_client() -> None:
    records = [
        {"times": {"1": _time(1.0, 5.0), "2": _time(4.0, 1.0), "3": _time(0.5, 0.5, 1e6)}},
        {"times": {}},
        {"times": {"2": _time(2.0, 0.25)}},
    ]
    assert simulated_seconds(records) == {"computation_s": 3.0, "access_s": 5.25, "total_s": 8.25}


def test_training_memory_by_hand() -> None:
    """In the hardest round, the second, the luckiest client was given 25 bytes; somebody was given 90 in the first."""
    rounds = [{"1": 90, "2": 10}, {"2": 30, "3": 25}, {}, {"1": 70, "3": 15}]
    records = [{"times": {client: {"memory_bytes": size} for client, size in sizes.items()}} for sizes in rounds]
    assert training_memory(records) == {"least_bytes": 25, "peak_bytes": 90}
    assert training_memory(records[2:3]) is None, "nobody trained"
    assert training_memory([*records, {"times": {"1": _time(1.0, 1.0)}}]) is None, "half of it is not known"


@pytest.mark.parametrize("method", ["fedprophet", "jfat"])
def test_the_journal_keeps_each_clients_time_for_what_it_trained(tiny, recorder, method: str) -> None:
    session = assemble(tiny({"method": method, "train.warmup": 0}))
    engine = recorder(session.engine)
    state, record = hold(session.method.round(session.method.initial()), engine)
    reports, trained = engine.exchanges[0][1], engine.exchanges[1]
    assert set(record["times"]) == {str(report.client) for report in reports}
    for report, task, update in zip(reports, *trained, strict=True):
        batches = batch_sizes(len(session.population.client_data(task.client).train), 16, 2)
        sent, back = payload_bytes(task.parameters), payload_bytes(update.parameters)
        workload = workload_of(session.world.cost, task.first, task.last)
        link = draw_link(session.config.seed, state.round, task.client)
        expected = client_seconds(workload, report.resources, batches, 2, link, sent, back)
        assert expected.items() <= record["times"][str(task.client)].items()
        assert expected["computation_s"] > 0


def test_names_of_attacks() -> None:
    assert parse_attacks(" clean, pgd20,autoattack ,aa-fast,pgd20") == ("clean", "pgd20", "autoattack", "aa-fast")
    labels = {"clean": "Clean", "pgd20": "PGD-20", "autoattack": "AutoAttack", "aa-fast": "AA-fast"}
    assert {name: attack_label(name) for name in labels} == labels


@pytest.mark.parametrize("wrong", ["pgd", "pgd0", "pgd-5", "pgd020", "autoattack5", "aa", "PGD20", "fgsm", "clean1"])
def test_other_names_are_refused_with_what_is_allowed(wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_attacks(f"clean,{wrong}")
    assert str(caught.value) == (
        f"unknown attack {wrong!r}. Allowed: clean, pgdN with N steps (as in pgd20), autoattack, aa-fast; "
        "several separated by commas"
    )
    with pytest.raises(ConfigError, match="no attack is given"):
        parse_attacks(" , ")


@pytest.mark.parametrize("attack", ["autoattack", "aa-fast"])
def test_a_missing_extra_is_named(monkeypatch, attack: str) -> None:
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    with pytest.raises(ConfigError) as caught:
        parse_attacks(f"clean,{attack}")
    assert str(caught.value) == (f"the attack {attack} needs the extra `attacks`: pip install 'fedprophet[attacks]'")
    assert parse_attacks("clean,pgd3") == ("clean", "pgd3")


class Backwards:
    def map(self, tasks):
        yield from (ClientUpdate(t.kind, t.round, t.client, 1.0, number=t.number) for t in reversed(list(tasks)))


def test_updates_come_in_the_order_of_the_tasks_also_where_a_client_has_several() -> None:
    tasks = [ClientTask("evaluate", 1, client, 0, number=number) for client in (SERVER, 4) for number in range(3)]
    found = [(update.client, update.number) for update in in_order(tasks, Backwards())]
    assert found == [(task.client, task.number) for task in tasks]


def test_answers_that_are_missing_doubled_or_of_strangers_do_not_disturb_the_order() -> None:
    class Disturbed:
        def map(self, tasks):
            for client, weight in ((3, 1.0), (1, 1.0), (9, 1.0), (1, 2.0), (4, 1.0), (3, 2.0)):
                yield ClientUpdate("evaluate", 1, client, weight)

    tasks = [ClientTask("evaluate", 1, client, 0) for client in (1, 4, 2, 3)]
    found = [(update.client, update.weight) for update in in_order(tasks, Disturbed())]
    assert found == [(1, 1.0), (4, 1.0), (3, 1.0)]


def test_bytes_and_faults_by_hand() -> None:
    records = [
        {"wire": {"sent": 10, "received": 4, "jfat": 90}, "dropped": {"2": "a"}, "faults": {"2": "b", "7": "c"}},
        {"dropped": {}},
        {"wire": {"sent": 5, "received": 1, "jfat": 10}, "missing": {"report": [7], "train": [7, 8]}},
    ]
    assert wire_bytes(records) == {"sent": 15, "received": 5, "jfat": 100}
    assert wire_bytes(records[1:2]) is None
    assert faulty_clients(records[0]) == {"2": ["a", "b"], "7": ["c"]}
    assert faulty_clients(records[2]) == {"7": ["no answer (report)", "no answer (train)"], "8": ["no answer (train)"]}
    assert fault_count(records) == 4


def test_a_watched_engine_keeps_the_accounts_of_the_one_it_watches() -> None:
    class Counting(Backwards):
        def account(self):
            return {"wire": {"sent": 3}}

    assert Watched(Counting(), None).account() == {"wire": {"sent": 3}}
    assert Watched(Backwards(), None).account() == {}


class Tampered:
    """An engine of which one client's own layers are spoilt when it is asked for them."""

    def __init__(self, engine, client, spoil):
        self.engine, self.client, self.spoil = engine, client, spoil

    def map(self, tasks):
        for update in self.engine.map(tasks):
            hit = update.client == self.client and update.local
            yield replace(update, local=self.spoil(update.local)) if hit else update


@pytest.fixture(scope="module")
def trained(tiny, play_in_memory):
    """A run after whose round every client has norm layers of its own."""
    return play_in_memory(tiny({"method": "jfat", "population.cohort": 6}), rounds=1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda local: {name: value * math.nan for name, value in local.items()},
        lambda local: {name: torch.ones(3) for name in local},
        lambda local: {**local, "foreign": torch.ones(3)},
    ],
)
def test_layers_that_cannot_be_averaged_do_not_enter_the_exported_model(trained, same_tensors, spoil) -> None:
    session, state = trained.session, trained.states[-1]
    found = average_local(session, state, Tampered(session.engine, 2, spoil))
    assert same_tensors(found, average_local(session, state, Tampered(session.engine, 2, lambda local: {})))
    assert not same_tensors(found, average_local(session, state, session.engine))


def test_norm_layers_of_the_exported_model_follow_the_rule_too(trained) -> None:
    """One client claims a thousandfold; the median of six is between what honest ones have."""
    session, state = trained.session, trained.states[-1]
    engine = Tampered(session.engine, 2, lambda local: {name: 1000 * value for name, value in local.items()})
    settings = session.config.aggregate.model_copy(update={"rule": "median"})
    robust = replace(
        session, world=replace(session.world, config=session.config.model_copy(update={"aggregate": settings}))
    )
    name = next(name for name in session.initial_local if name.endswith("running_var"))
    honest = torch.stack([own[name] for client, own in trained.layers[-1].items() if client != 2])
    found = average_local(robust, state, engine)[name]
    assert bool((found <= honest.amax(dim=0)).all())
    assert bool((average_local(session, state, engine)[name] > 10 * honest.amax(dim=0)).any())


def test_evaluations_that_cannot_be_are_left_out_of_the_closing_numbers(untrained) -> None:
    class Wrong:
        def map(self, tasks):
            for update in untrained.engine.map(tasks):
                metrics = {"samples": math.nan, "clean": math.nan} if update.client == 3 else update.metrics
                yield replace(update, metrics=metrics)

    cell = evaluate(untrained, untrained.method.initial(), ("clean",), Wrong())["personalised"]["clean"]
    everybody = evaluate(untrained, untrained.method.initial(), ("clean",), untrained.engine)["personalised"]["clean"]
    left_out = len(untrained.population.client_data(3).validation)
    assert cell["samples"] == everybody["samples"] - left_out
    assert 0 <= cell["accuracy"] <= 1


@pytest.fixture(scope="module")
def untrained(tiny):
    """A session whose micro-batches have 32 samples: a part of the test set is two of them."""
    return assemble(tiny({"evaluate.batch": 32}))


def _asked(recorder, session, samples=None):
    engine, state = recorder(session.engine), session.method.initial()
    evaluator = Evaluator(session, state, exported_model(session, state, session.engine), engine, samples)
    measured = evaluator.measure(("clean",))["clean"]
    asked = [task for tasks, _ in engine.exchanges for task in tasks]
    return measured, [t for t in asked if t.client == SERVER], [t for t in asked if t.client != SERVER]


def test_the_test_set_is_asked_about_in_parts(recorder, untrained) -> None:
    measured, server, clients = _asked(recorder, untrained)
    assert [task.part for task in server] == [(64 * n, min(64 * n + 64, 360)) for n in range(6)]
    assert [task.number for task in server] == list(range(6))
    assert [update.metrics["samples"] for update in measured.test] == [64.0] * 5 + [40.0]
    assert [(task.client, task.part, task.samples) for task in clients] == [(k, None, None) for k in range(6)]


def test_progress_counts_clients_and_samples_and_names_the_attack(untrained) -> None:
    seen, state = [], untrained.method.initial()
    whole = exported_model(untrained, state, untrained.engine)
    Evaluator(untrained, state, whole, untrained.engine, 100, lambda *what: seen.append(what)).measure(("pgd1",))
    assert seen[:3] == [("pgd1, test set", done, 100) for done in (0, 64, 100)]
    assert seen[3:] == [("pgd1, clients", done, 6) for done in range(7)]


def test_a_number_of_samples_is_shared_by_the_clients(recorder, untrained) -> None:
    """100 samples over 6 clients are 17 each: the numbers say how many were really used."""
    measured, server, clients = _asked(recorder, untrained, samples=100)
    assert [task.part for task in server] == [(0, 64), (64, 100)]
    assert {task.samples for task in server} == {100}
    assert {task.samples for task in clients} == {17}
    assert sum(update.metrics["samples"] for update in measured.test) == 100
    assert [update.metrics["samples"] for update in measured.clients] == [17.0] * 6


def test_the_setting_limits_the_test_set_alone(recorder, untrained) -> None:
    config = untrained.config
    limited = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"test_samples": 70})})
    session = replace(untrained, config=limited)
    _, server, clients = _asked(recorder, session)
    assert [task.part for task in server] == [(0, 64), (64, 70)]
    assert {task.samples for task in clients} == {None}
    _, server, _ = _asked(recorder, session, samples=5)
    assert [task.part for task in server] == [(0, 5)]


def test_cells_of_an_evaluation(untrained) -> None:
    results = evaluate(untrained, untrained.method.initial(), ("clean", "pgd1"), untrained.engine)
    assert list(results) == ["personalised", "global"]
    for cells in results.values():
        assert list(cells) == ["clean", "pgd1"]
        for cell in cells.values():
            assert list(cell) == ["accuracy", "samples", "interval"]
            low, high = cell["interval"]
            assert 0 <= low <= cell["accuracy"] <= high <= 1
    assert results["global"]["pgd1"]["samples"] == 360
