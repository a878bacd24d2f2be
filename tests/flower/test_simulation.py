"""Flower's simulation gives the plain engine's bytes, for every family of methods; it stops, resumes and cleans up.

Starting Ray takes ten seconds, so the runs of the families share one simulation, as `flwr run` plays them.
A process has one simulation at a time: tests that start their own come first.
"""

import importlib.util
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("ray") is None:  # importing it here would let it read its settings too early
    pytest.skip("Flower's simulation is not installed", allow_module_level=True)

from fedprophet.data import load
from fedprophet.errors import CheckpointError, ConfigError, TrainingError
from fedprophet.flower import simulation
from fedprophet.flower.server_app import engine_on
from fedprophet.flower.simulation import Simulation
from fedprophet.messages.tasks import Adopt
from fedprophet.messages.values import SERVER
from fedprophet.runs.journal import Journal
from fedprophet.runs.observer import Observer
from fedprophet.runs.play import play
from fedprophet.runs.run import RunStoppedError, reopen, start
from fedprophet.runs.session import assemble

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "fedprophet": {"rounds": 2, "train.warmup": 0},
    "jfat": {"method": "jfat", "rounds": 2},
    "heterofl": {"method": "heterofl", "rounds": 2, "population.cohort": 3},
    "feddf": {"method": "feddf", "rounds": 2, "distillation.public": 40, "distillation.iterations": 3},
    "fedrbn": {"method": "fedrbn", "rounds": 2, "population.cohort": 3, "memory.budget": "100%"},
    "refreshed": {
        "method": "heterofl",
        "rounds": 1,
        "train.warmup": 0,
        "population.cohort": 3,
        "train.calibration": "labels",
        "norm.layers": "statistics-local",
        "norm.newcomers": "average",
        "norm.refresh": "attacked",
        "train.weighting": "boundary",
        "train.consistency": 0.5,
    },
    "refreshed after each stage": {
        "rounds": 1,
        "train.warmup": 0,
        "norm.layers": "shared",
        "norm.refresh": "clean",
        "norm.refresh_after": "stage",
        "norm.refresh_layers": "in-turn",
    },
}
pytestmark = pytest.mark.usefixtures("ray_starts")
SIMULATED = {"engine": "flower-sim", "threads": 2}
SMALL = {"method": "jfat", "rounds": 3, "train.iterations": 1, "attack.steps": 1, "evaluate.clients": 2}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Every test ends with the threads that it began with."""
    yield
    assert torch.get_num_threads() == 1


def content(run: Path) -> dict[str, Any]:
    """Return what a run wrote: the model, the clients' layers, and its journal but for what Flower adds to it."""
    files = {str(file.relative_to(run)): file.read_bytes() for file in run.glob("clients/**/*.safetensors")}
    files["model"] = (run / "model.safetensors").read_bytes()
    added = ("wire", "faults")
    return files | {"journal": [without(record, added) for record in Journal(run / "journal.jsonl").read()]}


def without(record: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}


class StoppedIn(Observer):
    """Presses Ctrl-C in the middle of a round, while clients are at work."""

    def __init__(self, turn: int) -> None:
        self.turn, self.round = turn, 1

    def round_done(self, record, seconds) -> None:
        self.round = record["round"] + 1

    def task_done(self, kind, done, total) -> None:
        if self.round == self.turn and kind == "train" and done == 1:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_stopped_and_resumed_run_is_the_same(tiny, tmp_path, monkeypatch, capfd):
    """The engine of the command line: it is started by a name, is stopped in the middle, and starts again."""
    room = Path(tempfile.mkdtemp(dir="/tmp", prefix="t-"))
    monkeypatch.setattr(simulation, "_SHORT", room)
    (room / "fp-ray-999999999-x").mkdir()  # of a process that was killed
    monkeypatch.chdir(tmp_path)  # the run's folder is a relative path, with a blank
    play(start(tiny({**SMALL, "engine": "plain"}), Path("plain")))
    handlers, path = logging.getLogger("flwr").handlers, os.environ.get("PYTHONPATH")
    run = start(tiny({**SMALL, **SIMULATED}), Path("a run"))
    with pytest.raises(RunStoppedError, match=r"stopped after round 1; nothing is lost.*--resume 'a run'"):
        play(run, StoppedIn(2))
    identity = Path("a run/flower.json").read_bytes()
    stored = min(Path("a run/clients").rglob("*.safetensors"))
    sound = stored.read_bytes()
    stored.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"the stored layers in {stored} cannot be read"):
        play(reopen(Path("a run")))
    stored.write_bytes(sound)
    play(reopen(Path("a run")))
    assert content(Path("a run")) == content(Path("plain"))
    known = [reopen(Path(name)).contents for name in ("a run", "plain")]
    assert known[0].clients == known[1].clients, "the server looks at what the actors have written"
    assert known[0].clients
    assert Path("a run/flower.json").read_bytes() == identity
    assert json.loads(identity)["deployed"] is False
    # Nothing reached the terminal, and nothing is left behind.
    assert capfd.readouterr() == ("", "")
    assert Path("a run/flower.log").stat().st_size > 0
    assert logging.getLogger("flwr").handlers == handlers
    assert os.environ.get("PYTHONPATH") == path
    assert not list(room.iterdir())
    room.rmdir()


def test_simulation_that_does_not_start_says_why(tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such cluster")

    monkeypatch.setattr(simulation, "run_simulation", fail)
    broken = Simulation(clients=1, cpus=1, cores=1, log_file=tmp_path / "flower.log")
    with pytest.raises(TrainingError, match=r"Flower's simulation failed: no such cluster.*flower.log says more"):
        broken.grid()
    broken.close(at_once=False)


@pytest.fixture(scope="module")
def grid(tmp_path_factory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("simulation")
    shared = Simulation(clients=6, cpus=1, cores=2, log_file=folder / "flower.log")
    yield shared.grid()
    shared.close(at_once=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bytes_as_the_plain_engine(family, grid, tiny, tmp_path):
    config = tiny({**FAMILIES[family], "engine": "plain"})
    play(start(config, tmp_path / "plain run"))
    simulated = tmp_path / "simulated run"
    play(start(config.model_copy(update={"engine": "flower-sim"}), simulated, engine=engine_on(grid, True)))
    assert content(simulated) == content(tmp_path / "plain run")
    records = Journal(simulated / "journal.jsonl").read()
    assert all(record["faults"] == {} for record in records)
    assert all(min(record["wire"]["sent"], record["wire"]["received"]) > 0 for record in records)
    assert all((record["wire"]["whole_model"] > 0) == ("refresh" not in record) for record in records), (
        "nothing is trained then"
    )
    results, plain = (json.loads((tmp_path / name / "results.json").read_bytes()) for name in (simulated, "plain run"))
    assert results["engines"] == [{**plain["engines"][0], "engine": "flower-sim"}]
    assert without(results, ("wire", "faults", "closing", "engines")) == without(plain, ("engines",))


@pytest.mark.slow
def test_second_simulation_in_a_process_is_refused(grid, tmp_path):
    with pytest.raises(TrainingError, match="already has a simulation"):
        Simulation(clients=1, cpus=1, cores=1, log_file=tmp_path / "flower.log")


def test_server_tasks_start_no_simulation(tiny):
    session = assemble(tiny({**SMALL, **SIMULATED}))
    (update,) = session.engine.map([Adopt(round=1, client=SERVER, seed=0)])
    assert update.client == SERVER
    assert session.engine._simulation is None
    session.close()
    assert session.engine.account() == {"wire": {"sent": 0, "received": 0, "whole_model": 0}, "faults": {}}


def test_one_thread_until_it_is_closed(tiny):
    torch.set_num_threads(3)
    session = assemble(tiny({**SMALL, **SIMULATED}))
    assert torch.get_num_threads() == 1
    session.close()
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)


def test_data_of_your_own_is_refused_before_anything_is_written(tiny, tmp_path):
    with pytest.raises(ConfigError, match="not data passed in"):
        start(tiny({**SMALL, **SIMULATED}), tmp_path / "run", dataset=load("digits"))
    assert not (tmp_path / "run").exists()


def test_client_that_needs_more_cores_than_there_are(tiny):
    with pytest.raises(ConfigError, match=r"flower.cpus: a client needs 3 cores, but the run has 2"):
        assemble(tiny({**SMALL, **SIMULATED, "flower.cpus": 3}))
