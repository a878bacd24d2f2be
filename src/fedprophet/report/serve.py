"""The report of runs in progress, on this machine alone: a page that asks for what is new as long as it is open."""

import hashlib
import ipaddress
import json
import socket
import sys
import threading
from collections.abc import Collection, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedprophet.errors import ConfigError, FedProphetError
from fedprophet.report.document import Report, report_of
from fedprophet.report.folders import EVALUATION
from fedprophet.report.page import page
from fedprophet.runs.files import RunFiles
from fedprophet.storage.locks import is_locked

DOCUMENT = "/document.json"
IDLE_SECONDS = 30
"""How long a connection may say nothing."""
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def serve(paths: Sequence[Path], host: str = "127.0.0.1", port: int = 0) -> "ReportServer":
    """Return a server of the report of these runs, which listens already; port 0 takes any free one.

    It answers while it is entered, in threads of its own:

        with serve([Path("runs/mine")]) as server:
            print(server.url)
            server.wait()  # until Ctrl-C
    """
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(f"a report is served on this machine alone, and {host!r} is no loopback address: 127.0.0.1")
    try:
        return ReportServer(LiveReport(paths), "127.0.0.1" if host == "localhost" else host, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {reason}. Give another port; 0 takes a free one"
        ) from error


class LiveReport:
    """The document of some runs as their folders are now; it is made anew only when a file has changed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._lock = threading.Lock()
        self._version, self._report = "", Report(())

    def version(self) -> str:
        """Return a text that is another one when a file of a run has changed, or a process has come or gone."""
        stamps: list[object] = []
        for path in self._paths:
            stamps.append(is_locked(path))
            files = RunFiles(path)
            parts = (files.config, files.setup, files.journal, files.timings, files.flower, files.results)
            for file in (*parts, path / EVALUATION):
                try:
                    found = file.stat()
                    stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
                except OSError:
                    stamps.append((0, 0, 0))
        return hashlib.blake2b(repr(stamps).encode(), digest_size=12).hexdigest()

    def read(self) -> tuple[str, Report]:
        """Return the version and the document; FedProphetError if a folder cannot be read."""
        with self._lock:
            version = self.version()  # before reading: what is written meanwhile gives the next version
            if version != self._version:
                self._report = report_of(self._paths)
                self._version = version
            return self._version, self._report


class ReportServer:
    """Answers on a loopback address while it is entered."""

    def __init__(self, live: LiveReport, host: str, port: int) -> None:
        class Handler(_Handler):
            report = live

        self._server = _Server((host, port), Handler)
        names = {_bracketed(host), "localhost"}
        Handler.names = {f"{name}:{self.port}" for name in names} | (names if self.port == 80 else set())
        self._thread = threading.Thread(target=self._server.serve_forever, name="report", daemon=True)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The address to open in a browser."""
        return f"http://{_bracketed(str(self._server.server_address[0]))}:{self.port}/"

    def wait(self) -> None:
        """Wait until Ctrl-C, or until the server is closed elsewhere."""
        while self._thread.is_alive():
            self._thread.join(timeout=1.0)  # without a limit, some systems do not let Ctrl-C through

    def close(self) -> None:
        """Stop answering."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a browser may hold a connection on which it asks nothing

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what went wrong; a browser that goes away in the middle of an answer is no event."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    report: LiveReport
    names: Collection[str]
    """What the address is called by those who may ask."""
    server_version, sys_version = "fedprophet", ""
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        """Answer with the page or the document."""
        # A page of another site that lets its own name point here (DNS rebinding) sends that name.
        if self.headers.get("Host", "").lower() not in self.names:
            self._send(HTTPStatus.FORBIDDEN, b"this address is for the browser of this machine\n")
        elif self.path == "/":
            self._send(HTTPStatus.OK, self._page(), "text/html; charset=utf-8")
        elif self.path == DOCUMENT:
            self._send_document()
        else:
            self._send(HTTPStatus.NOT_FOUND, b"there is only / and /document.json\n")

    def _page(self) -> bytes:
        try:
            _, report = self.report.read()
        except (FedProphetError, OSError) as error:
            report = Report((), notes=(str(error),))  # the page keeps asking: the run may be about to begin
        return page(report, live=True).encode()

    def _send_document(self) -> None:
        try:
            version, report = self.report.read()
        except (FedProphetError, OSError) as error:
            text = json.dumps({"error": str(error)})
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, text.encode(), "application/json")
            return
        tag = f'"{version}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, b"", etag=tag)
        else:
            self._send(HTTPStatus.OK, json.dumps(report.to_json()).encode(), "application/json", tag)

    def _send(
        self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8", etag: str | None = None
    ) -> None:
        self.send_response(status)
        headers = {
            **HEADERS,
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **({"ETag": etag} if etag else {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no GET: nothing here can be changed."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            code = HTTPStatus.METHOD_NOT_ALLOWED
        self.close_connection = True
        super().send_error(code, message, explain)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal belongs to the command."""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
