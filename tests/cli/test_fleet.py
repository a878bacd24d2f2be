"""`fedprophet fleet show` as a person and as a program call it."""

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from fedprophet.cli.fleet import fleet_app
from fedprophet.errors import ConfigError
from fedprophet.fleet.availability import FleetSettings, device_probabilities, draw_device
from fedprophet.fleet.device import load_pool, pool_text

app = typer.Typer(pretty_exceptions_enable=False)
app.add_typer(fleet_app, name="fleet")


def call(*arguments):
    return CliRunner().invoke(app, ["fleet", "show", *arguments], env={"COLUMNS": "80", "TERM": "dumb"})


def document(*arguments):
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_of_a_balanced_pool():
    answer = document("cifar10")
    assert list(answer) == [
        "pool", "description", "exponent", "seed", "round", "clients", "performance", "budget_bytes",
        "devices", "available",
    ]  # fmt: skip
    assert answer["round"] == 1
    assert (answer["pool"], answer["exponent"], answer["seed"], answer["clients"]) == ("cifar10", 0.0, 0, 100)
    assert len(answer["devices"]) == 10
    assert answer["devices"][3] | {"clients": 0} == {
        "name": "VC709",
        "performance": 1e11,
        "memory_bytes": 2_000_000_000,
        "bandwidth": 1.5e9,
        "probability": pytest.approx(0.1),
        "clients": 0,
    }
    assert sum(device["clients"] for device in answer["devices"]) == 100


def test_the_exponent_decides_the_probabilities():
    devices = document("cifar10", "--exponent", "-1.5", "--clients", "2000")["devices"]
    assert [d["probability"] for d in devices] == pytest.approx(device_probabilities(load_pool("cifar10"), -1.5))
    # VC709 is drawn with (0.1 · 2)^−1.5 = 11.18 of the sum 17.08, within five standard deviations.
    vc709 = next(d for d in devices if d["name"] == "VC709")
    assert vc709["probability"] == pytest.approx(0.655, abs=0.001)
    assert vc709["clients"] / 2000 == pytest.approx(0.655, abs=0.054)


def test_the_sample_is_the_first_round_of_a_run_with_this_seed():
    arguments = ["caltech256", "--clients", "30", "--seed", "7", "--exponent", "-1", "--performance", "apps"]
    answer = document(*arguments, "--budget", "224MB")
    pool = load_pool("caltech256")
    devices = [draw_device(pool, 7, client, -1.0) for client in range(30)]
    assert [d["clients"] for d in answer["devices"]] == [devices.count(device) for device in pool.devices]
    free = [
        FleetSettings(performance="apps").resources(d, 7, 1, client, 224_000_000) for client, d in enumerate(devices)
    ]
    memory, performance = [r.memory for r in free], [r.performance for r in free]
    for name, values in (("memory_bytes", memory), ("performance", performance)):
        found = answer["available"][name]
        assert list(found) == ["lowest", "10%", "25%", "median", "75%", "90%", "highest"]
        assert (found["lowest"], found["highest"]) == pytest.approx((min(values), max(values)))
        assert found["median"] == pytest.approx(np.median(values))
        assert found["90%"] == pytest.approx(np.percentile(values, 90))
    assert answer["available"]["memory_bytes"]["lowest"] >= 224_000_000
    assert document(*arguments) != answer


def test_tables_for_people():
    result = call("cifar10", "--exponent", "-1.5", "--clients", "50")
    assert result.exit_code == 0, result.output
    vc709 = next(line for line in result.stdout.splitlines() if "VC709" in line)
    assert all(part in vc709 for part in ("100.00 GFLOPS", "2.0 GB", "1.5 GB/s", "65.5 %"))
    assert "exponent -1.5" in result.stdout
    assert "Available on 50 clients" in result.stdout
    assert all(name in result.stdout for name in ("lowest", "median", "highest"))
    assert "…" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "Drawn with seed 0 for round 1, exponent 0, performance uniform, no budget."),
        (
            ["--seed", "7", "--exponent", "-1.6", "--performance", "apps", "--budget", "60MB"],
            "Drawn with seed 7 for round 1, exponent -1.6, performance apps, budget 60.0 MB.",
        ),
    ],
)
def test_a_line_says_which_draw_it_is(arguments, line):
    assert call("cifar10", *arguments).stdout.splitlines()[-1] == f"- {line}"


def test_a_pool_to_copy(tmp_path):
    result = call("cifar10", "--toml")
    assert result.stdout == pool_text("cifar10")
    mine = tmp_path / "mine.toml"
    mine.write_text(result.stdout, encoding="utf-8")
    assert document(str(mine)) == document("cifar10") | {"pool": "mine"}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["cifar"], ["unknown device pool 'cifar'", "'cifar10'?", "caltech256", ".toml file"]),
        (["no/such.toml"], ["cannot read the device pool no/such.toml", "No such file"]),
        (["cifar10", "--exponent", "nan"], ["exponent", "finite"]),
        (["cifar10", "--performance", "app"], ["'apps'?"]),
        (["cifar10", "--budget", "-1"], ["'-1' is not a size"]),
    ],
)
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_errors_say_what_to_do(arguments, parts, as_json):
    result = call(*arguments, *as_json)
    assert type(result.exception) is ConfigError, result.output
    assert all(part in str(result.exception) for part in parts), result.exception
    assert result.stdout == ""


def test_a_device_without_bandwidth(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(pool_text("cifar10").replace('bandwidth = "2GB/s"\n', ""), encoding="utf-8")
    result = call(str(path))
    assert type(result.exception) is ConfigError
    assert "device 'KCU1500': bandwidth is missing" in str(result.exception)
