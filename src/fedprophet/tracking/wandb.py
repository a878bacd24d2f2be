"""Weights & Biases: a run where the environment of `wandb` says (WANDB_MODE=offline: in the run's folder)."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from fedprophet.tracking.registry import TrackedRun, Tracker, tracker

NAME, PROJECT = "wandb", "fedprophet"


@tracker(NAME, "Weights & Biases; WANDB_MODE=offline keeps it here", extra="wandb")
class WeightsAndBiases(Tracker):
    """Goes on with the same run, which drops the numbers of steps that it has already."""

    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb

    def start(self, run: TrackedRun) -> str:
        known = run.recall(NAME).get("run_id") or uuid4().hex[:8]
        run.remember(NAME, run_id=known)
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=known,
            resume="allow",
            dir=os.environ.get("WANDB_DIR", str(run.path)),
            config=dict(run.config),
            # What a terminal shows is redrawn many times a second, and nobody asked to send it.
            settings=self._wandb.Settings(console="off", silent=True),
        )
        if self._run.offline:
            return f"offline; send it with: wandb sync {shlex.quote(str(Path(self._run.dir).parent))}"
        return str(self._run.url)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, results: Mapping[str, float] | None) -> None:
        if results is not None:
            self._run.summary.update(dict(results))
        self._run.finish(exit_code=0 if results is not None else 1)
