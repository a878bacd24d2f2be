"""What a fifth of bad clients does to a model, under each rule that joins updates (`aggregate.rule`).

    python benchmarks/robust.py --out benchmarks/results           # about ten minutes on two cores
    python benchmarks/robust.py --seeds 1 --only jfat              # two minutes

Ten clients train on scikit-learn's digits, all of them in every round, adversarially. Two of them send the model they
were given plus FACTOR times what they learnt: −1 and −10 turn an update round, 100 blows it up. The table shows the
exported model on the test set.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine import measured

from fedprophet.config.load import parse_config
from fedprophet.messages.answers import Answer, Trained
from fedprophet.messages.tasks import Task, Train
from fedprophet.runs.evaluator import evaluate
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import Engine, play_round
from fedprophet.server.rules import RULES

BAD = (2, 7)
HONEST = 1.0
SETTING: Mapping[str, Any] = {
    "threads": 1,
    "engine": "plain",
    "model": {"options": {"width": 8}},
    "population": {"clients": 10, "cohort": 10},
    "memory": {"budget": "45%"},
    "train": {"iterations": 10, "batch": 32, "learning_rate": 0.05, "warmup": 1},
    "attack": {"radius": 0.1, "steps": 2, "feature_steps": 2},
    "convergence": {"gate": 0},
    "evaluate": {"steps": 10, "every": 3, "clients": 5},
    "measure": {"steps": 2, "clients": 5},
}
CASES: Mapping[str, tuple[str, Mapping[str, Any], tuple[float, ...]]] = {
    "jfat": ("jFAT, data spread evenly", {"method": "jfat", "rounds": 6, "shards": {"kind": "iid"}}, (1, -1, -10, 100)),
    "skewed": ("jFAT, two classes a client", {"method": "jfat", "rounds": 6}, (1, -10)),
    "fedprophet": (
        "FedProphet, data spread evenly",
        {"method": "fedprophet", "rounds": 4, "shards": {"kind": "iid"}},
        (1, -10, 100),
    ),
}
"""What is trained, and the factors of the two bad clients."""


class Tampering:
    """An engine some of whose clients send another model than they have learnt."""

    def __init__(self, engine: Engine, factor: float) -> None:
        self._engine, self._factor = engine, factor

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """Pass the tasks on, and tamper with what the bad clients have trained."""
        asked = list(tasks)
        given = {task.client: task.parameters for task in asked if isinstance(task, Train)}
        for answer in self._engine.map(asked):
            if isinstance(answer, Trained) and answer.client in BAD and self._factor != HONEST:
                base, learnt = given[answer.client], answer.parameters.items()
                answer = replace(answer, parameters={k: base[k] + self._factor * (v - base[k]) for k, v in learnt})
            yield answer


def run(case: str, factor: float, rule: str, seed: int) -> dict[str, Any]:
    """Train one case and return what the exported model reaches on the test set."""
    torch.set_num_threads(1)
    session = assemble(parse_config({**SETTING, **CASES[case][1], "seed": seed, "aggregate": {"rule": rule}}))
    engine, state = Tampering(session.engine, factor), session.method.initial()
    while not session.method.finished(state):
        state, _ = play_round(session.method.round(state), engine)
    cells = evaluate(session, state, ("clean", "pgd10"), session.engine)["global"]
    reached = {attack: round(cell["accuracy"], 4) for attack, cell in cells.items()}
    return {"case": case, "factor": factor, "rule": rule, "seed": seed, **reached}


def tables(runs: list[dict[str, Any]]) -> str:
    """Return a Markdown table for each case: clean / PGD-10 accuracy in %, mean ± standard deviation over seeds."""
    blocks = []
    for case, (title, _, factors) in CASES.items():
        rows = [row for row in runs if row["case"] == case]
        if rows:
            head = ["two of ten clients send", *RULES]
            lines = [f"## {title}", "", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
            for factor in factors:
                what = "what they learnt" if factor == HONEST else f"{factor:g} × what they learnt"
                found = ([row for row in rows if (row["factor"], row["rule"]) == (factor, rule)] for rule in RULES)
                lines.append(f"| {what} | {' | '.join(map(cell, found))} |")
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def cell(rows: list[dict[str, Any]]) -> str:
    """Return `95.8 ± 0.3 / 82.8 ± 1.2`."""
    return " / ".join(_spread([100 * row[attack] for row in rows]) for attack in ("clean", "pgd10"))


def _spread(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def main() -> None:
    """Run all cases and print the tables; with --out also write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    jobs = [
        (c, factor, rule, seed) for c in arguments.only for factor in CASES[c][2] for rule in RULES for seed in seeds
    ]
    runs = []
    with ProcessPoolExecutor(arguments.workers) as pool:
        for row in pool.map(run, *zip(*jobs, strict=True)):
            print(json.dumps(row), flush=True)
            runs.append(row)
    command = shlex.join(["python", "benchmarks/robust.py", *sys.argv[1:]])
    text = (
        f"# Bad clients\n\n{measured(command)}\n\n"
        f"Digits, ten clients, all of them in every round, two of them bad; seeds 0 … {arguments.seeds - 1}. "
        "Clean / PGD-10 accuracy (eps 0.1) of the exported model on 360 test images, in %, mean ± standard deviation "
        f"over seeds. Chance is 10 %.\n\n{tables(runs)}\n"
    )
    print(text)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "robust.md").write_text(text)
        (arguments.out / "robust.json").write_text(json.dumps(runs, indent=2) + "\n")


if __name__ == "__main__":
    main()
