"""A bounded cache: who leaves, when, and how much is counted."""

import pytest

from fedprophet.storage.bounded import BoundedCache


def test_the_least_recently_used_leaves_first():
    cache = BoundedCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert list(cache.items()) == [("a", 1), ("c", 3)]
    assert (cache.get("b"), "b" in cache, len(cache), cache.size) == (None, False, 2, 2)


def test_sizes_are_counted_and_a_value_can_be_replaced():
    left = []
    cache = BoundedCache(10, len, lambda key, value: left.append(key))
    cache.put("a", "1234")
    cache.put("b", "123456")
    assert cache.size == 10
    assert cache.put("a", "12345") == "12345"
    assert (left, cache.size) == (["b"], 5), "a is the newer one now"
    assert cache.pop("a") == "12345"
    assert cache.pop("a") is None
    assert (left, cache.size) == (["b"], 0)
    cache.put("huge", "x" * 11)
    assert (left, cache.size) == (["b", "huge"], 0)
    cache.put("c", "1")
    cache.clear()
    assert (left, cache.size, len(cache)) == (["b", "huge"], 0, 0)


def test_the_newest_may_stay_whatever_its_size():
    cache = BoundedCache(3, len, least=1)
    cache.put("a", "12")
    cache.put("b", "12345")
    assert list(cache.items()) == [("b", "12345")]
    assert cache.size == 5


def test_what_cannot_leave_stays():
    def full(key, value):
        raise OSError("full")

    cache = BoundedCache(1, leaving=full)
    cache.put("a", 1)
    with pytest.raises(OSError, match="full"):
        cache.put("b", 2)
    assert (cache.get("a"), cache.get("b"), cache.size) == (1, 2, 2)
