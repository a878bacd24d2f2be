"""Simulated time against hand-computed numbers."""

import pytest

from fedprophet.fleet.latency import batch_sizes, client_seconds, workload_of
from fedprophet.fleet.network import draw_link, payload_bytes
from fedprophet.runs.results import simulated_seconds
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
        assert record["times"][str(task.client)] == expected
        assert expected["computation_s"] > 0
