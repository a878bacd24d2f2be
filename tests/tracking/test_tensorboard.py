"""Event files, as TensorBoard reads them."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fedprophet


def curves(path):
    events = EventAccumulator(str(path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def rounds_of(records, key):
    return [(number, pytest.approx(record[key])) for number, record in records.items() if record.get(key) is not None]


def expect_whole(path, records):
    """Every round once, in order, with the journal's numbers; the closing accuracies behind the last."""
    found = curves(path)
    for tag, key in {"personalised/clean": "clean", "personalised/pgd": "adversarial"}.items():
        assert found[f"accuracy/{tag}"] == rounds_of(records, key)
    assert found["training/loss"] == rounds_of(records, "loss")
    assert [value for _, value in found["training/module"]] == [1, 1, 2, 2]
    assert [step for step, _ in found["time/seconds"]] == [1, 2, 3, 4]
    assert [step for step, _ in found["final/global/clean"]] == [5]


def test_a_run(logged, journal, capsys):
    path = logged("tensorboard")
    expect_whole(path, journal(path))
    assert "TensorBoard: tensorboard --logdir run\n" in capsys.readouterr().out
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("configuration/text_summary")
    assert "| train.batch | 16 |" in text.tensor_proto.string_val[0].decode()


def test_a_killed_run_has_logged_all_it_has_played(logged, journal):
    path = logged("tensorboard", killed_after=3, resumed=False)
    assert [step for step, _ in curves(path)["training/loss"]] == [1, 2, 3]


def test_a_resumed_run_goes_on_in_the_same_folder(logged, journal):
    """Round 3 was logged, and is played again."""
    path = logged("tensorboard", killed_after=3)
    expect_whole(path, journal(path))


def test_a_finished_run_goes_back(logged, journal):
    """Rounds behind the checkpoint that it goes back to, and the closing accuracies, are forgotten and logged anew."""
    path = logged("tensorboard")
    fedprophet.resume(path, from_round=3, log=["tensorboard"])
    expect_whole(path, journal(path))
    fedprophet.resume(path, log=["tensorboard"])
    expect_whole(path, journal(path))
