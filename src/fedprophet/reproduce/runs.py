"""The runs behind the experiments: which are there, which are missing, and how they are carried out."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from fedprophet import data
from fedprophet.config.compare import differences
from fedprophet.config.config import Config, machine_keys
from fedprophet.config.load import load_config
from fedprophet.display.progress import observer_for
from fedprophet.errors import ConfigError, DataError, TrainingError, unknown
from fedprophet.methods import reads
from fedprophet.progress import progress_bar
from fedprophet.report.compare import IRRELEVANT
from fedprophet.report.folders import read_run
from fedprophet.report.runs import RunSummary
from fedprophet.reproduce.scales import PaperSetting, Scale
from fedprophet.runs.evaluation import evaluate_run
from fedprophet.runs.files import RunFiles, is_finished, read_results
from fedprophet.runs.journal import Journal, timings_of
from fedprophet.runs.play import play
from fedprophet.runs.run import RunStoppedError, open_to_read, reopen, start

RUNS = "runs"
"""The folder of the runs, inside that of --out."""
FREE_KEYS = IRRELEVANT - {"seed", "precision"}
"""Keys in which a run may differ from what an experiment asks for: they do not change what it is about."""
State = Literal["missing", "stopped", "finished"]


def key_of(change: str) -> str:
    """Return the key of `KEY=VALUE`."""
    return change.partition("=")[0].strip()


@dataclass(frozen=True)
class Variant:
    """What a row trains: a method, and the keys that are changed for it; `{small_model}` is the setting's.

    A variant for which the fleet makes no difference to what is trained (`fleet_free`) is trained on the balanced one
    alone.
    """

    name: str
    method: str
    changes: tuple[str, ...] = ()
    fleet_free: bool = False

    @property
    def own_keys(self) -> frozenset[str]:
        """The keys that it sets itself, whatever the user changes."""
        return frozenset({"method", "seed", *map(key_of, self.changes)})


@dataclass(frozen=True)
class PlannedRun:
    """A run that an experiment needs: its folder, and the configuration that it must have."""

    path: Path
    config: Config
    setting: PaperSetting
    kept: bool = False
    """Whether only its results are there, without its model."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def method(self) -> str:
        return self.config.method

    @property
    def state(self) -> State:
        files = RunFiles(self.path)
        if not files.config.exists():
            return "missing"
        return "finished" if self.kept or is_finished(files) else "stopped"

    @property
    def apart(self) -> str:
        """In what the run in its folder has other settings than those that are asked for, as a sentence."""
        differs = [] if self.state == "missing" else settings_apart(self.config, self.path)
        if not differs:
            return ""
        return (
            f"{self.path} holds a run with other settings than asked for ({'; '.join(differs)}). Move it away, "
            "or give another folder with --out"
        )

    def play(self, console: Console) -> None:
        """Start the run, or go on with it."""
        run = start(self.config, self.path) if self.state == "missing" else reopen(self.path)
        with observer_for(console) as observer:
            play(run, observer)

    def unmeasured(self, attacks: Sequence[str]) -> list[str]:
        """Return the attacks that the finished run's model could still be measured with."""
        if self.kept or not attacks:
            return []
        known = read_run(self.path).accuracies.get("personalised", {})
        return [attack for attack in attacks if attack not in known]


def settings_apart(config: Config, run: Path) -> list[str]:
    """Return in what a run differs from a configuration: the keys that change what its method trains."""
    found = differences(config, load_config(run / "config.toml"), machine_keys() | FREE_KEYS)
    return [text for text in found if reads(config.method, text.partition(":")[0])]


class FinishedRun:
    """What a finished run's folder says."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def summary(self) -> RunSummary:
        return read_run(self.path)

    @cached_property
    def results(self) -> Mapping[str, Any]:
        return read_results(self.path)

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        return Journal(RunFiles(self.path).journal).read()

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of its rounds."""
        lines = timings_of(RunFiles(self.path)).read()
        return float(sum(line.get("total_seconds", line["seconds"]) for line in lines))


@lru_cache(1024)
def _loaded(preset: str, overrides: tuple[str, ...]) -> Config:
    return load_config(preset, overrides)


@dataclass(frozen=True)
class Setup:
    """What was asked for: the scale, the folder, changed keys, seeds, and perhaps some of the settings only.

    Runs whose results are `kept` in another folder, with the settings asked for, take the place of missing ones.
    """

    scale: Scale
    out: Path
    overrides: tuple[str, ...] = ()
    seeds: int = 1
    only: tuple[str, ...] = ()
    kept: Path | None = None

    def __post_init__(self) -> None:
        known = [setting.preset for setting in self.scale.settings]
        for name in self.only:
            if name not in known:
                raise ConfigError(f"--only: {unknown('setting', name, known)}")
        for setting in self.settings:  # also what an experiment does not heed has to be right
            _loaded(setting.preset, self.overrides)

    @property
    def settings(self) -> tuple[PaperSetting, ...]:
        return tuple(w for w in self.scale.settings if not self.only or w.preset in self.only)

    def config(self, setting: PaperSetting, variant: Variant, seed: int = 0, more: Iterable[str] = ()) -> Config:
        """Return the configuration of a run; what makes the variant is stronger than what the user changes."""
        own = (change.format(small_model=setting.small_model) for change in variant.changes)
        fixed = (*own, f"method={variant.method}", f"seed={seed}")
        return _loaded(setting.preset, (*self.overrides, *fixed, *more))

    def planned(self, setting: PaperSetting, variant: Variant) -> tuple[PlannedRun, ...]:
        """Return the runs of a variant, one for each seed."""
        if variant.fleet_free:
            setting = next((w for w in self.scale.settings if w.preset == setting.balanced), setting)
        return tuple(self._planned(setting, variant, seed) for seed in range(self.seeds))

    def _planned(self, setting: PaperSetting, variant: Variant, seed: int) -> PlannedRun:
        path = self.out / RUNS / f"{setting.preset}-{variant.name}-seed{seed}"
        run = PlannedRun(path, self.config(setting, variant, seed), setting)
        if self.kept is None or run.state != "missing":
            return run
        results = sorted(self.kept.glob("*/results.json"))
        fitting = (file.parent for file in results if not settings_apart(run.config, file.parent))
        found = next(fitting, None)
        return replace(run, path=found, kept=True) if found else run


# Carrying out --------------------------------------------------------------------------------------------------------


def check_runs(runs: Sequence[PlannedRun], to_train: bool = True) -> None:
    """Refuse what could not be carried out, before anything is trained: foreign folders and missing data."""
    refused = next(filter(None, (run.apart for run in runs)), None)
    if refused:
        raise ConfigError(refused)
    needed = {run.config.data.name: run.config for run in runs if to_train and run.state != "finished"}
    lacking = [text for config in needed.values() for text in _lacking(config)]
    if lacking:
        raise DataError("\n".join(lacking))


def _lacking(config: Config) -> Iterator[str]:
    """Yield what is missing of a run's data, and the command that gets it."""
    settings = config.data
    found = data.check(settings.name, settings.root or None, **settings.options)
    root = shlex.quote(settings.root or str(data.registry.DEFAULT_ROOT))
    if not found.complete:
        yield (
            f"this needs {settings.name}, which is not complete in {root}: {'; '.join(found.problems)}. "
            f"Get it with: fedprophet data get {settings.name} --root {root}"
        )


def carry_out(
    runs: Sequence[PlannedRun], attacks: Sequence[str], command: str, console: Console, say: Callable[[str], None]
) -> dict[str, str]:
    """Play what is missing or was stopped, one run after the other; return why runs have failed.

    `command` is what goes on after a stop.
    """
    failures = {}
    for number, run in enumerate(runs, start=1):
        how = {"missing": "starting it", "stopped": "going on with it", "finished": "done before"}[run.state]
        say(f"run {number} of {len(runs)}: {run.name}, {how}")
        try:
            _carry_out(run, attacks, console)
        except RunStoppedError as stop:
            reason = str(stop).partition(" Resume it with")[0]
            raise RunStoppedError(f"run {number} of {len(runs)}, {run.name}: {reason} Go on with: {command}") from None
        except TrainingError as error:
            failures[run.name] = str(error)
            say(f"run {number} of {len(runs)}: {run.name} has failed: {error}")
    return failures


def _carry_out(run: PlannedRun, attacks: Sequence[str], console: Console) -> None:
    if run.state != "finished":
        run.play(console)
    missing = run.unmeasured(attacks)
    if missing:
        opened = open_to_read(run.path)
        with closing(opened.session), progress_bar() as watch:
            # The paper's tables have personalised accuracies; results.json has all that is shown of the exported model.
            evaluate_run(opened, missing, masking_check=False, watch=watch, of="personalised")


def once(runs: Iterable[PlannedRun]) -> tuple[PlannedRun, ...]:
    """Return the runs without those that stand there twice: rows and experiments share them."""
    return tuple({run.path: run for run in runs}.values())


def finished(runs: Iterable[PlannedRun]) -> Iterator[FinishedRun]:
    """Yield what is there of some runs."""
    yield from (FinishedRun(run.path) for run in runs if run.state == "finished")


def seconds_left(runs: Iterable[PlannedRun]) -> tuple[float, int]:
    """Return how long the runs that are not finished take where that is known, and of how many it is not."""
    left = [run.setting.seconds.get(run.method) for run in runs if run.state != "finished"]
    return sum(seconds for seconds in left if seconds), sum(seconds is None for seconds in left)


def with_scale(setup: Setup, scale: Scale) -> Setup:
    """Return the same setup with another scale's settings; changed keys are those of the scale they were given for."""
    if scale == setup.scale:
        return setup
    known = {setting.preset for setting in scale.settings}
    return replace(setup, scale=scale, overrides=(), only=tuple(name for name in setup.only if name in known))
