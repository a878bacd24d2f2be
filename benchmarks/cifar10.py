"""The cells of the paper's CIFAR-10 table: played in bounded time, kept, and made into a table and a figure.

    python benchmarks/cifar10.py cells                                   # their names, and which are kept already
    python benchmarks/cifar10.py play balanced-fedprophet-seed0 balanced-heterofl-seed0 --seconds 540 \
        --data data --weights FILE --runs runs --save kept --pack        # again, until all are finished
    python benchmarks/cifar10.py bring kept                              # finished runs, into results/cifar10/
    python benchmarks/cifar10.py table --write                           # the tables in results/cifar10.md
    python benchmarks/cifar10.py figure                                  # results/cifar10.svg

A cell that is there is resumed, a finished one is skipped, and when the seconds are nearly over a run is stopped at a
round's end, with its checkpoint. What is needed elsewhere lies in --save at all times: each run's small files, and with
--pack what `fedprophet runs unpack` makes the run of again. On another machine give --data and --weights the same
values: they are part of a run's configuration.
"""

import argparse
import gzip
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import fedprophet
from fedprophet.cli.stopping import stopped_once
from fedprophet.config.compare import differences
from fedprophet.config.config import Config, machine_keys
from fedprophet.config.load import load_config
from fedprophet.display.numbers import counted
from fedprophet.errors import CheckpointError, ConfigError, FedProphetError, TrainingError, unknown
from fedprophet.methods import METHODS
from fedprophet.report.compare import Statistic
from fedprophet.report.figures import INK, PALE, check_plots
from fedprophet.report.runs import EVALUATION, ReadFolder, read_folder
from fedprophet.reproduce.paper import numbers_of
from fedprophet.runs.evaluation import evaluate_run
from fedprophet.runs.files import RunFiles, is_finished
from fedprophet.runs.journal import Journal
from fedprophet.runs.observer import Observer
from fedprophet.runs.pack import pack
from fedprophet.runs.run import RunStoppedError, open_to_read
from fedprophet.server.coordinator import Record
from fedprophet.storage.files import parse_json, write_atomic, write_atomic_all

if TYPE_CHECKING:  # Matplotlib is an extra and slow to import: it is loaded only to draw.
    from matplotlib.axes import Axes

now = time.monotonic
PAGE = Path(__file__).parent / "results" / "cifar10.md"
PART = 15 * 2**20
"""The most bytes of a part of a packed run."""
KEPT_BACK = 20.0
"""Seconds at the end for the checkpoint, the small files and the pack."""
SHOWN_EVERY = 25
SMALL, CELL = ".small.tar.gz", "cell.json"
BEGIN = "<!-- Made by `python benchmarks/cifar10.py table --write`: change that program instead. -->"
END = "<!-- End of what is made. -->"


# The cells -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A run: one seed of a row. Its name is that of its folder."""

    name: str
    row: "Row"
    seed: int

    def config(self, extra: Sequence[str] = ()) -> Config:
        """Return its configuration, with some more settings."""
        settings = [f"method={self.row.method}", f"seed={self.seed}", *self.row.settings]
        return load_config(self.row.preset, [*settings, *extra])


@dataclass(frozen=True)
class Row:
    """A row of a table: what is run with which seeds, and where the paper has its numbers (experiment, part, row)."""

    name: str
    title: str
    preset: str
    method: str
    settings: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    paper: tuple[str, str, str] | None = None

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(Cell(f"{self.name}-seed{seed}", self, seed) for seed in self.seeds)


ORDER = ("jfat", "fedprophet", "feddf", "fedet", "heterofl", "feddrop", "fedrolex", "fedrbn")
SEEDS = {"jfat": (0, 1, 2), "fedprophet": (0, 1, 2)}
SAVED_OFTEN = "checkpoint.every=25"
SPARING = (SAVED_OFTEN, "evaluate.before_gate=25")
"""Of a cascade, evaluations that nothing depends on are spared: the model is the same, bit for bit."""
NO_APA, NO_DMA = "perturbation.enabled=false", "assignment.enabled=false"


def _all_methods(fleet: str) -> Iterator[Row]:
    for method in ORDER:
        entry = METHODS[method]
        yield Row(
            f"{fleet}-{method}",
            entry.paper.removesuffix("-AT"),
            f"cifar10-{fleet}",
            method,
            SPARING if entry.cascade else (SAVED_OFTEN,),
            SEEDS.get(method, (0,)),
            ("table2", f"CIFAR-10 {fleet}", entry.paper),
        )


def _ablation(name: str, title: str, *changes: str) -> Row:
    where = ("table3", "CIFAR-10 balanced", title)
    return Row(
        f"balanced-fedprophet-{name}", title, "cifar10-balanced", "fedprophet", (*SPARING, *changes), paper=where
    )


GROUPS: Mapping[str, tuple[Row, ...]] = {
    "Every device equally likely": (
        *_all_methods("balanced"),
        Row(
            "best-fedprophet",
            "FedProphet, rules of our own",
            "cifar10-balanced-best",
            "fedprophet",
            (SAVED_OFTEN,),
            SEEDS["fedprophet"],
            ("table2", "CIFAR-10 balanced", "FedProphet"),
        ),
    ),
    "Mostly weak devices": tuple(_all_methods("unbalanced")),
    "FedProphet without APA or DMA, every device equally likely": (
        _ablation("noapa", "no APA", NO_APA),
        _ablation("nodma", "no DMA", NO_DMA),
        _ablation("noapa-nodma", "neither", NO_APA, NO_DMA),
    ),
    "One model for everyone, at most 200 rounds (a stage)": tuple(
        Row(
            f"short-global-{method}",
            METHODS[method].paper,
            "cifar10-balanced-global",
            method,
            (SAVED_OFTEN, "rounds=200", "perturbation.every=20"),
        )
        for method in ("jfat", "fedprophet")
    ),
}
"""The tables of the page, and the runs behind them; rows without numbers of the paper are in the figure alone."""
CELLS: Mapping[str, Cell] = {cell.name: cell for rows in GROUPS.values() for row in rows for cell in row.cells}


# Keeping what a run has so far ---------------------------------------------------------------------------------------

PATHS = re.compile(rb'("?\b(?:root|cache|weights|starting_weights)"?\s*[=:]\s*)"[^"\n]*/([^"/\n]*)/*"')


def shortened(content: bytes) -> bytes:
    """Return a configuration or a JSON file with the names of files and folders instead of their paths."""
    return PATHS.sub(rb'\1"\2"', content)


def small_files(run: Path) -> dict[str, bytes]:
    """Return what belongs into the repository of a run, and what an evaluation goes on with, without paths."""
    files = RunFiles(run)
    lines = sorted((run / "evaluation").glob("*.jsonl"))
    plain = [file for file in (files.journal, files.timings, *lines) if file.is_file()]
    told = (files.config, files.inputs, files.setup, files.results, run / EVALUATION)
    return {
        **{file.relative_to(run).as_posix(): file.read_bytes() for file in plain},
        **{file.name: shortened(file.read_bytes()) for file in told if file.is_file()},
    }


def tar_of(folder: str, files: Mapping[str, bytes]) -> bytes:
    """Return files in a folder as a compressed tar; the same files give the same bytes."""
    data = io.BytesIO()
    with gzip.GzipFile(fileobj=data, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return data.getvalue()


def copy_of(run: Path, target: Path) -> Path:
    """Copy a run that may be going on, so that its newest checkpoints are whole in the copy.

    Checkpoints come first: clients' layers and the journal of later rounds do them no harm. Files of tensors are never
    changed, only replaced, so that a link to one is as good as a copy.
    """

    def copied(source: str, destination: str) -> None:
        try:
            (os.link if source.endswith(".safetensors") else shutil.copyfile)(source, destination)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links
            shutil.copyfile(source, destination)

    passing = shutil.ignore_patterns("*.tmp", "*.old", ".*")
    for name in ("checkpoints", "clients"):
        if (run / name).is_dir():
            shutil.copytree(run / name, target / name, ignore=passing, copy_function=copied)
    target.mkdir(exist_ok=True, parents=True)
    for file in run.iterdir():
        if file.is_file() and not file.name.startswith("."):
            copied(str(file), str(target / file.name))
    return target


def pack_smallest(run: Path, folder: Path) -> None:
    """Pack a run at its best round, where it is smallest; where that was not saved, at its newest checkpoint."""
    try:
        pack(run, folder, PART, round="best")
    except CheckpointError:  # a run is saved every so many rounds, and its best may be between two of them
        pack(run, folder, PART)


def put_in_place(new: Path, folder: Path) -> None:
    """Give a folder its name; the one that had it is aside until then, and removed afterwards."""
    aside = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    new.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


@dataclass
class Keeping:
    """Lays what runs have so far into a folder; `packs` says of which runs more than small files: all, unfinished."""

    folder: Path
    every: float
    packs: str = ""
    _packed: dict[str, object] = field(default_factory=dict)

    @contextmanager
    def kept(self, run: Path, about: Mapping[str, Any]) -> Iterator[None]:
        """Keep a run every so many seconds while the block goes on, and when it is over, however it ends."""
        over = Event()
        thread = Thread(target=self._repeat, args=(run, about, over), name="keeping", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.keep(run, about)

    def _repeat(self, run: Path, about: Mapping[str, Any], over: Event) -> None:
        while not over.wait(self.every):
            try:
                self.keep(run, about)
            except (FedProphetError, OSError) as error:  # what was kept before is still there, and the run goes on
                print(f"{run.name}: not kept this time: {error}", flush=True)

    def keep(self, run: Path, about: Mapping[str, Any]) -> None:
        """Replace what is kept of a run by what it is now."""
        if not RunFiles(run).config.exists():
            return
        files = {**small_files(run), CELL: json.dumps(about, indent=2).encode() + b"\n"}
        write_atomic(self.folder / f"{run.name}{SMALL}", tar_of(run.name, files))
        if self.packs:
            self._pack(run)

    def _pack(self, run: Path) -> None:
        folder, finished = self.folder / f"{run.name}.pack", is_finished(RunFiles(run))
        if finished and self.packs == "unfinished":
            shutil.rmtree(folder, ignore_errors=True)
            return
        state = (finished, sorted(path.name for path in (run / "checkpoints").glob("round-*") if not path.suffix))
        if not state[1] or self._packed.get(run.name) == state:
            return
        new = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=run.parent) as scratch:
            pack_smallest(copy_of(run, Path(scratch) / run.name), new)
        put_in_place(new, folder)
        self._packed[run.name] = state


# Playing within a time -----------------------------------------------------------------------------------------------


class Within(Observer):
    """Stops a run at the end of the last round for which there is time, as Ctrl-C does; shows how it goes.

    From `settle` on it stops at a new best round, too: a run that is saved there has one model, and is packed in half
    the space. A round that takes much longer than those before it, and the closing evaluation, are stopped when time is
    over, at the next client's answer: the round is played again.
    """

    def __init__(self, cell: str, last: float, settle: float = math.inf) -> None:
        self._cell, self._last, self._settle = cell, last, settle
        self._recent: list[float] = []

    def started(self, session: object, path: Path, round: int) -> None:
        print(f"{self._cell}: {f'goes on after round {round}' if round else 'begins'}", flush=True)

    def note(self, text: str) -> None:
        print(f"{self._cell}: {text}", flush=True)

    def task_done(self, kind: str, done: int, total: int) -> None:
        if now() > self._last:
            raise KeyboardInterrupt

    def round_done(self, record: Record, seconds: float) -> None:
        if record["round"] % SHOWN_EVERY == 0 or "fixed" in record:
            module = f" (module {record['module']})" if "module" in record else ""
            print(f"{self._cell}: round {record['round']}{module}{reached(record)}, {seconds:.2f} s", flush=True)
        self._recent = [*self._recent[-9:], seconds]
        settled = now() > self._settle and record.get("best_round") == record["round"]
        if settled or now() + max(self._recent) > self._last:
            raise KeyboardInterrupt

    def watch(self, what: str, done: int, total: int | None) -> None:
        """Stop an evaluation when time is over."""
        self.task_done(what, done, total or 0)


def reached(record: Record) -> str:
    """Return a round's accuracies as text; nothing where none was measured."""
    if not record.get("samples"):
        return ""
    return f": clean {100 * record['clean']:.1f} %, PGD {100 * record['adversarial']:.1f} %"


@dataclass(frozen=True)
class Outcome:
    """What became of a cell."""

    cell: str
    state: str
    rounds: int = 0
    played: int = 0
    seconds: float = 0.0


def play_cell(path: Path, config: Config, within: Within) -> str:
    """Start a run or go on with it; return what became of it."""
    files = RunFiles(path)
    if is_finished(files):
        return "finished before"
    try:
        if not files.config.exists():
            fedprophet.train(config, out=path, observer=within)
        else:
            expect_same(config, path)
            fedprophet.resume(path, observer=within)
    except RunStoppedError:
        return "stopped"
    except TrainingError as error:
        return f"failed: {error}"
    return "finished"


def expect_same(config: Config, run: Path) -> None:
    """Refuse to go on with a run of other settings."""
    differs = differences(config, load_config(RunFiles(run).config), machine_keys())
    if differs:
        raise ConfigError(f"{run} has other settings ({'; '.join(differs)}). Give the same ones, or move it away")


def measure(path: Path, samples: int, within: Within) -> str:
    """Measure a finished run with AutoAttack, too; return how far that came."""
    run = open_to_read(path)
    with closing(run.session):
        try:
            evaluate_run(run, "clean,pgd20,autoattack", samples, watch=within.watch)
        except RunStoppedError:
            return "finished, AutoAttack stopped"
    return "finished, AutoAttack measured"


def play_cells(arguments: argparse.Namespace) -> list[Outcome]:
    """Play cells one after the other until all are finished or time is over."""
    last = now() + arguments.seconds - arguments.reserve
    settle = last - arguments.settle if arguments.pack and arguments.settle else math.inf
    keeping = Keeping(arguments.save, arguments.save_every, arguments.pack)
    given = {"data.root": arguments.data, "model.weights": arguments.weights}
    extra = [*(f"{key}={value}" for key, value in given.items() if value), *arguments.set]
    outcomes: list[Outcome] = []
    for cell in [known(name) for name in arguments.cells]:
        path, config, began = arguments.runs / cell.name, cell.config(extra), now()
        if began > last or any(outcome.state.endswith("stopped") for outcome in outcomes):
            outcomes.append(Outcome(cell.name, "no time left", rounds_of(path)))
            continue
        own = [re.sub("=/.*/", "=", setting) for setting in arguments.set]  # a file's name instead of its path
        about = {"cell": cell.name, "preset": cell.row.preset, "settings": own, "commit": arguments.commit}
        before, within = rounds_of(path), Within(cell.name, last, settle)
        with keeping.kept(path, about):
            state = play_cell(path, config, within)
            if state.startswith("finished") and arguments.autoattack and now() < last:
                state = measure(path, arguments.autoattack, within)
        rounds = rounds_of(path)
        outcomes.append(Outcome(cell.name, state, rounds, rounds - before, now() - began))
    return outcomes


def rounds_of(run: Path) -> int:
    """Return how many rounds of a run are played and saved or finished."""
    lines = Journal(RunFiles(run).journal).read()
    return len(lines)


def known(name: str) -> Cell:
    """Return a cell by its name."""
    if name not in CELLS:
        raise ConfigError(unknown("cell", name, CELLS))
    return CELLS[name]


def outcome_table(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Return what was played as a Markdown table, and the wall-clock seconds of the whole."""
    lines = ["| cell | state | rounds | played now | seconds |", "| --- | --- | --- | --- | --- |"]
    for outcome in outcomes:
        numbers = f"{outcome.rounds:,} | {outcome.played:,} | {outcome.seconds:,.0f}"
        lines.append(f"| {outcome.cell} | {outcome.state} | {numbers} |")
    return "\n".join([*lines, "", f"{seconds:,.0f} s in all"])


# Into the repository -------------------------------------------------------------------------------------------------


def bring(file: Path, results: Path) -> str:
    """Take a finished run's small files into the folder of the results; return what was done, as a sentence."""
    files = read_tar(file)
    cell = known(file.name.removesuffix(SMALL))
    if RunFiles(Path()).results.name not in files:
        rounds = files.get("journal.jsonl", b"").count(b"\n")
        raise CheckpointError(f"{file.name}: the run is not finished, it has {counted(rounds, 'round')}: play it on")
    target = results / cell.name
    journal = RunFiles(target).journal
    if journal.exists() and journal.read_bytes() != files["journal.jsonl"]:
        raise CheckpointError(f"{file.name}: another run of this cell is in {target}. Move it away first")
    write_atomic_all((target / name, content) for name, content in files.items())
    read_folder(target)
    return f"{cell.name}: {counted(len(files), 'file')} in {target}"


def read_tar(file: Path) -> dict[str, bytes]:
    """Return the files of a run's own folder in a tar, without paths; what lies deeper is left out."""
    found = {}
    try:
        with tarfile.open(file, "r:gz") as tar:
            for member in tar.getmembers():
                path, content = PurePosixPath(member.name), tar.extractfile(member)
                if content is not None and len(path.parts) == 2 and path.suffix in (".json", ".jsonl", ".toml"):
                    data = content.read()
                    found[path.name] = data if path.suffix == ".jsonl" else shortened(data)
    except (OSError, EOFError, tarfile.TarError) as error:
        raise CheckpointError(f"{file.name} cannot be read: {error}") from None
    return found


def bring_all(folder: Path, results: Path) -> int:
    """Bring every run of a folder; say which are refused, and return how many."""
    refused = 0
    for file in sorted(folder.glob(f"*{SMALL}")):
        try:
            print(bring(file, results))
        except FedProphetError as error:
            print(error, file=sys.stderr)
            refused += 1
    return refused


# The table -----------------------------------------------------------------------------------------------------------

Kept = Mapping[str, ReadFolder]
"""The finished runs by the name of their cell."""


def read_kept(results: Path) -> dict[str, ReadFolder]:
    """Return the finished runs that are kept."""
    folders = {name: results / name for name in CELLS if RunFiles(results / name).results.is_file()}
    return {name: read_folder(folder) for name, folder in folders.items()}


def spread(values: Sequence[float]) -> str:
    """Return `76.8 ± 1.2`, the mean and the sample standard deviation; of a single value that one."""
    found = Statistic.of(values)
    if found is None:
        return ""
    return f"{found.mean:.1f}" + ("" if found.deviation is None else f" ± {found.deviation:.1f}")


def spreads(runs: Iterable[ReadFolder], numbers: Callable[[ReadFolder], Sequence[float] | None]) -> str:
    """Return the spread of each of some numbers over runs, with strokes between; of those that have the numbers."""
    found = [values for run in runs if (values := numbers(run)) is not None]
    return " / ".join(spread(values) for values in zip(*found, strict=True))


def accuracies(kind: Any, *attacks: str) -> Callable[[ReadFolder], Sequence[float] | None]:
    """Return what gives a run's accuracies of a kind, in %; None where one was not measured."""

    def of(run: ReadFolder) -> Sequence[float] | None:
        cells = run.summary.accuracies.get(kind, {})
        return [100 * cells[attack].accuracy for attack in attacks] if cells.keys() >= set(attacks) else None

    return of


def last_round(run: ReadFolder) -> Sequence[float] | None:
    """Return a run's last accuracies in %."""
    last = run.summary.last
    return None if last is None else (100 * last.clean, 100 * last.adversarial)


def best_round(run: ReadFolder) -> Sequence[float] | None:
    """Return a cascade's accuracies in its best round of all stages, in %; a baseline's are those of its model."""
    best = run.summary.best
    cascade = METHODS[run.summary.config.method].cascade
    return None if best is None or not cascade else (100 * best.clean, 100 * best.adversarial)


def which_round(runs: Sequence[ReadFolder]) -> str:
    """Return which round was the best, of how many, and a cascade's accuracies in it; of several runs these alone."""
    reached = spreads(runs, best_round)
    best = runs[0].summary.best
    if len(runs) > 1 or best is None:
        return reached
    return f"{best.round:,} of {runs[0].summary.rounds:,}" + (f": {reached}" if reached else "")


def autoattack(runs: Sequence[ReadFolder]) -> str:
    """Return the personalised accuracy under AutoAttack, and on how many samples of each run it was measured."""
    text = spreads(runs, accuracies("personalised", "autoattack"))
    found = [run.summary.accuracies.get("personalised", {}).get("autoattack") for run in runs]
    samples = sorted({f"{cell.samples:,}" for cell in found if cell})
    return f"{text} ({', '.join(samples)} samples)" if text else ""


def hours(runs: Sequence[ReadFolder]) -> str:
    """Return the simulated time."""
    text = spreads(runs, lambda run: [run.summary.time.total / 3600] if run.summary.time else None)
    return f"{text} h" if text else ""


def wall_clock(runs: Sequence[ReadFolder]) -> str:
    """Return what one run took on the clock."""
    seconds = runs[0].seconds
    return f"{seconds:,.0f} s" if len(runs) == 1 and seconds is not None else ""


PAPER_COLUMN = "the paper"
COLUMNS: Mapping[str, Callable[[Sequence[ReadFolder]], str]] = {
    "personalised clean / PGD-20": lambda runs: spreads(runs, accuracies("personalised", "clean", "pgd20")),
    PAPER_COLUMN: lambda runs: "",
    "personalised AutoAttack": autoattack,
    f"{PAPER_COLUMN}'s": lambda runs: "",
    "global clean / PGD-20": lambda runs: spreads(runs, accuracies("global", "clean", "pgd20")),
    "best round": which_round,
    "last round, personalised": lambda runs: spreads(runs, last_round),
    "simulated time": hours,
    "wall clock": wall_clock,
}
PAPER_CELLS: Mapping[str, tuple[str, ...]] = {PAPER_COLUMN: ("clean", "PGD"), f"{PAPER_COLUMN}'s": ("AA",)}


def papers(row: Row) -> dict[str, str]:
    """Return the paper's cells of a row."""
    if row.paper is None:
        return {}
    experiment, part, line = row.paper
    numbers = numbers_of(experiment, part)[line]
    return {
        column: " / ".join(f"{numbers[name].value:.1f}" for name in names)
        for column, names in PAPER_CELLS.items()
        if all(name in numbers for name in names)
    }


def row_lines(row: Row, kept: Kept) -> Iterator[str]:
    """Yield a line for each seed that was run, and that of their mean; the paper's numbers are in the last of them."""
    runs = {str(cell.seed): [kept[cell.name]] for cell in row.cells if cell.name in kept}
    if len(runs) > 1:
        runs["mean ± standard deviation"] = [run for (run,) in list(runs.values())]
    runs = runs or {", ".join(map(str, row.seeds)): []}
    for place, (seed, found) in enumerate(runs.items(), start=1):
        ours = {column: make(found) if found else "" for column, make in COLUMNS.items()}
        cells = [row.title, seed, *(ours | (papers(row) if place == len(runs) else {})).values()]
        yield re.sub(" +", " ", f"| {' | '.join(cells)} |")


def tables(kept: Kept) -> str:
    """Return all tables, each under a heading, and what the runs were played with."""
    heading = f"| method | seed | {' | '.join(COLUMNS)} |\n|{' --- |' * (len(COLUMNS) + 2)}"
    parts = []
    for title, rows in GROUPS.items():
        lines = [line for row in rows if row.paper for line in row_lines(row, kept)]
        if lines:
            parts.append("\n".join([f"### {title}\n", heading, *lines]))
    played = [line for name, run in kept.items() for line in played_with(name, run)]
    return "\n\n".join([*parts, *(["Played with:\n\n" + "\n".join(played)] if played else [])])


def played_with(name: str, run: ReadFolder) -> Iterator[str]:
    """Yield a line on the machines of a run, its commit and its settings of its own; runs of old did not record it."""
    facts = [
        ", ".join(str(part) for part in (machine.get("gpu") or machine.get("processor"), f"torch {machine['torch']}"))
        for machine in run.setup.machines
        if "torch" in machine
    ]
    with suppress(FileNotFoundError):
        about = parse_json((run.summary.path / CELL).read_bytes())
        facts += [f"commit {about['commit']}"] if about.get("commit") else []
        facts += [f"`{setting}`" for setting in about.get("settings", ())]
    if facts:
        yield f"- {name}: {'; '.join(dict.fromkeys(facts))}"


def between_marks(page: str, made: str) -> str:
    """Return the page with what is between its two marks replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the page lacks one of the lines between which the tables stand: {BEGIN} and {END}")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


# The figure ----------------------------------------------------------------------------------------------------------

# Okabe and Ito's colours, which people with any kind of colour blindness can tell apart; yellow is too light for lines.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B", "#7F7F7F")
MEASURES = {"clean": "clean accuracy", "adversarial": "accuracy under PGD-20"}
CIRCLES = "circles: the round that a module was kept at"
WIDTH, HEIGHT, LABEL_GAP = 11.0, 3.5, 0.062


@dataclass(frozen=True)
class Curve:
    """A measure of one run over its rounds, in %, and where a stage's kept round is, by module."""

    rounds: Sequence[int]
    values: Sequence[float]
    stages: Mapping[int, tuple[int, float]]


def curve_of(run: ReadFolder, measure: str) -> Curve:
    """Return a run's curve; rounds without an evaluation are left out."""
    measured = [record for record in run.records if record.get("samples")]
    fixed = [record["fixed"] for record in run.records if "fixed" in record]
    return Curve(
        [record["round"] for record in measured],
        [100 * record[measure] for record in measured],
        {stage["module"]: (stage["round"], 100 * stage[measure]) for stage in fixed},
    )


def figure(kept: Kept) -> bytes:
    """Return the curves of all finished runs as SVG; the same runs and the same Matplotlib give the same bytes."""
    check_plots()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    groups = {title: rows for title, rows in GROUPS.items() if any(c.name in kept for row in rows for c in row.cells)}
    if not groups:
        raise ConfigError("no finished run is kept: there is nothing to draw")
    with rc_context({"svg.hashsalt": "cifar10"}):
        drawn = Figure(figsize=(WIDTH, HEIGHT * len(groups)), layout="constrained", facecolor="white")
        parts = drawn.subfigures(len(groups), 1, squeeze=False).flat
        for part, (title, rows) in zip(parts, groups.items(), strict=True):
            part.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK, fontweight="bold")
            for axes, measure in zip(part.subplots(1, 2), MEASURES, strict=True):
                draw_rows(axes, rows, kept, measure)
        data = io.BytesIO()
        drawn.savefig(data, format="svg", metadata={"Date": None, "Creator": None})
    return data.getvalue()


def draw_rows(axes: "Axes", rows: Sequence[Row], kept: Kept, measure: str) -> None:
    """Draw the runs of some rows: a colour for each row, a thin line for each seed, its name at the end."""
    ends: dict[str, tuple[float, float, str]] = {}
    for colour, row in zip(COLOURS, rows, strict=False):
        curves = [curve_of(kept[cell.name], measure) for cell in row.cells if cell.name in kept]
        if not curves:
            continue
        for number, curve in enumerate(curves):
            axes.plot(curve.rounds, curve.values, color=colour, lw=0.9 if len(curves) == 1 else 0.6, alpha=0.85)
            draw_stages(axes, curve, colour, numbered=number == 0)
        title = row.title if len(curves) == 1 else f"{row.title}, {len(curves)} seeds"
        last = [value for curve in curves for value in curve.values[-10:]]
        ends[title] = (max(curve.rounds[-1] for curve in curves), sum(last) / len(last), colour)
    if any(METHODS[row.method].cascade and row.title in title for row in rows for title in ends):
        axes.text(0.99, 0.03, CIRCLES, transform=axes.transAxes, ha="right", fontsize=7.5, color=PALE)
    axes.set_ylim(0, 100 if measure == "clean" else 70)
    axes.set_xlim(0, 1.01 * max(x for x, _, _ in ends.values()))
    axes.set_xlabel("round", fontsize=9, color=INK)
    axes.set_ylabel(f"personalised {MEASURES[measure]}, %", fontsize=9, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, labelcolor=INK, color=PALE)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    label_ends(axes, ends)


def draw_stages(axes: "Axes", curve: Curve, colour: str, numbered: bool) -> None:
    """Mark the round that each stage of a cascade was kept at, with the number of its module."""
    for module, (x, y) in curve.stages.items():
        axes.plot([x], [y], "o", ms=4.5, mfc="white", mec=colour, mew=1.2, zorder=3)
        if numbered:
            style: dict[str, Any] = {"ha": "center", "fontsize": 7.5, "color": colour}
            axes.annotate(str(module), (x, y), (0, 7), textcoords="offset points", **style)


def label_ends(axes: "Axes", ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Write each line's name beside the panel, at the height of the line's end, apart from each other."""
    low, high = axes.get_ylim()
    heights = apart([y for _, y, _ in ends.values()], LABEL_GAP * (high - low))
    for (title, (x, y, colour)), height in zip(ends.items(), heights, strict=True):
        axes.annotate(
            title,
            (x, y),
            (1.03, height),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=8.5,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.8, "ls": (0, (1, 3)), "relpos": (0, 0.5)},
            annotation_clip=False,
        )


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Return places moved as little as needed for a gap between neighbours: those too near are spread about their mean.

    Places that collide form a group; groups that then collide are joined.
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    groups: list[list[int]] = []
    for index in order:
        groups.append([index])
        while len(groups) > 1 and _span(groups[-2], places, gap)[1] + gap > _span(groups[-1], places, gap)[0]:
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = list(places)
    for group in groups:
        for place, index in enumerate(group):
            moved[index] = _span(group, places, gap)[0] + place * gap
    return moved


def _span(group: Sequence[int], places: Sequence[float], gap: float) -> tuple[float, float]:
    """Return from where to where a group reaches when its members are a gap apart, about their mean."""
    middle, reach = sum(places[index] for index in group) / len(group), gap * (len(group) - 1) / 2
    return middle - reach, middle + reach


# The program ---------------------------------------------------------------------------------------------------------


def commit() -> str:
    """Return the commit of this program's repository; nothing outside of one."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Return what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=PAGE, help="the page; its runs are in a folder beside it")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("cells", help="list the cells")
    playing = commands.add_parser("play", help="play cells until the seconds are over")
    playing.add_argument("cells", nargs="+", metavar="CELL")
    playing.add_argument("--seconds", type=float, required=True, help="of wall-clock time for everything")
    playing.add_argument("--reserve", type=float, default=KEPT_BACK, help="of these, for what comes after the rounds")
    playing.add_argument(
        "--settle", type=float, default=30.0, help="with --pack, before that: stop at the next best round; 0: do not"
    )
    playing.add_argument("--data", default="", help="the folder of CIFAR-10 (data.root)")
    playing.add_argument("--weights", default="", help="the starting weights (model.weights)")
    playing.add_argument("--runs", type=Path, required=True, help="the folder of the runs")
    playing.add_argument("--save", type=Path, required=True, help="the folder for what is to be kept")
    playing.add_argument("--save-every", type=float, default=60.0, metavar="SECONDS")
    playing.add_argument(
        "--pack", nargs="?", choices=("all", "unfinished"), const="all", default="", help="keep packed runs, too"
    )
    playing.add_argument("--autoattack", type=int, default=0, metavar="N", help="measure finished runs on N samples")
    playing.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all cells")
    playing.add_argument("--commit", default=commit(), help="what is written down as the commit")
    bringing = commands.add_parser("bring", help="take finished runs into the repository")
    bringing.add_argument("folder", type=Path, metavar="DIR")
    table = commands.add_parser("table", help="print the tables")
    table.add_argument("--write", action="store_true", help="put them into the page")
    commands.add_parser("figure", help="draw the curves")
    return parser.parse_args(words)


def run(arguments: argparse.Namespace) -> int:
    """Do what is asked for; return the exit code."""
    page: Path = arguments.page
    results = page.with_suffix("")
    if arguments.command == "cells":
        kept = read_kept(results)
        print("\n".join(f"{name}{'  (kept)' if name in kept else ''}" for name in CELLS))
    elif arguments.command == "play":
        began = now()
        outcomes = play_cells(arguments)
        print(outcome_table(outcomes, now() - began))
        return int(any(outcome.state.startswith("failed") for outcome in outcomes))
    elif arguments.command == "bring":
        return int(bring_all(arguments.folder, results) > 0)
    elif arguments.command == "table":
        made = tables(read_kept(results))
        print(made)
        if arguments.write:
            page.write_text(between_marks(page.read_text("utf-8"), made), "utf-8")
    else:
        page.with_suffix(".svg").write_bytes(figure(read_kept(results)))
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Do what is asked for, and say what is wrong without a traceback."""
    try:
        return run(arguments_of(words))
    except FedProphetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    with stopped_once():
        code = main()
    sys.exit(code)
