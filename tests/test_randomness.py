"""Named draws: they depend on their names alone, and leave torch's global generators as they were."""

import pytest
import torch

from fedprophet import randomness
from fedprophet.randomness import generator, global_rng, key, numpy_generator, seed_global

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def test_a_key_depends_on_every_part():
    keys = {key(0, "a"), key(1, "a"), key(0, "b"), key(0, "a", 0), key(0, "a", 1), key(0, "a", 0, 1), key(0, "a", 1, 0)}
    assert len(keys) == 7
    assert all(0 <= number < 2**63 for number in keys)
    assert key(0, "a", 1) == key(0, "a", 1)


def test_generators_of_one_name_draw_the_same():
    one, other = (torch.rand(3, generator=generator(0, "draw", 2)) for _ in range(2))
    assert torch.equal(one, other)
    assert not torch.equal(one, torch.rand(3, generator=generator(0, "draw", 3)))
    assert numpy_generator(0, "draw").random() == numpy_generator(0, "draw").random()


def test_the_global_generator_is_seeded_and_put_back():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with global_rng(0, "dropout", 1, 2):
        found = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(key(0, "dropout", 1, 2))
    assert torch.equal(torch.rand(3), found)


def test_it_is_put_back_after_an_error_and_inside_another():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="stop"), global_rng(0, "a"):
        raise ValueError("stop")
    with global_rng(0, "a"):
        expected = torch.rand(2)
    with global_rng(0, "a"):
        first = torch.rand(1)
        with global_rng(0, "b"):
            torch.rand(7)
        assert torch.equal(torch.cat([first, torch.rand(1)]), expected)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("gpu", [False, True])
def test_seeding_by_a_number_is_torchs_own(monkeypatch, gpu):
    monkeypatch.setattr(randomness, "_has_gpu", lambda: gpu)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(123)
        expected = torch.rand(4)
        seed_global(123)
        assert torch.equal(torch.rand(4), expected)


@needs_gpu
def test_a_gpus_generator_is_seeded_and_put_back():
    torch.cuda.manual_seed(5)
    torch.rand(10, device="cuda")
    before = torch.cuda.get_rng_state()
    draws = []
    for _ in range(2):
        with global_rng(0, "dropout"):
            draws.append(torch.rand(3, device="cuda"))
    assert torch.equal(*draws)
    assert torch.equal(torch.cuda.get_rng_state(), before)
