"""`benchmarks/one_model.py` with made-up runs: saved one by one, gone on with, stopped, merged."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import one_model
import pytest
from machine import PAPER

from fedprophet.config.load import load_config
from fedprophet.errors import TrainingError
from fedprophet.methods import METHODS

PROGRAM = Path(one_model.__file__)
SMALL = ("heterofl", "feddrop", "fedrolex")


def row(method: str, choice: str, seed: int, clean: float = 0.9) -> dict[str, Any]:
    reached = {"clean": clean, "pgd20": 0.5}
    known = {"method": method, "choice": choice, "seed": seed, "seconds": 61.4, "rounds": 3, "machine": "a machine"}
    return {**known, "personalised": reached, "global": reached}


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return what calls the program; its runs are made up, in threads."""
    monkeypatch.setattr(one_model, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(one_model, "active_children", list)
    monkeypatch.setattr(one_model, "run", row)
    monkeypatch.setattr(one_model, "STORED", tmp_path / "stored.json")
    return lambda *words: one_model.main([*words, "--out", str(tmp_path)])


def measured(folder: Path) -> list[tuple[str, str, int]]:
    file = folder / "one-model.json"
    return [one_model.job_of(row) for row in json.loads(file.read_text())] if file.exists() else []


def config(method: str, *keys: str) -> dict[str, Any]:
    return load_config("digits", overrides=[*keys, f"method={method}"]).model_dump()


def test_names_of_choices_keep_their_meaning_whatever_the_preset_is():
    paper = config("fedprophet", *one_model.CHOICES["local"])
    assert paper["norm"]["layers"] == "local"
    assert paper["norm"]["refresh"] == "none"
    assert (paper["train"]["calibration"], paper["train"]["iterations"]) == ("none", 12)
    assert paper["perturbation"]["start"] == 0.5
    alpha = config("fedprophet", *one_model.CHOICES["shared, calibrated, alpha from 0.7"])
    assert (alpha["norm"]["layers"], alpha["train"]["calibration"]) == ("shared", "labels")
    assert (alpha["train"]["iterations"], alpha["perturbation"]["start"]) == (12, 0.7)


@pytest.mark.parametrize("method", METHODS)
def test_the_preset_is_still_what_was_measured_under_its_name(method):
    """Where this fails, rows of the preset's name in one-model.json need a name that says what they were."""
    own = {"fedrbn": "norm.layers=statistics-local", "heterofl": "norm.layers=frozen"}
    longer = [own.get(method, one_model.SHARED), one_model.CALIBRATED, one_model.ALPHA, "train.iterations=24"]
    refreshed = [one_model.ATTACKED] if method in SMALL else []
    assert config(method, *one_model.CHOICES[one_model.DEFAULT]) == config(method, *PAPER, *longer, *refreshed)


def test_without_choices_all_methods_have_the_preset_and_fedprophet_changes_of_it_of_which_others_have_some(
    called, tmp_path
):
    assert called("--seeds", "1", "--workers", "1") == 0
    default, *changes = one_model.FROM_PRESET
    methods = ("jfat", "feddf", "fedet", "heterofl", "feddrop", "fedrolex", "fedrbn", "fedprophet")
    assert measured(tmp_path)[:8] == [(method, default, 0) for method in methods]
    with_jfat = [name for name in changes if any(word in name for word in ("boundary", "consistency", "mean of"))]
    assert len(with_jfat) == 6
    methods_of = {
        "preset, shared": ("heterofl",),
        "preset, frozen": ("feddrop", "fedrolex", "fedprophet"),
        **dict.fromkeys(with_jfat, ("jfat", "fedprophet")),
    }
    expected = [(method, name, 0) for name in changes for method in methods_of.get(name, ("fedprophet",))]
    assert measured(tmp_path)[8:] == expected


def test_a_new_folder_begins_with_what_is_stored(called, tmp_path, capsys):
    (tmp_path / "stored.json").write_text(json.dumps([row("jfat", "local", 0)]))
    assert called("--methods", "jfat", "--choices", "local", "--seeds", "2") == 0
    assert capsys.readouterr().out.startswith("1 of 1: jFAT, local, seed 1: ")
    assert measured(tmp_path) == [("jfat", "local", 0), ("jfat", "local", 1)]
    assert len(json.loads((tmp_path / "stored.json").read_text())) == 1


def test_a_run_is_saved_when_it_is_finished_whatever_the_order(called, tmp_path, monkeypatch, wait_until, capsys):
    def run(method: str, choice: str, seed: int) -> dict[str, Any]:
        if choice == "local":  # the first to begin ends last
            wait_until(lambda: len(measured(tmp_path)) >= 2)
        return row(method, choice, seed)

    monkeypatch.setattr(one_model, "run", run)
    assert called("--methods", "jfat", "--choices", "local", "shared", "frozen, calibrated", "--seeds", "1") == 0
    assert measured(tmp_path) == [("jfat", name, 0) for name in ("shared", "frozen, calibrated", "local")]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "1 of 3: jFAT, shared, seed 0: personalised 90.0 / 50.0, global 90.0 / 50.0; 61 s"
    assert said[2].startswith("3 of 3: jFAT, local, seed 0: ")
    assert "| jFAT | local | 1 | 90.0 / 50.0 |  | 90.0 / 50.0 |" in (tmp_path / "one-model.md").read_text().splitlines()

    # Only what is missing is measured.
    assert called("--methods", "jfat", "--choices", "local", "--seeds", "2") == 0
    assert measured(tmp_path)[3:] == [("jfat", "local", 1)]
    assert capsys.readouterr().out.startswith("1 of 1: ")


def test_a_stop_leaves_what_is_measured(called, tmp_path, monkeypatch, wait_until, capsys):
    def run(method: str, choice: str, seed: int) -> dict[str, Any]:
        if seed == 1:
            wait_until(lambda: len(measured(tmp_path)) == 1)
            raise KeyboardInterrupt
        return row(method, choice, seed)

    monkeypatch.setattr(one_model, "run", run)
    assert called("--methods", "jfat", "--choices", "local", "--seeds", "3", "--workers", "1") == one_model.STOPPED
    assert measured(tmp_path) == [("jfat", "local", 0)]
    assert "| jFAT | local | 1 |" in (tmp_path / "one-model.md").read_text()
    assert f"stopped: 1 run in {tmp_path / 'one-model.json'}" in capsys.readouterr().out


def test_a_run_that_fails_does_not_stop_the_others(called, tmp_path, monkeypatch, capsys):
    def run(method: str, choice: str, seed: int) -> dict[str, Any]:
        if seed == 0:
            raise TrainingError("it diverged")
        return row(method, choice, seed)

    monkeypatch.setattr(one_model, "run", run)
    assert called("--methods", "jfat", "--choices", "local", "--seeds", "2", "--workers", "1") == 1
    assert measured(tmp_path) == [("jfat", "local", 1)]
    assert "1 of 2: jfat, local, 0: failed: it diverged\n" in capsys.readouterr().out


def test_rows_that_were_measured_elsewhere_are_added_once(called, tmp_path, capsys):
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(json.dumps([row("jfat", "local", 0, clean=0.1), row("jfat", "local", 1, clean=0.7)]))
    (tmp_path / "one-model.json").write_text(json.dumps([row("jfat", "local", 0)]))
    for added in ("1 row", "0 rows"):
        assert called("--table", "--merge", str(elsewhere)) == 0
        assert f"{elsewhere}: {added} added" in capsys.readouterr().out
        assert measured(tmp_path) == [("jfat", "local", 0), ("jfat", "local", 1)]
    # Ours of seed 0 stays: 90 and 70 have the mean 80 and the deviation sqrt(2 · 10²) = 14.1.
    assert "| jFAT | local | 2 | 80.0 ± 14.1 / 50.0 ± 0.0 |" in (tmp_path / "one-model.md").read_text()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("[", "has no rows of this program"),
        ('{"a": 1}', "has no rows of this program"),
        (json.dumps([row("jfat", "locals", 0)]), "unknown choice 'locals'. Did you mean"),
        (json.dumps([row("jfats", "local", 0)]), "unknown method 'jfats'. Did you mean"),
        (json.dumps([{**row("jfat", "local", 0), "global": {}}]), "has no rows of this program"),
    ],
)
def test_what_is_no_such_file_is_refused(called, tmp_path, capsys, content, what):
    (tmp_path / "elsewhere.json").write_text(content)
    assert called("--table", "--merge", str(tmp_path / "elsewhere.json")) == 2
    assert what in capsys.readouterr().err
    assert not (tmp_path / "one-model.json").exists()


@pytest.mark.slow
def test_a_signal_to_the_program_alone_ends_its_runs(tmp_path, wait_until):
    words = ["--methods", "jfat", "--choices", "local", "shared", "statistics local", "--seeds", "1"]
    command = [sys.executable, str(PROGRAM), *words, "--out", str(tmp_path / "out")]
    for name in ("out", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "out" / "one-model.json").write_text("[]")  # or it would begin with what is stored
    places = {**os.environ, "TMPDIR": str(tmp_path / "runs")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=places, start_new_session=True) as program:
        wait_until(lambda: len(list(tmp_path.glob("runs/*/run/journal.jsonl"))) == 2)
        program.send_signal(signal.SIGTERM)  # SIGINT is ignored by what is started in the background
        said, wrong = program.communicate()
    assert program.returncode == one_model.STOPPED, said + wrong
    assert "stopped: 0 runs in" in said
    assert "Traceback" not in wrong
    assert list(tmp_path.glob("runs/*/run")) == []
