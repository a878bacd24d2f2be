"""`benchmarks/cifar10.py play` on a few random images in CIFAR-10's own files: stopped in time, kept, measured."""

import json
import re
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import cifar10
import numpy as np
import pytest
from cifar10_table import measured, playing
from cifar10_table.cells import CELLS
from cifar10_table.keeping import MOST, Keeping, bytes_in, pack_smallest, read_tar
from safetensors.torch import save_file

from fedprophet.errors import TrainingError
from fedprophet.models import build
from fedprophet.runs.files import RunFiles, is_finished
from fedprophet.runs.observer import Observer
from fedprophet.runs.pack import unpack
from fedprophet.runs.play import play
from fedprophet.runs.run import RunStoppedError, reopen, start

RECORDS = 16
CASCADE, JOINT = "balanced-fedprophet-seed0", "balanced-jfat-seed0"
LINES = "evaluation/*.jsonl"
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
def played(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return what plays cells; every round that was ever played takes 10 s of its clock."""
    runs = tmp_path / "runs"
    journals = lambda: (file.read_bytes().count(b"\n") for file in runs.glob("*/journal.jsonl"))  # noqa: E731
    monkeypatch.setattr(playing, "now", lambda: 10.0 * sum(journals()))

    def call(*cells: str, seconds: int, **options: object) -> int:
        places = {"data": given / "images", "weights": given / "start.safetensors", "runs": runs}
        named = {**places, "save": tmp_path / "kept", "reserve": 1, "settle": 0, **options}
        words = [word for name, value in named.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        settings = [word for setting in TINY for word in ("--set", setting)]
        return int(cifar10.main(["play", *cells, "--seconds", str(seconds), *words, *settings]))

    return call


def rounds(run: Path) -> int:
    return RunFiles(run).journal.read_bytes().count(b"\n")


def contents(run: Path) -> dict[str, bytes]:
    files = RunFiles(run)
    return {file.name: file.read_bytes() for file in (files.journal, files.model, files.results)}


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
    said = capsys.readouterr().out
    assert f"| {CASCADE} | finished before | 4 | 0 | 0 |" in said
    assert " s in all\n\n" in said
    reached, modules = said.rpartition(" s in all\n\n")[2].splitlines()
    assert re.fullmatch(rf"{CASCADE} \(clean / PGD-1 in %\): personalised .*; global .*; wall clock \d+ s", reached)
    assert re.fullmatch(rf"{CASCADE}, by module: 1: .*, alpha 1\.00; 2: .*, alpha \d\.\d\d", modules)


def test_a_run_that_is_going_on_is_kept_and_goes_on_elsewhere(given, tmp_path):
    """What is kept while rounds are played, under the run's own lock, is enough if the machine goes then."""
    run, keeping = tmp_path / CASCADE, Keeping(tmp_path / "kept", 60.0, "all")

    class Keeper(Observer):
        def round_done(self, record, seconds):
            if record["round"] == 3:
                keeping.keep(run, {"cell": CASCADE})

    config = CELLS[CASCADE].config([f"data.root={given / 'images'}", *TINY])
    play(start(config, run), Keeper())
    there = tmp_path / "there"
    assert 1 <= unpack(tmp_path / "kept" / f"{CASCADE}.pack", there).round <= 3
    play(reopen(there))
    assert contents(there) == contents(run)
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_what_is_kept_stays_within_its_size_and_what_was_kept_before_stays(played, tmp_path, capsys):
    """A pack that does not fit is not half there, and the call goes on without it."""
    kept = tmp_path / "kept"
    assert played(CASCADE, seconds=31, pack="all") == 0
    first = {file.name: file.read_bytes() for file in (kept / f"{CASCADE}.pack").iterdir()}
    size = bytes_in(kept)
    (kept / "other").write_bytes(bytes(1000))
    capsys.readouterr()
    assert played(CASCADE, seconds=1000, pack="all", most=size - 1000) == 0
    assert f"{CASCADE}: not packed this time: --most: the parts take" in capsys.readouterr().out
    assert {file.name: file.read_bytes() for file in (kept / f"{CASCADE}.pack").iterdir()} == first
    assert "results.json" in read_tar(kept / f"{CASCADE}.small.tar.gz")
    assert played(CASCADE, seconds=1000, pack="all") == 0
    assert unpack(kept / f"{CASCADE}.pack", tmp_path / "there").finished


def test_a_pack_in_the_making_is_not_where_things_are_kept(given, tmp_path, monkeypatch):
    """Whoever takes what is kept away at any time finds one pack, not two."""
    seen = []

    def watched(run, folder, most):
        pack_smallest(run, folder, most)
        seen.append(sorted(path.name for path in (tmp_path / "kept").iterdir()))

    monkeypatch.setattr("cifar10_table.keeping.pack_smallest", watched)
    keeping = Keeping(tmp_path / "kept", 60.0, "all")

    class Keeper(Observer):
        def round_done(self, record, seconds):
            keeping.keep(tmp_path / CASCADE, {})

    play(start(CELLS[CASCADE].config([f"data.root={given / 'images'}", *TINY]), tmp_path / CASCADE), Keeper())
    small, pack = f"{CASCADE}.small.tar.gz", f"{CASCADE}.pack"
    assert seen[:2] == [[small], [pack, small]]
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_run_is_kept_every_so_many_seconds(tmp_path, wait_until):
    run, kept = tmp_path / JOINT, tmp_path / "kept"
    run.mkdir()
    with Keeping(kept, 0.01).kept(run, {}):
        (run / "config.toml").write_text("seed = 1\n")
        wait_until(lambda: (kept / f"{JOINT}.small.tar.gz").exists())
        (run / "journal.jsonl").write_text("{}\n")
    assert set(read_tar(kept / f"{JOINT}.small.tar.gz")) == {"config.toml", "cell.json", "journal.jsonl"}


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


def test_with_time_nearly_over_a_run_is_stopped_at_a_best_round(monkeypatch):
    within = playing.Within(JOINT, last=100.0, settle=50.0)
    for now, best, stops in [(40.0, True, False), (60.0, False, False), (60.0, True, True), (99.5, False, True)]:
        monkeypatch.setattr(playing, "now", lambda now=now: now)
        record = {"round": 7, "best_round": 7 if best else 3}
        if stops:
            with pytest.raises(KeyboardInterrupt):
                within.round_done(record, 1.0)
        else:
            within.round_done(record, 1.0)


def test_a_run_whose_best_round_was_not_saved_is_packed_at_its_newest(given, tmp_path):
    config = CELLS[JOINT].config([f"data.root={given / 'images'}", *TINY, "rounds=5", "checkpoint.every=2"])

    class Stop(Observer):
        def round_done(self, record, seconds):
            if record["round"] > 2 and record["best_round"] % 2 and record["best_round"] != record["round"]:
                raise KeyboardInterrupt

    with pytest.raises(RunStoppedError):
        play(start(config, tmp_path / JOINT), Stop())
    pack_smallest(tmp_path / JOINT, tmp_path / "parts", MOST)
    assert unpack(tmp_path / "parts", tmp_path / "there").round == rounds(tmp_path / JOINT)


def test_other_settings_are_not_mixed_into_a_run(played, tmp_path, capsys):
    assert played(JOINT, seconds=11) == 0
    assert played(JOINT, seconds=1000, data="elsewhere") == 2
    assert "has other settings (data.root: here " in capsys.readouterr().err
    assert cifar10.main(["play", "balanced-jfat", "--seconds", "9", "--runs", "r", "--save", "s"]) == 2
    assert "unknown cell 'balanced-jfat'. Did you mean" in capsys.readouterr().err


def test_what_is_wrong_with_a_later_cell_is_said_before_the_first_one_begins(played, tmp_path, capsys):
    other = JOINT.replace("seed0", "seed1")
    assert played(other, seconds=11) == 0
    assert played(JOINT, other, seconds=1000, data="elsewhere") == 2
    assert f"{other} has other settings (data.root: here " in capsys.readouterr().err
    assert not (tmp_path / "runs" / JOINT).exists()


@pytest.mark.parametrize("fault", [TrainingError("it has\ndiverged"), RuntimeError("it has\ndiverged")])
@pytest.mark.parametrize("where", ["play_cell", "measure"])
def test_a_cell_that_fails_leaves_the_others_their_time(played, monkeypatch, capsys, fault, where):
    other = JOINT.replace("seed0", "seed1")
    whole = getattr(playing, where)

    def sometimes(path, *words):
        if path.name == JOINT:
            raise fault
        return whole(path, *words)

    monkeypatch.setattr(playing, where, sometimes)
    monkeypatch.setattr(playing, "evaluate_run", lambda *words, of: None)
    assert played(JOINT, other, seconds=1000, autoattack=8, batch_seconds=0) == 1
    said = capsys.readouterr().out
    assert f"| {JOINT} | failed: it has diverged | {0 if where == 'play_cell' else 2} |" in said
    assert f"| {other} | finished, AutoAttack measured | 2 | 2 |" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["play", JOINT, "--seconds", "-5", "--runs", "r", "--save", "s"], "--seconds -5: give a number above 0"),
        (["bring", "nowhere"], "nowhere has no run to bring"),
        (["--page", "nopage.md", "table"], "there is no page nopage.md"),
    ],
)
def test_what_can_lead_to_nothing_is_refused(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cifar10.main(words) == 2
    assert said in capsys.readouterr().err


def test_autoattack_is_measured_when_a_run_is_finished(played, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(playing, "evaluate_run", lambda *words, of: asked.append((*words[1:4], of)))
    assert played(JOINT, seconds=11, autoattack=40) == 0
    assert asked == []
    assert played(JOINT, seconds=1000, autoattack=40) == 0
    assert asked == [(("clean", "pgd20", "autoattack"), 40, False, "personalised")]


def test_while_autoattack_is_put_off_the_next_cells_are_played(played, tmp_path, monkeypatch, capsys):
    """21 of 41 s are left when the first run is finished: a batch of rows takes 30, and the second run 20."""

    def evaluate(run, attacks, samples, masking_check, watch, of):
        asked.append(run.files.path.name)
        try:
            watch("autoattack, clients", 0, 4)
        except KeyboardInterrupt:
            raise RunStoppedError("stopped") from None
        write_evaluation(run.files.path, attacks, samples)

    asked = []
    monkeypatch.setattr(playing, "evaluate_run", evaluate)
    other = JOINT.replace("seed0", "seed1")
    assert played(JOINT, other, seconds=42, autoattack=40, batch_seconds=30) == 0
    said = capsys.readouterr().out
    assert f"| {JOINT} | finished, AutoAttack put off | 2 | 2 |" in said
    assert f"| {other} | finished, AutoAttack put off | 2 | 2 |" in said
    assert played(JOINT, seconds=42, autoattack=40, batch_seconds=30) == 0
    assert f"| {JOINT} | finished, AutoAttack measured | 2 | 0 |" in capsys.readouterr().out
    assert played(JOINT, seconds=42, autoattack=40, batch_seconds=30) == 0
    assert f"| {JOINT} | finished, AutoAttack measured before | 2 | 0 |" in capsys.readouterr().out
    assert asked == [JOINT]


def test_autoattack_is_not_begun_without_time_for_a_batch_of_rows(monkeypatch):
    """100 clients of 50 samples each are batches of 40, 40 and 20 clients, whose answers come together."""
    measuring = playing.Measuring(5000, last=100.0, batch_seconds=30.0)
    told = [
        ("pgd20, clients", 7, 99.0, False),
        ("pgd20, clients", 7, 101.0, True),
        ("autoattack, clients", 0, 69.0, False),
        ("autoattack, clients", 0, 71.0, True),
        ("autoattack, clients", 1, 101.0, False),
        ("autoattack, clients", 39, 101.9, False),
        ("autoattack, clients", 40, 71.0, True),
        ("autoattack, clients", 81, 101.0, False),
        ("autoattack, clients", 100, 101.9, False),
    ]
    for what, done, now, stops in told:
        monkeypatch.setattr(playing, "now", lambda now=now: now)
        if stops:
            with pytest.raises(KeyboardInterrupt):
                measuring.watch(what, done, 100)
        else:
            measuring.watch(what, done, 100)


def test_autoattack_client_by_client_is_stopped_when_time_is_over(monkeypatch):
    """A batch is of 40 clients. Where the second of them has to be waited for, they are attacked one by one."""
    measuring = playing.Measuring(5000, last=100.0, batch_seconds=30.0)
    for done, now in [(0, 60.0), (1, 80.0), (2, 99.0), (3, 99.5)]:
        monkeypatch.setattr(playing, "now", lambda now=now: now)
        measuring.watch("autoattack, clients", done, 100)
    monkeypatch.setattr(playing, "now", lambda: 118.0)
    with pytest.raises(KeyboardInterrupt):
        measuring.watch("autoattack, clients", 4, 100)
    assert not measuring.put_off


def test_a_run_that_finished_earlier_is_measured_and_a_stopped_measurement_goes_on(
    played, tmp_path, monkeypatch, capsys
):
    run, kept = tmp_path / "runs" / JOINT, tmp_path / "kept"
    assert played(JOINT, seconds=1000, pack="all") == 0
    played_rounds = contents(run)
    lines = lambda: [json.loads(line)["task"] for file in run.glob(LINES) for line in file.read_text().split()]  # noqa: E731
    monkeypatch.setattr(measured, "ATTACKS", ("clean", "pgd2"))  # AutoAttack itself takes long
    monkeypatch.setattr(playing, "now", lambda: len(lines()))
    assert played(JOINT, seconds=4, autoattack=8, batch_seconds=0, pack="unfinished") == 0
    assert f"| {JOINT} | finished, AutoAttack stopped | 2 | 0 |" in capsys.readouterr().out
    first = lines()
    assert len(first) == 4  # a task is a second, and one of them is the reserve
    assert not (run / "evaluation.json").exists()
    assert (kept / f"{JOINT}.pack").exists(), "it is not over yet"

    # Elsewhere: the pack has the run, and the small files what was measured of it.
    shutil.rmtree(run)
    unpack(kept / f"{JOINT}.pack", run)
    assert played(JOINT, seconds=1000, autoattack=8) == 0
    assert f"| {JOINT} | finished, AutoAttack measured | 2 | 0 |" in capsys.readouterr().out
    assert lines()[:4] == first
    assert len(set(lines())) == len(lines()) > 4
    assert contents(run) == played_rounds

    # What was measured stays with the run, even if a call without --autoattack comes in between.
    before = (run / "evaluation.json").read_bytes()
    shutil.rmtree(run)
    unpack(kept / f"{JOINT}.pack", run)
    assert played(JOINT, seconds=1000) == 0
    own = json.loads((run / "evaluation.json").read_bytes())["personalised"]
    assert own == json.loads(before)["personalised"]
    assert list(own) == ["clean", "pgd2"]
    assert played(JOINT, seconds=1000, autoattack=8, pack="unfinished") == 0
    assert not (kept / f"{JOINT}.pack").exists()
    assert {"evaluation.json", *(f"evaluation/{file.name}" for file in run.glob(LINES))} <= set(
        read_tar(kept / f"{JOINT}.small.tar.gz")
    )


def write_evaluation(run: Path, attacks: Sequence[str], samples: int, round: int = 2, of: str = "personalised") -> None:
    """Write what `fedprophet evaluate` does."""
    cells = {attack: {"accuracy": 0.5, "samples": samples} for attack in attacks}
    settings = {attack: {"samples": samples} for attack in attacks}
    found = {"round": round, "personalised": {}, "global": {}, "settings": settings, of: cells}
    (run / "evaluation.json").write_text(json.dumps(found))


def test_a_run_is_over_when_everything_was_measured_that_was_asked_for(played, tmp_path):
    """Its pack is what the measurement goes on with elsewhere: it goes when there is nothing left to measure."""
    assert played(JOINT, seconds=1000) == 0
    run, pack = tmp_path / "runs" / JOINT, tmp_path / "kept" / f"{JOINT}.pack"
    with_suite = ("clean", "pgd20", "autoattack")
    write_evaluation(run, with_suite, 8)
    whole = (run / "evaluation.json").read_text()

    def is_over(text: str) -> bool:
        (run / "evaluation.json").write_text(text)
        assert measured.is_measured(run, 8) is not pack_stays()
        return measured.is_measured(run, 8)

    def pack_stays() -> bool:
        Keeping(tmp_path / "kept", 60.0, "unfinished", 8).keep(run, {})
        return pack.exists()

    unlike: list[dict[str, object]] = [
        {"attacks": ("clean", "pgd20")},
        {"attacks": ("autoattack",)},
        {"samples": 7},
        {"round": 1},
        {"of": "global"},
    ]
    for other in unlike:
        write_evaluation(run, **{"attacks": with_suite, "samples": 8, **other})  # type: ignore[arg-type]
        assert not is_over((run / "evaluation.json").read_text()), other
    assert not any(is_over(text) for text in ("", "{}", "[]", whole[:-5]))
    assert is_over(whole)


def test_what_was_measured_of_another_run_is_not_given_back(tmp_path):
    keeping = Keeping(tmp_path / "kept", 60.0)
    for name, journal in [("one", "{}\n"), ("two", "{}\n{}\n")]:
        run = tmp_path / name / JOINT
        run.mkdir(parents=True)
        files = RunFiles(run)
        texts = {files.config: "seed = 1\n", files.journal: journal, files.results: "{}", files.model: ""}
        for file, text in texts.items():
            file.write_text(text)
    (tmp_path / "one" / JOINT / "evaluation.json").write_text("{}")
    keeping.keep(tmp_path / "one" / JOINT, {})
    keeping.give_back(tmp_path / "two" / JOINT)
    assert not (tmp_path / "two" / JOINT / "evaluation.json").exists()
    (tmp_path / "one" / JOINT / "evaluation.json").unlink()
    keeping.give_back(tmp_path / "one" / JOINT)
    assert (tmp_path / "one" / JOINT / "evaluation.json").read_text() == "{}"


def test_an_evaluation_is_stopped_when_time_is_over(played, tmp_path, monkeypatch):
    assert played(JOINT, seconds=1000) == 0
    monkeypatch.setattr(playing, "now", lambda: 21.0)
    late = playing.Measuring(8, 20.0, -5.0)
    assert playing.measure(tmp_path / "runs" / JOINT, late) == "finished, AutoAttack stopped"
    with pytest.raises(RunStoppedError):
        play(reopen(_unfinished(tmp_path / "runs" / JOINT)), playing.Within(JOINT, 20.0))


def _unfinished(run: Path) -> Path:
    """Take a finished run's results away: its closing evaluation is played again."""
    RunFiles(run).results.unlink()
    assert not is_finished(RunFiles(run))
    return run
