"""The gate in front of the server: the network reaches what nodes need, only this machine reaches the rest.

Flower 1.41 serves three interfaces on one port. On one of them (fleet) nodes prove who they are. The other two (control
and runtime) do not ask: anyone who reaches the port could register a key, or start a run, which is code on the server
and on every node. So these two answer only requests from the server's own machine.
"""

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

FLEET, HEALTH = "/v1/fleet/", "/health"
"""What the network may reach. Flower checks a node's signature on everything below the first; the second says only
that the server runs."""
REFUSAL = b"Only the server's own machine may ask for this.\n"
MOST_BYTES = 32 * 2**20
"""The longest request of a node. Flower sends arrays in pieces of 5 MiB, and holds a whole request in memory before it
checks the signature."""
TOO_LARGE = f"A request must state its length, and may have at most {MOST_BYTES} bytes.\n".encode()

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gate:
    """An ASGI application that passes a request on if its path is open or it comes from this machine.

    Requests to open paths have a bounded length.
    """

    def __init__(self, inside: Application) -> None:
        self._inside = inside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and is_open(scope["path"]) and not is_short(scope):
            await _refuse(send, 413, TOO_LARGE)
        elif scope["type"] == "lifespan" or is_open(scope["path"]) or is_local(scope):
            await self._inside(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(send, 403, REFUSAL)
        else:
            await send({"type": "websocket.close", "code": 1008})


async def _refuse(send: Send, status: int, text: bytes) -> None:
    # The rest of the request is not read: the connection ends with the answer.
    length = str(len(text)).encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", length), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def is_open(path: str) -> bool:
    """Whether the network may reach a path."""
    return path.startswith(FLEET) or path == HEALTH


def is_short(scope: Scope) -> bool:
    """Whether a request states a length within the limit; a chunked one does not."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"0")
    stated = b"transfer-encoding" not in headers and length.isdigit() and len(length) < 20
    return stated and int(length) <= MOST_BYTES


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
