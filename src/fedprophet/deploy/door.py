"""The door before the gate: how many connections may be open whose callers nobody knows, and for how long.

A connection is a stranger's until the gate passes on a request of it that a registered key has signed, or that comes
from this machine. A stranger may stay for a while, also if it sends nothing or does not even shake hands. When there
are too many, from one address or from all, the one that has been there longest goes. So nodes find their way in while
others fill the limits.
"""

import asyncio
import socket
import struct
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedprophet.deploy.gate import KNOWN

MOST, FROM_ONE_ADDRESS = 128, 32
"""How many strangers may be connected."""
STAY_SECONDS = 30.0
"""How long a stranger may stay."""
GRACE_SECONDS = 2.0
"""How long it may stay in any case: nodes must not push each other out when all of them connect at once."""
GOODBYE_SECONDS = 5.0
"""How long TLS may take to close."""


class Visitor(H11Protocol):
    """A connection that says when its caller is known or gone.

    Of uvicorn's two readers of HTTP this is the one that limits the length of headers.
    """

    def __init__(self, server: "DoorServer") -> None:
        self.settled = asyncio.Event()
        state = {**server.lifespan.state, KNOWN: self.settled.set}
        super().__init__(server.config, server.server_state, state)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the caller is gone."""
        super().connection_lost(exc)
        self.settled.set()


class DoorServer(uvicorn.Server):
    """A server that accepts its connections itself; uvicorn would accept all that come."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._accepting: list[asyncio.Task[None]] = []
        self._strangers: dict[asyncio.Task[None], tuple[str, float]] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then accept connections."""
        await super().startup(sockets=[])
        for listener in sockets or [] if self.started else []:
            listener.setblocking(False)
            listener.listen(self.config.backlog)
            self._accepting.append(asyncio.create_task(self._accept(listener)))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections and finish those that there are, but no strangers'."""
        for task in [*self._accepting, *self._strangers]:
            task.cancel()
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            # While callers wait, accepting one does not let others have their turn, and they may wait without end.
            await asyncio.sleep(0)
            try:
                connection, (address, *_) = await asyncio.get_running_loop().sock_accept(listener)
                # A connection that ends before the handshake is reset: a Flower node that finds it closed in good
                # order takes that for a fault of TLS and gives up, but after a reset it tries again.
                _linger(connection, False)
            except OSError:  # no more files may be open: some will be closed soon
                await asyncio.sleep(0.1)
                continue
            if self._make_room(address):
                task = asyncio.create_task(self._meet(connection))
                self._strangers[task] = (address, time.monotonic())
                task.add_done_callback(lambda task: self._strangers.pop(task, None))
            else:
                connection.close()

    def _make_room(self, address: str) -> bool:
        """Send away the oldest stranger if there are too many; return False if all have just come."""
        strangers = list(self._strangers)
        same = [task for task in strangers if self._strangers[task][0] == address]
        crowd = same if len(same) >= FROM_ONE_ADDRESS else strangers if len(strangers) >= MOST else []
        if not crowd:
            return True
        if time.monotonic() - self._strangers[crowd[0]][1] < GRACE_SECONDS:
            return False
        del self._strangers[crowd[0]]
        crowd[0].cancel()
        return True

    async def _meet(self, connection: socket.socket) -> None:
        """Serve a connection, and end it unless its caller is known in time."""
        visitor, transport = Visitor(self), None
        connect: Any = asyncio.get_running_loop().connect_accepted_socket
        try:
            async with asyncio.timeout(STAY_SECONDS):
                transport, _ = await connect(
                    lambda: visitor, connection, ssl=self.config.ssl, ssl_shutdown_timeout=GOODBYE_SECONDS
                )
                _linger(connection, True)
                await visitor.settled.wait()
        except (OSError, TimeoutError):
            pass  # no handshake, or not known in time
        finally:
            if transport is not None and not visitor.settled.is_set():
                transport.abort()


def _linger(connection: socket.socket, lingers: bool) -> None:
    """Say whether closing a connection waits for what was sent, or resets it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", not lingers, 0))
