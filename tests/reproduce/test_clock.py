"""The clock without training: the same seconds as those in the journal of a run that trains."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedprophet.config.load import load_config
from fedprophet.reproduce.clock import round_time
from fedprophet.runs.summary import simulated_seconds

KEPT = Path(__file__).parents[2] / "benchmarks/results/cifar10/balanced-jfat-seed0"


@pytest.mark.parametrize("method", ["jfat", "fedprophet", "heterofl", "feddf", "fedrbn"])
def test_the_clock_of_a_run(method: str, tiny: Any, play_in_memory: Callable[..., Any]) -> None:
    quick = {"method": method, "evaluate.clients": 2, "measure.clients": 2, "distillation.iterations": 1}
    config = tiny({**quick, "convergence.patience": 2, "evaluate.every": 3})
    records = play_in_memory(config).records
    found = round_time(config, config.rounds)
    assert found.rounds == len(records)
    seconds = simulated_seconds(records)
    assert found.computation * found.rounds == pytest.approx(seconds["computation_s"], rel=1e-12)
    assert found.access * found.rounds == pytest.approx(seconds["access_s"], rel=1e-12)


@pytest.mark.slow
def test_the_clock_of_a_kept_run_on_cifar10() -> None:
    """500 rounds of jFAT took 242,159 simulated seconds; no image is needed to know that."""
    kept = json.loads((KEPT / "results.json").read_text())["simulated"]["total_s"]
    found = round_time(load_config("cifar10-balanced", ["method=jfat"]), 500)
    assert found.total * 500 == pytest.approx(kept, rel=1e-9)
