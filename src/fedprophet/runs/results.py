"""What comes out of a run: accuracies, the one model that everybody can load, and the closing summary."""

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedprophet.attacks import ATTACKS, Attack
from fedprophet.client.statistics import ADVERSARIAL
from fedprophet.errors import ConfigError
from fedprophet.messages.task import SERVER, ClientTask, ClientUpdate
from fedprophet.runs.session import Session
from fedprophet.server.accuracy import evaluation_fault, personalised_estimate, pooled_estimate
from fedprophet.server.coordinator import Accountant, Engine, Record
from fedprophet.server.rejections import weight_fault
from fedprophet.threat import ThreatModel

CLEAN = "clean"
CLIENTS_TOGETHER = 1000
"""So many clients' tasks are made at a time."""
PART_SAMPLES = 64
"""The test set is evaluated in parts of about as many samples, so that progress shows and little is lost by a stop."""

Watch = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and how much there is."""


def unwatched(what: str, done: int, total: int) -> None:
    """Say nothing."""


def parse_attacks(text: str) -> tuple[str, ...]:
    """Return the names of attacks in `clean,pgd20`, checked; what they need must be installed."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = ", ".join(repr(name) for name in names if name != CLEAN and _find(name) is None)
    if wrong or not names:
        what = f"unknown attack {wrong}" if wrong else "no attack is given"
        raise ConfigError(f"{what}. Allowed: {', '.join(allowed_attacks())}; several separated by commas")
    for name in names:
        entry = ATTACKS.get(name)
        if entry is not None and entry.module is not None and importlib.util.find_spec(entry.module) is None:
            raise ConfigError(
                f"the attack {name} needs the extra `{entry.extra}`: pip install 'fedprophet[{entry.extra}]'"
            )
    return names


def allowed_attacks() -> list[str]:
    """Return what an evaluation can measure, as people write it."""
    steps = [f"{name}N with N steps (as in {name}20)" for name, entry in ATTACKS.items() if entry.takes_steps]
    return [CLEAN, *steps, *(name for name, entry in ATTACKS.items() if not entry.takes_steps)]


def _find(name: str) -> tuple[str, Attack, int | None] | None:
    """Return an attack's entry and its number of steps: for pgd20 that of pgd, and 20."""
    match = re.fullmatch(r"([a-z-]+)([1-9][0-9]*)?", name)
    entry = ATTACKS.get(match[1]) if match else None
    if match is None or entry is None or entry.takes_steps != (match[2] is not None):
        return None
    return match[1], entry, int(match[2]) if match[2] else None


def attack_label(name: str) -> str:
    """Return what a table calls an attack."""
    found = _find(name)
    if found is None:
        return "Clean"
    _, entry, steps = found
    return entry.label if steps is None else f"{entry.label}-{steps}"


def is_stepwise(name: str) -> bool:
    """Whether an attack is one of so many steps, as pgd20 is."""
    found = _find(name)
    return found is not None and found[1].takes_steps


def threat_of(session: Session, name: str) -> tuple[str, ThreatModel | None]:
    """Return the attack's name in the table of attacks, and its threat; none where nothing is attacked."""
    found = _find(name)
    if found is None:
        return "pgd", None
    key, _, steps = found
    return key, session.world.image_threat(steps or session.config.evaluate.steps)


@dataclass(frozen=True)
class Measured:
    """What came back for one attack: from the clients, and for the parts of the test set."""

    metric: str
    clients: Sequence[ClientUpdate]
    test: Sequence[ClientUpdate]


def evaluate(session: Session, state: Any, attacks: Sequence[str], engine: Engine) -> dict[str, dict[str, Any]]:
    """Return personalised and global accuracy under each attack, with samples and 95 % intervals."""
    return cells(Evaluator(session, state, exported_model(session, state, engine), engine).measure(attacks))


def cells(measured: Mapping[str, Measured]) -> dict[str, dict[str, Any]]:
    """Return the accuracies as they are written."""
    own = {name: personalised_estimate(found.clients, found.metric) for name, found in measured.items()}
    whole = {name: pooled_estimate(found.test, found.metric) for name, found in measured.items()}
    return {
        part: {name: asdict(value) | {"interval": list(value.interval)} for name, value in estimates.items()}
        for part, estimates in {"personalised": own, "global": whole}.items()
    }


@dataclass(frozen=True)
class Evaluator:
    """Measures one state of a run.

    Personalised: each client that `evaluate.clients` asks, on its own held-out part. Global: `whole`, the one exported
    model, on the test set, or as many samples of it as `evaluate.test_samples` says. `conditions` says with which norm
    layers. `samples` limits both: N of the test set, and ⌈N / K⌉ for each of K clients.
    """

    session: Session
    state: Any
    whole: Mapping[str, Tensor]
    engine: Engine
    samples: int | None = None
    watch: Watch = unwatched

    @property
    def test_samples(self) -> int:
        """How many samples of the test set are used."""
        asked = self.samples or self.session.config.evaluate.test_samples
        available = len(self.test_labels)
        return min(asked, available) if asked else available

    @property
    def test_labels(self) -> Tensor:
        """The labels of the server's test set."""
        return self.session.population.client_data(SERVER).validation.labels

    def measure(self, attacks: Sequence[str]) -> dict[str, Measured]:
        """Return what the clients and the test set say under each attack."""
        measured = {}
        for name in attacks:
            attack, threat = threat_of(self.session, name)
            metric = CLEAN if threat is None else "adversarial"
            test = self.over_test_set(attack, threat, self.test_samples, f"{name}, test set")
            measured[name] = Measured(metric, self._over_clients(attack, threat, f"{name}, clients"), test)
        return measured

    def _over_clients(self, attack: str, threat: ThreatModel | None, what: str) -> list[ClientUpdate]:
        session, state = self.session, self.state
        clients = session.world.sample(session.config.evaluate.clients, state.round, "evaluate")
        samples = None if self.samples is None else -(-self.samples // len(clients))
        updates: list[ClientUpdate] = []
        self.watch(what, 0, len(clients))
        for start in range(0, len(clients), CLIENTS_TOGETHER):
            some = clients[start : start + CLIENTS_TOGETHER]
            tasks = [session.method.evaluation_task(state, client, threat) for client in some]
            tasks = [replace(task, attack=attack, samples=samples) for task in tasks]
            for update in in_order(tasks, self.engine):
                updates.append(update)
                self.watch(what, len(updates), len(clients))
        return [update for update in updates if evaluation_fault(update) is None]

    def over_test_set(self, attack: str, threat: ThreatModel | None, samples: int, what: str) -> list[ClientUpdate]:
        """Return what each part of the test set says; `samples` of it are drawn, the same ones for every attack."""
        task = self.session.method.evaluation_task(self.state, SERVER, threat)
        layers = {name: self.whole[name] for name in self.session.world.chain.local()}
        task = replace(task, attack=attack, samples=samples, parameters={**task.parameters, **layers})
        size = task.batch * max(1, PART_SAMPLES // task.batch)
        parts = [(start, min(start + size, samples)) for start in range(0, samples, size)]
        tasks = [replace(task, number=number, part=part) for number, part in enumerate(parts)]
        updates: list[ClientUpdate] = []
        self.watch(what, 0, samples)
        for update in in_order(tasks, self.engine):
            updates.append(update)
            self.watch(what, parts[update.number][1], samples)
        return updates


def average_local(session: Session, state: Any, engine: Engine) -> Mapping[str, Tensor]:
    """Return one set of norm layers: the mean, weighted by shard size, over the clients that have trained them."""
    timeline = session.method.timeline(state)
    cohorts = map(session.world.cohort, range(1, state.round + 1))
    tasks = [
        ClientTask("report", state.round, client, session.config.seed, timeline=timeline, wants_local=True)
        for client in sorted({client for cohort in cohorts for client in cohort})
    ]
    answers = (answer for answer in in_order(tasks, engine) if _sound_layers(session.initial_local, answer))
    return session.world.joined(session.initial_local, ((answer.weight, answer.local) for answer in answers))


def _sound_layers(known: Mapping[str, Tensor], update: ClientUpdate) -> bool:
    """Whether a client's own layers may enter an average: those of the model, and finite."""
    fits = (
        name.removeprefix(ADVERSARIAL) in known
        and value.shape == known[name.removeprefix(ADVERSARIAL)].shape
        and bool(torch.isfinite(value.to(known[name.removeprefix(ADVERSARIAL)].dtype)).all())
        for name, value in update.local.items()
    )
    return update.weight > 0 and weight_fault(update.weight) is None and all(fits)


def in_order(tasks: Sequence[ClientTask], engine: Engine) -> Iterator[ClientUpdate]:
    """Yield the updates in the order of their tasks, in whichever order an engine brings them.

    A sum over clients then has the same bits on every engine; only updates that came too early are held. Who does not
    answer is left out, and so are answers that nobody asked for or that come twice.
    """
    early: dict[tuple[int, int], ClientUpdate] = {}
    order = [(task.client, task.number) for task in tasks]
    open_ = set(order)
    turn = 0
    for update in engine.map(tasks):
        if (update.client, update.number) not in open_:
            continue
        open_.remove((update.client, update.number))
        early[update.client, update.number] = update
        while turn < len(order) and order[turn] in early:
            yield early.pop(order[turn])
            turn += 1
    yield from (early[name] for name in order if name in early)


def exported_model(session: Session, state: Any, engine: Engine) -> Mapping[str, Tensor]:
    """Return the whole model under its state-dict names, as the method makes it of the clients' averaged layers."""
    return session.method.exported(state, average_local(session, state, engine))


def conditions(session: Session) -> dict[str, Any]:
    """Return what the accuracies depend on, for people and files: the start, norm layers, what left the test set."""
    return {
        "starting_weights": session.config.model.weights or None,
        "norm_layers": {"personalised": session.method.client_norm_layers, "global": session.method.norm_layers},
        "public_samples": len(session.population.client_data(SERVER).train),
    }


def simulated_seconds(records: Iterable[Record]) -> dict[str, float]:
    """Return the training time that the device pool would have taken: a round lasts as long as its slowest client."""
    slowest = [
        max(record["times"].values(), key=lambda time: time["computation_s"] + time["access_s"])
        for record in records
        if record.get("times")
    ]
    parts = {name: sum(time[name] for time in slowest) for name in ("computation_s", "access_s")}
    return {**parts, "total_s": sum(parts.values())}


def training_memory(records: Iterable[Record]) -> dict[str, int] | None:
    """Return the bytes that clients' training takes in the cost model; None where the journal does not say.

    With `least_bytes` a device could have done the smallest task of every round: in each round the smallest task
    counts, and over the rounds the largest of these. Where tasks grow with what clients can spare, a device may need
    less. `peak_bytes` is the largest task of all.
    """
    rounds = [
        [time.get("memory_bytes") for time in record["times"].values()] for record in records if record.get("times")
    ]
    known = [[size for size in sizes if size is not None] for sizes in rounds]
    if not rounds or known != rounds:
        return None
    return {"least_bytes": max(map(min, known)), "peak_bytes": max(map(max, known))}


def wire_bytes(records: Iterable[Record]) -> dict[str, int] | None:
    """Return the bytes that a run has moved, and those that jFAT would have; None where no engine counted them."""
    counted = [record["wire"] for record in records if "wire" in record]
    if not counted:
        return None
    return {part: sum(wire[part] for wire in counted) for part in ("sent", "received", "jfat")}


def fault_count(records: Iterable[Record]) -> int:
    """Return how often a client's answer was missing, failed or could not be used."""
    return sum(len(faulty_clients(record)) for record in records)


def faulty_clients(record: Record) -> dict[str, list[str]]:
    """Return the clients of a round that did not do their part, each with the reasons there are."""
    reasons: dict[str, list[str]] = {}
    for kind, clients in record.get("missing", {}).items():
        for client in clients:
            reasons.setdefault(str(client), []).append(f"no answer ({kind})")
    for key in ("dropped", "faults"):
        for client, reason in record.get(key, {}).items():
            reasons.setdefault(str(client), []).append(str(reason))
    return reasons


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

    def account(self) -> Record:
        """Pass on what the engine accounts for; one that keeps no accounts has nothing to say."""
        return self._engine.account() if isinstance(self._engine, Accountant) else {}
