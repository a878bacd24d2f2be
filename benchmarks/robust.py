"""What a fifth of bad clients does to a model, under each rule that joins updates (`aggregate.rule`).

    python benchmarks/robust.py --out benchmarks/results           # about 25 minutes on two cores
    python benchmarks/robust.py --seeds 1 --only jfat              # three minutes

Ten clients train on scikit-learn's digits, all of them in every round, adversarially. Two of them are bad: they send
the model they were given plus a factor times what they learnt, or lie about their numbers. The tables show the exported
model on the test set.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine import measured, played, spread, written

from fedprophet.config.load import parse_config
from fedprophet.errors import FedProphetError
from fedprophet.messages.answers import Answer, Evaluated, Measured, Trained
from fedprophet.messages.tasks import Task, Train
from fedprophet.runs.evaluator import evaluate
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import Engine, play_round
from fedprophet.server.rules import RULES

BAD = (2, 7)
HONEST = "what they learnt"
Lie = Callable[[Task, Answer], Answer]
"""What a bad client makes of its answer to a task."""
SETTING: Mapping[str, Any] = {
    "threads": 1,
    "engine": "plain",
    "model": {"options": {"width": 8}},
    "population": {"clients": 10, "cohort": 10},
    "memory": {"budget": "45%"},
    "train": {"iterations": 10, "batch": 32, "learning_rate": 0.05, "warmup": 1},
    "attack": {"radius": 0.1, "steps": 2, "feature_steps": 2},
    "convergence": {"gate": 0},
    "evaluate": {"steps": 10, "every": 3},
    "measure": {"steps": 2},
}


def scaled(factor: float, weight: float | None = None) -> Lie:
    """Send the model that was given plus a factor times what was learnt, and perhaps claim a weight."""

    def lie(task: Task, answer: Answer) -> Answer:
        if not isinstance(task, Train) or not isinstance(answer, Trained):
            return answer
        base = task.parameters
        sent = {name: base[name] + factor * (value - base[name]) for name, value in answer.parameters.items()}
        return replace(answer, parameters=sent, weight=answer.weight if weight is None else weight)

    return lie


def one_number(task: Task, answer: Answer) -> Answer:
    """Send 3·10³⁸ as the first number of every parameter."""
    if not isinstance(answer, Trained):
        return answer
    sent = {name: value.clone() for name, value in answer.parameters.items()}
    for value in sent.values():
        value.view(-1)[0] = 3e38
    return replace(answer, parameters=sent)


def perturbation(factor: float) -> Lie:
    """Claim another perturbation than was measured."""
    return lambda task, a: replace(a, magnitude=factor * a.magnitude) if isinstance(a, Measured) else a


def accuracies(task: Task, answer: Answer) -> Answer:
    """Claim that every clean image is right and every attack succeeds."""
    return replace(answer, clean=answer.samples, adversarial=0) if isinstance(answer, Evaluated) else answer


LIES: Mapping[str, Lie] = {
    HONEST: lambda task, answer: answer,
    "−1 × what they learnt": scaled(-1),
    "−10 × what they learnt": scaled(-10),
    "−10 × what they learnt, as of 2⁵³ samples": scaled(-10, 2.0**53),
    "1000 × what they learnt": scaled(1000),
    "3·10³⁸ in every layer": one_number,
    "50 × the perturbation they measured": perturbation(50),
    "1/50 of the perturbation they measured": perturbation(1 / 50),
    "10³⁰ × the perturbation they measured": perturbation(1e30),
    "no perturbation at all": perturbation(0),
    "accuracies: clean 100 %, attacked 0 %": accuracies,
}
UPDATES = tuple(LIES)[:6]
CASES: Mapping[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    "jfat": ("jFAT, data spread evenly", {"method": "jfat", "rounds": 6, "shards": {"kind": "iid"}}, UPDATES),
    "skewed": ("jFAT, two classes a client", {"method": "jfat", "rounds": 6}, (UPDATES[0], UPDATES[2])),
    "fedprophet": (
        "FedProphet, data spread evenly",
        {"method": "fedprophet", "rounds": 4, "shards": {"kind": "iid"}},
        (UPDATES[0], *tuple(LIES)[2:]),
    ),
}
"""What is trained, and what the two bad clients send."""


class Tampering:
    """An engine some of whose clients lie."""

    def __init__(self, engine: Engine, lie: Lie) -> None:
        self._engine, self._lie = engine, lie

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """Pass the tasks on, and tamper with what the bad clients answer."""
        asked = {task.client: task for task in tasks}
        for answer in self._engine.map(asked.values()):
            yield self._lie(asked[answer.client], answer) if answer.client in BAD else answer


def run(case: str, lie: str, rule: str, seed: int) -> dict[str, Any]:
    """Train one case and return what the exported model reaches on the test set; a run that stops has no model."""
    torch.set_num_threads(1)
    session = assemble(parse_config({**SETTING, **CASES[case][1], "seed": seed, "aggregate": {"rule": rule}}))
    engine, state = Tampering(session.engine, LIES[lie]), session.method.initial()
    row = {"case": case, "lie": lie, "rule": rule, "seed": seed}
    try:
        while not session.method.finished(state):
            state, _ = play_round(session.method.round(state), engine)
    except FedProphetError as error:
        return {**row, "stopped": str(error)}
    cells = evaluate(session, state, ("clean", "pgd10"), session.engine)["global"]
    return {**row, **{attack: round(cell["accuracy"], 4) for attack, cell in cells.items()}}


def tables(runs: list[dict[str, Any]]) -> str:
    """Return a Markdown table for each case: clean / PGD-10 accuracy in %, mean ± standard deviation over seeds."""
    blocks = []
    for case, (title, _, lies) in CASES.items():
        rows = [row for row in runs if row["case"] == case]
        if rows:
            head = ["two of ten clients send", *RULES]
            lines = [f"## {title}", "", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
            for lie in lies:
                found = ([row for row in rows if (row["lie"], row["rule"]) == (lie, rule)] for rule in RULES)
                lines.append(f"| {lie} | {' | '.join(map(cell, found))} |")
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def cell(rows: list[dict[str, Any]]) -> str:
    """Return `95.8 ± 0.3 / 82.8 ± 1.2`."""
    stopped = sum("stopped" in row for row in rows)
    if stopped:
        return f"{stopped} of {len(rows)} runs stopped"
    return " / ".join(spread([100 * row[attack] for row in rows]) for attack in ("clean", "pgd10"))


def main() -> None:
    """Run all cases and print the tables; with --out also write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    jobs = [(c, lie, rule, seed) for c in arguments.only for lie in CASES[c][2] for rule in RULES for seed in seeds]
    runs = played(run, jobs, arguments.workers)
    text = (
        f"# Bad clients\n\n{measured('robust')}\n\n"
        f"Digits, ten clients, all of them in every round, two of them bad; seeds 0 … {arguments.seeds - 1}. "
        "Clean / PGD-10 accuracy (eps 0.1) of the exported model on 360 test images, in %, mean ± standard deviation "
        f"over seeds. Chance is 10 %.\n\n{tables(runs)}\n"
    )
    written("robust", text, runs, arguments.out)


if __name__ == "__main__":
    main()
