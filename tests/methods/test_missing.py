"""Every method with some or all answers missing, in every phase of a round: what is kept, and what is said of it."""

import json
import math
from dataclasses import replace

import pytest
import torch

from fedprophet.errors import TrainingError
from fedprophet.messages.codec import pack, unpack
from fedprophet.messages.task import SERVER, Resources
from fedprophet.methods import METHODS
from fedprophet.runs.journal import encode

PHASES = ("report", "train", "evaluate", "measure", "predict", "distill", "adopt")
SETTINGS = {
    "rounds": 2,
    "train.warmup": 0,
    "population.cohort": 3,
    "distillation.iterations": 2,
    "memory.budget": "60%",
}
SETTINGS |= {"train.iterations": 1, "attack.steps": 1, "evaluate.steps": 1, "measure.steps": 1}
OF_METHODS = [("fedprophet", "measure"), ("fedprophet", "evaluate"), ("jfat", "evaluate"), ("jfat", "report")]
OF_METHODS += [(method, phase) for method in ("feddf", "fedet") for phase in ("predict", "distill")]
OF_METHODS += [("fedrbn", "adopt"), *((method, "all") for method in METHODS)]


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


def finite(model):
    return all(bool(torch.isfinite(value).all()) for value in model.values())


@pytest.mark.parametrize(("method", "phase"), OF_METHODS)
def test_a_run_without_half_of_the_answers_comes_to_its_end(method, phase, settings, tiny, play_in_memory):
    kinds = PHASES if phase == "all" else (phase,)
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
        encode(record)
        data, tensors = pack(played.states[record["round"]])
        unpack(type(played.states[0]), json.loads(json.dumps(data)), tensors)


@pytest.mark.parametrize(("method", "phase"), [*((method, "train") for method in METHODS), ("fedprophet", "report")])
def test_a_round_that_nobody_trains_in_counts_and_changes_nothing(
    method, phase, settings, tiny, play_in_memory, same_tensors
):
    played = play_in_memory(tiny({**settings, "method": method}), lambda e: Silent(e, (phase,), [1]), rounds=2)
    assert [state.failures for state in played.states] == [0, 1, 0]
    assert same_tensors(played.states[0].model, played.states[1].model)
    assert (played.records[0]["dropped"], played.records[0]["loss"]) == ({}, None)
    assert played.records[0]["missing"][phase] == list(played.session.world.cohort(1))
    assert "missing" not in played.records[1]


# Evaluation ----------------------------------------------------------------------------------------------------------


def test_a_round_that_nobody_evaluates_has_no_accuracy_and_cannot_be_the_best(settings, tiny, play_in_memory):
    config = tiny({**settings, "method": "jfat", "rounds": 3})
    played = play_in_memory(config, lambda engine: Silent(engine, ("evaluate",), [1, 3]))
    assert ["clean" in record for record in played.records] == [False, True, False]
    assert ["score" in record for record in played.records] == [False, True, False]
    assert played.states[-1].best.round == played.states[-1].last.round == 2
    assert played.states[-1].discarded == ((2, 3),)


@pytest.mark.parametrize("method", ["jfat", "fedet"])
def test_a_run_that_nobody_evaluates_keeps_its_last_round(method, settings, tiny, play_in_memory, same_tensors):
    played = play_in_memory(tiny({**settings, "method": method}), lambda engine: Silent(engine, ("evaluate",)))
    everybody = play_in_memory(played.session.config)
    assert played.records[-1]["best_round"] is None
    assert played.states[-1].discarded == ()
    assert same_tensors(played.states[1].model, everybody.states[1].model)
    assert not same_tensors(played.states[1].model, played.states[2].model)
    assert played.session.method.results(played.states[-1]) == {}


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
    assert played.records[4]["score"] == 0.5 + 2.0 * 0.4
    assert all(torch.equal(played.states[4].model[name], played.states[-1].model[name]) for name in names)
    assert played.session.method.results(played.states[-1])["stages"][1]["clean"] is None


@pytest.mark.parametrize("metrics", [{"samples": math.nan}, {}, {"samples": 4.0, "clean": 9.0}])
def test_an_evaluation_that_cannot_be_is_dropped_and_the_others_count(metrics, settings, tiny, play_in_memory):
    class Wrong:
        def __init__(self, engine):
            self.engine = engine

        def map(self, tasks):
            for update in self.engine.map(tasks):
                bad = update.kind == "evaluate" and update.client == 3
                yield replace(update, metrics=metrics) if bad else update

    played = play_in_memory(tiny({**settings, "method": "jfat"}), Wrong, rounds=1)
    without = play_in_memory(tiny({**settings, "method": "jfat"}), lambda e: LeaveOut(e, 3), rounds=1)
    for key in ("clean", "adversarial", "samples"):
        assert played.records[0][key] == without.records[0][key]
    assert list(played.records[0]["dropped"]) == ["3"]
    assert "evaluat" in played.records[0]["dropped"]["3"]


class LeaveOut:
    """An engine without one client's evaluations."""

    def __init__(self, engine, client):
        self.engine, self.client = engine, client

    def map(self, tasks):
        yield from self.engine.map([t for t in tasks if t.kind != "evaluate" or t.client != self.client])


# Measuring -----------------------------------------------------------------------------------------------------------


def test_a_stage_goes_on_until_somebody_measures(settings, tiny, play_in_memory):
    played = play_in_memory(tiny(settings), lambda engine: Silent(engine, ("measure",), [2, 3]))
    first = [record for record in played.records if record["module"] == 1]
    assert [record["stage_round"] for record in first] == [1, 2, 3, 4]
    assert [record.get("postponed") for record in first[1:3]] == [
        {"module": 1, "reason": "nobody measured", "tries": tries} for tries in (1, 2)
    ]
    assert ["fixed" in record for record in first] == [False, False, False, True]
    assert first[3]["fixed"]["magnitude"] > 0
    assert first[3]["fixed"]["round"] == first[3]["best_round"]
    assert played.session.method.finished(played.states[-1])


def test_a_stage_that_ends_early_goes_on_too(settings, tiny, play_in_memory, scripted):
    """Its best round is the first, and its patience one round."""
    config = tiny({**settings, "rounds": 6, "convergence.patience": 1})
    accuracies = {1: (0.9, 0.8), 2: (0.5, 0.4), 3: (0.5, 0.4), 4: (0.5, 0.4)}
    played = play_in_memory(config, lambda e: Silent(scripted(accuracies)(e), ("measure",), [2, 3]), rounds=4)
    assert [record.get("postponed", {}).get("tries") for record in played.records] == [None, 1, 2, None]
    assert played.records[3]["fixed"]["round"] == 1
    assert played.states[4].discarded == ((1, 4),)


def test_nobody_measuring_for_rounds_stops_the_run(settings, tiny, play_in_memory):
    with pytest.raises(TrainingError, match=r"nobody has measured .* module 1, in 3 rounds in a row.*flower.deadline"):
        play_in_memory(tiny(settings), lambda engine: Silent(engine, ("measure",)))


# What else clients say -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedprophet", "heterofl"])
@pytest.mark.parametrize(
    "resources",
    [
        Resources(-1, 1e9, 1e9),
        Resources(10**400, 1e9, 1e9),
        Resources(10**6, 0.0, 1e9),
        Resources(10**6, 1e9, 5e-324),
        Resources(10**6, math.nan, 1.0),
    ],
)
def test_a_report_that_cannot_be_is_dropped(method, resources, settings, tiny, play_in_memory):
    class Wrong:
        def __init__(self, engine):
            self.engine = engine

        def map(self, tasks):
            for update in self.engine.map(tasks):
                bad = update.kind == "report" and update.client == victim
                yield replace(update, resources=resources) if bad else update

    config = tiny({**settings, "method": method})
    victim = play_in_memory(config, rounds=0).session.world.cohort(1)[0]
    played = play_in_memory(config, Wrong, rounds=1)
    assert played.records[0]["dropped"] == {str(victim): f"it can spare {resources}"}
    assert victim not in {task.client for task in played.of(1, "train")[0]}
    assert len(played.of(1, "train")[0]) == 2


def test_a_client_that_claims_any_number_of_samples_costs_nothing(settings, tiny, play_in_memory, poisoned):
    def claim(update):
        return replace(update, metrics={**update.metrics, "samples": 1e300})

    played = play_in_memory(tiny({**settings, "method": "jfat"}), poisoned(claim, [1]), rounds=1)
    assert all(0 < times["computation_s"] < math.inf for times in played.records[0]["times"].values())


@pytest.mark.parametrize("method", ["feddf", "fedet", "fedrbn"])
def test_layers_of_a_clients_own_that_are_not_those_asked_for_are_refused(
    method, settings, tiny, play_in_memory, poisoned
):
    def wrong(update):
        name = next(name for name in update.local if name.endswith("running_mean"))
        return replace(update, local={**update.local, name: torch.ones(99)})

    def lacking(update):
        return replace(update, local={})

    config = tiny({**settings, "method": method})
    victim = play_in_memory(config, rounds=0).session.world.cohort(1)[0]
    for poison, reason in ((wrong, "has shape (99,)"), (lacking, "it lacks layers of its own")):
        played = play_in_memory(config, poisoned(poison, [1], [victim]), rounds=1)
        assert list(played.records[0]["dropped"]) == [str(victim)]
        assert reason in played.records[0]["dropped"][str(victim)]
        assert finite(played.states[-1].model)


@pytest.mark.parametrize("method", ["feddf", "fedet"])
def test_a_model_whose_scores_are_not_finite_says_nothing(method, settings, tiny, play_in_memory):
    class Wrong:
        def __init__(self, engine):
            self.engine = engine

        def map(self, tasks):
            for update in self.engine.map(tasks):
                if update.kind == "predict" and update.number == 1:
                    update = replace(update, parameters={"logits": update.parameters["logits"] * math.inf})
                yield update

    played = play_in_memory(tiny({**settings, "method": method}), Wrong, rounds=1)
    (victim,) = played.records[0]["dropped"]
    assert victim == str(sorted(played.session.world.cohort(1))[1])
    (distilled,) = {task.client for task in played.of(1, "distill")[0]}
    assert distilled == SERVER
    targets = played.of(1, "distill")[0][0].targets
    assert finite({name: value.double() for name, value in targets.items()})


# Finite, and yet too large ------------------------------------------------------------------------------------------


def _wide(update):
    return replace(update, parameters={name: value.double() * 0 + 1e300 for name, value in update.parameters.items()})


def _heavy(update):
    return replace(update, weight=1e308)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("poison", "reason"), [(_wide, "is not finite in the model's type"), (_heavy, "1e+308")])
def test_updates_that_would_overflow_the_model_are_dropped(
    method, poison, reason, settings, tiny, play_in_memory, poisoned
):
    config = tiny({**settings, "method": method})
    cohort = play_in_memory(config, rounds=0).session.world.cohort(1)
    played = play_in_memory(config, poisoned(poison, [1], cohort[:2]), rounds=1)
    assert list(played.records[0]["dropped"]) == [str(client) for client in sorted(cohort[:2])]
    assert all(reason in why for why in played.records[0]["dropped"].values())
    assert finite(played.states[-1].model)
    assert math.isfinite(played.records[0]["loss"])


class Changed:
    """An engine whose answers of one kind, in some rounds, are changed on their way."""

    def __init__(self, engine, kind, change, rounds=range(99)):
        self.engine, self.kind, self.change, self.rounds = engine, kind, change, rounds

    def map(self, tasks):
        for update in self.engine.map(tasks):
            hit = update.kind == self.kind and update.round in self.rounds
            yield self.change(update) if hit else update


def _sure(update):
    """An evaluation in which all is right, and that nobody can outweigh."""
    samples = update.metrics["samples"]
    return replace(update, weight=1e308, metrics={**update.metrics, "clean": samples, "adversarial": samples})


@pytest.mark.parametrize("method", ["jfat", "fedprophet"])
def test_a_round_whose_evaluations_cannot_be_does_not_become_the_best(method, settings, tiny, play_in_memory, scripted):
    config = tiny({**settings, "method": method, "rounds": 3, "memory.budget": "100%"})
    accuracies = {1: (0.4, 0.2), 2: (0.5, 0.3), 3: (0.2, 0.1)}
    played = play_in_memory(config, lambda e: Changed(scripted(accuracies)(e), "evaluate", _sure, [1, 3]), rounds=3)
    assert ["clean" in record for record in played.records] == [False, True, False]
    assert all("its weight is 1e+308" in why for why in played.records[0]["dropped"].values())
    assert played.records[1]["best_round"] == 2
    assert finite(played.states[-1].best_model)
    reached = played.session.method.results(played.states[-1])
    assert (reached["stages"][0] if method == "fedprophet" else reached["best"])["round"] == 2


def test_a_measurement_that_nobody_can_outweigh_is_dropped(settings, tiny, play_in_memory):
    """Of the clients that measure, one claims a weight and another a perturbation that cannot be."""
    plain = play_in_memory(tiny(settings), rounds=2)
    heavy, wrong = sorted(answer.client for answer in plain.of(2, "measure")[1])[:2]

    def change(update):
        if update.client == heavy:
            return replace(update, weight=1e308, metrics={"magnitude": 1e6})
        return replace(update, metrics={"magnitude": math.inf}) if update.client == wrong else update

    played = play_in_memory(tiny(settings), lambda engine: Changed(engine, "measure", change), rounds=2)
    assert played.records[1]["dropped"] == {
        str(heavy): "its weight is 1e+308",
        str(wrong): "its measured perturbation is inf",
    }
    honest = [a for a in plain.of(2, "measure")[1] if a.client not in (heavy, wrong)]
    expected = sum(a.weight * a.metrics["magnitude"] for a in honest) / sum(a.weight for a in honest)
    assert played.records[1]["fixed"]["magnitude"] == pytest.approx(expected)


def test_thousands_of_foreign_names_make_a_short_line(settings, tiny, play_in_memory, poisoned):
    def flood(update):
        names = {f"\x1b[2J{number:05}{'x' * 1000}": torch.zeros(1) for number in range(5000)}
        return replace(update, parameters={**update.parameters, **names})

    config = tiny({**settings, "method": "jfat"})
    victim = play_in_memory(config, rounds=0).session.world.cohort(1)[0]
    played = play_in_memory(config, poisoned(flood, [1], [victim]), rounds=1)
    reason = played.records[0]["dropped"][str(victim)]
    assert reason.startswith("it sent parameters that were not asked for: [")
    assert reason.endswith("and 4995 more")
    assert len(reason) <= 500
    assert reason.isprintable()
    assert len(encode(played.records[0])) < 2000


# Too few -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_with_fewer_usable_updates_than_the_minimum_nothing_is_averaged(
    method, settings, tiny, play_in_memory, poisoned, same_tensors
):
    config = tiny({**settings, "method": method, "flower.minimum": 3})
    victim = play_in_memory(config, rounds=0).session.world.cohort(1)[0]
    played = play_in_memory(config, poisoned(lambda u: replace(u, metrics={"loss": math.nan}), [1], [victim]), rounds=2)
    assert played.records[0]["too_few"] == {"usable": 2, "minimum": 3}
    assert same_tensors(played.states[0].model, played.states[1].model)
    assert [state.failures for state in played.states] == [0, 1, 0]
    assert "too_few" not in played.records[1]
    assert not same_tensors(played.states[1].model, played.states[2].model)
    assert played.of(1, "predict") == played.of(1, "adopt") == ([], [])
