"""Real processes stopped at real moments; a resume ends with the bytes of a run that nobody disturbed."""

import os
import re
import shlex
import signal
import time
from contextlib import suppress

import pytest

from fedprophet.runs.play import play
from fedprophet.runs.run import start
from fedprophet.storage.locks import folder_lock

pytestmark = pytest.mark.slow


def outcome(path):
    return {name: (path / name).read_bytes() for name in ("journal.jsonl", "model.safetensors", "results.json")}


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory):
    """Played in this process: so the command line and the Python API are the same program, too."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    play(start(tiny(), path))
    return outcome(path)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def test_kill_9_again_and_again(launch, tiny_flags, run, undisturbed):
    commands = [launch("train", *tiny_flags(), "--out", run).when_lines(run / "journal.jsonl", 1)]
    commands[0].kill()
    for lines in (4, 7):
        commands.append(launch("train", "--resume", run).when_lines(run / "journal.jsonl", lines))
        commands[-1].kill()
    # On a busy machine one may be over before it is killed, but hardly all.
    assert -signal.SIGKILL in [command.code for command in commands]
    assert launch("train", "--resume", run).code == 0
    assert outcome(run) == undisturbed


def test_kill_9_before_the_first_checkpoint_and_while_one_is_written(launch, tiny_flags, run, undisturbed):
    launch("train", *tiny_flags(), "--out", run).when((run / "config.toml").exists).kill()
    assert not (run / "checkpoints").exists()
    writing = run / "checkpoints" / "round-000003.tmp"
    launch("train", "--resume", run).when(writing.exists).kill()
    assert launch("train", "--resume", run).code == 0
    assert outcome(run) == undisturbed


def test_kill_9_with_rare_checkpoints_and_a_damaged_newest_one(launch, tiny_flags, run, undisturbed):
    launch("train", *tiny_flags({"checkpoint.every": 3}), "--out", run).when_lines(run / "journal.jsonl", 7).kill()
    newest = max((run / "checkpoints").glob("round-??????"))
    number = int(newest.name.removeprefix("round-"))
    assert number in (6, 9)
    state = newest / "state.json"
    state.write_bytes(state.read_bytes()[:-40])
    last = launch("train", "--resume", run)
    assert last.code == 0
    assert f"note: the checkpoint of round {number} is not used: its state.json is damaged" in last.stdout
    assert f"note: went back to the checkpoint of round {number - 3}" in last.stdout
    assert f"going on after round {number - 3}" in last.stdout
    assert outcome(run) == undisturbed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_kill_write_a_checkpoint_and_say_how_to_resume(launch, tiny_flags, tmp_path, undisturbed, number):
    folder = tmp_path / "my runs, mother's"
    folder.mkdir()
    run = folder / "first one"
    command = launch("train", *tiny_flags({"checkpoint.every": 50}), "--out", "first one", folder=folder)
    command.when_lines(run / "journal.jsonl", 2).signal(number)
    assert command.code == 130
    assert "Traceback" not in command.stderr
    said = re.fullmatch(
        r"stopped after round (\d+); nothing is lost\. Resume it with: fedprophet (.*)\n", command.stderr
    )
    assert said, command.stderr
    assert (run / "checkpoints" / f"round-{int(said[1]):06d}").is_dir()
    assert launch(*shlex.split(said[2]), folder=folder).code == 0
    assert outcome(run) == undisturbed


@pytest.mark.parametrize("moment", ["saving", "closing", "leaving"])
def test_a_second_ctrl_c_changes_nothing(launch, tiny_flags, run, undisturbed, moment):
    """It comes while the checkpoint of the first is written, after that, or when Python is about to end."""
    command = launch("train", *tiny_flags({"checkpoint.every": 50}), "--out", run)
    os.kill(command.when_lines(run / "journal.jsonl", 2).process.pid, signal.SIGINT)
    if moment != "saving":
        command.when(lambda: any((run / "checkpoints").glob("round-??????")))
    if moment == "leaving":
        command.when(lambda: "stopped" in command.stderr)
    while command.process.is_alive():
        with suppress(ProcessLookupError):  # it has ended just now
            os.kill(command.process.pid, signal.SIGINT)
        time.sleep(0.001)
    assert command.code == 130
    assert re.fullmatch(r"stopped after round \d+; nothing is lost\. Resume it with: .*\n", command.stderr)
    assert launch("train", "--resume", run).code == 0
    assert outcome(run) == undisturbed


@pytest.mark.parametrize("method", ["fedet", "heterofl"])
def test_a_baseline_goes_on_after_a_kill(launch, tiny, tiny_flags, tmp_path, method):
    """Architectures and sub-networks have layers of their own on a client, and the server a model for each."""
    settings = {"method": method, "distillation.iterations": 2}
    play(start(tiny(settings), tmp_path / "undisturbed"))
    run = tmp_path / "run"
    launch("train", *tiny_flags(settings), "--out", run).when_lines(run / "journal.jsonl", 2).kill()
    last = launch("train", "--resume", run)
    assert last.code == 0
    assert outcome(run) == outcome(tmp_path / "undisturbed")


def test_resuming_a_finished_run_prints_its_table_again_and_changes_nothing(launch, tiny_flags, run):
    first = launch("train", *tiny_flags(), "--out", run)
    assert first.code == 0
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in run.rglob("*") if file.is_file()}
    again = launch("train", "--resume", run)
    assert again.code == 0
    table = first.stdout[first.stdout.index("Modules") :]
    assert again.stdout.endswith(table)
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in run.rglob("*") if file.is_file()} == before


def test_a_full_disk_leaves_the_checkpoint_before_intact(launch, tiny_flags, run, undisturbed):
    launch("train", *tiny_flags(), "--out", run).when_lines(run / "journal.jsonl", 2).signal(signal.SIGINT)
    kept = {file: file.read_bytes() for file in (run / "checkpoints").rglob("*") if file.is_file()}
    full = launch("train", "--resume", run, limit=30_000)  # more than the journal, less than a checkpoint
    assert full.code == 2
    assert "Traceback" not in full.stderr
    assert re.search(r"error: cannot write .*: File too large\. .*[Mm]ake room there", full.stderr)
    assert {file: file.read_bytes() for file in (run / "checkpoints").rglob("*") if file.is_file()} == kept
    assert launch("train", "--resume", run).code == 0
    assert outcome(run) == undisturbed


def test_two_processes_do_not_work_on_one_run(launch, tiny_flags, run, undisturbed):
    launch("train", *tiny_flags(), "--out", run).when_lines(run / "journal.jsonl", 1).kill()
    with folder_lock(run):  # which a process that works on the run holds
        second = launch("train", "--resume", run)
        assert second.code == 2
    assert "another process is working on" in second.stderr
    assert launch("train", "--resume", run).code == 0
    assert outcome(run) == undisturbed
