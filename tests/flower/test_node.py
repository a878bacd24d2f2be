"""A node: it does the core's work with its own data and files, keeps what it learns, and refuses in sentences."""

import json
import logging
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, RecordDict

from fedprophet.client.layer_store import ClientStore
from fedprophet.config.load import parse_config
from fedprophet.data.examples import JoinedExamples
from fedprophet.deploy import probe
from fedprophet.engines import EngineParts
from fedprophet.engines.plain import PlainEngine
from fedprophet.errors import CheckpointError, ConfigError
from fedprophet.flower import node
from fedprophet.flower.manifest import RunManifest
from fedprophet.flower.node import NodeConfig, NodeLayers, _open_run, answer
from fedprophet.flower.protocol import (
    PROTOCOL,
    Hello,
    Lacking,
    Refusal,
    hello_request,
    pack_task,
    unpack_answer,
    wire_bytes,
)
from fedprophet.flower.settings import FlowerSettings
from fedprophet.messages.answers import Evaluated, Refreshed, Reported, Trained
from fedprophet.messages.modules import digest
from fedprophet.messages.tasks import Evaluate, Refresh, Report, Task, Train
from fedprophet.messages.values import BACKBONE, EVERY_VERSION, FrozenModule, LocalTraining, Resources
from fedprophet.runs.session import assemble
from fedprophet.storage.files import tensors_to_bytes
from fedprophet.threat import input_threat

RUN = "feedbeef"
# One thread, as the plain engine has here: the bits of a sum depend on how many share it.
MACHINE = {"memory": "3MB", "flops": 2.5e9, "bandwidth": 100, "threads": 1}


@pytest.fixture(scope="module")
def parts(tiny) -> EngineParts:
    return make_parts(tiny({"method": "jfat", "population.clients": 3}))


def make_parts(config: Any, clients: Path | None = None) -> EngineParts:
    made: list[EngineParts] = []

    def keep(parts: EngineParts) -> PlainEngine:
        made.append(parts)
        return PlainEngine(parts.population, parts.workspaces, parts.reserve)

    assemble(config, clients, engine=keep)
    return made[0]


@pytest.fixture
def ask(parts, tmp_path):
    """Return a function that gives client 1's node a task and returns what it answers."""

    def send(task: Task, modules=None, manifest: RunManifest | str | None = None, **config: Any):
        text = manifest if isinstance(manifest, str) else (manifest or RunManifest.of(parts)).to_text()
        record = pack_task(task, run=RUN, manifest=text, modules=modules or {})
        return unpack_answer(answer(record, {"partition-id": 1, "home": str(tmp_path / "home"), **MACHINE, **config}))

    return send


def train(parts: EngineParts, turn: int = 1) -> Train:
    chain = parts.workspaces["backbone"].chain
    start = {name: chain.tensors[name].detach().clone() for name in chain.shared()}
    training = LocalTraining(1, 16, 0.1, 0.9, 0.0, 0.0)
    last = len(chain.atoms)
    return Train(round=turn, client=1, seed=0, last=last, training=training, batch=16, parameters=start)


REPORT = Report(round=1, client=1, seed=0, wants_local=True)


def evaluate(parts: EngineParts, module: str) -> Evaluate:
    """Return a task that needs a fixed module of no atoms."""
    trained = train(parts)
    frozen = (FrozenModule(0, 0, module),)
    return Evaluate(
        round=1, client=1, seed=0, last=trained.last, parameters=trained.parameters, samples=1, frozen=frozen
    )


def test_a_node_trains_within_its_limit_or_says_why_it_cannot(ask, tiny):
    """It plans by itself; what is not in training it keeps in files, as the run's configuration says."""
    config = tiny({"method": "jfat", "population.clients": 3, "memory.enforce": True, "memory.budget": "100%"})
    limited = make_parts(config)
    manifest, task = RunManifest.of(limited), train(limited)
    found = ask(replace(task, memory=limited.reserve), manifest=manifest)
    assert isinstance(found, Trained)
    assert found.plan != ""
    assert 0 < found.peak <= limited.reserve
    assert _open_run(RUN, manifest.to_text(), "", False).workspaces[BACKBONE].frugal
    refused = ask(replace(task, memory=10**4), manifest=manifest)
    assert isinstance(refused, Refusal)
    assert refused.text.startswith("client 1, the model: Conv 1, ")
    assert "the most economical plan is predicted to take" in refused.text


def test_hello_says_which_client_it_is():
    assert unpack_answer(answer(hello_request(), {"partition-id": 7})).client == 7


def test_hello_of_another_protocol_is_answered_and_noted(caplog):
    request = hello_request()
    request["header"]["protocol"], request["header"]["version"] = 99, "9.9"
    with caplog.at_level(logging.WARNING, "fedprophet"):
        hello = unpack_answer(answer(request, {"partition-id": 7}))
    assert isinstance(hello, Hello)
    assert (hello.protocol, hello.client) == (PROTOCOL, 7)
    assert "protocol 99 (fedprophet 9.9)" in caplog.text


def test_task_of_another_protocol_is_refused(parts):
    record = pack_task(REPORT, run=RUN, manifest=RunManifest.of(parts).to_text())
    record["header"]["protocol"] = 99
    refusal = unpack_answer(answer(record, {"partition-id": 1}))
    assert isinstance(refusal, Refusal)
    assert "protocol 99" in refusal.text
    assert "Install the same version" in refusal.text


def test_layers_are_kept_on_disk_as_the_plain_engine_has_them(ask, parts, tmp_path, same_tensors):
    plain = PlainEngine(parts.population, parts.workspaces, parts.reserve)
    for turn in (1, 2):
        task = train(parts, turn)
        (expected,) = plain.map([task])
        update = ask(task)
        assert isinstance(update, Trained)
        assert same_tensors(update.parameters, expected.parameters)
        assert (update.loss, update.samples) == (expected.loss, expected.samples)
        node._open_run.cache_clear()  # as a new process
    report = replace(REPORT, round=2)
    (expected,) = plain.map([report])
    assert expected.local
    assert same_tensors(ask(report).local, expected.local)
    stored = ClientStore(tmp_path / "home" / RUN / "clients", 0)
    assert same_tensors(stored.get("backbone", 1, report.timeline, 3), expected.local)


@pytest.mark.parametrize("keeps", [False, True])
def test_statistics_are_measured_and_sent_or_kept(keeps, ask, tiny, same_tensors):
    untouched = make_parts(tiny({"method": "jfat", "population.clients": 3}))
    given = train(untouched)
    task = Refresh(
        round=1,
        client=1,
        seed=0,
        last=given.last,
        batch=16,
        parameters=given.parameters,
        threat=input_threat(0.1, 0.1, 1),
    )
    plain = PlainEngine(untouched.population, untouched.workspaces, untouched.reserve)
    (expected,) = plain.map([task])
    found = ask(replace(task, keeps=keeps))
    assert isinstance(found, Refreshed)
    assert (found.samples, found.weight) == (expected.samples, float(expected.samples))
    assert same_tensors(found.statistics, {} if keeps else expected.statistics)
    node._open_run.cache_clear()  # as a new process
    assert same_tensors(ask(REPORT).local, expected.statistics if keeps else {})


def test_modules_are_asked_for_once_and_found_again(ask, parts, tmp_path):
    module = {"weight": torch.arange(3.0)}
    name = digest(module)
    task = evaluate(parts, name)
    assert ask(task) == Lacking((name,))
    assert isinstance(ask(task, modules={name: module}), Evaluated)
    node._open_run.cache_clear()
    assert isinstance(ask(task), Evaluated)
    (file,) = (tmp_path / "home" / "modules").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert ask(task) == Lacking((name,))


def test_resources_are_what_the_config_says(ask):
    assert ask(REPORT).resources == Resources(3_000_000, 2.5e9, 100.0)


def test_resources_are_measured_where_the_config_is_silent(ask, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        probe, "machine_resources", lambda home, threads: asked.append((home, threads)) or Resources(7, 8.0, 9.0)
    )
    assert ask(REPORT, memory=0, flops=0, threads=3).resources == Resources(7, 8.0, 100.0)
    assert asked == [(tmp_path / "home", 3)]


def test_own_data_is_everything_there_is(ask, parts):
    assert ask(REPORT).weight == parts.population.samples(1)
    everything = ask(REPORT, shard="own").weight
    assert everything == len(parts.dataset.train) + len(parts.dataset.test) == 1797


def test_own_data_are_joined_in_order(parts):
    config = NodeConfig.of({"partition-id": 1, "shard": "own"})
    run = node._open_run(RUN, RunManifest.of(parts).to_text(), "", False)
    data, every = node._own_data(run, config), JoinedExamples(run.dataset.train, run.dataset.test)
    assert len(data.validation) == round(0.2 * 1797)
    assert len(data.train) + len(data.validation) == 1797
    last = len(run.dataset.train)
    indices = torch.tensor([last, 0, last + 2, 3])
    expected = [run.dataset.test.fetch(torch.tensor([0])), run.dataset.train.fetch(torch.tensor([0]))]
    expected += [run.dataset.test.fetch(torch.tensor([2])), run.dataset.train.fetch(torch.tensor([3]))]
    assert torch.equal(every.fetch(indices), torch.cat(expected))
    assert every.labels[indices].tolist() == [
        int(run.dataset.test.labels[0]),
        int(run.dataset.train.labels[0]),
        int(run.dataset.test.labels[2]),
        int(run.dataset.train.labels[3]),
    ]


def test_normalisation_is_the_servers(parts):
    """Whatever a node's own images look like, the model must see them as those of all others."""
    manifest = RunManifest.of(parts).model_copy(update={"mean": (0.25,), "std": (2.0,)})
    run = node._open_run(RUN, manifest.to_text(), "", False)
    assert (run.dataset.mean, run.dataset.std) == ((0.25,), (2.0,))


def test_manifest_survives_the_journey(parts):
    manifest = RunManifest.of(parts, home="/x y", threads=2)
    assert RunManifest.of_text(manifest.to_text()) == manifest
    assert manifest.mean == parts.dataset.mean
    assert parse_config(manifest.config, "here") == parts.config


def test_pool_of_the_server_is_none_of_a_devices_business(ask, parts):
    config = {**RunManifest.of(parts).config, "fleet": {"pool": "/nowhere/pool.toml"}}
    assert isinstance(ask(REPORT, manifest=RunManifest.of(parts).model_copy(update={"config": config})), Reported)


def test_server_cannot_choose_a_devices_folder(ask, parts, tmp_path):
    chosen = tmp_path / "chosen by the server"
    ask(train(parts), manifest=RunManifest.of(parts, home=str(chosen)))
    assert not chosen.exists()
    assert (tmp_path / "home" / RUN / "clients").is_dir()


def test_server_cannot_choose_where_a_device_keeps_its_images(parts, monkeypatch):
    cache = parts.config.data.model_copy(update={"name": "folder", "options": {"cache": "/chosen/by/the/server"}})
    config = parts.config.model_copy(update={"data": cache}).model_dump(mode="json")
    text = RunManifest.of(parts).model_copy(update={"config": config}).to_text()
    asked, load = [], node.load_dataset

    def noted(config):
        asked.append(config.data.options.get("cache", ""))
        return load(parts.config)

    monkeypatch.setattr(node, "load_dataset", noted)
    node._open_run(RUN, text, "", False)
    node._open_run(RUN, text, "", True)
    assert asked == ["", "/chosen/by/the/server"]  # a simulation is on the server's own machine
    node._open_run.cache_clear()


@pytest.fixture
def started(tiny, tmp_path):
    """Return the parts of a run with starting weights, whose file is gone when the nodes begin."""
    file = tmp_path / "start.safetensors"
    plain = make_parts(tiny({"method": "jfat", "population.clients": 3}))
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.rand(value.shape, generator=generator) + 0.5 if value.is_floating_point() else value
        for name, value in plain.workspaces["backbone"].chain.tensors.items()
    }
    file.write_bytes(tensors_to_bytes(tensors, {"normalisation": "mean .25 std 2"}))
    parts = make_parts(tiny({"method": "jfat", "population.clients": 3, "model.weights": str(file)}))
    file.unlink()
    return parts


def test_starting_weights_are_the_servers_alone(ask, started, parts, same_tensors, tmp_path):
    """The client's own first layers come with the manifest, everything else with the task."""
    task = train(started)
    manifest = RunManifest.of(started)
    (expected,) = PlainEngine(started.population, started.workspaces, started.reserve).map([task])
    update = ask(task, manifest=manifest)
    assert isinstance(update, Trained)
    assert same_tensors(update.parameters, expected.parameters)
    assert update.loss == expected.loss
    # It would not be the same without them, and without weights nothing travels.
    node._open_run.cache_clear()
    other = ask(task, manifest=manifest.model_copy(update={"layers": {}}), home=str(tmp_path / "another"))
    assert not same_tensors(other.parameters, expected.parameters)
    assert RunManifest.of(parts).layers == {}


def test_normalisation_is_that_of_the_model(started):
    """Starting weights may bring numbers of their own."""
    manifest = RunManifest.of(started)
    assert (manifest.mean, manifest.std) == ((0.25,), (2.0,))
    assert started.dataset.mean != (0.25,)


@pytest.mark.parametrize(
    "layers",
    [{"other": ""}, {"backbone": "?"}, {"backbone": "AAAA"}, {"backbone": b64encode(tensors_to_bytes({})).decode()}],
)
def test_first_layers_that_do_not_fit_are_refused(ask, parts, layers):
    refusal = ask(REPORT, manifest=RunManifest.of(parts).model_copy(update={"layers": layers}))
    assert isinstance(refusal, Refusal)
    assert refusal.text.startswith("the run's manifest ")


def with_flower(parts: EngineParts, **changes: Any) -> RunManifest:
    flower = parts.config.of(FlowerSettings).model_copy(update=changes)
    return RunManifest.of(replace(parts, config=parts.config.model_copy(update={"flower": flower})))


def test_updates_travel_in_the_numbers_that_the_config_says(parts, tmp_path):
    def parameter_bytes(**changes: Any) -> int:
        record = pack_task(train(parts), run=RUN, manifest=with_flower(parts, **changes).to_text())
        home = {"partition-id": 1, "home": str(tmp_path / "home"), **MACHINE}
        return wire_bytes(answer(record, home))

    saved = parameter_bytes() - parameter_bytes(updates="bfloat16")
    # safetensors fills its header up to eight bytes
    assert abs(saved - sum(value.nbytes for value in train(parts).parameters.values()) // 2) <= 8


def test_cache_is_as_large_as_the_config_says(ask, parts, tmp_path):
    modules = [{"weight": torch.full((100,), float(value))} for value in (1, 2)]
    manifest = with_flower(parts, cache=600)  # one of them is 400 bytes and a header
    for module in modules:
        task = evaluate(parts, digest(module))
        assert isinstance(ask(task, modules={digest(module): module}, manifest=manifest), Evaluated)
    kept = [file.stem for file in (tmp_path / "home" / "modules").glob("*.safetensors")]
    assert kept == [digest(modules[1])]
    assert ask(evaluate(parts, digest(modules[0])), manifest=manifest) == Lacking((digest(modules[0]),))


def test_actor_of_a_simulation_uses_the_runs_folder(ask, parts, tmp_path, monkeypatch):
    monkeypatch.setattr(node, "_simulated", lambda: True)
    manifest = RunManifest.of(parts, home=str(tmp_path / "run"))
    ask(train(parts), manifest=manifest)
    assert [file.name for file in (tmp_path / "run" / "clients").rglob("*.safetensors")] == ["1.safetensors"]
    expected = parts.population.resources(1, 1, parts.reserve)
    assert ask(REPORT, manifest=manifest).resources == expected


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"partition-id": 2}, "this node is client 2, but the task is for client 1"),
        ({"partition-id": -1}, "partition-id = -1"),
        ({"partition-id": "one"}, "partition-id = 'one'"),
        ({"partition-id": True}, "partition-id = True"),
        ({"shard": "mine"}, "shard = 'mine'"),
        ({"memory": "much"}, "'much' is not a size"),
        ({"flops": -1.0}, "flops = -1.0"),
        ({"bandwidth": "fast"}, "bandwidth = 'fast'"),
        ({"threads": 0}, "threads = 0"),
    ],
)
def test_node_config_that_does_not_fit_is_refused(ask, config, reason):
    refusal = ask(REPORT, **config)
    assert isinstance(refusal, Refusal)
    assert reason in refusal.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"classes": 11}, "images of 1x8x8 in 10 classes, and the run's are images of 1x8x8 in 11 classes"),
        ({"shape": (3, 8, 8)}, "and the run's are images of 3x8x8"),
        ({"config": {"rounds": "many"}}, "as the server sent it"),
        ({"config": {"data": {"name": "cifar10", "root": "/nowhere"}}}, "/nowhere"),
    ],
)
def test_run_that_does_not_fit_is_refused(ask, parts, change, reason):
    refusal = ask(REPORT, manifest=RunManifest.of(parts).model_copy(update=change))
    assert isinstance(refusal, Refusal)
    assert reason in refusal.text


def test_other_classes_are_refused_by_name(ask, parts, monkeypatch):
    here = node.load_dataset(parts.config)
    named = replace(here, names=("cat", "dog", *map(str, range(8))))
    monkeypatch.setattr(node, "load_dataset", lambda config: named)
    node._open_run.cache_clear()
    manifest = RunManifest.of(parts)
    refusal = ask(REPORT, manifest=manifest.model_copy(update={"names": ("cat", "cow", *map(str, range(8)))}))
    assert refusal == Refusal(
        "the classes of the data here are not the run's (here and not in the run: 'dog'; in the run and not here: "
        "'cow'). Give the folders the same names"
    )
    assert isinstance(ask(REPORT, manifest=manifest.model_copy(update={"names": named.names})), Reported)
    node._open_run.cache_clear()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 100_000, json.dumps({"config": 3})])
def test_damaged_manifest_is_refused(ask, text):
    refusal = ask(REPORT, manifest=text)
    assert isinstance(refusal, Refusal)
    assert "the run's manifest cannot be read" in refusal.text


def test_client_beyond_the_population_is_refused(ask):
    refusal = ask(replace(REPORT, client=3), **{"partition-id": 3})
    assert refusal == Refusal("this node is client 3, but the run has 3: 0 to 2")


def test_unknown_model_is_refused(ask):
    refusal = ask(replace(REPORT, architecture="resnet999"))
    assert isinstance(refusal, Refusal)
    assert "This run has: backbone" in refusal.text


def test_defect_is_refused_with_its_text_and_logged(ask, monkeypatch, caplog):
    def broken(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(node, "run_client", broken)
    assert ask(REPORT) == Refusal("MemoryError: no room")
    assert "Traceback" in caplog.text


def test_a_folder_for_layers_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "home").write_text("a file")
    layers = NodeLayers(tmp_path / "home" / "layers")
    with pytest.raises(CheckpointError, match=r"cannot write .*home.*Make room there or correct its permissions"):
        layers.put(BACKBONE, 0, 1, {}, EVERY_VERSION)


def test_nonsense_is_refused():
    refusal = unpack_answer(answer(RecordDict({"x": ConfigRecord({"y": 1})}), {"partition-id": 1}))
    assert refusal == Refusal("the message has no header: it was not made by fedprophet")


def test_home_by_default_is_the_users():
    assert NodeConfig.of({"partition-id": 0}).folder == Path("~/.local/share/fedprophet").expanduser()
    with pytest.raises(ConfigError, match='no "partition-id"'):
        NodeConfig.of({})


def test_a_node_mirrors_its_training_images_where_the_run_does(tiny):
    """Its weight stays the size of its shard, whether the shard is dealt out or its own."""
    parts = make_parts(tiny({"method": "jfat", "population.clients": 3, "data.mirror": True, "data.shift": 2}))
    run = node._open_run("facade", RunManifest.of(parts).to_text(), "", False)
    own = node._own_data(run, NodeConfig.of({"partition-id": 1, "shard": "own"}))
    for data, size in ((own, 1797), (run.population.client_data(1), parts.population.samples(1))):
        count = len(data.own)
        assert data.size == count + len(data.validation) == size
        assert data.shift == 2
        images = data.train.fetch(torch.tensor([3, count + 3]))
        assert len(data.train) == 2 * count
        assert torch.equal(images[1], images[0].flip(2))
        assert not torch.equal(images[1], images[0])
