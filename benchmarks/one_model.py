"""Where norm layers live and what clients know of their labels: every method with the choices that make sense.

    python benchmarks/one_model.py --seeds 3                          # hours on two cores; goes on where it stopped
    python benchmarks/one_model.py --methods jfat --choices shared "shared, calibrated"
    python benchmarks/one_model.py --seeds 2 --choices all            # also those that begin with the paper's settings
    python benchmarks/one_model.py --seeds 3 --out FOLDER             # what is missing here, measured elsewhere
    python benchmarks/one_model.py --table                            # the table again, from what was measured
    python benchmarks/one_model.py --table --merge FILE.json          # with what was measured elsewhere

Each run is the `digits` preset with the keys of its choice, on one thread: all methods as the preset is, and FedProphet
with changes of that; choices that begin with the paper's settings are played where they are named. What was measured is
kept in one-model.json, with the machine it was measured on, and is not measured again; a new folder begins with what
is stored here. A run is there as soon as it is finished: Ctrl-C costs those that are going on.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import torch
from machine import PAPER, spread

import fedprophet
from fedprophet.cli.stopping import stopped_once
from fedprophet.display.numbers import counted
from fedprophet.errors import ConfigError, FedProphetError, unknown
from fedprophet.machine import processor
from fedprophet.methods import METHODS
from fedprophet.runs.run import RunStoppedError
from fedprophet.storage.files import parse_json, write_atomic

Row = dict[str, Any]
Job = tuple[str, str, int]
"""The method, the choice and the seed of a run, of which there is one row at most."""
CALIBRATED, SHARED, ATTACKED = "train.calibration=labels", "norm.layers=shared", "norm.refresh=attacked"
ALPHA, RAMP, MEAN = "perturbation.start=0.7", "attack.ramp=30%", "aggregate.horizon=30%"
DBFAT = ("train.weighting=boundary", "train.consistency=1.0")
FROM_PAPER: dict[str, list[str]] = {
    "local": [],
    "local, statistics refreshed": [ATTACKED],
    "local, calibrated": [CALIBRATED],
    "statistics local": ["norm.layers=statistics-local"],
    "statistics local, calibrated": ["norm.layers=statistics-local", CALIBRATED],
    "shared": [SHARED],
    "shared, calibrated": [SHARED, CALIBRATED],
    "shared, calibrated, refreshed": [SHARED, CALIBRATED, ATTACKED],
    "shared, calibrated, refreshed in turn": [SHARED, CALIBRATED, ATTACKED, "norm.refresh_layers=in-turn"],
    "frozen, calibrated": ["norm.layers=frozen", CALIBRATED],
    "shared, calibrated, smoothing 0.1": [SHARED, CALIBRATED, "train.smoothing=0.1"],
    "shared, calibrated, smoothing 10": [SHARED, CALIBRATED, "train.smoothing=10.0"],
    "shared, calibrated, FedProx 0.01": [SHARED, CALIBRATED, "train.proximal=0.01"],
    "local, newcomers average": ["norm.newcomers=average"],
    "shared, calibrated, alpha from 0.7": [SHARED, CALIBRATED, ALPHA],
    "shared, calibrated, alpha from 0.7, refreshed": [SHARED, CALIBRATED, ALPHA, ATTACKED],
    "shared, calibrated, alpha from 0.7, growing attack": [SHARED, CALIBRATED, ALPHA, RAMP],
    "shared, calibrated, growing attack": [SHARED, CALIBRATED, RAMP],
}
"""What differs from the paper's settings: norm layers with the clients, plain labels, 12 iterations."""
DEFAULT = "as the preset is"
FROM_PRESET: dict[str, list[str]] = {
    DEFAULT: [],
    "preset, 36 iterations": ["train.iterations=36"],
    "preset, 36 iterations, rate 0.05": ["train.iterations=36", "train.learning_rate=0.05"],
    "preset, 48 iterations, rate 0.04": ["train.iterations=48", "train.learning_rate=0.04"],
    "preset, refreshed": [ATTACKED],
    "preset, shared": ["norm.layers=shared"],
    "preset, frozen": ["norm.layers=frozen"],
    "preset, smoothing 10": ["train.smoothing=10.0"],
    "preset, mean of 30 % of the rounds": [MEAN],
    "preset, mean of 15 % of the rounds": ["aggregate.horizon=15%"],
    "preset, mean of 30 % of the rounds, consistency 1": [MEAN, DBFAT[1]],
    "preset, boundary weights": [DBFAT[0]],
    "preset, consistency 1": [DBFAT[1]],
    "preset, boundary weights, consistency 1": [*DBFAT],
}
"""What differs from the preset, which has its methods' own keys: shared norm layers, calibrated labels, alpha from 0.7,
24 iterations."""
CASCADE, BOTH = ("fedprophet",), ("jfat", "fedprophet")
CHANGED_FOR: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((name for name, keys in FROM_PRESET.items() if {MEAN, *DBFAT} & {*keys}), BOTH),
    "preset, mean of 15 % of the rounds": BOTH,
    "preset, shared": ("heterofl",),
    "preset, frozen": ("feddrop", "fedrolex", *CASCADE),
}
"""The methods that changes of the preset are measured with where that is not FedProphet alone."""
CHOICES = {**{name: [*PAPER, *keys] for name, keys in FROM_PAPER.items()}, **FROM_PRESET}
STORED = Path(__file__).parent / "results" / "one-model.json"
KINDS = ("personalised", "uncalibrated", "global")
ATTACKS = ("clean", "pgd20")
STOPPED = 130
"""The exit code of a command that Ctrl-C has ended."""


def makes_sense(method: str, choice: str) -> bool:
    """Whether a method has the choice: FedRBN's statistics stay with the clients, and only a cascade has an alpha.

    Changes of the preset are FedProphet's for the most part.
    """
    if choice in FROM_PRESET.keys() - {DEFAULT}:
        return method in CHANGED_FOR.get(choice, CASCADE)
    if "alpha" in choice and not METHODS[method].cascade:
        return False
    return method != "fedrbn" or not choice.startswith(("shared", "frozen"))


def run(method: str, choice: str, seed: int) -> Row:
    """Train once and return what it reached."""
    overrides = [*CHOICES[choice], f"method={method}", f"seed={seed}", "threads=1", "engine=workers"]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = fedprophet.train("digits", overrides=overrides, out=Path(folder) / "run").results
    return {
        "method": method,
        "choice": choice,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "rounds": results["rounds"],
        "machine": f"{processor()}, Python {platform.python_version()}, torch {torch.__version__}",
        **{
            kind: {attack: round(results[kind][attack]["accuracy"], 4) for attack in ATTACKS}
            for kind in KINDS
            if kind in results
        },
    }


def table(rows: list[Row], methods: list[str]) -> str:
    """Return the Markdown table: means over seeds in %, ± the standard deviation where there are several seeds."""
    lines = [
        "| method | norm layers and labels | seeds | personalised | uncalibrated | global |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for method in methods:
        for choice in CHOICES:
            found = [row for row in rows if (row["method"], row["choice"]) == (method, choice)]
            if found:
                cells = " | ".join(cell(found, kind) for kind in KINDS)
                lines.append(f"| {METHODS[method].paper} | {choice} | {len(found)} | {cells} |")
    return "\n".join(lines)


def cell(rows: list[Row], kind: str) -> str:
    """Return `97.1 ± 0.3 / 61.0 ± 1.2` for one kind of accuracy; nothing where it was not measured."""
    if not all(kind in row for row in rows):
        return ""
    return " / ".join(spread([100 * row[kind][attack] for row in rows]) for attack in ATTACKS)


def page(rows: list[Row], methods: list[str]) -> str:
    """Return the table with what a reader must know of it."""
    machines = sorted({row["machine"] for row in rows})
    listed = "".join(f"- {machine}: {sum(row['machine'] == machine for row in rows)} runs\n" for machine in machines)
    return (
        "# One model for everyone: digits\n\n`python benchmarks/one_model.py`, one thread per run, engine `workers`. "
        "Clean / PGD-20 in %, mean ± standard deviation over the seeds that were run. Personalised and uncalibrated "
        "on all clients' held-out images (about 285), global on 360 test images. The preset `digits` has shared norm "
        "layers (FedRBN: local statistics; HeteroFL: frozen), calibrated labels, alpha from 0.7 and 24 iterations; "
        "HeteroFL, FedDrop and FedRolex refresh statistics. Rows that do not name the preset are it with the paper's "
        "norm layers and labels, alpha from 0.5 and 12 iterations, changed as the row says.\n\n"
        f"{listed}\n{table(rows, methods)}\n"
    )


def job_of(row: Row) -> Job:
    """Return what a row is the result of."""
    return row["method"], row["choice"], row["seed"]


def missing(rows: Sequence[Row], arguments: argparse.Namespace) -> Iterator[Job]:
    """Yield what is asked for and not measured yet, one seed of everything first."""
    known = set(map(job_of, rows))
    for seed in range(arguments.seeds):
        for choice in arguments.choices:
            for method in arguments.methods:
                if makes_sense(method, choice) and (method, choice, seed) not in known:
                    yield method, choice, seed


# Measuring -----------------------------------------------------------------------------------------------------------


def finished(jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Future[Row]]]:
    """Run jobs side by side, and yield each when it is over; a stop ends those that are going on."""
    waiting = iter(jobs)
    going: dict[Future[Row], Job] = {}
    with ProcessPoolExecutor(workers) as pool:
        try:
            # No more is given to the pool than it works on: what is in its queue cannot be taken back.
            going |= {pool.submit(run, *job): job for job in islice(waiting, workers)}
            while going:
                over, _ = wait(going, return_when=FIRST_COMPLETED)
                going |= {pool.submit(run, *job): job for job in islice(waiting, len(over))}
                for future in over:
                    yield going.pop(future), future
        except (KeyboardInterrupt, GeneratorExit):
            for process in active_children():  # Ctrl-C in a terminal reaches them anyway, a signal to this one does not
                process.terminate()
            raise


def line(job: Job, row: Row) -> str:
    """Return a run as a short line."""
    method, choice, seed = job
    reached = [f"{kind} {cell([row], kind)}" for kind in KINDS if kind in row]
    return f"{METHODS[method].paper}, {choice}, seed {seed}: {', '.join(reached)}; {row['seconds']:.0f} s"


def measure(jobs: Sequence[Job], workers: int, rows: list[Row], file: Path) -> int:
    """Add what is measured to the rows and to their file, run by run; return the exit code."""
    code = 0
    try:
        for done, (job, future) in enumerate(finished(jobs, workers), start=1):
            try:
                rows.append(future.result())
                said = line(job, rows[-1])
                save(rows, file)
            except RunStoppedError:  # by the same Ctrl-C
                raise KeyboardInterrupt from None
            except FedProphetError as error:
                code, said = 1, f"{', '.join(map(str, job))}: failed: {error}"
            print(f"{done} of {len(jobs)}: {said}", flush=True)
    except KeyboardInterrupt:
        print(f"stopped: {counted(len(rows), 'run')} in {file}; the same command goes on", flush=True)
        return STOPPED
    return code


def save(rows: Sequence[Row], file: Path) -> None:
    """Write what is measured."""
    write_atomic(file, (json.dumps(rows, indent=1) + "\n").encode())


# What is measured already --------------------------------------------------------------------------------------------


def read(file: Path) -> list[Row]:
    """Return the rows of a file; raise ConfigError if they are not such rows."""
    try:
        rows: list[Row] = parse_json(file.read_bytes())
        for row in rows:
            method, choice, _ = job_of(row)
            if method not in METHODS or choice not in CHOICES:
                wrong = ("choice", choice, CHOICES) if method in METHODS else ("method", method, METHODS)
                raise ConfigError(f"{file}: {unknown(*wrong)}")
        page(rows, list(METHODS))  # which needs all that a row must have
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} has no rows of this program: {error!r}") from None
    return rows


def merged(rows: Sequence[Row], others: Sequence[Row]) -> list[Row]:
    """Return rows with those of others that are missing; what both have stays as it is here."""
    by_job: dict[Job, Row] = {}
    for row in (*rows, *others):
        by_job.setdefault(job_of(row), row)
    return list(by_job.values())


def arguments_of(words: Sequence[str] | None, names: Sequence[str]) -> argparse.Namespace:
    """Return what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", choices=names, default=names)
    parser.add_argument("--choices", nargs="*", choices=[*CHOICES, "all"], default=list(FROM_PRESET))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="run nothing, write the table again")
    parser.add_argument(
        "--merge",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="first add the rows that are missing here",
    )
    parser.add_argument("--out", type=Path, default=STORED.parent)
    arguments = parser.parse_args(words)
    if "all" in arguments.choices:
        arguments.choices = list(CHOICES)
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is missing, and write the table of what is there; return the exit code."""
    names = sorted(METHODS, key=lambda name: METHODS[name].row)
    arguments = arguments_of(words, names)
    file = arguments.out / "one-model.json"
    try:
        rows = next((read(known) for known in (file, STORED) if known.exists()), [])
        for other in arguments.merge:
            before, rows = len(rows), merged(rows, read(other))
            print(f"{other}: {counted(len(rows) - before, 'row')} added")
            save(rows, file)
        code = measure([] if arguments.table else list(missing(rows, arguments)), arguments.workers, rows, file)
        write_atomic(arguments.out / "one-model.md", page(rows, names).encode())
    except FedProphetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(rows, names))
    return code


if __name__ == "__main__":
    with stopped_once():
        code = main()
    sys.exit(code)
