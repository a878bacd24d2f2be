"""The live report: the newest document, cheap when nothing is new, for this machine alone."""

import http.client
import json
import threading

import pytest

from fedprophet.errors import ConfigError
from fedprophet.report import serve as module
from fedprophet.report.serve import serve
from fedprophet.storage.locks import folder_lock


def ask(server, path="/document.json", method="GET", **headers):
    """Return the status, the headers and the body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=named)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


@pytest.fixture
def run(write_cascade):
    return write_cascade("run", finished=False)


def test_the_document_follows_the_folder(run):
    with serve([run]) as server:
        status, headers, body = ask(server)
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert json.loads(body)["runs"][0]["rounds"] == 4
        assert ask(server, If_None_Match=headers["ETag"])[0] == 304
        with (run / "journal.jsonl").open("a") as journal:
            journal.write('{"round":5,"times":{}}\n')
        status, newer, body = ask(server, If_None_Match=headers["ETag"])
        assert (status, newer["ETag"] == headers["ETag"]) == (200, False)
        assert json.loads(body)["runs"][0]["rounds"] == 5


def test_folders_are_read_only_when_a_file_has_changed(run, monkeypatch):
    read = []
    original = module.report_of
    monkeypatch.setattr(module, "report_of", lambda paths: read.append(paths) or original(paths))
    with serve([run]) as server:
        for _ in range(3):
            assert ask(server)[0] == 200
        assert len(read) == 1
        with folder_lock(run):
            assert json.loads(ask(server)[2])["runs"][0]["working"] is True
        assert json.loads(ask(server)[2])["runs"][0]["working"] is False
        assert len(read) == 3, "a process came, and went"


def test_the_page_is_live(run):
    with serve([run]) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/"
        status, headers, body = ask(server, "/")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert b'data-mode="live"' in body
        assert b"connect-src &#x27;self&#x27;" in body
        assert ask(server, "/../secret")[0] == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1:1", "", "127.0.0.1.evil.example:{port}"]
)
def test_other_names_are_refused(run, host):
    """A site whose name is made to point here must not read the runs."""
    with serve([run]) as server:
        assert ask(server, Host=host.format(port=server.port))[0] == 403
        assert ask(server, "/", Host=host.format(port=server.port))[0] == 403
        assert ask(server, Host=f"localhost:{server.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_nothing_but_get(run, method):
    with serve([run]) as server:
        assert ask(server, method=method)[0] == 405


def test_a_folder_that_cannot_be_read_is_said_and_tried_again(run, tmp_path):
    config = (run / "config.toml").read_text()
    (run / "config.toml").unlink()
    with serve([run]) as server:
        status, _, body = ask(server)
        assert (status, "there is no run in" in json.loads(body)["error"]) == (503, True)
        assert b"there is no run in" in ask(server, "/")[2]
        (run / "config.toml").write_text(config)
        assert ask(server)[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.1", "example.org", "::", ""])
def test_only_loopback(run, host):
    with pytest.raises(ConfigError, match="no loopback address"):
        serve([run], host)


def test_a_port_in_use_is_named(run):
    with serve([run]) as server, pytest.raises(ConfigError, match=f"port {server.port}: .*. Give another port"):
        serve([run], port=server.port)


def test_it_ends_with_its_block_even_with_a_connection_open(run):
    with serve([run]) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.connect()
        waiter = threading.Thread(target=server.wait)
        waiter.start()
    waiter.join(60)
    assert not waiter.is_alive()
    with pytest.raises(ConnectionRefusedError):
        ask(server)
    connection.close()
