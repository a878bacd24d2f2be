"""A pilot's folder: what is written, for whom it is readable, and how it changes."""

import os
import stat
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from flwr.cli.flower_config import read_superlink_connection
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink

from fedprophet.config.load import load_config
from fedprophet.deploy import DeployError, page
from fedprophet.deploy import pilot as pilots
from fedprophet.deploy.certificates import make_authority
from fedprophet.deploy.keys import make_key_pair, registered_form
from fedprophet.deploy.launch import stopped_folder
from fedprophet.deploy.node import open_node, port_of
from fedprophet.deploy.pilot import (
    PilotFile,
    add_node,
    check_server,
    client_of,
    clients_of_keys,
    listen_address,
    make_pilot,
    open_pilot,
    pilot_config,
    raise_clients,
    remove_node,
    renew,
    write_connection,
)
from fedprophet.errors import ConfigError, FedProphetError


@pytest.fixture
def pilot(tmp_path):
    return make_pilot(tmp_path / "pilot", pilot_config(None, (), 2), PilotFile(server="fl.example.org"), nodes=2)


def test_what_is_in_the_folder(pilot):
    files = {str(path.relative_to(pilot.path)) for path in pilot.path.rglob("*") if path.is_file()}
    node_files = {f"nodes/node-{n}/{name}" for n in (0, 1) for name in ("node.toml", "ca.pem", "node.key", "start.sh")}
    assert files == node_files | {
        ".gitignore",
        "README.md",
        "app/pyproject.toml",
        "ca/ca.key",
        "ca/ca.pem",
        "config.toml",
        "deploy.toml",
        "server/keys/node-0.pub",
        "server/keys/node-1.pub",
        "server/server.key",
        "server/server.pem",
        "server/start.sh",
    }
    assert open_pilot(pilot.path) == pilot


def test_private_keys_are_private_and_each_in_one_place(pilot):
    private = {path for path in pilot.path.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()}
    names = {"ca/ca.key", "server/server.key", "nodes/node-0/node.key", "nodes/node-1/node.key"}
    assert {str(path.relative_to(pilot.path)) for path in private} == names
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert len({path.read_bytes() for path in private}) == 4
    assert stat.S_IMODE(pilot.path.stat().st_mode) == 0o700
    assert all(os.access(path, os.X_OK) for path in pilot.path.rglob("start.sh"))


def test_a_node_is_registered_by_the_key_in_its_own_folder(pilot):
    from cryptography.hazmat.primitives import serialization

    for name, public in pilot.nodes().items():
        private = serialization.load_ssh_private_key((pilot.folder(name) / "node.key").read_bytes(), None)
        own = private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        assert registered_form(public) == own
        file = open_node(pilot.folder(name)).file
        assert (file.client, file.server) == (client_of(name), "fl.example.org:9092")
    assert len({open_node(pilot.folder(name)).file.port for name in pilot.nodes()}) == 2


def test_the_app_is_small_and_holds_nothing_secret(pilot):
    config, warnings = load_and_validate(pilot.path / "app" / "pyproject.toml", check_module=False)
    assert not warnings
    assert config["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "fedprophet.flower.server_app:app",
        "clientapp": "fedprophet.flower.client_app:app",
    }
    assert config["tool"]["flwr"]["app"]["config"].keys() >= {"config", "out", "resume"}
    bundle = build_fab_from_disk(pilot.path / "app")
    assert len(bundle) < 10_000
    assert b"PRIVATE" not in bundle


def test_flower_understands_the_servers_command(pilot):
    python, m, name, registered, keys, *arguments = pilot.command()
    assert (m, name, registered, keys) == ("-m", "fedprophet.deploy.superlink", "--registered", str(pilot.keys))
    assert os.access(python, os.X_OK)
    args = _parse_args_run_superlink().parse_args(arguments)
    assert args.enable_supernode_auth
    assert not args.insecure
    assert not args.runtime_dependency_install
    assert (args.host, args.port) == ("0.0.0.0", 9092)
    assert args.ssl_certfile == str(pilot.certificate)


def test_flowers_connection_follows_the_folder(pilot, tmp_path, monkeypatch):
    moved = open_pilot(pilot.path.rename(tmp_path / "else where"))
    write_connection(moved)
    monkeypatch.setenv("FLWR_HOME", str(moved.flower))
    connection = read_superlink_connection(None)
    assert connection.name == "pilot"
    assert connection.address == "127.0.0.1:9092"
    assert connection.root_certificates == str(tmp_path / "else where" / "ca" / "ca.pem")
    assert connection.insecure is False


def test_commands_can_be_typed_where_folders_have_blanks(pilot, tmp_path):
    moved = open_pilot(pilot.path.rename(tmp_path / "else where"))
    typed = f"'{tmp_path / 'else where'}'"

    def said(work: Callable[[], object]) -> str:
        with pytest.raises(FedProphetError) as caught:
            work()
        return str(caught.value)

    assert said(lambda: stopped_folder(moved, None)).endswith(f"fedprophet deploy run {typed}")
    assert said(lambda: stopped_folder(moved, "a b")).endswith(f"fedprophet deploy run {typed} --name 'a b'")
    assert said(lambda: add_node(moved, 0)).count(f"fedprophet deploy remove-node {typed} node-0") == 1
    for key in moved.keys.glob("*.pub"):
        key.unlink()
    assert said(lambda: check_server(moved)).endswith(f"fedprophet deploy add-node {typed}")


def test_the_page_names_every_step(pilot):
    text = (pilot.path / "README.md").read_text()
    for line in (
        f"fedprophet deploy server {pilot.path}",
        "fedprophet deploy node node-0",
        f"fedprophet deploy run {pilot.path} --resume",
        f"scp -pr {pilot.path}/nodes/node-1 DEVICE-1:",
        "--enable-supernode-auth",
        "FLWR_TELEMETRY_ENABLED=0",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.2",
        "FLWR_HOME=",
        "PATH=",
        f"{pilot.expiry():%Y-%m-%d}",
    ):
        assert line in text
    steps = [text.index(f"## {n}. ") for n in (1, 2, 3, 4)]
    assert steps == sorted(steps)


@pytest.mark.parametrize("content", ["file", "folder"])
def test_a_folder_in_use_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "pilot"
    if content == "file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        make_pilot(path, load_config(), PilotFile(server="localhost"), nodes=1)
    assert (path if content == "file" else path / "mine").read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_folder_is_taken_and_a_failure_leaves_it_empty(tmp_path, monkeypatch):
    path = tmp_path / "pilot"
    path.mkdir()

    def full(*_, **__):
        raise OSError("disk full")

    for place in ((page, "app_text"), (pilots, "renew"), (pilots, "as_toml")):  # the last: when all else is written
        with monkeypatch.context() as patch:
            patch.setattr(*place, full)
            with pytest.raises(ConfigError, match=f"cannot make {path}: disk full"):
                make_pilot(path, load_config(), PilotFile(server="localhost"), nodes=1)
        assert list(tmp_path.rglob("*")) == [path]
    make_pilot(path, load_config(), PilotFile(server="localhost"), nodes=1)
    assert (path / "README.md").is_file()


def test_a_wrong_host_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="neither a host name"):
        make_pilot(tmp_path / "pilot", load_config(), PilotFile(server="a b"), nodes=1)
    assert list(tmp_path.iterdir()) == []


# The run's configuration


def test_the_configuration_fits_the_nodes():
    config = pilot_config("digits", ["seed=3"], nodes=2)
    assert (config.population.clients, config.population.cohort, config.seed) == (2, 2, 3)
    many = pilot_config("digits", [], nodes=7)
    assert (many.population.clients, many.population.cohort) == (7, 5)  # digits draws 5


def test_every_number_of_clients_fits_the_nodes(tmp_path):
    file = tmp_path / "counts.toml"
    counts = ("[measure]\nclients = 9", "[evaluate]\nclients = 8", '[norm]\nrefresh = "clean"\nrefresh_clients = 7')
    file.write_text("\n".join(counts))
    assert pilot_config(str(file), [], nodes=2).client_counts() == {
        "population.cohort": 2,
        "norm.refresh_clients": 2,
        "evaluate.clients": 2,
        "measure.clients": 2,
    }


def test_room_for_later_nodes():
    config = pilot_config(None, ["population.clients=10", "population.cohort=6"], nodes=2)
    assert (config.population.clients, config.population.cohort) == (10, 6)
    with pytest.raises(ConfigError, match=r"population.clients is 2, for 3 nodes"):
        pilot_config(None, ["population.clients=2", "population.cohort=2"], nodes=3)


def test_the_methods_own_table_counts():
    assert pilot_config("digits", ["method=heterofl"], nodes=2).rounds == 84


@pytest.mark.parametrize("key", ["model.name", "data.name"])
def test_what_only_python_can_pass_in_is_refused(key):
    with pytest.raises(ConfigError, match="needs a model and data that the configuration names"):
        pilot_config(None, [f"{key}=custom"], nodes=2)


def test_the_written_configuration_is_the_asked_one(pilot):
    assert load_config(pilot.config) == pilot_config(None, (), 2)


# Nodes that come and go


def test_one_more_node(pilot):
    assert add_node(pilot) == "node-2"
    assert list(pilot.nodes()) == ["node-0", "node-1", "node-2"]
    assert open_node(pilot.folder("node-2")).file.port == 9096
    assert raise_clients(pilot, 3) is True
    assert load_config(pilot.config).population.clients == 3
    assert raise_clients(pilot, 3) is False
    assert "# Seed of every random draw of the run." in pilot.config.read_text(), "comments stay"
    before, after = pilot_config(None, (), 2), load_config(pilot.config)
    assert after == before.model_copy(update={"population": before.population.model_copy(update={"clients": 3})})


def test_a_node_beyond_the_last_port_begins_again(pilot):
    assert [port_of(client) for client in (0, 65535 - 9094, 65536 - 9094)] == [9094, 65535, 9094]
    add_node(pilot, client=99_999)
    assert 9094 <= open_node(pilot.folder("node-99999")).file.port <= 65535


def test_a_node_that_could_not_be_made_leaves_nothing_in_the_way(pilot, monkeypatch):
    def full(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(pilots, "make_key_pair", full)
        with pytest.raises(OSError, match="disk full"):
            add_node(pilot)
    assert not pilot.folder("node-2").exists()
    assert add_node(pilot) == "node-2"


def test_a_removed_nodes_place_can_be_taken_again_with_a_new_key(pilot):
    key = registered_form(pilot.nodes()["node-0"])
    assert remove_node(pilot, "node-0") == key
    assert list(pilot.nodes()) == ["node-1"]
    with pytest.raises(ConfigError, match="node-0 still exists"):
        add_node(pilot)
    pilot.folder("node-0").rename(pilot.path / "old")
    assert add_node(pilot) == "node-0"
    assert registered_form(pilot.nodes()["node-0"]) != key
    with pytest.raises(ConfigError, match="unknown node 'node-7'"):
        remove_node(pilot, "node-7")


def test_a_key_made_on_the_device_brings_no_private_one_here(pilot, tmp_path):
    public = tmp_path / "device.pub"
    public.write_bytes(make_key_pair("device").public)
    assert add_node(pilot, client=5, public_key=public) == "node-5"
    assert registered_form(pilot.nodes()["node-5"]) == registered_form(public)
    assert not (pilot.folder("node-5") / "node.key").exists()
    public.write_text("no key")
    with pytest.raises(DeployError, match="not a public key"):
        add_node(pilot, public_key=public)
    assert not pilot.folder("node-2").exists()
    with pytest.raises(ConfigError, match="client 5 already has a node"):
        add_node(pilot, client=5)


def test_a_key_is_one_nodes(pilot, tmp_path):
    public = tmp_path / "device.pub"
    key = pilot.nodes()["node-1"].read_text().split()
    public.write_text(f"{key[0]} {key[1]} under-another-name")
    with pytest.raises(DeployError, match=r"device\.pub is already the key of node-1, but a node is one client"):
        add_node(pilot, client=5, public_key=public)
    with pytest.raises(DeployError, match=r"node-0\.pub is already the key of node-0"):
        add_node(pilot, client=5, public_key=pilot.keys / "node-0.pub")
    assert list(pilot.nodes()) == ["node-0", "node-1"]
    assert not pilot.folder("node-5").exists()


def test_keys_say_which_client_they_were_made_for(pilot):
    keys = {client: registered_form(pilot.keys / f"node-{client}.pub") for client in (0, 1)}
    add_node(pilot, 12)
    keys[12] = registered_form(pilot.keys / "node-12.pub")
    (pilot.keys / "stray.pub").write_text("no key")
    (pilot.keys / "node-01.pub").write_text("no key")
    assert clients_of_keys(pilot.keys) == {key: client for client, key in keys.items()}
    remove_node(pilot, "node-0")
    assert set(clients_of_keys(pilot.keys).values()) == {1, 12}


def test_keys_that_cannot_be_read_are_no_absent_ones(pilot):
    first, second = pilot.nodes().values()
    kept = second.read_bytes()
    second.write_bytes(first.read_bytes())
    with pytest.raises(DeployError, match="hold the same key"):
        clients_of_keys(pilot.keys)
    second.write_bytes(kept[:40])
    with pytest.raises(DeployError, match=r"node-1\.pub is not a public key"):
        clients_of_keys(pilot.keys)
    pilot.keys.rename(pilot.path / "elsewhere")
    with pytest.raises(DeployError, match=r"cannot read .*keys, the folder of the nodes' public keys"):
        clients_of_keys(pilot.keys)


def test_nodes_are_in_the_order_of_their_clients(pilot):
    for client in (10, 9):
        add_node(pilot, client)
    (pilot.keys / "stray.pub").write_text("")
    assert list(pilot.nodes()) == ["node-0", "node-1", "node-9", "node-10"]


# Certificates


def test_a_renewed_certificate_needs_nothing_new_on_the_nodes(pilot):
    authority, before = pilot.authority.read_bytes(), pilot.certificate.read_bytes()
    end = renew(pilot, days=10)
    assert timedelta(days=9) < end - datetime.now(UTC) <= timedelta(days=10)
    assert pilot.authority.read_bytes() == authority
    assert pilot.certificate.read_bytes() != before
    check_server(pilot)


def test_a_server_that_nobody_could_trust_is_not_started(pilot):
    check_server(pilot)
    renew(pilot, days=0)
    with pytest.raises(DeployError, match=r"certificate expired on .*deploy renew"):
        check_server(pilot)
    renew(pilot, days=1)
    for key in pilot.nodes().values():
        key.unlink()
    with pytest.raises(DeployError, match="no node may connect"):
        check_server(pilot)
    pilot.authority.write_bytes(make_authority("another").certificate)
    with pytest.raises(DeployError, match="was not signed by"):
        check_server(pilot)


@pytest.mark.parametrize(
    ("server", "listen", "address", "here"),
    [
        ("localhost", "127.0.0.1", "localhost:9092", "127.0.0.1:9092"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1:9092", "127.0.0.1:9092"),
        ("fl.example.org", "0.0.0.0", "fl.example.org:9092", "127.0.0.1:9092"),
        ("192.0.2.7", "0.0.0.0", "192.0.2.7:9092", "127.0.0.1:9092"),
        ("2001:db8::7", "::", "[2001:db8::7]:9092", "[::1]:9092"),
        ("::1", "::1", "[::1]:9092", "[::1]:9092"),
    ],
)
def test_where_a_server_listens_and_is_found(server, listen, address, here):
    file = PilotFile(server=server, listen=listen_address(server))
    assert (file.listen, file.address, file.here) == (listen, address, here)


def test_what_is_no_pilot(tmp_path, pilot):
    with pytest.raises(DeployError, match=r"is not a pilot's folder.*fedprophet deploy init"):
        open_pilot(tmp_path)
    file = pilot.path / "deploy.toml"
    file.write_text(file.read_text().replace("port = 9092", 'port = "x"'))
    with pytest.raises(ConfigError, match='port: given "x"'):
        open_pilot(pilot.path)
    file.write_text("port = ")
    with pytest.raises(DeployError, match="not valid TOML"):
        open_pilot(pilot.path)


def test_deploy_toml_says_what_its_keys_mean(pilot):
    text = (pilot.path / "deploy.toml").read_text()
    assert tomllib.loads(text) == {"server": "fl.example.org", "names": [], "port": 9092, "listen": "0.0.0.0"}
    assert "# The name or address at which nodes reach the server." in text
