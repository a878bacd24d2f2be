"""`fedprophet memory` as a person and as a program call it."""

import json
import re

import pytest
import typer
from typer.testing import CliRunner

from fedprophet.cli import memory
from fedprophet.cli.memory import memory_command
from fedprophet.client.iteration import LocalIteration
from fedprophet.errors import BudgetError, ConfigError, FedProphetError

SMALL = ["vgg-small", "--input", "1x16x16", "--classes", "10", "--batch", "32"]
app = typer.Typer(pretty_exceptions_enable=False)
app.command("memory")(memory_command)
app.callback()(lambda: None)


def call(*arguments):
    return CliRunner().invoke(app, ["memory", *arguments], env={"TERM": "dumb"})


def document(*arguments):
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def measured():
    return document(*SMALL, "--budget", "2MB")


def test_every_module_has_its_estimate_its_prediction_its_measurement_and_its_plan(measured):
    assert {key: value for key, value in measured.items() if key != "modules"} == {
        "model": "vgg-small", "batch": 32, "budget_bytes": 2_000_000, "memory_model": "paper",
        "planned_for": "cpu", "device": "cpu",
    }  # fmt: skip
    assert [module["index"] for module in measured["modules"]] == list(range(1, len(measured["modules"]) + 1))
    for module in measured["modules"]:
        assert module["paper_bytes"] <= 2_000_000
        assert module["plain_measured_bytes"] == pytest.approx(module["plain_predicted_bytes"], rel=0.05)
        assert module["fits"]
        assert module["measured_bytes"] <= 2_000_000
        assert module["measured_bytes"] == pytest.approx(module["predicted_bytes"], rel=0.05)
        assert module["planned_for_bytes"] == 2_000_000
        assert module["limit_bytes"] is None
        assert module["plan"]["rounded"] is False
        assert module["plan"]["text"] != "plain" or module["plain_measured_bytes"] <= 2_000_000
    assert any(module["plain_measured_bytes"] > 2_000_000 for module in measured["modules"])


def test_a_prediction_alone_measures_nothing(measured, monkeypatch):
    monkeypatch.setattr(LocalIteration, "measured", None)
    found = document(*SMALL, "--budget", "2MB", "--no-measure")
    assert found["device"] is None
    for module, other in zip(found["modules"], measured["modules"], strict=True):
        assert module == {**other, "measured_bytes": None, "plain_measured_bytes": None}


@pytest.mark.slow
def test_a_gpu_is_planned_for_without_one():
    """Its allocator counts in units of 512 bytes, and its workspaces are not predicted; a note says so."""
    options = ("--budget", "2MB", "--no-measure")
    found, cpu = document(*SMALL, *options, "--device", "cuda"), document(*SMALL, *options)
    assert (found["planned_for"], found["device"]) == ("cuda", None)
    rests = [[module["plain_predicted_bytes"] % 512 for module in each["modules"]] for each in (found, cpu)]
    assert not any(rests[0])
    assert all(rests[1])
    text = call(*SMALL, *options, "--device", "cuda").stdout
    assert "predictions are for a GPU, without workspaces" in " ".join(text.split())
    assert "without workspaces" not in call(*SMALL, *options).stdout
    assert [line.rstrip(" |").endswith("tensors do") for line in text.splitlines() if "Conv 1 " in line] == [True]


@pytest.mark.slow
def test_a_module_that_fits_no_plan_is_cut_further_and_an_atom_is_shown_with_what_it_takes():
    """A batch of two is never cut into parts, and gradients of activations are not on paper."""
    arguments = ("vgg-small", "--input", "3x64x64", "--batch", "2", "--budget", "1600kB", "--no-measure")
    found = document(*arguments)["modules"]
    assert [module["layers"] for module in found[:6]] == [[f"Conv {number}"] for number in range(1, 7)]
    assert [module["cut_from"] for module in found] == [None] * 4 + [5, 5, None]
    assert [module["fits"] for module in found] == [False] * 4 + [True] * 3
    for module in found[:4]:
        assert module["plan"] is None
        assert module["predicted_bytes"] > 1_600_000 > module["paper_bytes"]
    text = " ".join(call(*arguments).stdout.split())
    assert "module 5 of the paper's partition fits no exact plan: it is cut into modules 5, 6" in text
    assert "module 2: no plan fits; the most economical one is predicted to take 5.27 MB" in text


def test_plans_that_are_predicted_to_fit_and_do_not_when_they_are_tried(monkeypatch):
    def refused(iteration, budget, rounded):
        raise BudgetError("")

    monkeypatch.setattr(memory, "checked", refused)
    monkeypatch.setattr(LocalIteration, "measured", lambda self, plan: 1)
    text = " ".join(call("cnn3", "--input", "1x8x8", "--batch", "4", "--budget", "2MB").stdout.split())
    note = "module 1: none kept within the budget when it was tried; the most economical one is predicted to take 1."
    assert note in text


@pytest.mark.parametrize("model", ["paper", "measured"])
def test_the_budget_that_an_error_names_works(model):
    """On paper 1.8 MB are enough for the largest atom, but for no plan of it."""
    tight = ("cnn3", "--input", "1x8x8", "--batch", "32", "--memory-model", model, "--budget")
    named = re.search(r"smallest budget that works is (\d+) bytes", str(call(*tight, "300kB").exception))
    assert named
    assert all(module["fits"] for module in document(*tight, named[1])["modules"])


def test_table_for_people():
    result = call(*SMALL, "--budget", "1600kB", "--no-measure")
    assert result.exit_code == 0, result.output
    first = next(line for line in result.stdout.splitlines() if "Conv 1" in line)
    assert "at a time" in first
    assert first.rstrip(" |").endswith("yes")
    assert "budget 1.60 MB, not measured" in result.stdout


@pytest.mark.slow
def test_modules_can_be_cut_by_what_they_take():
    found = document(*SMALL, "--budget", "1600kB", "--no-measure", "--memory-model", "measured")
    assert all(module["fits"] for module in found["modules"])
    paper = document(*SMALL, "--budget", "1600kB", "--no-measure")
    assert [m["layers"] for m in found["modules"]] != [m["layers"] for m in paper["modules"]]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (["--budget", "2MB", "--device", "tpu"], ConfigError, "cpu or cuda"),
        (["--budget", "2MB", "--device", "cuda:99"], ConfigError, "no such GPU"),
        (["--budget", "2MB", "--optimizer", "adam"], ConfigError, "sgd, sgd-momentum"),
        (["--budget", "2MB", "--optimizer", "sdg"], ConfigError, "Did you mean 'sgd'?"),
        (["--budget", "2MB", "--memory-model", "mine"], ConfigError, "paper"),
        (["--budget", "2MB", "--input", "1x8"], ConfigError, "--input 1x8: models take images of channels"),
        (["--budget", "none"], ConfigError, "not a memory budget"),
        (["--budget", "1kB"], BudgetError, "too small"),
        (["--budget", "1kB", "--memory-model", "measured"], BudgetError, "too small"),
    ],
)
def test_errors(arguments, error, text):
    result = call(*SMALL, *arguments)
    assert isinstance(result.exception, error)
    assert isinstance(result.exception, FedProphetError)
    assert text in str(result.exception)
