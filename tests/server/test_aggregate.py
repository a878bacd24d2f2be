"""Eq. 16 and 17 against hand-computed numbers, and which updates are refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprophet.client.task import ClientTask, ClientUpdate
from fedprophet.server.aggregate import fault, mean_metric, partial_average, sift


def _t(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_each_parameter_is_averaged_over_those_who_trained_it() -> None:
    """Client 1 (q = 1) trains module 1, clients 2 (q = 3) and 3 (q = 4) modules 1 and 2; heads go to their own."""
    current = {"w1": _t(0, 0), "w2": _t(9.0), "w3": _t(7.0), "heads.0.bias": _t(5.0), "heads.1.bias": _t(6.0)}
    updates = [
        (1.0, {"w1": _t(8, 0), "heads.0.bias": _t(1.0)}),
        (3.0, {"w1": _t(0, 8), "w2": _t(1.0), "heads.1.bias": _t(2.0)}),
        (4.0, {"w1": _t(4, 4), "w2": _t(8.0), "heads.1.bias": _t(9.0)}),
    ]
    new = partial_average(current, updates)
    assert torch.equal(new["w1"], _t(24 / 8, 40 / 8))
    assert torch.equal(new["w2"], _t(35 / 7))
    assert torch.equal(new["w3"], _t(7.0))
    assert torch.equal(new["heads.0.bias"], _t(1.0))
    assert torch.equal(new["heads.1.bias"], _t(42 / 7))
    assert torch.equal(current["w1"], _t(0, 0)), "the old state must not change"


def test_no_update_changes_nothing() -> None:
    current = {"w": _t(1.0, 2.0)}
    assert torch.equal(partial_average(current, [])["w"], current["w"])


def test_types_are_kept() -> None:
    new = partial_average({"n": torch.tensor(5)}, [(1.0, {"n": torch.tensor(3)}), (1.0, {"n": torch.tensor(6)})])
    assert new["n"].dtype == torch.int64
    assert int(new["n"]) == 4


@given(st.lists(st.tuples(st.floats(0.5, 50), st.floats(-5, 5)), min_size=1, max_size=6))
def test_an_average_lies_between_its_terms(pairs: list[tuple[float, float]]) -> None:
    new = partial_average({"w": _t(100.0)}, [(q, {"w": _t(v)}) for q, v in pairs])
    low, high = min(v for _, v in pairs), max(v for _, v in pairs)
    assert low - 1e-5 <= float(new["w"]) <= high + 1e-5


def _update(client: int = 1, weight: float = 2.0, loss: float = 0.5, **parameters: torch.Tensor) -> ClientUpdate:
    return ClientUpdate("train", 1, client, weight, {"loss": loss}, parameters=parameters)


TASK = ClientTask("train", 1, 1, 0, parameters={"w": torch.zeros(2)})


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (_update(loss=float("nan"), w=torch.ones(2)), "its loss is nan"),
        (_update(loss=float("inf"), w=torch.ones(2)), "its loss is inf"),
        (_update(w=torch.tensor([1.0, float("nan")])), "w is not finite"),
        (_update(w=torch.tensor([1.0, float("-inf")])), "w is not finite"),
        (_update(w=torch.ones(3)), "w has shape (3,) instead of (2,)"),
        (_update(v=torch.ones(2)), "it sent parameters that were not asked for: ['v']"),
        (_update(weight=0.0, w=torch.ones(2)), "its weight is 0.0"),
        (_update(w=torch.ones(2)), None),
    ],
)
def test_what_cannot_be_averaged_is_named(update: ClientUpdate, reason: str | None) -> None:
    assert fault(TASK, update) == reason


def test_sift_keeps_client_order() -> None:
    tasks = [ClientTask("train", 1, client, 0, parameters={"w": torch.zeros(1)}) for client in (5, 2, 8)]
    answers = [_update(8, w=torch.ones(1)), _update(5, w=torch.tensor([float("nan")])), _update(2, w=torch.ones(1))]
    usable, dropped = sift(tasks, answers)
    assert [update.client for update in usable] == [2, 8]
    assert dropped == {5: "w is not finite"}


def test_mean_metric_is_weighted() -> None:
    assert mean_metric([_update(weight=1.0, loss=4.0), _update(weight=3.0, loss=0.0)], "loss") == 1.0
