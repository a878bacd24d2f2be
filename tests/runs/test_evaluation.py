"""An evaluation that is stopped, torn, repeated and disturbed ends with the numbers of one that is not."""

import json
import os
import shutil
import threading
from dataclasses import replace

import pytest

from fedprophet.errors import CheckpointError, ConfigError
from fedprophet.runs import evaluation, masking
from fedprophet.runs.evaluation import evaluate_run
from fedprophet.runs.files import RunFiles
from fedprophet.runs.play import play
from fedprophet.runs.run import RunStoppedError, reopen, start

ATTACKS = "clean,pgd2"
CLIENTS, PARTS, LARGER = 6, 2, 2
"""Tasks of one attack, and larger balls of the masking check: 100 test samples are 64 and 36."""
EVERYTHING = 2 * (CLIENTS + PARTS) + LARGER * PARTS
SETTINGS = {
    "rounds": 2,
    "model.name": "cnn3",
    "memory.budget": "100%",
    "population.cohort": 6,
    "shards.kind": "iid",
    "train.iterations": 20,
    "data.validation": 0.05,
    "evaluate.test_samples": 100,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(masking, "CHECK_STEPS", 5)


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("evaluated") / "run"
    play(start(tiny(SETTINGS), path))
    return path


@pytest.fixture
def path(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture(scope="module")
def undisturbed(finished, tmp_path_factory):
    """What a run gives that nobody stops."""
    path = shutil.copytree(finished, tmp_path_factory.mktemp("undisturbed") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masking, "CHECK_STEPS", 5)
        result = evaluate_run(reopen(path), ATTACKS).to_json()
    return result, json.loads((path / "evaluation.json").read_text())


class Counting:
    """An engine that counts evaluations, and is stopped after some."""

    def __init__(self, engine, stop_after=10**9):
        self.engine, self.stop_after, self.done = engine, stop_after, []

    def map(self, tasks):
        for task in tasks:
            if task.kind == "evaluate" and len(self.done) == self.stop_after:
                raise KeyboardInterrupt
            for update in self.engine.map([task]):
                if task.kind == "evaluate":
                    self.done.append((task.client, task.number, task.threat and task.threat.radius))
                yield update


def counted(path, stop_after=10**9):
    run = reopen(path)
    engine = Counting(run.session.engine, stop_after)
    return replace(run, session=replace(run.session, engine=engine)), engine


def lines(path):
    (file,) = (path / "evaluation").glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def test_the_result_is_printed_and_written(undisturbed, finished):
    result, written = undisturbed
    assert list(result) == ["starting_weights", "norm_layers", "public_samples", "personalised", "global", "warnings"]
    assert {key: written[key] for key in result} == result
    assert (written["round"], written["seed"], written["radius"]) == (2, 0, 0.1)
    closing = json.loads((finished / "results.json").read_text())
    assert {part: closing[part] for part in result if part != "warnings"} == {
        part: result[part] for part in result if part != "warnings"
    }
    check = written["settings"]["pgd2"]["masking_check"]
    assert list(check) == ["0.1", "0.4", "0.5"]
    assert {found["samples"] for found in check.values()} == {100}
    assert written["settings"]["clean"]["masking_check"] is None


@pytest.mark.parametrize("stops", [(0,), (1, 9)])
def test_a_stopped_evaluation_goes_on_where_it_stopped(path, undisturbed, stops):
    everything = []
    for stop in stops:
        run, engine = counted(path, stop)
        with pytest.raises(RunStoppedError) as stopped:
            evaluate_run(run, ATTACKS)
        assert str(stopped.value) == (
            f"stopped; what was measured is kept. Resume it with: fedprophet evaluate {path} --attack clean,pgd2"
        )
        assert len(engine.done) == stop
        everything += engine.done
        assert not (path / "evaluation.json").exists()
    run, engine = counted(path)
    assert evaluate_run(run, ATTACKS).to_json() == undisturbed[0]
    everything += engine.done
    assert len(everything) == EVERYTHING
    assert json.loads((path / "evaluation.json").read_text()) == undisturbed[1]
    run, engine = counted(path)
    assert evaluate_run(run, ATTACKS).to_json() == undisturbed[0]
    assert engine.done == [], "all is known"


def test_the_way_to_go_on_has_all_options(path):
    run, _ = counted(path, 0)
    run = replace(run, files=RunFiles(shutil.copytree(path, path.with_name("my run"))))
    with pytest.raises(RunStoppedError, match=r"evaluate '.*/my run' --attack pgd1 --samples 9 --no-masking-check$"):
        evaluate_run(run, "pgd1", samples=9, masking_check=False)


def test_the_clients_or_the_test_set_alone_are_measured(path, undisturbed):
    """What one command leaves out another adds; a masking check goes with the test set."""
    run, engine = counted(path)
    own = evaluate_run(run, ATTACKS, of="personalised").to_json()
    assert [client for client, _, _ in engine.done] == [*range(CLIENTS), *range(CLIENTS)]
    assert (own["personalised"], own["global"]) == (undisturbed[0]["personalised"], {})
    written = json.loads((path / "evaluation.json").read_text())
    assert (written["personalised"], written["global"]) == (own["personalised"], {})
    assert written["settings"]["pgd2"]["masking_check"] is None
    run, engine = counted(path)
    assert evaluate_run(run, ATTACKS, of=["global"]).to_json()["personalised"] == {}
    assert len(engine.done) == EVERYTHING - 2 * CLIENTS
    assert json.loads((path / "evaluation.json").read_text()) == undisturbed[1]


def test_whose_accuracy_is_asked_for_is_checked(path):
    run, _ = counted(path, 0)
    for of in ("personal", "", [], ["global", "own"]):
        with pytest.raises(ConfigError, match=r"unknown kind of accuracy '.*'\..* Known: global, personalised, uncal"):
            evaluate_run(run, "clean", of=of)
    with pytest.raises(ConfigError, match="nothing to measure: the clients of this run add no label frequencies"):
        evaluate_run(run, "clean", of="uncalibrated")
    with pytest.raises(RunStoppedError, match=r"--attack clean --of personalised,global --samples 9$"):
        evaluate_run(run, "clean", 9, of="global, personalised")


def test_an_altered_line_is_measured_again(path, undisturbed):
    evaluate_run(reopen(path), ATTACKS)
    (file,) = (path / "evaluation").glob("*.jsonl")
    first, *others = [json.loads(line) for line in file.read_text().splitlines() if line]
    changed = [{**first, "clean": first["clean"] + 1}, *others]
    file.write_text("".join(json.dumps(line) + "\n" for line in changed))
    (path / "evaluation.json").unlink()
    run, engine = counted(path)
    assert evaluate_run(run, ATTACKS).to_json() == undisturbed[0]
    assert len(engine.done) == 1


@pytest.mark.parametrize("kept", [1, -1])
def test_a_torn_line_costs_what_it_held(path, undisturbed, kept):
    run, _ = counted(path, 5)
    with pytest.raises(RunStoppedError):
        evaluate_run(run, ATTACKS)
    (file,) = (path / "evaluation").glob("*.jsonl")
    *whole, last = file.read_bytes().split(b"\n\n")
    file.write_bytes(b"\n\n".join(whole) + b"\n\n" + last[:kept].rstrip(b"\n")[: len(last) - 3])
    run, engine = counted(path)
    assert evaluate_run(run, ATTACKS).to_json() == undisturbed[0]
    assert len(engine.done) == EVERYTHING - 4
    run, engine = counted(path)
    evaluate_run(run, ATTACKS)
    assert engine.done == [], "what was written behind the torn line counts"


def test_junk_between_the_lines_is_passed_over(path, undisturbed):
    evaluate_run(reopen(path), ATTACKS)
    (file,) = (path / "evaluation").glob("*.jsonl")
    junk = [b"\x00\xff", b'{"task":"x"}', b"[1,2]", b'{"task":"x","weight":1,"samples":"3"}', b""]
    file.write_bytes(b"\n".join(junk) + file.read_bytes())
    run, engine = counted(path)
    assert evaluate_run(run, ATTACKS).to_json() == undisturbed[0]
    assert engine.done == []


def test_another_state_has_other_numbers_and_the_old_ones_go(path, undisturbed):
    evaluate_run(reopen(path), ATTACKS)
    (stale,) = (path / "evaluation").glob("*.jsonl")
    shutil.rmtree(path / "checkpoints" / "round-000002")
    run, engine = counted(path)
    earlier = evaluate_run(run, "clean").to_json()
    assert len(engine.done) == CLIENTS + PARTS
    assert earlier["global"]["clean"] != undisturbed[0]["global"]["clean"]
    assert not stale.exists()
    written = json.loads((path / "evaluation.json").read_text())
    assert (written["round"], list(written["global"])) == (1, ["clean"]), "attacks of another state are not mixed in"


@pytest.mark.parametrize("what", ["version", "clients", "parameters"])
def test_whatever_decides_the_numbers_makes_another_state(path, monkeypatch, what):
    evaluate_run(reopen(path), "clean")
    (stale,) = (path / "evaluation").glob("*.jsonl")
    if what == "version":
        monkeypatch.setattr(evaluation, "__version__", "9.9")
    if what == "clients":
        run = reopen(path)
        config = run.session.config
        config = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"clients": 2})})
        world = replace(run.session.world, config=config)
        run = replace(run, session=replace(run.session, config=config, world=world))
    else:
        run = reopen(path)
    if what == "parameters":
        model = {name: value + 1e-6 for name, value in run.state.model.items()}
        run = replace(run, state=replace(run.state, model=model))
    engine = Counting(run.session.engine)
    evaluate_run(replace(run, session=replace(run.session, engine=engine)), "clean")
    assert len(engine.done) == PARTS + (2 if what == "clients" else CLIENTS)
    assert not stale.exists()


def test_each_attack_threat_and_number_of_samples_is_measured_for_itself(path):
    seen = []
    for attack, samples in [("pgd1", None), ("pgd2", None), ("pgd2", 50), ("pgd2", 60)]:
        run, engine = counted(path)
        evaluate_run(run, attack, samples, masking_check=False)
        seen.append(len(engine.done))
    assert seen == [8, 8, 7, 7]
    keys = [line["task"] for line in lines(path)]
    assert len(set(keys)) == len(keys) == 30


def test_commands_on_one_state_add_up(path, undisturbed):
    evaluate_run(reopen(path), "clean")
    evaluate_run(reopen(path), "pgd2")
    written = json.loads((path / "evaluation.json").read_text())
    assert written == undisturbed[1]
    evaluate_run(reopen(path), "pgd2", samples=30, masking_check=False)
    written = json.loads((path / "evaluation.json").read_text())
    assert written["global"]["clean"]["samples"] == 100
    assert (written["global"]["pgd2"]["samples"], written["settings"]["pgd2"]["samples"]) == (30, 30)
    assert written["settings"]["pgd2"]["masking_check"] is None


def test_a_damaged_result_is_written_anew(path, undisturbed):
    run = reopen(path)
    for damage in (b"", b"{", b"[]", b'{"state": "x"}'):
        (path / "evaluation.json").write_bytes(damage)
        evaluate_run(run, ATTACKS)
        assert json.loads((path / "evaluation.json").read_text()) == undisturbed[1]


def test_several_at_once_do_not_disturb_each_other(path, undisturbed):
    """Threads stand for processes: they share nothing but the folder."""
    jobs = ["clean", "pgd2", ATTACKS]
    runs = [reopen(path) for _ in jobs]
    found = {}

    def work(number):
        found[number] = evaluate_run(runs[number], jobs[number]).to_json()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[2] == undisturbed[0]
    written = json.loads((path / "evaluation.json").read_text())
    assert {part: written[part] for part in ("personalised", "global")} == {
        part: {name: undisturbed[0][part][name] for name in written[part]} for part in ("personalised", "global")
    }
    assert set(written["global"]) == {"clean", "pgd2"}
    run, engine = counted(path)
    assert evaluate_run(run, ATTACKS).to_json() == undisturbed[0]
    assert engine.done == []


def test_a_folder_that_cannot_be_written_to_is_left_alone(path, undisturbed, monkeypatch):
    monkeypatch.setattr(evaluation.os, "access", lambda where, how: False)
    assert evaluate_run(reopen(path), ATTACKS).to_json() == undisturbed[0]
    assert not (path / "evaluation").exists()
    assert not (path / "evaluation.json").exists()
    run, _ = counted(path, 3)
    with pytest.raises(RunStoppedError, match=r"stopped; nothing is kept\. Start again with: fedprophet evaluate"):
        evaluate_run(run, ATTACKS)


def test_a_disk_that_is_full_says_so_and_what_is_there_stays(path, undisturbed, monkeypatch):
    written = os.write

    def full(file, data):
        if len(lines_so_far()) >= 3:
            raise OSError(28, "No space left on device")
        return written(file, data)

    def lines_so_far():
        return [line for file in (path / "evaluation").glob("*.jsonl") for line in file.read_text().split("\n") if line]

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match=r"No space left on device\. Make room there .* the same command again"):
        evaluate_run(reopen(path), ATTACKS)
    monkeypatch.undo()
    run, engine = counted(path)
    assert evaluate_run(run, ATTACKS).to_json() == undisturbed[0]
    assert len(engine.done) == EVERYTHING - 3


def test_no_samples_are_refused(path):
    with pytest.raises(ConfigError, match="the number of samples must be at least 1, not 0"):
        evaluate_run(reopen(path), ATTACKS, 0)


def _scaled(run, factor):
    """Return the run with the logits of its model multiplied: the same predictions, and no gradients left to follow."""
    layer = list(run.state.model)[-1].rsplit(".", 1)[0] + "."
    model = {name: value * factor if name.startswith(layer) else value for name, value in run.state.model.items()}
    return replace(run, state=replace(run.state, model=model))


def test_a_model_that_hides_its_gradients_is_warned_of_and_an_honest_one_is_not(path, undisturbed, monkeypatch):
    honest = undisturbed[0]
    assert honest["warnings"] == []
    monkeypatch.setattr(masking, "CHECK_STEPS", 20)
    assert evaluate_run(reopen(path), ATTACKS).to_json() == honest
    run = _scaled(reopen(path), 1e6)
    found = evaluate_run(run, ATTACKS).to_json()
    assert found["global"]["clean"] == honest["global"]["clean"]
    assert found["global"]["pgd2"]["accuracy"] > honest["global"]["pgd2"]["accuracy"] + 0.05
    (text,) = found["warnings"]
    written = json.loads((path / "evaluation.json").read_text())
    check = written["settings"]["pgd2"]["masking_check"]["0.5"]
    assert "PGD-2 with the radius 0.5, within which every image can be turned into the same grey, left " in text
    assert f"{check['correct']} of 100" in text
    assert written["warnings"] == written["settings"]["pgd2"]["warnings"] == [text]
    # An attack that is measured on its own keeps what was said about the others.
    evaluate_run(run, "clean")
    assert json.loads((path / "evaluation.json").read_text())["warnings"] == [text]
    assert evaluate_run(run, ATTACKS, masking_check=False).to_json()["warnings"] == []
