"""`fedprophet compare` as a person and as a program call it."""

import csv
import errno
import importlib.util
import json
from pathlib import Path

import pytest
from rich.console import Console

from fedprophet.cli import options
from fedprophet.config.load import load_config
from fedprophet.config.reference import to_toml
from fedprophet.display.tables import show
from fedprophet.methods import METHODS
from fedprophet.report.compare import compare
from fedprophet.report.tables import page


@pytest.fixture
def write_run(tmp_path):
    """Return a function that writes the folder of a run of one round, which lasts as long as its only client."""

    def write(name, method, *settings, seconds=(1, 1, 1), accuracy=0.5, finished=True):
        path = tmp_path / name
        path.mkdir()
        (path / "config.toml").write_text(to_toml(load_config(None, [f"method={method}", *settings])))
        keys = ("computation_s", "access_s", "communication_s")
        client = {**dict(zip(keys, seconds, strict=True)), "memory_bytes": 60_000_000}
        (path / "journal.jsonl").write_text(json.dumps({"round": 1, "times": {"0": client}}) + "\n")
        cells = {name: {"accuracy": accuracy, "samples": 100} for name in ("clean", "pgd20")}
        summary = {"version": "0.1.0", "rounds": 1, "personalised": cells, "global": cells}
        if finished:
            (path / "results.json").write_text(json.dumps(summary))
        return path

    return write


@pytest.fixture
def pair(write_run):
    write_run("jfat", "jfat", seconds=(100, 500, 9))
    write_run("ours", "fedprophet", seconds=(200, 50, 9), accuracy=0.6)
    return "jfat", "ours"


def test_a_folder_whose_name_is_no_text_is_compared_and_named_as_it_is(cli, write_run):
    write_run("odd\udcff", "jfat")
    said = cli("compare", "odd\udcff", "--out", "out", "--no-plot")
    assert said.code == 0, said.err
    assert b"odd\xff" in Path("out/comparison.md").read_bytes()


def test_piped_it_is_markdown(cli, pair):
    said = cli("compare", *pair)
    assert (said.code, said.err) == (0, "")
    rows = [line for line in said.out.splitlines() if line.startswith("| FedProphet")]
    assert [cell.strip() for cell in rows[1].split("|")[1:-1]] == [
        "FedProphet",
        "1",
        "60.0 MB",
        "60.0 MB",
        "4.2 min",
        "3.3 min",
        "0.8 min",
        "2.40×",
        "9.0 s",
    ]
    assert "\x1b" not in said.out


def test_json_is_all_there_is_on_standard_output(cli, pair):
    said = cli("compare", *pair, "--json", "--out", "out", "--no-plot")
    rows = said.json["settings"][0]["rows"]
    assert [row["method"] for row in rows] == ["jfat", "fedprophet"]
    assert rows[1]["speedup"] == {"factor": pytest.approx(600 / 250), "over": "jFAT"}
    assert said.err == "written: out/comparison.md, out/comparison.csv\n"


def test_out_writes_the_bytes_of_each_round_where_a_run_has_them(cli, pair, write_run, tmp_path):
    journal = write_run("wired", "fedprophet", "seed=5") / "journal.jsonl"
    record = {
        **json.loads(journal.read_text()),
        "wire": {"sent": 10, "received": 4, "whole_model": 30},
        "faults": {"3": "late"},
    }
    journal.write_text(json.dumps(record) + "\n")
    said = cli("compare", *pair, "wired", "--out", "out", "--no-plot")
    assert said.err == "written: out/comparison.md, out/comparison.csv, out/wire.csv\n"
    assert (tmp_path / "out" / "wire.csv").read_text() == "run,round,sent,received,jfat,faults\nwired,1,10,4,30,1\n"
    again = cli("compare", *pair, "--out", "out", "--no-plot")
    assert "note: out/wire.csv is from an earlier comparison\n" in again.err


@pytest.mark.slow
def test_out_writes_the_page_the_sheet_and_the_picture(cli, pair, tmp_path):
    piped = cli("compare", *pair).out
    said = cli("compare", *pair, "--out", "a/b")
    assert said.code == 0
    folder = tmp_path / "a" / "b"
    assert sorted(file.name for file in folder.iterdir()) == ["comparison.csv", "comparison.md", "comparison.png"]
    page = (folder / "comparison.md").read_text()
    assert page.replace("![Accuracies and simulated time of each method](comparison.png)\n\n", "") == piped
    with (folder / "comparison.csv").open(newline="") as file:
        assert [row["total_s"] for row in csv.DictReader(file)] == ["600.000", "250.000"]
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    cli("compare", *pair, "--out", "a/b")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before, "the same runs, the same bytes"


def test_an_old_picture_beside_new_tables_is_mentioned(cli, pair):
    cli("compare", *pair, "--out", "out")
    said = cli("compare", *pair, "--out", "out", "--no-plot").err
    assert "note: out/comparison.png is from an earlier comparison" in said


def test_without_matplotlib_nothing_is_done_unless_no_picture_is_wanted(cli, pair, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    said = cli("compare", *pair, "--out", "out")
    assert "pip install 'fedprophet[plots]'" in said.error
    assert "--no-plot" in said.error
    assert said.out == ""
    assert not (tmp_path / "out").exists()
    assert cli("compare", *pair).code == 0, "tables need no Matplotlib"
    assert cli("compare", *pair, "--out", "out", "--no-plot").code == 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["comparison.csv", "comparison.md"]


def test_mistakes_are_said_in_a_sentence(cli, pair, tmp_path):
    assert "there is no run in nowhere" in cli("compare", *pair, "nowhere").error
    (tmp_path / "file").write_text("")
    assert "there is no run in file" in cli("compare", "file").error
    assert "file is a file. Give a folder with --out" in cli("compare", *pair, "--out", "file").error
    (tmp_path / "ours" / "results.json").write_text("{")
    assert "ours/results.json is damaged" in cli("compare", *pair, "--out", "out").error
    assert not (tmp_path / "out").exists()
    assert cli("compare").code == 2


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_printed(cli, pair, tmp_path, as_json):
    (tmp_path / "file").write_text("")
    below = cli("compare", *pair, "--out", "file/below", "--no-plot", *as_json)
    assert "file is a file. Give a folder with --out" in below.error
    name = "x" * 300
    wrong = cli("compare", *pair, "--out", name, "--no-plot", *as_json)
    assert f"cannot write to {name}: File name too long. Make it writable or give another" in wrong.error
    assert below.out == wrong.out == ""


def test_a_folder_without_the_right_to_write_is_refused(cli, pair, tmp_path, monkeypatch):
    """Simulated, since there is nothing that root may not do."""
    (tmp_path / "out").mkdir()

    def denied(dir):
        raise PermissionError(errno.EACCES, "Permission denied", str(dir))

    monkeypatch.setattr(options, "TemporaryFile", denied)
    said = cli("compare", *pair, "--out", "out", "--no-plot")
    assert "cannot write to out: Permission denied. Make it writable or give another folder" in said.error
    assert (said.out, list((tmp_path / "out").iterdir())) == ("", [])


def test_the_same_folder_twice_and_a_run_that_is_not_finished(cli, pair, write_run):
    write_run("begun", "fedrbn", finished=False)
    page = cli("compare", *pair, "./jfat", "begun").out
    assert "- jfat is given more than once: it counts once" in page
    assert "begun is not finished: 1 round so far" in page
    assert "| FedRBN (seed 0, 1 round so far) |" in page


@pytest.mark.parametrize("width", [120, 80])
def test_in_a_terminal_no_number_is_wrapped_or_cut(write_run, width, capsys):
    paths = [
        write_run(f"{method}-{seed}", method, f"seed={seed}", seconds=(2e5, 1e5, 9e4), accuracy=0.75 + 0.15 * seed)
        for method in METHODS
        for seed in (0, 1)
    ]
    paths.append(
        write_run(
            "long", "fedprophet", "assignment.enabled=false", "perturbation.enabled=false", seconds=(2e5, 1e5, 9e4)
        )
    )
    show(page(compare(paths)), Console(width=width, force_terminal=True, color_system=None, highlight=False))
    lines = capsys.readouterr().out.splitlines()
    names = ("Method", *(entry.paper for entry in METHODS.values()))
    tables = [line for line in lines if "─" in line or line.startswith(names)]
    assert max(map(len, tables)) <= width
    row = [line for line in tables if line.startswith("HeteroFL-AT ")]
    assert len(row) == (2 if width == 120 else 4), "the pieces of a narrow terminal repeat the label"
    text = " ".join(" ".join(row).split())
    for number in ("82.5 ± 10.6", "60.0 MB", "83.3 ± 0.0 h", "55.6 h", "27.8 h", "1.00×", "25.0 h"):
        assert number in text
    assert any(line.startswith("· Samples per accuracy") for line in lines)
