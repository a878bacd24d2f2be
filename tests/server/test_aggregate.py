"""Which updates are used, what is noted of the others, and the model that comes of them."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from fedprophet.messages.answers import Trained
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import LocalTraining
from fedprophet.server.aggregate import Aggregator, split_usable, update_fault
from fedprophet.server.rules import RULES
from fedprophet.server.rules.clip import ClipSettings, clip
from fedprophet.server.rules.registry import Join, Parameters

TRAINING = LocalTraining(1, 1, 0.1, 0.9, 0.0, 0.0)


def _update(client: int = 1, weight: float = 2.0, loss: float = 0.5, **parameters: torch.Tensor) -> Trained:
    return Trained(round=1, client=client, weight=weight, loss=loss, samples=8, parameters=parameters)


def _task(client: int, size: int = 2) -> Train:
    return Train(round=1, client=client, seed=0, training=TRAINING, parameters={"w": torch.zeros(size)})


TASK = _task(1)


def no_layers(task: Train) -> Parameters:
    return {}


def aggregate(aggregator, current, tasks, updates, record):
    """Return the parameters after a round; None where too few updates can be used."""
    usable = aggregator.usable(tasks, updates, record, no_layers)
    return aggregator.join_updates(current, usable) if usable else None


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
        (_update(weight=0.5, w=torch.ones(2)), "its weight is 0.5"),
        (_update(weight=5e-324, w=torch.ones(2)), "its weight is 5e-324"),
        (_update(loss=1e300, w=torch.ones(2)), "its loss is 1e+300"),
        (_update(loss=-1e30, w=torch.ones(2)), None),
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
    usable, rejected = split_usable(tasks, answers, no_layers)
    assert [update.client for _, update in usable] == [2, 8]
    assert rejected == {5: "w is not finite"}


def test_an_update_of_somebody_who_was_not_asked_is_named() -> None:
    usable, rejected = split_usable([TASK], [_update(4, w=torch.ones(2)), _update(1, w=torch.ones(2))], no_layers)
    assert [update.client for _, update in usable] == [1]
    assert rejected == {4: "it was not asked"}
    assert split_usable([], [_update(1)], no_layers) == ([], {1: "it was not asked"})
    assert split_usable([TASK], [], no_layers) == ([], {})


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


def test_what_cannot_be_negative_is_named() -> None:
    """A negative variance is finite, and the root of it is not."""
    update = replace(_update(w=torch.ones(2)), local={"bn.running_var": torch.tensor([1.0, -1e-9])})
    assert update_fault(TASK, update, {}) == "bn.running_var is negative"
    update = replace(update, local={"bn.running_var": torch.ones(2), "bn.num_batches_tracked": torch.tensor(-1)})
    assert update_fault(TASK, update, {}) == "bn.num_batches_tracked is negative"
    assert update_fault(TASK, replace(update, local={"bn.running_mean": torch.tensor([-1.0])}), {}) is None


@pytest.mark.parametrize(
    ("rule", "joined"),
    [
        ("mean", ((1 * 2 + 1 * 3 + 2 * 10.0) / 4, (5 + 5 + 2 * 9) / 4)),
        # From the medians 3 and 5 the distances are 1, 0 and √(7² + 4²): no number counts as further away than 1.
        ("clip", ((2 + 3 + 2 * (3 + 7 / 65**0.5)) / 4, (5 + 5 + 2 * (5 + 4 / 65**0.5)) / 4)),
        ("median", (3.0, 5.0)),
    ],
)
def test_numbers_are_joined_by_the_rule(rule: str, joined: tuple[float, float]) -> None:
    entry = RULES[rule]
    aggregator = Aggregator(entry.function, numbers=entry.numbers)
    assert aggregator.join_numbers([(1, (2.0, 5.0)), (1, (3.0, 5.0)), (2, (10.0, 9.0))]) == pytest.approx(joined)


def test_the_largest_norm_of_an_update_is_not_one_of_numbers() -> None:
    """With `clip.norm` numbers around 1000 would otherwise count as 3 at most."""
    join: Join = partial(clip, settings=ClipSettings(norm=3.0))
    aggregator = Aggregator(join, numbers=RULES["clip"].numbers)
    assert aggregator.join_numbers([(1, (1000.0,)), (1, (1000.0,)), (1, (1000.0,))]) == (1000.0,)


def test_a_client_counts_for_no_more_than_the_server_can_know() -> None:
    """Of the claims 1, 3 and 2⁵³ the median is 3; where shards are known, a claim is cut to the size of its own."""
    updates = [_update(1, 1.0, w=torch.tensor([8.0, 0.0])), _update(2, 3.0, w=torch.tensor([0.0, 8.0]))]
    updates.append(_update(3, 2.0**53, w=torch.tensor([8.0, 8.0])))
    tasks = [_task(client) for client in (1, 2, 3)]
    new = aggregate(Aggregator(), TASK.parameters, tasks, updates, record := {})
    assert new["w"].tolist() == pytest.approx([8 * 4 / 7, 8 * 6 / 7])
    assert record["capped"] == {"3": 2.0**53}
    known = aggregate(Aggregator(sizes={1: 1, 2: 4, 3: 4}.get), TASK.parameters, tasks, updates, {})
    assert known["w"].tolist() == [8 * 5 / 8, 8 * 7 / 8]


def test_an_update_out_of_all_proportion_is_not_used() -> None:
    updates = [_update(client, w=torch.full((2,), size)) for client, size in enumerate((1.0, 1.0, 4.0, 3e38))]
    new = aggregate(Aggregator(), TASK.parameters, [_task(client) for client in range(4)], updates, record := {})
    assert new["w"].tolist() == [2.0, 2.0]
    assert record["dropped"] == {"3": "its update moves parameters of size 0 by 3e+38"}


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
    believing = Aggregator(sizes=lambda client: 3)
    updates = [_update(1, 1.0, 2.0, w=torch.tensor([4.0, 0.0])), _update(2, 3.0, 4.0, w=torch.tensor([0.0, 8.0]))]
    updates.append(_update(3, w=torch.tensor([1.0, float("nan")])))
    record: dict[str, object] = {"round": 1}
    new = aggregate(believing, TASK.parameters, [_task(client) for client in (1, 2, 3)], updates, record)
    assert new["w"].tolist() == [1.0, 6.0]
    assert list(record.items()) == [("round", 1), ("dropped", {"3": "w is not finite"}), ("loss", 3.5)]


def test_too_few_usable_updates_change_nothing() -> None:
    update = _update(1, 1.0, 2.0, w=torch.ones(2))
    record: dict[str, object] = {}
    assert aggregate(Aggregator(minimum=2), TASK.parameters, [TASK], [update], record) is None
    assert record == {"dropped": {}, "loss": 2.0, "too_few": {"usable": 1, "minimum": 2}}
    record = {}
    assert aggregate(Aggregator(), TASK.parameters, [TASK], [], record) is None
    assert record == {"dropped": {}, "loss": None}
