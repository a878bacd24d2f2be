"""Which engine each round ran on: recorded, shown, and said where it changes."""

import json

import pytest

from fedprophet.runs.engine_history import EngineSpan, EngineUse, change, engines_text, spans, spans_of
from fedprophet.runs.files import RunFiles
from fedprophet.runs.observer import Observer
from fedprophet.runs.play import play
from fedprophet.runs.run import reopen, start

WORKERS, GPU = EngineUse("workers", "float32"), EngineUse("cuda", "bfloat16")
SMALL = {"method": "jfat", "rounds": 4, "train.iterations": 1, "attack.steps": 1, "evaluate.clients": 2}
AUTO = {**SMALL, "engine": "auto", "threads": 2}


class Watcher(Observer):
    """Keeps notes."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.fixture
def no_gpu(monkeypatch):
    """ "auto" is the workers engine on several cores, wherever the tests run, and the plain one on a single core."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def line(number, use=None):
    noted = {"engine": use.engine, "precision": use.precision} if use else {}
    return {"round": number, "seconds": 1.0, **noted}


def test_rounds_of_one_engine_are_a_span():
    lines = [line(1), *(line(number, WORKERS) for number in (2, 3)), line(4, GPU), line(5, WORKERS), line(6, WORKERS)]
    found = spans(lines)
    assert found == (EngineSpan(WORKERS, 2, 3), EngineSpan(GPU, 4, 4), EngineSpan(WORKERS, 5, 6)), (
        "the first line does not say"
    )
    assert spans_of(json.loads(json.dumps([span.to_json() for span in found]))) == found
    assert spans([line(1)]) == ()
    assert spans([line(1, GPU), line(3, GPU)]) == (EngineSpan(GPU, 1, 3),), "a line that is missing is no other engine"
    other = EngineUse("cuda", "float32")
    assert spans([line(1, GPU), line(2, other)]) == (EngineSpan(GPU, 1, 1), EngineSpan(other, 2, 2))


def test_spans_in_words():
    assert engines_text([EngineSpan(WORKERS, 1, 7)]) == "workers"
    assert engines_text([EngineSpan(WORKERS, 1, 3), EngineSpan(GPU, 4, 5)]) == "workers to round 3, then cuda, bfloat16"
    assert engines_text([EngineSpan(WORKERS, 6, 7)]) == "not recorded to round 5, then workers"
    assert change([EngineSpan(WORKERS, 1, 3)], WORKERS) is None
    assert change([], GPU) is None
    assert change([EngineSpan(GPU, 1, 2), EngineSpan(WORKERS, 3, 3)], GPU) == (
        "round 3 ran on engine workers, and the run continues on engine cuda, bfloat16, "
        "whose floating-point rounding differs"
    )


@pytest.mark.slow
def test_what_auto_has_become_is_recorded(tiny, tmp_path, no_gpu):
    results = play(start(tiny(AUTO), tmp_path / "run"))
    files = RunFiles(tmp_path / "run")
    assert 'engine = "auto"' in files.config.read_text()
    timings = [json.loads(text) for text in files.timings.read_text().splitlines()]
    assert [(line["engine"], line["precision"]) for line in timings] == [("workers", "float32")] * 4
    assert results["engines"] == [{"engine": "workers", "precision": "float32", "rounds": [1, 4]}]


def test_a_run_that_goes_on_with_another_engine_says_so(stopped, no_gpu):
    """As on another machine: the rounds so far ran on workers, and with a single core "auto" is the plain engine."""
    timings = RunFiles(stopped).timings
    timings.write_text(timings.read_text().replace('"plain"', '"workers"'))
    going_on, finished = Watcher(), Watcher()
    results = play(reopen(stopped), going_on)
    assert going_on.notes[1:] == [change([EngineSpan(WORKERS, 1, 3)], EngineUse("plain", "float32"))]
    assert [(span["engine"], span["rounds"]) for span in results["engines"]] == [("workers", [1, 3]), ("plain", [4, 4])]
    timings.write_text(timings.read_text().replace('"plain"', '"workers"'))
    assert play(reopen(stopped), finished) == results
    assert finished.notes[1:] == [], "no round is left"
    assert all("timings.jsonl was cut or altered" in watcher.notes[0] for watcher in (going_on, finished))


def test_a_run_on_the_same_engine_says_nothing(stopped, no_gpu):
    watcher = Watcher()
    play(reopen(stopped), watcher)
    assert watcher.notes == []
