"""What clients report about their devices, and which numbers are impossible."""

import math

import pytest

from fedprophet.messages.answers import Reported
from fedprophet.messages.values import Resources
from fedprophet.server.resources import available_resources

GOOD = Resources(10**6, 1e9, 1e9)


def _report(client: int, resources: Resources | None) -> Reported:
    return Reported(round=1, client=client, weight=1.0, resources=resources)


def test_a_report_without_numbers_is_left_out() -> None:
    record: dict[str, object] = {}
    assert available_resources([_report(1, GOOD), _report(2, None)], record) == {1: GOOD}
    assert record == {}


@pytest.mark.parametrize(
    "resources",
    [
        Resources(-1, 1e9, 1e9),
        Resources(0, 1e9, 1e9),
        Resources(10**400, 1e9, 1e9),
        Resources(10**6, 0.0, 1e9),
        Resources(10**6, 1e9, 5e-324),
        Resources(10**6, math.nan, 1.0),
        Resources(10**6, math.inf, 1.0),
    ],
)
def test_impossible_numbers_are_rejected(resources: Resources) -> None:
    record: dict[str, object] = {}
    assert available_resources([_report(1, GOOD), _report(2, resources)], record) == {1: GOOD}
    assert record == {"dropped": {"2": f"it reported {resources}"}}
