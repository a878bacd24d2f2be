"""The report as one HTML file: the document, and the style and the program that draw it, are all inside."""

import base64
import hashlib
import html
import json
from importlib import resources
from pathlib import Path
from typing import Any

from fedprophet.errors import ConfigError
from fedprophet.report.document import Report
from fedprophet.storage.files import write_atomic

MARK = "<!doctype html><!-- fedprophet report -->"
"""How a report of ours begins."""


def page(report: Report, live: bool = False) -> str:
    """Return the page of a document; a `live` one asks its server for newer documents."""
    style, script = _asset("report.css"), _asset("charts.js") + _asset("report.js")
    policy = {
        "default-src": "'none'",
        "style-src": _hash(style),
        "script-src": _hash(script),
        "connect-src": "'self'" if live else "'none'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    parts = {
        "policy": html.escape("; ".join(f"{key} {value}" for key, value in policy.items())),
        "title": html.escape(title(report)),
        "style": style,
        "script": script,
        "mode": "live" if live else "file",
        "document": embedded(report.to_json()),
    }
    text = _asset("report.html")
    before, *pieces = text.split("{{")
    filled = [parts[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces)]
    return MARK + before + "".join(filled)


def write_page(report: Report, out: Path) -> None:
    """Write the page of a document, unless it is there; a file that is not such a page is not overwritten."""
    if out.exists() and not out.is_file():
        raise ConfigError(f"cannot write {out}: it is no file. Give a file with --out")
    old = out.read_bytes() if out.exists() else None
    if old is not None and not old.startswith(MARK.encode()):
        raise ConfigError(f"{out} is not a report of fedprophet, and stays as it is. Give another file with --out")
    new = page(report).encode()
    if new != old:
        write_atomic(out, new)


def title(report: Report) -> str:
    """Return what the page is called."""
    return f"{', '.join(run.label for run in report.runs)} · FedProphet report"


def embedded(value: Any) -> str:
    """Return JSON that can stand in a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    escapes = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
    # A path that is no valid text has lone surrogates, which no encoding takes.
    plain = "".join(f"\\u{ord(c):04x}" if 0xD800 <= ord(c) <= 0xDFFF else c for c in text)
    for char, escape in escapes.items():
        plain = plain.replace(char, escape)
    return plain


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return resources.files("fedprophet.report").joinpath("assets", name).read_text("utf-8")
