"""Real evaluations stopped at real moments; the same command goes on and ends with the same numbers."""

import json
import re
import shlex
import shutil
import signal

import pytest

import fedprophet
from fedprophet.runs.play import play
from fedprophet.runs.run import start

pytestmark = pytest.mark.slow

COMMAND = ("evaluate", "run", "--attack", "clean,pgd60", "--samples", "130", "--json")
TASKS = 2 * (6 + 3) + 2 * 3
"""Two attacks on 6 clients and 3 parts of the test set; two larger balls of the masking check on the same parts."""


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "run"
    settings = {"rounds": 1, "train.warmup": 0, "memory.budget": "100%", "model.name": "cnn3"}
    play(start(tiny(settings), path))
    return path


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture(scope="module")
def undisturbed(trained, tmp_path_factory):
    """In this process: so the command line and the Python API are the same program, too."""
    path = shutil.copytree(trained, tmp_path_factory.mktemp("undisturbed") / "run")
    said = fedprophet.evaluate(path, "clean,pgd60", samples=130)
    return said, (path / "evaluation.json").read_bytes()


def parts(run):
    """Return what is kept so far, line by line."""
    lines = [line for file in (run / "evaluation").glob("*.jsonl") for line in file.read_bytes().split(b"\n")]
    return [line for line in lines if line]


def test_kill_9_again_and_again(launch, run, undisturbed):
    said, written = undisturbed
    commands = []
    for count in (2, 8, 13, 20):
        commands.append(launch(*COMMAND).when(lambda count=count: len(parts(run)) >= count))
        commands[-1].kill()
    # On a busy machine one may be over before it is killed, but hardly all.
    assert -signal.SIGKILL in [command.code for command in commands]
    kept = parts(run)
    last = launch(*COMMAND)
    assert last.json == said
    assert last.stderr == ""
    assert (run / "evaluation.json").read_bytes() == written
    assert parts(run)[: len(kept) - 1] == kept[:-1], "what was kept is not measured again; the last may be torn"
    whole = [json.loads(line)["task"] for line in parts(run) if line.endswith(b'"}')]
    assert len(set(whole)) == len(whole)
    # The masking check does not repeat what was measured in the run's own ball.
    assert len(whole) == TASKS


def test_ctrl_c_says_how_to_go_on(launch, run, undisturbed):
    command = launch(*COMMAND).when(lambda: len(parts(run)) >= 3).signal(signal.SIGINT)
    assert command.code == 130
    assert command.stdout == ""
    said = re.fullmatch(r"stopped; what was measured is kept\. Resume it with: fedprophet (.*)\n", command.stderr)
    assert said, command.stderr
    assert not (run / "evaluation.json").exists()
    assert launch(*shlex.split(said[1]), "--json").json == undisturbed[0]


def test_two_processes_on_one_run(launch, run, undisturbed):
    said, written = undisturbed
    rest = COMMAND[4:]
    first = launch("evaluate", "run", "--attack", "clean", *rest)
    second = launch("evaluate", "run", "--attack", "pgd60", *rest)
    third = launch(*COMMAND)
    assert [command.code for command in (first, second, third)] == [0, 0, 0], (second.stderr, third.stderr)
    assert third.json == said
    assert first.json["global"]["clean"] == said["global"]["clean"]
    assert second.json["global"]["pgd60"] == said["global"]["pgd60"]
    assert json.loads((run / "evaluation.json").read_bytes()) == json.loads(written)
