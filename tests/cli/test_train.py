"""`fedprophet train`: where a run goes, what is printed."""

import errno
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from fedprophet.client.iteration import LocalIteration
from fedprophet.config.reference import to_toml
from fedprophet.runs import play
from fedprophet.runs.session import assemble
from fedprophet.sizes import format_size


@pytest.fixture(scope="module")
def sizes(tiny):
    """Budget, whole model and largest module of a tiny run, as they are printed."""
    session = assemble(tiny())
    largest = max(module.memory for module in session.world.modules)
    return [format_size(size) for size in (session.budget, session.world.cost.total_memory, largest)]


def test_a_run_goes_to_runs_under_the_current_folder(cli, tiny_flags, quick, tmp_path, sizes):
    said = cli("train", *tiny_flags(quick), "--method", "jfat")
    assert said.code == 0
    assert (tmp_path / "runs" / "digits-jfat-1" / "model.safetensors").is_file()
    assert said.out.startswith("jfat on digits: vgg-small ")
    assert sizes[1] in said.out.splitlines()[0]
    assert "round 1/1  eps 0.100  loss " in said.out
    assert "Modules" not in said.out
    assert "\nFiles: runs/digits-jfat-1\n" in said.out


def test_the_table_says_what_a_module_takes_and_reaches(cli, copied, sizes):
    path = copied()
    out = cli("train", "--resume", "run").out
    results = json.loads((path / "results.json").read_text())
    table = out[out.index("Modules") :]
    for module, stage in zip(results["modules"], results["stages"], strict=True):
        memory = module["memory_bytes"]
        assert f"{memory / 1000:.1f} kB" in table
        assert f"{100 * memory / results['budget_bytes']:.1f} %" in table
        assert f"{100 * memory / results['whole_model_bytes']:.1f} %" in table
        assert f"{100 * stage['clean']:.1f} %" in table
        assert f"{100 * stage['adversarial']:.1f} %" in table
    for kind in ("personalised", "global"):
        for attack in ("clean", "pgd2"):
            assert f"{100 * results[kind][attack]['accuracy']:.1f} %" in table
    assert "PGD-2" in table
    (need,) = [line for line in table.splitlines() if line.startswith("- A client needs")]
    assert sizes[2] in need
    assert sizes[1] in need


def test_a_baseline_names_its_best_and_last_round(cli, copied, sizes):
    copied("jfat")
    out = cli("train", "--resume", "run").out
    (need,) = [line for line in out.splitlines() if line.startswith("- Every client trained the whole model")]
    assert sizes[1] in need
    assert "\n- Best round (1): clean " in out
    assert "\n- Last round (1): clean " in out


def test_what_a_client_needs_is_said_where_it_trains_a_part(cli, copied, sizes):
    path = copied("heterofl", fleet__memory_share=0.01)  # no client has more than the budget
    out = cli("train", "--resume", "run").out
    results = json.loads((path / "results.json").read_text())
    least, peak = results["memory"]["least_bytes"], results["memory"]["peak_bytes"]
    assert 0 < least <= peak <= results["budget_bytes"], "or the sentence would be that of the whole model"
    assert "Modules" not in out
    (need,) = [line for line in out.splitlines() if "smallest task" in line]
    assert all(size in need for size in (format_size(least), format_size(peak), sizes[1]))


@pytest.mark.parametrize("method", ["jfat", "fedet", "fedrbn"])
def test_each_table_of_accuracies_says_which_norm_layers_it_was_measured_with(cli, copied, tmp_path, method):
    path = copied(method)
    results = json.loads((path / "results.json").read_text())
    layers, public = results["norm_layers"], results["public_samples"]
    assert len(set(layers.values())) == (1 if method == "fedet" else 2)
    assert public == (180 if method == "fedet" else 0)
    trained = cli("train", "--resume", "run")
    evaluated = cli("evaluate", "run", "--attack", "clean", "--samples", "20")
    for said in (trained, evaluated):
        for kind in ("personalised", "global"):
            (line,) = [line for line in said.out.splitlines() if line.startswith(f"- {kind}: ")]
            assert line.endswith(f"; norm layers: {layers[kind]}")
            assert (str(public) in line) == (kind == "global" and public > 0)
    assert f"\nNorm layers: {layers['global']}.\n" in cli("export", "run", "--out", "model.safetensors").out
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["norm_layers"] == layers["global"]


def test_clients_without_held_out_data_have_no_accuracy(cli, tiny_flags, quick):
    settings = {**quick, "method": "jfat", "population.clients": 1400, "shards.kind": "iid"}
    out = cli("train", *tiny_flags(settings)).out
    assert "1,437 training samples for 1,400 clients: " in out
    assert "no client evaluated any round" in out
    assert "clean" not in json.loads(Path("runs/digits-jfat-1/journal.jsonl").read_text())
    personalised = out[out.index("| personalised") :].splitlines()[0]
    assert personalised.count("–") == 2


def test_a_toml_file_is_a_preset(cli, tiny, quick, tmp_path):
    (tmp_path / "mine.toml").write_text(to_toml(tiny({**quick, "method": "jfat", "seed": 11, "rounds": 2})))
    said = cli("train", "mine.toml", "--set", "rounds=1", "--json")
    assert said.json["seed"] == 11
    assert said.json["rounds"] == 1, "--set comes last"


def test_a_folder_that_holds_a_run_is_left_alone(cli, tiny_flags, quick, copied):
    path = copied()
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    error = cli("train", *tiny_flags({**quick, "seed": 5}), "--out", "run").error
    assert "run already holds a run." in error
    assert "fedprophet train --resume run" in error
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_resuming_a_finished_run_gives_its_results(cli, copied):
    path = copied()
    results = json.loads((path / "results.json").read_text())
    assert cli("train", "--resume", "run", "--json").json == results


def test_a_public_set_larger_than_what_is_held_out_is_a_mistake(cli, tiny_flags, quick, tmp_path):
    """The digits have 360 test images; what is wrong is found before anything is written."""
    for public, text in {400: "the test set has 360 samples", -1: "a whole number of at least 1"}.items():
        error = cli("train", *tiny_flags({**quick, "method": "feddf", "distillation.public": public})).error
        assert "distillation.public: " in error
        assert text in " ".join(error.split())
    assert not (tmp_path / "runs").exists()


def test_a_run_goes_back_to_the_checkpoint_of_a_round(cli, copied):
    path = copied()
    model = (path / "model.safetensors").read_bytes()
    rounds = sorted(int(folder.name.removeprefix("round-")) for folder in (path / "checkpoints").iterdir())
    (path / "model.safetensors").write_bytes(b"of later rounds")
    assert cli("train", "--resume", "run", "--from-round", rounds[0], "--json").json["rounds"] == rounds[-1]
    assert (path / "model.safetensors").read_bytes() == model
    assert "there is no checkpoint of round 99" in cli("train", "--resume", "run", "--from-round", 99).error
    assert "--from-round goes with --resume RUN" in cli("train", "--from-round", 1).error


def test_rounds_are_logged_where_that_is_asked_for(cli, tiny_flags, quick, tmp_path):
    said = cli("train", *tiny_flags({**quick, "method": "jfat"}), "--out", "run", "--log", "tensorboard")
    assert said.code == 0
    assert "note: TensorBoard: tensorboard --logdir run\n" in said.out
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1


def test_a_tracker_that_is_not_there_is_refused_before_training(cli, tiny_flags, quick, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    for name, text in {"wandb": "pip install 'fedprophet[wandb]'", "tensorbord": "Did you mean 'tensorboard'?"}.items():
        assert text in cli("train", *tiny_flags(quick), "--out", "run", "--log", name).error
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["plain", "workers"])
def test_a_plan_that_takes_more_than_predicted_ends_the_run_with_a_sentence(
    engine, cli, tiny_flags, quick, monkeypatch
):
    """Whatever is predicted to take nothing is taken for plain."""
    monkeypatch.setattr(LocalIteration, "attack_peak", lambda self, size: 0)
    monkeypatch.setattr(LocalIteration, "step_peak", lambda self, plan: 0)
    limited = {"memory.enforce": True, "memory.budget": "60%", "fleet.memory_share": 1e-9, "engine": engine}
    said = cli("train", *tiny_flags({**quick, **limited, "threads": 2}))
    assert said.code == 2
    assert "Traceback" not in said.err
    text = " ".join(said.err.split())
    assert re.search(
        r"client \d+, module 1 \(Conv 1, .*\), trained by the plan 'plain': it may take 141\.55 kB, and", text
    )


@pytest.mark.slow
def test_a_budget_in_which_no_plan_fits_is_refused_before_anything_is_trained(cli, tiny_flags, quick):
    said = cli("train", *tiny_flags({**quick, "memory.enforce": True, "method": "jfat", "memory.budget": "20%"}))
    assert said.code == 2
    assert "memory.enforce: the whole model cannot be trained within memory.budget = 20%" in " ".join(said.err.split())
    assert "round 1" not in said.out


class Finalised:
    """An object during whose end Ctrl-C is pressed."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_ctrl_c_that_python_drops_stops_the_run_all_the_same(cli, tiny_flags, quick, monkeypatch):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # `cli` puts it back; in the background it is ignored
    real, dropped = play.play_round, []

    def play_round(*arguments):
        Finalised()
        dropped.append(True)
        time.sleep(60)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(play, "play_round", play_round)
        said = cli("train", *tiny_flags(quick), "--out", "run")
    assert (said.code, dropped) == (130, [True])
    assert said.err == "stopped in its first round; nothing is lost. Resume it with: fedprophet train --resume run\n"
    assert cli("train", "--resume", "run").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["plain", "workers"])
def test_a_full_folder_of_temporary_files_ends_an_enforced_run_that_can_be_resumed(
    cli, tiny_flags, quick, monkeypatch, tmp_path, engine
):
    """The first module's round is played; then there is no room for the features that it passes on."""
    path, real = tmp_path / "run", os.posix_fallocate

    def full(file, offset, size):
        if (path / "journal.jsonl").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, offset, size)

    limited = {"memory.enforce": True, "memory.budget": "60%", "engine": engine, "threads": 2, "rounds": 1}
    limited |= {"train.warmup": 0, "checkpoint.every": 50}
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        said = cli("train", *tiny_flags({**quick, **limited}), "--out", path)
    assert said.code == 2
    assert "Traceback" not in said.err
    folder = re.escape(tempfile.gettempdir())
    expected = (
        rf"^error: cannot write \d+ bytes to a temporary file in {folder}: No space left on device\. Make room there, "
    )
    assert re.search(
        expected + r"or set TMPDIR to another folder\. Resume it with: fedprophet train --resume \S+/run$", said.err
    )
    again = cli("train", "--resume", path)
    assert again.code == 0
    lines = (path / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["module"] for line in lines] == [1, 2]
    assert "begins with its first round again" not in again.out, "the first round was saved"
