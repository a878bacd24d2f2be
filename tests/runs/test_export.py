"""The exported model's norm layers: whose enter the average, and whose do not."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from fedprophet.messages.values import SERVER
from fedprophet.runs.evaluator import Evaluator, conditions
from fedprophet.runs.export import average_local, exported_model, write_model, write_tensors
from fedprophet.runs.run import reopen, start
from fedprophet.server.coordinator import play_round


class Tampered:
    """An engine that spoils one client's own layers when it is asked for them."""

    def __init__(self, engine, client, spoil):
        self.engine, self.client, self.spoil = engine, client, spoil

    def map(self, tasks):
        for answer in self.engine.map(tasks):
            hit = answer.client == self.client and answer.local
            yield replace(answer, local=self.spoil(answer.local)) if hit else answer


class Watched:
    """An engine that remembers what it was asked."""

    def __init__(self, engine):
        self.engine, self.tasks = engine, []

    def map(self, tasks):
        tasks = list(tasks)
        self.tasks += tasks
        return self.engine.map(tasks)


@pytest.fixture(scope="module")
def trained(tiny, play_in_memory):
    """A run after whose round every client has norm layers of its own."""
    return play_in_memory(tiny({"method": "jfat", "population.cohort": 6}), rounds=1)


def test_layers_that_cannot_be_averaged_do_not_enter_the_exported_model(trained, same_tensors) -> None:
    session, state = trained.session, trained.states[-1]
    without = average_local(session, state, Tampered(session.engine, 2, lambda local: {}))
    assert not same_tensors(without, average_local(session, state, session.engine))
    for spoil in (
        lambda local: {name: value * math.nan for name, value in local.items()},
        lambda local: {name: torch.ones(3) for name in local},
        lambda local: {**local, "foreign": torch.ones(3)},
        # A second set of statistics is one of the method's own layers in FedRBN alone.
        lambda local: {**local, **{f"adversarial.{name}": value for name, value in local.items()}},
        lambda local: {n: v - 1e3 if n.endswith("running_var") else v for n, v in local.items()},
        lambda local: {n: v - 10**6 if n.endswith("num_batches_tracked") else v for n, v in local.items()},
    ):
        found = average_local(session, state, Tampered(session.engine, 2, spoil), record := {})
        assert same_tensors(found, without)
        assert list(record["dropped"]) == ["2"]


def test_norm_layers_of_the_exported_model_follow_the_rule_too(tiny, play_in_memory) -> None:
    """One client claims a thousandfold; the median of six is between what honest ones have."""
    found = {}
    for rule in ("mean", "median"):
        played = play_in_memory(tiny({"method": "jfat", "population.cohort": 6, "aggregate.rule": rule}), rounds=1)
        session, state = played.session, played.states[-1]
        engine = Tampered(session.engine, 2, lambda local: {name: 1000 * value for name, value in local.items()})
        name = next(name for name in session.world.initial_layers if name.endswith("running_var"))
        honest = torch.stack([own[name] for client, own in played.layers[-1].items() if client != 2])
        found[rule] = average_local(session, state, engine)[name], honest.amax(dim=0)
    value, largest = found["median"]
    assert bool((value <= largest).all())
    value, largest = found["mean"]
    assert bool((value > 10 * largest).any())


def test_of_a_run_with_a_mean_that_is_exported_and_evaluated_before_its_end_too(tiny, tmp_path, same_tensors):
    """Two rounds of three are played, both under the attack."""
    settings = {"method": "jfat", "rounds": 3, "train.warmup": 0, "norm.layers": "shared", "aggregate.horizon": 2}
    run = start(tiny(settings), tmp_path / "run")
    states = [run.state]
    while len(states) < 3:
        states.append(play_round(run.session.method.round(states[-1]), run.session.engine)[0])
    last = states[-1]
    whole = exported_model(run.session, last, run.session.engine)
    for name, value in last.model.items():
        expected = (states[1].model[name].double() + value.double()) / 2 if value.is_floating_point() else value
        assert torch.allclose(whole[name].double(), expected.double(), atol=1e-6), name
    seen = Watched(run.session.engine)
    Evaluator(run.session, last, whole, seen, samples=6).measure(("clean",), ("personalised", "global"))
    assert {task.client for task in seen.tasks} >= {SERVER, 0}
    assert all(same_tensors(task.parameters, {n: whole[n] for n in task.parameters}) for task in seen.tasks)
    write_tensors(replace(run, state=last), whole, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["averaged_rounds"] == "up to 2"
    assert conditions(run.session, last)["averaged_rounds"] == 2


def test_the_model_of_calibrated_clients_says_how_it_becomes_personal(tiny, tmp_path):
    run = start(tiny({"method": "jfat", "train.calibration": "labels", "train.smoothing": 2.5}), tmp_path / "run")
    write_tensors(run, run.state.model, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert (file.metadata()["calibration"], file.metadata()["smoothing"]) == ("labels", "2.5")


def test_the_model_says_how_to_feed_it(finished, tmp_path):
    with safe_open(finished / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    run = reopen(finished)
    assert metadata.keys().isdisjoint(("averaged_rounds", "calibration", "smoothing"))
    assert metadata["model"] == "vgg-small"
    assert json.loads(metadata["options"]) == {"width": 4}
    assert (metadata["input"], metadata["classes"], metadata["rounds"]) == ("1x8x8", "10", "4")
    assert tuple(json.loads(metadata["normalize_mean"])) == run.session.dataset.mean
    assert tuple(json.loads(metadata["normalize_std"])) == run.session.dataset.std
    write_model(run, tmp_path / "deep" / "model.safetensors")
    assert (tmp_path / "deep" / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()
