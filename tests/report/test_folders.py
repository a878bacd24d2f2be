"""What a run's folder says, against numbers added up by hand; and what is said of folders that are not whole."""

import json

import pytest

from fedprophet.errors import CheckpointError, ConfigError
from fedprophet.report.folders import read_run
from fedprophet.report.runs import MeasuredAccuracy, Memory, Reached, SimulatedTime, Wire
from fedprophet.runs.evaluator import KINDS
from fedprophet.runs.play import play
from fedprophet.runs.run import start


def test_time_and_memory_by_hand(write_run):
    run = read_run(write_run("run"))
    assert run.time == SimulatedTime(computation=1 + 4, access=10 + 4, communication=5 + 7)
    assert run.time.total == 19, "communication is reported on its own"
    assert run.memory == Memory(least=40, peak=50)
    assert (run.rounds, run.finished, run.version, run.notes) == (2, True, "0.1.0", ())


def test_least_memory_is_what_the_hardest_round_asks_of_its_luckiest_client(write_run):
    rounds = [[(1, 1, 1, 90), (1, 1, 1, 10)], [(1, 1, 1, 30), (1, 1, 1, 25)], [(1, 1, 1, 70), (1, 1, 1, 15)]]
    assert read_run(write_run("run", rounds=rounds)).memory == Memory(least=25, peak=90)


def test_a_round_in_which_nobody_trained_takes_no_time(write_run):
    run = read_run(write_run("run", rounds=[[(1, 2, 3, 4)], []]))
    assert run.time == SimulatedTime(1, 2, 3)
    assert run.memory == Memory(4, 4)
    assert run.rounds == 2


def test_a_round_that_only_measures_statistics_costs_nothing_that_is_counted(write_run, tiny, tmp_path):
    rounds = [[(1, 2, 3, 4)], []]
    run = read_run(write_run("run", rounds=rounds, notes=[{}, {"refresh": "clean", "refreshed": ["a"]}]))
    assert (run.time, run.memory, run.notes) == (SimulatedTime(1, 2, 3), Memory(4, 4), ())
    config = {"method": "jfat", "rounds": 1, "train.warmup": 0, "norm.refresh": "clean", "evaluate.clients": 1}
    results = play(start(tiny(config), tmp_path / "real"))
    real = read_run(tmp_path / "real")
    assert (real.rounds, real.notes, real.last.round) == (2, (), 1)
    assert real.time.total == pytest.approx(results["simulated"]["total_s"])
    assert real.memory == Memory(results["memory"]["least_bytes"], results["memory"]["peak_bytes"])


def test_a_journal_without_times_or_rounds_gives_none(write_run):
    path = write_run("old")
    (path / "journal.jsonl").write_text('{"round":1}\n{"round":2}\n')
    old = read_run(path)
    assert (old.time, old.memory) == (None, None)
    assert old.notes == ("time and memory are not known: its journal does not hold them",)
    (path / "journal.jsonl").write_text('{"round":1,"times":{}}\n')
    short = read_run(path)
    assert short.time is None, "half a run's time is not the run's"
    assert short.notes == ("time and memory are not known: its journal has 1 of its 2 rounds",)


WIRED = [
    {
        "wire": {"sent": 1000, "received": 200, "whole_model": 9000},
        "faults": {"4": "it hung"},
        "missing": {"train": [4]},
    },
    {"wire": {"sent": 500, "received": 300, "whole_model": 1000}, "missing": {"report": [1], "evaluate": [1, 2]}},
]


def test_bytes_on_the_wire_are_added_up_and_faults_counted(write_run):
    """In the first round client 4 failed, once, whoever says so; in the second clients 1 and 2."""
    run = read_run(write_run("a", notes=WIRED))
    assert (run.wire.sent, run.wire.received, run.wire.whole_model, run.wire.total) == (1500, 500, 10000, 2000)
    assert run.faults == 3
    half = read_run(write_run("b", notes=WIRED[:1]))
    assert (half.wire.sent, half.faults) == (1000, 1)
    dropped = read_run(write_run("c", notes=[{"dropped": {"3": "its loss is nan"}, "missing": {"train": [5]}}]))
    assert (dropped.wire, dropped.faults) == (None, 2)
    assert (read_run(write_run("d")).wire, read_run(write_run("e")).faults) == (None, 0)


@pytest.mark.parametrize("wire", [{"sent": 1, "received": 2}, {"sent": -1, "received": 2, "whole_model": 3}, 5])
def test_a_damaged_account_is_named(write_run, wire):
    with pytest.raises(CheckpointError, match=r"round 1 of the journal .* is damaged"):
        read_run(write_run("a", notes=[{"wire": wire}]))


def test_the_bytes_of_each_round_are_kept(write_run):
    first, second = read_run(write_run("a", notes=WIRED)).wire_rounds
    assert (first.round, first.wire, first.faults) == (1, Wire(1000, 200, 9000), 1)
    assert (second.round, second.wire, second.faults) == (2, Wire(500, 300, 1000), 2)
    _, unknown = read_run(write_run("b", notes=[WIRED[0], {"missing": {"train": [1]}}])).wire_rounds
    assert (unknown.round, unknown.wire, unknown.faults) == (2, None, 1)
    assert read_run(write_run("c")).wire_rounds == ()


def test_real_devices_have_no_simulated_time(write_run):
    run = read_run(write_run("a", "jfat", "engine=plain", deployed=True))
    assert (run.deployed, run.engine, run.time) == (True, "Flower, real devices", None)
    assert (run.memory.least, run.memory.peak) == (40, 50)
    assert run.notes == ()
    simulated = read_run(write_run("b", "jfat", "engine=flower-sim", deployed=False))
    assert (simulated.deployed, simulated.engine, simulated.time.total) == (False, "flower-sim", 19)
    path = write_run("c", deployed=True)
    (path / "journal.jsonl").write_text('{"round":1,"times":{}}\n')
    assert read_run(path).notes == ("memory is not known: its journal has 1 of its 2 rounds",)
    (path / "flower.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"flower.json is damaged. Put it back from a copy"):
        read_run(path)


def test_accuracies_of_the_summary_and_of_later_evaluations(write_run):
    later = {"clean": {"accuracy": 0.1, "samples": 7}, "autoattack": {"accuracy": 0.4, "samples": 7}}
    evaluation = {
        "round": 2,
        "personalised": {**later, "pgd50": {"accuracy": 0.2, "samples": 7, "interval": [0.1, 0.3]}},
        "global": {"autoattack": {"accuracy": None, "samples": 0}},
        "warnings": ["the gradient may be masked."],
    }
    run = read_run(write_run("run", evaluation=evaluation))
    assert run.accuracies["personalised"] == {
        "clean": MeasuredAccuracy(0.8, 100),  # the closing summary has all samples
        "pgd20": MeasuredAccuracy(0.5, 100),
        "autoattack": MeasuredAccuracy(0.4, 7),
        "pgd50": MeasuredAccuracy(0.2, 7, (0.1, 0.3)),
    }
    assert set(run.accuracies["global"]) == {"clean", "pgd20"}, "an accuracy over no samples is none"
    assert run.notes == ("the gradient may be masked.",)


def test_an_evaluation_of_another_round_does_not_count(write_run):
    cells = {"autoattack": {"accuracy": 0.4, "samples": 7}}
    evaluation = {"round": 1, "personalised": cells, "global": cells}
    run = read_run(write_run("run", evaluation=evaluation))
    assert "autoattack" not in run.accuracies["personalised"]
    assert run.notes == ("evaluation.json measured the model after round 1, not 2, and does not count: measure again",)
    path = write_run("unfinished", evaluation=evaluation, finished=False)
    assert read_run(path).accuracies["personalised"] == {}, "the run went on"
    assert read_run(path).notes == run.notes
    (path / "checkpoints" / "round-000001").mkdir()
    between = read_run(path)
    assert between.accuracies["personalised"] == {"autoattack": MeasuredAccuracy(0.4, 7)}, "no later model is kept"
    assert between.notes == ("evaluation.json measured the model after round 1",)
    (path / "checkpoints" / "round-000002").mkdir()
    assert read_run(path).notes == run.notes


def test_best_and_last_round(write_run):
    rounds = {
        "best": {"round": 1, "score": 2.0, "clean": 0.7, "adversarial": 0.4, "alpha": 1.0},
        "last": {"round": 2, "score": 1.0, "clean": 0.6, "adversarial": 0.3, "alpha": 1.0},
    }
    run = read_run(write_run("run", results=rounds))
    assert (run.best, run.last) == (Reached(1, 0.7, 0.4), Reached(2, 0.6, 0.3))


def test_a_run_that_is_not_finished(write_run):
    path = write_run("run", finished=False)
    with (path / "journal.jsonl").open("a") as journal:
        journal.write('{"round":3,"times":{},"clean":0.25,"adversarial":0.125,"samples":8}\n{"round":4,"ti')
    run = read_run(path)
    assert (run.finished, run.rounds, run.version) == (False, 3, None)
    assert run.last == Reached(3, 0.25, 0.125)
    assert run.time == SimulatedTime(5, 14, 12), "the torn line does not count"
    assert run.accuracies == {kind: {} for kind in KINDS}


def test_a_run_before_its_first_round(write_run):
    path = write_run("run", finished=False)
    (path / "journal.jsonl").unlink()
    run = read_run(path)
    assert (run.rounds, run.time, run.memory, run.last) == (0, SimulatedTime(0, 0, 0), None, None)


@pytest.mark.parametrize(
    ("file", "content", "parts"),
    [
        ("results.json", "{", ["results.json is damaged", "Invalid JSON", "train --resume"]),
        ("results.json", "[]", ["results.json is damaged", "train --resume"]),
        ("results.json", '{"rounds": 2}', ["results.json is damaged: personalised: Field required"]),
        ("evaluation.json", "null", ["evaluation.json is damaged", "fedprophet evaluate"]),
        (
            "evaluation.json",
            '{"round": 2, "personalised": {"aa-fast": {"accuracy": NaN, "samples": 3}}, "global": {}}',
            ["evaluation.json is damaged: personalised.aa-fast.accuracy"],
        ),
        (
            "evaluation.json",
            '{"round": 2, "personalised": {}, "global": {"clean": {"accuracy": 1.5, "samples": 3}}}',
            ["evaluation.json is damaged: global.clean.accuracy"],
        ),
        ("journal.jsonl", '{"round": 1, "missing": 7}\n', ["round 1 of the journal", "is damaged: missing"]),
        ("journal.jsonl", '{"round": 1, "faults": "x"}\n', ["round 1 of the journal", "is damaged: faults"]),
        ("journal.jsonl", '{"round": 1}\nnonsense\n{"round": 2}\n', ["line 2 of the journal", "is damaged"]),
        (
            "journal.jsonl",
            '{"round": 1, "times": {"0": {"computation_s": "nan", "access_s": 1, "communication_s": 1}}}\n',
            ["round 1 of the journal", "0.computation_s"],
        ),
        (
            "journal.jsonl",
            '{"round": 1, "times": {"0": {"computation_s": 1, "access_s": 1, "communication_s": 1}}}\n',
            ["round 1 of the journal", "0.memory_bytes: Field required"],
        ),
        ("journal.jsonl", '{"round": 1, "times": []}\n', ["round 1 of the journal", "leave this run out"]),
        ("inputs.json", "{}", ["inputs.json is damaged"]),
    ],
)
def test_damaged_files_are_named(write_run, file, content, parts):
    path = write_run("run")
    (path / file).write_text(content)
    with pytest.raises(CheckpointError) as error:
        read_run(path)
    assert all(part in str(error.value) for part in parts), error.value
    assert str(path) in str(error.value)


def test_what_is_no_run(write_run, tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=r"there is no run in .*no config\.toml"):
            read_run(path)
    path = write_run("run")
    (path / "config.toml").write_text("rounds = -1\n")
    with pytest.raises(ConfigError, match=r"rounds: given -1 \(in .*config.toml\)"):
        read_run(path)


QUICK = {"rounds": 1, "train.warmup": 0, "train.iterations": 1, "evaluate.test_samples": 20, "evaluate.clients": 2}


def test_a_journal_that_is_not_the_checkpoints_does_not_count(tiny, tmp_path):
    settings = {
        "method": "jfat",
        "rounds": 2,
        "train.iterations": 1,
        "evaluate.clients": 1,
        "evaluate.test_samples": 10,
    }
    play(start(tiny(settings), tmp_path / "run"))
    journal = tmp_path / "run" / "journal.jsonl"
    text = journal.read_text()
    assert read_run(tmp_path / "run").notes == ()
    journal.write_text(text.replace('"computation_s":', '"computation_s":1', 1))
    found = read_run(tmp_path / "run")
    assert found.notes == ("time and memory are not known: its journal was cut or altered",)
    assert (found.rounds, found.time, found.memory) == (2, None, None)
    journal.write_text("no record\n" + text.partition("\n")[2])
    assert read_run(tmp_path / "run") == found
    (tmp_path / "run" / "results.json").unlink()
    with pytest.raises(CheckpointError, match=r"journal\.jsonl was cut or altered, .*leave this run out"):
        read_run(tmp_path / "run")
    journal.write_text(text + '{"round":3,"times":{}}\n')
    assert read_run(tmp_path / "run").rounds == 3, "a round that is not in a checkpoint yet"


@pytest.mark.parametrize("method", ["jfat", "fedprophet"])
def test_a_real_run_says_what_its_summary_says(tiny, tmp_path, method):
    """The files are those that training writes, not only those that these tests imagine."""
    results = play(start(tiny({"method": method, **QUICK}), tmp_path / "run"))
    run = read_run(tmp_path / "run")
    simulated = results["simulated"]
    assert (run.time.computation, run.time.access) == (simulated["computation_s"], simulated["access_s"])
    assert run.time.total == pytest.approx(simulated["total_s"])
    for kind in ("personalised", "global"):
        assert {name: cell.accuracy for name, cell in run.accuracies[kind].items()} == {
            name: cell["accuracy"] for name, cell in results[kind].items()
        }
    assert (run.best.round, run.last.round) == (results["best"]["round"], results["last"]["round"])
    assert {"least_bytes": run.memory.least, "peak_bytes": run.memory.peak}.items() <= results["memory"].items()
    assert run.norm_layers == results["norm_layers"]
    modules = [module["memory_bytes"] for module in results["modules"]]
    assert run.memory.peak <= results["whole_model_bytes"]
    if method == "jfat":
        assert run.memory == Memory(results["whole_model_bytes"], results["whole_model_bytes"])
    else:
        assert min(modules) <= run.memory.least < results["whole_model_bytes"]
    assert run.dataset == json.loads((tmp_path / "run" / "inputs.json").read_text())["dataset"]
