"""The state of a pilot: its server, its nodes and its runs."""

from typing import Any

from fedprophet.deploy.control import NoAnswerError, NodeState, RunState, connected
from fedprophet.deploy.keys import registered_form
from fedprophet.deploy.pilot import Pilot, client_of
from fedprophet.runs.files import RunFiles


def pilot_status(pilot: Pilot) -> dict[str, Any]:
    """Return the state of a pilot, with or without a running server."""
    try:
        with connected(pilot.file.here, pilot.authority) as control:
            nodes, runs, running = control.nodes(), control.runs(), True
    except NoAnswerError:
        nodes, runs, running = {}, [], False
    absent = NodeState(0, "not registered" if running else "unknown", "")
    states = {name: nodes.get(registered_form(key), absent) for name, key in pilot.nodes().items()}
    latest = {run.out: run for run in runs}
    configs = sorted(pilot.runs.glob("*/config.toml"), key=lambda path: path.stat().st_mtime_ns)
    return {
        "path": str(pilot.path),
        "server": pilot.file.address,
        "running": running,
        "expires": pilot.expiry().isoformat(),
        "nodes": [
            {"name": name, "client": client_of(name), "status": state.status, "since": state.since}
            for name, state in states.items()
        ],
        "runs": [_run(RunFiles(config.parent), latest.get(str(config.parent))) for config in configs],
    }


def _run(files: RunFiles, run: RunState | None) -> dict[str, Any]:
    """Return a run in the pilot's folder, with what the server says about its last attempt."""
    status = "finished" if files.results.exists() else run.status if run and not run.over else "stopped"
    return {
        "name": files.path.name,
        "path": str(files.path),
        "id": run.run_id if run else None,
        "status": status,
        "rounds": files.journal.read_bytes().count(b"\n") if files.journal.exists() else 0,
    }
