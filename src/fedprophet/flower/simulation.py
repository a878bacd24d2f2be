"""Flower's simulation as an engine: its nodes are actors of Ray on this machine, or on a cluster.

The run stays in the main thread, as with every other engine, so that a Ctrl-C reaches it. Flower's simulation calls the
server itself: here it does so in another thread, where the "server" hands Flower's connection to the run and waits.
"""

import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedprophet.engines.registry import EngineParts
from fedprophet.errors import ConfigError, TrainingError
from fedprophet.flower.client_app import make_app
from fedprophet.flower.engine import FlowerEngine, engine_of_simulation, shared_bytes
from fedprophet.flower.offline import CLUSTER, expect_startable_python
from fedprophet.flower.settings import FlowerSettings
from fedprophet.flower.transport import Ledger
from fedprophet.messages.answers import Answer
from fedprophet.messages.tasks import Task
from fedprophet.server.coordinator import Record
from fedprophet.settings.values import CUSTOM
from fedprophet.threads import ONE_THREAD

LOG = "flower.log"
"""The file in the run's folder for the log of Flower and Ray."""
LOGGERS = ("flwr", "ray", "ray._private", "ray.actor", "ray.util")
"""Ray removes the handlers of its own logger when it starts, but not those of the ones below it."""
SECONDS_TO_START = 120.0
SECONDS_TO_FINISH = 10.0
SECONDS_TO_LEAVE = 30.0
_SHORT = Path("/tmp")
"""Ray keeps its sockets in a temporary folder, and their paths must be short."""
_PREFIX = "fp-ray-"


class SimulationEngine:
    """Starts Flower's simulation when the first task goes out, and ends it with `close`.

    It uses `cores` CPU cores: clients run side by side, with flower.cpus cores each.
    """

    def __init__(self, parts: EngineParts, cores: int) -> None:
        _check(parts, cores)
        self._parts, self._cores = parts, cores
        self._ledger = Ledger()
        if parts.clients is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="fedprophet-run-")
        self._home = parts.clients.parent.absolute() if parts.clients else Path(self._temporary.name)
        self._simulation: Simulation | None = None
        self._engine: FlowerEngine | None = None
        self._one_thread = _hold_one_thread(self)

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """Carry out the tasks; answers come in the order in which they arrive, and some may be missing."""
        if self._engine is not None and self._engine.failed:
            self.close()  # an actor that died would fail again
        if not self._one_thread.alive:
            self._one_thread = _hold_one_thread(self)
        if self._engine is None:
            self._engine = engine_of_simulation(self._grid, self._parts, self._home, self._ledger, self._look)
        yield from self._engine.map(tasks)

    def account(self) -> Record:
        """Return the bytes sent and received since the last call, and which clients' answers were left out and why."""
        return self._ledger.close(shared_bytes(self._parts))

    def close(self) -> None:
        """End the simulation. The engine can still be used: it starts a new one."""
        simulation, engine = self._simulation, self._engine
        self._simulation = self._engine = None
        self._one_thread()
        if simulation is not None:
            simulation.close(at_once=engine is not None and engine.busy)

    def _grid(self) -> Grid:
        if self._simulation is None:
            config = self._parts.config
            clients, cpus = config.population.clients, config.of(FlowerSettings).cpus
            self._simulation = Simulation(clients, cpus, self._cores, self._home / LOG)
        return self._simulation.grid()

    def _look(self) -> None:
        if self._simulation is not None:
            self._simulation.look()


def _hold_one_thread(engine: SimulationEngine) -> "weakref.finalize[..., SimulationEngine]":
    """Make torch use one thread, as each client does, until the engine is closed or gone."""
    ONE_THREAD.__enter__()
    return weakref.finalize(engine, ONE_THREAD.__exit__)


def _check(parts: EngineParts, cores: int) -> None:
    """Refuse what a simulation cannot do, before anything is written."""
    config, cpus = parts.config, parts.config.of(FlowerSettings).cpus
    for key, name in {"model": config.model.name, "data": config.data.name}.items():
        if name == CUSTOM:
            raise ConfigError(
                f'engine = "flower-sim": its processes know only what the configuration names, not {key} passed in '
                'from Python. Use engine = "auto"'
            )
    if CLUSTER not in os.environ and cpus > cores:
        raise ConfigError(
            f"flower.cpus: a client needs {cpus} cores, but the run has {cores}. Lower flower.cpus, or raise threads"
        )
    expect_startable_python()


class Simulation:
    """A Flower simulation in a thread; it ends with `close`, or with this process at the latest."""

    def __init__(self, clients: int, cpus: int, cores: int, log_file: Path) -> None:
        if ray.is_initialized():
            raise TrainingError("this process already has a simulation: wait for its end, or use another process")
        self._log_file = log_file
        self._folder = _temporary_folder()
        self._leave = self._folder / "leave"
        self._stop = threading.Event()
        self._connection: Future[Grid] = Future()
        self._error: BaseException | None = None
        backend = {"client_resources": {"num_cpus": cpus, "num_gpus": 0.0}, "init_args": self._ray(cores)}
        self._thread = threading.Thread(target=self._play, args=(clients, backend), name="flower", daemon=True)
        self._thread.start()

    def grid(self) -> Grid:
        """Return Flower's connection to its nodes."""
        try:
            return self._connection.result(SECONDS_TO_START)
        except TimeoutError:
            raise self._lost("it did not start in time") from None

    def look(self) -> None:
        """Raise TrainingError if the simulation has ended by itself."""
        if not self._thread.is_alive():
            raise self._lost(str(self._error or "it has ended"))

    def close(self, at_once: bool) -> None:
        """End the simulation; with `at_once`, clients do not finish their tasks."""
        if at_once:
            self._leave.touch()
        self._stop.set()
        self._thread.join(SECONDS_TO_FINISH)
        if self._thread.is_alive():
            self._leave.touch()
            self._thread.join(SECONDS_TO_LEAVE)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _lost(self, why: str) -> TrainingError:
        return TrainingError(f"Flower's simulation failed: {why}. {self._log_file} says more")

    def _ray(self, cores: int) -> dict[str, Any]:
        """Return the arguments to start Ray with; the user's own cluster is already running."""
        quiet = {"log_to_driver": False, "configure_logging": False}
        if CLUSTER in os.environ:
            return quiet
        return {"address": "local", "num_cpus": cores, "num_gpus": 0, "_temp_dir": str(self._folder), **quiet}

    def _play(self, clients: int, backend: dict[str, Any]) -> None:
        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            self._connection.set_result(grid)
            while not self._stop.wait(1.0) and threading.main_thread().is_alive():
                pass

        # Without this, Ray prints a warning about a change in a future version.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        path = os.environ.get("PYTHONPATH")
        try:
            with _logged(self._log_file):
                run_simulation(server, make_app(str(self._leave)), clients, backend_config=backend)
        except BaseException as error:
            self._error = error.__cause__ or error
        finally:
            self._stop.set()
            if not self._connection.done():
                self._connection.set_exception(self._lost(str(self._error or "it has ended")))
            # Flower adds to PYTHONPATH each time.
            if path is None:
                os.environ.pop("PYTHONPATH", None)
            else:
                os.environ["PYTHONPATH"] = path


def _temporary_folder() -> Path:
    """Make a temporary folder for Ray, and remove those of processes that were killed."""
    place = _SHORT if _SHORT.is_dir() else Path(tempfile.gettempdir())
    for left in place.glob(f"{_PREFIX}*"):
        try:
            os.kill(int(left.name.removeprefix(_PREFIX).partition("-")[0]), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (OSError, ValueError):
            pass  # another user's process, or a folder of another name
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place))


@contextmanager
def _logged(file: Path) -> Iterator[None]:
    """Send the log of Flower and Ray to a file instead of the terminal."""
    handler = logging.FileHandler(file, delay=True)
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
        handler.close()
