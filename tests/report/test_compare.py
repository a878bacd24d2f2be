"""Which runs share a row and which rows a table; means, deviations and speed-ups by hand; and what is said beside."""

import json
import math

import pytest

from fedprophet.report.compare import Statistic, compare
from fedprophet.report.notes import reading, setting_notes
from fedprophet.report.tables import document

FAST = [[(1, 3, 1, 10)]]  # 4 s
SLOW = [[(2, 8, 1, 10)]]  # 10 s


def only(comparison):
    assert len(comparison.settings) == 1
    return comparison.settings[0]


def labels(setting):
    return [row.label for row in setting.rows]


def said(setting, *parts):
    """Return the one note that has all these parts."""
    found = [note for note in setting_notes(setting) if all(part in note for part in parts)]
    assert len(found) == 1, setting_notes(setting)
    return found[0]


def test_seeds_share_a_row_with_mean_and_sample_deviation(write_run):
    paths = [
        write_run("c", "jfat", "seed=2", clean=0.9, rounds=[[(6, 14, 1, 10)]]),
        write_run("a", "jfat", "seed=0", clean=0.6, rounds=SLOW, autoattack=0.3),
        write_run("b", "jfat", "seed=1", "threads=3", "data.root=elsewhere", clean=0.6, rounds=FAST),
    ]
    row = only(compare(paths)).rows[0]
    assert row.seeds == (0, 1, 2)
    clean = row.accuracy("personalised", "clean")
    # Mean 0.7; deviations −0.1, −0.1, 0.2: √((0.01 + 0.01 + 0.04) / 2) = √0.03.
    assert clean.value == Statistic(pytest.approx(0.7), pytest.approx(math.sqrt(0.03)), 3)
    assert clean.samples == (100, 100, 100)
    assert row.time("total").mean == pytest.approx((10 + 4 + 20) / 3)
    assert row.time("access").mean == pytest.approx((8 + 3 + 14) / 3)
    assert row.accuracy("personalised", "aa").value == Statistic(0.3, None, 1)
    setting = only(compare(paths))
    assert said(setting, "jFAT: personalised AA of 1 of 3 seeds.")
    assert "mean ± sample standard deviation" in reading(compare(paths))[-1]


def test_rows_are_in_the_papers_order(write_run):
    methods = ["fedprophet", "fedrbn", "jfat", "heterofl"]
    paths = [write_run(method, method) for method in methods]
    assert labels(only(compare(paths))) == ["jFAT", "HeteroFL-AT", "FedRBN", "FedProphet"]


def test_rows_of_a_method_are_told_apart_by_what_is_unusual(write_run):
    paths = [
        write_run("a", "fedprophet"),
        write_run("b", "fedprophet", "seed=1"),
        write_run("c", "fedprophet", "assignment.enabled=false"),
        write_run("d", "fedprophet", "train.batch=7"),
        write_run("e", "jfat"),
    ]
    setting = only(compare(paths))
    assert labels(setting) == [
        "jFAT",
        "FedProphet",
        "FedProphet (assignment.enabled=false)",
        "FedProphet (train.batch=7)",
    ]
    assert setting.rows[1].seeds == (0, 1)
    assert set(setting.rows[1].differs) == {"assignment.enabled", "train.batch"}
    assert said(setting, "train.batch: 7 for FedProphet (train.batch=7)").endswith("for the others.")


MANY = ("norm.layers=local", "train.proximal=0.25", "evaluate.every=1")
KEYS_OF_MANY = 'train.proximal=0.25, norm.layers="local", evaluate.every=1'


def test_a_row_that_differs_in_many_keys_has_a_letter_and_a_legend_tells_them_once(write_run):
    paths = [
        write_run("usual", "fedprophet"),
        write_run("one", "fedprophet", "train.batch=7"),
        write_run("two", "fedprophet", "rounds=7"),
        write_run("three", "fedprophet", "attack.steps=7"),
        write_run("many", "fedprophet", *MANY),
        write_run("begun", "fedprophet", *MANY, "seed=3", finished=False),
        write_run("more", "fedprophet", "norm.layers=frozen", "perturbation.enabled=false"),
        write_run("jfat", "jfat"),
        write_run("elsewhere", "fedprophet", "shards.kind=iid"),
        write_run("again", "fedprophet", "shards.kind=iid", *MANY),
        write_run("third", "fedprophet", "shards.kind=iid", "train.batch=9"),
    ]
    comparison = compare(paths)
    skewed, iid = comparison.settings
    assert [row.name for row in skewed.rows] == [
        "jFAT",
        "FedProphet",
        "FedProphet (train.batch=7)",
        "FedProphet (rounds=7)",
        "FedProphet (attack.steps=7)",
        "FedProphet a",
        "FedProphet a (seed 3, 2 rounds so far)",
        "FedProphet b",
    ]
    assert [row.name for row in iid.rows] == ["FedProphet", "FedProphet a", "FedProphet (train.batch=9)"]
    legend = setting_notes(skewed)[:3]
    assert legend[0] == f"FedProphet a: {KEYS_OF_MANY}"
    assert legend[1].startswith("FedProphet b: ")
    assert not legend[2].startswith("FedProphet")
    assert sum(KEYS_OF_MANY in note for note in setting_notes(skewed)) == 1
    assert setting_notes(iid)[0] == f"FedProphet a: {KEYS_OF_MANY}"
    assert said(skewed, "key train.proximal").endswith(
        ": 0.25 for FedProphet a, FedProphet a (seed 3, 2 rounds so far); 0.0 for the others."
    )
    found = document(comparison)["settings"][0]["rows"][5]
    assert found["name"] == "FedProphet a"
    assert found["label"] == f"FedProphet ({KEYS_OF_MANY})"
    assert found["differs"]["train.batch"] == skewed.rows[1].differs["train.batch"]


def test_a_speedup_over_a_row_with_a_letter_names_it_so_in_notes_and_wholly_for_programs(write_run):
    paths = [
        write_run("a", "jfat", *MANY, rounds=SLOW),
        write_run("b", "jfat"),
        write_run("c", "jfat", "train.batch=7"),
        write_run("d", "fedprophet", *MANY, rounds=FAST),
    ]
    setting = only(compare(paths))
    assert setting.rows[-1].speedup.over == f"jFAT ({KEYS_OF_MANY})"
    assert said(setting, "Several jFAT rows fit").endswith(" for jFAT (train.batch=7); jFAT a for the others.")


def test_letters_go_on_after_z(write_run):
    rows = [write_run(str(n), "jfat", f"train.batch={n + 1}", f"model.weights={'w' * 30}-{n}") for n in range(28)]
    names = [row.name for row in only(compare(rows)).rows]
    assert (names[0], names[25:]) == ("jFAT a", ["jFAT z", "jFAT aa", "jFAT ab"])


def test_keys_that_a_method_does_not_read_tell_no_rows_apart(write_run):
    cascade, family = "perturbation.start=0.6", "distillation.diversity=0.5"
    for method, rows in (("jfat", 1), ("fedprophet", 2), ("fedet", 2)):
        paths = [write_run(f"{method}-{n}", method, *keys) for n, keys in enumerate([[], [cascade, family, "seed=1"]])]
        assert len(compare(paths).settings[0].rows) == rows, method


def test_two_rows_without_a_majority_both_say_it(write_run):
    paths = [write_run(str(batch), "jfat", f"train.batch={batch}") for batch in (8, 16)]
    assert labels(only(compare(paths))) == ["jFAT (train.batch=8)", "jFAT (train.batch=16)"]


def test_runs_on_different_engines_share_a_row_and_a_note_names_them(write_run):
    paths = [
        write_run("a", "jfat", "engine=plain"),
        write_run("b", "jfat", "seed=1", "engine=flower-sim", "flower.deadline=5", "flower.cache=1GB", "flower.cpus=2"),
        write_run("c", "jfat", "seed=2", "engine=cuda", "precision=float32"),
        write_run("d", "heterofl", "engine=plain"),
        write_run("e", "jfat", "seed=3", "engine=auto"),
    ]
    setting = only(compare(paths))
    assert labels(setting) == ["jFAT", "HeteroFL-AT"]
    assert setting.rows[0].seeds == (0, 1, 2, 3)
    assert said(setting, "different engines").endswith(
        ": engine flower-sim for jFAT seed 1; engine cuda, float32 for jFAT seed 2; engine auto, bfloat16 on a GPU for "
        "jFAT seed 3; engine plain for the others."
    )
    assert not any("different engines" in note for note in setting_notes(only(compare(paths[:1] + paths[3:4]))))


def test_the_engine_that_is_recorded_counts(write_run):
    paths = [write_run(name, "jfat", "engine=auto", f"seed={seed}") for seed, name in enumerate("ab")]
    for path, engines in zip(paths, (("workers", "workers"), ("workers", "cuda")), strict=True):
        lines = [{"round": n, "engine": engine, "precision": "bfloat16"} for n, engine in enumerate(engines, start=1)]
        (path / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    comparison = compare(paths)
    assert said(only(comparison), "different engines").endswith(
        ": engine workers for jFAT seed 0; engine workers to round 1, then cuda, bfloat16 for the others."
    )
    assert not any("different engines" in note for note in setting_notes(only(compare(paths[:1]))))
    assert said(only(compare(paths[1:])), "different engines", "then cuda, bfloat16 for all rows")
    first, second = document(comparison)["settings"][0]["rows"][0]["runs"]
    assert (first["engine"], second["engine"]) == ("workers", "workers, cuda")
    assert second["engines"] == [
        {"engine": "workers", "precision": "bfloat16", "rounds": [1, 1]},
        {"engine": "cuda", "precision": "bfloat16", "rounds": [2, 2]},
    ]


def test_what_may_change_a_result_on_flower_makes_a_row_of_its_own(write_run):
    paths = [
        write_run("a"),
        write_run("b", "jfat", "flower.updates=bfloat16"),
        write_run("c", "jfat", "aggregate.rule=clip"),
    ]
    assert labels(only(compare(paths))) == [
        "jFAT",
        'jFAT (flower.updates="bfloat16")',
        'jFAT (aggregate.rule="clip")',
    ]


def test_of_the_same_run_on_two_engines_the_one_that_counted_bytes_stays(write_run, tmp_path):
    wire = [{"wire": {"sent": 1, "received": 2, "whole_model": 3}}]
    paths = [write_run("a", "jfat", "engine=plain"), write_run("b", "jfat", "engine=flower-sim", notes=wire)]
    comparison = compare(paths)
    assert [run.path.name for run in only(comparison).runs] == ["b"]
    assert comparison.notes == (
        f"{tmp_path / 'a'} repeats the settings and the seed of {tmp_path / 'b'} (engine plain instead of engine "
        "flower-sim): it is left out",
    )


def test_real_devices_are_a_setting_of_their_own(write_run):
    """With the settings and the seed of a run on the plain engine, and of one with another pool."""
    paths = [
        write_run("plain", "jfat", "engine=plain"),
        write_run("real", "jfat", "engine=plain", deployed=True),
        write_run("ours", "fedprophet", "engine=flower-sim", "fleet.exponent=-1.6", deployed=True),
        write_run("open", "fedprophet", "seed=3", deployed=True, finished=False),
    ]
    comparison = compare(paths)
    assert comparison.notes == ()
    simulated, real = comparison.settings
    assert [[run.path.name for run in setting.runs] for setting in comparison.settings] == [
        ["plain"],
        ["real", "ours", "open"],
    ]
    clients = simulated.title.split(", ")[-1]
    assert real.title == f"digits, real devices, {clients}"
    assert "fleet" in simulated.title
    assert all(row.time("total") is None and row.speedup is None for row in real.rows)
    assert all("fleet" not in row.label for row in real.rows)
    assert said(real, "Flower, real devices", "no simulated time and no speed-up")
    notes = "\n".join(setting_notes(real))
    assert "fedprophet train" not in notes, "a deployed run goes on with Flower"
    assert "Global AA is not measured for jFAT, FedProphet." in notes
    assert "No speed-up for" not in notes
    assert "configuration key fleet" not in notes
    assert "is not finished: 2 rounds so far; memory is of these rounds only. Resume it with: flwr run" in notes
    assert not any("Flower, real devices" in note for note in setting_notes(simulated))
    engines = [run["engine"] for row in document(comparison)["settings"][1]["rows"] for run in row["runs"]]
    assert set(engines) == {"Flower, real devices"}


def test_on_real_devices_autoattack_of_the_exported_model_is_all_there_can_be(write_run):
    measured = {"round": 2, "personalised": {}, "global": {"autoattack": {"accuracy": 0.2, "samples": 50}}}
    setting = only(compare([write_run("a", deployed=True, evaluation=measured)]))
    assert setting.rows[0].accuracy("global", "aa").value.mean == 0.2
    assert not any("not measured" in note for note in setting_notes(setting))


def test_which_accuracies_were_not_measured_under_autoattack_is_said(write_run, tmp_path):
    """The command that is named measures these alone: AutoAttack takes long."""
    found = {"autoattack": {"accuracy": 0.2, "samples": 50}}
    paths = [
        write_run("own", "jfat", evaluation={"round": 2, "personalised": found, "global": {}}),
        write_run("whole", "fedprophet", evaluation={"round": 2, "personalised": {}, "global": found}),
        write_run("none", "feddf"),
        write_run("both", "fedrbn", evaluation={"round": 2, "personalised": found, "global": found}),
    ]
    notes = [note for note in setting_notes(only(compare(paths))) if "not measured" in note]
    command = "fedprophet evaluate {} --attack autoattack"
    assert notes == [
        f"Global AA is not measured for jFAT. Measure it: {command.format(tmp_path / 'own')} --of global",
        f"Personalised and global AA are not measured for FedDF-AT. Measure them: {command.format(tmp_path / 'none')}",
        "Personalised AA is not measured for FedProphet. Measure it: "
        f"{command.format(tmp_path / 'whole')} --of personalised",
    ]


def test_a_model_of_ones_own_is_measured_and_resumed_in_python(write_run, tmp_path):
    found = {"autoattack": {"accuracy": 0.2, "samples": 50}}
    own = ("model.name=custom", "data.name=custom")
    measured = write_run("own", "jfat", *own, evaluation={"round": 2, "personalised": found, "global": {}})
    stopped = write_run("stopped", "feddf", "distillation.family=['cnn3','custom']", *own, finished=False)
    notes = "\n".join(note for setting in compare([measured, stopped]).settings for note in setting_notes(setting))
    path = tmp_path / "own"
    assert f"Measure it: fedprophet.evaluate('{path}', 'autoattack', of='global', model=…, data=…)" in notes
    assert f"Resume it with: fedprophet.resume('{tmp_path / 'stopped'}', model=…, data=…)" in notes


def test_what_has_no_checkpoints_is_not_to_be_measured(write_run, tmp_path):
    """Kept results, whose models are elsewhere: of two rows without AutoAttack, the second can be measured."""
    for name, method in (("kept", "jfat"), ("whole", "feddf")):
        write_run(name, method)
    (tmp_path / "kept" / "checkpoints").rmdir()
    note = said(
        only(compare([tmp_path / "kept", tmp_path / "whole"])), "AA are not measured for jFAT, FedDF-AT. Measure"
    )
    assert note.endswith(f"them: fedprophet evaluate {tmp_path / 'whole'} --attack autoattack")
    (alone,) = [n for n in setting_notes(only(compare([tmp_path / "kept"]))) if "AA are not" in n]
    assert alone == "Personalised and global AA are not measured for jFAT."


def test_a_second_run_of_one_seed_on_real_devices_is_said(write_run, tmp_path):
    comparison = compare([write_run("a", deployed=True), write_run("b", deployed=True)])
    assert comparison.notes == (
        f"{tmp_path / 'b'} repeats the settings and the seed of {tmp_path / 'a'}: it is left out",
    )


def test_faults_are_named(write_run):
    setting = only(compare([write_run("a", notes=[{"missing": {"train": [1, 2]}}]), write_run("b", "heterofl")]))
    assert said(setting, "missing or unusable: 2 in jFAT.")
    assert not any("unusable" in note for note in setting_notes(only(compare([write_run("c")]))))


def test_keys_in_which_methods_differ_are_named(write_run):
    setting = only(compare([write_run("a", "jfat", "rounds=84"), write_run("b", "fedprophet", "rounds=21")]))
    assert labels(setting) == ["jFAT", "FedProphet"]
    assert said(setting, "rounds") == "Rows differ in the configuration key rounds: 84 for jFAT; 21 for the others."
    assert not [note for note in setting_notes(setting) if "key train.batch" in note]


def test_data_and_fleet_make_tables_of_their_own(write_run):
    paths = [
        write_run("a", "jfat", "memory.budget=30%"),
        write_run("b", "jfat", "fleet.exponent=-1.6"),
        write_run("c", "fedprophet"),
        write_run("d", "jfat", "data.name=cifar10"),
        write_run("e", "jfat", "shards.kind=iid"),
        write_run("f", "jfat", "memory.budget=50%"),
    ]
    settings = compare(paths).settings
    assert [labels(setting) for setting in settings] == [
        ['jFAT (memory.budget="30%")', 'jFAT (memory.budget="50%")', "FedProphet"],
        ["jFAT"],
        ["jFAT"],
        ["jFAT"],
    ]
    assert settings[0].title.endswith('a round, shards.kind="skewed"')
    assert settings[1].title == "digits, fleet small unbalanced (exponent -1.6), 5 of 20 clients a round"
    assert settings[2].title.startswith("cifar10, fleet small balanced")
    assert settings[3].title.endswith('a round, shards.kind="iid"')


def test_folders_of_images_and_data_handed_over_are_known_by_their_content(write_run):
    roots = [write_run(f"f{n}", "jfat", "data.name=folder", f"data.root=images-{n}", f"seed={n}") for n in (0, 1)]
    assert len(compare(roots).settings) == 2
    custom = [write_run(f"c{n}", "jfat", "data.name=custom", f"seed={n}") for n in (0, 1, 2)]
    for path, digest in zip(custom, ("x", "y", "x"), strict=True):
        (path / "inputs.json").write_text(f'{{"dataset": "{digest}", "model": "m"}}')
    assert [len(setting.runs) for setting in compare(custom).settings] == [2, 1]


def handed_over(write_run, name, architecture, *settings, layers=("a", "b"), **options):
    path = write_run(name, *settings, "model.name=custom", **options)
    about = {"name": "custom", "parameters": 2884, "architecture": architecture}
    modules = [{"index": n, "atoms": [], "layers": [layer], "memory_bytes": 1} for n, layer in enumerate(layers, 1)]
    (path / "setup.json").write_text(json.dumps({"model": about, "modules": modules}))
    return path


def test_models_handed_over_are_known_by_their_architecture(write_run, tmp_path):
    """Neither as seeds of one row nor as a repetition; seeds of one stay a row, and so they do in other modules."""
    paths = [
        handed_over(write_run, "a", "aa", "fedprophet"),
        handed_over(write_run, "a1", "aa", "fedprophet", "seed=1", layers=["ab"]),
        handed_over(write_run, "b", "bb", "fedprophet"),
        handed_over(write_run, "b2", "bb", "fedprophet"),
        handed_over(write_run, "base", "bb", "jfat"),
    ]
    comparison = compare(paths)
    setting = only(comparison)
    assert [[run.path.name for run in row.runs] for row in setting.rows] == [["base"], ["a", "a1"], ["b"]]
    assert [note.split(" repeats")[0] for note in comparison.notes] == [str(tmp_path / "b2")]
    first, second = (
        "FedProphet (model.architecture=2884 parameters aa)",
        "FedProphet (model.architecture=2884 parameters bb)",
    )
    assert labels(setting) == ["jFAT", first, second]
    assert [row.speedup is None for row in setting.rows] == [False, True, False], "jFAT with another model is no base"
    assert said(setting, "models that were handed over") == (
        "Rows differ in models that were handed over: 2884 parameters aa for FedProphet a; 2884 parameters bb for the "
        "others."
    )


def test_models_of_earlier_versions_are_known_by_their_size(write_run):
    paths = [handed_over(write_run, str(n), None, "jfat", f"seed={n}") for n in (0, 1)]
    other = write_run("unknown", "jfat", "model.name=custom", "seed=2")
    assert labels(only(compare([*paths, other]))) == [
        "jFAT (model.architecture=2884 parameters)",
        "jFAT (model.architecture=unknown)",
    ]


def test_speedup_is_the_ratio_of_mean_times(write_run):
    paths = [
        write_run("a", "jfat", "seed=0", rounds=SLOW),
        write_run("b", "jfat", "seed=1", rounds=[[(2, 12, 1, 10)]]),
        write_run("c", "fedprophet", rounds=FAST),
    ]
    jfat, ours = only(compare(paths)).rows
    assert ours.speedup.factor == pytest.approx((10 + 14) / 2 / 4)
    assert ours.speedup.over == "jFAT"
    assert jfat.speedup.factor == 1


def test_without_a_fitting_jfat_run_there_is_no_speedup(write_run, tmp_path):
    setting = only(compare([write_run("a b", "fedprophet"), write_run("b", "jfat", "model.options={width=4}")]))
    assert [row.speedup is None for row in setting.rows] == [False, True]
    note = said(setting, "No speed-up for FedProphet")
    assert note.endswith(": fedprophet train PRESET --method jfat")
    only_jfat = only(compare([tmp_path / "b"]))
    assert not [note for note in setting_notes(only_jfat) if "speed-up" in note.lower()]


def test_notes_on_norm_layers_and_public_sets(write_run):
    own = {"norm_layers": {"personalised": "each client's own", "global": "mean"}, "public_samples": 0}
    distilled = {"norm_layers": {"personalised": "distilled", "global": "distilled"}, "public_samples": 40}
    paths = [
        write_run("a", "jfat", results=own),
        write_run("b", "heterofl", results=own),
        write_run("c", "feddf", results=distilled),
        write_run("d", "fedprophet", finished=False),
    ]
    setting = only(compare(paths))
    assert said(setting, "Norm layers, personalised") == (
        "Norm layers, personalised: distilled for FedDF-AT; each client's own for the others."
    )
    assert said(setting, "Norm layers, global") == "Norm layers, global: distilled for FedDF-AT; mean for the others."
    assert said(setting, "public set").endswith(": 40 for FedDF-AT; 0 for the others.")
    alone = only(compare(paths[:1]))
    assert said(alone, "Norm layers, global") == "Norm layers, global: mean for all rows."
    assert not [note for note in setting_notes(alone) if "public" in note]
    missed = {"norm_layers": {**own["norm_layers"], "global": "mean; not measured anew"}}
    seeds = only(compare([*paths[:2], write_run("again", "jfat", "seed=1", results=missed)]))
    assert said(seeds, "Norm layers, global") == (
        "Norm layers, global: mean; not measured anew for jFAT seed 1; mean for the others."
    )
    assert said(seeds, "Norm layers, personalised").endswith(": each client's own for all rows.")
    older = only(compare([*paths[:2], write_run("old", "fedrbn")]))
    assert said(older, "Norm layers, global") == ("Norm layers, global: not recorded for FedRBN; mean for the others.")


def test_one_note_has_what_all_rows_share(write_run):
    """Also a key that only one of them reads; what rows differ in has a note of its own, and the title has the data."""
    both = ["data.mirror=true", "attack.ramp=3", "train.smoothing=2.5", "shards.iid_fraction=0.5"]
    paths = [write_run("a", "jfat", *both), write_run("b", "fedprophet", *both, "perturbation.change=0.15")]
    shared = said(only(compare(paths)), "alike in all rows")
    for text in ("data.mirror = true", "attack.ramp = 3", "train.smoothing = 2.5", "perturbation.change = 0.15"):
        assert f" {text}," in shared or f" {text}." in shared
    assert "shards." not in shared
    assert "distillation." not in shared
    differing = only(compare([*paths, write_run("c", "heterofl", *both, "data.mirror=false")]))
    assert "data.mirror" not in said(differing, "alike in all rows")
    assert said(differing, "key data.mirror").endswith(": false for HeteroFL-AT; true for the others.")


def test_runs_that_differ_in_what_their_method_does_not_read_share_a_row(write_run):
    paths = [
        write_run("a", "jfat", "norm.refresh_after=stage", "propagation.temperature=0.5"),
        write_run("b", "jfat", "seed=1", "train.strong_convexity=0.5"),
    ]
    (row,) = only(compare(paths)).rows
    assert (row.seeds, row.label) == ((0, 1), "jFAT")


def test_starting_weights_do_not_change_the_time(write_run):
    setting = only(compare([write_run("a", "fedprophet"), write_run("b", "jfat", "model.weights=w.safetensors")]))
    assert all(row.speedup for row in setting.rows)
    assert said(setting, "Starting weights") == (
        "Starting weights: w.safetensors for jFAT; drawn at random for the others."
    )


def test_of_several_jfat_rows_the_nearest_is_used_and_named(write_run):
    paths = [
        write_run("a", "jfat", "train.batch=8", "attack.steps=3", rounds=SLOW),
        write_run("b", "jfat", "train.batch=16", rounds=[[(10, 10, 1, 1)]]),
        write_run("c", "fedprophet", "train.batch=8", "attack.steps=3", rounds=FAST),
        write_run("d", "fedprophet", "train.batch=16", rounds=FAST),
    ]
    setting = only(compare(paths))
    assert [round(row.speedup.factor, 2) for row in setting.rows] == [1.0, 1.0, 2.5, 5.0]
    assert "train.batch=8" in setting.rows[2].speedup.over
    assert "train.batch=16" in setting.rows[3].speedup.over
    note = said(setting, "Several jFAT rows fit")
    assert setting.rows[2].speedup.over in note
    assert setting.rows[3].speedup.over in note


def test_what_is_not_finished_is_a_row_of_its_own(write_run, tmp_path):
    paths = [
        write_run("a", "jfat", "seed=0", finished=False, rounds=SLOW),
        write_run("b", "jfat", "seed=1", finished=False, rounds=FAST),
        write_run("c", "jfat", "seed=2", rounds=FAST),
        write_run("d", "fedprophet", rounds=FAST),
    ]
    setting = only(compare(paths))
    assert labels(setting) == [
        "jFAT (seed 0, 1 round so far)",
        "jFAT (seed 1, 1 round so far)",
        "jFAT",
        "FedProphet",
    ]
    assert [row.speedup and row.speedup.factor for row in setting.rows] == [None, None, 1.0, 1.0]
    assert setting.rows[0].accuracy("personalised", "clean") is None
    assert f"fedprophet train --resume {tmp_path / 'a'}" in said(setting, "a is not finished: 1 round so far;")
    lonely = only(compare([paths[0], paths[3]]))
    assert [row.speedup for row in lonely.rows] == [None, None], "half a jFAT run is no reference"
    assert "no finished jFAT run" in said(lonely, "No speed-up for FedProphet")


def test_the_same_folder_counts_once(write_run, tmp_path):
    path = write_run("a")
    (tmp_path / "link").symlink_to(path)
    comparison = compare([path, path, tmp_path / "link", tmp_path / "link" / ".." / "a"])
    assert len(only(comparison).runs) == 1
    assert comparison.notes[0] == f"{path} is given more than once: it counts once"
    assert len(comparison.notes) == 3


def test_a_repetition_of_a_seed_counts_once_and_the_finished_one_wins(write_run, tmp_path):
    paths = [write_run("a", clean=0.1, finished=False), write_run("b", "jfat", "threads=4", clean=0.9)]
    comparison = compare(paths)
    row = only(comparison).rows[0]
    assert [run.path for run in row.runs] == [tmp_path / "b"]
    assert comparison.notes == (
        f"{tmp_path / 'a'} repeats the settings and the seed of {tmp_path / 'b'}: it is left out",
    )


def cells(**accuracies):
    return {name.replace("_", "-"): {"accuracy": value, "samples": 9} for name, value in accuracies.items()}


def test_autoattack_is_preferred_to_its_stand_in_and_never_mixed_with_it(write_run):
    fast = {"round": 2, "personalised": cells(aa_fast=0.4), "global": cells(aa_fast=0.4)}
    both = {"round": 2, "personalised": cells(aa_fast=0.4, autoattack=0.3), "global": {}}
    alone = only(compare([write_run("a", evaluation=fast)])).rows[0].accuracy("personalised", "aa")
    assert (alone.attack, alone.value.mean) == ("aa-fast", 0.4)
    row = only(compare([write_run("b", evaluation=fast), write_run("c", "jfat", "seed=1", evaluation=both)])).rows[0]
    mixed = row.accuracy("personalised", "aa")
    assert (mixed.attack, mixed.value, mixed.samples) == ("autoattack", Statistic(0.3, None, 1), (9,))
    assert row.accuracy("global", "aa").attack == "aa-fast"


def test_columns_of_different_precisions_are_told_apart(write_run):
    def evaluated(pgd):
        own = {name: cell | {"precision": "float32"} for name, cell in cells(autoattack=0.3).items()}
        steps = {"accuracy": 0.4, "samples": 9, "precision": pgd}
        return {"personalised": {"clean": steps, "pgd20": steps, **own}, "global": {}}

    mixed = only(compare([write_run("a", results=evaluated("bfloat16"))]))
    assert said(mixed, "Precision") == "Precision of the accuracies: CLEAN bfloat16, PGD bfloat16, AA float32."
    alike = only(compare([write_run("b", results=evaluated("float32"))]))
    assert not [note for note in setting_notes(alike) if note.startswith("Precision")]


def test_notes_on_samples_versions_attacks_and_memory(write_run, tmp_path):
    paths = [
        write_run("a", "jfat", autoattack=0.3),
        write_run("b", "fedprophet", rounds=[[]], results={"version": "0.2.0"}),
    ]
    setting = only(compare(paths))
    assert said(setting, "Starting weights") == "Starting weights: drawn at random for all rows."
    assert said(setting, "Made with") == "Made with fedprophet 0.1.0, 0.2.0."
    assert said(setting, "Samples").endswith(
        ": personalised clean and PGD 100, personalised AA 50, global clean and PGD 360, global AA 50."
    )
    assert said(setting, "AA are not measured for FedProphet.").endswith(
        f": fedprophet evaluate {tmp_path / 'b'} --attack autoattack"
    )
    assert setting.rows[0].memory("least") == 40
    assert setting.rows[1].memory("least") is None, "nobody trained"


def test_keys_that_only_one_method_reads_are_no_difference_between_methods(write_run):
    setting = compare([write_run("a", "jfat"), write_run("b", "fedprophet"), write_run("c", "fedet")]).settings[0]
    assert not [note for note in setting_notes(setting) if "key perturbation." in note or "key distillation." in note]


def test_mirror_images_make_a_row_of_their_own(write_run):
    paths = [write_run("a", "jfat"), write_run("b", "jfat", "data.mirror=true")]
    assert labels(only(compare(paths))) == ["jFAT (data.mirror=false)", "jFAT (data.mirror=true)"]
