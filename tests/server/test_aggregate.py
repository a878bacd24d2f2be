"""Which updates are used, what is noted of the others, and the model that comes of them."""

from dataclasses import replace

import pytest
import torch

from fedprophet.messages.answers import Trained
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import LocalTraining
from fedprophet.server.aggregate import Aggregator, split_usable, update_fault, weighted_mean

TRAINING = LocalTraining(1, 1, 0.1, 0.9, 0.0, 0.0)


def _update(client: int = 1, weight: float = 2.0, loss: float = 0.5, **parameters: torch.Tensor) -> Trained:
    return Trained(round=1, client=client, weight=weight, loss=loss, samples=8, parameters=parameters)


def _task(client: int, size: int = 2) -> Train:
    return Train(round=1, client=client, seed=0, training=TRAINING, parameters={"w": torch.zeros(size)})


TASK = _task(1)


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
        (_update(), "it did not send parameters that were asked for: ['w']"),
        (_update(w=torch.ones(2, dtype=torch.int64)), "w has type torch.int64 instead of torch.float32"),
        (_update(w=torch.ones(2, dtype=torch.bfloat16)), None),
        (_update(w=torch.ones(2)), None),
    ],
)
def test_what_cannot_be_averaged_is_named(update: Trained, reason: str | None) -> None:
    assert update_fault(TASK, update, {}) == reason


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_own_layers_that_are_not_finite_are_named(value: float) -> None:
    """Where a client sends its own layers too, they enter averages as well; their names need not be the task's."""
    update = _update(w=torch.ones(2))
    local = {"bn.running_mean": torch.tensor([0.0, 1.0]), "adversarial.bn.running_mean": torch.tensor([0.0, value])}
    assert update_fault(TASK, replace(update, local=local), {}) == "adversarial.bn.running_mean is not finite"
    assert update_fault(TASK, replace(update, local={"bn.running_mean": local["bn.running_mean"]}), {}) is None
    counter = {"bn.num_batches_tracked": torch.tensor(3)}
    assert update_fault(TASK, replace(update, local=counter), {}) is None


def test_usable_updates_keep_client_order() -> None:
    tasks = [_task(client, 1) for client in (5, 2, 8)]
    answers = [_update(8, w=torch.ones(1)), _update(5, w=torch.tensor([float("nan")])), _update(2, w=torch.ones(1))]
    usable, rejected = split_usable(tasks, answers)
    assert [update.client for _, update in usable] == [2, 8]
    assert rejected == {5: "w is not finite"}


def test_an_update_of_somebody_who_was_not_asked_is_named() -> None:
    usable, rejected = split_usable([TASK], [_update(4, w=torch.ones(2)), _update(1, w=torch.ones(2))])
    assert [update.client for _, update in usable] == [1]
    assert rejected == {4: "it was not asked"}
    assert split_usable([], [_update(1)]) == ([], {1: "it was not asked"})
    assert split_usable([TASK], []) == ([], {})


def test_layers_of_its_own_that_a_client_owes_are_checked() -> None:
    update = _update(w=torch.ones(2))
    asked = {"bn.mean": torch.zeros(2)}
    assert update_fault(TASK, update, asked) == "it did not send layers of its own that were asked for: ['bn.mean']"
    wrong = replace(update, local={"bn.mean": torch.ones(3)})
    assert update_fault(TASK, wrong, asked) == "bn.mean has shape (3,) instead of (2,)"
    right = replace(update, local={"bn.mean": torch.ones(2), "more": torch.ones(1)})
    assert update_fault(TASK, right, asked) is None
    whole = replace(update, local={"bn.mean": torch.ones(2, dtype=torch.int64)})
    assert update_fault(TASK, whole, asked) == "bn.mean has type torch.int64 instead of torch.float32"
    large = replace(update, local={"bn.mean": torch.full((2,), 1e300, dtype=torch.float64)})
    assert update_fault(TASK, large, asked) == "bn.mean is not finite in the model's type"
    usable, rejected = split_usable([TASK], [wrong], lambda task: asked if task is TASK else {})
    assert (usable, list(rejected)) == ([], [1])


def test_weighted_mean() -> None:
    assert weighted_mean([(1.0, 4.0), (3.0, 0.0)]) == 1.0
    # The mean of finite numbers is finite, though their sum is not.
    assert weighted_mean([(2.0**53, 1e308), (2.0**53, 1.5e308)]) == pytest.approx(1.25e308)


def test_the_largest_update_that_is_used_leaves_the_average_finite() -> None:
    large = torch.tensor([torch.finfo(torch.float32).max, 1.0], dtype=torch.float64)
    updates = [_update(client, 2.0**53, w=large) for client in (1, 2)]
    new = Aggregator().aggregate(TASK.parameters, [TASK, _task(2)], updates, record := {})
    assert record["dropped"] == {}
    assert new["w"].dtype == torch.float32
    assert new["w"].tolist() == [torch.finfo(torch.float32).max, 1.0]


def test_of_many_names_a_few_are_given() -> None:
    names = [f"n{number}" for number in range(7)]
    sent = {name: torch.zeros(1) for name in names}
    shown = "['n0', 'n1', 'n2', 'n3', 'n4'] and 2 more"
    assert (
        update_fault(TASK, _update(w=torch.ones(2), **sent), {})
        == f"it sent parameters that were not asked for: {shown}"
    )
    task = replace(TASK, parameters=sent)
    assert update_fault(task, _update(), {}) == f"it did not send parameters that were asked for: {shown}"
    reason = update_fault(replace(TASK, parameters={}), _update(), sent)
    assert reason == f"it did not send layers of its own that were asked for: {shown}"
    long = update_fault(TASK, _update(w=torch.ones(2), **{"x" * 10_000: torch.zeros(1), "y": torch.zeros(1)}), {})
    assert long == f"it sent parameters that were not asked for: ['{'x' * 59}…', 'y']"


def test_a_round_is_joined_and_noted() -> None:
    """Weights 1 and 3, losses 2 and 4; the third update is not finite."""
    updates = [_update(1, 1.0, 2.0, w=torch.tensor([4.0, 0.0])), _update(2, 3.0, 4.0, w=torch.tensor([0.0, 8.0]))]
    updates.append(_update(3, w=torch.tensor([1.0, float("nan")])))
    record: dict[str, object] = {"round": 1}
    new = Aggregator().aggregate(TASK.parameters, [_task(client) for client in (1, 2, 3)], updates, record)
    assert new["w"].tolist() == [1.0, 6.0]
    assert list(record.items()) == [("round", 1), ("dropped", {"3": "w is not finite"}), ("loss", 3.5)]


def test_too_few_usable_updates_change_nothing() -> None:
    update = _update(1, 1.0, 2.0, w=torch.ones(2))
    record: dict[str, object] = {}
    assert Aggregator(minimum=2).aggregate(TASK.parameters, [TASK], [update], record) is None
    assert record == {"dropped": {}, "loss": 2.0, "too_few": {"usable": 1, "minimum": 2}}
    record = {}
    assert Aggregator().aggregate(TASK.parameters, [TASK], [], record) is None
    assert record == {"dropped": {}, "loss": None}
