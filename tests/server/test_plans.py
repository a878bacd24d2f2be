"""What clients say about the memory they took: noted, or not believed."""

from typing import Any

import pytest

from fedprophet.messages.answers import Trained
from fedprophet.runs.journal import journal_line
from fedprophet.server.plans import LONGEST_PLAN, note_plans


def _update(client: int, **more: Any) -> Trained:
    return Trained(round=1, client=client, weight=1.0, loss=0.5, samples=3, **more)


def test_plan_peak_and_limit_of_each_client_are_noted() -> None:
    updates = [_update(3, plan="attack 8 at a time", peak=70), _update(12, plan="plain", peak=100)]
    record: dict[str, Any] = {"round": 1}
    assert note_plans(updates, {3: 80, 12: 100}, record) == updates
    assert record["plans"] == {
        "3": {"plan": "attack 8 at a time", "peak_bytes": 70, "limit_bytes": 80},
        "12": {"plan": "plain", "peak_bytes": 100, "limit_bytes": 100},
    }
    assert "dropped" not in record


@pytest.mark.parametrize("peak", [-1, 101, 2**63])
def test_a_peak_that_cannot_be_is_not_believed(peak: int) -> None:
    record: dict[str, Any] = {"round": 1}
    sound = _update(1, plan="plain", peak=100)
    assert note_plans([sound, _update(2, plan="plain", peak=peak)], {1: 100, 2: 100}, record) == [sound]
    assert list(record["plans"]) == ["1"]
    assert record["dropped"] == {"2": f"it took {peak} bytes of the 100 that it may"}


def test_text_from_a_client_is_harmless_and_short(steering: str) -> None:
    record: dict[str, Any] = {"round": 1}
    note_plans([_update(1, plan=steering + "x" * 10**5, peak=1)], {1: 100}, record)
    text = record["plans"]["1"]["plan"]
    assert text.isprintable()
    assert len(text) <= LONGEST_PLAN
    journal_line(record)
