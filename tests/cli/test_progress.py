"""How a run shows itself, with a console in memory."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from fedprophet.cli.progress import LiveDisplay, PlainLines, duration, observer_for, percent
from fedprophet.runs.session import assemble

PATH = Path("runs/one")
FIRST = {
    "round": 1,
    "module": 1,
    "stage_round": 1,
    "adversarial_training": False,
    "epsilon": 0.1,
    "alpha": None,
    "dropped": {"4": "its loss is nan"},
    "loss": None,
}
SECOND = FIRST | {"round": 2, "stage_round": 2, "adversarial_training": True, "dropped": {}, "loss": 2.25}
SECOND |= {"clean": 0.5, "adversarial": 0.25, "samples": 8}
THIRD = SECOND | {"round": 3, "module": 2, "stage_round": 1, "epsilon": 0.75, "alpha": 0.3, "clean": 0.625}
THIRD |= {"fixed": {"module": 2, "round": 2, "clean": 0.5, "adversarial": 0.25}}


@pytest.fixture(scope="module")
def session(tiny):
    return assemble(tiny())


def show(observer, session):
    with observer:
        observer.started(session, PATH, 0)
        observer.note("something to know")
        for kind in ("report", "train", "evaluate", "measure"):
            observer.task_done(kind, 1, 2)
            time_passes(observer)
        for record in (FIRST, SECOND, THIRD):
            observer.round_done(record, 2.0)
            time_passes(observer)
        observer.finishing()


def time_passes(observer):
    """Let a live display redraw, which it does some times a second."""
    if isinstance(observer, LiveDisplay):
        observer._drawn = 0.0
        observer._live.refresh()


def test_plain_lines(session):
    console = Console(file=io.StringIO(), width=40)
    observer = observer_for(console)
    assert isinstance(observer, PlainLines)
    show(observer, session)
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("fedprophet on digits: vgg-small in 3 modules of at most ")
    assert lines[1:] == [
        "run: runs/one",
        "note: something to know",
        "round 1  module 1/3  of stage 1/3  eps warm-up  loss –  (2.0 s, at most 0:16 left)",
        "round 1: client 4 was dropped: its loss is nan",
        "round 2  module 1/3  of stage 2/3  eps 0.100  loss 2.250  clean 50.0 %  PGD 25.0 %"
        "  (2.0 s, at most 0:14 left)",
        "round 3  module 2/3  of stage 1/3  eps 0.750  alpha 0.30  loss 2.250  clean 62.5 %  PGD 25.0 %"
        "  (2.0 s, at most 0:06 left)",
        "module 2 fixed at its best round 2: clean 50.0 %, PGD 25.0 %",
        "evaluating the trained model",
    ]


def test_live_display(session):
    console = Console(file=io.StringIO(), width=140, force_terminal=True, color_system=None)
    observer = observer_for(console)
    assert isinstance(observer, LiveDisplay)
    show(observer, session)
    text = console.file.getvalue()
    for part in (
        "fedprophet on digits",
        "note: something to know",
        "round 1: client 4 was dropped: its loss is nan",
        "measuring perturbations 1/2",
        "eps warm-up",
        "round 3   module 2/3   of stage 1/3   eps 0.750   alpha 0.30   loss 2.250   clean 62.5 %   PGD 25.0 %",
        "at most 0:06 left",
        "module 2 fixed at its best round 2: clean 50.0 %, PGD 25.0 %",
        "evaluating the trained model",
    ):
        assert part in text


def test_a_resumed_run_says_where_it_goes_on(session):
    console = Console(file=io.StringIO())
    observer_for(console).started(session, PATH, 5)
    assert "; going on after round 5\nrun: runs/one\n" in console.file.getvalue()


def test_accuracies_stay_until_the_next_evaluation(session):
    console = Console(file=io.StringIO(), width=140, force_terminal=True, color_system=None)
    observer = observer_for(console)
    unseen = {key: value for key, value in THIRD.items() if key not in ("clean", "adversarial", "samples", "fixed")}
    with observer:
        observer.started(session, PATH, 0)
        observer.round_done(SECOND, 1.0)
        observer.round_done(unseen, 1.0)
    assert "loss 2.250   clean 50.0 %   PGD 25.0 %" in console.file.getvalue().split("round 3")[-1]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (65, "1:05"), (7420, "2:03:40")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_percent():
    assert (percent(0.1234), percent(None)) == ("12.3 %", "–")
