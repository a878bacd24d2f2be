"""All methods on digits, over seeds: FedProphet and the paper's seven baselines side by side.

    python benchmarks/methods.py --seeds 3 --out benchmarks/results    # about half an hour on two cores
    python benchmarks/methods.py --seeds 1 --rounds 2                  # a minute, to see that it works

Each run is the `digits` preset with the paper's norm layers and labels, 12 iterations and its method's own number of
rounds, and uses one thread, so that `--workers 2` fills two cores. The table is that of `fedprophet compare`.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import PAPER, measured, played, written

import fedprophet
from fedprophet.methods import METHODS
from fedprophet.report.compare import compare
from fedprophet.report.figures import comparison_png
from fedprophet.report.tables import markdown


def run(method: str, seed: int, rounds: int | None, folder: Path) -> dict[str, Any]:
    """Train one method with one seed and return what it reached."""
    overrides = [*PAPER, f"method={method}", f"seed={seed}", "threads=1", *([f"rounds={rounds}"] if rounds else [])]
    began = time.monotonic()
    trained = fedprophet.train("digits", overrides=overrides, out=folder / f"{method}-{seed}")
    seconds = round(time.monotonic() - began, 1)
    return {"method": method, "seed": seed, "seconds": seconds, **_reached(trained.results)}


def _reached(results: Any) -> dict[str, Any]:
    accuracies = {
        f"{kind}_{attack}": round(results[kind][attack]["accuracy"], 4)
        for kind in ("personalised", "global")
        for attack in ("clean", "pgd20")
    }
    return {"rounds": results["rounds"], **accuracies, "simulated_s": round(results["simulated"]["total_s"], 2)}


def main() -> None:
    """Run all methods and print the table; with --out also write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="for a quick look: rounds of every method (of every stage)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--runs", type=Path, help="keep the runs in this folder")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.runs or Path(scratch)
        jobs = [(m, seed, arguments.rounds, folder) for m in arguments.only for seed in range(arguments.seeds)]
        runs = played(run, jobs, arguments.workers)
        comparison = compare([folder / f"{method}-{seed}" for method, seed, *_ in jobs])
        written("methods", f"{measured('methods')}\n\n{markdown(comparison)}", runs, arguments.out)
        if arguments.out:
            (arguments.out / "methods.png").write_bytes(comparison_png(comparison))


if __name__ == "__main__":
    main()
