"""The command line in this process: `cli("train", "--json")` gives its exit code and what it said."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedprophet.cli import main


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """What a user reads after a mistake: a sentence, no traceback, and code 2."""
        assert self.code == 2, (self.code, self.err)
        assert "Traceback" not in self.err
        return self.err


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., Said]]:
    def run(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["fedprophet", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return Said(int(end.value.code or 0), out, err)

    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)
