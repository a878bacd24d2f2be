"""A run that is started by `flwr run`, with all processes that Flower starts, gives the plain engine's bytes."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

if importlib.util.find_spec("ray") is None:  # importing it here would let it read its settings too early
    pytest.skip("Flower's simulation is not installed", allow_module_level=True)

from processes import free_ports

from fedprophet.config.reference import to_toml
from fedprophet.deploy import environment
from fedprophet.runs.journal import Journal
from fedprophet.runs.play import play
from fedprophet.runs.run import start

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_starts")]

PATIENCE = 600
"""Seconds after which a process is stuck, on a machine with very much else to do."""
SMALL = {
    "method": "jfat",
    "rounds": 2,
    "train.iterations": 1,
    "attack.steps": 1,
    "population.clients": 2,
    "evaluate.clients": 2,
    "evaluate.test_samples": 20,
}


def processes_of(home: Path) -> set[int]:
    """Return the processes that have this home of Flower's in their environment."""
    mark, found = f"FLWR_HOME={home}".encode(), set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found


@pytest.fixture
def flower(tmp_path) -> Iterator[Mapping[str, str]]:
    """Return an environment for Flower with a home and ports of its own; what it leaves running is ended."""
    home, (http, control) = tmp_path / "flower home", free_ports(2)
    ports = {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http), "FLWR_LOCAL_CONTROL_API_PORT": str(control)}
    yield environment(home, {**os.environ, **ports})
    end = time.monotonic() + PATIENCE
    while (left := processes_of(home)) and time.monotonic() < end:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)
    assert not left


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is left running is found in /proc")
def test_flwr_run_gives_the_plain_engines_bytes(flower, tiny, tmp_path):
    config = tiny({**SMALL, "engine": "plain"})
    play(start(config, tmp_path / "plain"))
    file, out = tmp_path / "my config.toml", tmp_path / "a run"
    file.write_text(to_toml(config))
    where = [sys.executable, "-m", "fedprophet.flower"]
    app = subprocess.run(where, env=flower, check=True, capture_output=True, text=True).stdout.strip()
    command = ["flwr", "run", app, "--stream"]
    command += ["--federation-config", "num-supernodes=2 client-resources-num-cpus=1"]
    command += ["--run-config", f'config="{file}" out="{out}"']
    done = subprocess.run(command, env=flower, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (out / "results.json").exists(), done.stdout[-5000:] + done.stderr[-5000:]
    files = [f.relative_to(tmp_path / "plain") for f in tmp_path.glob("plain/clients/**/*.safetensors")]
    assert len(files) >= 2  # the layers of two clients
    for name in (Path("model.safetensors"), *files):
        assert (out / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), name
    assert [record["faults"] for record in Journal(out / "journal.jsonl").read()] == [{}, {}]
    assert "round 2/2" in done.stdout
    assert processes_of(Path(flower["FLWR_HOME"]))  # the server that Flower leaves running
