"""AutoAttack on rows of many clients, against the plain engine: the same verdicts, whoever is attacked together."""

import importlib
import logging
from dataclasses import replace

import pytest

from fedprophet.engines.row_attacks import RowAttacks, packed
from fedprophet.messages.values import SERVER
from fedprophet.threat import ThreatModel

AUTOATTACK = importlib.import_module("fedprophet.attacks.autoattack")
THREAT = ThreatModel("linf", 0.06, 0.02, 1, (0.0, 1.0))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Fewer queries and iterations than are due for a result."""
    original = AUTOATTACK._suite

    def shortened(*arguments):
        suite = original(*arguments)
        suite.square.n_queries, suite.fab.n_iter, suite.apgd.n_iter, suite.apgd_targeted.n_iter = 40, 3, 5, 5
        suite.fab.n_target_classes = suite.apgd_targeted.n_target_classes = 3
        return suite

    monkeypatch.setattr(AUTOATTACK, "_suite", shortened)


@pytest.fixture
def plain_tasks(monkeypatch):
    """Return a list of the clients whose tasks took the plain path."""
    from fedprophet.engines.plain import PlainEngine

    taken: list[int] = []
    real = PlainEngine.map

    def mapped(self, tasks):
        tasks = list(tasks)
        taken.extend(task.client for task in tasks)
        return real(self, tasks)

    monkeypatch.setattr(PlainEngine, "map", mapped)
    return taken


@pytest.fixture
def assert_same_verdicts(stacked, paired, plain_tasks):
    """Return a function that compares every number of the answers, and gives back the stacked engine's."""

    def check(session, tasks):
        expected = list(session.engine.map(tasks))
        plain_tasks.clear()
        pairs = paired(stacked(session).map(tasks), expected)
        assert plain_tasks == []
        assert all(mine == theirs for mine, theirs in pairs)
        return [mine for mine, _ in pairs]

    return check


def test_clients_with_norm_layers_of_their_own_and_the_test_set_in_parts(learned, evaluations, assert_same_verdicts):
    session, state = learned.session, learned.states[-1]
    tasks = evaluations(session, state, range(4), THREAT, attack="autoattack", batch=4, samples=6)
    (test,) = evaluations(session, state, [SERVER], THREAT, attack="autoattack", batch=4, samples=10)
    tasks += [replace(test, number=number, part=part) for number, part in enumerate([(0, 8), (8, 10)])]
    answers = assert_same_verdicts(session, tasks)
    broken = [sum(answer.broken.values()) for answer in answers]
    assert all(answer.adversarial == answer.clean - fell for answer, fell in zip(answers, broken, strict=True))
    assert any(broken)
    assert any(answer.adversarial for answer in answers)
    assert {tuple(answer.broken) for answer in answers} == {AUTOATTACK.STANDARD}


@pytest.mark.parametrize("at", ["classifier", "head"])
def test_label_frequencies_heads_and_frozen_modules(learned, cascade, at, evaluations, assert_same_verdicts):
    played = learned if at == "classifier" else cascade
    state = played.states[-1] if at == "classifier" else [s for s in played.states if s.stage == 1][-1]
    plain = evaluations(played.session, state, range(5), THREAT, attack="aa-fast", samples=8)
    tasks = [replace(task, calibration=0.1 * (task.client % 2)) for task in plain]
    found = assert_same_verdicts(played.session, tasks)
    without = assert_same_verdicts(played.session, plain)
    assert any(one.clean != other.clean for one, other in zip(found, without, strict=True) if one.client % 2)
    assert set(found[0].broken) == set(AUTOATTACK.FAST)


def test_a_cascade_with_frozen_modules(cascade, evaluations, assert_same_verdicts):
    tasks = evaluations(cascade.session, cascade.states[-1], range(4), THREAT, attack="aa-fast")
    assert tasks[0].frozen
    assert_same_verdicts(cascade.session, tasks)


def test_rows_are_as_many_at_once_as_fit_and_clients_are_answered_as_soon_as_they_are_done(
    learned, evaluations, stacked, monkeypatch, paired
):
    session, state = learned.session, learned.states[-1]
    tasks = evaluations(session, state, range(6), THREAT, attack="aa-fast", batch=4, samples=9)
    sizes: list[int] = []
    real = AUTOATTACK.attack_rows

    def attack_rows(components, logits, samples, threat):
        sizes.append(len(samples.labels))
        return real(components, logits, samples, threat)

    monkeypatch.setattr("fedprophet.engines.row_attacks.attack_rows", attack_rows)
    everything = list(stacked(session).map(tasks))
    (total,) = sizes
    sizes.clear()
    monkeypatch.setattr("fedprophet.engines.row_attacks.ROWS", 20)
    answers = stacked(session).map(tasks)
    first = next(answers)
    assert sum(sizes) < total
    assert paired([first, *answers], everything) == [(answer, answer) for answer in everything]
    assert max(sizes) <= 20
    assert sum(sizes) == total


def test_memory_limits_the_rows(learned):
    """Twice the memory, twice the rows; a row counts what its gradient needs, parameters not."""
    session = learned.session
    workspaces = session.engine.workspaces
    some = RowAttacks(workspaces, 10**7)._most_rows("backbone")
    assert 1 < some < 1000
    assert RowAttacks(workspaces, 2 * 10**7)._most_rows("backbone") == pytest.approx(2 * some, abs=1)
    assert RowAttacks(workspaces, 1)._most_rows("backbone") == 1
    assert RowAttacks(workspaces, 10**12)._most_rows("backbone") == 2048


def test_what_has_no_rows_of_its_own_takes_the_plain_path(session_of, evaluations, stacked, plain_tasks, caplog):
    session = session_of({"method": "fedrbn"})
    tasks = evaluations(session, session.method.initial(), [0], THREAT, attack="aa-fast", samples=2)
    with caplog.at_level(logging.WARNING, logger="fedprophet"):
        (answer,) = stacked(session).map(tasks)
    assert plain_tasks == [0]
    assert answer.samples == 2
    assert "aa-fast on sub-networks, or with two sets of norm statistics" in caplog.text


def test_nothing_to_evaluate_is_answered(learned, evaluations, stacked):
    tasks = evaluations(learned.session, learned.states[-1], [0, 1], THREAT, attack="aa-fast")
    tasks = [replace(tasks[0], part=(0, 0)), replace(tasks[1], samples=3)]
    nothing, something = sorted(stacked(learned.session).map(tasks), key=lambda answer: answer.client)
    assert (nothing.samples, nothing.clean, nothing.broken) == (0, 0, {})
    assert something.samples == 3


def test_packing_keeps_the_order():
    assert list(packed([3, 4, 9, 1, 1], int, 7)) == [[3, 4], [9], [1, 1]]
    assert list(packed([], int, 7)) == []
