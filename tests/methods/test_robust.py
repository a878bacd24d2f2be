"""A fifth of the clients send bad updates: the mean breaks, every robust rule holds; and each method uses the rule."""

import statistics
from dataclasses import replace

import pytest
import torch

from fedprophet.config.load import parse_config
from fedprophet.runs.evaluator import evaluate
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import play_round

BAD = (2,)


class Tampering:
    """An engine, some of whose clients send the model they were given plus `factor` times what they learnt."""

    def __init__(self, engine, factor, clients=BAD):
        self.engine, self.factor, self.clients = engine, factor, clients

    def map(self, tasks):
        asked = list(tasks)
        given = {task.client: task.parameters for task in asked if task.kind == "train"}
        for update in self.engine.map(asked):
            if update.kind == "train" and update.client in self.clients:
                update = replace(update, parameters=self._tampered(given[update.client], update.parameters))
            yield update

    def _tampered(self, given, learnt):
        return {name: given[name] + self.factor * (value - given[name]) for name, value in learnt.items()}


# Five clients, all of which train in every round, so that a fifth is one; plain training, to be fast.
FAIR = {
    "rounds": 5,
    "threads": 1,
    "engine": "plain",
    "model": {"options": {"width": 8}},
    "shards": {"kind": "iid"},
    "population": {"clients": 5, "cohort": 5},
    "memory": {"budget": "60%"},
    "train": {"iterations": 12, "batch": 32, "learning_rate": 0.05, "warmup": 0},
    "attack": {"steps": 0, "feature_steps": 0},
    "convergence": {"gate": 0},
    "evaluate": {"steps": 1, "every": 5, "clients": 2},
    "measure": {"steps": 1, "clients": 2},
}


def reached(method, rule, factor):
    """Return the exported model's accuracy on the test set."""
    session = assemble(parse_config({**FAIR, "method": method, "aggregate": {"rule": rule}}))
    engine, state = Tampering(session.engine, factor), session.method.initial()
    while not session.method.finished(state):
        state, _ = play_round(session.method.round(state), engine)
    return evaluate(session, state, ("clean",), session.engine)["global"]["clean"]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["jfat", "fedprophet"])
def test_a_bad_client_of_five_breaks_the_mean_and_no_robust_rule(method):
    """In the cascade few clients send later modules and heads: there, too, a bad one must not decide."""
    undisturbed = reached(method, "mean", 1.0)
    assert undisturbed > 0.9
    assert reached(method, "mean", -10.0) < 0.5
    for rule, factor in (("clip", -10.0), ("trimmed-mean", 100.0), ("median", -10.0)):
        assert reached(method, rule, factor) > undisturbed - 0.05, rule


# Every method --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("fedprophet", "clip"),
        ("jfat", "trimmed-mean"),
        ("heterofl", "clip"),
        ("feddf", "trimmed-mean"),
        ("fedet", "trimmed-mean"),
        ("fedrbn", "median"),
    ],
)
def test_no_method_lets_one_client_of_six_do_as_it_pleases(method, rule, tiny, play_in_memory, fleet):
    """What the server has after a round is where honest clients could have brought it, bound by the median norm."""
    settings = {
        "method": method,
        "population.cohort": 6,
        "train.warmup": 0,
        "distillation.iterations": 1,
        **fleet(10**15),
    }
    settings |= {
        "aggregate.rule": rule,
        "evaluate.clients": 1,
        "evaluate.steps": 1,
        "train.iterations": 1,
        "attack.steps": 1,
    }
    settings |= {"distillation.family": ["vgg-small"], "train.learning_rate": 0.01}
    moved = {}
    for factor in (1.0, 90.0):
        played = play_in_memory(tiny(settings), lambda e, f=factor: Tampering(e, f, (3,)), rounds=1)
        before, after = played.states[0].model, played.states[1].model
        assert played.records[0]["dropped"] == {}
        moved[factor] = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < moved[90.0] < 20 * moved[1.0]


@pytest.mark.parametrize("method", ["heterofl", "feddrop", "fedrolex"])
def test_sub_networks_are_joined_coordinate_by_coordinate(method, four_channels):
    """Clients 0, 1 and 2 have all four channels, client 3 two: of four values the middle two count, of three one."""
    small = four_channels(method, {"aggregate.rule": "median", "population.clients": 4})
    tasks = small.tasks(2, {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.5})
    kept = tasks[3].kept_channels["0"].tolist()
    sent = [{"0.weight": [v] * 4} for v in (1, 2, 600)] + [{"0.weight": [4, 4]}]
    new = small.joined(tasks, [1.0, 1.0, 9.0, 1.0], sent)
    assert new["0.weight"] == [statistics.median([1, 2, 600, 4]) if c in kept else 2 for c in range(4)]
    assert new["0.bias"] == [0.5] * 4


def test_a_model_that_shouts_is_not_heard_above_the_others(tiny):
    """FedDF's targets are those of the scores that the rule leaves: here of a median of three."""
    logits = torch.tensor([[[1.0, 0.0]], [[2.0, 0.5]], [[-1e6, 1e6]]])
    session = assemble(tiny({"method": "feddf", "aggregate.rule": "median"}))
    assert session.method.agreed(logits).tolist() == [[[1.0, 0.5]]]
    clip = assemble(tiny({"method": "feddf", "aggregate.rule": "clip"})).method.agreed(logits)
    assert float(clip.norm()) < 3
    assert assemble(tiny({"method": "feddf"})).method.agreed(logits) is logits
