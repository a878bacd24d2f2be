"""The evaluation of a run that takes long: what is measured is kept, so that a stop costs little.

RUN/evaluation/STATE.jsonl has a line for each task that was done, a client or a part of the test set under one attack.
STATE is the hash of all that decides the numbers; lines of another state are of no use and are removed.
RUN/evaluation.json is what came out.
"""

import fcntl
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedprophet.errors import ConfigError
from fedprophet.messages.modules import digest
from fedprophet.messages.task import ClientTask, ClientUpdate, TaskKind
from fedprophet.runs.masking import Tally, beyond_chance, black_box_alone, larger_radius, tally, weaker_than
from fedprophet.runs.results import (
    Evaluator,
    Measured,
    Watch,
    Watched,
    attack_label,
    cells,
    conditions,
    exported_model,
    is_stepwise,
    parse_attacks,
    threat_of,
    unwatched,
)
from fedprophet.runs.run import Run, RunStoppedError
from fedprophet.server.coordinator import Engine
from fedprophet.storage.files import make_folder, sync_folder, tensors_from_bytes, write_atomic, write_error
from fedprophet.threat import ThreatModel
from fedprophet.version import __version__

AGAIN = "Make room there or correct its permissions, then give the same command again: it goes on where it stopped"
CHECK_SAMPLES = 200
"""The check with larger radii uses at most so many samples of the test set."""
CHECK_STEPS = 20
"""It takes at least so many steps: an attack of few steps cannot cross a large ball."""
LARGER = 4
DIGESTS_KEPT = 16
GREY = 0.5
"""Within this radius every image in [0, 1] can be turned into the same grey one."""


@dataclass(frozen=True)
class Check:
    """How an attack fared in larger balls: correct samples by radius, the run's own radius first."""

    attack: str
    radius: float
    found: Mapping[float, Tally]

    def warnings(self, chance: float) -> list[str]:
        """Return what speaks for gradient masking."""
        label, usual = attack_label(self.attack), self.found[self.radius]
        signs = [
            larger_radius(label, self.radius, usual, radius, found)
            for radius, found in self.found.items()
            if radius != self.radius
        ]
        signs.append(beyond_chance(label, GREY, self.found[GREY], chance) if GREY in self.found else None)
        return [sign for sign in signs if sign is not None]


@dataclass(frozen=True)
class Evaluation:
    """What was measured, and what to think of it: warnings by the attack they are about."""

    conditions: Mapping[str, Any]
    accuracies: Mapping[str, Mapping[str, Any]]
    warnings: Mapping[str, Sequence[str]]
    checks: Mapping[str, Check]

    def to_json(self) -> dict[str, Any]:
        """Return what is printed."""
        warnings = [text for texts in self.warnings.values() for text in texts]
        return {**self.conditions, **self.accuracies, "warnings": warnings}


def evaluate_run(
    run: Run,
    attacks: str | Sequence[str],
    samples: int | None = None,
    masking_check: bool = True,
    watch: Watch = unwatched,
) -> Evaluation:
    """Measure a run's newest state, going on with what an earlier call measured; write RUN/evaluation.json.

    Where the run's folder cannot be written to, nothing is kept and nothing is written. Where the clients are on other
    machines, only the global model is measured.
    """
    names = parse_attacks(attacks if isinstance(attacks, str) else ",".join(attacks))
    check_samples(samples)
    kept = can_keep(run)
    try:
        whole = _whole_model(run, watch)
        state = _state_key(run, whole)
        engine: Engine = run.session.engine
        if kept:
            engine = Remembering(engine, Parts(run.files.path / "evaluation", state))
        evaluator = Evaluator(run.session, run.state, whole, engine, samples, watch)
        evaluation = _evaluate(evaluator, names, masking_check, asks_clients=not run.away)
        if kept:
            _write(run, state, evaluation, samples)
    except KeyboardInterrupt:
        what = "what was measured is kept. Go on with" if kept else "nothing is kept. Start again with"
        raise RunStoppedError(f"stopped; {what}: {_command(run.files.path, names, samples, masking_check)}") from None
    return evaluation


def _whole_model(run: Run, watch: Watch) -> Mapping[str, Tensor]:
    """Return the one model for everybody; that of clients who are away was made at the end of their run."""
    if run.away:
        return tensors_from_bytes(run.files.model.read_bytes())
    return exported_model(run.session, run.state, Watched(run.session.engine, _asking(watch)))


def _evaluate(
    evaluator: Evaluator, attacks: Sequence[str], masking_check: bool, asks_clients: bool = True
) -> Evaluation:
    measured = evaluator.measure(attacks) if asks_clients else _on_test_set(evaluator, attacks)
    checks = {name: _check(evaluator, name) for name in attacks if masking_check and _checkable(evaluator, name)}
    warnings = _warnings(evaluator, measured, checks)
    accuracies = cells(measured) if asks_clients else {**cells(measured), "personalised": {}}
    return Evaluation(conditions(evaluator.session), accuracies, warnings, checks)


def _on_test_set(evaluator: Evaluator, attacks: Sequence[str]) -> dict[str, Measured]:
    """Return what the test set alone says under each attack."""
    measured = {}
    for name in attacks:
        attack, threat = threat_of(evaluator.session, name)
        updates = evaluator.over_test_set(attack, threat, evaluator.test_samples, f"{name}, test set")
        measured[name] = Measured("clean" if threat is None else "adversarial", (), updates)
    return measured


def _asking(watch: Watch) -> Callable[[TaskKind, int, int], None]:
    return lambda _, done, total: watch("asking clients", done, total)


def can_keep(run: Run) -> bool:
    """Whether what is measured can be written into the run's folder."""
    return os.access(run.files.path, os.W_OK)


def check_samples(samples: int | None) -> None:
    """Refuse a number of samples that is none."""
    if samples is not None and samples < 1:
        raise ConfigError(f"the number of samples must be at least 1, not {samples}")


def _command(path: Path, attacks: Sequence[str], samples: int | None, masking_check: bool) -> str:
    command = f"fedprophet evaluate {shlex.quote(str(path))} --attack {','.join(attacks)}"
    command += "" if samples is None else f" --samples {samples}"
    return command + ("" if masking_check else " --no-masking-check")


# What speaks for gradient masking.


def _checkable(evaluator: Evaluator, attack: str) -> bool:
    return is_stepwise(attack) and 0 < evaluator.session.config.attack.radius < 1


def _check(evaluator: Evaluator, attack: str) -> Check:
    """Repeat a stepwise attack on some test samples, in the run's own ball and in larger ones."""
    name, threat = threat_of(evaluator.session, attack)
    assert threat is not None
    samples = min(evaluator.test_samples, CHECK_SAMPLES)
    larger = sorted({min(LARGER * threat.radius, 1.0), GREY})
    threats = [threat, *(_widened(threat, radius) for radius in larger if radius > threat.radius)]
    found = {}
    for each in threats:
        what = f"{attack}, masking check, radius {each.radius:g}"
        found[each.radius] = tally(evaluator.over_test_set(name, each, samples, what))
    return Check(attack, threat.radius, found)


def _widened(threat: ThreatModel, radius: float) -> ThreatModel:
    """Return the threat in a larger ball, with steps that can cross it."""
    steps = max(threat.steps, CHECK_STEPS)
    return replace(threat, radius=radius, steps=steps, step=2.5 * radius / steps)


def _warnings(
    evaluator: Evaluator, measured: Mapping[str, Measured], checks: Mapping[str, Check]
) -> dict[str, list[str]]:
    labels = evaluator.test_labels
    chance = float(labels.bincount().max()) / len(labels)
    return {
        name: [
            *_between_attacks(name, measured),
            *(checks[name].warnings(chance) if name in checks else ()),
        ]
        for name in measured
    }


def _between_attacks(name: str, measured: Mapping[str, Measured]) -> list[str]:
    """Compare an attack of several components with its own black-box part, and with the stepwise attacks."""
    signs = []
    for where, updates in {"personalised": measured[name].clients, "global": measured[name].test}.items():
        if not any(metric.startswith("broken:") for update in updates for metric in update.metrics):
            continue
        signs.append(black_box_alone(attack_label(name), where, updates))
        for other in filter(is_stepwise, measured):
            weak = tally(measured[other].clients if where == "personalised" else measured[other].test)
            signs.append(weaker_than(attack_label(name), tally(updates), attack_label(other), weak, where))
    return [sign for sign in signs if sign is not None]


# What was measured, on disk.


class Parts:
    """Metrics of tasks that were done, by the hash of the task: lines of JSON, of which a kill can tear the last.

    Several processes may add lines at the same time; two that measure the same write the same numbers.
    """

    def __init__(self, folder: Path, state: str) -> None:
        self._file = folder / f"{state}.jsonl"
        self._known: dict[str, dict[str, Any]] = {}
        for stale in folder.glob("*.jsonl"):
            if stale != self._file:
                stale.unlink(missing_ok=True)
        if self._file.exists():
            self._known = dict(_lines(self._file.read_bytes()))

    def get(self, key: str) -> Mapping[str, Any] | None:
        """Return what is known of a task."""
        return self._known.get(key)

    def add(self, key: str, value: Mapping[str, Any]) -> None:
        """Keep what a task gave, and wait until it is on the disk."""
        self._known[key] = dict(value)
        # The line begins with an end of line as well: it stays whole behind one that was torn.
        line = f"\n{json.dumps({'task': key, **value}, separators=(',', ':'))}\n".encode()
        try:
            new = not self._file.exists()
            make_folder(self._file.parent)
            with self._file.open("ab", buffering=0) as file:
                while line:
                    line = line[os.write(file.fileno(), line) :]
                os.fsync(file.fileno())
            if new:
                sync_folder(self._file.parent)
        except OSError as error:
            raise write_error(self._file, error, AGAIN) from error


def _lines(content: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in content.splitlines():
        try:
            record = json.loads(line)
            yield record.pop("task"), {"weight": record["weight"], "metrics": dict(record["metrics"])}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # torn, and measured again


class Remembering:
    """An engine that carries out only the evaluations that nobody has carried out before."""

    def __init__(self, engine: Engine, parts: Parts) -> None:
        self._engine = engine
        self._parts = parts
        self._digests: dict[Hashable, tuple[str, Mapping[str, Tensor]]] = {}

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[ClientUpdate]:
        """Yield what is known already, then what is measured now."""
        missing = {}
        for task in tasks:
            key = self._key(task)
            known = self._parts.get(key)
            if known is None:
                missing[task.client, task.number] = key, task
            else:
                yield ClientUpdate(task.kind, task.round, task.client, number=task.number, **known)
        for update in self._engine.map([task for _, task in missing.values()]):
            key, _ = missing[update.client, update.number]
            self._parts.add(key, {"weight": update.weight, "metrics": dict(update.metrics)})
            yield update

    def _key(self, task: ClientTask) -> str:
        """Return the hash of a task, its tensors included."""
        values = [getattr(task, field.name) for field in fields(task)]
        return _hash([self._digest(value) if isinstance(value, Mapping) else repr(value) for value in values])

    def _digest(self, tensors: Mapping[str, Tensor]) -> str:
        """Return the hash of some tensors; tasks share theirs, so that most sets are read only once."""
        identity = tuple((name, id(tensor)) for name, tensor in tensors.items())
        if identity not in self._digests:
            if len(self._digests) >= DIGESTS_KEPT:
                self._digests.clear()
            # The tensors are held, so that no other one gets their ids.
            self._digests[identity] = digest(tensors), dict(tensors)
        return self._digests[identity][0]


def _state_key(run: Run, whole: Mapping[str, Tensor]) -> str:
    """Return the hash of what decides the numbers beside the tasks: state, data, settings and programs."""
    session = run.session
    decisive = [__version__, torch.__version__, session.config.model_dump_json(), session.dataset.digest()]
    return _hash([*decisive, str(run.state.round), digest(whole)])


def _hash(parts: Sequence[str]) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


# What came out.


def _write(run: Run, state: str, evaluation: Evaluation, samples: int | None) -> None:
    """Write RUN/evaluation.json; what earlier commands measured of the same state stays in it."""
    file = run.files.path / "evaluation.json"
    with _locked(run.files.path / "evaluation"):
        earlier = _read(file)
        if earlier.get("state") != state:
            earlier = {"personalised": {}, "global": {}, "settings": {}}
        settings = earlier["settings"]
        for name in evaluation.accuracies["global"]:
            check = evaluation.checks.get(name)
            settings[name] = {
                "samples": samples,
                "masking_check": check and {f"{radius:g}": vars(found) for radius, found in check.found.items()},
                "warnings": list(evaluation.warnings[name]),
            }
        table = {
            "version": __version__,
            "round": run.state.round,
            "seed": run.session.config.seed,
            "radius": run.session.config.attack.radius,
            "state": state,
            **evaluation.conditions,
            **{part: {**earlier[part], **new} for part, new in evaluation.accuracies.items()},
            "warnings": [text for about in settings.values() for text in about["warnings"]],
            "settings": settings,
        }
        write_atomic(file, (json.dumps(table, indent=2) + "\n").encode(), AGAIN)


def _read(file: Path) -> dict[str, Any]:
    """Return an earlier evaluation; a damaged one is as good as none, since its parts are kept elsewhere."""
    try:
        table = json.loads(file.read_bytes())
        whole = isinstance(table, dict) and all(
            isinstance(table[k], dict) for k in ("personalised", "global", "settings")
        )
    except (OSError, ValueError, KeyError):
        return {}
    return table if whole else {}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time read and write the result; the lock goes with the process, however that ends."""
    make_folder(folder)
    number = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)
