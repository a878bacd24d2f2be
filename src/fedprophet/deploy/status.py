"""What a pilot looks like now: its server, who is connected, its runs."""

from typing import Any

from fedprophet.deploy.control import NoAnswerError, NodeState, RunState, connected
from fedprophet.deploy.keys import registered_form
from fedprophet.deploy.pilot import Pilot, client_of
from fedprophet.runs.run import RunFiles

UNKNOWN = NodeState(0, "unknown", "")
"""A node while no server is running."""
REFUSED = NodeState(0, "not registered", "")


def pilot_status(pilot: Pilot) -> dict[str, Any]:
    """Return the state of a pilot, with or without a running server."""
    try:
        with connected(pilot.file.here, pilot.authority) as control:
            nodes, runs, running = control.nodes(), control.runs(), True
    except NoAnswerError:
        nodes, runs, running = {}, [], False
    absent = REFUSED if running else UNKNOWN
    return {
        "path": str(pilot.path),
        "server": pilot.file.address,
        "running": running,
        "expires": pilot.expiry().isoformat(),
        "nodes": [
            _node(name, nodes.get(registered_form(public_key), absent)) for name, public_key in pilot.nodes().items()
        ],
        "runs": _runs(pilot, runs),
    }


def _node(name: str, state: NodeState) -> dict[str, Any]:
    return {"name": name, "client": client_of(name), "status": state.status, "since": state.since}


def _runs(pilot: Pilot, known: list[RunState]) -> list[dict[str, Any]]:
    """Return the runs in the pilot's folder, each with what the server says of its last attempt."""
    latest = {run.out: run for run in known}
    rows = []
    for config in sorted(pilot.runs.glob("*/config.toml"), key=lambda path: path.stat().st_mtime_ns):
        files = RunFiles(config.parent)
        run = latest.get(str(files.path))
        rows.append(
            {
                "name": files.path.name,
                "path": str(files.path),
                "id": run.run_id if run else None,
                "status": _status(files, run),
                "rounds": _rounds(files),
            }
        )
    return rows


def _status(files: RunFiles, run: RunState | None) -> str:
    if files.results.exists():
        return "finished"
    return run.status if run and not run.over else "stopped"


def _rounds(files: RunFiles) -> int:
    try:
        return files.journal.read_bytes().count(b"\n")
    except OSError:
        return 0
