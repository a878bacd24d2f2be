"""Cached features z_{m−1} of a client's training data: the frozen prefix runs once a stage, not once an iteration."""

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path

from safetensors.torch import load_file, save
from torch import Tensor


class FeatureCache:
    """Feature tensors by key (client, digests of the prefix, version of the client's own layers).

    At most `memory_limit` bytes stay in memory; what has to leave goes to disk, up to `disk_limit` bytes, and what has
    to leave there is computed again when it is asked for. Nothing in it outlives the process.
    """

    def __init__(self, memory_limit: int, disk_limit: int) -> None:
        self._limits = memory_limit, disk_limit
        self._memory: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._disk: OrderedDict[Hashable, tuple[Path, int]] = OrderedDict()
        self._folder: Path | None = None
        self._written = 0

    def share(self, parts: int) -> "FeatureCache":
        """Return an empty cache with a part of this one's limits, for one of so many processes."""
        memory_limit, disk_limit = self._limits
        return FeatureCache(memory_limit // parts, disk_limit // parts)

    def get(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Return the features behind the key, from memory, from disk, or computed now."""
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        if key in self._disk:
            path, _ = self._disk.pop(key)
            features = load_file(path)["features"]
            path.unlink()
        else:
            features = compute()
        self._memory[key] = features
        self._shrink()
        return features

    def _shrink(self) -> None:
        memory_limit, disk_limit = self._limits
        while self.memory_bytes > memory_limit:
            key, features = self._memory.popitem(last=False)
            if features.nbytes <= disk_limit:
                with suppress(OSError):  # a full disk loses nothing: they are computed again
                    self._disk[key] = self._spill(features), features.nbytes
        while self.disk_bytes > disk_limit:
            _, (path, _) = self._disk.popitem(last=False)
            path.unlink()

    def _spill(self, features: Tensor) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedprophet-features-"))
        self._written += 1
        path = self._folder / f"{self._written}.safetensors"
        try:
            path.write_bytes(save({"features": features.contiguous()}))
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path

    @property
    def memory_bytes(self) -> int:
        """How much is held in memory."""
        return sum(features.nbytes for features in self._memory.values())

    @property
    def disk_bytes(self) -> int:
        """How much is held on disk."""
        return sum(size for _, size in self._disk.values())

    def clear(self) -> None:
        """Forget everything and remove what is on disk."""
        self._memory.clear()
        self._disk.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
