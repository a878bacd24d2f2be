"""Simulated time against hand-computed numbers, the names of attacks, and which samples an evaluation asks about."""

import sys
from dataclasses import replace

import pytest

from fedprophet.client.task import SERVER, ClientTask, ClientUpdate
from fedprophet.errors import ConfigError
from fedprophet.fleet.latency import batch_sizes, client_seconds, workload_of
from fedprophet.fleet.network import draw_link, payload_bytes
from fedprophet.runs.results import (
    Evaluator,
    attack_label,
    evaluate,
    exported_model,
    in_order,
    parse_attacks,
    simulated_seconds,
    training_memory,
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
