"""A run's folder: started, opened again, and what can be wrong with it."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from fedprophet.errors import CheckpointError, ConfigError
from fedprophet.report.folders import read_run
from fedprophet.runs.checkpoint import _digest, _dump
from fedprophet.runs.play import play
from fedprophet.runs.run import checkpoints_of, open_to_read, reopen, start


def test_runs_without_a_name_are_numbered(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [start(tiny({"method": method})).files.path for method in ("fedprophet", "jfat", "fedprophet")]
    assert list(map(str, paths)) == ["runs/digits-fedprophet-1", "runs/digits-jfat-1", "runs/digits-fedprophet-2"]


def test_a_folder_that_is_taken_is_refused_and_left_alone(tiny, tmp_path):
    start(tiny(), tmp_path / "run")
    before = (tmp_path / "run" / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match=r"already holds a run\. Resume it with: fedprophet train --resume"):
        start(tiny({"seed": 4}), tmp_path / "run")
    assert (tmp_path / "run" / "config.toml").read_bytes() == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="is not empty"):
        start(tiny(), tmp_path / "full")
    with pytest.raises(ConfigError, match=r"letter\.txt is a file\. Give a folder"):
        start(tiny(), tmp_path / "full" / "letter.txt")
    with pytest.raises(ConfigError, match=r"letter\.txt is a file, so that .*letter\.txt/below/run cannot be made"):
        start(tiny(), tmp_path / "full" / "letter.txt" / "below" / "run")


def test_an_empty_folder_is_taken_also_with_what_a_killed_start_left(tiny, tmp_path):
    for names in ((), (".lock", ".config.toml.tmp")):
        folder = tmp_path / f"{len(names)}"
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        start(tiny(), folder)


def test_a_mistake_in_the_configuration_leaves_no_folder(tiny, tmp_path):
    for settings in ({"memory.budget": 10}, {"model.name": "vgg17"}, {"method": "x"}):
        with pytest.raises(Exception, match=r"budget|vgg16|method"):
            start(tiny(settings), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_folder_without_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(CheckpointError, match=r"there is no run in .*: it has no config\.toml"):
            reopen(path)


def test_a_folder_of_runs_names_some(tmp_path):
    for name in "dcba":
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    runs = tmp_path / "runs"
    for read in (reopen, open_to_read, read_run):
        with pytest.raises(CheckpointError) as error:
            read(runs)
        assert str(error.value) == (
            f"there is no run in {runs}: it has no config.toml. It is a folder of runs: {runs / 'a'}, {runs / 'b'}, "
            f"{runs / 'c'} and 1 more. Give the folder of a run"
        )


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(stopped, contents, undisturbed):
    before, newest = (
        {file.name: file for file in (stopped / "checkpoints" / name).glob("tensors-*")}
        for name in ("round-000002", "round-000003")
    )
    (own,) = newest.keys() - before.keys()
    newest[own].write_bytes(newest[own].read_bytes()[:-100])
    run = reopen(stopped)
    assert run.state.round == 2
    assert any("round 3" in note and "damaged" in note for note in run.notes)
    play(run)
    assert contents(stopped) == undisturbed


def test_a_checkpoint_of_another_configuration_names_the_keys(tiny, small, stopped, tmp_path):
    start(tiny({**small, "seed": 1}), tmp_path / "other")
    shutil.copytree(stopped / "checkpoints", tmp_path / "other" / "checkpoints")
    with pytest.raises(CheckpointError, match="another configuration: seed: here 1, there 0"):
        reopen(tmp_path / "other")


def test_a_run_does_not_go_on_with_other_training_images(tiny, small, stopped, tmp_path):
    start(tiny({**small, "data.mirror": True}), tmp_path / "other")
    shutil.copytree(stopped / "checkpoints", tmp_path / "other" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"another configuration: data\.mirror: here true, there false"):
        reopen(tmp_path / "other")


def test_a_run_on_other_machines_goes_on_there_and_can_be_read_when_it_is_finished(stopped, finished, contents):
    for path in (stopped, finished):
        (path / "flower.json").write_text('{"run": "ab", "deployed": true}')
    command = f"Resume it with: flwr run APP SERVER --run-config 'out=\"{stopped}\" resume=true'"
    for open_ in (reopen, open_to_read):
        with pytest.raises(CheckpointError, match=re.escape(command)):
            open_(stopped)
    with pytest.raises(CheckpointError, match="are on other machines, and keep layers of their own"):
        reopen(finished)
    run = open_to_read(finished)
    assert run.away
    assert run.state.round == json.loads(contents(finished)["results.json"])["rounds"] == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {"stage": 7},
        lambda state: {"model": {name: value for name, value in state.model.items() if name != "features.0.weight"}},
        lambda state: {"model": {name: value.double() for name, value in state.model.items()}},
        lambda state: {"best_model": {name: value[:1] for name, value in state.best_model.items()}},
    ],
)
def test_a_whole_state_that_is_not_of_this_run_is_refused(stopped, change):
    run = reopen(stopped)
    changed = replace(run.state, **change(run.state))
    checkpoints_of(run.files, run.session.config).save(changed, run.state.round, run.contents)
    with pytest.raises(CheckpointError, match="does not fit this run: it was changed by hand"):
        reopen(stopped)


def test_a_run_from_before_norm_layers_had_settings_goes_on(stopped, contents, undisturbed):
    """Its files lack the keys of the configuration that came later."""
    for file in stopped.glob("checkpoints/*/state.json"):
        document = json.loads(file.read_bytes())
        del document["digest"], document["config"]["norm"]
        for key in ("calibration", "smoothing", "proximal"):
            del document["config"]["train"][key]
        file.write_bytes(_dump({**document, "digest": _digest(_dump(document))}))
    text = (stopped / "config.toml").read_text()
    head, _, rest = text.partition("[norm]")
    lines = [line for line in head.splitlines() if not line.startswith(("calibration", "smoothing", "proximal"))]
    (stopped / "config.toml").write_text("\n".join(lines) + "\n[" + rest.partition("\n[")[2])
    assert "[norm]" not in (stopped / "config.toml").read_text()
    run = reopen(stopped)
    assert run.state.round == 3
    play(run)
    assert contents(stopped) == undisturbed
