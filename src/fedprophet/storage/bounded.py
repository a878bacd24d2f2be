"""A cache of bounded size: the least recently used values leave first."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Values by key, whose sizes add up to at most `limit`.

    Without `size_of` each value counts as one. `leaving` is called with what has to leave, while it is still there: if
    it raises, the value stays. The newest `least` values stay, however large they are.
    """

    def __init__(
        self,
        limit: float,
        size_of: Callable[[V], int] = lambda value: 1,
        leaving: Callable[[K, V], object] = lambda key, value: None,
        least: int = 0,
    ) -> None:
        self.limit = limit
        self._size_of, self._leaving, self._least = size_of, leaving, least
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.size = 0

    def get(self, key: K) -> V | None:
        """Return a value, which counts as used now; None if there is none."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: K, value: V) -> V:
        """Add or replace a value, let others leave for it, and return it."""
        self.pop(key)
        self._values[key] = value, self._size_of(value)
        self.size += self._values[key][1]
        while self.size > self.limit and len(self._values) > self._least:
            oldest = next(iter(self._values))
            self._leaving(oldest, self._values[oldest][0])
            self.pop(oldest)
        return value

    def pop(self, key: K) -> V | None:
        """Remove a value without calling `leaving`, and return it."""
        value, size = self._values.pop(key, (None, 0))
        self.size -= size
        return value

    def clear(self) -> None:
        """Remove everything without calling `leaving`."""
        self._values.clear()
        self.size = 0

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> Iterator[tuple[K, V]]:
        """Yield keys and values, the least recently used first."""
        return ((key, value) for key, (value, _) in self._values.items())
