"""`fedprophet partition` as a person and as a program call it."""

import json

import pytest
import typer
from typer.testing import CliRunner

from fedprophet.cli.partition import partition_command
from fedprophet.errors import BudgetError, ConfigError, FedProphetError, ModelError

VGG16 = ["vgg16", "--input", "3x32x32", "--classes", "10", "--batch", "64"]
app = typer.Typer(pretty_exceptions_enable=False)
app.command("partition")(partition_command)
app.callback()(lambda: None)


def call(*arguments):
    return CliRunner().invoke(app, ["partition", *arguments], env={"TERM": "dumb"})


def document(*arguments):
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_of_the_papers_vgg16():
    answer = document(*VGG16, "--budget", "60MB")
    modules = answer.pop("modules")
    assert answer == {
        "memory_model": "paper",
        "model": "vgg16",
        "parameters": 15_253_578,
        "total_memory_bytes": 301_663_096,
        "total_flops": 20_166_967_296,
        "budget_bytes": 60_000_000,
    }
    assert [list(module) for module in modules] == [
        ["index", "atoms", "layers", "memory_bytes", "flops", "parameters"]
    ] * 7
    assert [module["index"] for module in modules] == [1, 2, 3, 4, 5, 6, 7]
    assert [m["memory_bytes"] for m in modules] == [
        55_790_456, 46_090_872, 50_432_632, 34_685_560, 33_112_696, 59_345_528, 36_137_080,
    ]  # fmt: skip
    assert modules[2]["flops"] == 6_053_756_928
    assert modules[6]["layers"] == ["Conv 13", "Linear 1", "Linear 2", "Linear 3"]
    assert sum(module["parameters"] for module in modules) == answer["parameters"]
    names = [name for module in modules for name in module["atoms"]]
    assert len(set(names)) == len(names)
    assert all(type(m[key]) is int for m in modules for key in ("index", "memory_bytes", "flops", "parameters"))


def test_table_for_people():
    result = call(*VGG16, "--budget", "60MB")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    first = next(line for line in lines if "Conv 1," in line)
    assert [cell.strip() for cell in first.split("|")[1:-1]] == [
        "1", "Conv 1, Conv 2", "55.79 MB", "93.0 %", "2.57 G", "38.98 k",
    ]  # fmt: skip
    assert lines[-1] == "- whole model 301.66 MB, budget 19.9 % of it, 7 modules, 20.17 G FLOPs, 15.25 M parameters"


def test_tables_say_whose_memory_it_is():
    small = ("cnn3", "--input", "1x8x8", "--batch", "4", "--budget", "100%")
    note = "memory is what the most economical exact plan is predicted to take on a CPU: see fedprophet memory"
    assert call(*small, "--memory-model", "measured").stdout.splitlines()[-1] == f"- {note}"
    assert note not in call(*small).stdout
    assert document(*small, "--memory-model", "measured")["memory_model"] == "measured"


@pytest.mark.parametrize(
    ("budget", "expected"),
    [("60MB", 60_000_000), ("64MiB", 67_108_864), ("70000000", 70_000_000), ("25%", 75_415_774), ("100%", 301_663_096)],
)
def test_budgets_as_people_write_them(budget, expected):
    assert document(*VGG16, "--budget", budget)["budget_bytes"] == expected


def test_optimizer_changes_the_copies():
    totals = {
        optimizer: document(*VGG16, "--budget", "200MB", "--optimizer", optimizer)["total_memory_bytes"]
        for optimizer in ("sgd", "sgd-momentum", "adam")
    }
    assert totals["sgd-momentum"] - totals["sgd"] == totals["adam"] - totals["sgd-momentum"] == 4 * 15_253_578


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        (
            [*VGG16, "--budget", "38203767"],
            BudgetError,
            ["Conv 2", "38203767 bytes", "38203768 bytes", "smallest budget"],
        ),
        (["vgg61", "--budget", "60MB"], ModelError, ["vgg61", "vgg16"]),
        ([*VGG16, "--budget", "much"], ConfigError, ["'much'", "60MB", "25%"]),
        ([*VGG16, "--budget", "0%"], ConfigError, ["'0%'", "more than nothing"]),
        ([*VGG16, "--budget", "60MB", "--optimizer", "sgd-momentun"], ConfigError, ["--optimizer", "'sgd-momentum'?"]),
        (["vgg16", "--input", "3x32y32", "--budget", "60MB"], ConfigError, ["'3x32y32'", "as in 3x32x32"]),
        (["vgg16", "--input", "3x0x32", "--budget", "60MB"], ConfigError, ["'3x0x32'"]),
        (["vgg16", "--input", "", "--budget", "60MB"], ConfigError, ["''"]),
    ],
)
def test_errors_say_what_to_do(arguments, error, parts):
    result = call(*arguments)
    assert isinstance(result.exception, FedProphetError), result.output
    assert type(result.exception) is error
    assert all(part in str(result.exception) for part in parts), result.exception
    assert result.stdout == ""


def test_help_has_an_example():
    result = call("--help")
    assert result.exit_code == 0
    assert "partition vgg16 --input 3x32x32 --classes 10 --batch 64 --budget 60MB" in " ".join(result.stdout.split())


@pytest.mark.slow
def test_modules_can_be_cut_by_what_they_take():
    small = ["vgg-small", "--input", "1x16x16", "--batch", "32", "--budget", "1600kB"]
    paper, measured = document(*small), document(*small, "--memory-model", "measured")
    assert document(*small, "--memory-model", "paper") == paper
    assert measured["total_memory_bytes"] != paper["total_memory_bytes"]
    assert measured["total_flops"] == paper["total_flops"]
    assert all(module["memory_bytes"] <= 1_600_000 for module in measured["modules"])
    assert [m["layers"] for m in measured["modules"]] != [m["layers"] for m in paper["modules"]]
    vgg16 = document("vgg16", "--budget", "60MB", "--memory-model", "measured")
    assert len(vgg16["modules"]) == 4, "docs/how-to/memory.md says so"
    assert isinstance(call(*small, "--memory-model", "mine").exception, ConfigError)
    assert isinstance(call(*small, "--memory-model", "measured", "--optimizer", "adam").exception, ConfigError)
