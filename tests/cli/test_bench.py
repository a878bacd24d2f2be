"""`fedprophet bench` as a user meets it."""

import json
import os
import re
from functools import partial

import pytest

from fedprophet.bench.rounds import PARTS, fast_engine
from fedprophet.machine import product_rate

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def flags(tiny_flags):
    return ["--preset", "digits", *tiny_flags()]


@pytest.fixture
def short_product(monkeypatch):
    """Measure matrix products for a moment only."""
    monkeypatch.setattr("fedprophet.machine.PRODUCT_SIDE", {"cuda": 256, "cpu": 256})
    monkeypatch.setattr("fedprophet.machine.product_rate", partial(product_rate, seconds=0.01))


@pytest.mark.slow
def test_json_has_the_machine_the_settings_and_every_measurement(cli, flags, tmp_path):
    found = cli("bench", *flags, "--repeat", 1, "--stages", "1,3", "--json", "--out", "there").json
    engines = ["plain", fast_engine()]
    assert found["benchmark"] == "rounds"
    assert {"date", "processor", "cores", "torch", "fedprophet", "load", "load_after"} <= set(found["machine"])
    assert found["product"]["flops"] > 1e8
    assert found["settings"]["preset"] == "digits"
    assert found["settings"]["config"]["jfat"]["method"] == "jfat"
    assert found["settings"]["config"]["fedprophet"]["rounds"] == 3, "as a run has it, not as it is measured"
    assert list(found["settings"]["engines"]) == engines
    cases = [("jfat", None), ("fedprophet", 1), ("fedprophet", 3)]
    expected = [(m, s, engine, part) for m, s in cases for engine in engines for part in PARTS]
    rows = found["measurements"]
    assert [(row["method"], row["stage"], row["engine"], row["part"]) for row in rows] == expected
    for row in rows:
        assert row["failure"] is None
        assert row["of_product"] == pytest.approx(row["flop"] / row["seconds"] / found["product"]["flops"])
        assert row["peak_bytes"] > 0
        assert (row["speedup"] is None) == (row["engine"] == "plain")
    # One stage is missing, so FedProphet's run cannot be projected.
    assert {p["method"] for p in found["projection"]} == {"jfat"}
    assert json.loads((tmp_path / "there" / "bench.json").read_text()) == found
    assert (tmp_path / "there" / "bench.md").read_text().startswith("# Rounds\n\n- ")
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == ["bench.json", "bench.md"]


def test_without_a_terminal_it_prints_markdown(cli, flags, quick, tiny_flags, short_product):
    flags = ["--preset", "digits", *tiny_flags(quick)]
    said = cli("bench", *flags, "--repeat", 1, "--only", "jfat", "--engine", "plain")
    assert said.code == 0, said.err
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in said.out.splitlines() if "|" in line]
    assert rows[0] == ["case", "engine"]
    assert ["jfat", "plain"] in rows
    assert not any(row[0].startswith(("stage", "fedprophet")) for row in rows)
    assert said.err == ""


def test_in_a_terminal_its_tables_fit_eighty_columns(cli, quick, tiny_flags, short_product, in_terminal):
    in_terminal(80)
    flags = ["--preset", "digits", *tiny_flags(quick)]
    said = cli("bench", *flags, "--repeat", 1, "--only", "jfat", "--engine", "plain")
    assert said.code == 0, said.err
    lines = ESCAPES.sub("", said.out).splitlines()
    assert max(len(line) for line in lines if "─" in line) <= 80
    (heading, *_) = (line for line in lines if "engine" in line and "seconds" in line)
    assert heading.split() == ["case", "engine", "seconds", "range", "GFLOP/s", "of", "product", "memory", "speed-up"]
    assert "Projection of a whole run" in said.out


@pytest.mark.slow
def test_growth(cli, tiny_flags, tmp_path):
    flags = ["--preset", "digits", *tiny_flags(), "--growth", "--sizes", "20", "--repeat", 1]
    found = cli("bench", *flags, "--json", "--out", ".").json
    assert found["benchmark"] == "growth"
    assert [(row["clients"], row["cohort"]) for row in found["measurements"]] == [(20, 10)]
    assert found["settings"]["samples_per_client"] == 5
    assert json.loads((tmp_path / "growth.json").read_text()) == found
    assert "| 20      | 10     |" in (tmp_path / "growth.md").read_text()


MISTAKES = {
    "a method that is not measured": (["--only", "jfat,fedrbn"], "--only: unknown method 'fedrbn'. "),
    "no method": (["--only", ","], "--only: unknown method ''"),
    "an engine that is not there": (["--engine", "gpu"], "--engine: unknown engine 'gpu'. "),
    "a stage that is no number": (["--stages", "1,last"], "--stages: '1,last' is not a list of positive numbers"),
    "a stage that is not there": (["--stages", "9"], "--stages: there is no stage 9. digits has stages 1 to 3"),
    "a stage of endless digits": (["--stages", "9" * 5000], "is not a list of positive numbers"),
    "stages of a method without": (["--only", "jfat", "--stages", "1"], "--stages are FedProphet's: add it to --only"),
    "sizes without growth": (["--sizes", "100"], "--sizes needs --growth"),
    "stages of no training": (["--growth", "--stages", "1"], "besides training: leave out --stages"),
    "growth of real data": (["--growth", "--real-data"], "besides training: leave out --real-data"),
    "quick and a preset": (["--quick"], "--quick uses cifar10-balanced-small: leave out --preset"),
    "a key that is not there": (
        ["--set", "train.bach=3"],
        "unknown key 'train.bach' (--set). Did you mean 'train.batch'?",
    ),
    "data of one's own": (
        ["--set", "data.name=folder"],
        "data.name = 'folder': random images can only replace digits, ",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_said_in_a_sentence(cli, flags, mistake):
    arguments, text = MISTAKES[mistake]
    assert text in cli("bench", *flags, *arguments).error


def test_a_file_in_the_place_of_the_folder_is_found_before_anything_is_measured(cli, tmp_path):
    (tmp_path / "there").write_text("mine")
    for arguments in ([], ["--growth"]):
        assert "there is a file. Give a folder with --out" in cli("bench", *arguments, "--out", "there").error
        assert "there is a file. Give a folder with --out" in cli("bench", *arguments, "--out", "there/below").error
        said = cli("bench", *arguments, "--out", "x" * 300)
        assert f"cannot write to {'x' * 300}: File name too long. " in said.error
        assert said.out == ""


def test_a_mistake_elsewhere_leaves_no_folder_behind(cli, tmp_path):
    assert cli("bench", "--only", "nothing", "--out", "there").code == 2
    assert cli("bench", "--growth", "--sizes", "few", "--out", "there").code == 2
    assert not (tmp_path / "there").exists()


def test_the_help_has_examples(cli):
    said = cli("bench", "--help")
    assert "fedprophet bench --quick" in said.out
    assert "fedprophet bench --growth" in said.out


@pytest.mark.slow
def test_quick_ends_soon_and_shows_both_methods(cli):
    began = sum(os.times()[:4])  # of this process and those that it has waited for
    found = cli("bench", "--quick", "--json").json
    assert sum(os.times()[:4]) - began < 240, "a minute on two free cores"
    assert {p["method"] for p in found["projection"]} == {"jfat", "fedprophet"}
    assert found["settings"]["preset"] == "cifar10-balanced-small"
