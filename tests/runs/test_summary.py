"""Sums over a journal against hand-computed numbers."""

import pytest

from fedprophet.fleet import batch_sizes, client_seconds, workload_of
from fedprophet.fleet.network import draw_link, payload_bytes
from fedprophet.runs.session import assemble
from fedprophet.runs.summary import (
    best_and_last,
    fault_count,
    faulty_clients,
    moved_bytes,
    plans_taken,
    simulated_seconds,
    training_memory,
)
from fedprophet.server.coordinator import play_round


def _time(computation: float, access: float, communication: float = 100.0) -> dict[str, float]:
    return {"computation_s": computation, "access_s": access, "communication_s": communication}


def test_a_round_lasts_as_long_as_its_slowest_client() -> None:
    records = [
        {"times": {"1": _time(1.0, 5.0), "2": _time(4.0, 1.0), "3": _time(0.5, 0.5, 1e6)}},
        {"times": {}},
        {"times": {"2": _time(2.0, 0.25)}},
    ]
    assert simulated_seconds(records) == {"computation_s": 3.0, "access_s": 5.25, "total_s": 8.25}


def test_plans_are_counted_and_the_one_that_came_closest_to_its_limit_is_known() -> None:
    """80 of 100 bytes are closer than 90 of 120."""
    rounds = [{"1": ("plain", 90, 120), "2": ("fused", 80, 100)}, {}, {"1": ("plain", 10, 100)}]
    records = [
        {"plans": {c: {"plan": p, "peak_bytes": peak, "limit_bytes": m} for c, (p, peak, m) in plans.items()}}
        for plans in rounds
    ]
    found = plans_taken([{"round": 1}, *records])
    assert found == {"counts": {"plain": 2, "fused": 1}, "closest": {"peak_bytes": 80, "limit_bytes": 100}}
    assert plans_taken([{"round": 1}]) is None


def test_training_memory_by_hand() -> None:
    """In the hardest round, the second, the luckiest client was given 25 bytes; one was given 90 in the first."""
    rounds = [{"1": 90, "2": 10}, {"2": 30, "3": 25}, {}, {"1": 70, "3": 15}]
    records = [{"times": {client: {"memory_bytes": size} for client, size in sizes.items()}} for sizes in rounds]
    assert training_memory(records) == {"smallest_bytes": 10, "least_bytes": 25, "peak_bytes": 90}
    assert training_memory(records[2:3]) is None, "nobody trained"


def test_the_best_round_of_all_stages_by_hand() -> None:
    """0.6 + 1.5 · 0.4 = 1.2 in module 1 beats 0.8 + 1.5 · 0.25 = 1.175 in module 2; of equal ones the first counts."""
    records = [
        {"round": 1, "module": 1, "clean": 0.5, "adversarial": 0.3, "samples": 9},
        {"round": 2, "module": 1, "clean": 0.6, "adversarial": 0.4, "samples": 9},
        {"round": 3, "module": 2, "clean": 0.6, "adversarial": 0.4, "samples": 9},
        {"round": 4, "module": 2, "clean": 0.8, "adversarial": 0.25, "samples": 9},
        {"round": 5, "module": 2, "clean": 0.0, "adversarial": 0.0, "samples": 0},
        {"round": 6, "module": 2},
    ]
    found = best_and_last(records)
    assert found == {
        "best": {"round": 2, "module": 1, "clean": 0.6, "adversarial": 0.4},
        "last": {"round": 4, "module": 2, "clean": 0.8, "adversarial": 0.25},
    }
    assert best_and_last(records[4:]) == {}


def test_bytes_and_faults_by_hand() -> None:
    records = [
        {"wire": {"sent": 10, "received": 4, "whole_model": 90}, "dropped": {"2": "a"}, "faults": {"2": "b", "7": "c"}},
        {"dropped": {}},
        {"wire": {"sent": 5, "received": 1, "whole_model": 10}, "missing": {"report": [7], "train": [7, 8]}},
    ]
    assert moved_bytes(records) == {"sent": 15, "received": 5, "whole_model": 100}
    assert moved_bytes(records[1:2]) is None
    assert faulty_clients(records[0]) == {"2": ["a", "b"], "7": ["c"]}
    assert faulty_clients(records[2]) == {"7": ["no answer (report)", "no answer (train)"], "8": ["no answer (train)"]}
    assert fault_count(records) == 4


@pytest.mark.parametrize("method", ["fedprophet", "jfat"])
def test_the_journal_keeps_each_clients_time_for_what_it_trained(tiny, recorder, method: str) -> None:
    session = assemble(tiny({"method": method, "train.warmup": 0}))
    engine = recorder(session.engine)
    state, record = play_round(session.method.round(session.method.initial()), engine)
    reports, trained = engine.exchanges[0][1], engine.exchanges[1]
    assert set(record["times"]) == {str(report.client) for report in reports}
    for report, task, answer in zip(reports, *trained, strict=True):
        batches = batch_sizes(len(session.population.client_data(task.client).train), 16, 2)
        sent, back = payload_bytes(task.parameters), payload_bytes(answer.parameters)
        workload = workload_of(session.world.cost, task.first, task.last)
        link = draw_link(session.config.seed, state.round, task.client)
        expected = client_seconds(workload, report.resources, batches, 2, link, sent, back)
        assert expected.items() <= record["times"][str(task.client)].items()
        assert expected["computation_s"] > 0
