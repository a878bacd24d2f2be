"""A device's folder: what is read from it, and the command that it becomes."""

import shlex

import pytest
from flwr.common.config import parse_config_args
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from fedprophet.deploy import DeployError
from fedprophet.deploy.certificates import write_private
from fedprophet.deploy.node import Node, NodeFile, as_settings, open_node
from fedprophet.errors import ConfigError
from fedprophet.settings.describe import as_toml

PLAIN = NodeFile(server="fl.example.org:9092", client=3, port=9097)


@pytest.fixture
def folder(tmp_path):
    """Return a function that writes a node's folder with these keys changed."""

    def write(**changes):
        path = tmp_path / "node-3"
        path.mkdir(exist_ok=True)
        (path / "node.toml").write_text(as_toml(PLAIN.model_copy(update=changes), comments=True))
        (path / "ca.pem").write_text("")
        write_private(path / "node.key", b"")
        return path

    return write


def test_what_is_written_reads_back(folder):
    assert open_node(folder()).file == PLAIN


def test_flower_understands_the_command(folder):
    path = folder()
    program, *arguments = open_node(path).command()
    assert program == "flower-supernode"
    args = _parse_args_run_supernode().parse_args(arguments)
    assert args.superlink == "fl.example.org:9092"
    assert args.root_certificates == str(path / "ca.pem")
    assert args.auth_supernode_private_key == str(path / "node.key")
    assert (args.host, args.port, args.insecure) == ("127.0.0.1", 9097, False)
    assert parse_config_args([args.node_config]) == {"partition-id": 3, "home": str(path / "home")}


def test_every_key_reaches_the_client(folder):
    path = folder(
        memory="1.5MB", flops=2e9, bandwidth=1e6, threads=2, data_root="../images", shard="own", home="/srv/a b/home"
    )
    assert parse_config_args([as_settings(open_node(path).settings())]) == {
        "partition-id": 3,
        "home": "/srv/a b/home",
        "memory": 1_500_000,
        "flops": 2e9,
        "bandwidth": 1e6,
        "threads": 2,
        "data-root": str(path / "../images"),
        "shard": "own",
    }


def test_the_home_of_a_user(folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/her")
    assert str(open_node(folder(home="~/fl")).home) == "/home/her/fl"


@pytest.mark.parametrize("text", ["it's", 'a "b"', "back\\slash", "äöü", "a.toml"])
def test_texts_arrive_as_they_are(text):
    assert parse_config_args([as_settings({"home": text, "partition-id": 0})]) == {"home": text, "partition-id": 0}


@pytest.mark.parametrize("text", ['it\'s "both"', "a\nb", "it's \\"])
def test_texts_that_flower_cannot_be_given(text):
    with pytest.raises(ConfigError, match="home: Flower cannot take"):
        as_settings({"home": text})


def test_a_printed_command_survives_the_shell(folder):
    command = open_node(folder(home="/srv/it's")).command()
    assert shlex.split(shlex.join(command)) == command
    assert Node(folder(), PLAIN).home == folder() / "home"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("client = 3", "client = -1"), "client: given -1 .*allowed: a whole number of at least 0"),
        (("client = 3", ""), "has no 'client': The number of this client"),
        (('memory = ""', 'memory = "much"'), 'memory: given "much" .*512MB'),
        (('memory = ""', "memory = 0"), "memory: given 0"),
        (("threads = 0", "thread = 1"), "unknown key 'thread'.*Did you mean 'threads'"),
        (('shard = "run"', 'shard = "mine"'), 'shard: given "mine".*allowed: "run", "own"'),
        (("port = 9097", "port = 99999"), "port: given 99999"),
        (("client = 3", "client = "), "is not valid TOML"),
    ],
)
def test_mistakes_in_node_toml_are_sentences(folder, change, sentence):
    file = folder() / "node.toml"
    text = file.read_text()
    assert change[0] in text
    file.write_text(text.replace(*change))
    with pytest.raises((ConfigError, DeployError), match=sentence):
        open_node(file.parent)


def test_what_is_missing_is_named(folder, tmp_path):
    path = folder()
    (path / "ca.pem").unlink()
    with pytest.raises(DeployError, match=r"ca.pem is missing. Copy ca/ca.pem"):
        open_node(path)
    (path / "node.key").chmod(0o644)
    with pytest.raises(DeployError, match="can be read by others"):
        open_node(path)
    (path / "node.key").unlink()
    with pytest.raises(DeployError, match="cannot read the private key"):
        open_node(path)
    with pytest.raises(DeployError, match="is not a node's folder"):
        open_node(tmp_path)
