"""Where norm layers live and what clients know of their labels: every method with the choices that make sense.

    python benchmarks/one_model.py --seeds 3                          # hours on two cores; goes on where it stopped
    python benchmarks/one_model.py --methods jfat --choices shared "shared, calibrated"
    python benchmarks/one_model.py --table                            # the table again, from what was measured

Each run is the `digits` preset with the keys of its choice, on one thread. What was measured is kept in one-model.json,
with the machine it was measured on, and is not measured again.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from machine import PAPER

import fedprophet
from fedprophet.machine import processor
from fedprophet.methods import METHODS

Row = dict[str, Any]
CALIBRATED, SHARED, ATTACKED = "train.calibration=labels", "norm.layers=shared", "norm.refresh=attacked"
CHOICES: dict[str, list[str]] = {
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
    "shared, calibrated, alpha from 0.7": [SHARED, CALIBRATED, "perturbation.start=0.7"],
}
"""What differs from the paper's settings: norm layers with the clients, plain labels."""
KINDS = ("personalised", "uncalibrated", "global")
ATTACKS = ("clean", "pgd20")


def makes_sense(method: str, choice: str) -> bool:
    """Whether a method has the choice: FedRBN's statistics stay with the clients, and only a cascade has an alpha."""
    if "alpha" in choice and not METHODS[method].cascade:
        return False
    return method != "fedrbn" or not choice.startswith(("shared", "frozen"))


def run(method: str, choice: str, seed: int) -> Row:
    """Train once and return what it reached."""
    overrides = [*PAPER, *CHOICES[choice], f"method={method}", f"seed={seed}", "threads=1", "engine=workers"]
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
    return " / ".join(_spread([100 * row[kind][attack] for row in rows]) for attack in ATTACKS)


def _spread(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def page(rows: list[Row], methods: list[str]) -> str:
    """Return the table with what a reader must know of it."""
    machines = sorted({row["machine"] for row in rows})
    listed = "".join(f"- {machine}: {sum(row['machine'] == machine for row in rows)} runs\n" for machine in machines)
    return (
        "# One model for everyone: digits\n\n`python benchmarks/one_model.py`, one thread per run, engine `workers`. "
        "Clean / PGD-20 in %, mean ± standard deviation over the seeds that were run. Personalised and uncalibrated "
        "on all clients' held-out images (about 285), global on 360 test images. Every row is the `digits` preset with "
        "the paper's norm layers and labels and alpha from 0.5, changed as the row says.\n\n"
        f"{listed}\n{table(rows, methods)}\n"
    )


def missing(rows: list[Row], arguments: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Yield what is asked for and not measured yet, one seed of everything first."""
    known = {(row["method"], row["choice"], row["seed"]) for row in rows}
    for seed in range(arguments.seeds):
        for choice in arguments.choices:
            for method in arguments.methods:
                if makes_sense(method, choice) and (method, choice, seed) not in known:
                    yield method, choice, seed


def main() -> None:
    """Measure what is missing, and write the table after every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(METHODS, key=lambda name: METHODS[name].row)
    parser.add_argument("--methods", nargs="*", choices=names, default=names)
    parser.add_argument("--choices", nargs="*", choices=list(CHOICES), default=list(CHOICES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="run nothing, write the table again")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    file = arguments.out / "one-model.json"
    rows: list[Row] = json.loads(file.read_text()) if file.exists() else []
    jobs = [] if arguments.table else list(missing(rows, arguments))
    with ProcessPoolExecutor(arguments.workers) as pool:
        for row in pool.map(run, *zip(*jobs, strict=True)) if jobs else ():
            print(json.dumps(row), flush=True)
            rows.append(row)
            file.write_text(json.dumps(rows, indent=1) + "\n")
    (arguments.out / "one-model.md").write_text(page(rows, names))
    print(table(rows, names))


if __name__ == "__main__":
    main()
