"""A deployment of real processes on this machine: a server with TLS and registered keys, and two devices.

Every process is the head of a group of its own, and all groups are killed at the end, however it comes.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedprophet.config.load import load_config
from fedprophet.deploy import OFFLINE
from fedprophet.deploy.keys import make_key_pair
from fedprophet.deploy.pilot import open_pilot
from fedprophet.deploy.status import pilot_status
from fedprophet.runs.session import assemble

PATIENCE = 900
"""Seconds after which a process is stuck, on a machine with very much else to do."""
TAG = "FEDPROPHET_TEST_DEPLOYMENT"
SETTINGS = {
    "rounds": 1,
    "threads": 1,
    "model.options.width": 8,
    "memory.budget": "70%",  # two modules
    "train.iterations": 1,
    "train.batch": 8,
    "train.warmup": 0,
    "attack.steps": 1,
    "attack.feature_steps": 1,
    "convergence.gate": 0,
    "evaluate.steps": 1,
    "evaluate.test_samples": 20,
    "measure.steps": 1,
    "norm.layers": "local",  # devices keep something
}
SMALL, LARGE = 0, 1
"""The clients: one has memory for the module in training and no more, the other for both."""
IMPOSTOR = 2
"""A client that comes later, with a key of its own, and says that it is another."""
SPEED = {SMALL: 1e9, LARGE: 4e9}  # a prophet is also faster, so that nobody waits for it
BANDWIDTH = 1e8


def wait_for(true: Callable[[], Any], what: Callable[[], str]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"never happened: {what()}"
        time.sleep(0.05)


class Job:
    """A command of fedprophet that runs, at the head of a group of processes."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=log.parent,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def code(self) -> int:
        wait_for(lambda: not self.running, lambda: self.said[-3000:])
        return self.process.returncode

    def environment(self) -> dict[str, str]:
        text = Path(f"/proc/{self.process.pid}/environ").read_text()
        return dict(entry.split("=", 1) for entry in text.split("\0") if entry)

    def kill(self) -> None:
        """`kill -9` of all its processes at once, as when a machine loses its power."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Deployment:
    """A pilot's folder and the processes that were started for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "pilot"
        self.memory: dict[int, int] = {}
        self.ports: list[int] = []
        self.jobs: list[Job] = []
        self.named: dict[str, Job] = {}
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in OFFLINE},
            "HOME": str(folder / "user"),
            "OMP_NUM_THREADS": "1",
            TAG: str(folder),
        }
        (folder / "user").mkdir()

    def start(self, *arguments: object, log: str) -> Job:
        command = [str(Path(sys.executable).with_name("fedprophet")), *map(str, arguments)]
        self.jobs.append(Job(command, self.folder / f"{log}.log", self.environment))
        return self.jobs[-1]

    def done(self, *arguments: object, log: str) -> str:
        job = self.start(*arguments, log=log)
        assert job.code == 0, job.said
        return job.said

    def server(self, log: str = "server") -> Job:
        return self.start("deploy", "server", self.path, log=log)

    def node(self, folder: Path, log: str | None = None) -> Job:
        return self.start("deploy", "node", folder, log=log or folder.name)

    def status(self) -> dict[str, Any]:
        return pilot_status(open_pilot(self.path))

    def online(self) -> list[str]:
        return [node["name"] for node in self.status()["nodes"] if node["status"] == "online"]

    def home(self, client: int) -> Path:
        return self.path / "nodes" / f"node-{client}" / "home"

    def run(self, name: str) -> Path:
        return self.path / "runs" / name

    def journal(self, name: str) -> list[dict[str, Any]]:
        file = self.run(name) / "journal.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for_round(self, command: Job, name: str, round: int) -> None:
        wait_for(lambda: len(self.journal(name)) == round or not command.running, self.told)
        assert command.running, command.said

    def modules(self) -> dict[Path, int]:
        """Return the modules on the devices' disks; one that is written again has another number."""
        files = (file for client in (SMALL, LARGE) for file in (self.home(client) / "modules").glob("*.safetensors"))
        return {file: file.stat().st_ino for file in files}

    def told(self) -> str:
        return "\n".join(f"--- {job.log.name}\n{job.said[-3000:]}" for job in self.jobs)

    def kill_processes(self, word: str = "") -> None:
        """Kill every process of the deployment that has a word in its command line, also if it has left its group."""
        mark = f"{TAG}={self.folder}".encode()
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                ours = mark in (place / "environ").read_bytes().split(b"\0")
                if ours and word.encode() in (place / "cmdline").read_bytes():
                    os.kill(int(place.name), signal.SIGKILL)

    def close(self) -> None:
        """Kill everything."""
        for job in self.jobs:
            job.kill()
        self.kill_processes()


def change(file: Path, settings: Mapping[str, object]) -> None:
    """Give keys of a TOML file other values, which are written as JSON writes them."""
    text = file.read_text()
    for key, value in settings.items():
        text, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {json.dumps(value)}", text)
        assert count == 1, key
    file.write_text(text)


def make(deployment: Deployment, ports: list[int]) -> None:
    """Make the pilot, say what its devices have to spare, and copy one's folder with a key of its own."""
    port, *others = deployment.ports = ports
    flags = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    deployment.done("deploy", "init", deployment.path, "--nodes", 2, "--port", port, *flags, log="init")
    deployment.memory = {SMALL: assemble(load_config(str(deployment.path / "config.toml"))).budget, LARGE: 10**9}
    nodes = deployment.path / "nodes"
    for client in (SMALL, LARGE):
        settings = {"memory": deployment.memory[client], "flops": SPEED[client], "bandwidth": BANDWIDTH, "threads": 1}
        change(nodes / f"node-{client}" / "node.toml", {**settings, "port": others[client]})
    shutil.copytree(nodes / f"node-{LARGE}", nodes / "thief")
    (nodes / "thief" / "node.key").write_bytes(make_key_pair("thief").private)
    change(nodes / "thief" / "node.toml", {"port": others[2]})
