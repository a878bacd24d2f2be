"""How much of a server's memory connections without a key can hold, and whether a node still gets its answers.

    python benchmarks/strangers.py --out benchmarks/results        # about five minutes on two cores

A real server with TLS on loopback. For some seconds many connections at once send it what it cannot use and keep it
waiting for the rest: a request of 32 MiB, headers without an end, nothing after the handshake, or no handshake. Who is
sent away comes back. Meanwhile a registered node at another address asks for messages, four times a second over the
connection that it has and as often over a new one. The table has the largest resident memory of the server's process.
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from machine import measured

from fedprophet.deploy import environment
from fedprophet.deploy.pilot import Pilot, PilotFile, make_pilot, pilot_config
from fedprophet.deploy.status import pilot_status

MIB = 2**20
REQUEST = (
    b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/protobuf\r\n"
    b"Content-Length: %d\r\n\r\n" % (32 * MIB)
)
PIECE, PIECES = b"x" * 65536, 512
HEADERS = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: localhost\r\n"
HEADER = b"x-name: %b\r\n" % (b"x" * 65000)
KINDS = {"body": "a request of 32 MiB", "headers": "endless headers", "idle": "nothing", "silent": "no TLS handshake"}
ELSEWHERE = "127.0.0.2"
"""The strangers' address; the node's is another."""
TRUSTING = ssl.create_default_context()
TRUSTING.check_hostname, TRUSTING.verify_mode = False, ssl.CERT_NONE
TOO_MUCH = 6 * 1024 * MIB
"""The server's memory at which an attack ends: this machine needs some, too."""


@dataclass
class Found:
    """What one attack did."""

    kind: str
    connections: int
    before: int
    most: int = 0
    sent: int = 0
    most_open: int = 0
    kept: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)
    failures: int = 0


@contextmanager
def server(folder: Path) -> Iterator[tuple[Pilot, subprocess.Popen[bytes]]]:
    """Start the server of a pilot with two nodes; it is always ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    file = PilotFile(server="localhost", port=port, listen="127.0.0.1")
    pilot = make_pilot(folder / "pilot", pilot_config(None, (), 2), file, nodes=2)
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(pilot.command(), env=environment(pilot.flower), stdout=log, stderr=log)
    try:
        while not pilot_status(pilot)["running"]:
            if process.poll() is not None:
                sys.exit((folder / "server.log").read_text())
            time.sleep(0.2)
        yield pilot, process
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def resident(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def node(pilot: Pilot, name: str) -> Callable[[bool], None]:
    """Connect as a node; return a function that asks for messages, over the same connection or a new one."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key: Any = load_ssh_private_key((pilot.folder(name) / "node.key").read_bytes(), None)
    address, authority = f"localhost:{pilot.file.port}", pilot.authority.read_bytes()

    def connect() -> FleetHttpClient:
        signed = [NodeAuthHttpInterceptor(key, key.public_key())]
        return FleetHttpClient.from_server_address(address, False, authority, interceptors=signed)

    kept, public = connect(), public_key_to_bytes(key.public_key())
    answer = kept.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=30))
    request = PullMessagesRequest(node=Node(node_id=answer.node_id))

    def ask(anew: bool) -> None:
        if anew:
            with connect() as client:
                client.PullMessages(request)
        else:
            kept.PullMessages(request)

    return ask


async def stranger(kind: str, port: int, sent: Any) -> None:
    """Connect, send until the server has had enough, and begin again."""
    while True:
        with suppress(OSError, ssl.SSLError, asyncio.IncompleteReadError):
            ssl_ = None if kind == "silent" else TRUSTING
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=ssl_, local_addr=(ELSEWHERE, 0))
            try:
                if kind in ("body", "headers"):
                    writer.write(REQUEST if kind == "body" else HEADERS)
                    for _ in range(PIECES - 1):  # all but the last, so that the request is never whole
                        writer.write(PIECE if kind == "body" else HEADER)
                        await writer.drain()
                        sent.value += len(PIECE)
                await reader.read()
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.05)


def strangers(kind: str, count: int, port: int, sent: Any, begun: Any) -> None:
    """Be many of them, in a process of their own, until it is ended."""

    async def be() -> None:
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # a connection that the server ends is no news
        begun.set()
        await asyncio.gather(*(stranger(kind, port, sent) for _ in range(count)))

    asyncio.run(be())


def watch(found: Found, pid: int, end: float) -> None:
    """Look at the server's memory and files until the time is over."""
    while time.monotonic() < end and found.most < TOO_MUCH:
        found.most = max(found.most, resident(pid))
        found.most_open = max(found.most_open, len(list(Path(f"/proc/{pid}/fd").iterdir())))
        time.sleep(0.05)


def ask_until(end: float, ask: Callable[[], None], times: list[float], found: Found) -> None:
    """Ask as a node, and note how long each answer took."""
    while time.monotonic() < end:
        began = time.monotonic()
        try:
            ask()
            times.append(round(time.monotonic() - began, 3))
        except Exception as error:  # whatever happened to it, it got no answer
            found.failures += 1
            print(f"  a node got no answer: {str(error).splitlines()[0]}", flush=True)
        time.sleep(0.25)


def attack(kind: str, count: int, pilot: Pilot, process: subprocess.Popen[bytes], seconds: float) -> Found:
    """Let strangers and nodes at the server for some seconds."""
    context = multiprocessing.get_context("spawn")
    found, sent = Found(kind, count, resident(process.pid)), context.Value("q", 0, lock=False)
    ask = node(pilot, "node-0")
    begun = context.Event()
    others = context.Process(target=strangers, args=(kind, count, pilot.file.port, sent, begun), daemon=True)
    others.start()
    begun.wait()
    end = time.monotonic() + seconds
    works = [threading.Thread(target=watch, args=(found, process.pid, end))]
    for anew, times in ((False, found.kept), (True, found.fresh)):
        works.append(threading.Thread(target=ask_until, args=(end, partial(ask, anew), times, found)))
    for work in works:
        work.start()
    for work in works:
        work.join()
    found.sent = sent.value
    others.kill()
    others.join()
    return found


def row(found: Found) -> str:
    def longest(times: list[float]) -> str:
        return f"{max(times, default=float('nan')):.2f} s"

    cells = [KINDS[found.kind], str(found.connections), f"{found.before / MIB:.0f}", f"{found.most / MIB:.0f}"]
    cells += [f"{found.sent / MIB:.0f}", str(found.most_open), str(len(found.kept) + len(found.fresh))]
    return f"| {' | '.join([*cells, str(found.failures), longest(found.kept), longest(found.fresh)])} |"


def main() -> None:
    """Run all attacks and print the table; with --out also write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, nargs="*", default=[12, 100, 500])
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server is ended then, too
    rows = []
    for kind in arguments.kinds:
        for count in arguments.connections:
            with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as (pilot, process):
                rows.append(attack(kind, count, pilot, process, arguments.seconds))
                print(row(rows[-1]), flush=True)
    head = ["what they send", "connections", "MiB before", "most MiB", "MiB sent", "most open files", "nodes' answers"]
    head += ["without answer", "longest wait, connected", "longest wait, new"]
    text = (
        f"# Connections without a key\n\n{measured('strangers')} {arguments.seconds:g} seconds each.\n\n"
        f"| {' | '.join(head)} |\n|{' --- |' * len(head)}\n" + "\n".join(map(row, rows)) + "\n"
    )
    print(text)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "strangers.md").write_text(text)
        lines = ",\n".join(json.dumps(asdict(found)) for found in rows)
        (arguments.out / "strangers.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
