"""`fedprophet train`: where a run goes, what is printed."""

import json

import pytest
from safetensors import safe_open

from fedprophet.config.config import to_toml
from fedprophet.runs.session import assemble
from fedprophet.sizes import format_size

QUICK = {"rounds": 1, "train.warmup": 0, "train.iterations": 1}


@pytest.fixture(scope="module")
def sizes(tiny):
    """Budget, whole model and largest module of a tiny run, as they are printed."""
    session = assemble(tiny())
    largest = max(module.memory for module in session.world.modules)
    return [format_size(size) for size in (session.budget, session.world.cost.total_memory, largest)]


def test_a_run_goes_to_runs_under_the_current_folder(cli, tiny_flags, tmp_path, sizes):
    said = cli("train", *tiny_flags(QUICK))
    assert said.code == 0
    assert (tmp_path / "runs" / "digits-fedprophet-1" / "model.safetensors").is_file()
    start = (
        f"fedprophet on digits: vgg-small in 3 modules of at most {sizes[0]} (whole model {sizes[1]}), 2 of 6 clients"
    )
    assert said.out.startswith(start)
    assert said.out.rstrip().endswith("Files: runs/digits-fedprophet-1")
    assert cli("train", *tiny_flags(QUICK), "--method", "jfat").code == 0
    assert (tmp_path / "runs" / "digits-jfat-1").is_dir()


def test_the_table_says_what_a_module_takes_and_reaches(cli, tiny_flags, tmp_path, sizes):
    out = cli("train", *tiny_flags(QUICK), "--out", "run").out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    table = out[out.index("Modules") :]
    for module, stage in zip(results["modules"], results["stages"], strict=True):
        memory = module["memory_bytes"]
        assert f"{memory / 1000:.1f} kB" in table
        assert f"{100 * memory / results['budget_bytes']:.0f} %" in table
        assert f"{100 * memory / results['whole_model_bytes']:.0f} %" in table
        assert f"{100 * stage['clean']:.1f} %" in table
        assert f"{100 * stage['adversarial']:.1f} %" in table
    for kind in ("personalised", "global"):
        for attack in ("clean", "pgd2"):
            assert f"{100 * results[kind][attack]['accuracy']:.1f} %" in table
    assert "PGD-2" in table
    assert f"A client needs {sizes[2]} to train a module; the whole model would take {sizes[1]}." in table


def test_jfat_is_shown_as_what_it_is(cli, tiny_flags, sizes):
    budget, whole, _ = sizes
    out = cli("train", *tiny_flags({**QUICK, "rounds": 2, "method": "jfat"})).out
    assert out.startswith(
        f"jfat on digits: vgg-small (whole model {whole}; every client can spare at least {budget}), 2 of 6 clients a r"
    )
    assert "round 2/2  eps 0.100  loss " in out
    assert "Modules" not in out
    assert f"Every client trained the whole model, which takes {whole}; where it could spare less, " in out
    assert "\nBest round (" in out
    assert "\nLast round (2): clean " in out


def test_what_a_client_needs_is_said_where_it_trains_a_part(cli, tiny_flags, tmp_path, sizes):
    poor = {"method": "heterofl", "fleet.memory_share": 0.01}  # nobody can spare more than the budget
    out = cli("train", *tiny_flags({**QUICK, **poor}), "--out", "run").out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    least, peak = results["memory"]["least_bytes"], results["memory"]["peak_bytes"]
    assert 0 < least <= peak <= results["budget_bytes"], "or the sentence would be that of the whole model"
    assert "Modules" not in out
    assert (
        f"With {format_size(least)} a client could have done the smallest task of every round; the largest task took "
        f"{format_size(peak)}, and the whole model takes {sizes[1]}.\n"
    ) in out


DISTILLED = "those that the server's model was distilled with"
MEAN = "mean over the clients that have trained, weighted by shard size"
NORM_LAYERS = {
    "fedprophet": ("each client's own", MEAN),
    "jfat": ("each client's own", MEAN),
    "fedet": (DISTILLED, DISTILLED),
    "fedrbn": (
        "each client's own (statistics: the clean ones for clean images, the adversarial ones for attacked images)",
        f"{MEAN} (statistics: the adversarial ones)",
    ),
}


@pytest.mark.parametrize("method", NORM_LAYERS)
def test_each_table_of_accuracies_says_which_norm_layers_it_was_measured_with(cli, tiny_flags, tmp_path, method):
    personalised, whole = NORM_LAYERS[method]
    public = 180 if method == "fedet" else 0
    settings = {**QUICK, "method": method, "distillation.iterations": 1, "evaluate.test_samples": 20}
    trained = cli("train", *tiny_flags(settings), "--out", "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["norm_layers"] == {"personalised": personalised, "global": whole}
    assert results["public_samples"] == public
    evaluated = cli("evaluate", "run", "--attack", "clean")
    left_out = f" without the {public} samples of the public set" if public else ""
    for said in (trained, evaluated):
        assert f"\npersonalised: on each client's own held-out data; norm layers: {personalised}\n" in said.out
        assert f"\nglobal: the exported model on the test set{left_out}; norm layers: {whole}\n" in said.out
    exported = cli("export", "run", "--out", "model.safetensors").out
    assert f"\nNorm layers: {whole}.\n" in exported
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["norm_layers"] == whole


def test_clients_without_held_out_data_have_no_accuracy(cli, tiny_flags):
    settings = {**QUICK, "population.clients": 1400, "shards.kind": "iid", "measure.clients": 1, "evaluate.clients": 2}
    out = cli("train", *tiny_flags(settings)).out
    assert "clean –  PGD –" in out
    personalised = out[out.index("personalised") :].splitlines()[0]
    assert personalised.count("–") == 2


def test_a_toml_file_is_a_preset(cli, tiny, tmp_path):
    (tmp_path / "mine.toml").write_text(to_toml(tiny({**QUICK, "seed": 11, "rounds": 2})))
    said = cli("train", "mine.toml", "--set", "rounds=1", "--json")
    assert said.json["seed"] == 11
    assert said.json["rounds"] == 3, "--set comes last"


def test_a_folder_that_holds_a_run_is_left_alone(cli, tiny_flags, tmp_path):
    assert cli("train", *tiny_flags(QUICK), "--out", "run").code == 0
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    error = cli("train", *tiny_flags({**QUICK, "seed": 5}), "--out", "run").error
    assert "run already holds a run. Go on with: fedprophet train --resume run" in error
    assert {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("method", ["fedprophet", "jfat"])
def test_resuming_a_finished_run_prints_the_same_table(cli, tiny_flags, method):
    first = cli("train", *tiny_flags({**QUICK, "method": method}), "--out", "run")
    again = cli("train", "--resume", "run")
    assert again.code == 0
    begin = "Modules" if method == "fedprophet" else "Accuracy of the trained model"
    assert again.out[again.out.index(begin) :] == first.out[first.out.index(begin) :]
    assert cli("train", "--resume", "run", "--json").json["method"] == method


def test_a_public_set_larger_than_what_is_held_out_is_a_mistake(cli, tiny_flags, tmp_path):
    """The digits have 360 test images; what is wrong is found before anything is written."""
    for public, text in {
        400: "distillation.public: 400 samples are larger than what is held out: the test set has 360 samples",
        -1: "distillation.public: given -1 (--set), allowed: a whole number of at least 1",
    }.items():
        error = cli("train", *tiny_flags({**QUICK, "method": "feddf", "distillation.public": public})).error
        assert text in " ".join(error.split())
    assert not (tmp_path / "runs").exists()
