"""`benchmarks/cifar10.py` on a few random images in CIFAR-10's own files: stopped in time, kept, brought, tabulated."""

import importlib.util
import io
import json
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.torch import save_file

from fedprophet.models import build
from fedprophet.runs.files import RunFiles, is_finished
from fedprophet.runs.observer import Observer
from fedprophet.runs.pack import unpack
from fedprophet.runs.play import play
from fedprophet.runs.run import RunStoppedError, reopen, start

ROOT = Path(__file__).parents[2] / "benchmarks"
RECORDS = 16
CASCADE, JOINT = "balanced-fedprophet-seed0", "balanced-jfat-seed0"
TINY = (
    "engine=plain",
    "threads=1",
    "rounds=2",
    "model.options.width=4",
    "memory.budget=60%",
    "population.clients=4",
    "population.cohort=2",
    "train.warmup=0",
    "train.iterations=1",
    "train.batch=4",
    "attack.steps=1",
    "attack.feature_steps=1",
    "convergence.gate=0",
    "evaluate.before_gate=0",
    "evaluate.steps=1",
    "measure.steps=1",
    "checkpoint.every=1",
)


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("cifar10_cells", ROOT / "cifar10.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the images and the starting weights."""
    folder = tmp_path_factory.mktemp("given")
    images = folder / "images" / "cifar-10-batches-bin"
    images.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        labels = random.integers(0, 10, (RECORDS, 1), dtype=np.uint8)
        pixels = random.integers(0, 256, (RECORDS, 3072), dtype=np.uint8)
        (images / name).write_bytes(np.hstack([labels, pixels]).tobytes())
    save_file(build("vgg16", (3, 32, 32), 10, width=4).state_dict(), folder / "start.safetensors")
    return folder


@pytest.fixture(autouse=True)
def _few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedprophet.data.cifar10.RECORDS", RECORDS)


@pytest.fixture
def played(program: ModuleType, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return what plays cells; every round that was ever played takes 10 s of its clock."""
    runs = tmp_path / "runs"
    journals = lambda: (file.read_bytes().count(b"\n") for file in runs.glob("*/journal.jsonl"))  # noqa: E731
    monkeypatch.setattr(program, "now", lambda: 10.0 * sum(journals()))

    def call(*cells: str, seconds: int, **options: object) -> int:
        places = {"data": given / "images", "weights": given / "start.safetensors", "runs": runs}
        named = {**places, "save": tmp_path / "kept", "reserve": 1, "settle": 0, **options}
        words = [word for name, value in named.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        settings = [word for setting in TINY for word in ("--set", setting)]
        return int(program.main(["play", *cells, "--seconds", str(seconds), *words, *settings]))

    return call


def rounds(run: Path) -> int:
    return RunFiles(run).journal.read_bytes().count(b"\n")


def contents(run: Path) -> dict[str, bytes]:
    files = RunFiles(run)
    return {file.name: file.read_bytes() for file in (files.journal, files.model, files.results)}


# Playing and keeping -------------------------------------------------------------------------------------------------


def test_a_cell_that_was_stopped_in_time_ends_as_one_played_in_one_go(played, tmp_path, capsys):
    runs, kept = tmp_path / "runs", tmp_path / "kept"
    assert played(CASCADE, JOINT, seconds=31, pack="all") == 0
    assert rounds(runs / CASCADE) == 3
    assert not (runs / JOINT).exists()
    said = capsys.readouterr().out
    assert f"| {CASCADE} | stopped | 3 | 3 | 30 |" in said
    assert f"| {JOINT} | no time left | 0 | 0 | 0 |" in said
    assert said.endswith("30 s in all\n")
    assert sorted(path.name for path in kept.iterdir()) == [f"{CASCADE}.pack", f"{CASCADE}.small.tar.gz"]

    # Elsewhere, from what was kept.
    shutil.rmtree(runs / CASCADE)
    unpack(kept / f"{CASCADE}.pack", runs / CASCADE)
    assert played(CASCADE, seconds=1000, pack="unfinished") == 0
    assert "| finished | 4 |" in capsys.readouterr().out
    assert [path.name for path in kept.iterdir()] == [f"{CASCADE}.small.tar.gz"]
    moved = contents(runs / CASCADE)
    shutil.rmtree(runs / CASCADE)
    assert played(CASCADE, seconds=1000) == 0
    assert contents(runs / CASCADE) == moved
    assert played(CASCADE, seconds=1000) == 0
    assert f"| {CASCADE} | finished before | 4 | 0 | 0 |" in capsys.readouterr().out


def test_a_run_that_is_going_on_is_kept_and_goes_on_elsewhere(program, given, tmp_path):
    """What is kept while rounds are played, under the run's own lock, is enough if the machine goes then."""
    run, keeping = tmp_path / CASCADE, program.Keeping(tmp_path / "kept", 60.0, "all")

    class Keeper(Observer):
        def round_done(self, record, seconds):
            if record["round"] == 3:
                keeping.keep(run, {"cell": CASCADE})

    config = program.CELLS[CASCADE].config([f"data.root={given / 'images'}", *TINY])
    play(start(config, run), Keeper())
    there = tmp_path / "there"
    assert 1 <= unpack(tmp_path / "kept" / f"{CASCADE}.pack", there).round <= 3
    play(reopen(there))
    assert contents(there) == contents(run)
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_run_is_kept_every_so_many_seconds(program, tmp_path, wait_until):
    run, kept = tmp_path / JOINT, tmp_path / "kept"
    run.mkdir()
    with program.Keeping(kept, 0.01).kept(run, {}):
        (run / "config.toml").write_text("seed = 1\n")
        wait_until(lambda: (kept / f"{JOINT}.small.tar.gz").exists())
        (run / "journal.jsonl").write_text("{}\n")
    assert set(program.read_tar(kept / f"{JOINT}.small.tar.gz")) == {"config.toml", "cell.json", "journal.jsonl"}


def test_what_is_kept_has_no_absolute_paths(played, given, tmp_path):
    assert played(JOINT, seconds=1000, commit="abc1234") == 0
    config = RunFiles(tmp_path / "runs" / JOINT).config.read_text()
    assert str(given) in config
    found = {}
    with tarfile.open(tmp_path / "kept" / f"{JOINT}.small.tar.gz") as tar:
        for member in tar.getmembers():
            assert member.name.startswith(f"{JOINT}/")
            content = tar.extractfile(member)
            assert content is not None
            found[member.name.partition("/")[2]] = content.read().decode()
    assert set(found) == {"config.toml", "inputs.json", "setup.json", "results.json", "cell.json"} | {
        "journal.jsonl",
        "timings.jsonl",
    }
    assert all('"/' not in text and str(given) not in text for text in found.values())
    assert 'root = "images"' in found["config.toml"]
    assert 'weights = "start.safetensors"' in found["config.toml"]
    assert json.loads(found["results.json"])["starting_weights"] == "start.safetensors"
    about = json.loads(found["cell.json"])
    assert (about["cell"], about["commit"], about["settings"]) == (JOINT, "abc1234", list(TINY))


def test_with_time_nearly_over_a_run_is_stopped_at_a_best_round(program, monkeypatch):
    within = program.Within(JOINT, last=100.0, settle=50.0)
    for now, best, stops in [(40.0, True, False), (60.0, False, False), (60.0, True, True), (99.5, False, True)]:
        monkeypatch.setattr(program, "now", lambda now=now: now)
        record = {"round": 7, "best_round": 7 if best else 3}
        if stops:
            with pytest.raises(KeyboardInterrupt):
                within.round_done(record, 1.0)
        else:
            within.round_done(record, 1.0)


def test_a_run_whose_best_round_was_not_saved_is_packed_at_its_newest(program, given, tmp_path):
    config = program.CELLS[JOINT].config([f"data.root={given / 'images'}", *TINY, "rounds=5", "checkpoint.every=2"])

    class Stop(Observer):
        def round_done(self, record, seconds):
            if record["round"] > 2 and record["best_round"] % 2 and record["best_round"] != record["round"]:
                raise KeyboardInterrupt

    with pytest.raises(RunStoppedError):
        play(start(config, tmp_path / JOINT), Stop())
    program.pack_smallest(tmp_path / JOINT, tmp_path / "parts")
    assert unpack(tmp_path / "parts", tmp_path / "there").round == rounds(tmp_path / JOINT)


def test_other_settings_are_not_mixed_into_a_run(played, program, tmp_path, capsys):
    assert played(JOINT, seconds=11) == 0
    assert played(JOINT, seconds=1000, data="elsewhere") == 2
    assert "has other settings (data.root: here " in capsys.readouterr().err
    assert program.main(["play", "balanced-jfat", "--seconds", "9", "--runs", "r", "--save", "s"]) == 2
    assert "unknown cell 'balanced-jfat'. Did you mean" in capsys.readouterr().err


def test_autoattack_is_measured_when_a_run_is_finished(program, played, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(program, "evaluate_run", lambda run, attacks, samples, watch: asked.append((attacks, samples)))
    assert played(JOINT, seconds=11, autoattack=40) == 0
    assert asked == []
    assert played(JOINT, seconds=1000, autoattack=40) == 0
    assert asked == [("clean,pgd20,autoattack", 40)]


def test_an_evaluation_is_stopped_when_time_is_over(program, played, tmp_path, monkeypatch):
    assert played(JOINT, seconds=1000) == 0
    monkeypatch.setattr(program, "now", lambda: 21.0)
    late = program.Within(JOINT, 20.0)
    assert program.measure(tmp_path / "runs" / JOINT, 8, late) == "finished, AutoAttack stopped"
    with pytest.raises(RunStoppedError):
        play(reopen(_unfinished(tmp_path / "runs" / JOINT)), late)


def _unfinished(run: Path) -> Path:
    """Take a finished run's results away: its closing evaluation is played again."""
    RunFiles(run).results.unlink()
    assert not is_finished(RunFiles(run))
    return run


# Bringing and tabulating ---------------------------------------------------------------------------------------------


def small_tar(folder: Path, cell: str, clean: float, pgd: float, finished: bool = True) -> Path:
    """Write the small files of a made-up run of two rounds, 5 and 7 s long, 3600 simulated seconds each."""
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
    }
    timings = [{"round": 1, "seconds": 5.0}, {"round": 2, "seconds": 7.0}]
    evaluation = {"round": 2, "personalised": {"autoattack": {"accuracy": pgd - 0.1, "samples": 50}}, "global": {}}
    method = cell.split("-")[1]
    files = {
        "config.toml": f'method = "{method}"\nseed = {cell[-1]}\n[data]\nname = "cifar10"\nroot = "/some/data"\n',
        "journal.jsonl": "".join(f"{json.dumps(line)}\n" for line in lines),
        "timings.jsonl": "".join(f"{json.dumps(line)}\n" for line in timings),
        "cell.json": json.dumps({"cell": cell, "commit": "abc1234", "settings": ["engine=plain"]}),
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
def page(program: ModuleType, tmp_path: Path) -> Path:
    path = tmp_path / "results" / "cifar10.md"
    path.parent.mkdir()
    path.write_text(f"before\n\n{program.BEGIN}\nold\n{program.END}\n\nafter\n")
    return path


def test_finished_runs_are_brought_and_tabulated(program, page, tmp_path, capsys):
    for seed, (clean, pgd) in enumerate([(0.70, 0.50), (0.72, 0.56), (0.80, 0.53)]):
        small_tar(tmp_path / "kept", f"balanced-jfat-seed{seed}", clean, pgd)
    small_tar(tmp_path / "kept", "unbalanced-fedprophet-seed0", 0.75, 0.6)
    assert program.main(["--page", str(page), "bring", str(tmp_path / "kept")]) == 0
    brought = page.with_suffix("") / "balanced-jfat-seed1"
    assert 'root = "data"' in (brought / "config.toml").read_text()
    assert json.loads((brought / "results.json").read_text())["starting_weights"] == "start.safetensors"

    assert program.main(["--page", str(page), "table", "--write"]) == 0
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
    assert "- balanced-jfat-seed1: commit abc1234; `engine=plain`" in lines
    assert capsys.readouterr().err == ""


def test_what_is_not_finished_or_another_run_is_refused(program, page, tmp_path, capsys):
    small_tar(tmp_path / "kept", JOINT, 0.7, 0.5, finished=False)
    bring = ["--page", str(page), "bring", str(tmp_path / "kept")]
    assert program.main(bring) == 1
    assert f"{JOINT}.small.tar.gz: the run is not finished, it has 2 rounds: play it on" in capsys.readouterr().err
    assert not page.with_suffix("").exists()
    small_tar(tmp_path / "kept", JOINT, 0.7, 0.5)
    assert program.main(bring) == 0
    assert program.main(bring) == 0  # the same again
    small_tar(tmp_path / "kept", JOINT, 0.8, 0.5)
    assert program.main(bring) == 1
    assert "another run of this cell" in capsys.readouterr().err
    (tmp_path / "kept" / f"{JOINT}.small.tar.gz").write_bytes(b"cut")
    assert program.main(bring) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_the_page_in_the_repository_is_what_is_made_of_the_runs(program):
    text = program.PAGE.read_text("utf-8")
    assert program.between_marks(text, program.tables(program.read_kept(program.PAGE.with_suffix("")))) == text
    mean = "76.8 ± 1.2 / 56.0 ± 0.8 | 79.7 / 56.8"
    assert f"| jFAT | mean ± standard deviation | {mean} |" in text


def test_a_page_without_marks_is_left_alone(program, page, capsys):
    page.write_text("nothing\n")
    assert program.main(["--page", str(page), "table", "--write"]) == 2
    assert "lacks one of the lines" in capsys.readouterr().err
    assert page.read_text() == "nothing\n"


# The figure ----------------------------------------------------------------------------------------------------------


def test_the_figure_is_the_same_again(program, page, tmp_path):
    pytest.importorskip("matplotlib")
    small_tar(tmp_path / "kept", JOINT, 0.7, 0.5)
    small_tar(tmp_path / "kept", "balanced-jfat-seed1", 0.8, 0.6)
    program.main(["--page", str(page), "bring", str(tmp_path / "kept")])
    drawn = [program.figure(program.read_kept(page.with_suffix(""))) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert b"<svg" in drawn[0]
    assert b"date" not in drawn[0]


def test_labels_are_moved_apart(program):
    assert program.apart([50.0, 10.0], 4.0) == [50.0, 10.0]
    assert program.apart([11.0, 10.0], 4.0) == [12.5, 8.5]
    # 10 and 11 make 8.5 and 12.5, which 14 is too near to: all three are spread about 11.67.
    assert program.apart([10.0, 11.0, 14.0], 4.0) == pytest.approx([35 / 3 - 4, 35 / 3, 35 / 3 + 4])


def test_every_cell_has_a_configuration_and_a_line_of_the_papers(program):
    for cell in program.CELLS.values():
        config = cell.config()
        assert (config.method, config.seed) == (cell.row.method, cell.seed)
        assert bool(program.papers(cell.row)) == (not cell.name.startswith("short"))
    config = program.CELLS["balanced-fedprophet-noapa-seed0"].config()
    assert (config.seed, config.evaluate.before_gate, config.checkpoint.every) == (0, 25, 25)
