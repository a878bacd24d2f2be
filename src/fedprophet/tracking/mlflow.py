"""MLflow: a run on the server of MLFLOW_TRACKING_URI, or in local files."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedprophet.settings.toml import shown
from fedprophet.tracking.registry import TrackedRun, Tracker, tracker

NAME, EXPERIMENT, STORE = "mlflow", "fedprophet", "mlruns"
CHOSEN = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
"""What MLflow is told unless the user says otherwise: to send its makers nothing, to take a folder (it advises a
database, which its small package cannot open), and not to hold up the training for minutes when its server is gone."""
MOST_PARAMETERS = 100
"""How many parameters MLflow takes at once."""


@tracker(NAME, "MLflow: MLFLOW_TRACKING_URI, or ./mlruns", extra="mlflow")
class MLflow(Tracker):
    """Goes on with the same run of MLflow, which cannot take numbers back: those that it has are not logged again."""

    def __init__(self) -> None:
        for name, value in CHOSEN.items():
            os.environ.setdefault(name, value)
        import mlflow

        self._mlflow: Any = mlflow

    def start(self, run: TrackedRun) -> str:
        known = run.recall(NAME)
        chosen = self._mlflow.get_tracking_uri() if self._mlflow.is_tracking_uri_set() else None
        store = chosen or known.get("store") or Path(STORE).absolute().as_uri()
        self._client = self._mlflow.MlflowClient(store)
        self._id = self._reopened(known.get("run_id")) or self._created(run)
        # A server's address may hold a password: only our own choice is written down.
        run.remember(NAME, run_id=self._id, **({} if chosen else {"store": store}))
        self._newest = {
            name: max(point.step for point in self._client.get_metric_history(self._id, name))
            for name in self._client.get_run(self._id).data.metrics
        }
        return f"run {self._id} in {store if not chosen else 'the store of MLFLOW_TRACKING_URI'}"

    def _reopened(self, known: object) -> str | None:
        """Return the run that was logged to; None if there is none in this store."""
        if not isinstance(known, str):
            return None
        try:
            self._client.update_run(known, status="RUNNING")
        except self._mlflow.MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            return None
        return known

    def _created(self, run: TrackedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if experiment is None:
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
        made: str = self._client.create_run(experiment, run_name=run.name).info.run_id
        parameters = [self._mlflow.entities.Param(key, shown(value)) for key, value in run.config.items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(made, params=parameters[first : first + MOST_PARAMETERS])
        return made

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = round(1000 * time.time())
        fresh = {name: value for name, value in values.items() if step > self._newest.get(name, -1)}
        metrics = [self._mlflow.entities.Metric(name, value, now, step) for name, value in fresh.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, results: Mapping[str, float] | None) -> None:
        """Log the results without a round: of several, MLflow shows the latest."""
        logged = self._client.get_run(self._id).data.metrics
        for name, value in (results or {}).items():
            if logged.get(name) != value:
                self._client.log_metric(self._id, name, value)
        self._client.set_terminated(self._id, "KILLED" if results is None else "FINISHED")
