"""The evaluation of a run's newest state, which may take long: what is measured is kept, so that a stop costs little.

RUN/evaluation/STATE.jsonl has a line for each task that was done: a client or a part of the test set under one attack.
STATE is the hash of everything that decides the numbers; files of other states are removed. RUN/evaluation.json is the
result.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedprophet.attacks.names import parse_attacks
from fedprophet.errors import ConfigError, unknown
from fedprophet.going_on import how_to_evaluate
from fedprophet.messages.modules import digest
from fedprophet.progress import Watch, unwatched
from fedprophet.runs.asking import WatchedEngine
from fedprophet.runs.evaluator import KINDS, Evaluator, Kind, cells, conditions
from fedprophet.runs.export import exported_model, finished_model
from fedprophet.runs.masking import MaskingCheck, check_masking, masking_warnings
from fedprophet.runs.measured import AGAIN, MeasuredTasks, RememberingEngine, hash_of
from fedprophet.runs.run import Run, RunStoppedError
from fedprophet.server.coordinator import Engine
from fedprophet.storage.files import make_folder, parse_json, tensors_from_bytes, write_json
from fedprophet.storage.locks import folder_lock
from fedprophet.version import __version__

GLOBAL_ALONE: tuple[Kind, ...] = ("global",)


@dataclass(frozen=True)
class RunEvaluation:
    """Accuracies, what they depend on, and warnings of gradient masking by the attack they are about."""

    conditions: Mapping[str, Any]
    accuracies: Mapping[str, Mapping[str, Any]]
    warnings: Mapping[str, Sequence[str]]
    checks: Mapping[str, MaskingCheck]

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
    of: str | Collection[str] = KINDS,
) -> RunEvaluation:
    """Measure a run's newest state, reusing what an earlier call measured; write RUN/evaluation.json.

    If the run's folder is read-only, nothing is kept. If the clients are on other machines, only the global model is
    measured.
    """
    names = parse_attacks(attacks if isinstance(attacks, str) else ",".join(attacks))
    check_samples(samples)
    kept = can_keep(run)
    asked = parse_kinds(of)
    if run.away and "global" not in asked:
        raise ConfigError("the clients of this run are on other machines: only the global accuracy can be measured")
    if asked == ("uncalibrated",) and run.session.config.train.calibration == "none":
        raise ConfigError("nothing to measure: the clients of this run add no label frequencies to their scores")
    try:
        whole = _whole_model(run, watch)
        state = _state_key(run, whole)
        engine: Engine = run.session.engine
        if kept:
            engine = RememberingEngine(engine, MeasuredTasks(run.files.path / "evaluation", state))
        evaluator = Evaluator(run.session, run.state, whole, engine, samples, watch)
        evaluation = _evaluate(evaluator, names, masking_check, GLOBAL_ALONE if run.away else asked)
        if kept:
            _write(run, state, evaluation, samples)
    except KeyboardInterrupt:
        what = "what was measured is kept. Resume it with" if kept else "nothing is kept. Start again with"
        raise RunStoppedError(
            f"stopped; {what}: {_command(run.files.path, names, samples, masking_check, asked)}"
        ) from None
    return evaluation


def can_keep(run: Run) -> bool:
    """Whether what is measured can be written into the run's folder."""
    return os.access(run.files.path, os.W_OK)


def parse_kinds(of: str | Collection[str]) -> tuple[Kind, ...]:
    """Return whose accuracies are asked for, from their names, which commas may separate."""
    names = [name.strip() for name in of.split(",")] if isinstance(of, str) else list(of)
    for name in names or [""]:
        if name not in KINDS:
            raise ConfigError(unknown("kind of accuracy", name, KINDS))
    return tuple(kind for kind in KINDS if kind in names)


def check_samples(samples: int | None) -> None:
    """Refuse a number of samples below one."""
    if samples is not None and samples < 1:
        raise ConfigError(f"the number of samples must be at least 1, not {samples}")


def _whole_model(run: Run, watch: Watch) -> Mapping[str, Tensor]:
    """Return the exported model; a run on other machines exported it when it ended."""
    if run.away:
        return tensors_from_bytes(finished_model(run))
    engine = WatchedEngine(run.session.engine, lambda _, done, total: watch("asking clients", done, total))
    return exported_model(run.session, run.state, engine)


def _state_key(run: Run, whole: Mapping[str, Tensor]) -> str:
    """Return the hash of what decides the numbers besides the tasks: state, data, settings and versions."""
    session = run.session
    decisive = [__version__, torch.__version__, session.config.model_dump_json(), session.dataset.digest()]
    return hash_of([*decisive, str(run.state.round), digest(whole)])


def _evaluate(evaluator: Evaluator, attacks: Sequence[str], masking_check: bool, of: Sequence[Kind]) -> RunEvaluation:
    results = evaluator.measure(attacks, of)
    checks = check_masking(evaluator, attacks) if masking_check and "global" in of else {}
    accuracies = {kind: found if kind in of else {} for kind, found in cells(results).items()}
    warnings = masking_warnings(evaluator.test_labels, results, checks)
    return RunEvaluation(conditions(evaluator.session, evaluator.state), accuracies, warnings, checks)


def _command(path: Path, attacks: Sequence[str], samples: int | None, masking_check: bool, of: Sequence[Kind]) -> str:
    options: dict[str, object] = {} if of == KINDS else {"of": ",".join(of)}
    options |= {} if samples is None else {"samples": samples}
    options |= {} if masking_check else {"masking_check": False}
    return how_to_evaluate(path, ",".join(attacks), **options)


def _write(run: Run, state: str, evaluation: RunEvaluation, samples: int | None) -> None:
    """Write RUN/evaluation.json; what earlier commands measured of the same state stays in it."""
    file, folder = run.files.path / "evaluation.json", run.files.path / "evaluation"
    make_folder(folder)
    with folder_lock(folder):
        earlier = _read(file)
        if earlier.get("state") != state:
            earlier = {"personalised": {}, "global": {}, "settings": {}}
        settings = earlier["settings"]
        for name in evaluation.warnings:
            check = evaluation.checks.get(name)
            about: dict[str, Any] = {
                "samples": samples,
                "masking_check": check and {f"{radius:g}": vars(found) for radius, found in check.found.items()},
                "warnings": list(evaluation.warnings[name]),
            }
            # What was found of the exported model stays with its accuracy, until that is measured again.
            stays = name in settings and not evaluation.accuracies["global"]
            settings[name] = {**about, **settings[name], "samples": samples} if stays else about
        table: dict[str, Any] = {
            "version": __version__,
            "round": run.state.round,
            "seed": run.session.config.seed,
            "radius": run.session.config.attack.radius,
            "state": state,
            **evaluation.conditions,
            **{
                kind: {**earlier.get(kind, {}), **evaluation.accuracies.get(kind, {})}
                for kind in KINDS
                if kind in earlier or kind in evaluation.accuracies
            },
            "warnings": [text for about in settings.values() for text in about["warnings"]],
            "settings": settings,
        }
        write_json(file, table, AGAIN)


def _read(file: Path) -> dict[str, Any]:
    """Return an earlier evaluation; a damaged one counts as none, since its tasks are kept elsewhere."""
    try:
        table = parse_json(file.read_bytes())
        tables = [table[part] for part in ("personalised", "global", "settings")]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return table if all(isinstance(part, dict) for part in tables) else {}
