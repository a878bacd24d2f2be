"""The document of runs, against numbers added up by hand; and what it says of folders that are not whole."""

import json
from dataclasses import asdict

import pytest

from fedprophet.config.config import Config
from fedprophet.config.reference import to_toml
from fedprophet.errors import CheckpointError
from fedprophet.report import rounds, sums
from fedprophet.report.document import Cascade, report_of
from fedprophet.report.enforced import EnforcedMemory, MeasuredPart
from fedprophet.report.facts import Fact
from fedprophet.report.rounds import Assignment, Curve, Steps
from fedprophet.report.sums import Bars, Faults, Reason
from fedprophet.storage.locks import folder_lock


def only(*paths):
    (run,) = report_of(paths).runs
    return run


def fact(run, label):
    (text,) = [each.text for each in (*run.facts, *run.hardware) if each.label == label]
    return text


def test_a_cascade_by_hand(write_cascade):
    run = only(write_cascade("run"))
    assert run.cascade == Cascade(
        modules=(
            {"index": 1, "layers": ["Conv 1", "Conv 2"], "memory": 50},
            {"index": 2, "layers": ["Linear 1"], "memory": 60},
        ),
        budget=60,
        whole=200,
        counted="paper",
    )
    assert run.enforced == ()
    assert run.curve == Curve((2, 3, 4), (0.6, 0.8, 0.9), (0.4, 0.7, 0.5), (19.0, 23.0, 33.0), measured=3, every=1)
    assert (run.perturbation.epsilon, run.perturbation.alpha) == (
        Steps((1, 3, 4), (0.1, 1.5, 2.5)),
        Steps((3, 4), (0.3, 0.5)),
    )
    assert run.faults == Faults(1, (Reason("its loss is nan", times=1, clients=1, first=4, last=4),), other=0)


PIECES = "attack 8 at a time, step atom by atom in pieces of 8"
PLAN = {"plan": "plain", "peak_bytes": 90, "limit_bytes": 100}


def test_measured_memory_of_each_part_that_was_trained(write_enforced):
    """Client 0 trained module 1 twice, client 1 modules 1 and 2 in the first round, client 0 module 2 in the third."""
    run = only(write_enforced("run", "memory.model=measured", "memory.budget=30%"))
    assert run.enforced == (
        MeasuredPart(1, 1, 2, 50, EnforcedMemory(57, 60, 0.95, {PIECES: 2})),
        MeasuredPart(1, 2, 1, 60, EnforcedMemory(90, 400, 0.225, {"plain": 1})),
        MeasuredPart(2, 2, 1, 60, EnforcedMemory(90, 100, 0.9, {"plain": 1})),
    )
    assert run.cascade.counted == "measured"
    assert fact(run, "Memory budget") == "30% (60 B), enforced"


def test_measured_memory_of_a_method_without_modules(write_run):
    taken = {"plans": {"0": PLAN, "1": {**PLAN, "peak_bytes": 60, "limit_bytes": 60}}}
    run = only(write_run("run", "jfat", "memory.enforce=true", notes=[taken]))
    assert run.enforced == (MeasuredPart(None, None, 2, 30, EnforcedMemory(90, 100, 1.0, {"plain": 2})),)


@pytest.mark.parametrize("plans", [{"x": PLAN}, {"0": {}}, {"0": {**PLAN, "limit_bytes": 0}}, {"0": 5}, 7])
def test_damaged_plans_are_an_error_that_names_the_round(write_run, plans):
    with pytest.raises(CheckpointError, match=r"round 2 of the journal .* is damaged"):
        report_of([write_run("run", notes=[{}, {"plans": plans}])])


def test_a_stage_says_what_its_kept_round_was_trained_with(write_cascade):
    """Module 2 was kept as of round 3, before alpha rose to 0.5; its two rounds took 4 and 10 s."""
    first, second = only(write_cascade("run")).stages
    assert asdict(second) == {
        "module": 2, "first": 3, "last": 4, "warmup": 0, "epsilon": 1.5, "alpha": 0.3, "best": 3, "clean": 0.8,
        "adversarial": 0.7, "computation": 8.0, "access": 6.0,
    }  # fmt: skip
    assert (first.first, first.last, first.warmup, first.alpha, first.computation, first.access) == (
        1,
        2,
        1,
        None,
        5,
        14,
    )


def test_who_trained_what(write_cascade):
    """In round 1 client 3 trained modules 1 and 2, later module 2 once more; five of eight clients never trained."""
    found = only(write_cascade("run")).assignment
    assert found == Assignment(clients=(0, 3, 7), rounds=((2, 0), (1, 2), (0, 1)), left_out=0, never=5)


def test_many_clients_are_cut_and_counted(write_cascade, monkeypatch):
    monkeypatch.setattr(rounds, "MOST_CLIENTS", 2)
    found = only(write_cascade("run")).assignment
    assert (found.clients, found.left_out, found.never) == ((0, 3), 1, 5)


def test_time_and_its_bars(write_cascade, monkeypatch):
    run = only(write_cascade("run"))
    assert (run.time.computation, run.time.access, run.time.communication) == (13, 20, 11)
    assert run.time.rounds == Bars(1, (1, 2, 3, 4), {"computation": (1, 4, 3, 5), "access": (10, 4, 1, 5)})
    monkeypatch.setattr(sums, "MOST_BARS", 2)
    bars = only(write_cascade("other")).time.rounds
    assert bars == Bars(2, (1, 3), {"computation": (5, 8), "access": (14, 6)})


def test_a_long_curve_is_thinned_but_keeps_what_happens(write_run, monkeypatch):
    """Of ten points every fifth is kept, the last, and the best under attack, which is that of round 4."""
    monkeypatch.setattr(rounds, "MOST_POINTS", 2)
    values = [0.1, 0.2, 0.3, 0.9, 0.4, 0.4, 0.4, 0.4, 0.4, 0.5]
    notes = [{"clean": 0.5, "adversarial": value, "samples": 9} for value in values]
    run = only(write_run("run", rounds=[[(1, 1, 1, 1)]] * 10, notes=notes))
    assert (run.curve.round, run.curve.adversarial) == ((1, 4, 6, 10), (0.1, 0.9, 0.4, 0.5))
    assert run.curve.seconds == (2, 8, 12, 20)
    assert (run.curve.measured, run.curve.every) == (10, 5)


def test_bytes_on_the_wire(write_run):
    wire = [{"wire": {"sent": 10 * n, "received": n, "whole_model": 100}} for n in (1, 2)]
    traffic = only(write_run("run", notes=wire)).traffic
    assert (traffic.sent, traffic.received, traffic.jfat) == (30, 3, 200)
    assert traffic.rounds.parts == {"sent": (10, 20), "received": (1, 2)}
    assert only(write_run("other")).traffic is None


def test_lost_answers_by_reason_the_most_frequent_first(write_run, monkeypatch):
    monkeypatch.setattr(sums, "MOST_REASONS", 2)
    notes = [
        {"dropped": {"1": "rare", "2": "often"}, "missing": {"train": [4]}},
        {"dropped": {"3": "often"}, "faults": {"4": "it hung"}},
    ]
    faults = only(write_run("run", notes=notes)).faults
    assert (faults.times, faults.other) == (5, 2)
    assert faults.reasons == (Reason("often", 2, 2, 1, 2), Reason("no answer (train)", 1, 1, 1, 1))


def test_accuracies_at_the_end_and_those_measured_later(write_run):
    run = only(write_run("run", clean=0.8, pgd=0.5, autoattack=0.4))
    found = [(each.kind, each.label, each.accuracy, each.samples) for each in run.accuracies]
    assert found == [
        ("personalised", "Clean", 0.8, 100),
        ("personalised", "PGD-20", 0.5, 100),
        ("personalised", "AutoAttack", 0.4, 50),
        ("global", "Clean", 0.4, 360),
        ("global", "PGD-20", 0.25, 360),
        ("global", "AutoAttack", 0.4, 50),
    ]
    assert run.attack == "PGD-20"


# What was trained, on what -------------------------------------------------------------------------------------------


def test_facts_of_a_run_and_its_machine(write_cascade):
    path = write_cascade("run", "memory.budget=30%", "seed=7")
    lines = [
        {"round": n, "seconds": 9.0, "total_seconds": 2.0, "engine": "workers", "precision": "float32"}
        for n in range(1, 5)
    ]
    (path / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = only(path)
    assert fact(run, "Model") == "vgg-small; 12,345 parameters; starting weights drawn at random"
    assert fact(run, "Data") == "digits: 1,437 training and 360 test images of 1×8×8, 10 classes"
    assert fact(run, "Memory budget") == "30% (60 B)"
    assert (fact(run, "Seed"), fact(run, "Engine"), fact(run, "Precision")) == ("7", "workers", "float32")
    assert fact(run, "Wall-clock time") == "8.0 s for 4 rounds"
    assert fact(run, "Machine") == "Some Processor, 2 cores, 8.0 GB memory"
    assert fact(run, "Versions") == "fedprophet 0.1.0"


def test_what_changes_the_result_is_in_one_line_if_it_is_not_the_default(write_run):
    """Of other methods' keys and of keys that do nothing there is no word; numbers are short."""
    plain = dict(each.split(" = ") for each in fact(only(write_run("run")), "Not at the default").split(", "))
    assert plain["train.batch"] == "16"
    assert not [key for key in plain if key.startswith(("perturbation.", "distillation.", "model.", "shards."))]
    assert not plain.keys() & {"rounds", "seed", "norm.layers", "train.calibration", "attack.radius"}
    mirrored = ["data.mirror=true", "attack.ramp=3", "train.proximal=0.125", "train.smoothing=2.5", "attack.step=1/255"]
    idle = ["norm.frozen_after=7", "perturbation.start=0.7", "distillation.diversity=0.5", "engine=plain"]
    run = only(write_run("other", "jfat", *mirrored, *idle))
    found = dict(each.split(" = ") for each in fact(run, "Not at the default").split(", "))
    assert found == plain | {
        "data.mirror": "true",
        "attack.ramp": "3",
        "train.proximal": "0.125",
        "train.smoothing": "2.5",
        "attack.step": "0.003922",
    }
    assert "train.smoothing" not in fact(
        only(write_run("uncalibrated", "jfat", "train.smoothing=2.5", "train.calibration=none")), "Not at the default"
    )


def test_a_mean_over_rounds_is_called_one(write_run):
    run = only(write_run("averaged", "jfat", "rounds=10", "aggregate.horizon=30%"))
    assert fact(run, "Aggregation") == "mean; judged is the mean of up to 3 rounds"
    assert "aggregate.horizon" not in fact(run, "Not at the default")
    assert fact(only(write_run("plain", "jfat")), "Aggregation") == "mean"


def test_a_run_that_has_the_defaults_has_no_such_line(write_run):
    path = write_run("run")
    (path / "config.toml").write_text(to_toml(Config(method="jfat")))
    assert "Not at the default" not in [each.label for each in only(path).facts]


REFRESH = "norm.refresh=attacked"
STATISTICS = [f"{layer}.{part}" for layer in ("1", "4", "7") for part in ("running_mean", "running_var")]
DONE = {"refresh": "attacked", "refreshed": STATISTICS}


@pytest.mark.parametrize(
    ("last", "finished", "text"),
    [
        (DONE, True, "shared; statistics at the end: measured anew on attacked images"),
        (
            {**DONE, "refreshed": STATISTICS[:4], "not_refreshed": {"layers": ["7"], "usable": 0, "minimum": 1}},
            True,
            "shared; statistics at the end: measured anew on attacked images (2 of 3 layers)",
        ),
        ({**DONE, "refreshed": []}, True, "shared; statistics at the end: not measured: as they were"),
        ({}, False, "shared; statistics are to be measured anew on attacked images at the end"),
        ({}, True, "shared"),
    ],
)
def test_what_became_of_measuring_statistics_anew(last, finished, text, write_run):
    path = write_run("run", "jfat", REFRESH, notes=[{}, last], finished=finished)
    assert fact(only(path), "Norm layers") == text


def test_stages_after_which_statistics_were_measured(write_cascade):
    """The second module has no norm layers, or nobody answered: only what was measured is said."""
    path = write_cascade("run", REFRESH, "norm.refresh_after=stage", results={"rounds": 5})
    records = [json.loads(line) for line in (path / "journal.jsonl").read_text().splitlines()]
    assert [number for number, record in enumerate(records) if "fixed" in record] == [1, 3]
    records[1]["refreshed"], records[3]["refreshed"] = STATISTICS[:2], []
    records.append({"round": 5, "times": {}, **DONE})
    (path / "journal.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = "shared; statistics at the end: measured anew on attacked images, and after stage 1"
    assert fact(only(path), "Norm layers") == found


def test_a_model_without_statistics_is_not_said_to_be_measured(write_cascade):
    path = write_cascade("run", REFRESH, finished=False)
    setup = json.loads((path / "setup.json").read_text())
    (path / "setup.json").write_text(json.dumps({**setup, "refreshes": False}))
    assert fact(only(path), "Norm layers") == "shared"


def test_several_machines_are_named_by_their_first_round(write_cascade):
    path = write_cascade("run")
    setup = json.loads((path / "setup.json").read_text())
    setup["machines"].append({"round": 3, "processor": "Other", "gpu": "A GPU", "gpu_memory_bytes": 10**10})
    (path / "setup.json").write_text(json.dumps(setup))
    found = [each for each in only(path).hardware if each.label.startswith("Machine")]
    assert found[1] == Fact("Machine from round 3", "Other, A GPU with 10.0 GB")


def test_runs_of_one_method_are_told_apart(write_run, tmp_path):
    a, b = write_run("x/one", "jfat", "seed=1"), write_run("y/one", "jfat", "seed=2")
    c, d = write_run("x/two", "heterofl"), write_run("y/two", "heterofl")
    e, f = write_run("x/three", "fedrbn"), write_run("y/four", "fedrbn")
    assert [run.label for run in report_of([a, b, c, d, e, f]).runs] == [
        "jFAT, seed 1", "jFAT, seed 2", f"HeteroFL-AT, {c}", f"HeteroFL-AT, {d}", "FedRBN, three", "FedRBN, four",
    ]  # fmt: skip
    assert only(a).label == "jFAT"
    twice = report_of([a, tmp_path / "y" / ".." / "x" / "one"])
    assert (len(twice.runs), len(twice.notes)) == (1, 1)


# Folders that are not whole ------------------------------------------------------------------------------------------


def test_an_unfinished_run_has_what_it_has(write_cascade):
    run = only(write_cascade("run", finished=False, notes=[{**note, "fixed": None} for note in document_notes(2)],
                             rounds=[[(1, 1, 1, 1)]] * 2))  # fmt: skip
    assert (run.finished, run.rounds, run.accuracies) == (False, 2, ())
    (stage,) = run.stages
    assert (stage.best, stage.epsilon, stage.last) == (None, 0.1, 2)
    assert run.cascade.whole == 200
    assert run.notes[0].startswith("It is not finished. Resume it with: fedprophet train --resume")


def test_a_run_that_a_process_works_on_is_not_to_be_resumed(write_cascade):
    path = write_cascade("run", finished=False)
    with folder_lock(path):
        run = only(path)
    assert (run.working, run.notes) == (True, ())
    assert only(path).working is False


def document_notes(count):
    return [{"module": 1, "epsilon": 0.1, "alpha": None, "clean": 0.6, "adversarial": 0.4, "samples": 9}] * count


def test_a_run_that_has_only_begun(write_cascade):
    path = write_cascade("run", finished=False, rounds=[], notes=[])
    (path / "journal.jsonl").unlink()
    run = only(path)
    assert (run.rounds, run.curve.round, run.stages, run.assignment) == (0, (), (), None)


def test_a_baseline_has_no_stages_and_no_assignment(write_run):
    run = only(write_run("run", results={"budget_bytes": 5, "whole_model_bytes": 9, "modules": []}))
    assert (run.stages, run.perturbation, run.assignment, run.cascade) == ((), None, None, None)


def test_real_devices_have_no_simulated_time(write_cascade):
    run = only(write_cascade("run", deployed=True))
    assert (run.deployed, run.time, run.curve.seconds, run.stages[0].access) == (True, None, None, None)
    assert fact(run, "Fleet") == "Flower, real devices"


def test_what_consists_of_it_is_read_from_the_results_of_earlier_versions(write_cascade):
    modules = [{"index": 1, "atoms": [], "layers": ["Conv 1"], "memory_bytes": 5}]
    results = {"budget_bytes": 6, "whole_model_bytes": 9, "modules": modules, "starting_weights": "w.safetensors"}
    run = only(write_cascade("run", setup=None, results=results))
    assert (run.cascade.budget, run.cascade.whole, len(run.cascade.modules)) == (6, 9, 1)
    assert fact(run, "Model").endswith("starting weights w.safetensors")
    assert fact(run, "Machine") == "not recorded: the run is of an earlier version, fedprophet 0.1.0"


def test_a_damaged_setup_is_a_note(write_cascade):
    path = write_cascade("run")
    (path / "setup.json").write_text('{"modules": 3}')
    run = only(path)
    assert run.cascade is None
    assert "setup.json is damaged" in run.notes[0]


@pytest.mark.parametrize("note", [{"assigned": {"0": 0}}, {"epsilon": "nan"}, {"clean": 2.0}, {"module": "x"}])
def test_a_damaged_record_is_named(write_run, note):
    with pytest.raises(CheckpointError, match=r"round 1 of the journal .* is damaged"):
        report_of([write_run("run", notes=[note])])


def test_the_document_is_json_and_the_same_for_the_same_folders(write_cascade):
    path = write_cascade("run")
    texts = {json.dumps(report_of([path]).to_json(), allow_nan=False) for _ in range(2)}
    assert len(texts) == 1
