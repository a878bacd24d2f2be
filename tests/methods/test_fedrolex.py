"""FedRolex: a window that starts at the round mod the width, and wraps around."""

import pytest


@pytest.fixture(scope="module")
def small(four_channels):
    return four_channels("fedrolex")


def test_the_window_rolls_on_with_the_rounds_and_wraps_around(small):
    kept = {
        number: [t.kept_channels["0"].tolist() for t in small.tasks(number, {0: 0.5, 1: 0.75})]
        for number in range(1, 6)
    }
    assert kept == {
        1: [[1, 2], [1, 2, 3]],
        2: [[2, 3], [0, 2, 3]],
        3: [[0, 3], [0, 1, 3]],
        4: [[0, 1], [0, 1, 2]],
        5: [[1, 2], [1, 2, 3]],
    }
    wrapped = small.tasks(3, {0: 0.5})[0].parameters
    assert wrapped["0.weight"].flatten().tolist() == [10, 40]
    assert wrapped["2.weight"].tolist() == [[10, 40], [-10, -40]]


def test_each_group_rolls_over_its_own_width(half_width):
    """In round 5 the window of a layer with 4 channels starts at 1, that of one with 6 at 5, of one with 16 at 5."""
    eight = list(range(5, 13))
    for task in half_width("fedrolex", 5):
        kept = [channels.tolist() for channels in task.kept_channels.values()]
        assert kept == [[1, 2], [0, 1, 5], [0, 5, 6, 7], eight, eight, eight, eight]


def test_average_by_hand(small):
    """In round 3 client 0 (q = 1) has channels 3 and 0, client 1 (q = 3) has 3, 0 and 1; nobody has channel 2."""
    tasks = small.tasks(3, {0: 0.5, 1: 0.75})
    new = small.joined(
        tasks,
        [1.0, 3.0],
        [
            {"0.weight": [1, 2], "0.bias": [0, 4], "2.weight": [[1, 2], [3, 4]], "2.bias": [2, 6]},
            {"0.weight": [5, 6, 7], "0.bias": [4, 0, 9], "2.weight": [[5, 6, 7], [7, 8, 9]], "2.bias": [10, 2]},
        ],
    )
    assert new == {
        "0.weight": [16 / 4, 6, 30, 23 / 4],
        "0.bias": [12 / 4, 0, 0.5, 31 / 4],
        "2.weight": [16 / 4, 6, 30, 23 / 4, 24 / 4, 8, -30, 31 / 4],
        "2.bias": [32 / 4, 12 / 4],
    }
