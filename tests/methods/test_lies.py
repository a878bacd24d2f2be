"""A client that lies about its numbers is left out or counts like the others; the round says so, the run goes on."""

import math
from dataclasses import fields, replace

import pytest
import torch

from fedprophet.messages.answers import ANSWERS
from fedprophet.messages.values import Resources
from fedprophet.methods import METHODS
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import play_round

LIAR = 3
LIES = (0, -1, 1, 2**53, 2**60, 1e308, 5e-324, math.inf, math.nan)
EVERYBODY = {"population.cohort": 6, "evaluate.steps": 1, "attack.steps": 1, "train.iterations": 1, "measure.steps": 1}


def numbers(kind):
    """Return the names of the numbers in an answer, but for those that say what it answers."""
    own = [f.name for f in fields(ANSWERS[kind]) if f.type in (int, float, "int", "float")]
    return [name for name in own if name not in ("round", "client", "number")]


CLAIMS = [
    *(("report", f"resources.{f.name}") for f in fields(Resources)),
    *((kind, name) for kind in ("report", "train", "evaluate", "measure") for name in numbers(kind)),
]


def test_the_claims_are_all_numbers_of_the_answers():
    assert ("measure", "magnitude") in CLAIMS
    assert ("report", "resources.memory") in CLAIMS
    assert ("evaluate", "adversarial") in CLAIMS
    assert len(CLAIMS) == 3 + 1 + 4 + 4 + 3


def lying(name, value):
    """Return what puts a value into an answer."""
    if name.startswith("resources."):
        own = name.removeprefix("resources.")
        return lambda answer: replace(answer, resources=replace(answer.resources, **{own: value}))
    return lambda answer: replace(answer, **{name: value})


def by_round(name):
    """Return what puts another value into the answers of each round."""
    return lambda answer: lying(name, LIES[answer.round % len(LIES)])(answer)


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*claim, marks=pytest.mark.slow if claim[1] == "peak" else ()) for claim in CLAIMS],
    ids=lambda value: value,
)
def test_no_number_that_a_client_claims_ends_a_run(kind, name, tiny, play_in_memory, poisoned):
    settings = {**EVERYBODY, "rounds": 3, "train.warmup": 0, "convergence.patience": 3}
    settings |= {"memory.enforce": name == "peak"}  # nobody is asked for it otherwise
    wrap = poisoned(by_round(name), range(1, 99), (LIAR,), kind)
    played = play_in_memory(tiny(settings), wrap)
    assert played.session.method.finished(played.states[-1])
    assert len(played.records) == len(LIES)
    assert all(state.failures == 0 for state in played.states)
    for state in played.states:
        assert all(bool(torch.isfinite(value).all()) for value in (*state.model.values(), *state.heads.values()))
    assert all(math.isfinite(record["loss"]) for record in played.records)


@pytest.mark.parametrize("method", METHODS)
def test_a_device_with_nothing_free_is_left_out_and_named(method, tiny, play_in_memory, poisoned):
    settings = {**EVERYBODY, "method": method, "distillation.family": ["vgg-small"], "distillation.iterations": 1}
    wrap = poisoned(lying("resources.memory", 0), range(1, 99), (LIAR,), "report")
    played = play_in_memory(tiny(settings), wrap, rounds=1)
    dropped = played.records[0]["dropped"]
    assert list(dropped) == [str(LIAR)]
    assert dropped[str(LIAR)].startswith("it reported Resources(memory=0,")
    assert LIAR not in {task.client for task in played.of(1, "train")[0]}
    assert played.states[-1].failures == 0


class Cheating:
    """An engine one of whose clients claims a huge shard and sends the reverse of what it learnt."""

    def __init__(self, engine, factor, weight):
        self.engine, self.factor, self.weight = engine, factor, weight

    def map(self, tasks):
        asked = list(tasks)
        given = {task.client: task.parameters for task in asked if task.kind == "train"}
        for answer in self.engine.map(asked):
            if answer.kind == "train" and answer.client == LIAR:
                base = given[LIAR]
                sent = {name: base[name] + self.factor * (v - base[name]) for name, v in answer.parameters.items()}
                answer = replace(answer, weight=self.weight, parameters=sent)
            yield answer


@pytest.mark.parametrize("rule", ["mean", "clip"])
def test_a_huge_shard_is_worth_no_more_than_an_honest_one(rule, tiny, same_tensors):
    """In a simulation the server knows the shards, so the lie has no effect at all."""
    config = tiny({**EVERYBODY, "method": "jfat", "aggregate.rule": rule, "train.warmup": 0})
    reached = []
    for weight in (None, 2.0**53):
        session = assemble(config)
        size = float(session.population.samples(LIAR))
        engine = Cheating(session.engine, -10.0, weight or size)
        state, record = play_round(session.method.round(session.method.initial()), engine)
        reached.append(state.model)
    assert record["capped"] == {str(LIAR): 2.0**53}
    assert same_tensors(*reached)


@pytest.mark.parametrize(("lie", "reason"), [(1e30, "times the median"), (0.0, "its measured perturbation is 0.0")])
@pytest.mark.parametrize("rule", ["mean", "median"])
def test_a_measured_perturbation_out_of_proportion_is_not_used(lie, reason, rule, tiny, play_in_memory, poisoned):
    """The next module's radius is what it would be without the liar."""
    config = tiny({**EVERYBODY, "rounds": 1, "train.warmup": 0, "aggregate.rule": rule})
    found = []
    for poison in (lying("weight", 0), lying("magnitude", lie)):
        played = play_in_memory(config, poisoned(poison, (1,), (LIAR,), "measure"), rounds=1)
        found.append(played.states[-1].perturbation.magnitude)
    assert found[0] == found[1]
    assert reason in played.records[0]["dropped"][str(LIAR)]


def test_where_most_lie_about_a_perturbation_by_less_the_median_still_holds(tiny, play_in_memory, poisoned):
    """Two of six claim 50 times what they measured: the mean follows them, the median does not."""
    found = {}
    for rule in ("mean", "median"):
        for factor in (1, 50):
            poison = poisoned(lambda a, f=factor: replace(a, magnitude=f * a.magnitude), (1,), (1, LIAR), "measure")
            config = tiny({**EVERYBODY, "rounds": 1, "train.warmup": 0, "aggregate.rule": rule})
            found[rule, factor] = play_in_memory(config, poison, rounds=1).states[-1].perturbation.magnitude
    assert found["mean", 50] > 10 * found["mean", 1]
    assert found["median", 50] < 2 * found["median", 1]


def test_without_an_attack_a_perturbation_of_nothing_is_right(tiny, play_in_memory):
    config = tiny({**EVERYBODY, "rounds": 1, "attack.radius": 0.0, "train.warmup": 0})
    played = play_in_memory(config, rounds=1)
    assert played.states[-1].perturbation.magnitude == 0
    assert played.records[0]["dropped"] == {}


def test_clients_that_claim_wrong_accuracies_do_not_move_the_median(tiny, play_in_memory, poisoned):
    """Two of six say that every attack succeeds: under the mean that is less robustness, and alpha follows it."""

    def hopeless(answer):
        return replace(answer, adversarial=0)

    found = {}
    for rule in ("mean", "median"):
        config = tiny({**EVERYBODY, "method": "jfat", "aggregate.rule": rule, "shards.kind": "iid"})
        honest = play_in_memory(config, rounds=1).records[0]["adversarial"]
        wrap = poisoned(hopeless, (1,), (1, LIAR), "evaluate")
        found[rule] = honest - play_in_memory(config, wrap, rounds=1).records[0]["adversarial"]
    assert found["mean"] > 0
    assert found["median"] < found["mean"]
