"""Eq. 16 and 17 against hand-computed numbers, and which updates are refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprophet.messages.task import ClientTask, ClientUpdate
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


def test_what_nobody_has_yet_comes_in_as_it_was_sent() -> None:
    """Two of three clients send a name that the current state lacks: its mean is over those two, in their type."""
    half = torch.tensor([1.0, 4.0], dtype=torch.float16)
    updates = [(1.0, {"w": _t(2.0), "new": half}), (9.0, {"w": _t(4.0)}), (3.0, {"w": _t(4.0), "new": 2 * half})]
    new = partial_average({"w": _t(0.0)}, updates)
    assert set(new) == {"w", "new"}
    assert new["new"].tolist() == [7 / 4, 28 / 4]
    assert new["new"].dtype == torch.float16
    assert torch.equal(new["w"], _t((2 + 36 + 12) / 13))
    assert list(partial_average({}, [(2.0, {"a": _t(3.0)})])) == ["a"]


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
        (_update(weight=float("inf"), w=torch.ones(2)), "its weight is inf"),
        (_update(weight=float("nan"), w=torch.ones(2)), "its weight is nan"),
        (_update(weight=-1.0, w=torch.ones(2)), "its weight is -1.0"),
        (_update(weight=1e308, w=torch.ones(2)), "its weight is 1e+308"),
        (_update(weight=2.0**54, w=torch.ones(2)), "its weight is 1.8014398509481984e+16"),
        (_update(weight=2.0**53, w=torch.ones(2)), None),
        (_update(loss=1e300, w=torch.ones(2)), None),
        (_update(w=torch.tensor([1.0, 1e300], dtype=torch.float64)), "w is not finite in the model's type"),
        (_update(w=torch.tensor([1.0, 3e38], dtype=torch.float64)), None),
        (_update(w=torch.tensor([1.0, 3e38], dtype=torch.bfloat16)), None),
        (replace(_update(w=torch.ones(2)), metrics={}), "it has no loss"),
        (_update(), "it lacks parameters that were asked for: ['w']"),
        (_update(w=torch.ones(2, dtype=torch.int64)), "w has type torch.int64 instead of torch.float32"),
        (_update(w=torch.ones(2, dtype=torch.bfloat16)), None),
        (_update(w=torch.ones(2)), None),
    ],
)
def test_what_cannot_be_averaged_is_named(update: ClientUpdate, reason: str | None) -> None:
    assert fault(TASK, update) == reason


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_own_layers_that_are_not_finite_are_named(value: float) -> None:
    """Where a client sends its own layers too, they enter averages as well; their names need not be the task's."""
    update = _update(w=torch.ones(2))
    local = {"bn.running_mean": torch.tensor([0.0, 1.0]), "adversarial.bn.running_mean": torch.tensor([0.0, value])}
    assert fault(TASK, replace(update, local=local)) == "adversarial.bn.running_mean is not finite"
    assert fault(TASK, replace(update, local={"bn.running_mean": local["bn.running_mean"]})) is None
    counter = {"bn.num_batches_tracked": torch.tensor(3)}
    assert fault(TASK, replace(update, local=counter)) is None


def test_sift_keeps_client_order() -> None:
    tasks = [ClientTask("train", 1, client, 0, parameters={"w": torch.zeros(1)}) for client in (5, 2, 8)]
    answers = [_update(8, w=torch.ones(1)), _update(5, w=torch.tensor([float("nan")])), _update(2, w=torch.ones(1))]
    usable, dropped = sift(tasks, answers)
    assert [update.client for update in usable] == [2, 8]
    assert dropped == {5: "w is not finite"}


def test_an_update_of_somebody_who_was_not_asked_is_named() -> None:
    usable, dropped = sift([TASK], [_update(4, w=torch.ones(2)), _update(1, w=torch.ones(2))])
    assert [update.client for update in usable] == [1]
    assert dropped == {4: "it was not asked"}
    assert sift([], [_update(1)]) == ([], {1: "it was not asked"})
    assert sift([TASK], []) == ([], {})


def test_layers_of_its_own_that_a_client_owes_are_checked() -> None:
    update = _update(w=torch.ones(2))
    asked = {"bn.mean": torch.zeros(2)}
    assert fault(TASK, update, asked) == "it lacks layers of its own that were asked for: ['bn.mean']"
    wrong = replace(update, local={"bn.mean": torch.ones(3)})
    assert fault(TASK, wrong, asked) == "bn.mean has shape (3,) instead of (2,)"
    right = replace(update, local={"bn.mean": torch.ones(2), "more": torch.ones(1)})
    assert fault(TASK, right, asked) is None
    whole = replace(update, local={"bn.mean": torch.ones(2, dtype=torch.int64)})
    assert fault(TASK, whole, asked) == "bn.mean has type torch.int64 instead of torch.float32"
    large = replace(update, local={"bn.mean": torch.full((2,), 1e300, dtype=torch.float64)})
    assert fault(TASK, large, asked) == "bn.mean is not finite in the model's type"
    usable, dropped = sift([TASK], [wrong], lambda task: asked if task is TASK else {})
    assert (usable, list(dropped)) == ([], [1])


def test_mean_metric_is_weighted() -> None:
    assert mean_metric([_update(weight=1.0, loss=4.0), _update(weight=3.0, loss=0.0)], "loss") == 1.0


def test_the_mean_of_finite_numbers_is_finite() -> None:
    updates = [_update(weight=2.0**53, loss=1e308), _update(weight=2.0**53, loss=1.5e308)]
    assert mean_metric(updates, "loss") == pytest.approx(1.25e308)


def test_the_largest_update_that_is_used_leaves_the_average_finite() -> None:
    large = torch.tensor([torch.finfo(torch.float32).max, 1.0], dtype=torch.float64)
    updates = [_update(client, 2.0**53, w=large) for client in (1, 2)]
    usable, dropped = sift([TASK, replace(TASK, client=2)], updates)
    assert dropped == {}
    new = partial_average(TASK.parameters, [(update.weight, update.parameters) for update in usable])["w"]
    assert new.dtype == torch.float32
    assert new.tolist() == [torch.finfo(torch.float32).max, 1.0]


def test_of_many_names_a_few_are_given() -> None:
    names = [f"n{number}" for number in range(7)]
    sent = {name: torch.zeros(1) for name in names}
    shown = "['n0', 'n1', 'n2', 'n3', 'n4'] and 2 more"
    assert fault(TASK, _update(w=torch.ones(2), **sent)) == f"it sent parameters that were not asked for: {shown}"
    task = replace(TASK, parameters=sent)
    assert fault(task, _update()) == f"it lacks parameters that were asked for: {shown}"
    reason = fault(replace(TASK, parameters={}), _update(), sent)
    assert reason == f"it lacks layers of its own that were asked for: {shown}"
    long = fault(TASK, _update(w=torch.ones(2), **{"x" * 10_000: torch.zeros(1), "y": torch.zeros(1)}))
    assert long == f"it sent parameters that were not asked for: ['{'x' * 59}…', 'y']"
