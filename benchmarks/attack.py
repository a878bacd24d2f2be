"""Runs disturbed in every way that a machine knows, and resumed: each must end with the bytes of one left in peace.

    python benchmarks/attack.py --out benchmarks/results            # everything
    python benchmarks/attack.py --trials 3 --only plain signals     # a minute

A very small run on scikit-learn's digits, again and again:

- `plain`, `workers`: `kill -9` at random moments, up to three times in a trial, with either engine;
- `points`: the process dies before each operation that changes the run's folder, and in the middle of each write;
- `full`: the disk is full from such a point on: a sentence, exit code 2, and there is room again;
- `signals`: Ctrl-C once and twice, SIGTERM and SIGHUP at random moments: no traceback, and its exit code;
- `deployed`: a server and two nodes of Flower with TLS on loopback; `kill -9` of the server, of the run's process or of
  a node. After the last, the journal may say instead who was missing.

Moments come from --seed and the time that a run left in peace takes here. The exit code is 1 if a trial failed.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from machine import measured

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from faults import DEAD, NEED_ROOM
from processes import Command, forking, free_ports

SETTINGS: Mapping[str, object] = {
    "threads": 1,
    "rounds": 2,
    "model.options.width": 4,
    "memory.budget": "60%",  # two modules
    "population.clients": 6,
    "population.cohort": 2,
    "train.iterations": 1,
    "train.batch": 16,
    "train.warmup": 1,
    "attack.steps": 1,
    "attack.feature_steps": 1,
    "convergence.gate": 0,
    "evaluate.steps": 1,
    "evaluate.clients": 2,
    "evaluate.test_samples": 40,
    "measure.clients": 2,
    "measure.steps": 1,
}
OUTCOME = ("model.safetensors", "journal.jsonl", "results.json")
TITLES = {
    "plain": "`kill -9`, engine plain",
    "workers": "`kill -9`, engine workers",
    "points": "death at a point of saving",
    "full": "full disk",
    "signals": "signals",
    "deployed": "`kill -9` in a deployment",
}
TRIALS = {"plain": 40, "workers": 40, "points": 10**6, "full": 40, "signals": 40, "deployed": 20}
"""How often each row is tried; of the points of saving all, or as many, spread evenly."""
SIGNALS = {
    "SIGINT": ((signal.SIGINT,), (130,)),
    "SIGINT twice": ((signal.SIGINT, signal.SIGINT), (130,)),
    "SIGTERM": ((signal.SIGTERM,), (130,)),
    "SIGHUP": ((signal.SIGHUP,), (130, -signal.SIGHUP)),
}
"""What is sent, and the exit codes that are right."""


class TrialError(Exception):
    """A trial did not end as it must."""


def expect(true: object, text: str) -> None:
    if not true:
        raise TrialError(text)


@dataclass
class Row:
    """What one kind of disturbance did."""

    kind: str
    trials: int = 0
    hit: int = 0
    """Trials that met a run at work: a run may be over before its moment comes."""
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


Trial = Callable[[random.Random], bool]
"""One trial: it returns whether it met the run at work, and raises TrialError."""


class Small:
    """The small run of one engine: how it is started, how long it takes, and what it leaves in peace."""

    def __init__(self, context: Any, folder: Path, engine: str) -> None:
        self._context, self._folder, self._numbers, self._lock = context, folder, count(), threading.Lock()
        pairs = {**SETTINGS, "engine": engine}.items()
        self._flags = [word for key, value in pairs for word in ("--set", f"{key}={value}")]
        self.finish(self.fresh())  # the first takes longer: what is forked from starts, and files are read
        path, began = self.fresh(), time.monotonic()
        self.finish(path)
        self.seconds = time.monotonic() - began
        self.left = outcome(path)

    def fresh(self) -> Path:
        """Return a folder for another run."""
        with self._lock:
            return self._folder / f"run-{next(self._numbers)}"

    def begin(self, path: Path, **options: Any) -> Command:
        """Start the run, or resume it if it has begun."""
        begun = (path / "config.toml").exists()
        words = ["train", "--resume", str(path)] if begun else ["train", *self._flags, "--out", str(path)]
        with self._lock:
            log = self._folder / f"log-{next(self._numbers)}"
            return Command(self._context, words, self._folder, log, group=True, **options)

    def finish(self, path: Path) -> None:
        """Play the run to its end."""
        command = self.begin(path)
        expect(command.code == 0, f"it does not go on: exit code {command.code}: {command.stderr[-400:]}")

    def check(self, path: Path) -> None:
        """Play the run to its end, which must be that of the one left in peace."""
        self.finish(path)
        different = [name for name, content in outcome(path).items() if content != self.left[name]]
        expect(not different, f"other bytes in {', '.join(different)}")
        shutil.rmtree(path)


def outcome(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in OUTCOME}


def kill(small: Small, rng: random.Random) -> bool:
    """Kill the run up to three times."""
    path, hit = small.fresh(), False
    for _ in range(rng.randint(1, 3)):
        command = small.begin(path)
        command.process.join(rng.uniform(0, small.seconds))
        command.kill()
        hit |= command.code == -signal.SIGKILL
        expect(not command.left_behind(), "processes outlive the run")
    small.check(path)
    return hit


def die(small: Small, point: int, rng: random.Random) -> bool:
    """Let the process die at a point of saving."""
    path = small.fresh()
    command = small.begin(path, faults={"folder": str(path), "happens": "die", "at": point})
    expect(command.code == DEAD, f"point {point}: exit code {command.code}: {command.stderr[-400:]}")
    small.check(path)
    return True


def fill(small: Small, point: int, rng: random.Random) -> bool:
    """Let the disk be full from a point on."""
    path = small.fresh()
    command = small.begin(path, faults={"folder": str(path), "happens": "full", "at": point})
    expect_sentence(command, (2,))
    expect("No space left on device" in command.stderr, f"point {point}: it says {command.stderr[-400:]}")
    small.check(path)
    return True


def interrupt(small: Small, name: str, rng: random.Random) -> bool:
    """Send signals, as a terminal does: to the whole group."""
    path, (numbers, codes) = small.fresh(), SIGNALS[name]
    command = small.begin(path)
    command.process.join(rng.uniform(0.05, small.seconds))
    hit = command.process.is_alive()
    for number in numbers:
        command.send(number)
        command.process.join(rng.uniform(0, 0.1))
    expect_sentence(command, (*codes, 0), name)
    expect(not command.left_behind(), f"{name}: processes outlive the run")
    small.check(path)
    return hit


def expect_sentence(command: Command, codes: tuple[int, ...], what: str = "") -> None:
    said = f"{what}: exit code {command.code}, it says: {command.stderr[-400:]}"
    expect("Traceback" not in command.stderr, said)
    expect(command.code in codes, said)


def points(small: Small) -> list[str]:
    """Return the names of the points of a run left in peace."""
    path, found = small.fresh(), small.fresh().with_suffix(".json")
    command = small.begin(path, faults={"folder": str(path)}, points=str(found))
    expect(command.code == 0, command.stderr[-400:])
    names: list[str] = json.loads(found.read_text())
    return names


def spread(numbers: list[int], most: int) -> list[int]:
    """Return at most so many of the numbers, evenly spread."""
    step = max(1.0, len(numbers) / most)
    return [numbers[int(index * step)] for index in range(min(most, len(numbers)))]


def local_trials(kind: str, most: int, context: Any, folder: Path) -> list[Trial]:
    """Return the trials of a row that needs no deployment."""
    engines = ("workers",) if kind == "workers" else ("plain", "workers") if kind == "signals" else ("plain",)
    folders = [folder / engine for engine in engines]
    for path in folders:
        path.mkdir()
    runs = [Small(context, path, engine) for path, engine in zip(folders, engines, strict=True)]
    if kind in ("plain", "workers"):
        return [partial(kill, runs[0])] * most
    if kind == "signals":
        cases = [(run, name) for name in SIGNALS for run in runs]
        return [partial(interrupt, *cases[number % len(cases)]) for number in range(most)]
    names = points(runs[0])
    if kind == "points":
        return [partial(die, runs[0], number) for number in spread(list(range(len(names))), most)]
    need_room = [number for number, name in enumerate(names) if name in NEED_ROOM]
    return [partial(fill, runs[0], number) for number in spread(need_room, most)]


def play(kind: str, trials: Iterable[Trial], seed: int, parallel: int) -> Row:
    """Carry out the trials of a row, some at a time, and show how far they are."""
    row, began, lock = Row(kind), time.monotonic(), threading.Lock()

    def one(number: int, trial: Trial) -> None:
        try:
            hit, failure = trial(random.Random(f"{seed}/{kind}/{number}")), ""
        except (TrialError, AssertionError) as error:
            hit, failure = True, f"{kind} {number}: {error}"
        with lock:
            row.trials, row.hit = row.trials + 1, row.hit + hit
            row.failures += [failure] if failure else []
            print(failure or f"{kind} {number}: as it must be", flush=True)

    with ThreadPoolExecutor(parallel) as pool:
        for done in [pool.submit(one, number, trial) for number, trial in enumerate(trials)]:
            done.result()
    row.seconds = time.monotonic() - began
    return row


# A deployment -------------------------------------------------------------------------------------------------------


class Deployed:
    """A deployment, and the run that was left in peace on it."""

    def __init__(self, deployment: Any) -> None:
        from deployment import make, wait_for

        self.deployment, self._wait_for, self._numbers = deployment, wait_for, count()
        make(deployment, free_ports(5))
        for name in ("server", "node-0", "node-1"):
            self.start(name)
        self._wait_for(self._connected, deployment.told)
        began = time.monotonic()
        command = self.run("peace")
        expect(command.code == 0, f"a run left in peace fails: {command.said[-600:]}")
        self.seconds = time.monotonic() - began
        self.left = self.outcome("peace")

    def _connected(self) -> bool:
        return len(self.deployment.online()) == 2

    def start(self, name: str) -> None:
        """Start the server or a node, or start it again."""
        path, log = self.deployment.path, f"{name}-{next(self._numbers)}"
        folder = path / "nodes" / name
        job = self.deployment.server(log) if name == "server" else self.deployment.node(folder, log)
        self.deployment.named[name] = job

    def run(self, name: str, resume: bool = False) -> Any:
        words = ["deploy", "run", self.deployment.path, "--name", name, *(["--resume"] if resume else [])]
        return self.deployment.start(*words, log=f"{name}-{next(self._numbers)}")

    def outcome(self, name: str) -> tuple[bytes, list[dict[str, Any]]]:
        """Return the model, and the journal without the bytes on the wire: what nodes have is not sent again."""
        lines = [{key: line[key] for key in line if key != "wire"} for line in self.deployment.journal(name)]
        return (self.deployment.run(name) / "model.safetensors").read_bytes(), lines

    def kill(self, victim: str, rng: random.Random) -> bool:
        """Kill a part of the deployment in a run, and mend it as its operator would."""
        name = f"trial-{next(self._numbers)}"
        path, command = self.deployment.run(name), self.run(name)
        end = time.monotonic() + rng.uniform(0, self.seconds)
        while command.running and time.monotonic() < end:
            time.sleep(0.05)
        hit = command.running
        if victim == "run":
            self.deployment.kill_processes("flwr-serverapp")
        else:
            self.deployment.named[victim].kill()
            # Flower refuses a node that comes back before it is missed, which takes up to a minute.
            self._wait_for(lambda: victim == "server" or victim not in self.deployment.online(), self.deployment.told)
            self.start(victim)
        if command.code != 0:
            expect(hit, command.said[-600:])
            self._wait_for(self._connected, self.deployment.told)
            again = self.run(name, resume=(path / "config.toml").exists())
            expect(again.code == 0, f"it does not go on after the death of the {victim}: {again.said[-600:]}")
        self._wait_for(self._connected, self.deployment.told)
        self._check(name, victim)
        return hit

    def _check(self, name: str, victim: str) -> None:
        model, journal = self.outcome(name)
        missing = {client for line in journal for client in line["faults"]}
        if victim.startswith("node") and missing:
            expect(missing == {victim.removeprefix("node-")}, f"others were missing, too: {missing}")
            return
        expect(journal == self.left[1], f"another journal after the death of the {victim}")
        expect(model == self.left[0], f"another model after the death of the {victim}")


@contextmanager
def deployed_trials(most: int, folder: Path) -> Iterator[list[Trial]]:
    """Start a deployment; yield its trials; end it."""
    from deployment import Deployment

    deployment, victims = Deployment(folder), ("server", "run", "node-0", "node-1")
    try:
        deployed = Deployed(deployment)
        yield [partial(deployed.kill, victims[number % len(victims)]) for number in range(most)]
    finally:
        deployment.close()


# The table ----------------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    head = ["what", "trials", "met the run at work", "failures", "time"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        cells = [TITLES[row.kind], str(row.trials), str(row.hit), str(len(row.failures)), f"{row.seconds:.0f} s"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {failure}" for row in rows for failure in row.failures)])


def main() -> None:
    """Carry out the rows and print the table; with --out also write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--trials", type=int, help="trials of each row; without it, those of the recorded table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2, help="trials at a time, but in a deployment one")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # all processes are ended then, too
    rows = []
    with tempfile.TemporaryDirectory() as folder, forking() as context:
        for kind in arguments.only:
            most, place = arguments.trials or TRIALS[kind], Path(folder) / kind
            place.mkdir()
            if kind == "deployed":
                with deployed_trials(most, place) as trials:
                    rows.append(play(kind, trials, arguments.seed, 1))
            else:
                trials = local_trials(kind, most, context, place)
                rows.append(play(kind, trials, arguments.seed, arguments.parallel))
    text = f"# Runs that are disturbed\n\n{measured('attack')}\n\n{table(rows)}\n"
    print(text)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "attack.md").write_text(text)
    sys.exit(any(row.failures for row in rows))


if __name__ == "__main__":
    main()
