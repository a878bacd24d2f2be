"""The command line in this process: `cli("train", "--json")` gives its exit code and its output. Finished runs."""

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedprophet.cli import main
from fedprophet.cli.stopping import SIGNALS
from fedprophet.runs.play import play
from fedprophet.runs.run import start

QUICK = {
    "rounds": 1,
    "train.warmup": 0,
    "train.iterations": 1,
    "evaluate.clients": 2,
    "evaluate.test_samples": 20,
    "measure.clients": 2,
    "distillation.iterations": 1,
}
"""The smallest run: a round in each stage, few samples."""


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
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def in_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what makes the command's streams a terminal of a width, without colours."""

    def widen(columns: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda: True)
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(columns))

    return widen


@pytest.fixture(scope="session")
def quick() -> Mapping[str, Any]:
    """Return the settings of the smallest run."""
    return QUICK


@pytest.fixture(scope="session")
def finished(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that gives the folder of a finished run, trained once in a session. Do not change it."""
    made: dict[str, Path] = {}

    def of(method: str = "fedprophet", **changes: Any) -> Path:
        settings = {**QUICK, "method": method, **{key.replace("__", "."): value for key, value in changes.items()}}
        name = json.dumps(settings, sort_keys=True)
        if name not in made:
            made[name] = tmp_path_factory.mktemp("finished") / "run"
            play(start(tiny(settings), made[name]))
        return made[name]

    return of


@pytest.fixture
def copied(finished: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that gives a copy of a finished run in ./run, which a test may change."""
    return lambda *arguments, **changes: shutil.copytree(finished(*arguments, **changes), tmp_path / "run")
