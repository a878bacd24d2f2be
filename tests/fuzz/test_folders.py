"""The files of a run: damaged, and changed by somebody who makes their digests right again."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fedprophet.client.layer_store import ClientStore
from fedprophet.display.summary import show_results
from fedprophet.messages.codec import encode
from fedprophet.messages.values import EVERY_VERSION
from fedprophet.report.compare import compare
from fedprophet.report.document import report_of
from fedprophet.report.page import page as report_page
from fedprophet.report.tables import document, page
from fedprophet.runs import checkpoint
from fedprophet.runs.play import play
from fedprophet.runs.run import Run, checkpoints_of, reopen, start
from fedprophet.server.coordinator import play_round

from .conftest import Input, damaged, edited

pytestmark = pytest.mark.slow

QUICK = {"rounds": 1, "train.warmup": 0, "train.iterations": 1, "evaluate.clients": 2, "measure.clients": 2}


@dataclass(frozen=True)
class Finished:
    """A run's folder and its parts."""

    run: Run

    @property
    def path(self) -> Path:
        return self.run.files.path

    def loaded(self) -> Any:
        return checkpoints_of(self.run.files, self.run.session.config).load(self.run.session.method.state).state


@pytest.fixture(scope="module")
def template(tiny: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "run"
    play(start(tiny({**QUICK, "engine": "plain"}), path))
    return path


@pytest.fixture
def finished(template: Path, tmp_path: Path) -> Finished:
    """Return a finished run that may be damaged. Of its checkpoints it has the last alone, which nothing replaces."""
    path = shutil.copytree(template, tmp_path / "run")
    for folder in sorted((path / "checkpoints").iterdir())[:-1]:
        shutil.rmtree(folder)
    return Finished(reopen(path))


def _changed(file: Path, data: bytes, act: Callable[[], object]) -> Callable[[], None]:
    """Return what acts while a file has other content."""

    def run() -> None:
        before = file.read_bytes()
        file.write_bytes(data)
        try:
            act()
        finally:
            file.write_bytes(before)

    return run


def test_checkpoints(fuzz: Any, finished: Finished) -> None:
    files = [file for file in sorted((finished.path / "checkpoints").rglob("*")) if file.is_file()]

    def make(rng: random.Random) -> Input:
        file = rng.choice(files)
        data = file.read_bytes()
        if file.suffix == ".json" and rng.random() < 0.5:
            data = json.dumps(edited(rng, json.loads(data))).encode(errors="replace")
        else:
            data = damaged(rng, data)
        return file, _changed(file, data, finished.loaded)

    tried = fuzz("checkpoints", 900, make)
    assert tried.refused > 800


def _other(rng: random.Random, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = rng.choice(list(tensors))
    value = tensors[name]
    choices: tuple[Callable[[], dict[str, torch.Tensor]], ...] = (
        lambda: {key: part for key, part in tensors.items() if key != name},
        lambda: {**tensors, name: value.flatten()[:1]},
        lambda: {**tensors, name: value.double()},
        lambda: {**tensors, name: torch.full_like(value, float("nan"))},
        lambda: {**tensors, name: torch.full_like(value, 3e38)},
        lambda: {**tensors, name + "x": value},
    )
    return rng.choice(choices)()


def test_states_with_right_digests(fuzz: Any, finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that somebody has written by hand is refused when it is read, or can be played on."""
    session = finished.run.session
    method = session.method
    first, _ = play_round(method.round(method.initial()), session.engine)
    honest, known = encode(first), finished.run.contents
    assert known is not None
    shutil.rmtree(finished.path / "checkpoints")

    def make(rng: random.Random) -> Input:
        data, tensors = json.loads(json.dumps(honest[0])), dict(honest[1])
        by_hand = (edited(rng, data), tensors) if rng.random() < 0.7 else (data, _other(rng, tensors))

        def read() -> None:
            monkeypatch.setattr(checkpoint, "encode", lambda value: by_hand if value is first else encode(value))
            try:
                checkpoints_of(finished.run.files, session.config).save(first, 1, known)
            except (ValueError, TypeError, RecursionError):  # nobody could write this
                return
            state = reopen(finished.path).state
            if not method.finished(state):
                play_round(method.round(state), session.engine)

        return by_hand, read

    fuzz("states", 100, make)


FILES = ("journal.jsonl", "timings.jsonl", "results.json", "config.toml", "inputs.json", "setup.json")


@pytest.mark.parametrize("name", FILES)
def test_other_files(fuzz: Any, finished: Finished, name: str) -> None:
    file = finished.path / name

    def look(rng: random.Random) -> None:
        found = compare([finished.path])
        document(found)
        page(found)
        report_page(report_of([finished.path]))
        if rng.random() < 0.1:
            show_results(play(reopen(finished.path)), finished.path, Console(file=StringIO()))

    def make(rng: random.Random) -> Input:
        data = file.read_bytes()
        if file.suffix == ".json" and rng.random() < 0.7:
            data = json.dumps(edited(rng, json.loads(data))).encode(errors="replace")
        elif file.suffix == ".jsonl" and rng.random() < 0.7:
            lines = data.splitlines()
            at = rng.randrange(len(lines))
            lines[at] = json.dumps(edited(rng, json.loads(lines[at]))).encode(errors="replace")
            data = b"\n".join((*lines, b""))
        else:
            data = damaged(rng, data)
        return data, _changed(file, data, lambda: look(rng))

    fuzz(name, 120, make)


def test_clients_layers(fuzz: Any, finished: Finished) -> None:
    files = sorted((finished.path / "clients").rglob("*.safetensors"))

    def make(rng: random.Random) -> Input:
        file = rng.choice(files)
        store = ClientStore(finished.path / "clients", 10**6)
        data = damaged(rng, file.read_bytes())
        return data, _changed(file, data, lambda: store.get("backbone", int(file.stem), EVERY_VERSION, 99))

    tried = fuzz("layers", 300, make)
    assert tried.refused > 100
