"""`fedprophet evaluate` and `fedprophet export`: the numbers of a run, and its model in other hands."""

import importlib
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedprophet import data, models
from fedprophet.runs import evaluation
from fedprophet.runs.play import play
from fedprophet.runs.run import checkpoints_of, reopen, start

SETTINGS = {
    "rounds": 4,
    "train.iterations": 8,
    "attack.steps": 1,
    "attack.feature_steps": 1,
    "evaluate.every": 4,
    "train.learning_rate": 0.1,
    "memory.budget": "60%",
    "measure.clients": 1,
}


ROUNDS = 2 * 4
"""Two stages of four rounds."""


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """The folder of a run that is better than chance."""
    path = tmp_path_factory.mktemp("evaluated") / "run"
    play(start(tiny(SETTINGS), path))
    return path


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def test_json_has_the_documented_keys_and_no_others(cli, run):
    said = cli("evaluate", run, "--attack", "clean,pgd3", "--no-masking-check", "--json")
    results = said.json
    assert list(results) == ["starting_weights", "norm_layers", "public_samples", "personalised", "global", "warnings"]
    assert results["warnings"] == []
    assert list(results["norm_layers"]) == ["personalised", "global"]
    for part in ("personalised", "global"):
        assert list(results[part]) == ["clean", "pgd3"]
        for cell in results[part].values():
            assert list(cell) == ["accuracy", "samples", "interval", "precision"]
            low, high = cell["interval"]
            assert 0 <= low <= cell["accuracy"] <= high <= 1
            assert isinstance(cell["samples"], int)
    assert said.err == ""
    assert results["global"]["clean"]["samples"] == 360
    assert results["personalised"]["clean"]["samples"] == 288
    assert results["personalised"]["pgd3"]["accuracy"] <= results["personalised"]["clean"]["accuracy"]
    written = json.loads((run / "evaluation.json").read_text())
    assert {key: written[key] for key in results} == results
    assert written["round"] == ROUNDS


def test_one_kind_of_accuracy_alone_has_its_rows_alone(cli, run):
    said = cli("evaluate", run, "--attack", "clean", "--of", "global")
    assert re.search(r"\| global +\| Clean +\|", said.out)
    assert "personalised" not in said.out
    said = cli("evaluate", run, "--of", "own")
    assert (said.code, said.out) == (2, "")
    assert "unknown kind of accuracy 'own'" in said.err


def test_the_same_attack_gives_the_numbers_of_the_run(cli, run):
    results = json.loads((run / "results.json").read_text())
    again = cli("evaluate", run, "--attack", "clean,pgd2", "--no-masking-check", "--json").json
    assert again.pop("warnings") == []
    assert again == {
        key: results[key] for key in ("starting_weights", "norm_layers", "public_samples", "personalised", "global")
    }
    journal = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    best = journal[results["stages"][-1]["round"] - 1]
    assert again["personalised"]["clean"]["accuracy"] == best["clean"]


def test_one_attack_alone_and_in_any_order(cli, run):
    few = ("--samples", "20", "--no-masking-check", "--json")
    alone = cli("evaluate", run, "--attack", "pgd3", *few).json
    both = cli("evaluate", run, "--attack", "pgd3, clean", *few).json
    assert list(both["global"]) == ["pgd3", "clean"]
    assert both["global"]["pgd3"] == alone["global"]["pgd3"]


def test_the_table(cli, run):
    out = cli("evaluate", run, "--attack", "clean,pgd2", "--no-masking-check").out
    results = json.loads((run / "results.json").read_text())
    assert "PGD-2" in out
    for key in ("personalised", "global"):
        cell = results[key]["clean"]
        low, high = cell["interval"]
        row = next(line for line in out.splitlines() if line.startswith(f"| {key} "))
        assert [part.strip() for part in row.split("|")[1:-1]] == [
            key,
            "Clean",
            f"{100 * cell['accuracy']:.1f} %",
            f"{100 * low:.1f} – {100 * high:.1f} %",
            str(cell["samples"]),
        ]
    assert "Masking" not in out


def test_the_masking_check_names_each_radius(cli, run):
    out = cli("evaluate", run, "--attack", "pgd1", "--samples", "20").out
    assert re.search(
        r"^- Masking check of PGD-1 on 20 test samples: \d+\.\d % correct with radius 0\.1, \d+\.\d % with 0\.4, "
        r"\d+\.\d % with 0\.5\.$",
        out,
        re.MULTILINE,
    )


def test_a_number_of_samples(cli, run):
    said = cli("evaluate", run, "--attack", "clean", "--samples", "20", "--json").json
    assert said["global"]["clean"]["samples"] == 20
    assert said["personalised"]["clean"]["samples"] == 24, "4 of each of the 6 clients"
    for wrong in ("0", "-2"):
        error = cli("evaluate", run, "--samples", wrong).error
        assert error == f"error: the number of samples must be at least 1, not {wrong}\n"


def test_mistakes_are_found_before_the_run_is_opened(cli, monkeypatch):
    error = cli("evaluate", "nowhere", "--attack", "clean,autoatack").error
    assert error == (
        "error: unknown attack 'autoatack'. Allowed: clean, pgdN with N steps (as in pgd20), autoattack, aa-fast; "
        "several separated by commas\n"
    )
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    error = cli("evaluate", "nowhere", "--attack", "autoattack").error
    assert error == "error: the attack autoattack needs the extra `attacks`: pip install 'fedprophet[attacks]'\n"


@pytest.mark.slow
def test_autoattack_is_at_least_as_strong_as_pgd(cli, run, monkeypatch):
    module = importlib.import_module("fedprophet.attacks.autoattack")
    original = module._suite

    def shortened(*arguments):
        suite = original(*arguments)
        suite.square.n_queries = suite.fab.n_iter = suite.apgd_targeted.n_iter = 4
        suite.apgd.n_iter = 20
        return suite

    monkeypatch.setattr(module, "_suite", shortened)
    attacks = ("clean", "pgd5", "aa-fast", "autoattack")
    said = cli("evaluate", run, "--attack", ",".join(attacks), "--samples", "24", "--no-masking-check", "--json")
    assert said.err == ""
    for part in ("personalised", "global"):
        clean, pgd, fast, whole = (said.json[part][name]["accuracy"] for name in attacks)
        assert clean >= pgd >= fast >= whole
        assert clean > whole
    assert "AutoAttack" in cli("evaluate", run, "--attack", "autoattack", "--samples", "24").out


def test_warnings_go_to_people_and_to_programs(cli, run, monkeypatch):
    monkeypatch.setattr(evaluation, "masking_warnings", lambda *_: {"clean": ["this is odd", "that too"]})
    said = cli("evaluate", run, "--attack", "clean", "--json")
    assert said.err == "warning: this is odd\nwarning: that too\n"
    assert said.json["warnings"] == ["this is odd", "that too"]
    assert "odd" not in cli("evaluate", run, "--attack", "clean").out


def test_evaluating_changes_nothing_of_the_run(cli, run):
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    cli("evaluate", run, "--attack", "clean")
    cli("export", run, "--out", run.parent / "model.safetensors")
    after = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert {file: after[file] for file in before} == before
    new = {str(file.relative_to(run)).partition("/")[0] for file in after if file not in before}
    assert new == {"evaluation", "evaluation.json"}


def test_an_export_is_not_named_like_another_format(cli, run, tmp_path):
    for name in ("m.pt", "m.PTH", "a.b.bin", "m.onnx"):
        said = cli("export", run, "--out", name)
        assert (said.code, name in said.error, "Give a file such as" in said.error) == (2, True, True)
        assert not (tmp_path / name).exists()
    for name in ("m", "m-0.5", "m.Safetensors"):
        assert cli("export", run, "--out", name).code == 0


def test_an_export_says_for_programs_what_its_file_says(cli, run):
    about = cli("export", run, "--out", "model.safetensors", "--json").json
    results = json.loads((run / "results.json").read_text())
    assert about["digest"] == results["model_digest"]
    assert (about["run"], about["file"], about["finished"]) == (str(run), "model.safetensors", True)
    assert (about["rounds"], about["classes"], about["input"]) == (results["rounds"], 10, [1, 8, 8])
    assert (about["norm_layers"], about["options"]) == (results["norm_layers"]["global"], {"width": 4})
    assert (len(about["normalize_mean"]), len(about["normalize_std"])) == (1, 1)


def test_an_export_replaces_an_exported_model_and_nothing_else(cli, run, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    for out in ("mine.txt", run / "config.toml", run / "journal.jsonl"):
        before = Path(tmp_path, out).read_bytes()
        said = cli("export", run, "--out", out)
        assert f"{out} is not a model that fedprophet exported, and stays as it is" in said.error
        assert Path(tmp_path, out).read_bytes() == before
    assert "is a run's own file, and stays as it is" in cli("export", run, "--out", run / "model.safetensors").error
    assert "is a folder. Give the file to write" in cli("export", run, "--out", tmp_path).error
    for _ in range(2):
        assert cli("export", run, "--out", "model.safetensors").code == 0


def test_a_run_that_cannot_be_written_to_is_evaluated_with_a_note(cli, run, monkeypatch):
    monkeypatch.setattr(evaluation.os, "access", lambda where, how: how != evaluation.os.W_OK)
    said = cli("evaluate", run, "--attack", "clean", "--json")
    assert said.err == f"note: {run} cannot be written to: this evaluation is not kept\n"
    assert said.json["global"]["clean"]["samples"] == 360


def test_an_unfinished_run_is_evaluated_with_a_note(cli, run):
    shutil.rmtree(run / "checkpoints" / f"round-{ROUNDS:06}")
    said = cli("evaluate", run, "--attack", "clean", "--json")
    assert said.json["global"]["clean"]["samples"] == 360
    assert said.err == f"note: this run is not finished; this is its model after round {ROUNDS - 1}\n"
    exported = cli("export", run, "--out", "model.safetensors")
    assert "this run is not finished" in exported.err


def test_an_exported_model_loads_into_the_bare_architecture_and_has_the_runs_accuracy(cli, run, tmp_path):
    """By hand, as somebody who knows only PyTorch would: no chain, no attack, no client."""
    said = cli("export", run, "--out", "other folder/model.safetensors")
    assert said.code == 0
    assert f"vgg-small after {ROUNDS} rounds written to other folder/model.safetensors" in said.out
    file = tmp_path / "other folder" / "model.safetensors"
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    shape = tuple(map(int, metadata["input"].split("x")))
    net = models.build(metadata["model"], shape, int(metadata["classes"]), **json.loads(metadata["options"]))
    net.load_state_dict(tensors, strict=True)
    net.eval()
    test = data.load("digits").test
    images, labels = test.fetch(torch.arange(len(test))), test.labels
    mean, std = (torch.tensor(json.loads(metadata[f"normalize_{name}"])).view(-1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        correct = int((net((images - mean) / std).argmax(1) == labels).sum())
    journalled = json.loads((run / "results.json").read_text())["global"]["clean"]
    assert journalled["samples"] == len(test)
    assert correct / len(test) == pytest.approx(journalled["accuracy"], abs=1e-9)
    assert correct / len(test) > 0.15, "better than chance, or the comparison would show little"


def test_export_says_how_the_runs_model_normalises_not_how_its_data_is(cli, tiny, tmp_path):
    """Starting weights bring a normalisation of their own."""
    weights = models.build("vgg-small", (1, 8, 8), 10, width=4).state_dict()
    save_file(weights, tmp_path / "start.safetensors", {"normalisation": "mean .25 std .5"})
    run = start(tiny({"method": "jfat", "model.weights": str(tmp_path / "start.safetensors")}), tmp_path / "run")
    assert run.session.dataset.mean != (0.25,)
    out = cli("export", "run", "--out", "model.safetensors").out
    assert "mean 0.2500 and std 0.5000.\n" in out
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert (file.metadata()["normalize_mean"], file.metadata()["normalize_std"]) == ("[0.25]", "[0.5]")


def test_export_says_how_the_model_was_trained_where_that_is_not_as_in_the_paper(cli, tiny, run):
    start(tiny({"method": "jfat", "train.calibration": "labels", "aggregate.horizon": 2}), run.parent / "ours")
    ours, papers = (cli("export", path, "--out", "model.safetensors").out for path in ("ours", run))
    for text in (
        "the mean of the model over its last rounds, of up to 2 (aggregate.horizon).\n",
        "whoever adds theirs to its scores makes it personal (docs/how-to/one-model.md).\n",
    ):
        assert text in ours
        assert text not in papers


def test_exported_norm_layers_are_the_weighted_mean_over_those_who_trained(run):
    opened = reopen(run)
    session, state = opened.session, opened.state
    timeline = session.method.timeline(state)
    name = next(name for name in session.world.chain.local() if name.endswith("running_var"))
    total, weight = torch.zeros(session.world.initial_layers[name].shape, dtype=torch.float64), 0
    for client in range(6):
        own = session.layers.get("backbone", client, timeline, state.round + 1)
        if own is not None and name in own:
            total += session.population.samples(client) * own[name].double()
            weight += session.population.samples(client)
    assert weight > 0
    torch.testing.assert_close(load_file(run / "model.safetensors")[name].double(), total / weight)


def test_export_is_the_models_file_of_the_run(cli, run, tmp_path):
    cli("export", run, "--out", "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


# A run whose clients are on other machines


@pytest.fixture
def deployed(run, tmp_path):
    """A finished run of a pilot, whose clients' layers are not here."""
    (tmp_path / "pilot" / "runs").mkdir(parents=True)
    (tmp_path / "pilot" / "deploy.toml").touch()
    path = run.rename(tmp_path / "pilot" / "runs" / "run-1")
    simulated = reopen(path)
    (path / "flower.json").write_text('{"run": "ab", "deployed": true}')
    shutil.rmtree(path / "clients")
    known = replace(simulated.contents, clients={}, flower=(path / "flower.json").read_text())
    checkpoints_of(simulated.files, simulated.session.config).save(simulated.state, ROUNDS, known)
    return path


def test_a_deployed_run_is_exported_as_it_ended(cli, deployed, tmp_path):
    assert cli("export", deployed, "--out", "there.safetensors").code == 0
    assert (tmp_path / "there.safetensors").read_bytes() == (deployed / "model.safetensors").read_bytes()


def test_of_a_deployed_run_the_global_model_is_measured(cli, deployed):
    results = json.loads((deployed / "results.json").read_text())
    said = cli("evaluate", deployed, "--attack", "clean,pgd2", "--no-masking-check", "--json")
    assert said.json["global"] == results["global"]
    assert said.json["personalised"] == {}
    assert "only the global model is measured here" in said.err
    table = cli("evaluate", deployed, "--attack", "clean").out
    assert "global" in table
    assert cli("compare", deployed).code == 0


def test_a_deployed_run_goes_on_with_its_pilot(cli, deployed):
    command = f": fedprophet deploy run {deployed.parent.parent} --name run-1 --resume"
    assert command in cli("train", "--resume", deployed).error
    (deployed / "results.json").unlink()
    for arguments in (["evaluate", deployed], ["export", deployed, "--out", "x.safetensors"]):
        said = cli(*arguments).error
        assert "is not finished" in said
        assert command in said
