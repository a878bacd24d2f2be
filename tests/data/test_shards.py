import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedprophet.data import load
from fedprophet.data.shards import KINDS, ShardSettings, make_shards, split
from fedprophet.errors import ConfigError


def owned_labels(labels, shards):
    return [sorted(np.asarray(labels)[shards.client(k)].tolist()) for k in range(len(shards))]


# ---------------------------------------------------------------- skewed


@pytest.mark.parametrize("seed", range(5))
def test_skew_by_hand(seed):
    # Twelve samples of twelve classes, sorted and cut into 2 · 3 pieces: (0 1) (2 3) (4 5) (6 7) (8 9) (10 11).
    labels = [7, 0, 11, 3, 5, 1, 9, 2, 10, 4, 8, 6]
    shards = make_shards(labels, 12, 3, ShardSettings(classes_per_client=2, iid_fraction=0.0), seed)
    assert shards.sizes.tolist() == [4, 4, 4]
    for mine in owned_labels(labels, shards):
        assert mine[0] % 2 == 0
        assert mine[1] == mine[0] + 1
        assert mine[2] % 2 == 0
        assert mine[3] == mine[2] + 1


def test_pieces_of_unequal_size_by_hand():
    # Seven samples in three pieces: cut at ⌊7/3⌋ = 2 and ⌊14/3⌋ = 4.
    labels = [6, 5, 4, 3, 2, 1, 0]
    shards = make_shards(labels, 7, 3, ShardSettings(classes_per_client=1, iid_fraction=0.0))
    assert sorted(owned_labels(labels, shards)) == [[0, 1], [2, 3], [4, 5, 6]]


def test_which_pieces_a_client_draws_is_random():
    labels = np.arange(12)
    pieces = {tuple(make_shards(labels, 12, 3, ShardSettings(iid_fraction=0.0), seed).client(0)) for seed in range(200)}
    # Fifteen pairs of six pieces, each missed with probability (14/15)^200 ≈ 1e-6.
    assert len(pieces) == 15


def test_the_iid_part_by_hand():
    # 20 % of 50 samples is 10, two for each of 5 clients; the other 40 are cut into 10 pieces of 4, two for each.
    labels = np.repeat(np.arange(5), 10)
    shards = make_shards(labels, 5, 5, ShardSettings(classes_per_client=2, iid_fraction=0.2), 3)
    assert shards.sizes.tolist() == [10] * 5
    all_iid = make_shards(labels, 5, 5, ShardSettings(classes_per_client=2, iid_fraction=1.0), 3)
    assert all_iid.sizes.tolist() == [10] * 5
    assert max(len(set(mine)) for mine in owned_labels(labels, all_iid)) >= 4


def top_share(labels, shards, classes):
    """Return, for each client, the share of its data that its most frequent classes hold."""
    counts = [np.sort(np.bincount(labels[shards.client(k)], minlength=10)) for k in range(len(shards))]
    return np.array([count[-classes:].sum() / count.sum() for count in counts])


@pytest.mark.parametrize("seed", [0, 1])
def test_digits_are_skewed_as_in_the_paper(seed):
    labels = load("digits").train.labels.numpy()
    shards = make_shards(labels, 10, 20, ShardSettings(), seed)
    # A piece of 28 or 29 samples is shorter than a class, so it meets at most two: four classes hold 80 % and more.
    assert np.all(top_share(labels, shards, 4) >= 0.79)
    assert top_share(labels, shards, 2).mean() > 0.6
    iid = make_shards(labels, 10, 20, ShardSettings(kind="iid"), seed)
    assert top_share(labels, iid, 4).max() < 0.7
    assert shards.sizes.max() - shards.sizes.min() <= 3


def test_more_classes_for_a_client_than_there_are():
    with pytest.raises(ConfigError, match="classes_per_client is 12, but the dataset has only 10 classes"):
        make_shards(np.arange(10), 10, 2, ShardSettings(classes_per_client=12))
    make_shards(np.arange(10), 10, 2, ShardSettings(classes_per_client=10))
    make_shards(np.arange(10), 10, 2, ShardSettings(kind="iid", classes_per_client=12))


# ---------------------------------------------------------------- i.i.d. and Dirichlet


def test_iid_is_even_and_mixes_classes():
    labels = np.repeat(np.arange(4), 250)
    shards = make_shards(labels, 4, 7, ShardSettings(kind="iid"), 5)
    assert sorted(set(shards.sizes.tolist())) == [142, 143]
    for k in range(7):
        counts = np.bincount(labels[shards.client(k)], minlength=4)
        assert np.all(np.abs(counts - 142.86 / 4) < 5 * np.sqrt(142.86 * 3 / 16))


@pytest.mark.parametrize("kind", KINDS)
def test_no_client_is_favoured(kind):
    labels = np.arange(6) % 2
    sizes = sum(make_shards(labels, 2, 4, ShardSettings(kind=kind), seed).sizes for seed in range(400))
    # 2400 samples over four clients: 600 each, and five standard deviations of a size of variance at most 6² / 4.
    assert np.all(np.abs(sizes - 600) < 5 * np.sqrt(400 * 9))


def test_smaller_concentration_is_more_skewed():
    labels = np.repeat(np.arange(10), 200)

    def mean_top(concentration):
        shards = make_shards(labels, 10, 10, ShardSettings(kind="dirichlet", concentration=concentration), 2)
        counts = [np.bincount(labels[shards.client(k)], minlength=10) for k in np.flatnonzero(shards.sizes)]
        return np.mean([count.max() / count.sum() for count in counts])

    assert mean_top(0.05) > mean_top(1.0) + 0.1 > mean_top(1e6) + 0.2
    assert mean_top(1e6) == pytest.approx(0.1, abs=0.02)


def test_dirichlet_has_the_variance_of_its_concentration():
    # Of one class over n clients, a client's proportion has variance (1/n)(1 − 1/n) / (n · concentration + 1).
    labels, clients, concentration = np.zeros(2000, dtype=int), 5, 0.8
    draws = [
        make_shards(labels, 1, clients, ShardSettings(kind="dirichlet", concentration=concentration), seed).sizes / 2000
        for seed in range(800)
    ]
    assert np.var(draws) == pytest.approx(0.2 * 0.8 / (5 * 0.8 + 1), rel=0.1)


def test_dirichlet_with_more_clients_than_samples_does_not_favour_the_same_few():
    labels = np.repeat(np.arange(10), 10)
    shards = make_shards(labels, 10, 10_000, ShardSettings(kind="dirichlet", concentration=1e4), 0)
    assert np.count_nonzero(shards.sizes) > 90


@pytest.mark.parametrize("concentration", [1e-300, 1e-12, 1e9])
def test_extreme_concentrations(concentration):
    shards = make_shards(np.arange(40) % 4, 4, 6, ShardSettings(kind="dirichlet", concentration=concentration))
    assert sorted(shards.indices.tolist()) == list(range(40))


# ---------------------------------------------------------------- every kind


@given(
    kind=st.sampled_from(sorted(KINDS)),
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    clients=st.integers(1, 80),
    classes_per_client=st.integers(1, 6),
    iid_fraction=st.floats(0, 1),
    concentration=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=200)
def test_every_sample_goes_to_exactly_one_client(
    kind, labels, clients, classes_per_client, iid_fraction, concentration, seed
):
    how = ShardSettings(
        kind=kind, classes_per_client=classes_per_client, iid_fraction=iid_fraction, concentration=concentration
    )
    shards = make_shards(labels, 6, clients, how, seed)
    assert len(shards) == clients
    dealt = np.concatenate([shards.client(k) for k in range(clients)])
    assert sorted(dealt.tolist()) == list(range(len(labels)))
    assert [len(shards.client(k)) for k in range(clients)] == shards.sizes.tolist()
    assert all(np.all(np.diff(shards.client(k)) > 0) for k in range(clients))


@pytest.mark.parametrize("kind", KINDS)
def test_more_clients_than_samples_leaves_shards_empty(kind):
    shards = make_shards([0, 1, 0], 2, 50, ShardSettings(kind=kind))
    assert shards.sizes.sum() == 3
    assert np.count_nonzero(shards.sizes) <= 3
    empty = int(np.flatnonzero(shards.sizes == 0)[0])
    assert shards.client(empty).tolist() == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind):
    labels = np.arange(200) % 10
    one, again, other = (make_shards(labels, 10, 8, ShardSettings(kind=kind), seed) for seed in (4, 4, 5))
    assert np.array_equal(one.indices, again.indices)
    assert np.array_equal(one.offsets, again.offsets)
    assert not np.array_equal(one.indices, other.indices)


def test_a_seed_gives_the_same_shards_in_every_process():
    shards = make_shards([0, 1] * 8, 2, 3, ShardSettings(), 9)
    assert shards.indices.tolist() == [1, 3, 7, 8, 15, 2, 4, 6, 10, 11, 0, 5, 9, 12, 13, 14]
    assert shards.offsets.tolist() == [0, 5, 10, 16]


def test_shards_cannot_be_changed_by_accident():
    shards = make_shards([0, 1] * 8, 2, 3, ShardSettings())
    with pytest.raises(ValueError, match="read-only"):
        shards.client(0)[0] = 5


@pytest.mark.parametrize("client", [-1, 3])
def test_no_such_client(client):
    with pytest.raises(IndexError):
        make_shards([0, 1] * 8, 2, 3, ShardSettings()).client(client)


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "skew"},
        {"classes_per_client": 0},
        {"iid_fraction": 1.5},
        {"iid_fraction": float("nan")},
        {"concentration": 0.0},
        {"concentration": float("inf")},
    ],
)
def test_bad_settings(bad):
    with pytest.raises(ValidationError, match=next(iter(bad))):
        ShardSettings(**bad)


def test_no_clients():
    with pytest.raises(ConfigError, match="clients must be at least 1, not 0"):
        make_shards([0, 1], 2, 0, ShardSettings())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("samples", [1437, 50_000])
def test_a_hundred_thousand_clients(kind, samples):
    labels = np.arange(samples) % 10
    tracemalloc.start()
    start = time.process_time()
    shards = make_shards(labels, 10, 100_000, ShardSettings(kind=kind))
    seconds, (kept, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 2
    assert kept < 2_000_000
    assert peak < 10_000_000
    assert shards.sizes.sum() == samples


# ---------------------------------------------------------------- a client's own split


@pytest.mark.parametrize(
    ("size", "held_out"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (10, 2), (72, 14), (73, 15)]
)
def test_split_sizes(size, held_out):
    train, validation = split(np.arange(size) + 100, seed=0, client=0)
    assert (len(train), len(validation)) == (size - held_out, held_out)
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(100, 100 + size))


@given(size=st.integers(1, 50), part=st.floats(0, 1, exclude_max=True))
def test_something_is_always_left_to_train_on(size, part):
    train, validation = split(np.arange(size), 0, 0, part)
    assert len(train) >= 1
    assert abs(len(validation) - part * size) <= 1


def test_split_is_shuffled_by_seed_and_client():
    samples = np.arange(40)
    first = split(samples, 1, 2)[1].tolist()
    assert first == split(samples, 1, 2)[1].tolist()
    assert first != split(samples, 1, 3)[1].tolist()
    assert first != split(samples, 2, 2)[1].tolist()
    assert first not in (list(range(8)), list(range(32, 40)))


@pytest.mark.parametrize("part", [1.0, -0.1, float("nan")])
def test_bad_validation_part(part):
    with pytest.raises(ConfigError, match="validation part"):
        split(np.arange(5), 0, 0, part)
