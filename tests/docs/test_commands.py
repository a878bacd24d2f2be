"""Every command in the README and the docs runs as it is written there, with sizes that make it quick.

A page's commands run in their order, in a folder of their own, by bash. `fedprophet` is a program that hands its
arguments to this process, which forks one that has loaded torch already (`processes`). What cannot run in a test is in
`NOT_RUN`; its options are checked all the same.
"""

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from click import UsageError
from documented import NO_CODE, PAGES, PROGRAMS, ROOT, SHELL, Command, blocks, commands, mentions
from safetensors.torch import save_file
from typer.main import get_command

from fedprophet.cli import app
from fedprophet.config.load import load_config
from fedprophet.deploy.keys import make_key_pair
from fedprophet.errors import FedProphetError
from fedprophet.models import build
from fedprophet.runs.play import play
from fedprophet.runs.run import start

NOT_RUN = {
    r"make .*": "would install an environment, or run the tests within the tests",
    r"\.venv/bin/pre-commit install": "changes the repository",
    r"pip install .*": "would install packages from the network",
    r"fedprophet data get caltech256 .*": "downloads 1.2 GB (tests/data/test_fetch.py)",
    r"fedprophet train .*model\.weights=imagenet": "downloads weights (tests/models/test_weights.py)",
    r"fedprophet train .*--engine cuda.*": "needs a GPU (tests/engines/test_cuda.py)",
    r"fedprophet train .*--engine flower-sim": "starts Ray (tests/flower/test_simulation.py)",
    r"fedprophet watch .*--serve.*": "serves until Ctrl-C (tests/cli/test_watch.py)",
    r"fedprophet reproduce (all|table[23] ?(?!.*--no-train).*)": "trains for minutes (tests/cli/test_reproduce.py)",
    r"flwr run .*": "leaves a server behind (tests/flower/test_flwr_run.py)",
    r"pkill .*": "ends whatever server is running on this machine",
    r"scp .*": "needs another machine",
    r"fedprophet deploy (run|logs|stop) .*": "needs a server and its nodes (tests/e2e/test_deployment.py)",
    r"python benchmarks/.*": "trains for minutes",
}
"""Commands that are not run, and why not, or which other test runs them."""

RUN, JFAT = "cp -r $FINISHED", "cp -r $JOINT"
PILOT = "fedprophet deploy init pilot --nodes 2"
GIVEN = {
    "CONTRIBUTING.md": "mkdir -p docs/reference",
    "docs/getting-started.md": f"mkdir runs; {RUN} runs/digits-fedprophet-1",
    "docs/how-to/compare.md": f"mkdir runs; {RUN} runs/one; {JFAT} runs/two",
    "docs/how-to/evaluate.md": f"mkdir runs; {RUN} runs/try",
    "docs/how-to/move.md": f"mkdir runs; {RUN} runs/cifar10-fedprophet-1",
    "docs/how-to/production.md": f"{PILOT}; {RUN} pilot/runs/run-1",
    "docs/how-to/report.md": f"mkdir runs; {RUN} runs/digits-fedprophet-1; {JFAT} runs/digits-jfat-1",
    "docs/how-to/reproduce.md": 'ln -s "${PYTHONPATH%/src}/benchmarks" benchmarks',
    "docs/how-to/watch.md": f"mkdir runs; {RUN} runs/digits-fedprophet-1",
    "docs/how-to/resume.md": f"mkdir runs; {RUN} runs/digits-fedprophet-1",
    "docs/how-to/robust.md": f"{RUN} RUN",
    "docs/reference/commands.md": (
        f"mkdir runs; {RUN} runs/digits-fedprophet-1; {JFAT} runs/digits-jfat-1; {RUN} runs/cifar10-fedprophet-1"
    ),
}
"""What a page takes for granted before its first command: finished runs, mostly."""

FIRST = {
    ("docs/how-to/deploy.md", "fedprophet deploy init pilot --nodes 2 --server fl.example.org --config"): "rm -r pilot",
    ("docs/how-to/deploy.md", "fedprophet deploy add-node pilot --public-key"): "[ -e node.key.pub ] || cp $KEY .",
    ("docs/how-to/deploy.md", "fedprophet deploy node node-0"): "mv pilot/nodes/node-* .",
    ("docs/how-to/move.md", "fedprophet runs unpack"): "mv runs/*.pack . && rm -r runs",
    ("docs/how-to/production.md", "fedprophet deploy add-node pilot --client 1"): "rm -r pilot/nodes/node-1",
    ("docs/reference/commands.md", "fedprophet runs unpack cifar10"): "mv runs/*.pack . && rm -r runs/cifar10*",
    ("docs/reference/commands.md", "fedprophet deploy init pilot --config"): "rm -r pilot",
    ("docs/reference/commands.md", "fedprophet deploy add-node pilot --public-key"): "cp $KEY .",
    ("docs/reference/commands.md", "fedprophet deploy node node-0"): "cp -r pilot/nodes/node-0 . || true",
}
"""What a reader does between two commands, as the page says: on the other machine, after moving something away."""

LANGUAGES = {NO_CODE, SHELL, "ini", "python", "toml"}
PLACEHOLDERS = {"FILE": "start.safetensors", "HOST": "fl.example.org", "N": "$NEWEST", "PILOT": "pilot"}
CODES = {"fedprophet data check caltech256 --root data": 2}
"""Exit codes that are not 0: of the 256 classes, the stand-in for the photographs has two."""

SIZES = {
    "rounds": 1,
    "threads": 1,
    "population.cohort": 2,
    "train.iterations": 1,
    "train.batch": 8,
    "train.warmup": 0,
    "attack.steps": 1,
    "attack.feature_steps": 1,
    "convergence.gate": 0,
    "evaluate.steps": 1,
    "evaluate.clients": 2,
    "evaluate.test_samples": 20,
    "measure.clients": 2,
    "measure.steps": 1,
    "distillation.iterations": 1,
}
NARROW = {"model.options.width": 8}
SEVEN = {**NARROW, "memory.budget": "20%", "population.clients": 2000}
"""A narrow VGG16 in as many modules as the paper's; each client has 25 images."""


def settings(values: Mapping[str, Any]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def shrunk(arguments: list[str]) -> list[str]:
    """Return arguments that do the same with less: later options and settings replace earlier ones."""
    narrow = NARROW if any(word.startswith(("cifar10-", "caltech256-")) for word in arguments) else {}
    match arguments:
        case ["train", *rest] if "--resume" not in rest:
            return [*arguments, *settings({**SIZES, **narrow})]
        case ["evaluate", *_]:
            return [*arguments, "--samples", "2"]
        case ["bench", "--growth", *_]:
            return [*arguments, "--repeat", "1", "--sizes", "100"]
        case ["bench", *_]:
            return [*arguments, "--engine", "plain", "--repeat", "1", "--limit", "0", *settings({**SIZES, **SEVEN})]
        case ["deploy", "server" | "node", *_]:  # everything but becoming Flower's program
            return [*arguments, "--print"]
    return arguments


# What pages take for granted ------------------------------------------------------------------------------------------


def write_cifar10(folder: Path) -> None:
    folder.mkdir(parents=True)
    records = np.zeros((10_000, 3073), np.uint8)
    records[:, 0] = np.arange(10_000) % 10
    records[:, 1:] = records[:, :1] * 20
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        records.tofile(folder / name)


def write_photographs(folder: Path, *names: str) -> None:
    images = pytest.importorskip("PIL.Image")
    for label, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for number in range(60):
            images.new("RGB", (8, 8), (4 * number, 200 * label, 0)).save(folder / name / f"{number:04}.png")


@pytest.fixture(scope="module")
def world(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with what all pages share: two finished runs, data, starting weights."""
    folder = tmp_path_factory.mktemp("world")
    for name, method in (("finished", "fedprophet"), ("joint", "jfat")):
        play(start(tiny({**SIZES, "method": method}), folder / name))
    write_cifar10(folder / "data" / "cifar-10-batches-bin")
    write_photographs(folder / "data" / "256_ObjectCategories", "001.ak47", "002.american-flag")
    write_photographs(folder / "photos", "cat", "dog")
    save_file(build("vgg16", (3, 32, 32), 10, width=8).state_dict(), folder / "start.safetensors")
    (folder / "node.key.pub").write_bytes(make_key_pair("a device").public)
    yield folder
    shutil.rmtree(folder / "data")  # 184 MB, which pytest would keep for three sessions


# How they run ---------------------------------------------------------------------------------------------------------

PROGRAM = """\
import os, sys
from multiprocessing.connection import Client

connection = Client(os.environ["FEDPROPHET_DOCS"], "AF_UNIX")
connection.send((sys.argv[1:], os.getcwd(), os.environ["HOME"]))
code, out, err = connection.recv()
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


@dataclass(frozen=True)
class Ended:
    code: int
    said: str


class Shell:
    """bash, with a `fedprophet` that runs in processes forked from one that has loaded everything."""

    def __init__(self, context: Any, folder: Path, world: Path) -> None:
        self.context, self.logs, self.count = context, folder / "logs", 0
        self.logs.mkdir()
        self.listener = Listener(family="AF_UNIX")
        programs = folder / "programs"
        programs.mkdir()
        (programs / "ask.py").write_text(PROGRAM)
        # A first line may name no interpreter whose path has a space.
        call = shlex.join([sys.executable, "-SE", str(programs / "ask.py")])
        (programs / "fedprophet").write_text(f'#!/bin/sh\nexec {call} "$@"\n')
        (programs / "fedprophet").chmod(stat.S_IRWXU)
        newest = sorted((world / "finished" / "checkpoints").iterdir())[-1].name
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT / "src"),
            "FEDPROPHET_DOCS": str(self.listener.address),
            "FINISHED": str(world / "finished"),
            "JOINT": str(world / "joint"),
            "KEY": str(world / "node.key.pub"),
            "NEWEST": str(int(newest.rpartition("-")[2])),
        }
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection = self.listener.accept()
            except OSError:  # it was closed
                return
            self._answer(connection)

    def _answer(self, connection: Connection) -> None:
        arguments, folder, home = connection.recv()
        self.count += 1
        log = self.logs / str(self.count)
        job = processes.Command(
            self.context, shrunk(arguments), Path(folder), log, group=True, environment={"HOME": home}
        )
        connection.send((job.code, job.stdout, job.stderr))
        connection.close()

    def run(self, text: str, folder: Path) -> Ended:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", text],
            cwd=folder,
            env={**self.environment, "HOME": str(folder / "home")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=processes.PATIENCE,
            check=False,
        )
        return Ended(done.returncode, done.stdout)


@pytest.fixture(scope="module")
def shell(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with processes.forking() as context:
        made = Shell(context, tmp_path_factory.mktemp("shell"), world)
        yield made
        made.listener.close()


@pytest.fixture(scope="module")
def ended(shell: Shell, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Mapping[int, Ended]]:
    """Return a function that runs a page's commands once, and gives how each ended, by its line."""
    done: dict[str, Mapping[int, Ended]] = {}

    def of(page: str) -> Mapping[int, Ended]:
        if page not in done:
            done[page] = play_page(page, shell, world, tmp_path_factory.mktemp("page"))
        return done[page]

    return of


def play_page(page: str, shell: Shell, world: Path, folder: Path) -> dict[int, Ended]:
    for name in ("data", "photos", "start.safetensors"):
        (folder / name).symlink_to(world / name)
    for block in blocks(page):
        if block.file and block.language == "toml":
            (folder / block.file).write_text(block.text, encoding="utf-8")
    ready = shell.run(GIVEN.get(page, ""), folder)
    assert ready.code == 0, ready.said
    results = {}
    for command in commands(page):
        before = [text for (where, begins), text in FIRST.items() if where == page and command.text.startswith(begins)]
        if reason_not_to_run(command.text) is None:
            results[command.line] = shell.run("; ".join([*before, filled(command.text)]), folder)
    return results


def filled(text: str) -> str:
    """Return a command with something in the place of each placeholder."""
    return re.sub(r"(?<=[\s=])[A-Z]+\b", lambda match: PLACEHOLDERS.get(match[0], match[0]), text)


def reason_not_to_run(text: str) -> str | None:
    return next((reason for pattern, reason in NOT_RUN.items() if re.fullmatch(pattern, text, re.DOTALL)), None)


# Tests ----------------------------------------------------------------------------------------------------------------

ALL = [command for page in PAGES for command in commands(page)]
EXECUTED = [command for command in ALL if reason_not_to_run(command.text) is None]
PARSED = [command for command in ALL if reason_not_to_run(command.text) is not None]
MENTIONED = [command for page in PAGES for command in mentions(page)]


@pytest.mark.slow
@pytest.mark.parametrize("command", EXECUTED, ids=str)
def test_it_runs(command: Command, ended: Callable[[str], Mapping[int, Ended]]) -> None:
    if command.text.startswith("ssh-keygen") and shutil.which("ssh-keygen") is None:
        pytest.skip("there is no ssh-keygen on this machine")
    result = ended(command.page)[command.line]
    assert result.code == CODES.get(command.text, 0), result.said
    assert "Traceback" not in result.said


@pytest.mark.parametrize("command", PARSED, ids=str)
def test_what_is_not_run_is_a_command_with_these_options(command: Command) -> None:
    assert subprocess.run(["bash", "-n", "-c", command.text], check=False).returncode == 0
    check(shlex.split(filled(command.text)))


@pytest.mark.parametrize("command", MENTIONED, ids=str)
def test_what_a_sentence_names_is_a_command_with_these_options(command: Command) -> None:
    check(shlex.split(command.text), complete=False)


def test_every_exception_is_about_a_command_that_is_there() -> None:
    texts = [command.text for command in ALL]
    assert [pattern for pattern in NOT_RUN if not any(re.fullmatch(pattern, text, re.DOTALL) for text in texts)] == []
    assert [key for key in FIRST if not any(c.page == key[0] and c.text.startswith(key[1]) for c in ALL)] == []
    assert set(GIVEN) <= set(PAGES)
    assert set(CODES) <= set(texts)


def test_commands_are_indented_and_everything_else_names_its_language() -> None:
    for block in (block for page in PAGES for block in blocks(page)):
        assert block.language in LANGUAGES, f"{block.page}:{block.line}"
        if block.language == NO_CODE:
            lines = (line for line in block.text.splitlines() if "[OPTIONS]" not in line)
            assert not [line for line in lines if is_command(line)], f"{block.page}:{block.line}"


def is_command(line: str) -> bool:
    program, *rest = line.split() or [""]
    known = get_command(app).commands if program == "fedprophet" else rest[:1]
    return program in PROGRAMS and bool(rest) and rest[0] in known


def test_pages_were_read() -> None:
    assert len(EXECUTED) > 90
    assert {command.page for command in EXECUTED} >= {"README.md", "docs/index.md", "docs/how-to/deploy.md"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("fedprophet train digits --sett seed=1", "--sett"),
        ("fedprophet trian", "trian"),
        ("fedprophet train digits --set sed=1", "sed"),
        ("fedprophet export runs/first", "out"),
        ("flwr run . --streams", "--streams"),
        ("make everything", "everything"),
        ("pip install 'fedprophet[flowers]'", "flowers"),
        ("pip install -c constraint.txt .", "constraint.txt"),
        ("python benchmarks/digits.py --sedes 3", "--sedes"),
    ],
)
def test_the_check_finds_what_is_wrong(text: str, complaint: str) -> None:
    with pytest.raises((AssertionError, FedProphetError, UsageError), match=complaint):
        check(shlex.split(text))


# Checks of commands that do not run -----------------------------------------------------------------------------------


def check(words: list[str], complete: bool = True) -> None:
    """Raise an error if a command does not exist or has no such option; if it is complete, it must also parse."""
    checks = {
        "fedprophet": check_fedprophet,
        "flwr": check_flwr,
        "make": check_make,
        "pip": check_pip,
        "python": check_python,
    }
    program, *arguments = words
    if program in checks:
        checks[program](arguments, complete)


def check_fedprophet(arguments: list[str], complete: bool) -> None:
    command, rest = found(get_command(app), arguments)
    check_options(command, rest)
    if complete:
        numbers = ["1" if word == "$NEWEST" else word for word in rest]
        given = command.make_context("fedprophet", numbers).params
        if command.name == "train" and given["resume"] is None:
            load_config(given["preset"], given["settings"] or [])


def check_flwr(arguments: list[str], complete: bool) -> None:
    check_options(*found(get_command(pytest.importorskip("flwr.cli.app").app), arguments))


def found(command: Any, arguments: list[str]) -> tuple[Any, list[str]]:
    """Return the command that the first words name, and the other words."""
    while hasattr(command, "commands") and arguments and not arguments[0].startswith("-"):
        assert arguments[0] in command.commands, f"there is no command {arguments[0]}"
        command, arguments = command.commands[arguments[0]], arguments[1:]
    return command, arguments


def check_options(command: Any, arguments: list[str]) -> None:
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    unknown = {word.partition("=")[0] for word in arguments if word.startswith("--")} - known
    assert not unknown, f"{command.name} has no {unknown}"


def check_make(arguments: list[str], complete: bool) -> None:
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert set(arguments) <= set(rules), f"the Makefile has no {set(arguments) - set(rules)}"


def check_pip(arguments: list[str], complete: bool) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert arguments[0] == "install"
    for word in arguments[1:]:
        wanted = re.fullmatch(r"(?:\.|[a-z][a-z0-9-]*)(?:\[(.*)\])?", word)
        assert wanted or word == "-c" or (ROOT / word).is_file(), f"there is no {word}"
        unknown = set(wanted[1].split(",") if wanted and wanted[1] else ()) - set(extras)
        assert not unknown, f"there is no extra {unknown}"


def check_python(arguments: list[str], complete: bool) -> None:
    if arguments[0] == "-m":
        place = ROOT / "src" / arguments[1].replace(".", "/")
        outside = arguments[1].partition(".")[0] != "fedprophet"
        assert outside or place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), arguments[1]
        return
    text = (ROOT / arguments[0]).read_text("utf-8")
    unknown = [word for word in arguments[1:] if word.startswith("--") and f'"{word}"' not in text]
    assert not unknown, f"{arguments[0]} has no {unknown}"
