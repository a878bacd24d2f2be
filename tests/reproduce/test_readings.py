"""What experiments read from a finished run, against its journal and results."""

import json
import math
from typing import Any

import pytest

from fedprophet.reproduce import readings
from fedprophet.reproduce.runs import FinishedRun
from fedprophet.runs.play import play
from fedprophet.runs.run import start

QUICK = {"rounds": 2, "train.iterations": 1, "evaluate.clients": 2, "evaluate.test_samples": 20, "measure.clients": 2}


@pytest.fixture(scope="module")
def run(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[FinishedRun, Any, list[Any]]:
    """Return a finished cascade of three modules, its session and its journal."""
    path = tmp_path_factory.mktemp("readings") / "run"
    started = start(tiny(QUICK), path)
    play(started)
    journal = [json.loads(line) for line in (path / "journal.jsonl").read_text().splitlines()]
    return FinishedRun(path), started.session, journal


def test_accuracies_in_percent(run: tuple[FinishedRun, Any, list[Any]]) -> None:
    found, _, _ = run
    results = json.loads((found.path / "results.json").read_text())
    assert readings.best_clean(found) == 100 * results["best"]["clean"]
    assert readings.best_pgd(found) == 100 * results["best"]["adversarial"]
    assert readings.accuracy("global", "pgd")(found) == 100 * results["global"]["pgd2"]["accuracy"]
    assert readings.accuracy("personalised", "clean")(found) == 100 * results["personalised"]["clean"]["accuracy"]
    assert readings.accuracy("personalised", "autoattack")(found) is None


def test_costs_and_the_first_magnitude(run: tuple[FinishedRun, Any, list[Any]]) -> None:
    found, _, journal = run
    assert readings.modules(found) == 3
    tasks = [time["memory_bytes"] for record in journal for time in record["times"].values()]
    assert readings.smallest_task(found) == min(tasks) / 1e6
    first = next(record["fixed"] for record in journal if "fixed" in record)
    assert first["module"] == 1
    assert readings.first_magnitude(found) == first["magnitude"] > 0


def test_the_perturbation_per_dimension(run: tuple[FinishedRun, Any, list[Any]]) -> None:
    found, session, _ = run
    modules, atoms = session.world.modules, session.world.cost.atoms
    features = math.prod(atoms[modules[0].last - 1].output[1:])
    magnitude = readings.first_magnitude(found)
    assert magnitude is not None
    second = readings.stages(found)["module 2"]
    assert second["alpha, first"].mean == 0.3
    assert second["magnitude, first"].mean == pytest.approx(0.3 * magnitude / math.sqrt(features))
    images = readings.stages(found)["module 1"]
    assert "alpha, first" not in images
    assert images["magnitude, last"].mean == 0.1  # eps on images, which is one for each pixel
    curve = readings.perturbation_curve(found)
    assert curve.x == tuple(range(1, 7))
    assert curve.y[:3] == (0.1, 0.1, second["magnitude, first"].mean)
    assert curve.borders == (2, 4)
