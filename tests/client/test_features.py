"""The feature cache: computed once, bounded in memory and on disk."""

import torch

from fedprophet.client.features import FeatureCache


def _tensor(value: float) -> torch.Tensor:
    return torch.full((10,), value)  # 40 bytes


def test_computed_once_for_each_key() -> None:
    cache, calls = FeatureCache(1000, 1000), []
    for key in ("a", "b", "a", "a"):
        cache.get(key, lambda key=key: calls.append(key) or _tensor(1.0))
    assert calls == ["a", "b"]


def test_what_leaves_memory_comes_back_from_disk_and_what_leaves_the_disk_is_computed_again() -> None:
    cache, calls = FeatureCache(memory_limit=80, disk_limit=80), []

    def get(key: int) -> torch.Tensor:
        return cache.get(key, lambda: calls.append(key) or _tensor(float(key)))

    for key in range(5):
        assert get(key)[0] == key
        assert cache.memory.size <= 80
        assert cache.disk.size <= 80
    assert get(2)[0] == 2  # spilled, not computed again
    assert calls == [0, 1, 2, 3, 4]
    assert get(0)[0] == 0  # left the disk too
    assert calls == [0, 1, 2, 3, 4, 0]
    cache.clear()
    assert cache.memory.size == cache.disk.size == 0


def test_something_larger_than_both_limits_is_still_returned() -> None:
    cache = FeatureCache(10, 10)
    assert torch.equal(cache.get("big", lambda: _tensor(3.0)), _tensor(3.0))
    assert cache.memory.size == cache.disk.size == 0


def test_a_full_disk_costs_the_feature_cache_nothing_but_time(monkeypatch):
    cache, calls = FeatureCache(memory_limit=80, disk_limit=800), []

    def full(path, data):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    for key in (0, 1, 2, 0):
        found = cache.get(key, lambda key=key: calls.append(key) or torch.full((10,), float(key)))
        assert found[0] == key
    assert calls == [0, 1, 2, 0]
    assert cache.disk.size == 0
    assert not any(cache._folder.iterdir()), "half a file stays"
    folder = cache._folder
    cache.clear()
    assert not folder.exists()
