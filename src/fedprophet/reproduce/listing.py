"""The list of experiments: what each shows, what it needs, and how far it is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedprophet.display.numbers import counted
from fedprophet.display.tables import Column, Page, Table
from fedprophet.durations import format_duration
from fedprophet.reproduce.experiment import Experiment
from fedprophet.reproduce.registry import EXPERIMENTS
from fedprophet.reproduce.runs import PlannedRun, Setup, seconds_left


def state_of(experiment: Experiment, setup: Setup) -> str:
    """Return how far an experiment is."""
    runs = experiment.source.runs(setup)
    done = sum(run.state == "finished" for run in runs)
    if runs and done < len(runs):
        return f"{done} of {counted(len(runs), 'run')}" if done else f"nothing done, {counted(len(runs), 'run')}"
    return "done" if runs or (setup.out / f"{experiment.name}.md").exists() else "nothing done"


def needs_of(experiment: Experiment, setup: Setup) -> str:
    """Return the data that an experiment needs, and how long it takes: its missing runs, or what is computed."""
    runs = experiment.source.runs(setup)
    if not runs:
        return experiment.source.effort
    names = dict.fromkeys(run.config.data.name for run in runs)
    return f"{', '.join(names)}; {time_left(runs, setup)}"


def time_left(runs: tuple[PlannedRun, ...], setup: Setup) -> str:
    """Return how long the missing runs take, as far as that was measured."""
    seconds, unknown = seconds_left(runs)
    left = sum(run.state != "finished" for run in runs)
    if not left:
        return "all runs are there"
    known = f"at most about {format_duration(seconds)} on {setup.scale.hardware} for {counted(left - unknown, 'run')}"
    if not unknown:
        return known
    return f"{known}, unknown for {unknown}" if seconds else f"{counted(unknown, 'run')}, time unknown"


def plan(chosen: Sequence[Experiment], setup: Setup) -> list[dict[str, Any]]:
    """Return what carrying out experiments would find and need; `refused` says why it would not begin."""
    return [
        {
            "experiment": experiment.name,
            "runs": [
                {"path": str(run.path), "state": "other settings" if run.apart else run.state}
                for run in experiment.source.runs(setup)
            ],
            "needs": needs_of(experiment, setup),
            "refused": [run.apart for run in experiment.source.runs(setup) if run.apart],
        }
        for experiment in chosen
    ]


def plan_page(chosen: Sequence[Experiment], setup: Setup) -> Page:
    """Return the same for people."""
    columns = (Column("Run"), Column("State", words=True))
    parts = tuple(
        Page(
            f"{experiment.label}. {experiment.title}",
            (Table("", columns, tuple((Path(run["path"]).name, run["state"]) for run in found["runs"])),),
            notes=tuple(f"refused: {text}" for text in found["refused"]) or (found["needs"],),
        )
        for experiment, found in zip(chosen, plan(chosen, setup), strict=True)
    )
    return Page(f"Scale {setup.scale.name}: {setup.scale.help}", parts=parts)


def listing(setups: dict[str, Setup]) -> list[dict[str, Any]]:
    """Return the experiments with what they need and their state at each scale."""
    return [
        {
            "name": experiment.name,
            "title": experiment.title,
            "shows": experiment.shows,
            **{
                scale: {"needs": needs_of(experiment, setup), "state": state_of(experiment, setup)}
                for scale, setup in setups.items()
            },
        }
        for experiment in EXPERIMENTS.values()
    ]


def listing_page(setups: dict[str, Setup]) -> Page:
    """Return the same for people."""
    columns = (Column("Experiment"), Column("Shows", words=True))
    states = tuple(Column(what, f"scale {scale}", words=True) for scale in setups for what in ("needs", "state"))
    rows = tuple(
        (row["name"], row["shows"], *(row[scale][what] for scale in setups for what in ("needs", "state")))
        for row in listing(setups)
    )
    folders = ", ".join(f"{setup.out} ({scale})" for scale, setup in setups.items())
    notes = (
        "Figures 1, 3, 4 and 5 of the paper are drawings without numbers.",
        f"Runs and results are in {folders}. Run one: fedprophet reproduce table7",
    )
    return Page("The paper's tables and figures", (Table("", (*columns, *states), rows),), notes=notes)
