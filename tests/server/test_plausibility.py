"""Which updates and numbers are out of all proportion, by hand-computed sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from fedprophet.messages.answers import Trained
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import LocalTraining
from fedprophet.server.plausibility import implausible_updates, outliers

TRAINING = LocalTraining(1, 1, 0.1, 0.9, 0.0, 0.0)


def _pair(client: int, given: Sequence[float], sent: Sequence[float]) -> tuple[Train, Trained]:
    task = Train(round=1, client=client, seed=0, training=TRAINING, parameters={"w": torch.tensor(given)})
    return task, Trained(round=1, client=client, weight=1.0, loss=1.0, samples=8, parameters={"w": torch.tensor(sent)})


def test_an_update_of_a_hundred_times_the_usual_size_is_the_limit() -> None:
    """From 2 the clients go to 3, 1, 3, 101 and 104: sizes 1, 1, 1, 99 and 102."""
    pairs = [_pair(client, [2.0, 2.0], [w, w]) for client, w in enumerate((3.0, 1.0, 3.0, 101.0, 104.0))]
    assert implausible_updates(pairs) == {4: "its update is 102 times the median of all clients'"}


def test_clients_that_train_more_are_compared_by_each_parameter() -> None:
    """The norm of the last one is 150 times the others', since it trains 22,500 parameters."""
    pairs = [_pair(client, [0.0], [1.0]) for client in range(3)]
    assert implausible_updates([*pairs, _pair(3, [0.0] * 22_500, [1.0] * 22_500)]) == {}


def test_where_nobody_can_be_compared_the_model_is_the_measure() -> None:
    """Parameters of size 5 may move by 5,000, small ones by 1,000."""
    assert implausible_updates([_pair(0, [5.0, 5.0], [5000.0, 5000.0]), _pair(1, [0.1], [1000.0])]) == {}
    found = implausible_updates([_pair(0, [5.0, 5.0], [5010.0, 5010.0]), _pair(1, [0.0], [3e38])])
    assert found == {
        0: "its update moves parameters of size 5 by 5e+03",
        1: "its update moves parameters of size 0 by 3e+38",
    }


def test_one_number_of_many_is_enough() -> None:
    """√(3e38² / 10,000) = 3e36. The largest difference of two float32 numbers is infinite, and too much as well."""
    assert implausible_updates([_pair(0, [0.0] * 10_000, [3e38] + [0.0] * 9_999)]).keys() == {0}
    assert implausible_updates([_pair(0, [-3e38], [3e38])]).keys() == {0}


def test_layers_of_a_clients_own_are_compared_where_they_were_sent() -> None:
    pairs = [_pair(client, [0.0], [1.0]) for client in range(4)]
    sent = [
        (task, replace(u, local={"bn.running_var": torch.full((2,), 1e6 if u.client == 2 else 1.0)}))
        for task, u in pairs
    ]
    assert implausible_updates(sent) == {
        2: "the layers of its own that it sent are 1e+06 times the median of all clients'"
    }


def test_numbers_of_any_type_have_a_size() -> None:
    pairs = [_pair(client, [0.0], [1.0]) for client in range(4)]
    types = (torch.float64, torch.bfloat16, torch.float16, torch.float32)
    sent = [(t, replace(u, parameters={"w": torch.ones(1, dtype=d)})) for (t, u), d in zip(pairs, types, strict=True)]
    assert implausible_updates(sent) == {}


def test_clients_that_learnt_nothing_are_no_measure() -> None:
    assert implausible_updates([_pair(client, [1.0], [1.0 + client // 4]) for client in range(5)]) == {}
    assert implausible_updates([]) == {}


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ({1: 2.0, 2: 2.0, 3: 200.0}, {}),
        ({1: 2.0, 2: 2.0, 3: 201.0}, {3: "100 times the median of all clients'"}),
        ({1: 2.0, 2: 2.0, 3: 0.02}, {}),
        ({1: 2.0, 2: 2.0, 3: 0.0}, {3: "0 times the median of all clients'"}),
        ({1: 2.0, 3: 1e30}, {}),
    ],
)
def test_numbers_far_from_the_median_need_a_majority_that_says_so(
    numbers: Mapping[int, float], found: Mapping[int, str]
) -> None:
    assert outliers(numbers) == found
