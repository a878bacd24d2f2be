"""The gate in front of the server: the network reaches what nodes need, only this machine reaches the rest.

Flower 1.41 serves three interfaces on one port. On one of them (fleet) nodes prove who they are. The other two (control
and runtime) do not ask: anyone who reaches the port could register a key, or start a run, which is code on the server
and on every node. So these two answer only requests from the server's own machine.

On the first one Flower reads a whole request into memory before it looks at the signature, which is in the headers. So
the gate looks first: a request that no registered key has signed may be as long as a question, and no longer. Those of
nodes are read in a limited time, and only so many at once.
"""

import asyncio
import ipaddress
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager, suppress
from typing import Any

FLEET, HEALTH = "/v1/fleet/", "/health"
"""What the network may reach. Flower checks a node's signature on everything below the first; the second says only
that the server runs."""
KNOWN = "known"
"""The name of a connection's function in the state of a request: it says that the caller is no stranger."""
REFUSAL = b"Only the server's own machine may ask for this.\n"
MOST_BYTES = 32 * 2**20
"""The longest request of a node. Flower sends arrays in pieces of 5 MiB."""
SHORT_BYTES = 4096
"""The longest request of a stranger: enough to ask and to be told by Flower why the answer is no."""
ALL_BYTES, NODE_BYTES = 256 * 2**20, 64 * 2**20
"""How much the longer requests may have that are in memory at once, of all nodes and of one. Flower's nodes send two
pieces at a time."""
WAIT_SECONDS, BODY_SECONDS = 20.0, 300.0
"""How long a node's request waits for its turn, and how long it may then take to arrive. Flower's nodes lose patience
after 30 seconds without progress, and then try again, as they do after the answer 503."""
TOO_LARGE = f"A request must state its length, and may have at most {MOST_BYTES} bytes.\n".encode()
UNSIGNED = f"A request of more than {SHORT_BYTES} bytes must be signed with a registered key.\n".encode()
BUSY = b"The server has too many requests at once, or this one took too long to arrive. Try again.\n"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Signer = Callable[[Mapping[bytes, bytes]], bytes | None]


class NoRoomError(Exception):
    """A request has waited for its turn too long."""


class Room:
    """Bytes that requests share, first come, first served."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._first = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[None]:
        """Wait until there is room, and hold it; raise NoRoomError if that takes too long."""
        try:
            async with asyncio.timeout(WAIT_SECONDS), self._first:
                while self._free < size:
                    self._freed.clear()
                    await self._freed.wait()
                self._free -= size
        except TimeoutError:
            raise NoRoomError from None
        try:
            yield
        finally:
            self._free += size
            self._freed.set()


class Gate:
    """An ASGI application that passes a request on if its path is open or it comes from this machine.

    `signer` returns the registered key that has signed the headers of a request, if one has.
    """

    def __init__(self, inside: Application, signer: Signer) -> None:
        self._inside, self._signer = inside, signer
        self._all = Room(ALL_BYTES)
        self._of_node: defaultdict[bytes, Room] = defaultdict(lambda: Room(NODE_BYTES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._inside(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif is_open(scope["path"]):
            await self._bounded(scope, receive, send)
        elif is_local(scope):
            _greet(scope)
            await self._inside(scope, receive, send)
        else:
            await _refuse(send, 403, REFUSAL)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that anyone may send: a short one, or a node's."""
        headers = dict(scope["headers"])
        length = stated_length(headers)
        if length is None or length > MOST_BYTES:
            await _refuse(send, 413, TOO_LARGE)
            return
        key = await asyncio.to_thread(self._signer, headers)
        if key is not None:
            _greet(scope)
        if length <= SHORT_BYTES:
            await self._whole(scope, receive, send)
        elif key is None:
            await _refuse(send, 401, UNSIGNED)
        else:
            try:
                async with self._of_node[key].take(length), self._all.take(length):
                    await self._whole(scope, receive, send)
            except NoRoomError:
                await _refuse(send, 503, BUSY)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a request in a limited time, and pass it on in one piece."""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                events = [await receive()]
                while events[-1].get("more_body"):
                    events.append(await receive())
        except TimeoutError:
            await _refuse(send, 503, BUSY)
            return
        if events[-1]["type"] == "http.disconnect":
            return
        unread = [{"type": "http.request", "body": b"".join(event.get("body", b"") for event in events)}]
        del events

        async def receive_again() -> Any:
            return unread.pop() if unread else await receive()

        await self._inside(scope, receive_again, send)


def _greet(scope: Scope) -> None:
    scope.get("state", {}).get(KNOWN, lambda: None)()


async def _refuse(send: Send, status: int, text: bytes) -> None:
    # The rest of the request is not read: the connection ends with the answer.
    headers = {b"content-type": b"text/plain", b"content-length": b"%d" % len(text), b"connection": b"close"}
    headers |= {b"retry-after": b"1"} if status == 503 else {}
    await send({"type": "http.response.start", "status": status, "headers": list(headers.items())})
    await send({"type": "http.response.body", "body": text})


def is_open(path: str) -> bool:
    """Whether the network may reach a path."""
    return path.startswith(FLEET) or path == HEALTH


def stated_length(headers: Mapping[bytes, bytes]) -> int | None:
    """Return the length that a request states; a chunked one states none."""
    length = headers.get(b"content-length", b"0")
    stated = b"transfer-encoding" not in headers and length.isdigit() and len(length) < 20
    return int(length) if stated else None


def is_local(scope: Scope) -> bool:
    """Whether a connection comes from this machine: over loopback, or from the address at which it arrived."""
    client, server = scope.get("client"), scope.get("server")
    if not client:
        return False
    with suppress(ValueError):
        address = ipaddress.ip_address(client[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback or bool(server and client[0] == server[0])
    return False
