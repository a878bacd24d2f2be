"""`fedprophet deploy` as a person and as a program call it. The programs that it becomes are tried in tests/deploy."""

import json
import os
import shlex
import shutil
import signal
import socket
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedprophet import deploy
from fedprophet.config.load import load_config
from fedprophet.deploy import control, launch
from fedprophet.deploy.control import NodeState, RunState
from fedprophet.deploy.keys import registered_form
from fedprophet.deploy.pilot import open_pilot, renew


@pytest.fixture
def pilot(cli, tmp_path, free_ports):
    """A pilot of two nodes in ./pilot, with ports that nobody uses."""
    assert cli("deploy", "init", "pilot", "--port", *free_ports(1)).code == 0
    return open_pilot(tmp_path / "pilot")


class FakeControl:
    """A running server, as the commands see it."""

    def __init__(self, runs=(), nodes=()):
        self.all_runs, self.all_nodes, self.calls = list(runs), dict(nodes), []

    def runs(self):
        return self.all_runs

    def nodes(self):
        return self.all_nodes

    def register(self, key, name):
        self.calls.append(("register", key, name))

    def unregister(self, node):
        self.calls.append(("unregister", node.node_id))

    def stop(self, run):
        self.calls.append(("stop", run.run_id))


@pytest.fixture
def serving(monkeypatch):
    """Return a function that lets a server answer."""

    def serve(runs=(), nodes=()):
        fake = FakeControl(runs, nodes)

        @contextmanager
        def connected(address, authority):
            yield fake

        for module in (control, launch):
            monkeypatch.setattr(module, "connected", connected)
        monkeypatch.setattr("fedprophet.deploy.status.connected", connected)
        return fake

    return serve


@pytest.fixture
def became(monkeypatch):
    """Catch the program that a command becomes."""
    calls = []
    monkeypatch.setattr(os, "execvpe", lambda program, command, variables: calls.append((command, variables)))
    return calls


def test_every_command_has_an_example(cli):
    for name in ["init", "server", "node", "run", "stop", "status", "add-node", "remove-node", "renew", "probe"]:
        assert f"fedprophet deploy {name}" in cli("deploy", name, "--help").out


# init


def test_init_says_what_to_do_next(cli, tmp_path):
    said = cli("deploy", "init", "pilot", "--nodes", "3", "--server", "fl.example.org")
    assert said.code == 0, said.err
    assert "a server at fl.example.org:9092 and 3 nodes" in said.out
    assert "fedprophet deploy server pilot" in said.out
    assert load_config(tmp_path / "pilot" / "config.toml").population.clients == 3


def test_init_for_a_program(cli, tmp_path):
    arguments = ["--set", "seed=4", "--method", "jfat", "--server", "a.org", "--server", "192.0.2.7", "--days", "9"]
    answer = cli("deploy", "init", "pilot", "--nodes", "1", *arguments, "--json").json
    pilot = open_pilot(tmp_path / "pilot")
    assert answer == {
        "path": str(pilot.path),
        "server": "a.org:9092",
        "expires": pilot.expiry().isoformat(),
        "nodes": {"node-0": str(pilot.folder("node-0"))},
    }
    assert pilot.file.names == ["192.0.2.7"]
    config = load_config(pilot.config)
    assert (config.seed, config.method) == (4, "jfat")


def test_init_refuses_in_a_sentence(cli, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert "is not an empty folder" in cli("deploy", "init", "full").error
    assert "unknown preset 'nodigits'" in cli("deploy", "init", "pilot", "--config", "nodigits").error
    assert "neither a host name nor an IP" in cli("deploy", "init", "pilot", "--server", "a:1").error
    assert "allowed" in cli("deploy", "init", "pilot", "--set", "aggregate.minimum=0").error
    assert not (tmp_path / "pilot").exists()


def test_init_knows_the_names_of_the_registries(cli, tmp_path):
    assert 'method: given "nope"' in cli("deploy", "init", "pilot", "--method", "nope").error
    assert 'model.name: given "nope"' in cli("deploy", "init", "pilot", "--set", "model.name=nope").error
    assert 'data.name: given "nope"' in cli("deploy", "init", "pilot", "--set", "data.name=nope").error
    assert not (tmp_path / "pilot").exists()


def test_init_at_odd_paths_is_a_sentence_about_the_path_given(cli, tmp_path):
    (tmp_path / "afile").touch()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for path in ("afile/x", "/proc/nope/x", "circle"):
        assert f"cannot make {path}: " in cli("deploy", "init", path).error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["afile", "circle"]


def test_init_in_the_folder_of_the_shell_and_through_a_link(cli, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    before = (tmp_path / "here").stat().st_ino
    assert cli("deploy", "init", "link", "--json").json["path"] == str(tmp_path / "here")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "here").stat().st_ino == before
    (tmp_path / "dot").mkdir()
    monkeypatch.chdir(tmp_path / "dot")
    assert cli("deploy", "init", ".").code == 0
    names = {path.name for path in Path().iterdir()}
    assert {"deploy.toml", "config.toml", "ca", "nodes"} < names
    assert {name for name in names if name.startswith(".")} == {".gitignore"}
    assert cli("deploy", "status", ".").code == 0


NEEDS_FLOWER = [["init", "x"], ["node", "x"], ["remove-node", "x", "node-0"]]
NEEDS_FLOWER += [[name, "x"] for name in ("server", "run", "logs", "stop", "status", "add-node", "renew")]


@pytest.mark.parametrize("arguments", NEEDS_FLOWER, ids=lambda arguments: arguments[0])
def test_without_the_extra_there_is_a_sentence(cli, monkeypatch, arguments):
    ours = [f"fedprophet.deploy.{name}" for name in ("certificates", "keys", "pilot", "control", "status", "launch")]
    ours += [f"fedprophet.deploy.{name}" for name in ("node", "page")]
    for name in list(sys.modules):
        if name.partition(".")[0] in ("flwr", "cryptography") or name in ours:
            monkeypatch.delitem(sys.modules, name)
    for name in ("flwr", "cryptography"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ours:  # the modules of ours that were imported are put back, not those of this test
        monkeypatch.delattr(deploy, name.rpartition(".")[2], raising=False)
    assert "pip install 'fedprophet[flower]'" in cli("deploy", *arguments).error


def test_every_command_is_tried_without_the_extra():
    from fedprophet.cli.deploy import deploy_app

    names = {command.name or command.callback.__name__ for command in deploy_app.registered_commands}
    assert names == {arguments[0] for arguments in NEEDS_FLOWER} | {"probe"}


# server and node


def test_the_server_is_started_offline_with_its_programs_in_the_path(cli, pilot, became, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")  # what the user has set stays
    monkeypatch.delenv("FLWR_DISABLE_UPDATE_CHECK", raising=False)
    said = cli("deploy", "server", "pilot")
    assert "2 nodes may connect" in said.err
    ((command, variables),) = became
    assert command == pilot.command()
    first, *_, last = variables["PATH"].split(os.pathsep)
    assert (first, last) == (str(Path(sys.executable).parent), "/usr/bin")
    assert variables["FLWR_HOME"] == str(pilot.flower)
    assert variables["FLWR_TELEMETRY_ENABLED"] == "1"
    assert variables["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert (pilot.flower / "config.toml").is_file()


def test_a_node_is_started_in_its_own_home(cli, pilot, became, free_ports):
    file = pilot.folder("node-1") / "node.toml"
    file.write_text(file.read_text().replace("port = 9095", f"port = {free_ports(1)[0]}"))
    said = cli("deploy", "node", "pilot/nodes/node-1")
    assert f"Client 1, connecting to {pilot.file.address}" in said.err
    ((command, variables),) = became
    assert command[0] == "flower-supernode"
    assert f'partition-id=1 home="{pilot.folder("node-1")}/home"' in command
    assert variables["FLWR_HOME"] == f"{pilot.folder('node-1')}/home/flower"


def test_print_shows_the_plain_command_and_starts_nothing(cli, pilot, became):
    lines = cli("deploy", "server", "pilot", "--print").out.splitlines()
    assert shlex.split(lines[-1]) == pilot.command()
    assert f"export FLWR_HOME={pilot.flower}" in lines
    assert "flower-supernode" in cli("deploy", "node", "pilot/nodes/node-0", "--print").out
    assert became == []


def test_a_missing_program_is_a_sentence(cli, pilot, became, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    assert "is not in the path. Install Flower again" in cli("deploy", "server", "pilot").error
    assert became == []


def test_a_port_in_use_is_a_sentence(cli, pilot, became):
    with socket.create_server(("127.0.0.1", pilot.file.port)):
        said = cli("deploy", "server", "pilot").error
    assert f"cannot listen on 127.0.0.1 port {pilot.file.port}" in said
    assert "deploy.toml" in said
    assert became == []


def test_a_certificate_that_ends_soon_is_told(cli, pilot, became):
    renew(pilot, 20)
    assert "expires in 19 days. Renew it: fedprophet deploy renew" in cli("deploy", "server", "pilot", "--print").err
    assert "expires on" in cli("deploy", "renew", "pilot", "--days", "100").out
    assert cli("deploy", "server", "pilot", "--print").err == ""


# run, stop, status


def run_state(status, run_id=7, out="", details=""):
    return RunState(run_id, status, details, out)


@pytest.fixture
def flower(monkeypatch):
    """Flower's own command line takes every run; what it was given is returned."""
    given = []
    monkeypatch.setattr(launch, "submit", lambda pilot, out, resume, *more: given.append((out, resume)) or 7)
    monkeypatch.setattr(launch, "watch", lambda pilot, run_id: None)
    return given


def test_runs_are_numbered(cli, pilot, serving, flower):
    serving()
    assert cli("deploy", "run", "pilot", "--detach").code == 0
    (pilot.runs / "run-1").mkdir()
    cli("deploy", "run", "pilot", "--detach")
    cli("deploy", "run", "pilot", "--detach", "--name", "mine")
    assert flower == [(pilot.runs / name, False) for name in ("run-1", "run-2", "mine")]


def test_trackers_are_known_before_a_run_is_started(cli, pilot, serving, flower):
    serving()
    assert "unknown tracker 'tensorbord'" in cli("deploy", "run", "pilot", "--log", "tensorbord").error
    assert cli("deploy", "run", "pilot", "--detach", "--log", "tensorboard").code == 0
    assert len(flower) == 1


def test_resume_takes_the_newest_unfinished_run(cli, pilot, serving, flower):
    serving()
    assert "no run was started there" in cli("deploy", "run", "pilot", "--resume").error
    for age, name in enumerate(["new", "old", "finished"]):
        (pilot.runs / name).mkdir()
        (pilot.runs / name / "config.toml").touch()
        os.utime(pilot.runs / name / "config.toml", (1e9, 1e9 - age))
    (pilot.runs / "finished" / "results.json").touch()
    os.utime(pilot.runs / "finished" / "config.toml", (2e9, 2e9))
    cli("deploy", "run", "pilot", "--resume", "--detach")
    cli("deploy", "run", "pilot", "--resume", "--detach", "--name", "old")
    assert flower == [(pilot.runs / "new", True), (pilot.runs / "old", True)]
    assert "holds no run" in cli("deploy", "run", "pilot", "--resume", "--name", "none").error
    assert "already holds a run" in cli("deploy", "run", "pilot", "--name", "old").error
    assert "is not the name of a folder" in cli("deploy", "run", "pilot", "--name", "../x").error
    for name in ("new", "old"):
        (pilot.runs / name / "results.json").touch()
    assert "all runs there have finished" in cli("deploy", "run", "pilot", "--resume").error


def test_one_run_at_a_time(cli, pilot, serving, flower):
    serving([run_state("finished:failed", 1), run_state("running", 2, "/there")])
    assert "run 2 is still running in /there" in cli("deploy", "run", "pilot").error
    assert flower == []


def test_a_mistake_in_the_configuration_is_told_before_anything_starts(cli, pilot, serving, flower):
    serving()
    pilot.config.write_text(pilot.config.read_text().replace("rounds = 42", "rounds = 0"))
    assert "rounds: given 0" in cli("deploy", "run", "pilot").error
    pilot.config.write_text(pilot.config.read_text().replace("rounds = 0", "rounds = 42").replace('"digits"', '"x"'))
    assert 'data.name: given "x"' in cli("deploy", "run", "pilot").error
    assert flower == []


def test_a_run_that_failed_says_so_and_how_to_go_on(cli, pilot, serving, flower, monkeypatch):
    answers = serving()
    failed = run_state("finished:failed", details="no disk")
    monkeypatch.setattr(launch, "watch", lambda *_: answers.all_runs.append(failed))
    said = cli("deploy", "run", "pilot").error
    assert "the run ended as finished:failed: no disk" in said
    assert "--resume" not in said  # it has left nothing to go on with
    assert f"Start it again: fedprophet deploy run {pilot.path}" in said
    (pilot.runs / "run-1").mkdir()

    def begun(*_):
        (pilot.runs / "run-2").mkdir()
        (pilot.runs / "run-2" / "config.toml").touch()

    monkeypatch.setattr(launch, "watch", begun)
    assert "--name run-2 --resume" in cli("deploy", "run", "pilot").error


def test_a_server_that_goes_away_is_told(cli, pilot, serving, flower, monkeypatch):
    serving()

    def gone(address, authority):
        raise control.NoAnswerError("gone")

    monkeypatch.setattr(launch, "watch", lambda *_: monkeypatch.setattr(launch, "connected", gone))
    assert "the server stopped before the run had ended" in cli("deploy", "run", "pilot").error


def test_ctrl_c_leaves_the_run_alone(cli, pilot, serving, flower, monkeypatch):
    fake = serving()
    monkeypatch.setattr(launch, "watch", lambda *_: signal.raise_signal(signal.SIGTERM))
    said = cli("deploy", "run", "pilot")
    assert said.code == 0
    assert "The run continues" in said.out
    assert fake.calls == []


def test_logs_shows_the_last_run(cli, pilot, serving, flower, monkeypatch):
    shown = []
    monkeypatch.setattr(launch, "watch", lambda pilot, run_id: shown.append(run_id))
    serving([run_state("finished:failed", 1, "/a"), run_state("finished:stopped", 2, "/b")])
    assert "ended as finished:stopped" in cli("deploy", "logs", "pilot").error
    assert shown == [2]
    serving()
    assert "no run was started here" in cli("deploy", "logs", "pilot").error


def test_stop_ends_what_is_going_on(cli, pilot, serving):
    fake = serving([run_state("finished:completed", 1), run_state("running", 2)])
    assert "Run 2 is ended" in cli("deploy", "stop", "pilot").out
    assert fake.calls == [("stop", 2)]
    serving()
    assert "No run is running" in cli("deploy", "stop", "pilot").out


def test_nobody_answers(cli, pilot):
    for name in ("run", "stop"):
        said = cli("deploy", name, "pilot").error
        assert f"no server answers at 127.0.0.1:{pilot.file.port}" in said
        assert "fedprophet deploy server" in said


def test_status_without_a_server(cli, pilot):
    answer = cli("deploy", "status", "pilot", "--json").json
    assert answer["running"] is False
    assert [node["status"] for node in answer["nodes"]] == ["unknown", "unknown"]
    assert "not running" in cli("deploy", "status", "pilot").out


def test_status_with_a_server(cli, pilot, serving):
    folder = pilot.runs / "run-1"
    folder.mkdir()
    (folder / "config.toml").touch()
    (folder / "journal.jsonl").write_text("{}\n{}\n")
    online = NodeState(5, "online", "2030-01-02T03:04:05+00:00")
    runs = [run_state("finished:failed", 1, str(folder)), run_state("running", 2, str(folder))]
    serving(runs, {registered_form(pilot.nodes()["node-0"]): online})
    answer = cli("deploy", "status", "pilot", "--json").json
    assert answer["running"] is True
    assert answer["nodes"] == [
        {"name": "node-0", "client": 0, "status": "online", "since": "2030-01-02T03:04:05+00:00"},
        {"name": "node-1", "client": 1, "status": "not registered", "since": ""},
    ]
    assert answer["runs"] == [{"name": "run-1", "path": str(folder), "id": 2, "status": "running", "rounds": 2}]
    text = cli("deploy", "status", "pilot").out
    assert "2030-01-02T03:04:05" in text
    assert "run-1" in text
    (folder / "results.json").touch()
    assert cli("deploy", "status", "pilot", "--json").json["runs"][0]["status"] == "finished"


# Nodes that come and go


def test_add_node_tells_a_running_server(cli, pilot, serving):
    fake = serving()
    answer = cli("deploy", "add-node", "pilot", "--json").json
    path = str(pilot.folder("node-2"))
    assert answer == {"name": "node-2", "path": path, "server_told": True, "clients_raised": True}
    assert fake.calls == [("register", registered_form(pilot.nodes()["node-2"]), "node-2")]
    assert load_config(pilot.config).population.clients == 3


def test_add_node_without_a_server(cli, pilot):
    said = cli("deploy", "add-node", "pilot")
    assert "after its next start" in said.out
    assert "population.clients in config.toml is now 3" in said.out
    assert "already has a node" in cli("deploy", "add-node", "pilot", "--client", "2").error
    assert cli("deploy", "add-node", "pilot", "--client", "99999").code == 2
    assert not pilot.folder("node-99999").exists()
    assert cli("deploy", "add-node", "pilot", "--client", "9999").code == 0


def test_remove_node(cli, pilot, serving):
    assert "refused from the next start of the server on" in cli("deploy", "remove-node", "pilot", "node-0").out
    fake = serving(nodes={registered_form(pilot.nodes()["node-1"]): NodeState(5, "online", "")})
    assert "refused from now on" in cli("deploy", "remove-node", "pilot", "node-1").out
    assert fake.calls == [("unregister", 5)]
    assert "unknown node 'node-1'" in cli("deploy", "remove-node", "pilot", "node-1").error
    assert "no node may connect" in cli("deploy", "server", "pilot").error


def test_what_is_no_pilot(cli, tmp_path):
    assert "is not a pilot's folder" in cli("deploy", "status", tmp_path).error
    assert "is not a node's folder" in cli("deploy", "node", tmp_path).error


# What Flower's command line is given


def test_submit_hands_the_folders_to_flower(pilot, tmp_path, monkeypatch):
    calls = []

    def run(command, **options):
        calls.append((command, options["env"]))
        return launch.subprocess.CompletedProcess(command, 0, json.dumps({"success": True, "run-id": "12"}), "")

    monkeypatch.setattr(launch.subprocess, "run", run)
    assert launch.submit(pilot, pilot.runs / "run-1", resume=True, from_round=3) == 12
    ((command, variables),) = calls
    settings = pilot.path / "server" / "run.toml"
    assert command == [
        "flwr",
        "run",
        str(pilot.path / "app"),
        "pilot",
        "--run-config",
        str(settings),
        "--format",
        "json",
    ]
    assert variables["FLWR_HOME"] == str(pilot.flower)
    expected = {"config": str(pilot.config), "out": str(pilot.runs / "run-1"), "resume": True, "from-round": 3}
    assert tomllib.loads(settings.read_text()) == {**expected, "log": ""}
    launch.submit(pilot, pilot.runs / "run-1", resume=True, from_round=3, log=["tensorboard", "mlflow"])
    assert tomllib.loads(settings.read_text()) == {**expected, "log": "tensorboard mlflow"}


def test_what_flower_refuses_is_told(pilot, monkeypatch):
    failed = launch.subprocess.CompletedProcess([], 1, "", "no such\n app")
    monkeypatch.setattr(launch.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(deploy.DeployError, match="Flower did not accept the run: no such app"):
        launch.submit(pilot, pilot.runs / "run-1", resume=False)


# probe


def test_probe(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("fedprophet.deploy.probe.flop_rate", lambda threads: 1e9 * threads)
    monkeypatch.setattr("fedprophet.deploy.probe.storage_rate", lambda home: 5e6)
    monkeypatch.setattr("fedprophet.deploy.probe.available_memory", lambda: 2_000_000)
    answer = cli("deploy", "probe", "--home", tmp_path / "home", "--threads", "3", "--json").json
    assert answer == {"memory_bytes": 2_000_000, "flops": 3e9, "bandwidth": 5e6}
    said = cli("deploy", "probe", "--home", tmp_path / "home", "--threads", "3").out
    assert "2.0 MB" in said
    assert "3.00 GFLOPS" in said
    assert "5.0 MB/s" in said
