"""A run that another process plays, as people and programs see it; the numbers are made by hand."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fedprophet.display.watch import Picture, document, state_lines, state_text, totals
from fedprophet.runs.outline import Outline
from fedprophet.runs.watched import Look

PATH = Path("runs/my run")


def record(number, module, stage_round, **more):
    times = {"1": {"computation_s": 2.0, "access_s": 1.0}, "2": {"computation_s": 0.5, "access_s": 0.5}}
    base = {"round": number, "module": module, "stage_round": stage_round, "adversarial_training": True}
    base |= {"epsilon": 0.75, "alpha": None, "times": times, "dropped": {}, "loss": 2.25}
    return base | more


ROUNDS = (
    record(1, 1, 1, adversarial_training=False, dropped={"4": "its loss is nan"}),
    record(
        2,
        1,
        2,
        clean=0.5,
        adversarial=0.25,
        samples=8,
        fixed={"module": 1, "round": 2, "clean": 0.5, "adversarial": 0.25},
    ),
    record(3, 2, 1, alpha=0.3, missing={"train": [2]}, wire={"sent": 1500, "received": 500, "whole_model": 9000}),
)


@pytest.fixture
def look(tiny):
    """Three rounds of 1, 2 and 4 seconds, in the second of three modules; four rounds at most in a stage."""
    outline = Outline(tiny({"rounds": 4}), "digits", modules=3, refreshes=False, budget=45_000, whole=100_000)
    return Look("working", outline, ROUNDS, {1: 1.0, 2: 2.0, 3: 4.0}, since=5.4, deployed=False)


def test_totals(look):
    """The first round does not count for the pace, (2 + 4) / 2. A simulated one lasts as long as its slowest client."""
    assert totals(look) == {
        "a round": "3.0 s",
        "simulated": "9.0 s",
        "dropped updates": "1",
        "lost answers": "2",
        "on the wire": "2.0 kB",
    }
    assert "simulated" not in totals(replace(look, deployed=True))


def test_whether_somebody_works_on_it(look):
    assert state_text(look, PATH) == "a process is working on it; the last round came 5.0 s ago"
    begun = replace(look, records=(), seconds={})
    assert state_text(begun, PATH) == "a process is working on it; no round has come yet"
    assert state_text(replace(look, state="stopped"), PATH) == (
        "no process is working on it: it was stopped after round 3. "
        "Resume it with: fedprophet train --resume 'runs/my run'"
    )
    assert "before its first round was over" in state_text(replace(begun, state="stopped"), PATH)
    assert "cannot be seen here; the last round came" in state_text(replace(look, state="unknown"), PATH)
    assert "is being evaluated" in state_text(replace(look, state="finishing"), PATH)
    assert state_text(replace(look, state="finished"), PATH) == "finished after 3 rounds"


def test_plain_lines(look):
    """Nine rounds were played on the bar's scale of twelve less seven: the first stage converged early."""
    assert list(state_lines(look, PATH)) == [
        "fedprophet on digits: vgg-small in 3 modules of at most 45.0 kB (whole model 100.0 kB), 2 of 6 clients a round"
        "\nrun: runs/my run",
        "a process is working on it; the last round came 5.0 s ago",
        "round 3  module 2/3  of stage 1/4  eps 0.750  alpha 0.30  loss 2.250  clean 50.0 %  PGD 25.0 %",
        "a round 3.0 s  simulated 9.0 s  dropped updates 1  lost answers 2  on the wire 2.0 kB",
        "at most about 0:21 left",  # 12 - 5 rounds of 3 seconds
        "round 1: client 4 was dropped: its loss is nan",
        "module 1 fixed at its best round 2: clean 50.0 %, PGD 25.0 %",
        "round 3: no answer from client 2 (training)",
    ]


def test_the_document(look):
    assert document(look, PATH) == {
        "run": "runs/my run",
        "state": "working",
        "method": "fedprophet",
        "dataset": "digits",
        "model": "vgg-small",
        "round": 3,
        "rounds_done": 5,
        "rounds_at_most": 12,
        "module": 2,
        "modules": 3,
        "stage_round": 1,
        "stage_rounds": 4,
        "epsilon": 0.75,
        "alpha": 0.3,
        "loss": 2.25,
        "evaluated": {"round": 2, "clean": 0.5, "adversarial": 0.25, "samples": 8},
        "seconds_a_round": 3.0,
        "seconds_left_at_most": 21,
        "seconds_since_last_round": 5.4,
        "simulated_seconds": 9.0,
        "dropped_updates": 1,
        "lost_answers": 2,
        "wire": {"sent": 1500, "received": 500, "whole_model": 9000},
        "resume": None,
    }
    stopped = document(replace(look, state="stopped", deployed=True), PATH)
    assert stopped["resume"] == "fedprophet train --resume 'runs/my run'"
    assert stopped["simulated_seconds"] is None
    begun = document(replace(look, records=(), seconds={}), PATH)
    assert (begun["round"], begun["rounds_done"], begun["module"], begun["evaluated"]) == (0, 0, None, None)


def drawn(look, columns, lines=40):
    console = Console(file=io.StringIO(), width=columns, height=lines, force_terminal=True, color_system=None)
    console.print(Picture(look, PATH))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("columns", [80, 40])
def test_the_picture(look, columns):
    lines = drawn(look, columns)
    assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    for part in ("module 2/3", "of stage 1/4", "clean 50.0 %", "PGD 25.0 %", "41.7 % at most about 0:21 left"):
        assert part in text
    assert "● a process is working on it; the last round came 5.0 s ago" in text
    assert "dropped updates 1 lost answers 2 on the wire 2.0 kB" in text
    assert "module 1 fixed at its best round 2: clean 50.0 %, PGD 25.0 %" in text


def test_the_curves(look):
    """Of five rows: nothing in round 1, half (2 ½ rows) from round 2 on, and a line where module 2 begins."""
    lines = drawn(look, 80)
    first = next(number for number, line in enumerate(lines) if line.startswith("clean  "))
    curves = [line[8:].rstrip() for line in lines[first : first + 11]]
    border = " " * 8 + "│"
    assert curves[:5] == [border, border, "    ▄▄▄▄│▄▄▄", "    ████│███", "    ████│███"]
    assert curves[5:10] == [border, border, border, "    ▂▂▂▂│▂▂▂", "    ████│███"]
    assert lines[first + 10].rstrip() == "module  1       │2"


def test_a_low_window_has_low_curves(look):
    assert len(drawn(look, 80, lines=16)) <= 16
    curves = [line.rstrip() for line in drawn(look, 80, lines=5) if line.startswith(("clean  ", "PGD  "))]
    assert curves == ["clean       ▄▄▄▄│▄▄▄", "PGD         ▂▂▂▂│▂▂▂"]


def test_a_baseline_has_no_modules(look):
    jfat = replace(look.outline, config=look.outline.config.model_copy(update={"method": "jfat"}), modules=1)
    rounds = [
        {key: value for key, value in each.items() if key not in ("module", "stage_round", "fixed")} for each in ROUNDS
    ]
    lines = drawn(replace(look, outline=jfat, records=tuple(rounds)), 80)
    assert "round   1 to 3" in [line.rstrip() for line in lines]
    assert not any("│" in line for line in lines)


def test_before_the_first_round(look):
    lines = drawn(replace(look, records=(), seconds={}), 80)
    assert lines[-1].rstrip() == "● a process is working on it; no round has come yet"


def test_there_are_no_curves_before_an_evaluation(look):
    assert not any("accuracy" in line for line in drawn(replace(look, records=ROUNDS[:1]), 80))


@pytest.mark.parametrize("state", ["stopped", "finishing", "finished"])
def test_nothing_is_said_of_the_time_left_where_no_round_is_played(look, state):
    text = "\n".join(drawn(replace(look, state=state), 80))
    assert "41.7 %" in text
    assert "left" not in text


def test_what_is_not_known_is_left_out(look):
    """As in the folder of a run of an earlier version."""
    unknown = replace(look, outline=replace(look.outline, modules=None, budget=None, whole=None), seconds={})
    text = "\n".join(drawn(unknown, 100))
    assert text.startswith("fedprophet on digits: vgg-small, 2 of 6 clients a round")
    assert "module 2 " in text
    assert "left" not in text
