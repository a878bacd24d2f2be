"""How a run shows itself, with a console in memory."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from fedprophet.display.progress import LiveDisplay, PlainLines, events_of, facts_of, observer_for
from fedprophet.runs.outline import outline_of
from fedprophet.runs.session import assemble
from fedprophet.sizes import format_size

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
    assert type(observer) is PlainLines
    show(observer, session)
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("fedprophet on digits: vgg-small in 3 modules of at most ")
    assert lines[1:] == [
        "run: runs/one",
        "note: something to know",
        "round 1  module 1/3  of stage 1/3  eps warm-up  loss –  (2.0 s)",
        "round 1: client 4 was dropped: its loss is nan",
        "round 2  module 1/3  of stage 2/3  eps 0.100  loss 2.250  clean 50.0 %  PGD 25.0 %"
        "  (2.0 s, at most about 0:14 left)",
        "round 3  module 2/3  of stage 1/3  eps 0.750  alpha 0.30  loss 2.250  clean 62.5 %  PGD 25.0 %"
        "  (2.0 s, at most about 0:06 left)",
        "module 2 fixed at its best round 2: clean 50.0 %, PGD 25.0 %",
        "evaluating the trained model",
    ]


OF_METHODS = {
    "jfat": ({}, ""),
    "heterofl": ({"widths": {"1": 0.251, "2": 1.0, "4": 0.5}}, "  width 0.25–1.00"),
    "fedrolex": ({"widths": {"1": 0.25, "2": 0.2549}}, "  width 0.25"),
    "feddf": (
        {"architectures": {"1": "cnn3", "2": "vgg-small", "4": "cnn3"}, "distillation": {"cnn3": 0.5}},
        "  models 2 cnn3, 1 vgg-small",
    ),
    "fedrbn": ({"attacked": [2], "times": {"1": {}, "2": {}, "4": {}}}, "  under attack 1/3 clients"),
}


@pytest.mark.parametrize("method", OF_METHODS)
def test_lines_of_a_baseline(tiny, method):
    """A baseline has no modules, so its rounds are counted to the end; what is special to it is shown."""
    extra, shown = OF_METHODS[method]
    session = assemble(tiny({"method": method}))
    console = Console(file=io.StringIO())
    observer = observer_for(console)
    observer.started(session, PATH, 0)
    base = {key: value for key, value in SECOND.items() if key not in ("module", "stage_round", "alpha")}
    observer.round_done({**base, **extra}, 2.0)
    whole, budget = format_size(session.world.cost.total_memory), format_size(session.budget)
    assert console.file.getvalue().splitlines() == [
        f"{method} on digits: vgg-small (whole model {whole}; every client has at least {budget} available), "
        "2 of 6 clients a round",
        "run: runs/one",
        f"round 2/3  eps 0.100{shown}  loss 2.250  clean 50.0 %  PGD 25.0 %  (2.0 s)",
    ]


def test_a_distillation_that_diverged_is_told(session):
    console = Console(file=io.StringIO())
    observer = observer_for(console)
    observer.started(session, PATH, 0)
    observer.round_done(SECOND | {"distillation": {"cnn3": 0.5, "vgg-small": None}}, 2.0)
    assert console.file.getvalue().splitlines()[-1] == "round 2: the distillation of vgg-small diverged: not used"


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
        "at most about 0:06 left",
        "module 2 fixed at its best round 2: clean 50.0 %, PGD 25.0 %",
        "evaluating the trained model",
    ):
        assert part in text


def test_a_resumed_run_says_where_it_goes_on(session):
    console = Console(file=io.StringIO())
    observer_for(console).started(session, PATH, 5)
    assert "; going on after round 5\nrun: runs/one\n" in console.file.getvalue()


def test_a_run_that_is_over_does_not_go_on(session, tmp_path):
    """Unless it was taken back to an earlier round, or its results are damaged."""
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "journal.jsonl").touch()
    for content, played, said in (
        ('{"rounds": 5}', 5, "; finished after round 5; nothing is left to do\n"),
        ('{"rounds": 5}', 3, "; going on after round 3\n"),
        ("{", 5, "; going on after round 5\n"),
    ):
        (tmp_path / "results.json").write_text(content)
        console = Console(file=io.StringIO())
        observer_for(console).started(session, tmp_path, played)
        assert said in console.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_first_round_says_nothing_of_the_time_left(session, terminal):
    """It compiles kernels and fills caches, after a resume as well: nine rounds more of that length are no bound."""
    console = Console(file=io.StringIO(), width=140, force_terminal=terminal, color_system=None)
    observer = observer_for(console)
    with observer:
        observer.started(session, PATH, 1)
        time_passes(observer)
        observer.round_done(SECOND, 150.0)
        time_passes(observer)
        assert "left" not in console.file.getvalue()
        assert terminal or console.file.getvalue().endswith("PGD 25.0 %  (2.5 min)\n")
        observer.round_done(SECOND | {"round": 3, "stage_round": 3}, 2.0)
        time_passes(observer)
    assert "at most about 0:12 left" in console.file.getvalue(), "six rounds of two seconds"


def test_a_resumed_run_begins_where_its_bar_ended(session, tmp_path):
    """The first stage converged after two of its three rounds, so that round 3 is the fourth of nine on the bar."""
    lines = [FIRST, SECOND | {"fixed": {}}, {key: value for key, value in THIRD.items() if key != "fixed"}]
    lines.append(SECOND | {"round": 4, "module": 2, "stage_round": 2})  # behind the checkpoint: it is played again
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    places = []
    for played in range(5):
        observer = LiveDisplay(Console(file=io.StringIO(), force_terminal=True))
        observer.started(session, tmp_path, played)
        (bar,) = observer._bar.tasks
        places.append((bar.completed, bar.total))
    assert places == [(0, 9), (1, 9), (3, 9), (4, 9), (5, 9)]


def test_accuracies_stay_until_the_next_evaluation(session):
    console = Console(file=io.StringIO(), width=140, force_terminal=True, color_system=None)
    observer = observer_for(console)
    unseen = {key: value for key, value in THIRD.items() if key not in ("clean", "adversarial", "samples", "fixed")}
    with observer:
        observer.started(session, PATH, 0)
        observer.round_done(SECOND, 1.0)
        observer.round_done(unseen, 1.0)
    assert "loss 2.250   clean 50.0 %   PGD 25.0 %" in console.file.getvalue().split("round 3")[-1]


def test_answers_that_did_not_come_are_told(session):
    console = Console(file=io.StringIO(), width=40)
    observer = PlainLines(console)
    record = {
        **SECOND,
        "missing": {"train": [3], "evaluate": list(range(10))},
        "faults": {"3": "it hung"},
        "too_few": {"usable": 1, "minimum": 2},
        "postponed": {"module": 1, "reason": "nobody measured", "tries": 1},
        "best_round": None,
    }
    unjudged = {**THIRD, "fixed": {"module": 2, "round": 7, "clean": None, "adversarial": None}}
    with observer:
        observer.started(session, PATH, 0)
        observer.round_done(record, 2.0)
        observer.round_done(unjudged, 2.0)
    lines = console.file.getvalue().splitlines()
    assert [line for line in lines if line.startswith("round 2: ")] == [
        "round 2: no answer from client 3 (training)",
        "round 2: no answer from clients 0, 1, 2, 3, 4, 5, 6, 7 and 2 more (evaluating)",
        "round 2: client 3 failed: it hung",
        "round 2: 1 usable answer, fewer than aggregate.minimum = 2: nothing was averaged",
        "round 2: no client measured module 1, so it trains for another round",
        "round 2: no client evaluated any round; the last round's model is used",
    ]
    assert lines[-1] == "module 2 fixed as it was in round 7: nobody evaluated it"


def refreshing(tiny, **changes):
    return assemble(tiny({"norm.refresh": "attacked", **changes}))


REFRESHED = {"round": 10, "refresh": "attacked", "times": {}, "dropped": {}, "refreshed": ["1.running_mean"]}


@pytest.mark.parametrize(("changes", "rounds"), [({}, 9), ({"method": "jfat"}, 3)])
def test_the_round_that_measures_statistics_is_one_more_on_the_bar(changes, rounds, tiny, tmp_path):
    """Also if stages converged early; nothing is left then."""
    session = refreshing(tiny, **changes)
    observer = LiveDisplay(Console(file=io.StringIO(), force_terminal=True))
    observer.started(session, PATH, 0)
    (bar,) = observer._bar.tasks
    assert bar.total == rounds + 1
    observer.round_done(REFRESHED | {"round": 5}, 2.0)
    assert bar.completed == rounds + 1
    (tmp_path / "journal.jsonl").write_text(json.dumps(REFRESHED | {"round": 5}) + "\n")
    again = LiveDisplay(Console(file=io.StringIO(), force_terminal=True))
    again.started(session, tmp_path, 5)
    assert [task.completed for task in again._bar.tasks] == [rounds + 1]


def test_lines_of_the_round_that_measures_statistics(tiny):
    console = Console(file=io.StringIO(), width=140)
    observer = observer_for(console)
    with observer:
        observer.started(refreshing(tiny), PATH, 0)
        for record in (FIRST, SECOND | {"module": 3, "stage_round": 3, "round": 9}):
            observer.round_done(record, 2.0)
        observer.round_done(REFRESHED | {"dropped": {"4": "a is negative"}, "missing": {"refresh": [2]}}, 2.0)
    *_, last, dropped, missing = console.file.getvalue().splitlines()
    assert "at most about 0:02 left" in console.file.getvalue(), "after the ninth round, one of two seconds"
    assert last == "round 10  norm statistics measured anew on attacked images  (2.0 s, at most about 0:00 left)"
    assert dropped == "round 10: client 4 was dropped: a is negative"
    assert missing == "round 10: no answer from client 2 (measuring norm statistics)"


def test_a_module_whose_statistics_were_measured_says_so_when_it_is_fixed():
    fixed = {**SECOND, "fixed": {"module": 2, "round": 7, "clean": None, "adversarial": None}}
    said = "module 2 fixed as it was in round 7: nobody evaluated it"
    missed = {"layers": ["4"], "usable": 1, "minimum": 3}
    some = {**fixed, "refreshed": ["1.running_mean", "1.running_var"]}
    assert list(events_of(some)) == [said, "norm statistics of module 2 measured anew"]
    assert list(events_of(some | {"not_refreshed": missed}))[1:] == [
        said, "norm statistics of module 2 measured anew (1 of 2 layers)",
    ]  # fmt: skip
    for nothing in ({}, {"refreshed": []}):
        assert list(events_of(fixed | nothing)) == [said], "the module has no norm layers, or nobody asked"


def test_lines_say_which_statistics_were_not_measured(tiny):
    outline = outline_of(refreshing(tiny))
    missed = {"layers": ["4", "7"], "usable": 1, "minimum": 3}
    some = REFRESHED | {"refreshed": ["1.running_mean", "1.running_var"], "not_refreshed": missed}
    assert facts_of(some, outline)["norm statistics"] == "measured anew on attacked images (1 of 3 layers)"
    said = "round 10: the norm statistics of 4, 7 stay as they were (1 usable answer, aggregate.minimum = 3)"
    assert list(events_of(some)) == [said]
    none = REFRESHED | {"refreshed": [], "not_refreshed": missed}
    assert facts_of(none, outline)["norm statistics"] == "not measured: as they were"
    assert list(events_of(none)) == [said]
