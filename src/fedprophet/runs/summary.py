"""Sums over the journal, and the closing summary of a run."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from fedprophet.methods.baseline import ROBUSTNESS_WEIGHT
from fedprophet.runs.asking import WatchedEngine
from fedprophet.runs.engine_history import spans
from fedprophet.runs.evaluator import Evaluator, cells, conditions
from fedprophet.runs.journal import Journal, timings_of
from fedprophet.runs.run import Run
from fedprophet.runs.setup import module_rows
from fedprophet.server.convergence import score
from fedprophet.server.coordinator import Record
from fedprophet.version import __version__


def closing_summary(run: Run, engine: WatchedEngine, whole: Mapping[str, Tensor], record: Record) -> dict[str, Any]:
    """Evaluate a finished run's model and return what results.json says; `record` is of its making."""
    session, state = run.session, run.state
    attacks = ("clean", f"pgd{session.config.evaluate.steps}")
    records = Journal(run.files.journal).read()
    accuracies = cells(Evaluator(session, state, whole, engine).measure(attacks))
    moved, closing_account = moved_bytes(records), {**record, **engine.account()}
    plans = plans_taken(records)
    return {
        "version": __version__,
        "method": session.config.method,
        "seed": session.config.seed,
        "rounds": state.round,
        **module_rows(session),
        "memory": training_memory(records),
        **({"plans": plans} if plans else {}),
        "simulated": simulated_seconds(records),
        "engines": [span.to_json() for span in spans(timings_of(run.files).read())],
        # The closing evaluation is left out: it moves the same for every method.
        **({"wire": moved, "faults": fault_count(records)} if moved else {}),
        **({"closing": closing_account} if closing_account else {}),
        **best_and_last(records),
        **session.method.results(state),
        **conditions(session, state),
        **accuracies,
    }


def best_and_last(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Return the best evaluated round of all, by clean + 1.5 · adversarial accuracy, and the last one.

    That best round is what the paper's tables report; the model that is kept is that of the last stage's own best.
    """
    evaluated = [record for record in records if record.get("samples")]
    if not evaluated:
        return {}
    best = max(evaluated, key=lambda record: score(record["clean"], record["adversarial"], ROBUSTNESS_WEIGHT))
    parts = ("round", "module", "clean", "adversarial")
    return {
        name: {part: record[part] for part in parts if part in record}
        for name, record in (("best", best), ("last", evaluated[-1]))
    }


def simulated_seconds(records: Iterable[Record]) -> dict[str, float]:
    """Return the training time that the device pool would have taken: a round lasts as long as its slowest client."""
    slowest = [
        max(record["times"].values(), key=lambda time: time["computation_s"] + time["access_s"])
        for record in records
        if record.get("times")
    ]
    parts = {name: sum(time[name] for time in slowest) for name in ("computation_s", "access_s")}
    return {**parts, "total_s": sum(parts.values())}


def training_memory(records: Iterable[Record]) -> dict[str, int] | None:
    """Return the bytes that clients' training takes in the cost model; None if nobody trained.

    `least_bytes` is what a device needs to do the smallest task of every round: the largest, over the rounds, of each
    round's smallest task. `smallest_bytes` and `peak_bytes` are the smallest and the largest task of all.
    """
    rounds = [record["times"].values() for record in records if record.get("times")]
    if not rounds:
        return None
    sizes = [[time["memory_bytes"] for time in times] for times in rounds]
    smallest = [min(round_sizes) for round_sizes in sizes]
    return {"smallest_bytes": min(smallest), "least_bytes": max(smallest), "peak_bytes": max(map(max, sizes))}


def plans_taken(records: Iterable[Record]) -> dict[str, Any] | None:
    """Return how often clients trained by which plan, and how close one came to its limit; None without limits."""
    taken = [plan for record in records for plan in record.get("plans", {}).values()]
    if not taken:
        return None
    closest = max(taken, key=lambda plan: plan["peak_bytes"] / plan["limit_bytes"])
    return {
        "counts": dict(Counter(plan["plan"] for plan in taken).most_common()),
        "closest": {part: closest[part] for part in ("peak_bytes", "limit_bytes")},
    }


def moved_bytes(records: Iterable[Record]) -> dict[str, int] | None:
    """Return the bytes that a run has moved, and those of training the whole model; None if no engine counted them."""
    counted = [record["wire"] for record in records if "wire" in record]
    if not counted:
        return None
    return {part: sum(wire[part] for wire in counted) for part in ("sent", "received", "whole_model")}


def fault_count(records: Iterable[Record]) -> int:
    """Return how often a client's answer was missing, failed or could not be used."""
    return sum(len(faulty_clients(record)) for record in records)


def faulty_clients(record: Record) -> dict[str, list[str]]:
    """Return the clients of a round whose answers were lost, each with the reasons."""
    reasons: dict[str, list[str]] = {}
    for kind, clients in record.get("missing", {}).items():
        for client in clients:
            reasons.setdefault(str(client), []).append(f"no answer ({kind})")
    for key in ("dropped", "faults"):
        for client, reason in record.get(key, {}).items():
            reasons.setdefault(str(client), []).append(str(reason))
    return reasons
