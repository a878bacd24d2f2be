"""The door: real connections on loopback to a server in this process, some of them known."""

import asyncio
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass

import httpx
import pytest
import uvicorn

from fedprophet.deploy import door
from fedprophet.deploy.certificates import make_authority, make_server
from fedprophet.deploy.door import DoorServer
from fedprophet.deploy.gate import KNOWN

STRANGER, FRIEND = (b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % name for name in (b"stranger", b"friend"))


async def application(scope, receive, send):
    if scope["type"] == "http":
        if scope["path"] == "/friend":
            scope["state"][KNOWN]()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    """The files of a server's certificate, and who trusts it."""
    folder, authority = tmp_path_factory.mktemp("tls"), make_authority("test")
    server = make_server(authority, ["127.0.0.1"])
    for name, content in {"ca.pem": authority.certificate, "server.pem": server.certificate, "key": server.key}.items():
        (folder / name).write_bytes(content)
    files = {"ssl_certfile": folder / "server.pem", "ssl_keyfile": str(folder / "key")}
    return files, ssl.create_default_context(cafile=str(folder / "ca.pem"))


@dataclass(frozen=True)
class Door:
    """A server on loopback."""

    port: int
    trusting: ssl.SSLContext

    async def connect(self, said=None, **options):
        """Connect, and have an answer if something is said; return the two ends of the connection."""
        ends = await asyncio.open_connection("127.0.0.1", self.port, **{"ssl": self.trusting, **options})
        if said:
            assert await answered(*ends, said)
        return ends

    async def is_refused(self, **options):
        with pytest.raises(ConnectionResetError):
            await self.connect(STRANGER, **options)


@pytest.fixture
def play(certified):
    """Return a function that plays something at a door, in a limited time."""
    files, trusting = certified

    async def serve(work):
        options = {"timeout_keep_alive": 60, "log_level": "critical", "lifespan": "off", "ws": "none", **files}
        config = uvicorn.Config(application, host="127.0.0.1", port=0, **options)
        config.load()
        listener, server = config.bind_socket(), DoorServer(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup([listener])
        try:
            async with asyncio.timeout(600):
                await work(Door(listener.getsockname()[1], trusting))
        finally:
            server.force_exit = True
            await server.shutdown([listener])

    return lambda work: asyncio.run(serve(work))


async def answered(reader, writer, said):
    writer.write(said)
    return (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def ended(ends):
    """Wait until the server has ended a connection."""
    with suppress(ConnectionResetError):
        assert await ends[0].read() == b""


@pytest.fixture
def limits(monkeypatch):
    def set_(**values):
        for name, value in values.items():
            monkeypatch.setattr(door, name, value)

    return set_


@pytest.mark.parametrize("name", ["MOST", "FROM_ONE_ADDRESS"])
def test_the_oldest_stranger_goes_when_they_are_too_many(limits, play, name):
    limits(**{name: 2, "GRACE_SECONDS": 0.0})

    async def work(door):
        friend = await door.connect(FRIEND)
        silent, talking = await door.connect(), await door.connect(STRANGER)
        new = await door.connect(FRIEND)
        await ended(silent)
        for ends in (friend, talking, new):
            assert await answered(*ends, STRANGER)

    play(work)


def test_others_have_room_while_one_address_has_none(limits, play):
    limits(FROM_ONE_ADDRESS=1, GRACE_SECONDS=60.0)

    async def work(door):
        first = await door.connect(STRANGER)
        await door.is_refused()
        await door.connect(STRANGER, local_addr=("127.0.0.2", 0))
        assert await answered(*first, STRANGER)

    play(work)


def test_strangers_do_not_push_each_other_out_at_once(limits, play):
    limits(MOST=2, GRACE_SECONDS=60.0)

    async def work(door):
        there = [await door.connect(STRANGER) for _ in range(2)]
        await door.is_refused()
        assert await answered(*there[0], FRIEND)
        await door.connect(STRANGER)  # there is room again
        assert await answered(*there[1], STRANGER)

    play(work)


def test_a_stranger_may_not_stay(limits, play):
    async def work(door):
        friend = await door.connect(FRIEND)
        limits(STAY_SECONDS=5.0)  # long enough to shake hands on a busy machine
        silent, talking = await door.connect(), await door.connect(STRANGER)
        await ended(silent)
        await ended(talking)
        assert await answered(*friend, STRANGER)

    play(work)


def test_who_has_gone_takes_no_room(limits, play):
    limits(MOST=1, GRACE_SECONDS=60.0)

    async def work(door):
        _, writer = await door.connect(STRANGER)
        await door.is_refused()
        writer.close()
        while True:  # the server takes a moment to notice
            with suppress(ConnectionResetError):
                await door.connect(STRANGER)
                break

    play(work)


def test_others_get_their_turn_between_those_who_knock(play, monkeypatch):
    turns = [0]

    async def take_turns():
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def work(door):
        knocked_at, all_knocked = [], asyncio.Event()

        def refuse(server, address):
            knocked_at.append(turns[0])
            if len(knocked_at) == 50:
                all_knocked.set()
            return False

        monkeypatch.setattr(DoorServer, "_make_room", refuse)
        knocking = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(50)]
        other = asyncio.create_task(take_turns())
        await all_knocked.wait()
        other.cancel()
        for connection in knocking:
            connection.close()
        assert len(set(knocked_at)) == 50

    play(work)


def test_headers_have_an_end(play):
    async def work(door):
        reader, writer = await door.connect()
        writer.write(b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000)
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")

    play(work)


def test_who_is_sent_away_before_the_handshake_finds_its_connection_reset(limits, play):
    """Flower's nodes give up after an error that names TLS, which a connection closed in good order gives."""
    limits(STAY_SECONDS=0.5)

    async def work(door):
        reader, writer = await door.connect(ssl=None)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        limits(STAY_SECONDS=60.0, MOST=1, GRACE_SECONDS=60.0)
        first = await door.connect(STRANGER)
        async with httpx.AsyncClient(verify=door.trusting) as client:
            with pytest.raises(httpx.TransportError) as refused:
                await client.get(f"https://127.0.0.1:{door.port}/stranger")
        assert not any(word in str(refused.value).lower() for word in ("certificate", "ssl", "tls"))
        assert await answered(*first, STRANGER)

    play(work)
