"""A run that one process trains and another shows: in a terminal and without one, to its end or its stop."""

import json
import re
import signal
import urllib.request

import pytest
from test_terminal import ESCAPES, Terminal

pytestmark = pytest.mark.slow


def begun(launch, tiny_flags, tmp_path, **changes):
    """Return a process that trains and has written a round; there are many more to come."""
    training = launch("train", *tiny_flags({"rounds": 12, **changes}), "--out", "run")
    training.when_lines(tmp_path / "run" / "journal.jsonl", 1)
    return training


@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal_shows_a_run_to_its_end(launch, tiny_flags, tmp_path, columns):
    training = begun(launch, tiny_flags, tmp_path, rounds=6)
    terminal = Terminal(columns)
    watching = launch("watch", "run", terminal=terminal.name)
    assert training.code == 0
    code = watching.code
    raw = terminal.close()
    assert code == 0, raw
    text = ESCAPES.sub("", raw)
    for words in ("a process is working on it", "module", "of stage", "eps", "loss", "clean", "PGD", "a round"):
        assert words in text
    assert "▁" in text or "▂" in text or "█" in text, "there are curves"
    assert max(len(line) for line in text.replace("\r", "\n").split("\n")) <= columns or "Files:" in text
    end = text[text.rindex("Modules") :]
    assert "Accuracy of the trained model" in end
    assert end.rstrip().endswith("run")
    assert "Traceback" not in text


def test_a_terminal_shows_that_a_run_was_stopped(launch, tiny_flags, tmp_path, wait_until):
    """Killed, so that nobody could say so; the one who watches stays, and is stopped by Ctrl-C without harm."""
    training = begun(launch, tiny_flags, tmp_path)
    terminal = Terminal(140)
    watching = launch("watch", "run", terminal=terminal.name)
    wait_until(lambda: "a process is working on it" in terminal.text)
    training.kill()
    wait_until(lambda: "Resume it with: fedprophet train --resume run" in terminal.text)
    watching.signal(signal.SIGINT)
    assert watching.code == 130
    assert "the run is left as it is" in ESCAPES.sub("", terminal.close())


def test_lines_and_documents_without_a_terminal(launch, tiny_flags, tmp_path):
    """Two watch at the same time. From the first that was seen on, no round is left out and none is told twice."""
    training = begun(launch, tiny_flags, tmp_path)
    lines, documents = launch("watch", "run"), launch("watch", "run", "--json")
    assert (training.code, lines.code, documents.code) == (0, 0, 0)
    assert (lines.stderr, documents.stderr) == ("", "")
    last = json.loads((tmp_path / "run" / "journal.jsonl").read_text().splitlines()[-1])["round"]
    told = [int(number) for number in re.findall(r"^round (\d+)  module ", lines.stdout, re.MULTILINE)]
    assert told == list(range(told[0], last + 1))
    assert "Accuracy of the trained model" in lines.stdout
    found = [json.loads(line) for line in documents.stdout.splitlines()]
    rounds = list(dict.fromkeys(document["round"] for document in found))
    assert rounds == list(range(rounds[0], last + 1))
    assert found[-1]["state"] == "finished"


def test_a_run_that_is_stopped_ends_the_lines(launch, tiny_flags, tmp_path):
    training = begun(launch, tiny_flags, tmp_path)
    watching = launch("watch", "run")
    watching.when(lambda: "round " in watching.stdout)
    training.signal(signal.SIGINT)
    assert watching.code == 2
    assert re.search(r"stopped after round \d+\. Resume it with: fedprophet train --resume run$", watching.stderr)


def test_a_killed_run_goes_on_with_its_logs(launch, tiny_flags, tmp_path, monkeypatch):
    """TensorBoard's files and MLflow's have every round once."""
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logs = ("--log", "tensorboard", "--log", "mlflow")
    training = launch("train", *tiny_flags(), "--out", "run", *logs)
    training.when_lines(tmp_path / "run" / "journal.jsonl", 4).kill()
    assert launch("train", "--resume", "run", *logs).code == 0
    last = json.loads((tmp_path / "run" / "journal.jsonl").read_text().splitlines()[-1])["round"]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("time/seconds")] == list(range(1, last + 1))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # of this process; the command has set it for itself
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    run_id = json.loads((tmp_path / "run" / "tracking.json").read_text())["mlflow"]["run_id"]
    points = client.get_metric_history(run_id, "time/seconds")
    assert [point.step for point in points] == list(range(1, last + 1))


def test_a_page_on_this_machine_follows_the_run(launch, tiny_flags, tmp_path, wait_until):
    """It is served when the run is finished, too, until Ctrl-C."""
    training = begun(launch, tiny_flags, tmp_path)
    watching = launch("watch", "run", "--serve")
    watching.when(lambda: " shows run, " in watching.stdout)
    (url,) = re.findall(r"^(http://127\.0\.0\.1:\d+/) shows run, ", watching.stdout)
    seen = []

    def rounds():
        with urllib.request.urlopen(f"{url}document.json") as answer:
            (run,) = json.load(answer)["runs"]
        seen.append(run["rounds"])
        return run["finished"]

    wait_until(rounds)
    assert training.code == 0
    assert seen == sorted(seen)
    assert len(set(seen)) > 1, "it was seen in progress"
    with urllib.request.urlopen(url) as answer:
        assert answer.headers["Content-Type"].startswith("text/html")
    watching.signal(signal.SIGINT)
    assert watching.code == 130
    assert "the run is left as it is" in watching.stderr
