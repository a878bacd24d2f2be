"""MLflow's local store, read with MLflow's own client."""

import json
import os

import pytest
from mlflow import MlflowClient
from mlflow.telemetry.utils import is_telemetry_disabled

import fedprophet
from fedprophet.tracking import TrackedRun
from fedprophet.tracking.mlflow import CHOSEN, MLflow


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """MLflow's variables are as they were, also those that are set for it."""
    for name in (*CHOSEN, "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def only_run(store, experiment="fedprophet"):
    client = MlflowClient(store.absolute().as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    points = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    return found, {name: [(each.step, each.value) for each in history] for name, history in points.items()}


def expect_whole(store, records, **where):
    """Every round once, with the journal's numbers."""
    found, points = only_run(store, **where)
    for name, key in {"personalised/clean": "clean", "personalised/pgd": "adversarial"}.items():
        expected = [(number, record[key]) for number, record in records.items() if key in record]
        assert points[f"accuracy/{name}"] == expected
    for name in ("time/seconds", "training/module", "clients/dropped_updates"):
        assert [step for step, _ in points[name]] == [1, 2, 3, 4]
    assert len(points["final/global/clean"]) == 1
    assert found.info.status == "FINISHED"
    return found


def test_a_run_in_local_files(logged, journal, tmp_path, capsys):
    path = logged("mlflow")
    found = expect_whole(tmp_path / "mlruns", journal(path))
    assert found.info.run_name == "run"
    assert found.data.params["train.batch"] == "16"
    assert found.data.params["memory.budget"] == '"60%"'
    results = json.loads((path / "results.json").read_text())
    assert found.data.metrics["final/global/clean"] == results["global"]["clean"]["accuracy"]
    assert json.loads((path / "tracking.json").read_text()) == {
        "mlflow": {"run_id": found.info.run_id, "store": (tmp_path / "mlruns").as_uri()}
    }
    assert f"MLflow: run {found.info.run_id} in file://" in capsys.readouterr().out


def test_a_resumed_run_goes_on_with_the_same_one(logged, journal, tmp_path, monkeypatch):
    """Round 3 was logged, and is played again; the command is given in another folder."""
    path = logged("mlflow", killed_after=3, resumed=False).absolute()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found, points = only_run(tmp_path / "mlruns")
    assert [step for step, _ in points["training/loss"]] == [1, 2, 3]
    assert found.info.status == "RUNNING"
    fedprophet.resume(path, log=["mlflow"])
    expect_whole(tmp_path / "mlruns", journal(path))
    fedprophet.resume(path, from_round=3, log=["mlflow"])
    expect_whole(tmp_path / "mlruns", journal(path))
    assert not (tmp_path / "elsewhere" / "mlruns").exists()


def test_a_round_that_was_logged_in_part_is_completed(small, tmp_path):
    """A kill in the middle of a round: what is there is not logged again, what is missing is."""
    run = TrackedRun("one", tmp_path, {"seed": 1}, 0)
    first = MLflow()
    first.start(run)
    first.scalars(1, {"a": 1.0, "b": 2.0})
    first.scalars(2, {"a": 3.0})
    again = MLflow()
    again.start(TrackedRun("one", tmp_path, {"seed": 1}, 1))
    again.scalars(2, {"a": 3.0, "b": 4.0})
    _, points = only_run(tmp_path / "mlruns")
    assert points == {"a": [(1, 1.0), (2, 3.0)], "b": [(1, 2.0), (2, 4.0)]}


def test_a_stopped_run_is_marked(small, tmp_path):
    tracker = MLflow()
    tracker.start(TrackedRun("one", tmp_path, {}, 0))
    tracker.finish(None)
    assert only_run(tmp_path / "mlruns")[0].info.status == "KILLED"


def test_the_users_own_store_and_experiment(logged, journal, tmp_path, monkeypatch):
    """The address may have a password in it: it is not written down."""
    store = tmp_path / "my store"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "pilots")
    path = logged("mlflow", killed_after=2)
    expect_whole(store, journal(path), experiment="pilots")
    assert not (tmp_path / "mlruns").exists()
    assert json.loads((path / "tracking.json").read_text())["mlflow"].keys() == {"run_id"}


def test_a_run_that_was_deleted_in_mlflow_is_begun_anew(small, tmp_path):
    run = TrackedRun("one", tmp_path, {}, 0)
    run.remember("mlflow", run_id="0" * 32)
    MLflow().start(run)
    assert only_run(tmp_path / "mlruns")[0].info.run_id != "0" * 32


def test_many_parameters(small, tmp_path):
    """MLflow takes a hundred at a time."""
    MLflow().start(TrackedRun("one", tmp_path, {f"key.{number}": number for number in range(250)}, 0))
    assert len(only_run(tmp_path / "mlruns")[0].data.params) == 250


def test_nothing_is_sent_to_the_makers_of_mlflow(monkeypatch):
    MLflow()
    assert is_telemetry_disabled()
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    MLflow()
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "false", "it is the user's to say"
