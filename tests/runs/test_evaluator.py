"""Which samples an evaluation asks about, and what becomes of the answers."""

from dataclasses import replace

import pytest

from fedprophet.messages.answers import Evaluated
from fedprophet.messages.values import SERVER
from fedprophet.runs.evaluator import Evaluator, evaluate, precision_of
from fedprophet.runs.export import exported_model
from fedprophet.runs.session import assemble


@pytest.fixture(scope="module")
def untrained(tiny):
    """A session whose micro-batches have 32 samples: a part of the test set is two of them."""
    return assemble(tiny({"evaluate.batch": 32}))


def _asked(recorder, session, samples=None):
    engine, state = recorder(session.engine), session.method.initial()
    evaluator = Evaluator(session, state, exported_model(session, state, session.engine), engine, samples)
    result = evaluator.measure(("clean",))["clean"]
    asked = [task for tasks, _ in engine.exchanges for task in tasks]
    return result, [t for t in asked if t.client == SERVER], [t for t in asked if t.client != SERVER]


def test_the_test_set_is_asked_about_in_parts(recorder, untrained) -> None:
    result, server, clients = _asked(recorder, untrained)
    assert [task.part for task in server] == [(64 * n, min(64 * n + 64, 360)) for n in range(6)]
    assert [task.number for task in server] == list(range(6))
    assert [answer.samples for answer in result.test] == [64] * 5 + [40]
    assert [(task.client, task.part, task.samples) for task in clients] == [(k, None, None) for k in range(6)]


def test_progress_counts_clients_and_samples_and_names_the_attack(untrained) -> None:
    seen, state = [], untrained.method.initial()
    whole = exported_model(untrained, state, untrained.engine)
    Evaluator(untrained, state, whole, untrained.engine, 100, lambda *what: seen.append(what)).measure(("pgd1",))
    assert seen[:3] == [("pgd1, test set", done, 100) for done in (0, 64, 100)]
    assert seen[3:] == [("pgd1, clients", done, 6) for done in range(7)]


def test_a_number_of_samples_is_shared_by_the_clients(recorder, untrained) -> None:
    """100 samples over 6 clients are 17 each: the numbers say how many were really used."""
    result, server, clients = _asked(recorder, untrained, samples=100)
    assert [task.part for task in server] == [(0, 64), (64, 100)]
    assert {task.samples for task in server} == {100}
    assert {task.samples for task in clients} == {17}
    assert sum(answer.samples for answer in result.test) == 100
    assert [answer.samples for answer in result.clients] == [17] * 6


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
            assert list(cell) == ["accuracy", "samples", "interval", "precision"]
            low, high = cell["interval"]
            assert 0 <= low <= cell["accuracy"] <= high <= 1
    assert results["global"]["pgd1"]["samples"] == 360


@pytest.mark.parametrize(
    ("engine", "asked", "precisions"),
    [
        ("cuda", "bfloat16", ["bfloat16", "float32"]),
        ("cuda", "float32", ["float32"] * 2),
        ("plain", "bfloat16", ["float32"] * 2),
    ],
)
def test_each_accuracy_has_the_precision_it_was_measured_in(untrained, engine, asked, precisions) -> None:
    """AutoAttack is in float32 also where the GPU engine has bfloat16; other engines know nothing else."""
    session = replace(untrained, engine_name=engine, config=untrained.config.model_copy(update={"precision": asked}))
    assert [precision_of(session, attack) for attack in ("pgd", "autoattack")] == precisions
    assert precision_of(session, "aa-fast") == "float32"
    found = evaluate(session, session.method.initial(), ("clean", "pgd1"), session.engine)
    assert {cell["precision"] for part in found.values() for cell in part.values()} == {precisions[0]}


def test_evaluations_that_cannot_be_are_left_out_of_the_closing_numbers(untrained) -> None:
    class Wrong:
        def map(self, tasks):
            for answer in untrained.engine.map(tasks):
                wrong = isinstance(answer, Evaluated) and answer.client == 3
                yield replace(answer, clean=answer.samples + 1) if wrong else answer

    cell = evaluate(untrained, untrained.method.initial(), ("clean",), Wrong())["personalised"]["clean"]
    everybody = evaluate(untrained, untrained.method.initial(), ("clean",), untrained.engine)["personalised"]["clean"]
    left_out = len(untrained.population.client_data(3).validation)
    assert cell["samples"] == everybody["samples"] - left_out
    assert 0 <= cell["accuracy"] <= 1
