"""Starting and watching runs of a pilot, with Flower's own command `flwr`."""

import json
import shlex
import subprocess
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import tomlkit

from fedprophet.deploy import DeployError, environment
from fedprophet.deploy.control import Control, NoAnswerError, RunState, connected
from fedprophet.deploy.pilot import CONNECTION, Pilot, write_connection
from fedprophet.errors import ConfigError
from fedprophet.runs.files import RunFiles
from fedprophet.storage.files import write_atomic

SETTLED_SECONDS = 10.0
"""How long after a run's last line its end may take to be known."""


def fresh_folder(pilot: Pilot, name: str | None) -> Path:
    """Return a folder for a new run: the name asked for, or the first free number."""
    if name is None:
        names = (f"run-{number}" for number in count(1))
        name = next(name for name in names if not (pilot.runs / name).exists())
    folder = _folder(pilot, name)
    if RunFiles(folder).config.exists():
        command = f"fedprophet deploy run {pilot.typed} --name {shlex.quote(name)} --resume"
        raise ConfigError(f"{folder} already holds a run. Resume it with: {command}; or give another name")
    return folder


def stopped_folder(pilot: Pilot, name: str | None) -> Path:
    """Return the folder of the run to resume: the name asked for, or the newest that has not finished."""
    if name is not None:
        folder = _folder(pilot, name)
        if not RunFiles(folder).config.exists():
            raise ConfigError(
                f"{folder} holds no run. Start one: fedprophet deploy run {pilot.typed} --name {shlex.quote(name)}"
            )
        return folder
    started = [path.parent for path in pilot.runs.glob("*/config.toml")]
    unfinished = [path for path in started if not RunFiles(path).results.exists()]
    if not unfinished:
        what = "all runs there have finished" if started else "no run was started there"
        raise ConfigError(f"{pilot.runs}: {what}. Start one: fedprophet deploy run {pilot.typed}")
    return max(unfinished, key=lambda path: RunFiles(path).config.stat().st_mtime_ns)


def _folder(pilot: Pilot, name: str) -> Path:
    if Path(name).name != name or name.startswith("."):
        raise ConfigError(f"--name {name!r} is not the name of a folder. It becomes a folder in {pilot.runs}")
    return pilot.runs / name


def unfinished_runs(control: Control) -> list[RunState]:
    """Return the runs that the server has not finished."""
    return [run for run in control.runs() if not run.over]


def submit(pilot: Pilot, out: Path, resume: bool, from_round: int | None = None, log: Sequence[str] = ()) -> int:
    """Give a run to the server; return its number there. A run is resumed from its newest checkpoint by default."""
    write_connection(pilot)
    settings = pilot.path / "server" / "run.toml"
    table: dict[str, object] = {
        "config": str(pilot.config),
        "out": str(out),
        "resume": resume,
        "from-round": from_round or 0,
        "log": " ".join(log),
    }
    write_atomic(settings, tomlkit.dumps(table).encode())
    command = ["flwr", "run", str(pilot.path / "app"), CONNECTION, "--run-config", str(settings), "--format", "json"]
    done = subprocess.run(command, env=environment(pilot.flower), capture_output=True, text=True, check=False)
    try:
        return int(json.loads(done.stdout)["run-id"])
    except (ValueError, KeyError, TypeError):
        text = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        raise DeployError(f"Flower did not accept the run: {text[-1000:]}") from None


def watch(pilot: Pilot, run_id: int) -> None:
    """Print a run's output until it ends; Ctrl-C stops the printing, not the run."""
    write_connection(pilot)
    command = ["flwr", "log", str(run_id), CONNECTION, "--stream"]
    process = subprocess.Popen(command, env=environment(pilot.flower))
    try:
        process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def outcome(pilot: Pilot, run_id: int) -> RunState:
    """Return how a run ended; raise DeployError if the server stopped first."""
    end = time.monotonic() + SETTLED_SECONDS
    try:
        while True:
            with connected(pilot.file.here, pilot.authority) as control:
                run = next(run for run in control.runs() if run.run_id == run_id)
            if run.over or time.monotonic() > end:
                return run
            time.sleep(0.5)
    except NoAnswerError:
        text = f"Start it again, then resume the run: fedprophet deploy run {pilot.typed} --resume"
        raise DeployError(f"the server stopped before the run had ended. {text}") from None
