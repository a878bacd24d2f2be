"""Where every random draw of a run comes from.

A draw is named by what it is for (run seed, round, client, iteration, purpose), never by when it happens. So the same
seed gives the same result on every engine, in any order of clients, and after a resume.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch


def key(seed: int, purpose: str, *where: int) -> int:
    """Return a 63-bit number that depends on every argument; `where` is usually round, client, iteration."""
    text = ",".join((str(seed), purpose, *map(str, where)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *where: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return torch's generator for one named draw."""
    return torch.Generator(device=device).manual_seed(key(seed, purpose, *where))


def numpy_generator(seed: int, purpose: str, *where: int) -> np.random.Generator:
    """Return NumPy's generator for one named draw."""
    return np.random.default_rng(key(seed, purpose, *where))


@cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def seed_global(number: int) -> None:
    """Seed torch's global generators, as `torch.manual_seed` does.

    Without a GPU that function still records its caller's stack for one, which takes milliseconds.
    """
    if _has_gpu():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


@contextmanager
def global_rng(seed: int, purpose: str, *where: int) -> Iterator[None]:
    """Seed torch's global generators, which dropout and initialisation use, and put them back afterwards."""
    # GPUs' generators are set back in place: a graph that was captured holds on to their state.
    gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    places = [(gpu, gpu.initial_seed(), gpu.get_offset()) for gpu in gpus]
    with torch.random.fork_rng(devices=()):
        seed_global(key(seed, purpose, *where))
        try:
            yield
        finally:
            for gpu, initial, offset in places:
                gpu.manual_seed(initial)
                gpu.set_offset(offset)
