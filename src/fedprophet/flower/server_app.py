"""The ServerApp: a run on the nodes that Flower connects, be they a simulation's or real ones.

The run config says which run: `config` (a preset or the path of a TOML file on the server), `overrides` (KEY=VALUE,
separated by blanks), `out` (the run's folder) and `resume` (true: go on with the run in that folder).
"""

import logging
import shlex
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import InMemoryGrid
from rich.console import Console

from fedprophet.config.config import load_config
from fedprophet.display.progress import PlainLines
from fedprophet.engines import Parts
from fedprophet.engines.workers import ONE_THREAD
from fedprophet.errors import ConfigError, FedProphetError
from fedprophet.flower import expect_startable_python
from fedprophet.flower.engine import engine_of_devices, engine_of_simulation
from fedprophet.flower.node_keys import KeyOwners, registered_keys
from fedprophet.flower.node_registry import Owners
from fedprophet.runs.run import Run, play, reopen, start
from fedprophet.runs.session import CUSTOM, EngineMaker
from fedprophet.server.coordinator import Engine

SECONDS_TO_START = 60.0
SECONDS_TO_REGISTER = 2.0
"""A simulation lists its nodes one after the other while the server begins; when no more come, these are all."""

log = logging.getLogger("fedprophet")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Play a run from its beginning, or from its last checkpoint, to its end."""
    simulated = isinstance(grid, InMemoryGrid)
    # The sums of a simulation are those of every engine that runs clients side by side: of one thread.
    threads: AbstractContextManager[None] = ONE_THREAD if simulated else nullcontext()
    console = Console(soft_wrap=True)
    try:
        with threads, PlainLines(console) as observer:
            run = open_run(context.run_config, engine_on(grid, simulated), simulated)
            play(run, observer)
            console.print(f"Files: {run.files.path}", highlight=False, markup=False)
    except FedProphetError as error:
        console.print(f"error: {error}", highlight=False, markup=False)
        raise


def open_run(given: Mapping[str, Any], engine: EngineMaker, simulated: bool) -> Run:
    """Start the run that a run config describes, or open it again."""
    text = {key: given.get(key, "") for key in ("config", "overrides", "out")}
    for key, value in text.items():
        if not isinstance(value, str):
            raise ConfigError(f"the run config has {key} = {value!r}. Allowed: a text, in quotation marks")
    resume = given.get("resume", False)
    if not isinstance(resume, bool):
        raise ConfigError(f"the run config has resume = {resume!r}. Allowed: true or false")
    out = Path(text["out"]).expanduser() if text["out"] else None
    if resume:
        if out is None:
            raise ConfigError("resume = true needs the run's folder: give it as out")
        return reopen(out, engine=engine)
    try:
        overrides = shlex.split(text["overrides"])
    except ValueError as error:
        raise ConfigError(f"overrides: {error}. Allowed: KEY=VALUE, separated by blanks") from None
    config = load_config(text["config"] or None, overrides)
    # What the server computes itself, it computes with its plain engine; a simulation could go on without `flwr run`.
    config = config.model_copy(update={"engine": "flower-sim" if simulated else "plain"})
    return start(config, out, engine=engine)


def engine_on(grid: Grid, simulated: bool) -> EngineMaker:
    """Return what makes a run's engine of Flower's connection."""

    def make(parts: Parts) -> Engine:
        config, clients = parts.config, parts.clients
        if CUSTOM in (config.model.name, config.data.name):
            raise ConfigError("a run on Flower's nodes needs a model and data that the configuration names")
        if not simulated:
            return engine_of_devices(grid, parts, owners_on(grid))
        if clients is None:
            raise ConfigError("a run in Flower's simulation needs a folder: its clients keep their layers there")
        expect_startable_python()
        expect_nodes(grid, config.population.clients)
        return engine_of_simulation(grid, parts, clients.parent.absolute())

    return make


def owners_on(grid: Grid) -> Owners | None:
    """Return what says which client a node's key was made for; None on a server without a pilot, which is told."""
    keys = registered_keys()
    if keys is None:
        text = "this server was not started by fedprophet deploy server, so a node is the client that it says it is"
        log.warning("%s, whatever key it has", text)
        return None
    return KeyOwners(grid, keys)


def expect_nodes(grid: Grid, clients: int) -> None:
    """Refuse a simulation of fewer nodes than clients: in one, nobody comes later than at its very beginning."""
    seen, changed = 0, time.monotonic()
    while (nodes := len(list(grid.get_node_ids()))) < clients:
        now = time.monotonic()
        if nodes != seen:
            seen, changed = nodes, now
        elif now - changed > (SECONDS_TO_REGISTER if nodes else SECONDS_TO_START):
            raise ConfigError(
                f"the simulation has {nodes} nodes, and the run {clients} clients. Ask for as many nodes: flwr run … "
                f"--federation-config 'num-supernodes={clients}', or for fewer clients with population.clients={nodes}"
            )
        time.sleep(0.05)
