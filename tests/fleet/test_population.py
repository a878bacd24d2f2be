import time
import tracemalloc

import numpy as np
import pytest
import torch

from fedprophet.data import load
from fedprophet.data.dataset import Dataset, from_tensors
from fedprophet.data.examples import TensorExamples
from fedprophet.data.shards import ShardSettings
from fedprophet.errors import ConfigError
from fedprophet.fleet import population
from fedprophet.fleet.availability import FleetSettings
from fedprophet.fleet.device import load_pool
from fedprophet.fleet.population import Population
from fedprophet.messages.values import SERVER

POOL = load_pool("small")
TRAIN = 100


class Counting(TensorExamples):
    """Examples that note which of them are fetched."""

    def __init__(self, images, labels):
        super().__init__(images, labels)
        self.fetched = []

    def fetch(self, indices):
        self.fetched.extend(indices.tolist())
        return super().fetch(indices)


def numbered():
    """Return a dataset whose training image k has the pixel k / 255, and test image k the pixel 1 − k / 255."""
    train = torch.arange(TRAIN, dtype=torch.uint8).reshape(TRAIN, 1, 1, 1)
    test = (255 - torch.arange(10)).to(torch.uint8).reshape(10, 1, 1, 1)
    return from_tensors(train, torch.arange(TRAIN) % 4, test, torch.arange(10) % 4)


def make(clients=8, seed=0, dataset=None, **options):
    return Population(dataset or numbered(), ShardSettings(), POOL, seed, clients, **options)


def pixels(examples):
    return (examples.fetch(torch.arange(len(examples))).flatten() * 255).round().int().tolist()


def test_sizes():
    people = make()
    assert people.size == 8
    assert sum(people.samples(k) for k in range(8)) == TRAIN
    assert people.eligible.tolist() == list(range(8))


def test_clients_see_their_own_samples_and_all_together_see_everything_once():
    people = make()
    seen = []
    for k in range(8):
        data = people.client_data(k)
        assert len(data.train) + len(data.validation) == people.samples(k)
        assert len(data.validation) == round(0.2 * people.samples(k))
        for part in (data.train, data.validation):
            assert part.labels.tolist() == [pixel % 4 for pixel in pixels(part)]
            seen.extend(pixels(part))
    assert sorted(seen) == list(range(TRAIN))


def test_the_server_owns_the_test_set():
    data = make().client_data(SERVER)
    assert len(data.train) == 0
    assert data.train.fetch(torch.arange(0)).shape == (0, 1, 1, 1)
    assert pixels(data.validation) == [255 - k for k in range(10)]
    assert data.validation.labels.tolist() == [k % 4 for k in range(10)]


def test_order_of_asking_does_not_matter():
    one, other = make(seed=3), make(seed=3)
    forward = [(pixels(one.client_data(k).train), one.device(k), one.resources(k, 2, 10)) for k in range(8)]
    other.draw(0, 3, 3, "train")
    backward = [
        (pixels(other.client_data(k).train), other.device(k), other.resources(k, 2, 10)) for k in reversed(range(8))
    ]
    assert forward == backward[::-1]


def test_the_seed_decides():
    assert pixels(make(seed=0).client_data(0).train) != pixels(make(seed=1).client_data(0).train)
    assert [make(seed=0).device(k) for k in range(8)] != [make(seed=1).device(k) for k in range(8)]


def test_resources_are_those_of_the_device():
    people = make(fleet=FleetSettings(performance="apps"))
    for k in range(8):
        device = people.device(k)
        for round_ in range(5):
            free = people.resources(k, round_, 1000)
            assert 1000 <= free.memory <= max(1000, 0.2 * device.memory)
            assert round(free.performance / device.performance, 3) in (1.0, 0.735, 0.459, 0.524, 0.167, 0.231)
            assert free.bandwidth == device.bandwidth


def test_unbalanced_populations_are_weaker():
    balanced, weak = make(300), make(300, fleet=FleetSettings(exponent=-1.0))
    assert np.mean([weak.device(k).memory for k in range(300)]) < 0.5 * np.mean(
        [balanced.device(k).memory for k in range(300)]
    )


def test_draw():
    people = make(50)
    chosen = people.draw(4, 10, 0, "train")
    assert len(set(chosen)) == 10
    assert list(chosen) == sorted(chosen)
    assert all(type(k) is int for k in chosen)
    assert people.draw(4, 10, 0, "train") == chosen
    others = [people.draw(5, 10, 0, "train"), people.draw(4, 10, 1, "train"), people.draw(4, 10, 0, "evaluate")]
    assert all(other != chosen for other in others)


def test_draw_is_fair():
    people = make(10)
    times = np.zeros(10)
    for round_ in range(600):
        times[list(people.draw(round_, 3, 0, "train"))] += 1
    # 180 each, within five standard deviations.
    assert np.all(np.abs(times - 180) < 5 * np.sqrt(600 * 0.3 * 0.7))


def test_clients_without_data_are_never_drawn():
    people = make(1000)
    assert 0 < len(people.eligible) <= TRAIN
    assert [k for k in range(1000) if people.samples(k)] == people.eligible.tolist()
    everybody = people.draw(0, 1000, 0, "train")
    assert list(everybody) == people.eligible.tolist()
    empty = next(k for k in range(1000) if people.samples(k) == 0)
    data = people.client_data(empty)
    assert (len(data.train), len(data.validation)) == (0, 0)
    assert data.train.fetch(torch.arange(0)).shape == (0, 1, 1, 1)
    assert people.resources(empty, 0, 5).memory >= 5


def test_a_client_with_one_sample_trains_on_it():
    people = make(1000)
    single = next(k for k in range(1000) if people.samples(k) == 1)
    data = people.client_data(single)
    assert (len(data.train), len(data.validation)) == (1, 0)


@pytest.mark.parametrize("client", [-2, 8])
def test_no_such_client(client):
    people = make()
    for ask in (people.samples, people.client_data, people.device, lambda k: people.resources(k, 0, 1)):
        with pytest.raises(IndexError):
            ask(client)


def test_bad_settings_are_found_at_once():
    with pytest.raises(ConfigError, match="clients must be at least 1"):
        make(0)
    with pytest.raises(ConfigError, match="classes_per_client is 5, but the dataset has only 4"):
        Population(numbered(), ShardSettings(classes_per_client=5), POOL, 0, 8)


def test_nothing_of_a_client_is_made_before_it_is_asked_for(monkeypatch):
    drawn, cut = [], []
    draw_device, split = population.draw_device, population.split
    monkeypatch.setattr(population, "draw_device", lambda *a: drawn.append(a[2]) or draw_device(*a))
    monkeypatch.setattr(population, "split", lambda *a: cut.append(a[2]) or split(*a))
    base = numbered()
    counting = Counting(base.train.fetch(torch.arange(TRAIN)), base.train.labels)
    people = make(dataset=Dataset("x", counting, base.test, base.classes, base.shape, base.mean, base.std))
    people.draw(0, 3, 0, "train")
    assert (drawn, cut, counting.fetched) == ([], [], [])
    data = people.client_data(5)
    people.resources(5, 0, 0)
    assert (drawn, cut, counting.fetched) == ([5], [5], [])
    data.train.fetch(torch.arange(2))
    assert len(counting.fetched) == 2


def test_a_hundred_thousand_clients():
    digits = load("digits")
    tracemalloc.start()
    start = time.process_time()
    people = make(100_000, dataset=digits)
    chosen = people.draw(0, 10, 0, "train")
    for k in chosen:
        assert len(people.client_data(k).train) >= 1
        people.resources(k, 0, 600_000)
    seconds, (kept, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 2
    assert kept < 3_000_000
    assert peak < 12_000_000


def _server_pixels(people):
    data = people.client_data(SERVER)
    return pixels(data.train), pixels(data.validation)


def test_the_public_set_leaves_the_test_set():
    test = [255 - k for k in range(10)]
    for public in (1, 4, 9):
        drawn, rest = _server_pixels(make(public=public))
        assert (len(drawn), len(rest)) == (public, 10 - public)
        assert sorted(drawn + rest, reverse=True) == test
        data = make(public=public).client_data(SERVER)
        for part in (data.train, data.validation):
            assert part.labels.tolist() == [(255 - pixel) % 4 for pixel in pixels(part)]


def test_the_public_set_is_drawn_by_the_seed():
    drawn = [tuple(_server_pixels(make(seed=seed, public=4))[0]) for seed in (0, 0, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 2
    assert tuple(range(255, 251, -1)) not in drawn[:2], "not simply the first ones"


def test_clients_are_the_same_with_and_without_a_public_set():
    """Its samples are none of theirs: the shards, devices and cohorts of a seed stay what they are."""
    one, other = make(seed=5), make(seed=5, public=4)
    for k in range(8):
        assert pixels(one.client_data(k).train) == pixels(other.client_data(k).train)
        assert pixels(one.client_data(k).validation) == pixels(other.client_data(k).validation)
        assert one.resources(k, 3, 10) == other.resources(k, 3, 10)
    assert one.draw(1, 3, 5, "cohort") == other.draw(1, 3, 5, "cohort")
    assert set(_server_pixels(other)[0]) <= set(range(246, 256)), "test images, which no client has"


def test_clients_train_on_mirror_images_too_and_nobody_else_does():
    """Every image k has the pixels k, k + 100."""
    train = torch.stack([torch.arange(TRAIN), torch.arange(TRAIN) + 100], dim=1).to(torch.uint8).reshape(TRAIN, 1, 1, 2)
    dataset = from_tensors(train, torch.arange(TRAIN) % 4, train[:10], torch.arange(10) % 4)
    plain, mirrored = (make(dataset=dataset, mirror=value, public=4) for value in (False, True))
    for k in range(8):
        usual, data = plain.client_data(k), mirrored.client_data(k)
        count, own = len(usual.train), pixels(usual.train)
        assert len(data.train) == 2 * count > 0
        assert pixels(data.train) == own + [own[p ^ 1] for p in range(2 * count)]
        assert data.train.labels.tolist() == 2 * usual.train.labels.tolist()
        assert pixels(data.validation) == pixels(usual.validation)
        assert data.size == mirrored.samples(k) == plain.samples(k)
    server = mirrored.client_data(SERVER)
    assert (len(server.train), len(server.validation)) == (4, 6)
    assert pixels(server.train) == pixels(plain.client_data(SERVER).train)
