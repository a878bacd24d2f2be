"""Which engine carried out which rounds: recorded, shown, and said where it changes."""

import json

import pytest

from fedprophet.runs.engine_history import Carrier, Span, change, spans, spans_of, told
from fedprophet.runs.run import RunFiles, RunStoppedError, Silent, play, reopen, start

WORKERS, GPU = Carrier("workers", "float32"), Carrier("cuda", "bfloat16")
SMALL = {"method": "jfat", "rounds": 4, "train.iterations": 1, "attack.steps": 1, "evaluate.clients": 2}
AUTO = {**SMALL, "engine": "auto", "threads": 2}


class Watcher(Silent):
    """Keeps notes, and stops after a round."""

    def __init__(self, last=None):
        self.last, self.notes = last, []

    def note(self, text):
        self.notes.append(text)

    def round_done(self, record, seconds):
        if record["round"] == self.last:
            raise KeyboardInterrupt


@pytest.fixture
def no_gpu(monkeypatch):
    """ "auto" is the workers engine on several cores, wherever the tests run, and the plain one on a single core."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def line(number, carrier=None):
    noted = {"engine": carrier.engine, "precision": carrier.precision} if carrier else {}
    return {"round": number, "seconds": 1.0, **noted}


def test_rounds_of_one_engine_are_a_span():
    lines = [line(1), *(line(number, WORKERS) for number in (2, 3)), line(4, GPU), line(5, WORKERS), line(6, WORKERS)]
    found = spans(lines)
    assert found == (Span(WORKERS, 2, 3), Span(GPU, 4, 4), Span(WORKERS, 5, 6)), (
        "the first round is of a version before"
    )
    assert spans_of(json.loads(json.dumps([span.to_json() for span in found]))) == found
    assert spans([line(1)]) == ()
    assert spans([line(1, GPU), line(3, GPU)]) == (Span(GPU, 1, 3),), "a line that is missing is no other engine"
    other = Carrier("cuda", "float32")
    assert spans([line(1, GPU), line(2, other)]) == (Span(GPU, 1, 1), Span(other, 2, 2))


def test_spans_in_words():
    assert told([Span(WORKERS, 1, 7)]) == "workers"
    assert told([Span(WORKERS, 1, 3), Span(GPU, 4, 5)]) == "workers to round 3, then cuda, bfloat16"
    assert told([Span(WORKERS, 6, 7)]) == "not recorded to round 5, then workers"
    assert change([Span(WORKERS, 1, 3)], WORKERS) is None
    assert change([], GPU) is None
    assert change([Span(GPU, 1, 2), Span(WORKERS, 3, 3)], GPU) == (
        "round 3 was carried out by engine workers, and the run goes on with engine cuda, bfloat16: it rounds "
        "differently"
    )


def test_what_auto_has_become_is_recorded(tiny, tmp_path, no_gpu):
    results = play(start(tiny(AUTO), tmp_path / "run"))
    files = RunFiles(tmp_path / "run")
    assert 'engine = "auto"' in files.config.read_text()
    timings = [json.loads(text) for text in files.timings.read_text().splitlines()]
    assert [(line["engine"], line["precision"]) for line in timings] == [("workers", "float32")] * 4
    assert results["engines"] == [{"engine": "workers", "precision": "float32", "rounds": [1, 4]}]


def test_a_run_that_goes_on_with_another_engine_says_so(tiny, tmp_path, no_gpu):
    """As on another machine: with a single core "auto" is the plain engine."""
    path = tmp_path / "run"
    with pytest.raises(RunStoppedError):
        play(start(tiny(AUTO), path), Watcher(last=2))
    same, other, end = Watcher(last=3), Watcher(), Watcher()
    with pytest.raises(RunStoppedError):
        play(reopen(path), same)
    config = path / "config.toml"
    config.write_text(config.read_text().replace("\nthreads = 2\n", "\nthreads = 1\n"))
    results = play(reopen(path), other)
    assert same.notes == []
    assert other.notes == [
        "round 3 was carried out by engine workers, and the run goes on with engine plain: it rounds differently"
    ]
    assert [(span["engine"], span["rounds"]) for span in results["engines"]] == [("workers", [1, 3]), ("plain", [4, 4])]
    config.write_text(config.read_text().replace("\nthreads = 1\n", "\nthreads = 2\n"))
    assert play(reopen(path), end) == results
    assert end.notes == [], "no round is left to be carried out"
