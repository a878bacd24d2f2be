"""Cached features z_{m−1} of a client's training data: the frozen prefix runs once a stage, not once an iteration."""

import shutil
import tempfile
from collections.abc import Callable, Hashable
from pathlib import Path

from safetensors.torch import load_file, save
from torch import Tensor

from fedprophet.storage.bounded import BoundedCache


class FeatureCache:
    """Feature tensors by key (client, digests of the prefix, version of the client's own layers).

    At most `memory_limit` bytes stay in memory. What has to leave goes to disk, up to `disk_limit` bytes, and what has
    to leave the disk is computed again when it is asked for. Nothing outlives the process.
    """

    def __init__(self, memory_limit: float, disk_limit: float) -> None:
        self.memory: BoundedCache[Hashable, Tensor] = BoundedCache(memory_limit, lambda f: f.nbytes, self._spill)
        self.disk: BoundedCache[Hashable, tuple[Path, int]] = BoundedCache(
            disk_limit, lambda file: file[1], lambda _, file: file[0].unlink()
        )
        self._folder: Path | None = None
        self._written = 0

    def share(self, parts: int) -> "FeatureCache":
        """Return an empty cache for one of `parts` processes, with an equal share of this one's limits."""
        return FeatureCache(self.memory.limit // parts, self.disk.limit // parts)

    def get(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Return the features of a key, from memory, from disk, or computed now."""
        features = self.memory.get(key)
        if features is None:
            file = self.disk.pop(key)
            if file is None:
                features = compute()
            else:
                features = load_file(file[0])["features"]
                file[0].unlink()
            self.memory.put(key, features)
        return features

    def _spill(self, key: Hashable, features: Tensor) -> None:
        """Move features to the disk. If it is full nothing is lost: they are computed again."""
        if features.nbytes > self.disk.limit:
            return
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedprophet-features-"))
        self._written += 1
        path = self._folder / f"{self._written}.safetensors"
        try:
            path.write_bytes(save({"features": features.contiguous()}))
        except OSError:
            path.unlink(missing_ok=True)
        else:
            self.disk.put(key, (path, features.nbytes))

    def clear(self) -> None:
        """Forget everything and remove what is on disk."""
        self.memory.clear()
        self.disk.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
