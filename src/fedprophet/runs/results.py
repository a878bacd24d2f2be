"""What comes out of a run: accuracies, the one model that everybody can load, and the closing summary."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fedprophet.client.task import SERVER, ClientTask, ClientUpdate
from fedprophet.errors import ConfigError
from fedprophet.runs.session import Session
from fedprophet.server.accuracy import Accuracy, personalised
from fedprophet.server.aggregate import partial_average
from fedprophet.server.coordinator import Engine, Record
from fedprophet.threat import ThreatModel

_PGD = re.compile(r"pgd([1-9][0-9]*)")


def parse_attacks(text: str) -> tuple[str, ...]:
    """Return the names of attacks in `clean,pgd20`, checked."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = ", ".join(repr(name) for name in names if name != "clean" and not _PGD.fullmatch(name))
    if wrong or not names:
        what = f"unknown attack {wrong}" if wrong else "no attack is given"
        raise ConfigError(f"{what}. Allowed: clean, or pgdN with N steps (as in pgd20); several separated by commas")
    return names


def evaluate(session: Session, state: Any, attacks: Sequence[str], engine: Engine) -> dict[str, dict[str, Any]]:
    """Return personalised and global accuracy under each attack.

    Personalised: each client that `evaluate.clients` asks, on its own held-out part, with its own norm layers. Global:
    the one exported model, with averaged norm layers, on the test set.
    """
    local = average_local(session, state, engine)

    def over_clients(threat: ThreatModel | None) -> Accuracy:
        clients = session.world.sample(session.config.evaluate.clients, state.round, "evaluate")
        tasks = [session.method.evaluation_task(state, client, threat) for client in clients]
        return personalised(list(in_order(tasks, engine)))

    def over_test_set(threat: ThreatModel | None) -> Accuracy:
        task = session.method.evaluation_task(state, SERVER, threat)
        return personalised(list(engine.map([replace(task, parameters={**task.parameters, **local})])))

    return {
        "personalised": _by_attack(session, attacks, over_clients),
        "global": _by_attack(session, attacks, over_test_set),
    }


def _by_attack(session: Session, attacks: Sequence[str], measure: Any) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in attacks:
        match = _PGD.fullmatch(name)
        accuracy = measure(session.world.image_threat(int(match[1])) if match else None)
        value = accuracy.adversarial if match else accuracy.clean
        results[name] = {"accuracy": value, "samples": accuracy.samples}
    return results


def average_local(session: Session, state: Any, engine: Engine) -> Mapping[str, Tensor]:
    """Return one set of norm layers: the mean, weighted by shard size, over the clients that have trained them."""
    timeline = session.method.timeline(state)
    cohorts = map(session.world.cohort, range(1, state.round + 1))
    tasks = [
        ClientTask("report", state.round, client, session.config.seed, timeline=timeline, wants_local=True)
        for client in sorted({client for cohort in cohorts for client in cohort})
    ]
    answers = in_order(tasks, engine)
    return partial_average(session.initial_local, ((answer.weight, answer.local) for answer in answers))


def in_order(tasks: Sequence[ClientTask], engine: Engine) -> Iterator[ClientUpdate]:
    """Yield the updates in the order of their tasks, in whichever order an engine brings them.

    A sum over clients then has the same bits on every engine; only updates that came too early are held.
    """
    early: dict[int, ClientUpdate] = {}
    turn = 0
    for update in engine.map(tasks):
        early[update.client] = update
        while turn < len(tasks) and tasks[turn].client in early:
            yield early.pop(tasks[turn].client)
            turn += 1
    yield from (early[client] for client in sorted(early))


def exported_model(session: Session, state: Any, engine: Engine) -> dict[str, Tensor]:
    """Return the whole model under its state-dict names, with averaged norm layers."""
    return {**session.method.model(state), **average_local(session, state, engine)}


def simulated_seconds(records: Iterable[Record]) -> dict[str, float]:
    """Return the training time that the device pool would have taken: a round lasts as long as its slowest client."""
    slowest = [
        max(record["times"].values(), key=lambda time: time["computation_s"] + time["access_s"])
        for record in records
        if record.get("times")
    ]
    parts = {name: sum(time[name] for time in slowest) for name in ("computation_s", "access_s")}
    return {**parts, "total_s": sum(parts.values())}


class Watched:
    """An engine that tells somebody about each task that is done."""

    def __init__(self, engine: Engine, done: Any) -> None:
        self._engine = engine
        self._done = done

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[ClientUpdate]:
        """Pass the tasks on and report each update."""
        tasks = list(tasks)
        for number, update in enumerate(self._engine.map(tasks), start=1):
            self._done(update.kind, number, len(tasks))
            yield update
