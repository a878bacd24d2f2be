"""`fedprophet reproduce`: trains what is missing, resumes what was stopped, skips what is done, compares."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedprophet.report.folders import read_run
from fedprophet.reproduce import runs as reproduce_runs
from fedprophet.runs.observer import Observer

OUT = Path("reproduce/small")
RUN = OUT / "runs/digits-paper-fedprophet-seed0"
QUICK = {
    "rounds": 2,
    "memory.budget": "70%",  # two modules
    "evaluate.clients": 2,
    "measure.clients": 2,
    "evaluate.test_samples": 20,
    "evaluate.steps": 1,
    "train.iterations": 1,
}

Flags = list[str]


@pytest.fixture
def flags(tiny_flags: Callable[..., Flags]) -> Flags:
    """Return what makes every run of an experiment one of a second."""
    return tiny_flags(QUICK)


def journal(run: Path = RUN) -> bytes:
    return (run / "journal.jsonl").read_bytes()


def test_list_says_what_there_is_and_how_far_it_is(cli: Any, flags: Flags) -> None:
    found = {row["name"]: row for row in cli("reproduce", "list", "--json").json}
    assert list(found) == [
        *("table1", "figure2", "figure6", "table2", "figure7", "figure8", "figure9", "table3", "figure10", "table4"),
        *("table5", "table6", "table7", "table8"),
    ]
    assert all(row["shows"] for row in found.values())
    assert found["table7"]["small"] == {"needs": "no data, no training", "state": "nothing done"}
    assert found["figure7"]["small"]["needs"] == "no data, no training; a few minutes"
    assert found["table3"]["small"]["state"] == "nothing done, 4 runs"
    # Four settings; jFAT is trained once for both fleets of a dataset.
    assert found["table2"]["paper"]["state"] == "nothing done, 30 runs"
    # In both datasets: all four variants on the balanced fleet, and those with assignment on the unbalanced one.
    assert found["table3"]["paper"]["state"] == "nothing done, 12 runs"
    assert "cifar10, caltech256" in found["table2"]["paper"]["needs"]
    assert "unknown" in found["table2"]["paper"]["needs"]

    assert cli("reproduce", "figure10", *flags, "--no-plot").code == 0
    assert cli("reproduce", "table7", "--no-plot").code == 0
    found = {row["name"]: row for row in cli("reproduce", "list", "--json").json}
    states = {name: found[name]["small"]["state"] for name in ("figure10", "table3", "table7", "table8")}
    assert states == {"figure10": "done", "table3": "1 of 4 runs", "table7": "done", "table8": "nothing done"}
    page = cli("reproduce", "list").out
    assert "| table3 " in page
    assert "1 of 4 runs" in page


def test_a_computed_table_beside_the_papers(cli: Any) -> None:
    said = cli("reproduce", "table7")
    assert said.code == 0
    assert "| module 3 |           3 |            3 |" in said.out
    assert "within its last printed digit: holds" in said.out
    assert sorted(file.name for file in OUT.iterdir()) == ["table7.csv", "table7.md", "table7.png"]
    assert (OUT / "table7.png").read_bytes().startswith(b"\x89PNG")
    assert '"VGG16, R_min = 60 MB",module 1,memory,MB,55.790456,,1,55.8,' in (OUT / "table7.csv").read_text()

    found = cli("reproduce", "table7", "--json").json
    first = next(line for line in found["numbers"] if line["quantity"] == "memory")
    assert first["here"] == {"mean": 55.790456, "deviation": None, "runs": 1}
    assert first["difference"] == pytest.approx(55.790456 - 55.8)
    assert first["where"] == "Table 7, row module 1, column memory"
    assert found["claims"] == [
        {
            "part": "VGG16, R_min = 60 MB",
            "claim": "every number is the paper's, within its last printed digit",
            "holds": True,
        }
    ]


def test_trains_once_and_experiments_share_the_run(cli: Any, flags: Flags) -> None:
    first = cli("reproduce", "figure10", *flags)
    assert first.code == 0, first.err
    assert "run 1 of 1: digits-paper-fedprophet-seed0, starting it" in first.err
    assert "Another data set and model than the paper's" in first.out
    assert "paper (CIFAR-10 balanced)" in first.out
    assert "difference" not in first.out
    assert (
        (OUT / "figure10-points.csv").read_text().startswith("part,curve,x,y\ndigits,perturbation per dimension,1.0,")
    )

    written = (RUN / "journal.jsonl").stat().st_mtime_ns
    again = cli("reproduce", "figure10", *flags, "--no-plot")
    assert "done before" in again.err
    assert again.out == first.out

    found = cli("reproduce", "table3", *flags, "--no-plot", "--json").json
    assert (RUN / "journal.jsonl").stat().st_mtime_ns == written
    assert [Path(run["path"]).name for run in found["runs"]] == [
        f"digits-paper-fedprophet{what}-seed0" for what in ("", "-no-apa", "-no-dma", "-no-apa-no-dma")
    ]
    ours = {line["row"]: line for line in found["numbers"] if line["quantity"] == "PGD"}
    best = read_run(RUN).best
    assert best is not None
    assert ours["APA and DMA"]["here"]["mean"] == 100 * best.adversarial
    assert ours["APA and DMA"]["paper"] == 59.22
    assert ours["APA and DMA"]["difference"] is None
    assert {claim["holds"] for claim in found["claims"]} <= {True, False}


def test_several_seeds_are_a_mean(cli: Any, flags: Flags) -> None:
    found = cli("reproduce", "table1", "--seeds", 2, *flags, "--no-plot", "--json").json
    ours = next(line["here"] for line in found["numbers"] if (line["row"], line["quantity"]) == ("large", "clean"))
    bests = [read_run(OUT / f"runs/digits-paper-jfat-seed{seed}").best for seed in (0, 1)]
    values = [100 * best.clean for best in bests if best]
    assert ours["runs"] == 2
    assert ours["mean"] == pytest.approx(sum(values) / 2)
    assert ours["deviation"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    small = read_run(OUT / "runs/digits-paper-jfat-small-model-seed0")
    assert small.config.model.name == "vgg-small-3"
    memory = {line["row"]: line["here"]["mean"] for line in found["numbers"] if line["quantity"] == "memory"}
    assert memory["small"] < memory["large"] > memory["large, partial training"] > 0


class _Interrupting(Observer):
    def round_done(self, record: Any, seconds: float) -> None:
        if record["round"] == 3:
            raise KeyboardInterrupt


def test_stopped_then_resumed_is_the_same_run(cli: Any, flags: Flags, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def interrupting(console: Any) -> Iterator[Observer]:
        yield _Interrupting()

    flags = [*flags, "--no-plot"]
    assert cli("reproduce", "figure10", *flags, "--out", "whole").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(reproduce_runs, "observer_for", interrupting)
        stopped = cli("reproduce", "figure10", *flags)
    assert stopped.code == 130
    assert "run 1 of 1, digits-paper-fedprophet-seed0: stopped after round 3; nothing is lost." in stopped.err
    assert "Go on with: fedprophet reproduce figure10 --scale small --set method=" in stopped.err
    assert stopped.err.rstrip().endswith("--no-plot")
    assert "Resume it with" not in stopped.err
    assert not (OUT / "figure10.md").exists()

    resumed = cli("reproduce", "figure10", *flags)
    assert "going on with it" in resumed.err
    assert journal() == journal(Path("whole/runs") / RUN.name)
    assert (OUT / "figure10.csv").read_text() == Path("whole/figure10.csv").read_text()


def test_a_run_with_other_settings_is_never_used(cli: Any, flags: Flags) -> None:
    flags = [*flags, "--no-plot"]
    assert cli("reproduce", "figure10", *flags).code == 0
    before = journal()
    said = cli("reproduce", "table3", *flags, "--set", "train.batch=8")
    assert f"{RUN} holds a run with other settings than asked for (train.batch: here 8, there 16)" in said.error
    assert "--out" in said.error
    (plan,) = cli("reproduce", "table3", *flags, "--set", "train.batch=8", "--dry-run", "--json").json
    assert [run["state"] for run in plan["runs"]] == ["other settings", "missing", "missing", "missing"]
    assert "train.batch: here 8, there 16" in plan["refused"][0]
    page = cli("reproduce", "figure10", *flags, "--set", "train.batch=8", "--dry-run").out
    assert "refused: " in page
    assert "all runs are there" not in page
    assert sorted(path.name for path in (OUT / "runs").iterdir()) == [RUN.name]
    assert journal() == before
    # What only other methods read, and where the data lies, is no other run.
    same = cli("reproduce", "figure10", *flags, "--set", "distillation.iterations=5", "--set", "data.root=elsewhere")
    assert "done before" in same.err


def test_missing_data_is_said_before_anything_is_trained(cli: Any) -> None:
    said = cli("reproduce", "table2", "--scale", "paper", "--only", "cifar10-balanced")
    assert "this needs cifar10" in said.error
    assert "fedprophet data get cifar10 --root data" in said.error
    assert not Path("reproduce").exists()


KEPT = Path(__file__).parents[2] / "benchmarks/results/cifar10"


@pytest.mark.slow
def test_kept_results_take_the_place_of_runs_with_the_same_settings(cli: Any) -> None:
    """The three jFAT runs on CIFAR-10: their results are kept, their models are not."""
    asked = ("reproduce", "table2", "--scale", "paper", "--only", "cifar10-balanced", "--from", KEPT, "--no-train")
    asked = (*asked, "--no-plot", "--seeds", 3, "--json", "--set", "norm.newcomers=auto")
    assert all(line["here"] is None for line in cli(*asked).json["numbers"])  # they started with weights

    found = cli(*asked, "--set", "model.weights=vgg16_tinyimagenet32.safetensors").json
    ours = {(line["row"], line["quantity"]): line for line in found["numbers"] if line["here"]}
    assert {row for row, _ in ours} == {"jFAT"}
    clean, pgd = ours["jFAT", "clean"], ours["jFAT", "PGD"]
    # benchmarks/results/cifar10.md: 76.8 ± 1.2 / 56.0 ± 0.8; the paper has 79.74 / 56.76.
    assert clean["here"]["mean"] == pytest.approx(76.8, abs=0.1)
    assert pgd["here"]["deviation"] == pytest.approx(0.8, abs=0.1)
    assert pgd["difference"] == pytest.approx(pgd["here"]["mean"] - 56.76)
    assert any("vgg16_tinyimagenet32.safetensors" in note for note in found["notes"])
    assert not (Path("reproduce/paper") / "runs").exists()


def test_a_run_that_fails_is_said_and_the_others_go_on(cli: Any, flags: Flags) -> None:
    found = cli("reproduce", "figure10", *flags, "--set", "train.learning_rate=1e30", "--json", "--no-plot").json
    (reason,) = found["failures"].values()
    assert "rounds in a row had no usable update" in reason
    assert [claim["holds"] for claim in found["claims"]] == [None]


def test_without_training_and_without_runs_there_is_nothing_to_write(cli: Any) -> None:
    said = cli("reproduce", "table3", "--no-train")
    assert said.code == 0
    assert "table3: nothing is there yet, of 4 runs. Leave out --no-train to train" in said.err
    assert said.out == ""
    assert list(OUT.iterdir()) == []
    nowhere = cli("reproduce", "figure8", "--scale", "paper", "--only", "cifar10-unbalanced")
    assert "figure8: nothing to show, it has no runs in cifar10-unbalanced" in nowhere.err


def test_what_does_not_heed_changed_keys_is_said(cli: Any) -> None:
    said = cli("reproduce", "all", "--set", "memory.budget=70%", "--dry-run")
    names = "figure2, figure6, figure7, table4, table5, table6, table7, table8"
    assert f"note: --set changes nothing in {names}, computed for the paper's own settings" in said.err
    assert "note" not in cli("reproduce", "table4", "--scale", "paper", "--set", "rounds=4", "--dry-run").err


def test_list_of_one_scale_or_folder(cli: Any) -> None:
    scales = {"paper", "small"}
    asked = {(): scales, ("--scale", "paper"): {"paper"}, ("--out", "there"): {"small"}}
    for arguments, shown in asked.items():
        first = cli("reproduce", "list", *arguments, "--json").json[0]
        assert scales & set(first) == shown


def test_dry_run_trains_nothing(cli: Any, flags: Flags) -> None:
    said = cli("reproduce", "table3", "--dry-run")
    assert said.code == 0
    assert "| digits-paper-fedprophet-no-apa-no-dma-seed0 | missing |" in said.out
    assert not Path("reproduce").exists()
    (plan,) = cli("reproduce", "table3", "--dry-run", "--json").json
    assert [run["state"] for run in plan["runs"]] == ["missing"] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("table9",), "unknown experiment 'table9'. Did you mean"),
        (("table2", "--scale", "tiny"), "--scale: unknown scale 'tiny'"),
        (("table2", "--only", "cifar10"), "--only: unknown setting 'cifar10'"),
        (("table3", "--set", "train.batch=x"), "train.batch"),
        (("table7", "--set", "train.batch=x"), "train.batch"),
        (("list", "--scale", "huge"), "--scale: unknown scale 'huge'"),
        (("list", "--set", "train.batch=8"), "list takes no --set, --only or --from"),
    ],
)
def test_mistakes_are_sentences(cli: Any, arguments: tuple[str, ...], message: str) -> None:
    assert message in cli("reproduce", *arguments).error
    assert not Path("reproduce").exists()


def test_weights_of_the_large_model_are_not_given_to_the_small_one(cli: Any) -> None:
    plan = ("reproduce", "table1", "--scale", "paper", "--dry-run", "--json", "--set", "model.weights=vgg.safetensors")
    (found,) = cli(*plan).json
    names = [Path(run["path"]).name for run in found["runs"]]
    assert names[:2] == ["cifar10-balanced-jfat-small-model-seed0", "cifar10-balanced-jfat-seed0"]
    assert json.dumps(found).count("caltech256-balanced") == 3
