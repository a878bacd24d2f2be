"""The recorded prices of memory budgets: pages are drawn from what was measured, and it keeps to what is promised."""

import json
from pathlib import Path
from typing import Any

import memory
import pytest
from memory_price.pages import page

from fedprophet.display.tables import markdown

RESULTS = Path(memory.__file__).parent / "results"
BARS = {"vgg16": 60 * 10**6, "resnet34": 224 * 10**6}
"""The budgets that both models have to keep, with seven modules each."""
LONGEST, FURTHEST, ROUNDED = 2.0, 1e-5, 1e-10
"""How many times as long as plainly an iteration may take, and how far an exact update may be from the plain one: in
float32, where an attack multiplies what rounding changes, and in float64."""
TURNED = {"memory": {}, "memory-h200": {("resnet34", 5)}}
"""The modules whose attack turned signs of gradients next to nothing, so that they are further apart in float32."""


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["memory", "memory-h200"])
def test_a_page_has_the_numbers_that_were_measured(name: str) -> None:
    assert (RESULTS / f"{name}.md").read_text() == markdown(page(_read(name)))


@pytest.mark.parametrize("name", ["memory", "memory-h200"])
def test_every_module_was_measured_within_its_budget(name: str) -> None:
    for model, budget in BARS.items():
        found = {entry["budget_bytes"]: entry["modules"] for entry in _read(name)["models"][model]["budgets"]}
        assert len(found[budget]) == 7
        for limit, modules in found.items():
            assert all(module["measured_bytes"] <= limit for module in modules)
        for module in found[budget]:
            assert module["planned_seconds"] <= LONGEST * module["plain_seconds"]


def test_on_a_cpu_predictions_are_measured() -> None:
    for model in BARS:
        for entry in _read("memory")["models"][model]["budgets"]:
            for module in entry["modules"]:
                assert module["measured_bytes"] == pytest.approx(module["predicted_bytes"], rel=0.05)


@pytest.mark.parametrize("name", ["memory", "memory-h200"])
def test_updates_are_the_plain_ones(name: str) -> None:
    for model, budget in BARS.items():
        found = {entry["budget_bytes"]: entry["modules"] for entry in _read(name)["models"][model]["budgets"]}
        far = {(model, module["module"]) for module in found[budget] if module["difference"] > FURTHEST}
        assert far == {each for each in TURNED[name] if each[0] == model}
        assert all(module["difference_in_float64"] <= ROUNDED for module in found[budget])
        for modules in found.values():
            assert all((module.get("difference_in_float64") or 0) <= ROUNDED for module in modules)
