"""Populations of any size: the clients are real in everything but their work."""

import tracemalloc
from dataclasses import replace

import pytest
import torch

from fedprophet.bench import growth
from fedprophet.bench.growth import PHASES, UNTIMED, GrowthSettings, Phases, TimedPool, measure_growth
from fedprophet.bench.synthetic import SIZES, synthetic
from fedprophet.messages.tasks import Report
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import play_round

ABOUT = {"processor": "p", "cores": 2, "load": 0.5, "load_after": 0.5, "date": "today"}
ABOUT |= dict.fromkeys(("python", "torch", "cuda", "triton", "fedprophet"), "1")


@pytest.fixture
def settings(tiny_flags):
    overrides = tuple(text for text in tiny_flags() if text != "--set")
    return GrowthSettings("digits", overrides, sizes=(1_000,), cohorts=(3, 6), rounds=1)


def instant(settings, clients, tmp_path, cohort=3):
    config = settings.config(clients, cohort)
    session = assemble(config, dataset=growth._shared_out(SIZES["digits"], clients, config.seed))
    return growth._instant(session, tmp_path / "clients", Phases())


def test_the_largest_population_meets_every_cohort():
    cases = GrowthSettings("digits", sizes=(1000, 20), cohorts=(30, 40, 2000)).cases()
    assert cases == [(20, 20), (1000, 30), (1000, 40)]


def test_everyone_owns_samples(settings, tmp_path):
    session = instant(settings, 40, tmp_path)
    assert len(session.population.eligible) == 40
    assert sum(session.population.samples(client) for client in range(40)) == 5 * 40


def test_the_cohorts_are_those_of_a_run(settings, tmp_path):
    session = instant(settings, 40, tmp_path)
    drawn = [session.world.clients.cohort(number) for number in (1, 2)]
    assert isinstance(session.world.pool, TimedPool)
    assert drawn == [session.population.draw(number, 3, session.config.seed, "cohort") for number in (1, 2)]


def test_clients_answer_at_once_with_what_they_were_sent(settings, tmp_path, recorder, same_tensors):
    session = instant(settings, 40, tmp_path)
    watch = recorder(session.engine)
    before = session.method.initial()
    after, record = play_round(session.method.round(before), watch)
    kinds = [asked[0].kind for asked, _ in watch.exchanges]
    assert kinds == ["report", "train", "evaluate"]
    assert all(answer.resources is not None for answer in watch.exchanges[0][1])
    for task, answer in zip(*watch.exchanges[1], strict=True):
        assert same_tensors(task.parameters, answer.parameters)
        assert answer.weight == session.population.samples(task.client)
    assert same_tensors(before.model, after.model)
    assert record["dropped"] == {}
    assert record["clean"] == 1.0


def test_a_client_that_trained_keeps_its_layers_on_disk(settings, tmp_path):
    session = instant(settings, 40, tmp_path)
    state, _ = play_round(session.method.round(session.method.initial()), session.engine)
    session.layers.flush()
    cohort = session.world.clients.cohort(1)
    assert {int(file.stem) for file in (tmp_path / "clients").rglob("*.safetensors")} == set(cohort)
    timeline = session.method.timeline(state)
    reports = [Report(round=1, client=client, seed=0, timeline=timeline, wants_local=True) for client in cohort]
    layers = [answer.local for answer in session.engine.map(reports)]
    assert all(set(own) == set(session.world.initial_layers) for own in layers)


def test_layers_beyond_the_limit_leave_the_memory(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(growth, "STORE_MEMORY", 1)
    session = instant(settings, 40, tmp_path)
    play_round(session.method.round(session.method.initial()), session.engine)
    assert len(session.layers._clients) == 0
    assert len(list((tmp_path / "clients").rglob("*.safetensors"))) == 3


def test_a_phase_within_another_counts_for_itself_alone(monkeypatch):
    # Outer begins at 0, inner lasts from 2 to 5, another from 6 to 7, outer ends at 11.
    ticks = iter([0, 2, 5, 6, 7, 11])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    phases = Phases()
    with phases.of("outer"):
        with phases.of("inner"):
            pass
        with phases.of("inner"):
            pass
    assert phases.seconds == {"outer": 7, "inner": 4}


@pytest.mark.slow
def test_rows_of_every_population_and_cohort(settings):
    said = []
    rows = measure_growth(settings, said.append)
    assert [(row["clients"], row["cohort"]) for row in rows] == [(1_000, 3), (1_000, 6)]
    assert said[1:] == ["1,000 clients, cohorts of 3", "1,000 clients, cohorts of 6"]
    for row in rows:
        assert row["eligible"] == row["clients"]
        assert row["rounds"] == 1
        assert set(row["seconds_by_phase"]) == set(PHASES)
        assert all(seconds > 0 for seconds in row["seconds_by_phase"].values())
        assert row["seconds_least"] <= row["seconds"] <= row["seconds_most"]
        assert row["resident_bytes"] > 10**7
        # Everyone who was drawn in the rounds, timed or not, has layers there, and nobody else.
        assert row["cohort"] < row["clients_on_disk"] <= row["cohort"] * (1 + UNTIMED)
        assert row["disk_bytes"] > 0
    found = growth.growth_document(settings, ABOUT, rows)
    for table in growth.growth_page(found).tables:
        assert [cells[:2] for cells in table.cells()] == [["1,000", "3"], ["1,000", "6"]]


def test_drawing_touches_the_cohort_alone(settings, tmp_path):
    """A draw from a large population makes no array of its size."""
    session = instant(settings, 400_000, tmp_path)
    population = session.population
    assert len(population.eligible) == 400_000
    tracemalloc.start()
    try:
        for number in range(1, 20):
            population.draw(number, 10, 0, "cohort")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000


def test_random_images_of_many_clients_share_a_pool():
    found = synthetic(replace(SIZES["digits"], train=1_000_000, test=10), 0)
    assert len(found.train) == 1_000_000
    assert found.train.fetch(torch.tensor([999_999])).shape == (1, 1, 8, 8)
