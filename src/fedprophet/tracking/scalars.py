"""What is logged of a run: the numbers of a journal record, and of the closing summary, by flat names."""

import math
from collections.abc import Mapping
from typing import Any

from fedprophet.runs.evaluator import KINDS
from fedprophet.runs.summary import fault_count, simulated_seconds
from fedprophet.server.coordinator import Record


def round_scalars(record: Record, seconds: float, simulated: bool = True) -> dict[str, float]:
    """Return the numbers of a round; those that it does not have, and those that are not finite, are left out.

    `simulated`: its clients are devices of a pool, so that it has a simulated time.
    """
    judged, wire = bool(record.get("samples")), record.get("wire", {})
    numbers = {
        "accuracy/personalised/clean": record["clean"] if judged else None,
        "accuracy/personalised/pgd": record["adversarial"] if judged else None,
        "training/loss": record.get("loss"),
        # Nothing is perturbed in the warm-up, whatever radius it ends with.
        "training/eps": record["epsilon"] * record["adversarial_training"] if "epsilon" in record else None,
        "training/alpha": record.get("alpha"),
        "training/module": record.get("module"),
        "training/stage_round": record.get("stage_round"),
        "time/seconds": seconds,
        "time/simulated_seconds": simulated_seconds([record])["total_s"] if simulated and record.get("times") else None,
        "clients/dropped_updates": len(record["dropped"]),
        "clients/lost_answers": fault_count([record]),
        "wire/sent_bytes": wire.get("sent"),
        "wire/received_bytes": wire.get("received"),
    }
    return {name: float(value) for name, value in numbers.items() if value is not None and math.isfinite(value)}


def closing_scalars(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the accuracies of a finished run's model, such as `final/global/pgd20`."""
    return {
        f"final/{kind}/{attack}": cell["accuracy"]
        for kind in KINDS
        for attack, cell in results.get(kind, {}).items()
        if cell["samples"]
    }
