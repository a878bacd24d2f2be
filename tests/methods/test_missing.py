"""Every method with some or all answers missing or wrong, in every phase of a round: what is kept and what is noted."""

import json
import math
from dataclasses import replace

import pytest
import torch

from fedprophet.errors import TrainingError
from fedprophet.messages.codec import decode, encode
from fedprophet.messages.tasks import TASKS
from fedprophet.messages.values import SERVER, Resources
from fedprophet.runs import journal
from fedprophet.runs.session import assemble

SETTINGS = {
    "rounds": 2,
    "population.cohort": 3,
    "memory.budget": "60%",
    "train.warmup": 0,
    "train.iterations": 1,
    "attack.steps": 1,
    "attack.feature_steps": 1,
    "evaluate.steps": 1,
    "evaluate.clients": 4,
    "measure.steps": 1,
    "distillation.public": 20,
    "distillation.iterations": 1,
}
JOINS = ("fedprophet", "jfat", "heterofl", "feddf", "fedet", "fedrbn")
"""The methods that differ in how they join what came back."""
HALF_SILENT = [*((method, "all") for method in JOINS), ("feddf", "predict"), ("fedet", "distill"), ("fedrbn", "adopt")]


class Silent:
    """An engine whose clients do not answer tasks of some kinds: all of them, or every second one."""

    def __init__(self, engine, kinds, rounds=range(99), some=False):
        self.engine, self.kinds, self.rounds, self.some = engine, kinds, rounds, some

    def map(self, tasks):
        asked = [task for task in tasks if not self._lost(task)]
        yield from self.engine.map(asked)

    def _lost(self, task):
        hit = task.kind in self.kinds and task.round in self.rounds
        return hit and (not self.some or (task.client + task.number) % 2 == 0)


@pytest.fixture(scope="module")
def settings(fleet):
    return SETTINGS | fleet(10**5, 10**15)


@pytest.fixture(scope="module")
def cohort(settings, tiny):
    """The clients that train in the first round, under every method."""
    return assemble(tiny({**settings, "method": "jfat"})).world.clients.cohort(1)


def finite(model):
    return all(bool(torch.isfinite(value).all()) for value in model.values())


@pytest.mark.parametrize(("method", "phase"), HALF_SILENT)
def test_a_run_without_half_of_the_answers_comes_to_its_end(method, phase, settings, tiny, play_in_memory):
    kinds = TASKS if phase == "all" else (phase,)
    played = play_in_memory(tiny({**settings, "method": method}), lambda engine: Silent(engine, kinds, some=True))
    assert played.session.method.finished(played.states[-1])
    assert finite(played.states[-1].model)
    for record, exchanges in zip(played.records, played.exchanges, strict=True):
        lost = {}
        for tasks, answers in exchanges:
            came = {(answer.client, answer.number) for answer in answers}
            for task in tasks:
                if (task.client, task.number) not in came:
                    lost.setdefault(task.kind, set()).add(task.client)
        assert record.get("missing", {}) == {kind: sorted(clients) for kind, clients in lost.items()}
        journal.journal_line(record)
        data, tensors = encode(played.states[record["round"]])
        decode(type(played.states[0]), json.loads(json.dumps(data)), tensors)


@pytest.mark.parametrize(("method", "phase"), [*((method, "train") for method in JOINS), ("fedprophet", "report")])
def test_a_round_that_nobody_trains_in_counts_and_changes_nothing(
    method, phase, settings, cohort, tiny, play_in_memory, same_tensors
):
    played = play_in_memory(tiny({**settings, "method": method}), lambda e: Silent(e, (phase,), [1]), rounds=1)
    assert [state.failures for state in played.states] == [0, 1]
    assert same_tensors(played.states[0].model, played.states[1].model)
    assert (played.records[0]["dropped"], played.records[0]["loss"]) == ({}, None)
    assert played.records[0]["missing"] == {phase: list(cohort)}


# Evaluation ----------------------------------------------------------------------------------------------------------


def test_a_round_that_nobody_evaluates_has_no_accuracy_and_cannot_be_the_best(settings, tiny, play_in_memory):
    config = tiny({**settings, "method": "jfat", "rounds": 3})
    played = play_in_memory(config, lambda engine: Silent(engine, ("evaluate",), [1, 3]))
    assert ["clean" in record for record in played.records] == [False, True, False]
    assert ["score" in record for record in played.records] == [False, True, False]
    assert played.states[-1].best.round == played.states[-1].last.round == 2
    assert played.states[-1].discarded == ((2, 3),)


def test_a_run_that_nobody_evaluates_keeps_its_last_round(settings, tiny, play_in_memory, same_tensors):
    played = play_in_memory(tiny({**settings, "method": "jfat"}), lambda engine: Silent(engine, ("evaluate",)))
    assert played.records[-1]["best_round"] is None
    assert played.states[-1].discarded == ()
    assert not same_tensors(played.states[1].model, played.states[2].model)
    assert played.session.method.results(played.states[-1]) == {}


@pytest.mark.parametrize("method", ["jfat", "fedprophet"])
def test_of_rounds_that_nobody_evaluates_their_mean_is_kept(method, settings, tiny, play_in_memory):
    """A run of jFAT ends with it, and a module of FedProphet is fixed as it is."""
    config = {**settings, "method": method, "rounds": 3, "train.warmup": 1, "memory.budget": "45%"}
    averaged, plain = (
        play_in_memory(tiny({**config, "aggregate.horizon": horizon}), lambda e: Silent(e, ("evaluate",)), rounds=3)
        for horizon in (2, 0)
    )
    kept = averaged.states[3]
    assert kept.mean is None
    trained = averaged.session.world.chain.shared(0, averaged.session.world.modules[0].last)
    for name in trained:
        expected = (plain.states[2].model[name] + plain.states[3].model[name]) / 2
        assert torch.allclose(kept.model[name], expected, atol=1e-6), name


def test_a_module_that_nobody_evaluates_is_fixed_as_it_is_and_the_next_one_refers_to_an_earlier(
    settings, tiny, play_in_memory, scripted, same_tensors
):
    """Stage 1 has C*/A* = 2, stage 2 is not evaluated: stage 3 is measured by stage 1's, as stage 2 itself is."""
    config = tiny({**settings, "memory.budget": "45%", "perturbation.start": 0.5})
    accuracies = {2: (0.8, 0.4), 5: (0.5, 0.4), 6: (0.5, 0.4)}
    played = play_in_memory(config, lambda e: Silent(scripted(accuracies)(e), ("evaluate",), [3, 4]))
    fixed = [record["fixed"] for record in played.records if "fixed" in record]
    assert [module["round"] for module in fixed][:2] == [2, 4]
    assert (fixed[1]["clean"], fixed[1]["adversarial"]) == (None, None)
    assert fixed[1]["magnitude"] > 0
    # Radius and alpha of the second stage are those it ended with.
    assert fixed[1]["alpha"] == 0.5
    assert fixed[1]["radius"] == 0.5 * fixed[0]["magnitude"]
    world = played.session.world
    names = world.chain.shared(0, world.modules[1].last)
    assert played.states[4].discarded == ()
    assert played.states[4].reference == 2.0
    assert played.states[4].perturbation.reference == 2.0
    assert played.records[4]["score"] == pytest.approx(0.5 + 2.0 * 0.4)
    assert all(torch.equal(played.states[4].model[name], played.states[-1].model[name]) for name in names)
    assert played.session.method.results(played.states[-1])["stages"][1]["clean"] is None


def _certain(answer):
    """An evaluation in which all is right, and that nobody can outweigh."""
    return replace(answer, weight=1e308, clean=answer.samples, adversarial=answer.samples)


@pytest.mark.parametrize("method", ["jfat", "fedprophet"])
def test_impossible_evaluations_do_not_make_a_round_the_best(
    method, settings, tiny, play_in_memory, scripted, poisoned
):
    config = tiny({**settings, "method": method, "rounds": 3, "memory.budget": "100%"})
    accuracies = {1: (0.4, 0.2), 2: (0.5, 0.3), 3: (0.2, 0.1)}
    wrong = poisoned(_certain, [1, 3], kind="evaluate")
    played = play_in_memory(config, lambda e: wrong(scripted(accuracies)(e)))
    assert ["clean" in record for record in played.records] == [False, True, False]
    assert all("its weight is 1e+308" in why for why in played.records[0]["dropped"].values())
    assert played.records[1]["best_round"] == 2
    assert finite(played.states[-1].best_model)
    reached = played.session.method.results(played.states[-1])
    assert (reached["stages"][0] if method == "fedprophet" else reached["best"])["round"] == 2


# Measuring -----------------------------------------------------------------------------------------------------------


def test_a_stage_goes_on_until_a_client_measures(settings, tiny, play_in_memory):
    played = play_in_memory(tiny(settings), lambda engine: Silent(engine, ("measure",), [2, 3]), rounds=4)
    assert [record["stage_round"] for record in played.records] == [1, 2, 3, 4]
    assert [record.get("postponed") for record in played.records[1:3]] == [
        {"module": 1, "reason": "nobody measured", "tries": tries} for tries in (1, 2)
    ]
    assert ["fixed" in record for record in played.records] == [False, False, False, True]
    assert played.records[3]["fixed"]["magnitude"] > 0
    assert played.records[3]["fixed"]["round"] == played.records[3]["best_round"]


def test_statistics_that_were_measured_for_a_postponed_end_are_not_said_to_be_used(settings, tiny, play_in_memory):
    renewed = {"norm.layers": "shared", "norm.refresh": "clean", "norm.refresh_after": "stage"}
    config = tiny({**settings, **renewed})
    played = play_in_memory(config, lambda engine: Silent(engine, ("measure",), [2]), rounds=3)
    assert "postponed" in played.records[1]
    assert ["refreshed" in record for record in played.records] == [False, False, True]


def test_a_stage_that_ends_early_goes_on_too(settings, tiny, play_in_memory, scripted):
    """Its best round is the first, and its patience one round."""
    config = tiny({**settings, "rounds": 6, "convergence.patience": 1})
    accuracies = {1: (0.9, 0.8), 2: (0.5, 0.4), 3: (0.5, 0.4), 4: (0.5, 0.4)}
    played = play_in_memory(config, lambda e: Silent(scripted(accuracies)(e), ("measure",), [2, 3]), rounds=4)
    assert [record.get("postponed", {}).get("tries") for record in played.records] == [None, 1, 2, None]
    assert played.records[3]["fixed"]["round"] == 1
    assert played.states[4].discarded == ((1, 4),)


def test_a_run_stops_when_nobody_measures_for_rounds(settings, tiny, play_in_memory):
    with pytest.raises(TrainingError, match=r"nobody has measured .* module 1, in 3 rounds in a row.*flower.deadline"):
        play_in_memory(tiny(settings), lambda engine: Silent(engine, ("measure",)))


def test_impossible_measurements_are_rejected(settings, tiny, play_in_memory, poisoned):
    """Of the clients that measure, one claims an impossible weight and another an impossible perturbation."""
    plain = play_in_memory(tiny(settings), rounds=2)
    heavy, wrong = sorted(answer.client for answer in plain.of(2, "measure")[1])[:2]

    def change(answer):
        if answer.client == heavy:
            return replace(answer, weight=1e308, magnitude=1e6)
        return replace(answer, magnitude=math.inf) if answer.client == wrong else answer

    played = play_in_memory(tiny(settings), poisoned(change, [2], kind="measure"), rounds=2)
    assert played.records[1]["dropped"] == {
        str(heavy): "its weight is 1e+308",
        str(wrong): "its measured perturbation is inf",
    }
    honest = [a for a in plain.of(2, "measure")[1] if a.client not in (heavy, wrong)]
    expected = sum(a.weight * a.magnitude for a in honest) / sum(a.weight for a in honest)
    assert played.records[1]["fixed"]["magnitude"] == pytest.approx(expected)


def test_a_stage_that_nobody_can_measure_stops_the_run(settings, tiny, play_in_memory, poisoned):
    infinite = poisoned(lambda answer: replace(answer, magnitude=math.inf), [2], kind="measure")
    with pytest.raises(TrainingError, match=r"module 1 has diverged.*learning_rate"):
        play_in_memory(tiny(settings), infinite)


# What else clients say -----------------------------------------------------------------------------------------------


def test_a_client_with_impossible_resources_does_not_train(settings, cohort, tiny, play_in_memory, poisoned):
    resources = Resources(10**6, 0.0, 1e9)
    wrong = poisoned(lambda answer: replace(answer, resources=resources), [1], cohort[:1], "report")
    played = play_in_memory(tiny(settings), wrong, rounds=1)
    assert played.records[0]["dropped"] == {str(cohort[0]): f"it reported {resources}"}
    assert [task.client for task in played.of(1, "train")[0]] == list(cohort[1:])


@pytest.mark.parametrize("method", ["feddf", "fedrbn"])
def test_wrong_layers_of_a_clients_own_are_rejected(method, settings, cohort, tiny, play_in_memory, poisoned):
    """One client sends a layer of another shape, another sends none."""

    def wrong(update):
        name = next(name for name in update.local if name.endswith("running_mean"))
        layers = {**update.local, name: torch.ones(99)} if update.client == cohort[0] else {}
        return replace(update, local=layers)

    played = play_in_memory(tiny({**settings, "method": method}), poisoned(wrong, [1], cohort[:2]), rounds=1)
    reasons = played.records[0]["dropped"]
    assert list(reasons) == [str(client) for client in cohort[:2]]
    assert "has shape (99,)" in reasons[str(cohort[0])]
    assert "it did not send layers of its own" in reasons[str(cohort[1])]
    assert finite(played.states[-1].model)


@pytest.mark.parametrize("method", ["feddf", "fedet"])
def test_a_model_whose_scores_are_not_finite_is_left_out(method, settings, cohort, tiny, play_in_memory, poisoned):
    def wrong(answer):
        return replace(answer, logits=answer.logits * math.inf) if answer.number == 1 else answer

    played = play_in_memory(tiny({**settings, "method": method}), poisoned(wrong, [1], kind="predict"), rounds=1)
    assert list(played.records[0]["dropped"]) == [str(cohort[1])]
    tasks, _ = played.of(1, "distill")
    assert {task.client for task in tasks} == {SERVER}
    assert finite({name: value.double() for name, value in tasks[0].targets.items()})


@pytest.mark.parametrize("method", ["fedprophet", "heterofl", "feddf"])
def test_updates_that_would_overflow_the_model_are_rejected(method, settings, cohort, tiny, play_in_memory, poisoned):
    """They are finite, and yet too large: one in a wider type than the model's, one in its weight."""

    def large(update):
        if update.client == cohort[0]:
            return replace(update, weight=1e308)
        return replace(update, parameters={n: value.double() * 0 + 1e300 for n, value in update.parameters.items()})

    played = play_in_memory(tiny({**settings, "method": method}), poisoned(large, [1], cohort[:2]), rounds=1)
    reasons = played.records[0]["dropped"]
    assert reasons[str(cohort[0])] == "its weight is 1e+308"
    assert "is not finite in the model's type" in reasons[str(cohort[1])]
    assert finite(played.states[-1].model)
    assert math.isfinite(played.records[0]["loss"])


def test_thousands_of_foreign_names_make_a_short_line(settings, cohort, tiny, play_in_memory, poisoned):
    def flood(update):
        names = {f"\x1b[2J{number:05}{'x' * 1000}": torch.zeros(1) for number in range(5000)}
        return replace(update, parameters={**update.parameters, **names})

    played = play_in_memory(tiny({**settings, "method": "jfat"}), poisoned(flood, [1], cohort[:1]), rounds=1)
    reason = played.records[0]["dropped"][str(cohort[0])]
    assert reason.startswith("it sent parameters that were not asked for: [")
    assert reason.endswith("and 4995 more")
    assert len(reason) <= 500
    assert reason.isprintable()
    assert len(journal.journal_line(played.records[0])) < 2000


@pytest.mark.parametrize("method", JOINS)
def test_with_fewer_usable_updates_than_the_minimum_nothing_is_averaged(
    method, settings, cohort, tiny, play_in_memory, poisoned, same_tensors
):
    config = tiny({**settings, "method": method, "aggregate.minimum": 3})
    diverged = poisoned(lambda update: replace(update, loss=math.nan), [1], cohort[:1])
    played = play_in_memory(config, diverged, rounds=1)
    assert played.records[0]["too_few"] == {"usable": 2, "minimum": 3}
    assert same_tensors(played.states[0].model, played.states[1].model)
    assert played.states[1].failures == 1
    assert played.of(1, "predict") == played.of(1, "adopt") == ([], [])
