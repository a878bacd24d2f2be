"""The installed program, as a stranger starts it."""

import subprocess
import sys

import pytest
from safetensors.torch import load_file

from fedprophet.config.load import PRESETS, load_config
from fedprophet.runs.play import play
from fedprophet.runs.run import start
from fedprophet.version import __version__

pytestmark = pytest.mark.slow

MEASURE = """
import resource, subprocess, sys

subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime)
"""

QUICK = {"rounds": 1, "train.warmup": 0, "memory.budget": "60%"}


def test_it_trains_evaluates_and_exports_from_any_folder_and_into_any(run_program, launch, tiny_flags, tmp_path):
    here, there = tmp_path / "here", tmp_path / "over there, ünder"
    here.mkdir()
    trained = run_program("train", *tiny_flags(QUICK), "--out", there / "a run", folder=here)
    assert trained.returncode == 0, trained.stderr
    assert list(here.iterdir()) == []
    assert set(launch("evaluate", "a run", "--attack", "clean", "--json", folder=there).json["global"]) == {"clean"}
    exported = launch("export", "../over there, ünder/a run", "--out", "deep/er/model.safetensors", folder=here)
    assert exported.code == 0, exported.stderr
    model = load_file(here / "deep" / "er" / "model.safetensors")
    assert set(model) == set(load_file(there / "a run" / "model.safetensors"))


def test_the_module_is_the_program_too():
    asked = [sys.executable, "-m", "fedprophet", "--version"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == f"fedprophet {__version__}\n"


def test_a_mistake_is_said_in_a_sentence_with_code_2(run_program, tmp_path):
    result = run_program("train", "--set", "train.bach=3", folder=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: unknown key 'train.bach' (--set). Did you mean 'train.batch'?")
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_hundred_thousand_clients_start_in_seconds_and_in_less_than_a_gigabyte(program, tiny_flags, tmp_path):
    settings = {**QUICK, "population.clients": 100_000, "evaluate.clients": 5, "measure.clients": 5}
    words = [*program, "train", *tiny_flags(settings), "--out", "run", "--json"]
    # A process inherits the peak of the one that started it, so a small one starts it and reads what it took.
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, *words],
        cwd=tmp_path,
        capture_output=True,
        check=True,
        text=True,
    )
    peak, processor = map(float, measured.stdout.split())
    assert peak < 1e9
    assert processor < 30, "processor time, most of which torch takes to be imported"
    assert len(list((tmp_path / "run" / "clients").rglob("*.safetensors"))) <= 2 * 2


# The others need files of images: tests/runs/test_presets.py makes some.
WITH_THEIR_DATA = sorted(name for name in PRESETS if load_config(name).data.name == "digits")


@pytest.mark.parametrize("preset", WITH_THEIR_DATA)
def test_every_preset_whose_data_ships_runs_for_a_round(preset, tmp_path):
    quick = ["rounds=1", "train.warmup=0", "train.iterations=1", "train.batch=8", "attack.steps=1", "threads=1"]
    quick += ["attack.feature_steps=1", "measure.steps=1", "measure.clients=1", "convergence.gate=0"]
    quick += ["evaluate.steps=1", "evaluate.clients=1", "evaluate.batch=128", "population.cohort=2"]
    config = load_config(preset, quick)
    run = start(config, tmp_path / "run")
    results = play(run)
    assert results["rounds"] == len(run.session.world.modules)
    assert len(results["modules"]) > 1
    assert all(module["memory_bytes"] <= results["budget_bytes"] for module in results["modules"])


def test_there_are_presets():
    assert "digits" in WITH_THEIR_DATA
