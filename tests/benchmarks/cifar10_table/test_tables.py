"""`benchmarks/cifar10.py bring`, `table` and `figure` on made-up runs, and on those of the repository."""

import io
import json
import tarfile
from pathlib import Path

import cifar10
import pytest
from cifar10_table.bringing import read_kept
from cifar10_table.cells import BESIDE_THE_PAPER, CELLS, GROUPS, ORDER
from cifar10_table.closing import closing_lines, module_text
from cifar10_table.columns import COLUMNS
from cifar10_table.figure import COLOURS, apart, figure
from cifar10_table.tables import BEGIN, END, PAPER_COLUMNS, between_marks, papers, played_with, tables

from fedprophet.report.compare import compare
from fedprophet.server.assignment import AssignmentSettings
from fedprophet.server.perturbation import PerturbationSettings

JOINT = "balanced-jfat-seed0"


def small_tar(
    folder: Path, cell: str, clean: float, pgd: float, finished: bool = True, commit: str = "abc1234", **more: object
) -> Path:
    """Write the small files of a made-up run of two rounds, 5 and 7 s long, 3600 simulated seconds each.

    `more` is in its results.
    """
    cost = {"computation_s": 3000.0, "access_s": 600.0, "communication_s": 1.0, "memory_bytes": 5}
    measured = {"clean": clean, "adversarial": pgd, "samples": 100}
    lines = [
        {"round": number, "times": {"0": cost}, "dropped": {}, "loss": 1.0, "epsilon": 0.1, **measured}
        for number in (1, 2)
    ]
    accuracy = {"clean": {"accuracy": clean, "samples": 100}, "pgd20": {"accuracy": pgd, "samples": 100}}
    reached = {"clean": clean, "adversarial": pgd}
    results = {
        "version": "0.1.0",
        "rounds": 2,
        "personalised": accuracy,
        "global": accuracy,
        "best": {"round": 1, **reached},
        "last": {"round": 2, **reached},
        "starting_weights": "/some/where/start.safetensors",
        **more,
    }
    timings = [{"round": 1, "seconds": 5.0}, {"round": 2, "seconds": 7.0}]
    evaluation = {"round": 2, "personalised": {"autoattack": {"accuracy": pgd - 0.1, "samples": 50}}, "global": {}}
    method = cell.split("-")[-2]
    files = {
        "config.toml": f'method = "{method}"\nseed = {cell[-1]}\n[data]\nname = "cifar10"\nroot = "/some/data"\n',
        "journal.jsonl": "".join(f"{json.dumps(line)}\n" for line in lines),
        "timings.jsonl": "".join(f"{json.dumps(line)}\n" for line in timings),
        "cell.json": json.dumps({"cell": cell, "commit": commit, "settings": ["engine=plain"]}),
        **({"results.json": json.dumps(results), "evaluation.json": json.dumps(evaluation)} if finished else {}),
    }
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / f"{cell}.small.tar.gz", "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{cell}/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return folder


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "results" / "cifar10.md"
    path.parent.mkdir()
    path.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    return path


def test_finished_runs_are_brought_and_tabulated(page, tmp_path, capsys):
    for seed, (clean, pgd) in enumerate([(0.70, 0.50), (0.72, 0.56), (0.80, 0.53)]):
        small_tar(tmp_path / "kept", f"balanced-jfat-seed{seed}", clean, pgd)
    small_tar(tmp_path / "kept", "unbalanced-fedprophet-seed0", 0.75, 0.6)
    assert cifar10.main(["--page", str(page), "bring", str(tmp_path / "kept")]) == 0
    brought = page.with_suffix("") / "balanced-jfat-seed1"
    assert 'root = "data"' in (brought / "config.toml").read_text()
    assert json.loads((brought / "results.json").read_text())["starting_weights"] == "start.safetensors"

    assert cifar10.main(["--page", str(page), "table", "--write"]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    lines = text.splitlines()
    # 70, 72, 80: mean 74, deviation sqrt((16 + 4 + 36) / 2) = 5.29; 50, 56, 53: mean 53, deviation 3.
    ours, attacked = "74.0 ± 5.3 / 53.0 ± 3.0", "43.0 ± 3.0 (50 samples)"
    mean = f"{ours} | 79.7 / 56.8 | {attacked} | 55.0 | {ours} | | {ours} | 2.0 ± 0.0 h | |"
    assert f"| jFAT | mean ± standard deviation | {mean}" in lines
    one = "72.0 / 56.0 | | 46.0 (50 samples) | | 72.0 / 56.0 | 1 of 2 | 72.0 / 56.0 | 2.0 h | 12 s |"
    assert f"| jFAT | 1 | {one}" in lines
    cascade = "75.0 / 60.0 | 76.5 / 59.5 | 50.0 (50 samples) | 58.6 | 75.0 / 60.0 | 1 of 2: 75.0 / 60.0 |"
    assert any(line.startswith(f"| FedProphet | 0 | {cascade}") for line in lines)
    assert "| HeteroFL | 0 | | 51.6 / 39.4 | | 38.5 | | | | | |" in lines
    assert "| no APA | 0 | | 79.0 / 57.0 | | | | | | | |" in lines
    jfat = ", ".join(f"balanced-jfat-seed{seed}" for seed in range(3))
    assert f"- {jfat}, unbalanced-fedprophet-seed0: commit abc1234; `engine=plain`" in lines
    assert capsys.readouterr().err == ""


def test_one_model_for_everyone_has_columns_of_its_own(page, tmp_path):
    pair = {"clean": {"accuracy": 0.59, "samples": 9}, "pgd20": {"accuracy": 0.26, "samples": 9}}
    small_tar(tmp_path / "kept", "short-global-jfat-seed0", 0.7, 0.5, uncalibrated=pair)
    small_tar(tmp_path / "kept", JOINT, 0.8, 0.6, uncalibrated=pair)
    assert cifar10.main(["--page", str(page), "bring", str(tmp_path / "kept")]) == 0
    made = tables(read_kept(page.with_suffix("")))
    *_, table, tried = made.partition("\n\nPlayed with:")[0].split("### ")
    accuracies = "personalised clean / PGD-20 | personalised AutoAttack | uncalibrated clean / PGD-20"
    columns = f"{accuracies} | global clean / PGD-20 | best round | wall clock"
    heads = [f"| method | seed | {columns} |", "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    assert table.splitlines()[2:5] == [*heads, "| jFAT, the attack grows | 0, 1, 2 | | | | | | |"]
    assert tried.splitlines()[2:5] == [*heads, "| the attack grows, mirror images | 0 | | | | | | |"]
    row = "| at once | 0 | 70.0 / 50.0 | 40.0 (50 samples) | 59.0 / 26.0 | 70.0 / 50.0 | 1 of 2 | 12 s |"
    assert row in tried.splitlines()
    assert made.count("uncalibrated") == 2


def test_every_column_of_a_table_is_one_of_ours_or_the_papers():
    for group in GROUPS:
        assert set(group.columns) <= COLUMNS.keys() | PAPER_COLUMNS.keys()


def test_runs_that_were_played_with_other_things_have_lines_of_their_own(page, tmp_path):
    for cell, commit in {JOINT: "abc1234", "balanced-jfat-seed1": "other12", "balanced-jfat-seed2": "abc1234"}.items():
        small_tar(tmp_path / "kept", cell, 0.7, 0.5, commit=commit)
    cifar10.main(["--page", str(page), "bring", str(tmp_path / "kept")])
    assert list(played_with(read_kept(page.with_suffix("")))) == [
        f"- {JOINT}, balanced-jfat-seed2: commit abc1234; `engine=plain`",
        "- balanced-jfat-seed1: commit other12; `engine=plain`",
    ]


def test_a_finished_run_is_told_in_a_line_and_a_cascade_in_one_more(page, tmp_path):
    small_tar(tmp_path / "kept", JOINT, 0.7, 0.5)
    cifar10.main(["--page", str(page), "bring", str(tmp_path / "kept")])
    kept = read_kept(cifar10.PAGE.with_suffix("")) | read_kept(page.with_suffix(""))
    measured = "(clean / PGD-20 in %): personalised"
    reached = "70.0 / 50.0; global 70.0 / 50.0; AutoAttack 40.0 (50 samples); best round 1 of 2; wall clock 12 s"
    assert list(closing_lines("one", kept[JOINT])) == [f"one {measured} {reached}"]
    # The run of the repository.
    cascade = "79.1 / 53.9; uncalibrated 59.5 / 25.7; global 59.3 / 25.8; best round 512 of 838: 78.4 / 56.5"
    reached, modules = closing_lines("two", kept["short-global-fedprophet-seed0"])
    assert reached == f"two {measured} {cascade}; wall clock 694 s"
    assert modules.startswith(
        "two, by module: 1: 63.0 / 51.0, alpha 1.00; 2: 69.5 / 54.9, alpha 0.50; 3: 76.7 / 56.0, "
    )
    assert modules.endswith("; 7: 79.1 / 53.9, alpha 0.30")
    assert module_text({"module": 2, "clean": None, "adversarial": None, "alpha": None}) == "2: – / –"


def test_what_is_not_finished_or_another_run_is_refused(page, tmp_path, capsys):
    small_tar(tmp_path / "kept", JOINT, 0.7, 0.5, finished=False)
    bring = ["--page", str(page), "bring", str(tmp_path / "kept")]
    assert cifar10.main(bring) == 1
    assert f"{JOINT}.small.tar.gz: the run is not finished, it has 2 rounds: play it on" in capsys.readouterr().err
    assert not page.with_suffix("").exists()
    small_tar(tmp_path / "kept", JOINT, 0.7, 0.5)
    assert cifar10.main(bring) == 0
    assert cifar10.main(bring) == 0  # the same again
    small_tar(tmp_path / "kept", JOINT, 0.8, 0.5)
    assert cifar10.main(bring) == 1
    assert "another run of this cell" in capsys.readouterr().err
    (tmp_path / "kept" / f"{JOINT}.small.tar.gz").write_bytes(b"cut")
    assert cifar10.main(bring) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_the_page_in_the_repository_is_what_is_made_of_the_runs():
    text = cifar10.PAGE.read_text("utf-8")
    assert between_marks(text, tables(read_kept(cifar10.PAGE.with_suffix("")))) == text
    mean = "76.8 ± 1.2 / 56.0 ± 0.8 | 79.7 / 56.8"
    assert f"| jFAT | mean ± standard deviation | {mean} |" in text


def test_compare_has_a_row_for_the_seeds_of_each_kept_row():
    """Kept runs name their settings alike, their starting weights too: a seed that did not would be a row apart."""
    folder = cifar10.PAGE.with_suffix("")
    kept = [CELLS[name] for name in read_kept(folder)]
    settings = compare([folder / cell.name for cell in kept]).settings
    expected = {frozenset(cell.name for cell in kept if cell.row == row) for row in {cell.row for cell in kept}}
    assert {frozenset(run.path.name for run in row.runs) for setting in settings for row in setting.rows} == expected


def test_a_mean_says_of_how_many_seeds_it_is(page, tmp_path):
    for seed in range(2):
        small_tar(tmp_path / "kept", f"balanced-jfat-seed{seed}", 0.8, 0.5)
    cifar10.main(["--page", str(page), "bring", str(tmp_path / "kept")])
    (page.with_suffix("") / "balanced-jfat-seed1" / "evaluation.json").unlink()
    runs = list(read_kept(page.with_suffix("")).values())
    attacked = COLUMNS["personalised AutoAttack"]
    assert attacked(runs) == "40.0 (50 samples, 1 of 2 seeds)"
    assert attacked(runs[:1]) == "40.0 (50 samples)"


def test_a_page_without_marks_is_left_alone(page, capsys):
    page.write_text("nothing\n")
    assert cifar10.main(["--page", str(page), "table", "--write"]) == 2
    assert "lacks one of the lines" in capsys.readouterr().err
    assert page.read_text() == "nothing\n"


def test_the_figure_is_the_same_again(page, tmp_path):
    pytest.importorskip("matplotlib")
    small_tar(tmp_path / "kept", JOINT, 0.7, 0.5)
    small_tar(tmp_path / "kept", "balanced-jfat-seed1", 0.8, 0.6)
    cifar10.main(["--page", str(page), "bring", str(tmp_path / "kept")])
    drawn = [figure(read_kept(page.with_suffix(""))) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert b"<svg" in drawn[0]
    assert b"date" not in drawn[0]


def test_the_figure_has_every_row_however_many_there_are(page, tmp_path):
    pytest.importorskip("matplotlib")
    rows = max((group.rows for group in GROUPS), key=len)
    for row in rows:
        small_tar(tmp_path / "kept", f"{row.name}-seed0", 0.7, 0.5)
    cifar10.main(["--page", str(page), "bring", str(tmp_path / "kept")])
    drawn = figure(read_kept(page.with_suffix(""))).decode()
    assert len(rows) > len(COLOURS)
    assert [row.title for row in rows if f"<!-- {row.title} -->" not in drawn] == []


def test_labels_are_moved_apart():
    assert apart([50.0, 10.0], 4.0) == [50.0, 10.0]
    assert apart([11.0, 10.0], 4.0) == [12.5, 8.5]
    # 10 and 11 make 8.5 and 12.5, which 14 is too near to: all three are spread about 11.67.
    assert apart([10.0, 11.0, 14.0], 4.0) == pytest.approx([35 / 3 - 4, 35 / 3, 35 / 3 + 4])


def test_every_cell_has_a_configuration_and_a_line_of_the_papers():
    beside = {cell.name for group in GROUPS if group.columns == BESIDE_THE_PAPER for cell in group.cells}
    for cell in CELLS.values():
        config = cell.config()
        assert (config.method, config.seed) == (cell.row.method, cell.seed)
        assert bool(papers(cell.row)) == (cell.name in beside)
    config = CELLS["balanced-fedprophet-noapa-seed0"].config()
    assert (config.seed, config.evaluate.before_gate, config.checkpoint.every) == (0, 25, 25)
    assert not config.of(PerturbationSettings).enabled
    config = CELLS["best-fedprophet-noapa-nodma-seed0"].config()
    assert not config.of(PerturbationSettings).enabled
    assert not config.of(AssignmentSettings).enabled
    assert CELLS["best-fedprophet-nodma-seed0"].row.title == "no DMA, rules of our own"


def test_the_short_schedule_is_that_of_jfat_for_all():
    """What the preset gives jFAT alone, the six others have by settings: rounds, learning rate, warm-up and attack."""
    cells = [CELLS[f"global-{method}-seed0"].config() for method in ORDER if method != "fedprophet"]
    found = [(c.rounds, c.train.decay, c.warmup_rounds, c.ramp_rounds, c.evaluate.every) for c in cells]
    assert found == [(110, 0.973, 11, 33, 20)] * 7


@pytest.mark.parametrize("name", ["best-fedprophet-seed0", "global-jfat-seed1", "global-feddf-seed0"])
def test_where_a_run_is_evaluated_it_is_saved(name):
    """So that its best round can be packed, with one model: two do not fit what some machines give back."""
    config = CELLS[name].config()
    assert config.evaluate.every == config.checkpoint.every
