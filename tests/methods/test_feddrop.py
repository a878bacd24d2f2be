"""FedDrop: channels drawn anew for each client and round."""

from collections import Counter
from itertools import chain

import pytest


@pytest.fixture(scope="module")
def small(four_channels):
    return four_channels("feddrop")


def kept_by(task):
    return tuple(tuple(channels.tolist()) for channels in task.kept_channels.values())


def test_the_draw_depends_on_client_and_round_alone(small, four_channels):
    """Whoever else takes part, and however often it is asked."""
    drawn = [kept_by(task) for task in small.tasks(4, {0: 0.5, 1: 0.5, 2: 0.75})]
    again = four_channels("feddrop")
    assert [kept_by(again.tasks(4, {client: r})[0]) for client, r in ((0, 0.5), (1, 0.5), (2, 0.75))] == drawn
    assert [len(kept[0]) for kept in drawn] == [2, 2, 3]


def test_clients_and_rounds_differ(small):
    one_round = [kept_by(task) for task in small.tasks(1, dict.fromkeys(range(20), 0.5))]
    one_client = [kept_by(small.tasks(number, {0: 0.5})[0]) for number in range(1, 21)]
    for draws in (one_round, one_client):
        assert all(kept[0] == tuple(sorted(set(kept[0]))) for kept in draws)
        assert len(set(draws)) == 6, "all six pairs of four channels turn up in twenty draws"


def test_all_channels_are_as_likely(small):
    draws = [kept_by(task)[0] for task in small.tasks(1, dict.fromkeys(range(400), 0.5))]
    counts = Counter(chain.from_iterable(draws))
    assert set(counts) == {0, 1, 2, 3}
    assert all(abs(count - 200) < 50 for count in counts.values())  # five standard deviations


def test_another_seed_draws_others(half_width):
    kept = [[kept_by(task) for task in half_width("feddrop", 1, seed)] for seed in (0, 0, 1)]
    assert kept[0] == kept[1] != kept[2]
    assert len(set(kept[0])) == 6
    layers = kept[0][0]
    assert [len(channels) for channels in layers] == [2, 3, 4, 8, 8, 8, 8]
    assert len(set(layers[3:])) == 4, "each group has a draw of its own"


def test_average_by_hand(small):
    """Each channel is averaged over the clients that drew it."""
    tasks = small.tasks(2, {0: 0.5, 1: 0.75})
    mine, theirs = (task.kept_channels["0"].tolist() for task in tasks)
    new = small.joined(
        tasks,
        [1.0, 3.0],
        [
            {"0.weight": [1, 2], "2.weight": [[1, 2], [3, 4]], "2.bias": [2, 6]},
            {"0.weight": [5, 6, 7], "2.weight": [[5, 6, 7], [7, 8, 9]], "2.bias": [10, 2]},
        ],
    )

    def average(old, one, three):
        found = []
        for channel in range(4):
            terms = [(1, one[mine.index(channel)])] if channel in mine else []
            terms += [(3, three[theirs.index(channel)])] if channel in theirs else []
            weight = sum(q for q, _ in terms)
            found.append(sum(q * value for q, value in terms) / weight if terms else old[channel])
        return found

    assert new["0.weight"] == average([10, 20, 30, 40], [1, 2], [5, 6, 7])
    first, second = average([10, 20, 30, 40], [1, 2], [5, 6, 7]), average([-10, -20, -30, -40], [3, 4], [7, 8, 9])
    assert new["2.weight"] == first + second
    assert new["2.bias"] == [32 / 4, 12 / 4]
    assert new["0.bias"] == [0.5] * 4, "nobody sent it"
