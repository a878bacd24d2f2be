"""What a finished run says in the end, with a console in memory."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from fedprophet.display.summary import accuracy_page, show_results
from fedprophet.errors import CheckpointError

PATH = Path("runs/one")
RESULTS = {
    "budget_bytes": 500,
    "whole_model_bytes": 2000,
    "modules": [{"index": 1, "layers": ["Conv 1"], "memory_bytes": 400}],
    "memory": {"least_bytes": 300, "peak_bytes": 1000},
    "simulated": {"computation_s": 5.0, "access_s": 120.0, "total_s": 125.0},
    "norm_layers": {"personalised": "their own", "global": "the mean"},
    "public_samples": 0,
    "rounds": 7,
    "seed": 1,
    "personalised": {"clean": {"accuracy": 0.5, "samples": 8, "interval": [0.25, 0.75]}},
    "global": {"clean": {"accuracy": None, "samples": 0, "interval": [0.0, 1.0]}},
}
NEEDS = {
    "a part of the model": (
        {"least_bytes": 300, "peak_bytes": 1000},
        "With 300 B a client could have done the smallest task of every round; the largest task took 1.0 kB, and the "
        "whole model takes 2.0 kB.",
    ),
    "the whole model": (
        {"least_bytes": 2000, "peak_bytes": 2000},
        "Every client trained the whole model, which takes 2.0 kB; where less was available, the simulated time "
        "includes swapping.",
    ),
    "the whole model of all clients in one round": (
        {"smallest_bytes": 300, "least_bytes": 2000, "peak_bytes": 2000},
        "With 2.0 kB a client could have done the smallest task of every round; the largest task took 2.0 kB, and the "
        "whole model takes 2.0 kB.",
    ),
    "the same part in every round": (
        {"least_bytes": 300, "peak_bytes": 300},
        "With 300 B a client could have done the smallest task of every round; the largest task took 300 B, and the "
        "whole model takes 2.0 kB.",
    ),
    "what an earlier version did not record": (None, "Training the whole model takes 2.0 kB."),
}


def test_a_model_that_is_a_mean_is_called_one():
    for results, times in (({**RESULTS, "averaged_rounds": 12}, 1), (RESULTS, 0)):
        said = accuracy_page(results).notes
        assert said.count("model: the mean of the last rounds, of up to 12 (aggregate.horizon)") == times


def test_accuracies_without_label_frequencies_say_what_they_are_where_they_stand_alone():
    alone = {"uncalibrated": RESULTS["personalised"], "personalised": {}, "global": {}}
    first, *_ = accuracy_page({**RESULTS, **alone}).notes
    assert first == "uncalibrated: on each client's own held-out data, without its label frequencies"


@pytest.mark.parametrize(("memory", "text"), NEEDS.values(), ids=NEEDS.keys())
def test_closing_words_of_a_baseline(memory, text):
    console = Console(file=io.StringIO(), width=70)
    reached = {
        "best": {"round": 3, "clean": 0.5, "adversarial": 0.25},
        "last": {"round": 7, "clean": 0.125, "adversarial": 0.0},
    }
    show_results({**RESULTS, **reached, "memory": memory}, PATH, console)
    said = console.file.getvalue()
    assert "Modules" not in said
    assert said.split("|\n\n")[1].splitlines() == [
        "- personalised: on each client's own held-out data; norm layers: their own",
        "- global: the exported model on the test set; norm layers: the mean",
        f"- {text}",
        "- Best round (3): clean 50.0 %, PGD 25.0 %.",
        "- Last round (7): clean 12.5 %, PGD 0.0 %.",
        "- On the devices of the pool it would have taken 2.1 min: computation 5.0 s, storage access 2.0 min "
        "(simulated).",
        "- Rounds: 7, seed 1.",
        "Files: runs/one",
    ]


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (0, []),
        (1, ["- 1 answer was missing or dropped; the journal says why."]),
        (12, ["- 12 answers were missing or dropped; the journal says why."]),
    ],
)
def test_closing_words_of_a_run_on_flower(lost, words):
    console = Console(file=io.StringIO(), width=70)
    wire = {"sent": 12_300_000, "received": 4_500, "whole_model": 67_800_000}
    show_results({**RESULTS, "wire": wire, "faults": lost}, PATH, console)
    lines = console.file.getvalue().splitlines()
    start = lines.index("- On the wire: 12.3 MB sent, 4.5 kB received; jFAT's training alone would have moved 67.8 MB.")
    assert lines[start + 1 :] == [*words, "- Rounds: 7, seed 1.", "Files: runs/one"]


def test_closing_words_name_the_engine():
    console = Console(file=io.StringIO(), width=70)
    engines = [
        {"engine": "workers", "precision": "float32", "rounds": [1, 4]},
        {"engine": "cuda", "precision": "bfloat16", "rounds": [5, 7]},
    ]
    show_results({**RESULTS, "engines": engines}, PATH, console)
    assert "\n- Engine: workers to round 4, then cuda, bfloat16.\n- Rounds: 7, seed 1.\n" in console.file.getvalue()


def test_accuracies_of_different_precisions_are_told_apart():
    def notes(pgd, autoattack):
        cells = {"pgd20": pgd, "autoattack": autoattack}
        cell = RESULTS["personalised"]["clean"]
        part = {"clean": cell | {"precision": pgd}, **{name: cell | {"precision": p} for name, p in cells.items()}}
        return [note for note in accuracy_page({**RESULTS, "personalised": part}).notes if "precision" in note]

    assert notes("float32", "float32") == []
    assert notes("bfloat16", "float32") == ["precision: bfloat16 for Clean, PGD-20; float32 for AutoAttack"]


def test_closing_words_of_real_devices():
    """There is no pool, so there is no time that it would have taken."""
    console = Console(file=io.StringIO(), width=70)
    memory = {"least_bytes": 2000, "peak_bytes": 2000}
    show_results({**RESULTS, "simulated": None, "memory": memory}, PATH, console)
    said = console.file.getvalue()
    assert "simulated" not in said
    assert "would have taken" not in said
    assert "Every client trained the whole model, which takes 2.0 kB.\n" in said


def test_closing_words_of_a_cascade():
    console = Console(file=io.StringIO(), width=120)
    show_results({**RESULTS, "stages": [{"clean": 0.5, "adversarial": 0.25}]}, PATH, console)
    said = console.file.getvalue()
    row = next(line for line in said.splitlines() if "Conv 1" in line)
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "1", "Conv 1", "400 B", "80.0 %", "20.0 %", "50.0 %", "25.0 %",
    ]  # fmt: skip
    assert "A client needs 400 B to train a module; the whole model would take 2.0 kB.\n" in said


@pytest.mark.parametrize(
    ("counted", "how"),
    [({}, "on paper"), ({"memory_model": "paper"}, "on paper"),
     ({"memory_model": "measured"}, "by the most economical plan")],
)  # fmt: skip
def test_closing_words_of_a_run_within_its_memory(counted, how):
    console = Console(file=io.StringIO(), width=200)
    plans = {"counts": {"plain": 3, "attack 8 at a time": 1}, "closest": {"peak_bytes": 300, "limit_bytes": 400}}
    stages = [{"clean": 0.5, "adversarial": 0.25}]
    show_results({**RESULTS, **counted, "stages": stages, "plans": plans}, PATH, console)
    said = console.file.getvalue()
    assert f"A client needs 400 B {how} to train a module" in said
    assert "no client took more than 75.0 % of what it may (300 B of 400 B)" in said
    assert "Plans: plain (3 times); attack 8 at a time (1 time).\n" in said


@pytest.mark.parametrize(
    "change", [{"personalised": 3}, {"rounds": None, "whole_model_bytes": "x"}, {"engines": [1]}, {"stages": 7}]
)
def test_results_that_were_changed_by_hand_are_called_damaged(change) -> None:
    with pytest.raises(CheckpointError, match=r"results\.json is damaged\. Delete it: it is made again"):
        show_results({**RESULTS, **change}, PATH, Console(file=io.StringIO()))
