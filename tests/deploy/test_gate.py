"""The gate, request by request."""

import asyncio

import pytest

from fedprophet.deploy import gate as gate_module
from fedprophet.deploy.gate import Gate, is_local

HERE, THERE = ("192.0.2.1", 9092), ("192.0.2.99", 4711)
LOOPBACK = ("127.0.0.1", 1)
CONTROL = ["/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs", "/", "/v1/fleet"]
FLEET = ["/v1/fleet/activate-node", "/v1/fleet/pull-messages", "/health"]
PUSH = "/v1/fleet/push-object"
MIB = 2**20
GONE = None


class Asked:
    """A request: what came back, and "known" and "inside" when its caller was greeted and when it was handed on."""

    def __init__(self, path, client=THERE, server=HERE, kind="http", headers=(), body=(b"",), whole=True):
        self.scope = {"type": kind, "path": path, "client": client, "server": server, "headers": list(headers)}
        self.scope |= {"asked": self, "state": {"known": lambda: self.sent.append("known")}}
        self.sent, self.unread, self.whole, self.got = [], list(body), whole, None
        self.inside, self.done = asyncio.Event(), asyncio.Event()

    async def receive(self):
        if not self.unread:
            await asyncio.Event().wait()  # nothing more comes
        part = self.unread.pop(0)
        if part is GONE:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(self.unread) or not self.whole}

    async def send(self, event):
        self.sent.append(event)

    def through(self, gate):
        return asyncio.create_task(gate(self.scope, self.receive, self.send))

    @property
    def status(self):
        return next(event["status"] for event in self.sent if "status" in event)


async def inside(scope, receive, send):
    """What is behind the gate: it reads the request and answers when it is told to."""
    asked = scope["asked"]
    asked.sent.append("inside")
    asked.inside.set()
    if scope["path"].startswith("/v1/fleet/"):
        asked.got = await receive()
        await asked.done.wait()


def make_gate():
    return Gate(inside, lambda headers: headers.get(b"signed-by"))


def ask(*arguments, **keywords):
    """Send a request through a gate of its own; return what came back. With body=() nothing of it may be read."""

    async def play():
        asked = Asked(*arguments, **keywords)
        asked.done.set()
        async with asyncio.timeout(600):
            await asked.through(make_gate())
        return asked.sent

    return asyncio.run(play())


def length(number, node=None):
    return [(b"content-length", b"%d" % number), *([(b"signed-by", node)] if node else [])]


# Who reaches what


@pytest.mark.parametrize("path", [*CONTROL, "/v1/fleets/x", "/healthy", "//v1/fleet/x", "/v1/control/../fleet/x"])
def test_the_network_does_not_reach_what_nodes_do_not_need(path):
    start, body = ask(path, THERE)
    assert start["status"] == 403
    assert b"own machine" in body["body"]
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()


@pytest.mark.parametrize("path", FLEET)
def test_the_network_reaches_what_nodes_need(path):
    assert ask(path, THERE) == ["inside"]


@pytest.mark.parametrize("client", [LOOPBACK, ("127.8.9.1", 1), ("::1", 1), ("::ffff:127.0.0.1", 1), HERE])
def test_this_machine_reaches_everything(client):
    assert all(ask(path, client) == ["known", "inside"] for path in CONTROL)
    assert all(ask(path, client) == ["inside"] for path in FLEET), "nodes have to prove who they are, here too"


def test_an_unknown_client_is_not_local():
    assert not is_local({"client": None, "server": HERE})
    assert not is_local({"server": HERE})
    assert not is_local({"client": ("localhost", 1), "server": HERE})
    assert not is_local({"client": THERE, "server": None})


def test_other_kinds_of_requests():
    closed = [{"type": "websocket.close", "code": 1008}]
    assert ask("/v1/control/x", THERE, kind="websocket") == closed
    assert ask(PUSH, THERE, kind="websocket") == closed
    assert ask("", None, kind="lifespan") == ["inside"]


# How long a request may be


@pytest.mark.parametrize("size", [0, 4097, 33554432])
@pytest.mark.parametrize("client", [THERE, LOOPBACK])
def test_requests_of_nodes_may_have_32_mib(client, size):
    assert ask(PUSH, client, headers=length(size, b"node-0")) == ["known", "inside"]


@pytest.mark.parametrize("client", [THERE, LOOPBACK])
@pytest.mark.parametrize("path", [PUSH, "/health"])
def test_requests_without_a_registered_key_are_refused_unread_unless_they_are_short(path, client):
    assert ask(path, client, headers=length(4096)) == ["inside"]
    start, body = ask(path, client, headers=length(4097), body=())
    assert start["status"] == 401
    assert (b"connection", b"close") in start["headers"]
    assert b"registered key" in body["body"]


@pytest.mark.parametrize("client", [THERE, LOOPBACK])
@pytest.mark.parametrize(
    "headers",
    [
        length(33554433),
        [(b"content-length", b"9" * 5000)],
        [(b"content-length", b"-1")],
        [(b"transfer-encoding", b"chunked")],
        [(b"content-length", b"5"), (b"transfer-encoding", b"chunked")],
    ],
)
def test_longer_requests_of_nodes_are_refused_before_they_are_read(client, headers):
    start, body = ask(PUSH, client, headers=[*headers, (b"signed-by", b"node-0")], body=())
    assert start["status"] == 413
    assert (b"connection", b"close") in start["headers"]
    assert b"at most 33554432 bytes" in body["body"]


def test_requests_of_runs_have_any_length():
    assert ask("/v1/runtime/push-object", LOOPBACK, headers=length(99999999999)) == ["known", "inside"]


# How many at once, and for how long


def test_a_request_arrives_in_one_piece():
    async def play():
        asked = Asked(PUSH, headers=length(5), body=[b"ab", b"", b"cde"])
        asked.done.set()
        await asked.through(make_gate())
        assert asked.got == {"type": "http.request", "body": b"abcde"}

    asyncio.run(play())


def test_a_caller_that_goes_is_not_answered():
    assert ask(PUSH, headers=length(5), body=[b"ab", GONE]) == []


def test_a_request_that_does_not_arrive_in_time_is_given_up(monkeypatch):
    monkeypatch.setattr(gate_module, "BODY_SECONDS", 0.01)
    known, start, body = ask(PUSH, headers=length(9000, b"node-0"), body=[b"ab", b"cd"], whole=False)
    assert known == "known"
    assert start["status"] == 503
    assert (b"retry-after", b"1") in start["headers"]
    assert b"Try again" in body["body"]


async def all_inside(requests):
    async with asyncio.timeout(600):
        for asked in requests:
            await asked.inside.wait()


def test_long_requests_wait_until_there_is_room():
    """256 MiB for all and 64 MiB for one node: eight requests of 32 MiB from four nodes, and then one at a time."""

    async def play():
        gate = make_gate()
        first = [Asked(PUSH, headers=length(32 * MIB, b"node-%d" % (number // 2))) for number in range(8)]
        tasks = [asked.through(gate) for asked in first]
        await all_inside(first)
        small, large, question = (Asked(PUSH, headers=length(size, b"node-9")) for size in (MIB, 32 * MIB, 100))
        tasks += [large.through(gate), small.through(gate), question.through(gate)]
        await all_inside([question])  # what is short does not wait
        assert not large.inside.is_set()
        assert not small.inside.is_set(), "it came later"
        first[0].done.set()
        await all_inside([large])
        assert not small.inside.is_set()
        first[1].done.set()
        await all_inside([small])
        for asked in (*first, small, large, question):
            asked.done.set()
        await asyncio.gather(*tasks)

    asyncio.run(play())


def test_one_node_does_not_take_all_the_room():
    async def play():
        gate = make_gate()
        greedy = [Asked(PUSH, headers=length(32 * MIB, b"node-0")) for _ in range(3)]
        other = Asked(PUSH, headers=length(32 * MIB, b"node-1"))
        tasks = [asked.through(gate) for asked in (*greedy, other)]
        await all_inside([*greedy[:2], other])
        assert not greedy[2].inside.is_set()
        greedy[0].done.set()
        await all_inside(greedy)
        for asked in (*greedy, other):
            asked.done.set()
        await asyncio.gather(*tasks)

    asyncio.run(play())


def test_who_waits_too_long_is_told_to_come_back_and_takes_no_room(monkeypatch):
    monkeypatch.setattr(gate_module, "WAIT_SECONDS", 0.01)

    async def play():
        gate = make_gate()
        holding = [Asked(PUSH, headers=length(32 * MIB, b"node-0")) for _ in range(2)]
        tasks = [asked.through(gate) for asked in holding]
        await all_inside(holding)
        late = Asked(PUSH, headers=length(32 * MIB, b"node-0"), body=[])
        await late.through(gate)
        assert late.status == 503
        assert "inside" not in late.sent
        for asked in holding:
            asked.done.set()
        await asyncio.gather(*tasks)
        again = [Asked(PUSH, headers=length(32 * MIB, b"node-0")) for _ in range(2)]
        tasks = [asked.through(gate) for asked in again]
        await all_inside(again)
        for asked in again:
            asked.done.set()
        await asyncio.gather(*tasks)

    asyncio.run(play())
