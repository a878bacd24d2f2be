"""The server: which keys it registers, and a real process with TLS behind its gate."""

import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from flwr.common.constant import NOOP_FLWR_AID
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from fedprophet.deploy import DeployError, environment
from fedprophet.deploy.control import NoAnswerError, connected
from fedprophet.deploy.keys import make_key_pair, registered_form
from fedprophet.deploy.node import FILE, open_node
from fedprophet.deploy.pilot import PilotFile, add_node, make_pilot, pilot_config, remove_node
from fedprophet.deploy.status import pilot_status
from fedprophet.deploy.superlink import _arguments, end_runs, register, serve

# Registered keys


@pytest.fixture
def state():
    name = ":flwr-in-memory:"
    return LinkStateFactory(name, NoOpFederationManager(), ObjectStoreFactory(name)).state()


def known(state):
    return {node.name: node.public_key for node in state.get_node_info() if node.status != "unregistered"}


def test_the_folder_of_keys_is_who_may_connect(tmp_path, state):
    paths = {name: tmp_path / f"{name}.pub" for name in ("node-0", "node-1")}
    for name, path in paths.items():
        path.write_bytes(make_key_pair(name).public)
    register(state, tmp_path)
    ids = {node.name: node.node_id for node in state.get_node_info()}
    assert known(state) == {name: registered_form(path) for name, path in paths.items()}
    register(state, tmp_path)  # as at the next start: nodes stay who they are
    assert {node.name: node.node_id for node in state.get_node_info()} == ids
    old = paths["node-0"].read_bytes()
    paths["node-0"].unlink()
    register(state, tmp_path)
    assert list(known(state)) == ["node-1"]
    paths["node-0"].write_bytes(old)
    with pytest.raises(DeployError, match="was registered here before and then removed"):
        register(state, tmp_path)


def test_two_names_for_one_key_are_refused(tmp_path, state):
    public = make_key_pair("node-0").public
    for name in ("node-0", "node-1"):
        (tmp_path / f"{name}.pub").write_bytes(public)
    with pytest.raises(DeployError, match=r"node-0\.pub and .*node-1\.pub hold the same key"):
        register(state, tmp_path)
    assert known(state) == {}


def test_runs_that_an_earlier_server_left_are_ended(state):
    run = state.create_run(None, None, "0" * 64, {}, "@none/default", None, NOOP_FLWR_AID, TaskType.SERVER_APP)
    assert [(info.run_id, info.status.status) for info in state.get_run_info()] == [(run, "pending")]
    for _ in range(2):
        end_runs(state)
        status = state.get_run_info()[0].status
        assert (status.status, status.sub_status) == ("finished", "stopped")


def test_arguments(tmp_path):
    assert _arguments(["--registered", str(tmp_path), "--port", "1"]) == (tmp_path, ["--port", "1"])
    for wrong in ([], ["--registered"], ["--port", "1"]):
        with pytest.raises(DeployError, match="first argument"):
            _arguments(wrong)
    with pytest.raises(DeployError, match="no such folder"):
        _arguments(["--registered", str(tmp_path / "none")])


def test_a_server_without_tls_or_authentication_is_not_started(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    with pytest.raises(DeployError, match="not started without TLS"):
        serve(tmp_path, ["--insecure"])


# A real server


PATIENCE = 600
"""Seconds after which something is stuck, on a machine with very much else to do."""


def stop(process):
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(PATIENCE)
    finally:
        process.kill()


@pytest.fixture
def server(tmp_path, free_ports, wait_until):
    """Start the server of a pilot with two nodes; it is always ended."""
    file = PilotFile(server="localhost", port=free_ports(1)[0], listen="127.0.0.1")
    pilot = make_pilot(tmp_path / "pilot", pilot_config(None, (), 2), file, nodes=2)
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(pilot.command(), env=environment(pilot.flower), stdout=log, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or pilot_status(pilot)["running"])
        assert process.poll() is None, (tmp_path / "server.log").read_text()
        yield pilot, process
    finally:
        process.kill()
        process.wait()


def start_node(folder, port, log):
    file = folder / FILE
    lines = [f"port = {port}" if line.startswith("port =") else line for line in file.read_text().splitlines()]
    file.write_text("\n".join(lines))
    node = open_node(folder)
    node.home.mkdir(exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(node.command(), env=environment(node.home / "flower"), stdout=output, stderr=output)


def statuses(pilot):
    return {node["name"]: node["status"] for node in pilot_status(pilot)["nodes"]}


@pytest.mark.slow
def test_a_real_server_takes_registered_nodes_over_tls_and_no_others(server, tmp_path, free_ports, wait_until):
    pilot, process = server
    assert statuses(pilot) == {"node-0": "registered", "node-1": "registered"}

    trusting = ssl.create_default_context(cafile=str(pilot.authority))
    url = f"https://localhost:{pilot.file.port}/health"
    with urllib.request.urlopen(url, context=trusting, timeout=PATIENCE) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
        urllib.request.urlopen(url, context=ssl.create_default_context(), timeout=PATIENCE)

    # uvicorn believes a proxy on this machine when it says that somebody else is asking.
    request = urllib.request.Request(url.replace("/health", "/docs"))
    with urllib.request.urlopen(request, context=trusting, timeout=PATIENCE) as answer:
        assert answer.status == 200
    request.add_header("X-Forwarded-For", "192.0.2.99")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, context=trusting, timeout=PATIENCE)

    for name, value in {"Content-Length": str(2**30), "Transfer-Encoding": "chunked"}.items():
        connection = http.client.HTTPSConnection("localhost", pilot.file.port, context=trusting, timeout=PATIENCE)
        connection.putrequest("POST", "/v1/fleet/push-object")
        connection.putheader(name, value)
        connection.endheaders()  # and nothing of what was announced
        assert connection.getresponse().status == 413
        connection.close()

    thief = tmp_path / "thief"
    (pilot.folder("node-1")).rename(thief)
    (thief / "node.key").write_bytes(make_key_pair("thief").private)
    folders = {"node-0": pilot.folder("node-0"), "thief": thief}
    nodes = [
        start_node(folder, port, tmp_path / f"{name}.log")
        for (name, folder), port in zip(folders.items(), free_ports(2), strict=True)
    ]
    try:
        wait_until(lambda: statuses(pilot)["node-0"] == "online")
        wait_until(lambda: nodes[1].poll() is not None)
        assert nodes[1].returncode != 0
        assert "Failed to activate SuperNode" in (tmp_path / "thief.log").read_text()
        assert statuses(pilot) == {"node-0": "online", "node-1": "registered"}

        with connected(pilot.file.here, pilot.authority) as control:
            control.register(registered_form(pilot.keys / f"{add_node(pilot, 7)}.pub"), "node-7")
            control.unregister(control.nodes()[remove_node(pilot, "node-1")])
            assert control.runs() == []
        assert statuses(pilot) == {"node-0": "online", "node-7": "registered"}
        assert stop(nodes[0]) == 0
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert stop(process) in (0, -signal.SIGINT)
    with (
        pytest.raises(NoAnswerError, match=r"no server answers at 127\.0\.0\.1"),
        connected(pilot.file.here, pilot.authority) as control,
    ):
        control.nodes()
    assert json.loads(json.dumps(pilot_status(pilot)))["running"] is False


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["body", "headers"])
def test_strangers_hold_little_memory_and_nodes_get_their_answers(tmp_path, kind):
    """A hundred connections without a key, each with 32 MiB to send; they once held more than a gigabyte."""
    program = Path(__file__).parents[2] / "benchmarks" / "strangers.py"
    options = ["--kinds", kind, "--connections", "100", "--seconds", "8", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, program, *options], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "strangers.json").read_text())
    assert found["most"] - found["before"] < 100 * 2**20
    assert found["failures"] == 0, done.stdout
    assert found["kept"]
    assert found["fresh"]


@pytest.mark.slow
def test_a_missing_folder_of_keys_is_a_sentence_of_the_process(tmp_path):
    command = [sys.executable, "-m", "fedprophet.deploy.superlink", "--registered", str(tmp_path / "none")]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --registered")
