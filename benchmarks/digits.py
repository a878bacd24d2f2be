"""The digits benchmark: FedProphet, its ablation (APA and DMA off), one module, and plain training, over seeds.

    python benchmarks/digits.py --seeds 3 --out benchmarks/results     # about 40 minutes on two cores
    python benchmarks/digits.py --seeds 1 --rounds 2                   # a minute, to see that it works

Each variant is the `digits` preset with the paper's norm layers and labels, 12 iterations and a few keys changed; each
run uses one thread, so that `--workers 2` fills two cores. The table shows means over seeds, the PGD accuracy at the
end of each stage, and the spread between seeds.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import PAPER, measured, played, spread, written

import fedprophet

VARIANTS: dict[str, list[str]] = {
    "FedProphet": [],
    "APA off": ["perturbation.enabled=false"],
    "DMA off": ["assignment.enabled=false"],
    "APA and DMA off": ["perturbation.enabled=false", "assignment.enabled=false"],
    "one module": ["memory.budget=100%"],
    "one module, twice the rounds": ["memory.budget=100%"],
    "plain training, one module": ["memory.budget=100%", "attack.steps=0"],
}


def run(variant: str, seed: int, rounds: int) -> dict[str, Any]:
    """Train one variant with one seed and return what it reached."""
    rounds *= 2 if "twice" in variant else 1
    overrides = [*PAPER, *VARIANTS[variant], f"seed={seed}", "threads=1", f"rounds={rounds}"]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trained = fedprophet.train("digits", overrides=overrides, out=Path(folder) / "run")
    results = trained.results
    return {
        "variant": variant,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "rounds": results["rounds"],
        "largest_module_bytes": max(module["memory_bytes"] for module in results["modules"]),
        "stages_pgd": [round(stage["adversarial"], 4) for stage in results["stages"]],
        **{
            f"{kind}_{attack}": round(results[kind][attack]["accuracy"], 4)
            for kind in ("personalised", "global")
            for attack in ("clean", "pgd20")
        },
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Return the Markdown table: means over seeds in %, ± the standard deviation where there are several seeds."""
    lines = [
        "| variant | module memory | personalised clean / PGD-20 | global clean / PGD-20 | PGD-20 by stage | rounds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for variant in VARIANTS:
        rows = [row for row in runs if row["variant"] == variant]
        if not rows:
            continue
        depth = min(len(row["stages_pgd"]) for row in rows)
        stages = " → ".join(f"{100 * statistics.mean(row['stages_pgd'][i] for row in rows):.0f}" for i in range(depth))
        memory = max(row["largest_module_bytes"] for row in rows) / 1e6
        lines.append(
            f"| {variant} | {memory:.2f} MB | {cell(rows, 'personalised')} | {cell(rows, 'global')} | {stages} | "
            f"{statistics.mean(row['rounds'] for row in rows):.0f} |"
        )
    return "\n".join(lines)


def cell(rows: list[dict[str, Any]], kind: str) -> str:
    """Return `97.1 ± 0.3 / 61.0 ± 1.2` for one kind of accuracy."""
    return " / ".join(spread([100 * row[f"{kind}_{attack}"] for row in rows]) for attack in ("clean", "pgd20"))


def header(seeds: int, rounds: int) -> str:
    """Return what a reader must know to trust or repeat the numbers."""
    preset = fedprophet.load_config("digits")
    return (
        f"# Digits\n\n{measured('digits')}\n\n"
        f"Preset `digits` with {', '.join(PAPER)}: eps {preset.attack.radius}, at most {rounds} rounds "
        f"per stage, seeds 0 … {seeds - 1}. "
        "Accuracies in %, mean ± standard deviation over seeds; personalised on all clients' held-out images (about "
        "285), global on 360 test images.\n"
    )


def main() -> None:
    """Run all variants and print the table; with --out also write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=fedprophet.load_config("digits").rounds)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    jobs = [(variant, seed, arguments.rounds) for variant in arguments.only for seed in range(arguments.seeds)]
    runs = played(run, jobs, arguments.workers)
    text = f"{header(arguments.seeds, arguments.rounds)}\n{table(runs)}\n"
    written("digits", text, runs, arguments.out)


if __name__ == "__main__":
    main()
