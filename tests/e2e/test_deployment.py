"""Two runs on a deployment of real processes (deployment.py).

Flower starts a process for every message, so a run of a few rounds takes a minute or two. In the first run the server
is killed and started again, in the second a device is, and a third one claims its place.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytest.importorskip("flwr")

from deployment import BANDWIDTH, IMPOSTOR, LARGE, SMALL, SPEED, Deployment, change, make, wait_for
from processes import free_ports

from fedprophet.client.run import Client
from fedprophet.config.load import load_config
from fedprophet.deploy import OFFLINE
from fedprophet.engines.plain import PlainEngine
from fedprophet.messages.values import SERVER, Resources
from fedprophet.runs.play import play
from fedprophet.runs.run import start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A server and two devices of different memory, connected; a third has the key of nobody."""
    made = Deployment(tmp_path_factory.mktemp("deployment"))
    try:
        make(made, free_ports(5))
        made.named = {"server": made.server()}
        for name in ("node-0", "node-1", "thief"):
            made.named[name] = made.node(made.path / "nodes" / name)
        wait_for(lambda: len(made.online()) == 2, made.told)
        yield made
    finally:
        made.close()


@dataclass(frozen=True)
class Resumed:
    """A run that went on after its server had lost its power, and the modules on the devices' disks before that."""

    path: Path
    modules: Mapping[Path, int]


@pytest.fixture(scope="module")
def resumed(deployment: Deployment) -> Resumed:
    """A run whose server is killed in round 2, when a device has trained and the server does not know it yet."""
    command = deployment.start("deploy", "run", deployment.path, "--name", "resumed", log="run-1")
    deployment.wait_for_round(command, "resumed", 1)
    (layers,) = deployment.home(SMALL).glob("*/clients/*/*/*.safetensors")
    before = layers.stat().st_mtime_ns
    wait_for(lambda: layers.stat().st_mtime_ns != before or not command.running, deployment.told)
    wait_for(lambda: len(deployment.modules()) == 2 or not command.running, deployment.told)
    deployment.named["server"].kill()
    assert len(deployment.journal("resumed")) == 1
    modules = deployment.modules()
    assert command.code == 2
    assert f"fedprophet deploy run {deployment.path} --resume" in command.said
    deployment.named["server"] = deployment.server("server-again")
    wait_for(lambda: deployment.status()["running"], deployment.told)
    deployment.done("deploy", "run", deployment.path, "--resume", log="run-1-resumed")
    return Resumed(deployment.run("resumed"), modules)


@pytest.fixture(scope="module")
def abandoned(deployment: Deployment, resumed: Resumed) -> Path:
    """A run of one module, in whose second round a device is killed and stays away.

    Another is registered while the run goes on, and says that it is the one that is away.
    """
    change(deployment.path / "config.toml", {"rounds": 2, "budget": "100%"})
    command = deployment.start("deploy", "run", deployment.path, "--name", "abandoned", log="run-2")
    wait_for(lambda: (deployment.run("abandoned") / "config.toml").exists() or not command.running, deployment.told)
    deployment.done("deploy", "add-node", deployment.path, "--client", IMPOSTOR, log="add-node")
    folder = deployment.path / "nodes" / f"node-{IMPOSTOR}"
    change(folder / "node.toml", {"client": LARGE, "port": deployment.ports[-1], "memory": deployment.memory[LARGE]})
    deployment.named[folder.name] = deployment.node(folder)
    deployment.wait_for_round(command, "abandoned", 1)
    wait_for(lambda: folder.name in deployment.online() or not command.running, deployment.told)
    deployment.named[f"node-{LARGE}"].kill()
    assert command.code == 0, command.said
    return deployment.run("abandoned")


def in_this_process(deployment: Deployment, out: Path) -> None:
    """Play the same run here: the same clients with the same resources, and nobody in between."""

    class SameDevices(PlainEngine):
        remote = True

        def client(self, number: int) -> Client:
            if number == SERVER:
                return super().client(number)
            resources = Resources(deployment.memory[number], SPEED[number], BANDWIDTH)
            return replace(super().client(number), resources=lambda _: resources)

    config = load_config(str(deployment.run("resumed") / "config.toml"))
    play(start(config, out, engine=lambda parts: SameDevices(parts.population, parts.workspaces, parts.reserve)))


def test_key_that_is_not_registered_is_refused(deployment):
    thief = deployment.named["thief"]
    assert thief.code not in (0, None)
    assert "Failed to activate SuperNode" in thief.said
    assert deployment.online() == ["node-0", "node-1"]


def test_processes_stay_offline(deployment):
    for name in ("server", "node-0", "node-1"):
        environment = deployment.named[name].environment()
        assert {name: environment.get(name) for name in OFFLINE} == dict(OFFLINE)


def test_run_ends_with_a_model_and_results(deployment, resumed):
    results = json.loads((resumed.path / "results.json").read_text())
    assert results["rounds"] == 2
    assert len(results["stages"]) == 2
    assert results["personalised"]["clean"]["samples"] > 0
    assert results["faults"] == 0
    said = (deployment.folder / "run-1-resumed.log").read_text()
    for part in ("going on after round 1", "round 2  module 2/2", "Modules", f"Files: {resumed.path}"):
        assert part in said
    assert "would have taken" not in said  # there is no pool: the devices are real


def test_modules_are_assigned_by_the_memory_that_devices_report(deployment, resumed):
    first, second = (record["assigned"] for record in deployment.journal("resumed"))
    assert first == {str(SMALL): 1, str(LARGE): 2}  # one trains the module in turn and no more, the other looks ahead
    assert second == {str(SMALL): 2, str(LARGE): 2}


def test_run_that_lost_its_server_is_the_undisturbed_one_to_the_bit(deployment, resumed, tmp_path, same_tensors):
    here = tmp_path / "here"
    in_this_process(deployment, here)
    assert same_tensors(*(load_file(path / "model.safetensors") for path in (resumed.path, here)))
    there = deployment.journal("resumed")
    assert [record.pop("faults") for record in there] == [{}, {}]
    assert all(record.pop("wire") for record in there)
    assert there == [json.loads(line) for line in (here / "journal.jsonl").read_text().splitlines()]
    reached = [json.loads((path / "results.json").read_text()) for path in (resumed.path, here)]
    for key in ("personalised", "global", "stages"):
        assert reached[0][key] == reached[1][key]


def test_fixed_modules_travel_once(deployment, resumed):
    first, second = deployment.journal("resumed")
    name = f"{first['fixed']['digest']}.safetensors"
    files = [deployment.home(client) / "modules" / name for client in (SMALL, LARGE)]
    assert set(resumed.modules) == set(files)
    assert deployment.modules() == resumed.modules  # not written again after the server's death
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    # What was sent in the round that was repeated: twice the parameters that came back, to be trained and evaluated,
    # and a few kilobytes for each task; but not the module, which the devices had already.
    assert second["wire"]["sent"] - 2 * second["wire"]["received"] < min(sizes)
    assert second["wire"]["sent"] + second["wire"]["received"] < second["wire"]["whole_model"]


def test_device_that_dies_is_left_out_and_the_run_goes_on(deployment, abandoned):
    first, second = deployment.journal("abandoned")
    assert str(LARGE) not in first["faults"]
    assert set(first["assigned"]) == {str(SMALL), str(LARGE)}
    assert str(LARGE) in second["faults"]
    assert set(second["times"]) == {str(SMALL)}
    assert deployment.named[f"node-{SMALL}"].running
    results = json.loads((abandoned / "results.json").read_text())
    assert results["rounds"] == 2
    assert all(bool(tensor.isfinite().all()) for tensor in load_file(abandoned / "model.safetensors").values())
    assert f"client {LARGE} failed" in (deployment.folder / "run-2.log").read_text()


def test_device_cannot_take_the_place_of_another(deployment, abandoned):
    """It has a registered key, and the device whose place it claims is gone; it is asked who it is, and no more."""
    impostor = deployment.named[f"node-{IMPOSTOR}"]
    assert impostor.running
    first, second = deployment.journal("abandoned")
    faults = {**first["faults"], **second["faults"]}
    assert set(faults) == {str(LARGE), str(IMPOSTOR)}
    reason = f"its node says that it is client {LARGE}, and its key was made for client {IMPOSTOR}"
    assert faults[str(IMPOSTOR)].startswith(reason)
    assert f"{IMPOSTOR} gets no tasks: {reason}" in (deployment.folder / "run-2.log").read_text()
    assert not list(deployment.home(IMPOSTOR).glob("*/clients"))
    assert not list((deployment.home(IMPOSTOR) / "modules").glob("*"))
