"""The gate, request by request."""

import asyncio

import pytest

from fedprophet.deploy.gate import Gate, is_local

HERE, THERE = ("192.0.2.1", 9092), ("192.0.2.99", 4711)
CONTROL = ["/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs", "/", "/v1/fleet"]
FLEET = ["/v1/fleet/activate-node", "/v1/fleet/pull-messages", "/health"]


def ask(path, client, server=HERE, kind="http", headers=()):
    """Send a request through the gate; return what came back, "inside" if it was handed on."""
    sent = []

    async def inside(scope, receive, send):
        sent.append("inside")

    async def send(event):
        sent.append(event)

    scope = {"type": kind, "path": path, "client": client, "server": server, "headers": list(headers)}
    asyncio.run(Gate(inside)(scope, None, send))
    return sent


@pytest.mark.parametrize("path", [*CONTROL, "/v1/fleets/x", "/healthy", "//v1/fleet/x", "/v1/control/../fleet/x"])
def test_the_network_does_not_reach_what_nodes_do_not_need(path):
    start, body = ask(path, THERE)
    assert start["status"] == 403
    assert b"own machine" in body["body"]
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()


@pytest.mark.parametrize("path", FLEET)
def test_the_network_reaches_what_nodes_need(path):
    assert ask(path, THERE) == ["inside"]


@pytest.mark.parametrize("client", [("127.0.0.1", 1), ("127.8.9.1", 1), ("::1", 1), ("::ffff:127.0.0.1", 1), HERE])
def test_this_machine_reaches_everything(client):
    assert all(ask(path, client) == ["inside"] for path in [*CONTROL, *FLEET])


def test_an_unknown_client_is_not_local():
    assert not is_local({"client": None, "server": HERE})
    assert not is_local({"server": HERE})
    assert not is_local({"client": ("localhost", 1), "server": HERE})
    assert not is_local({"client": THERE, "server": None})


@pytest.mark.parametrize("length", [b"0", b"33554432"])
@pytest.mark.parametrize("client", [THERE, ("127.0.0.1", 1)])
def test_requests_of_nodes_may_have_32_mib(client, length):
    assert ask(FLEET[0], client, headers=[(b"content-length", length)]) == ["inside"]


@pytest.mark.parametrize("client", [THERE, ("127.0.0.1", 1)])
@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-length", b"33554433")],
        [(b"content-length", b"9" * 5000)],
        [(b"content-length", b"-1")],
        [(b"transfer-encoding", b"chunked")],
        [(b"content-length", b"5"), (b"transfer-encoding", b"chunked")],
    ],
)
def test_longer_requests_of_nodes_are_refused_before_they_are_read(client, headers):
    start, body = ask("/v1/fleet/push-object", client, headers=headers)
    assert start["status"] == 413
    assert (b"connection", b"close") in start["headers"]
    assert b"at most 33554432 bytes" in body["body"]


def test_requests_of_runs_have_any_length():
    long = [(b"content-length", b"99999999999")]
    assert ask("/v1/runtime/push-object", ("127.0.0.1", 1), headers=long) == ["inside"]


def test_other_kinds_of_requests():
    assert ask("/v1/control/x", THERE, kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert ask("", None, kind="lifespan") == ["inside"]
