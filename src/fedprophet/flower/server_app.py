"""The ServerApp: a run on the nodes that Flower connects, simulated or real.

The run config says which run: `config` (a preset or the path of a TOML file on the server), `overrides` (KEY=VALUE,
separated by blanks), `out` (the run's folder), `resume` (true: go on with the run in that folder), `from-round` (the
checkpoint to go on from; 0 is the newest) and `log` (trackers, separated by blanks).
"""

import logging
import os
import shlex
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import InMemoryGrid  # Flower has no public way to recognise a simulation

from fedprophet.config.load import load_config
from fedprophet.console import console_on
from fedprophet.deploy.keys import REGISTERED
from fedprophet.deploy.pilot import check_names, clients_of_keys
from fedprophet.display.lines import say
from fedprophet.display.progress import PlainLines
from fedprophet.engines.registry import EngineMaker, EngineParts
from fedprophet.errors import ConfigError, FedProphetError
from fedprophet.flower.engine import engine_of_devices, engine_of_simulation
from fedprophet.flower.node_registry import KeyedClients
from fedprophet.flower.offline import expect_startable_python, stay_offline
from fedprophet.runs.observer import Observers
from fedprophet.runs.play import play
from fedprophet.runs.run import Run, reopen, start
from fedprophet.server.coordinator import Engine
from fedprophet.threads import ONE_THREAD
from fedprophet.tracking import Tracking, open_trackers

SECONDS_TO_START = 60.0
SECONDS_TO_REGISTER = 2.0
"""A simulation adds its nodes one by one while the server starts; when none has come for this time, these are all."""

log = logging.getLogger("fedprophet")

stay_offline()  # Flower loads this module before it starts Ray
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Play a run to its end, from its beginning or from its last checkpoint."""
    simulated = isinstance(grid, InMemoryGrid)
    # An engine that runs clients side by side computes with one thread; so does a simulation.
    threads: AbstractContextManager[None] = ONE_THREAD if simulated else nullcontext()
    console = console_on()
    try:
        trackers = open_trackers(text_of(context.run_config, "log").split())
        with threads, PlainLines(console) as display, Tracking(trackers, display.note) as tracking:
            run = open_run(context.run_config, engine_on(grid, simulated), simulated)
            play(run, Observers(display, tracking))
            say(console, f"Files: {run.files.path}")
    except FedProphetError as error:
        say(console, f"error: {error}")
        raise


def open_run(given: Mapping[str, Any], engine: EngineMaker, simulated: bool) -> Run:
    """Start the run that a run config describes, or open it again."""
    text = {key: text_of(given, key) for key in ("config", "overrides", "out")}
    resume = given.get("resume", False)
    if not isinstance(resume, bool):
        raise ConfigError(f"the run config has resume = {resume!r}. Allowed: true or false")
    back = given.get("from-round", 0)
    if type(back) is not int or back < 0 or (back and not resume):
        raise ConfigError(
            f"the run config has from-round = {back!r}. Allowed: a checkpoint's round, with resume = true"
        )
    out = Path(text["out"]).expanduser() if text["out"] else None
    if resume:
        if out is None:
            raise ConfigError("resume = true needs the run's folder: give it as out")
        return reopen(out, engine=engine, round=back or None)
    try:
        overrides = shlex.split(text["overrides"])
    except ValueError as error:
        raise ConfigError(f"overrides: {error}. Allowed: KEY=VALUE, separated by blanks") from None
    config = load_config(text["config"] or None, overrides)
    # The server's own work runs on the plain engine. A simulated run can go on without `flwr run`.
    config = config.model_copy(update={"engine": "flower-sim" if simulated else "plain"})
    return start(config, out, engine=engine)


def text_of(given: Mapping[str, Any], key: str) -> str:
    """Return a text of a run config; empty if it has none."""
    value = given.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"the run config has {key} = {value!r}. Allowed: a text, in quotation marks")
    return value


def engine_on(grid: Grid, simulated: bool) -> EngineMaker:
    """Return the function that makes a run's engine from Flower's connection."""

    def make(parts: EngineParts) -> Engine:
        config, clients = parts.config, parts.clients
        check_names(config)
        if not simulated:
            return engine_of_devices(grid, parts, keys_on(grid))
        if clients is None:
            raise ConfigError("a run in Flower's simulation needs a folder: its clients keep their layers there")
        expect_startable_python()
        expect_nodes(grid, config.population.clients)
        return engine_of_simulation(lambda: grid, parts, clients.parent.absolute())

    return make


def keys_on(grid: Grid) -> KeyedClients | None:
    """Return which client each node's key was made for; None on a server without a pilot, with a warning.

    Flower has checked the signature of every node that connects against its key.
    """
    if REGISTERED not in os.environ:
        text = "this server was not started by fedprophet deploy server, so a node is the client that it says it is"
        log.warning("%s: keys are not checked", text)
        return None
    folder = Path(os.environ[REGISTERED])
    clients_of_keys(folder)  # keys that cannot be read stop the run before it begins

    def clients_by_node() -> Mapping[int, int | None]:
        clients = clients_of_keys(folder)  # a node may be added, or given another key, in the middle of a run
        return {node.node_id: clients.get(node.public_key) for node in grid.get_nodes()}

    return clients_by_node


def expect_nodes(grid: Grid, clients: int) -> None:
    """Refuse a simulation with fewer nodes than clients: all its nodes exist from the start."""
    seen, changed = 0, time.monotonic()
    while (nodes := len(list(grid.get_node_ids()))) < clients:
        now = time.monotonic()
        if nodes != seen:
            seen, changed = nodes, now
        elif now - changed > (SECONDS_TO_REGISTER if nodes else SECONDS_TO_START):
            raise ConfigError(
                f"the simulation has {nodes} nodes, but the run has {clients} clients. Ask for more nodes: flwr run … "
                f"--federation-config 'num-supernodes={clients}', or for fewer clients with population.clients={nodes}"
            )
        time.sleep(0.05)
