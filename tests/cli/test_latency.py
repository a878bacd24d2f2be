"""`fedprophet latency` as a person and as a program call it."""

import json

import pytest
import typer
from typer.testing import CliRunner

from fedprophet.cli.latency import latency_command
from fedprophet.errors import ConfigError, ModelError

CHECK = {
    "--input": "3x32x32",
    "--classes": "10",
    "--batch": "64",
    "--batches": "30",
    "--memory": "60MB",
    "--performance": "1.3e12",
    "--bandwidth": "1.5e9",
    "--attack-steps": "10",
}
app = typer.Typer(pretty_exceptions_enable=False)
app.command("latency")(latency_command)
app.callback()(lambda: None)


def call(*arguments, model="vgg16", **changes):
    options = CHECK | {f"--{name}": value for name, value in changes.items()}
    words = [word for pair in options.items() for word in pair]
    return CliRunner().invoke(app, ["latency", model, *words, *arguments], env={"COLUMNS": "80", "TERM": "dumb"})


def document(**changes):
    result = call("--json", **changes)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_of_the_check_value():
    answer = document()
    assert list(answer) == ["computation_s", "access_s", "total_s", "fits"]
    assert answer["computation_s"] == pytest.approx(10.24, abs=0.01)
    assert answer["access_s"] == pytest.approx(460.23, abs=0.01)
    assert answer["total_s"] == answer["computation_s"] + answer["access_s"]
    assert answer["fits"] is False


@pytest.mark.parametrize(
    "changes",
    [
        {"performance": "1.3 TFLOPS", "bandwidth": "1.5GB/s", "memory": "60000000"},
        {"performance": "1300000000000", "bandwidth": "1500 MB/s", "memory": "6e7"},
    ],
)
def test_quantities_as_people_write_them(changes):
    assert document(**changes) == pytest.approx(document())


def test_what_fits():
    # 30 batches of 786,432 bytes and 61,014,312 bytes of parameters at 1.5 GB/s, and 30 accesses.
    answer = document(memory="1GB")
    assert answer["fits"] is True
    assert answer["access_s"] == pytest.approx(30 * (786_432 / 1.5e9 + 0.17) + 61_014_312 / 1.5e9)
    assert answer["computation_s"] == pytest.approx(10.24, abs=0.01)


def test_optimizer_and_attack():
    # Without momentum nothing is moved beyond 2 F + 4 P, and 240,651,344 bytes are five pieces of 60 MB.
    plain = document(**{"attack-steps": "0", "optimizer": "sgd"})
    assert plain["access_s"] == pytest.approx(30 * (4 * (2 * 29_655_680 + 4 * 15_253_578) / 1.5e9 + 0.17 * (3 + 5)))
    assert plain["computation_s"] == pytest.approx(10.2386 / 11, abs=0.0001)


def test_table_for_people():
    result = call()
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "vgg16, 30 batches of 64" in lines[0]
    rows = {line.split("|")[1].strip(): line.split("|")[2:5] for line in lines if line.startswith("|")}
    cells = {label: [float(cell) for cell in row] for label, row in list(rows.items())[2:]}
    assert cells["together"] == pytest.approx([10.24, 460.23, 470.47], abs=0.011)
    # A training step moves 603,331,312 bytes (0.4022 s) in nine accesses (1.53 s), an attack step 481,302,688 bytes
    # (0.3209 s) in six (1.02 s); a pass computes for 2 · 20.167 G / 1.3 T = 0.0310 s.
    assert cells["training steps"] == pytest.approx([0.93, 57.97, 58.90], abs=0.011)
    assert cells["attack, 10 steps per batch"] == pytest.approx([9.31, 402.26, 411.57], abs=0.011)
    assert lines[-2:] == [
        "- a training step takes 301.67 MB: it does not fit into 60.00 MB and is swapped",
        "- an attack step takes 179.64 MB: it does not fit into 60.00 MB and is swapped",
    ]


def test_the_text_says_what_fits():
    assert call(memory="200MB").stdout.splitlines()[-2:] == [
        "- a training step takes 301.67 MB: it does not fit into 200.00 MB and is swapped",
        "- an attack step takes 179.64 MB: it fits into 200.00 MB",
    ]


@pytest.mark.parametrize(
    ("changes", "error", "parts"),
    [
        ({"memory": "-5"}, ConfigError, ["--memory", "positive", "-5"]),
        ({"memory": "0"}, ConfigError, ["--memory", "positive"]),
        ({"memory": "0MB"}, ConfigError, ["--memory", "positive", "0MB"]),
        ({"memory": "much"}, ConfigError, ["--memory", "'much'", "60MB"]),
        ({"performance": "0"}, ConfigError, ["--performance", "positive"]),
        ({"performance": "-1e12"}, ConfigError, ["--performance", "positive"]),
        ({"performance": "1.3 TB"}, ConfigError, ["--performance", "'1.3 TB'", "TFLOPS"]),
        ({"performance": "nan"}, ConfigError, ["--performance", "nan"]),
        ({"bandwidth": "0"}, ConfigError, ["--bandwidth", "positive"]),
        ({"bandwidth": "-1GB/s"}, ConfigError, ["--bandwidth", "-1GB"]),
        ({"bandwidth": "inf"}, ConfigError, ["--bandwidth", "inf"]),
        ({"optimizer": "adm"}, ConfigError, ["--optimizer", "'adam'?"]),
        ({"input": "3x32y32"}, ConfigError, ["'3x32y32'"]),
        ({"model": "vgg61"}, ModelError, ["vgg61", "vgg16"]),
    ],
)
def test_errors_say_what_to_do(changes, error, parts):
    result = call(**changes)
    assert type(result.exception) is error, result.output
    assert all(part in str(result.exception) for part in parts), result.exception
    assert result.stdout == ""


@pytest.mark.parametrize("changes", [{"batches": "0"}, {"attack-steps": "-1"}, {"batch": "0"}])
def test_counts_are_checked(changes):
    assert call(**changes).exit_code == 2
