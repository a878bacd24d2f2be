"""The ServerApp plays a whole run on nodes, goes on with one that was killed, and says in sentences what is wrong."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

pytest.importorskip("flwr")

from flwr.app import RecordDict
from flwr.proto.node_pb2 import NodeInfo

from fedprophet.config.load import load_config
from fedprophet.config.reference import to_toml
from fedprophet.data import load
from fedprophet.deploy import DeployError
from fedprophet.deploy.keys import REGISTERED, make_key_pair, registered_form
from fedprophet.display.watch import document
from fedprophet.errors import CheckpointError, ConfigError, TrainingError
from fedprophet.flower.engine import engine_of_devices
from fedprophet.flower.node import answer
from fedprophet.flower.protocol import is_hello
from fedprophet.flower.server_app import engine_on, expect_nodes, keys_on, main, open_run
from fedprophet.runs.files import RunFiles
from fedprophet.runs.journal import Journal
from fedprophet.runs.observer import Observer
from fedprophet.runs.play import play
from fedprophet.runs.run import reopen
from fedprophet.runs.session import assemble
from fedprophet.runs.watched import WatchedRun

pytestmark = pytest.mark.usefixtures("clock")  # nodes may take as long as they need
CHANGES = {
    "method": "jfat",
    "rounds": 3,
    "population.clients": 3,
    "train.warmup": 0,
    "train.iterations": 1,
    "attack.steps": 1,
    "evaluate.clients": 2,
    "evaluate.steps": 1,
    "evaluate.test_samples": 20,
    "flower.deadline": 30.0,
}


@pytest.fixture
def config(tiny, tmp_path) -> str:
    file = tmp_path / "my config.toml"
    file.write_text(to_toml(tiny(CHANGES)))
    return str(file)


def real(home: Path, client: int) -> Callable[[RecordDict], Any]:
    place = {"partition-id": client, "home": str(home / str(client)), "threads": 1}
    place |= {"memory": "1GB", "flops": 1e9, "bandwidth": 1e6 * (client + 1)}
    return lambda record: answer(record, place)


@pytest.fixture
def pilot(fake_grid, tmp_path):
    """Return a function that makes three nodes with homes of their own."""
    return lambda name="nodes": fake_grid({10 + client: real(tmp_path / name, client) for client in range(3)})


class KilledError(Exception):
    """Stands for a `kill -9`: nothing is written on the way out."""


class StoppedAfter(Observer):
    def __init__(self, turn: int) -> None:
        self.turn = turn

    def round_done(self, record, seconds) -> None:
        if record["round"] == self.turn:
            raise KilledError


def content(run: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    records = [{k: v for k, v in record.items() if k != "wire"} for record in Journal(run / "journal.jsonl").read()]
    return {name: value.tolist() for name, value in load_file(run / "model.safetensors").items()}, records


@pytest.mark.slow
def test_whole_run_and_one_that_was_killed_are_the_same(pilot, config, tmp_path):
    whole, killed = tmp_path / "whole run", tmp_path / "killed"
    play(open_run({"config": config, "out": str(whole)}, engine_on(pilot("a"), False), False))
    grid = pilot("b")
    # The round that is repeated has been trained by the nodes before.
    with pytest.raises(KilledError):
        play(open_run({"config": config, "out": str(killed)}, engine_on(grid, False), False), StoppedAfter(2))
    run = open_run({"out": str(killed), "resume": True}, engine_on(grid, False), False)
    assert run.state.round == 1
    play(run)
    assert content(killed) == content(whole)
    own = [
        sorted(p.relative_to(tmp_path / n).parts[-1] for p in (tmp_path / n).rglob("clients/**/*.safetensors"))
        for n in ("a", "b")
    ]
    assert own[0] == own[1]
    assert own[0]
    assert not list(whole.glob("clients/**/*.safetensors"))  # they are the nodes' own
    results = json.loads((whole / "results.json").read_bytes())
    totals = [record["wire"] for record in Journal(whole / "journal.jsonl").read()]
    assert results["wire"] == {key: sum(each[key] for each in totals) for key in ("sent", "received", "whole_model")}
    assert results["faults"] == 0


def test_run_goes_on_without_a_node_that_dies(pilot, config, tmp_path):
    grid = pilot()
    dying, tasks = grid.nodes[11], []

    def dies_later(record: RecordDict) -> Any:
        if not is_hello(record):
            tasks.append(record)
        return dying(record) if len(tasks) < 5 else None

    grid.nodes[11] = dies_later
    given = {"config": config, "out": str(tmp_path / "run"), "overrides": "flower.deadline=0.3"}
    play(open_run(given, engine_on(grid, False), False))
    faults = [record["faults"] for record in Journal(tmp_path / "run" / "journal.jsonl").read()]
    assert faults[0] == {}
    assert {"1": "no answer within 0.3 s"} in faults
    assert all(set(each) <= {"1"} for each in faults)


def test_nobody_answers_stops_the_run_with_the_reason(fake_grid, config, tmp_path):
    grid = fake_grid({10: real(tmp_path, 7)})
    grid.nodes[10] = lambda record: answer(record, {})
    given = {"config": config, "out": str(tmp_path / "run"), "overrides": "flower.deadline=0.05"}
    with pytest.raises(TrainingError, match=r"3 rounds in a row had no usable update.*not connected"):
        play(open_run(given, engine_on(grid, False), False))


def test_files_say_that_the_clients_are_elsewhere(pilot, config, tmp_path):
    path = tmp_path / "run"
    given = {"config": config, "out": str(path), "overrides": "rounds=1 engine=workers evaluate.steps=2"}
    play(open_run(given, engine_on(pilot(), False), False))
    files = RunFiles(path)
    stored = load_config(files.config)
    assert (stored.rounds, stored.engine, stored.evaluate.steps) == (1, "plain", 2)
    identity = json.loads(files.flower.read_bytes())
    assert identity["deployed"] is True
    assert len(identity["run"]) == 32
    noted = [json.loads(line) for line in files.timings.read_text().splitlines()]
    assert {line["engine"] for line in noted} == {"flower"}, "the server's own work is not the run"
    with pytest.raises(CheckpointError, match=r"on other machines.*resume=true"):
        reopen(path)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"config": 3}, "config = 3"),
        ({"out": True}, "out = True"),
        ({"resume": "yes"}, "resume = 'yes'"),
        ({"resume": True}, "resume = true needs the run's folder"),
        ({"from-round": 3}, "from-round = 3"),
        ({"resume": True, "out": "run", "from-round": -1}, "from-round = -1"),
        ({"resume": True, "out": "run", "from-round": True}, "from-round = True"),
        ({"overrides": "seed='1"}, "overrides: No closing quotation"),
        ({"overrides": "seed"}, "not KEY=VALUE"),
        ({"config": "digit"}, "Did you mean 'digits'"),
    ],
)
def test_run_config_that_does_not_fit(given, reason):
    with pytest.raises(ConfigError, match=reason):
        open_run(given, lambda parts: pytest.fail("nothing is assembled"), False)


def test_resume_without_a_run(tmp_path):
    with pytest.raises(CheckpointError, match="there is no run"):
        open_run({"resume": True, "out": str(tmp_path)}, lambda parts: pytest.fail("nothing"), False)


@pytest.fixture
def registered(tmp_path, monkeypatch) -> dict[int, bytes]:
    """Return the keys of clients 0, 1, 2 as Flower tells them; the process is one of their server."""
    keys = tmp_path / "keys"
    keys.mkdir()
    for client in range(3):
        (keys / f"node-{client}.pub").write_bytes(make_key_pair(f"node-{client}").public)
    monkeypatch.setenv(REGISTERED, str(keys))
    return {client: registered_form(keys / f"node-{client}.pub") for client in range(3)}


def telling(grid, keys: dict[int, bytes]):
    grid.get_nodes = lambda: [NodeInfo(node_id=node, public_key=key) for node, key in keys.items()]
    return grid


def test_node_without_the_key_of_its_client_has_no_part_in_a_run(pilot, registered, config, tmp_path):
    """Node 12 has the key of client 2 and says that it is client 1, which is away; node 13's key is nobody's."""
    grid = pilot()
    grid.nodes[12], grid.nodes[13] = grid.nodes.pop(11), grid.nodes[12]
    telling(grid, {10: registered[0], 12: registered[2], 13: b"a key that was registered in another way"})
    given = {"config": config, "out": str(tmp_path / "run"), "overrides": "rounds=1 flower.deadline=1"}
    play(open_run(given, engine_on(grid, False), False))
    records = Journal(tmp_path / "run" / "journal.jsonl").read()
    first = records[0]["faults"]
    assert "says that it is client 1, and its key was made for client 2" in first["2"]
    assert "its key was made for no client" in first["node 13"]
    assert all(set(record["faults"]) <= {"1", "2", "node 13"} for record in records)
    assert {to for to, record in grid.sent if not is_hello(record)} == {10}


def test_nodes_with_the_keys_of_their_clients_play_the_same_run(pilot, registered, config, tmp_path):
    believed = partial(engine_of_devices, pilot("a"), keys=None)
    given = {"config": config, "overrides": "rounds=1"}
    play(open_run({**given, "out": str(tmp_path / "believed")}, believed, False))
    grid = telling(pilot("b"), {10 + client: key for client, key in registered.items()})
    play(open_run({**given, "out": str(tmp_path / "proved")}, engine_on(grid, False), False))
    assert content(tmp_path / "proved") == content(tmp_path / "believed")


def test_run_does_not_begin_where_the_keys_cannot_be_read(pilot, config, tmp_path, monkeypatch):
    monkeypatch.setenv(REGISTERED, str(tmp_path / "gone"))
    out = tmp_path / "run"
    with pytest.raises(DeployError, match=r"cannot read .*gone, the folder of the nodes' public keys"):
        open_run({"config": config, "out": str(out)}, engine_on(pilot(), False), False)
    assert not out.exists()


def test_server_without_keys_says_that_nodes_are_believed(fake_grid, caplog, monkeypatch):
    monkeypatch.delenv(REGISTERED, raising=False)
    assert keys_on(fake_grid({})) is None
    assert "a node is the client that it says it is" in caplog.messages[0]


def test_keys_are_read_anew_each_time(fake_grid, registered, tmp_path):
    found = keys_on(telling(fake_grid({}), {10: registered[0], 11: registered[1], 12: b"another"}))
    assert found() == {10: 0, 11: 1, 12: None}
    keys = tmp_path / "keys"
    (keys / "node-1.pub").rename(keys / "node-7.pub")
    (keys / "node-0.pub").unlink()
    assert found() == {10: None, 11: 7, 12: None}


def test_main_prints_rounds(pilot, config, tmp_path, capsys):
    out = tmp_path / "run of main"
    main(pilot(), SimpleNamespace(run_config={"config": config, "out": str(out), "overrides": "rounds=1"}))
    text = capsys.readouterr().out
    assert "round 1/1" in text
    assert f"Files: {out}" in text


def test_main_logs_rounds_and_the_run_is_watched(pilot, config, tmp_path):
    """Real devices have no simulated time, neither in a log nor for one who looks at the folder."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    given = {"config": config, "out": str(out), "overrides": "rounds=2", "log": "tensorboard"}
    main(pilot(), SimpleNamespace(run_config=given))
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    records = Journal(out / "journal.jsonl").read()
    sent = [(event.step, event.value) for event in events.Scalars("wire/sent_bytes")]
    assert sent == [(record["round"], record["wire"]["sent"]) for record in records]
    assert "time/simulated_seconds" not in events.Tags()["scalars"]
    look = WatchedRun(out).look()
    assert (look.state, look.round, look.deployed) == ("finished", 2, True)
    assert document(look, out)["simulated_seconds"] is None


def test_main_refuses_a_tracker_before_anything_is_written(pilot, config, tmp_path):
    for log, text in {"tensorbord": "unknown tracker 'tensorbord'", 3: "in quotation marks"}.items():
        with pytest.raises(ConfigError, match=text):
            main(pilot(), SimpleNamespace(run_config={"config": config, "out": str(tmp_path / "run"), "log": log}))
    assert not (tmp_path / "run").exists()


def test_main_prints_the_error_and_fails(pilot, capsys):
    with pytest.raises(ConfigError):
        main(pilot(), SimpleNamespace(run_config={"config": "digit"}))
    assert "error: unknown preset 'digit'" in capsys.readouterr().out


@pytest.mark.usefixtures("ray_starts")
def test_simulation_of_too_few_nodes_is_refused_before_anything_is_written(pilot, config, tmp_path):
    out = tmp_path / "run"
    given = {"config": config, "out": str(out), "overrides": "population.clients=5"}
    reason = r"3 nodes, but the run has 5 clients.*'num-supernodes=5'.*population.clients=3"
    with pytest.raises(ConfigError, match=reason):
        open_run(given, engine_on(pilot(), True), True)
    assert not out.exists()


def test_simulation_without_nodes_is_refused(fake_grid):
    with pytest.raises(ConfigError, match="0 nodes"):
        expect_nodes(fake_grid({}), 2)


def test_nodes_of_a_simulation_come_one_after_the_other(fake_grid, monkeypatch):
    grid, moments = fake_grid({}), iter([0, 0, 1, 1, 2, 3])
    monkeypatch.setattr(grid, "get_node_ids", lambda: range(next(moments)))
    expect_nodes(grid, 3)
    assert next(moments, None) is None


def test_model_of_your_own_is_refused(pilot, tiny):
    config = tiny(CHANGES)
    custom = config.model_copy(update={"data": config.data.model_copy(update={"name": "custom"})})
    with pytest.raises(ConfigError, match="that the configuration names"):
        assemble(custom, dataset=load("digits"), engine=engine_on(pilot(), False))
