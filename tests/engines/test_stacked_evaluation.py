"""Evaluation and measuring on the stacked engine, against the plain one."""

import logging
from dataclasses import replace

import pytest

from fedprophet.engines import stacked as stacked_module
from fedprophet.engines.stacked import StackedEngine
from fedprophet.fast.kernels import Kernels
from fedprophet.messages.tasks import Measure
from fedprophet.messages.values import SERVER
from fedprophet.threat import ThreatModel


@pytest.mark.parametrize("kernels", [Kernels(), Kernels(16)], ids=["exact", "padded"])
@pytest.mark.parametrize("run", ["learned", "learned_cnn3"])
def test_evaluation(run, kernels, stacked, evaluations, assert_same_evaluation, request, caplog):
    caplog.set_level(logging.WARNING, "fedprophet")
    learned = request.getfixturevalue(run)
    session, state = learned.session, learned.states[-1]
    threat = ThreatModel("linf", 0.05, 0.02, 5, (0.0, 1.0))
    tasks = evaluations(session, state, (*range(6), SERVER), threat)
    assert_same_evaluation(session, tasks, stacked(session, kernels=kernels))
    assert_same_evaluation(session, evaluations(session, state, range(6), None), stacked(session, kernels=kernels))
    assert not caplog.records  # nothing was left to the plain path


@pytest.mark.parametrize("run", ["learned", "learned_cnn3", "cascade"])
def test_calibrated_evaluation(run, stacked, evaluations, assert_same_evaluation, paired, request):
    """Beside the server's own test set, which nothing is added for; at a classifier, and at a cascade's head."""
    played = request.getfixturevalue(run)
    session = played.session
    state = [s for s in played.states if s.stage == 1][-1] if run == "cascade" else played.states[-1]
    threat = ThreatModel("linf", 0.05, 0.02, 5, (0.0, 1.0))
    plain = evaluations(session, state, (*range(6), SERVER), threat)
    tasks = [replace(task, calibration=0.0 if task.client == SERVER else 0.1) for task in plain]
    assert_same_evaluation(session, tasks)
    pairs = paired(stacked(session).map(tasks), stacked(session).map(plain))
    assert sum(one.clean != other.clean for one, other in pairs) > 1
    assert all(one == other for one, other in pairs if one.client == SERVER)


def test_the_device_works_on_some_clients_while_others_are_prepared(
    learned, monkeypatch, stacked, evaluations, assert_same_evaluation
):
    monkeypatch.setattr("fedprophet.engines.fusing.BEGINNING", 1)
    session, state = learned.session, learned.states[-1]
    order: list[tuple[str, int]] = []
    real_evaluation, real_later = StackedEngine._evaluation, stacked_module.later

    def evaluation(self, jobs, *inputs):
        order.append(("asked", len(jobs)))
        return real_evaluation(self, jobs, *inputs)

    def later(jobs, *found):
        order.append(("answered", len(jobs)))
        yield from real_later(jobs, *found)

    monkeypatch.setattr(StackedEngine, "_evaluation", evaluation)
    monkeypatch.setattr(stacked_module, "later", later)
    assert_same_evaluation(session, evaluations(session, state, range(6), None), stacked(session))
    assert order == [("asked", 1), ("asked", 5), ("answered", 1), ("answered", 5)]


def test_attacked_images_are_judged_with_the_adversarial_statistics(
    session_of, stacked, joint, evaluations, assert_same_evaluation
):
    session = session_of({"method": "fedrbn", "train.iterations": 20, "train.batch": 32, "shards.kind": "iid"})
    state = session.method.initial()
    trained = joint(session, clients=range(6), threat=None, adversarial_statistics=True, wants_local=True)
    layers = session.engine.workspaces["backbone"].layers
    for update in session.engine.map(trained):
        own = {
            name: v + 9 * name.startswith("adversarial.") if v.is_floating_point() else v
            for name, v in update.local.items()
        }
        layers.put("backbone", update.client, 1, own, trained[0].timeline)
    state = replace(state, round=1, model={**state.model, **update.parameters})
    weak = ThreatModel("linf", 1e-6, 1e-6, 2, (0.0, 1.0))
    tasks = evaluations(session, state, range(6), weak)
    assert all(task.adversarial_statistics for task in tasks)
    assert_same_evaluation(session, tasks)
    answers = list(stacked(session).map(tasks))
    assert sum(a.clean for a in answers) > 2 * sum(a.adversarial for a in answers)  # as the second set is wrong


def test_a_harmless_threat_counts_twice(learned, stacked, evaluations, assert_same_evaluation):
    session, state = learned.session, learned.states[-1]
    tasks = evaluations(session, state, range(3), ThreatModel("linf", 0.0, 0.1, 5, (0.0, 1.0)))
    assert all(u.clean == u.adversarial for u in stacked(session).map(tasks))
    assert_same_evaluation(session, tasks)


def test_parts_and_samples_of_the_servers_test_set(learned, stacked, evaluations, assert_same_evaluation):
    session, state = learned.session, learned.states[-1]
    threat = ThreatModel("linf", 0.05, 0.02, 3, (0.0, 1.0))
    (whole,) = evaluations(session, state, (SERVER,), threat, samples=150)
    parts = [replace(whole, part=(a, b), number=n) for n, (a, b) in enumerate([(0, 64), (64, 128), (128, 192)])]
    assert_same_evaluation(session, [*parts, replace(whole, number=9)])
    found = sorted(stacked(session).map(parts), key=lambda update: update.number)
    assert [update.samples for update in found] == [64, 64, 22]
    (once,) = stacked(session).map([whole])
    assert sum(update.clean for update in found) == once.clean


def test_a_part_meets_the_same_attack_whatever_else_is_asked(learned, stacked, evaluations):
    session, state = learned.session, learned.states[-1]
    (whole,) = evaluations(session, state, (SERVER,), ThreatModel("linf", 0.1, 0.04, 3, (0.0, 1.0)))
    parts = [replace(whole, part=(64 * n, 64 * n + 64), number=n) for n in range(4)]
    together = {answer.number: answer for answer in stacked(session).map(parts)}
    (alone,) = stacked(session).map([replace(parts[2], number=0)])
    assert replace(alone, number=2) == together[2]


def test_evaluations_of_different_exits(cascade, evaluations, assert_same_evaluation):
    """No method asks for them in one breath, but an engine may be asked for anything."""
    session, state = cascade.session, cascade.states[-1]
    earlier = next(s for s in cascade.states if s.stage == 1)
    threat = session.world.image_threat(2)
    tasks = [*evaluations(session, state, (0, 1), threat), *evaluations(session, earlier, (2, 3), threat)]
    assert len({task.last for task in tasks}) == 2
    assert_same_evaluation(session, tasks)


def test_clients_without_held_out_samples(session_of, caplog, stacked, evaluations):
    session = session_of({"method": "jfat", "data.validation": 0.001})
    assert len(session.population.client_data(0).validation) == 0
    tasks = evaluations(session, session.method.initial(), (0, 1), session.world.image_threat(2))
    with caplog.at_level(logging.WARNING, "fedprophet"):
        assert [(u.samples, u.clean) for u in stacked(session).map(tasks)] == [(0, 0)] * 2
    assert not caplog.records


def test_a_cascade_is_evaluated_from_the_image_on(cascade, evaluations, assert_same_evaluation):
    session, state = cascade.session, cascade.states[-1]
    tasks = evaluations(session, state, range(6), session.world.image_threat(3))
    assert tasks[0].frozen
    assert_same_evaluation(session, tasks)


@pytest.mark.usefixtures("same_starts")
@pytest.mark.parametrize("kernels", [Kernels(), Kernels(16)], ids=["exact", "padded"])
def test_measuring(cascade, kernels, stacked, paired):
    asked = [
        task
        for pairs in cascade.exchanges
        for tasks, _ in pairs
        for task in tasks
        if isinstance(task, Measure) and task.frozen
    ]
    assert len(asked) == 6
    pairs = paired(stacked(cascade.session, kernels=kernels).map(asked), cascade.session.engine.map(asked))
    for mine, theirs in pairs:
        assert (mine.weight, mine.samples) == (theirs.weight, theirs.samples)
        assert mine.magnitude == pytest.approx(theirs.magnitude, rel=0.05)
    means = [sum(update.magnitude for update in updates) / 6 for updates in zip(*pairs, strict=True)]
    assert means[0] == pytest.approx(means[1], rel=0.02)
    still = [replace(task, threat=replace(task.threat, radius=0.0)) for task in asked]
    assert {u.magnitude for u in stacked(cascade.session).map(still)} == {0.0}
