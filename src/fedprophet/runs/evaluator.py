"""Accuracies of a state of a run: on each client's own data, and of the one exported model on the test set."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import Tensor

from fedprophet.attacks.autoattack import SUITES
from fedprophet.attacks.names import find_attack
from fedprophet.client.measure import drawn_together
from fedprophet.messages.answers import Evaluated
from fedprophet.messages.values import SERVER
from fedprophet.methods.base import MethodState
from fedprophet.progress import Watch, unwatched
from fedprophet.runs.asking import in_order
from fedprophet.runs.engine_history import CUDA
from fedprophet.runs.export import exported_model
from fedprophet.runs.session import Session
from fedprophet.server.accuracy import InputKind, evaluation_fault, personalised_estimate, pooled_estimate
from fedprophet.server.coordinator import Engine
from fedprophet.threat import ThreatModel

Kind = Literal["personalised", "uncalibrated", "global"]
KINDS: tuple[Kind, ...] = ("personalised", "uncalibrated", "global")
"""What an accuracy is of: the clients; if they calibrate their scores, the clients without that; the exported model."""
CLIENTS_TOGETHER = 1000
"""How many clients' tasks are made at a time."""
PART_SAMPLES = 64
"""The test set is evaluated in parts of about this size, so that progress shows and a stop loses little."""


def threat_of(session: Session, name: str) -> tuple[str, ThreatModel | None]:
    """Return the attack's name in the table of attacks, and its threat; None for `clean`."""
    found = find_attack(name)
    if found is None:
        return "pgd", None
    return found.key, session.world.image_threat(found.steps or session.config.evaluate.steps)


def precision_of(session: Session, attack: str) -> str:
    """Return the precision in which a run is measured under an attack of the table of attacks."""
    # AutoAttack is always in float32: its last steps are finer than bfloat16.
    return session.config.precision if session.engine_name == CUDA and attack not in SUITES else "float32"


@dataclass(frozen=True)
class AttackResult:
    """The answers for one attack, of the clients and for the parts of the test set; `inputs` says which ones count.

    `precision` is that of activations and products. `uncalibrated` are the answers of the clients without their label
    frequencies, where they were trained with them.
    """

    inputs: InputKind
    precision: str
    clients: Sequence[Evaluated]
    test: Sequence[Evaluated]
    uncalibrated: Sequence[Evaluated] | None = None


def evaluate(session: Session, state: MethodState, attacks: Sequence[str], engine: Engine) -> dict[str, dict[str, Any]]:
    """Return personalised and global accuracy under each attack, with samples and 95 % intervals."""
    return cells(Evaluator(session, state, exported_model(session, state, engine), engine).measure(attacks))


def cells(results: Mapping[str, AttackResult]) -> dict[str, dict[str, Any]]:
    """Return the accuracies as they are written to files."""
    own = {name: personalised_estimate(found.clients, found.inputs) for name, found in results.items()}
    without = {
        name: personalised_estimate(found.uncalibrated, found.inputs)
        for name, found in results.items()
        if found.uncalibrated is not None
    }
    whole = {name: pooled_estimate(found.test, found.inputs) for name, found in results.items()}
    parts = {"personalised": own, **({"uncalibrated": without} if without else {}), "global": whole}
    return {
        part: {
            name: asdict(value) | {"interval": list(value.interval), "precision": results[name].precision}
            for name, value in estimates.items()
        }
        for part, estimates in parts.items()
    }


def conditions(session: Session, state: MethodState) -> dict[str, Any]:
    """Return what a state's accuracies depend on: starting weights, norm layers, how many samples are public, and over
    how many rounds the model is averaged at most, if it is.
    """
    averaged = session.config.horizon_rounds
    return {
        **({"averaged_rounds": averaged} if averaged else {}),
        "starting_weights": session.config.model.weights or None,
        "norm_layers": session.method.layers_of(state),
        "public_samples": len(session.population.client_data(SERVER).train),
    }


@dataclass(frozen=True)
class Evaluator:
    """Measures one state of a run.

    Personalised: each client that `evaluate.clients` asks, on its own held-out part; if clients calibrate their scores,
    also without that. Global: `whole`, the exported model, on the test set, or as many samples of it as
    `evaluate.test_samples` says. `samples` limits both: N of the test set, and ⌈N / K⌉ for each of K clients.
    """

    session: Session
    state: MethodState
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

    def measure(self, attacks: Sequence[str], of: Collection[Kind] = KINDS) -> dict[str, AttackResult]:
        """Return the answers under each attack; what is not asked for has none."""
        results = {}
        calibrates = self.session.config.train.calibration != "none"
        for name in attacks:
            attack, threat = threat_of(self.session, name)
            test: Sequence[Evaluated] = ()
            if "global" in of:
                test = self.over_test_set(attack, threat, self.test_samples, f"{name}, test set")
            own = self._over_clients(attack, threat, f"{name}, clients") if "personalised" in of else ()
            without = None
            if calibrates and "uncalibrated" in of:
                without = self._over_clients(attack, threat, f"{name}, clients, uncalibrated", calibrated=False)
            inputs: InputKind = "clean" if threat is None else "adversarial"
            results[name] = AttackResult(inputs, precision_of(self.session, attack), own, test, without)
        return results

    def _over_clients(
        self, attack: str, threat: ThreatModel | None, what: str, calibrated: bool = True
    ) -> list[Evaluated]:
        session, state, judged = self.session, self.state, self.state.judged
        clients = session.world.clients.sample(session.config.evaluate.clients, state.round, "evaluate")
        samples = None if self.samples is None else -(-self.samples // len(clients))
        answers: list[Evaluated] = []
        self.watch(what, 0, len(clients))
        for start in range(0, len(clients), CLIENTS_TOGETHER):
            some = clients[start : start + CLIENTS_TOGETHER]
            tasks = [session.method.evaluation_task(judged, client, threat) for client in some]
            tasks = [replace(task, attack=attack, samples=samples) for task in tasks]
            tasks = tasks if calibrated else [replace(task, calibration=0.0) for task in tasks]
            for answer in in_order(tasks, self.engine, Evaluated):
                answers.append(answer)
                self.watch(what, len(answers), len(clients))
        sound = [answer for answer in answers if evaluation_fault(answer) is None]
        return session.world.aggregator.believed(sound, {})

    def over_test_set(self, attack: str, threat: ThreatModel | None, samples: int, what: str) -> list[Evaluated]:
        """Return the answers for the parts of the test set; the same `samples` are drawn for every attack."""
        task = self.session.method.evaluation_task(self.state.judged, SERVER, threat)
        layers = {name: self.whole[name] for name in self.session.world.chain.local()}
        task = replace(task, attack=attack, samples=samples, parameters={**task.parameters, **layers})
        batch = drawn_together(task)
        size = batch * max(1, PART_SAMPLES // batch)
        parts = [(start, min(start + size, samples)) for start in range(0, samples, size)]
        tasks = [replace(task, number=number, part=part) for number, part in enumerate(parts)]
        answers: list[Evaluated] = []
        self.watch(what, 0, samples)
        for answer in in_order(tasks, self.engine, Evaluated):
            answers.append(answer)
            self.watch(what, parts[answer.number][1], samples)
        return answers
