"""Bad input by the thousand: each one is accepted or refused with a sentence, in bounded time, never anything else.

The inputs are drawn from one seed, so a failure is repeated by running the test again. What is printed of a failure is
its number and the input.
"""

import random
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedprophet.errors import FedProphetError

SEED = 12
SECONDS = 60
"""No input may take longer, on a machine with much else to do."""
SHOWN = 5
"""So many failures are printed."""

Input = tuple[object, Callable[[], object]]
"""An input, to be printed, and what is done with it."""

NUMBERS = (0, 1, -1, 2, 3, 7, 255, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**12, 10**30, -(10**400))
REALS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-12, 5e-324, 1e-308, 3.5e38, 1.7e308, -1.7e308, float("inf"), float("nan"))
TEXTS = (
    *("", " ", "\0", "\ud800", "é", "🦊", "a\nb", "a" * 10_000, "9" * 5_000, "[" * 3_000, "{a=" * 3_000, '"', "x = ="),
    *("50%", "100%", "-5%", "1e9%", "9" * 400 + "%", "8/255", "1/0", "0/0", "9" * 400 + "/1", "60MB", "1e3MB", "0MB"),
    *(
        "9" * 40 + "TiB",
        "." * 50,
        "auto",
        "all",
        "true",
        "null",
        "../..",
        "/",
        "/dev/null",
        "~",
        "custom",
        "1979-05-27",
    ),
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def anything(rng: random.Random) -> Any:
    """Return a value that some setting, field or file might not be made for."""
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(REALS),
        lambda: rng.choice(TEXTS),
        lambda: rng.uniform(-2, 2) * 10.0 ** rng.randint(-300, 300),
        lambda: rng.randint(-3, 40),
        lambda: rng.choice((True, False, None)),
        lambda: [anything(rng) for _ in range(rng.randint(0, 3))],
        lambda: {rng.choice((*TEXTS, "width", "a")): anything(rng) for _ in range(rng.randint(0, 2))},
        lambda: nested(rng.choice((2, 20, 900))),
    )
    return rng.choice(kinds)()


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Return bytes with some of them flipped, cut out, doubled or put in."""
    for _ in range(rng.randint(1, 3)):
        data = _damaged_once(rng, data)
    return data


def _damaged_once(rng: random.Random, data: bytes) -> bytes:
    at, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 8, 40, 400))
    before, part, after = data[:at], data[at : at + length], data[at + length :]
    token = rng.choice((*TEXTS, *map(str, NUMBERS))).encode(errors="replace")
    return rng.choice(
        (before + rng.randbytes(len(part)) + after, before + after, data + part, before + token + after, before)
    )


def edited(rng: random.Random, value: Any) -> Any:
    """Return JSON in which one value is another, is missing or is there twice."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: part for name, part in value.items() if name != key}
        return {**value, key: edited(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], edited(rng, value[at]), *value[at + rng.randint(0, 1) :]]
    return anything(rng)


def _out_of_time(number: int, frame: object) -> None:
    raise TimeoutError(f"it takes more than {SECONDS} s of processor time")


class Tried:
    """What became of the inputs."""

    def __init__(self) -> None:
        self.accepted = self.refused = 0
        self.failures: list[str] = []

    def __call__(self, name: str, given: object, act: Callable[[], object]) -> None:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            act()
            self.accepted += 1
        except FedProphetError:
            self.refused += 1
        except Exception:
            self.failures.append(f"{name}: {given!r:.2000}\n{traceback.format_exc(limit=-6)}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an input names is looked for, and perhaps written, in the test's own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fuzz() -> Callable[..., Tried]:
    """Return a function that makes so many inputs, each with a generator of its own, and tries them."""

    def run(name: str, count: int, make: Callable[[random.Random], Input]) -> Tried:
        tried = Tried()
        before = signal.signal(signal.SIGPROF, _out_of_time)
        try:
            for number in range(count):
                tried(f"{name} {number} of seed {SEED}", *make(random.Random(f"{SEED} {name} {number}")))
        finally:
            signal.signal(signal.SIGPROF, before)
        assert not tried.failures, "\n".join((f"{len(tried.failures)} of {count}", *tried.failures[:SHOWN]))
        return tried

    return run
