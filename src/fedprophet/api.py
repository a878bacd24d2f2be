"""FedProphet from Python: the same runs as on the command line, with a model and data of your own."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedprophet.attacks.names import parse_attacks
from fedprophet.config.config import Config
from fedprophet.config.load import load_config, parse_config
from fedprophet.console import console_on
from fedprophet.data.dataset import Dataset
from fedprophet.display.progress import observer_for
from fedprophet.errors import ConfigError
from fedprophet.interrupts import dropped_signals_return
from fedprophet.progress import progress_bar, unwatched
from fedprophet.runs.evaluation import check_samples, evaluate_run, parse_kinds
from fedprophet.runs.evaluator import KINDS
from fedprophet.runs.export import write_model
from fedprophet.runs.observer import Observer, Observers
from fedprophet.runs.play import play
from fedprophet.runs.run import Run, open_to_read, reopen, start
from fedprophet.runs.session import OwnModel
from fedprophet.tracking import Tracker, Tracking, open_trackers


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: where its files are, and its closing summary (accuracies, modules, memory)."""

    path: Path
    results: Mapping[str, Any]


@dropped_signals_return()
def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    model: OwnModel = None,
    data: Dataset | None = None,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    observer: Observer | None = None,
    log: str | Tracker | Sequence[str | Tracker] = (),
    quiet: bool = False,
) -> TrainedRun:
    """Train and return what came out.

    `config` is a preset's name, a TOML file, a mapping of keys, or a `Config`. `model` and `data` replace the ones that
    the configuration names; the run's folder is `out`, or runs/NAME under the current directory. Numbers of each round
    are logged to `log`: a name such as "tensorboard", a tracker of your own, or several.

    In a terminal, standard error shows how far the run is, as the command line does. `quiet` leaves that out; an
    `observer` of your own is told instead.
    """
    trackers = open_trackers(log)
    run = start(_config(config, overrides), Path(out) if out is not None else None, model, data)
    return _played(run, observer, trackers, quiet)


@dropped_signals_return()
def resume(
    path: str | Path,
    *,
    model: OwnModel = None,
    data: Dataset | None = None,
    observer: Observer | None = None,
    from_round: int | None = None,
    log: str | Tracker | Sequence[str | Tracker] = (),
    quiet: bool = False,
) -> TrainedRun:
    """Resume a run that was stopped, or go back to the checkpoint of a round; pass a model or data of yours again.

    A run remembers no trackers: name them again in `log`, and they go on where they were. `observer` and `quiet` are
    those of `train`.
    """
    trackers = open_trackers(log)
    return _played(reopen(Path(path), model, data, round=from_round), observer, trackers, quiet)


def _played(run: Run, observer: Observer | None, trackers: Sequence[Tracker], quiet: bool) -> TrainedRun:
    with _shown(observer, quiet) as shown, Tracking(trackers, shown.note) as tracking:
        return TrainedRun(run.files.path, play(run, Observers(shown, tracking)))


def _shown(observer: Observer | None, quiet: bool) -> AbstractContextManager[Observer]:
    """Return who is told of a run: the given observer, else the live display in a terminal, else nobody."""
    if observer is None and _looked_at() and not quiet:
        return observer_for(console_on(err=True))
    return nullcontext(observer or Observer())


def _looked_at() -> bool:
    """Whether standard error is a terminal; a notebook is none."""
    console = console_on(err=True)
    return console.is_terminal and not console.is_jupyter


@dropped_signals_return()
def evaluate(
    path: str | Path,
    attacks: str | Sequence[str] = ("clean", "pgd20"),
    *,
    samples: int | None = None,
    of: str | Collection[str] = KINDS,
    masking_check: bool = True,
    model: OwnModel = None,
    data: Dataset | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Return a run's personalised and global accuracy under each attack, and warnings of gradient masking.

    `samples` limits how many samples of the test set, and about how many of all clients together, are used; `of` says
    whose accuracy is measured: "personalised", "uncalibrated" (where clients calibrate their scores), "global". What is
    measured is kept in the run's folder, so that a stopped call can continue; the result is in evaluation.json. In a
    terminal, standard error shows how far it is; `quiet` leaves that out.
    """
    names = parse_attacks(attacks if isinstance(attacks, str) else ",".join(attacks))
    check_samples(samples)
    kinds = parse_kinds(of)
    run = open_to_read(Path(path), model, data)
    shown = progress_bar() if _looked_at() and not quiet else nullcontext(unwatched)
    with closing(run.session), shown as watch:
        return evaluate_run(run, names, samples, masking_check, watch, kinds).to_json()


@dropped_signals_return()
def export(path: str | Path, out: str | Path, *, model: OwnModel = None, data: Dataset | None = None) -> None:
    """Write a run's model as one safetensors file; its metadata say where its norm layers come from."""
    run = open_to_read(Path(path), model, data)
    with closing(run.session):
        write_model(run, Path(out))


def _config(config: Config | Mapping[str, Any] | str | Path | None, overrides: Sequence[str]) -> Config:
    if not isinstance(config, Config | Mapping):
        return load_config(config, overrides)
    if overrides:
        raise ConfigError("overrides go with a preset's name or a file: put them into the mapping or Config itself")
    return config if isinstance(config, Config) else parse_config(config)
