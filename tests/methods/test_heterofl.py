"""HeteroFL: the first channels, whoever and whenever."""

import pytest


@pytest.fixture(scope="module")
def small(four_channels):
    return four_channels("heterofl")


def test_the_first_channels_are_kept_in_every_round(small):
    for number in (1, 2, 7):
        tasks = small.tasks(number, {0: 0.5, 1: 0.75, 2: 1.0, 3: 0.1})
        assert [task.kept_channels["0"].tolist() for task in tasks] == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0]]
        assert [task.parameters["2.weight"].tolist()[1] for task in tasks] == [
            [-10, -20],
            [-10, -20, -30],
            [-10, -20, -30, -40],
            [-10],
        ]


def test_average_by_hand(small):
    """Client 0 (q = 1) has channels 0 and 1, client 1 (q = 3) has 0, 1 and 2; nobody has channel 3."""
    tasks = small.tasks(1, {0: 0.5, 1: 0.75})
    new = small.joined(
        tasks,
        [1.0, 3.0],
        [
            {"0.weight": [1, 2], "0.bias": [0, 4], "2.weight": [[1, 2], [3, 4]], "2.bias": [2, 6]},
            {"0.weight": [5, 6, 7], "0.bias": [4, 0, 9], "2.weight": [[5, 6, 7], [7, 8, 9]], "2.bias": [10, 2]},
        ],
    )
    assert new == {
        "0.weight": [16 / 4, 20 / 4, 7, 40],
        "0.bias": [12 / 4, 4 / 4, 9, 0.5],
        "2.weight": [16 / 4, 20 / 4, 7, 40, 24 / 4, 28 / 4, 9, -40],
        "2.bias": [32 / 4, 12 / 4],
    }
