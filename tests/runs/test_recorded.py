"""A run that is opened again has the modules that it was begun with, wherever this version would cut its model."""

import json
import shutil

import pytest

from fedprophet.cascade.partition import modules_of
from fedprophet.errors import CheckpointError
from fedprophet.runs import session
from fedprophet.runs.play import play
from fedprophet.runs.run import open_to_read, reopen

OTHER = [(0, 1), (1, 2), (2, 8)]


def _spans(run):
    return [(module.first, module.last) for module in run.session.world.modules]


@pytest.fixture
def cuts_elsewhere(monkeypatch):
    monkeypatch.setattr(session, "partition", lambda cost, budget: modules_of(cost, OTHER))


@pytest.fixture
def own(stopped):
    """The spans of a stopped run's modules: two."""
    spans = _spans(reopen(stopped))
    assert len(spans) == 2
    return spans


def test_a_run_goes_on_with_its_own_modules(stopped, own, cuts_elsewhere, contents, undisturbed):
    run = reopen(stopped)
    assert _spans(run) == _spans(open_to_read(stopped)) == own
    for module in run.session.world.modules:
        assert module.memory == run.session.world.cost.memory(module.first, module.last)
    play(run)
    assert contents(stopped) == undisturbed


def test_a_run_without_a_checkpoint_begins_again_and_is_cut_anew(stopped, own, cuts_elsewhere):
    shutil.rmtree(stopped / "checkpoints")
    assert _spans(reopen(stopped)) == OTHER != own


def test_a_finished_run_has_the_modules_that_its_results_name_where_the_other_file_is_lost(finished, cuts_elsewhere):
    (finished / "setup.json").unlink()
    assert _spans(open_to_read(finished)) == [(0, 5), (5, 8)] != OTHER


def test_a_run_that_names_its_modules_nowhere_is_cut_anew(stopped, own):
    (stopped / "setup.json").unlink()
    assert _spans(reopen(stopped)) == own


@pytest.mark.parametrize("spans", [OTHER, [(0, 1), (1, 8)], [(0, 8)], [(0, 6), (6, 7), (7, 8)]])
@pytest.mark.parametrize("text", [None, "{"])
def test_other_modules_than_those_of_its_checkpoint_are_refused_where_no_file_names_them(
    stopped, monkeypatch, spans, text
):
    setup = stopped / "setup.json"
    setup.unlink() if text is None else setup.write_text(text)
    monkeypatch.setattr(session, "partition", lambda cost, budget: modules_of(cost, spans))
    with pytest.raises(CheckpointError) as error:
        reopen(stopped)
    assert str(error.value) == (
        f"the checkpoint of round 3 in {stopped} has other modules than this version cuts, and {setup}, which names "
        "them, is lost or damaged. Put it back from a copy, or go on with the version that began the run"
    )


@pytest.mark.parametrize(
    ("machines", "versions"),
    [([{"fedprophet": "0.1", "torch": "2.0"}], "FedProphet 0.1 and torch 2.0"), ([], "versions that it does not name")],
)
def test_atoms_that_the_model_does_not_have_are_refused_with_the_versions(stopped, machines, versions):
    about = json.loads((stopped / "setup.json").read_text())
    about["modules"][0]["atoms"][-1] = "renamed"
    (stopped / "setup.json").write_text(json.dumps({**about, "machines": machines}))
    for opened in (reopen, open_to_read):
        with pytest.raises(CheckpointError) as error:
            opened(stopped)
        assert str(error.value) == (
            f"{stopped / 'setup.json'} has modules of other atoms than the model: the run was played with {versions}. "
            "Go on with the same model and the same versions, or start a new run"
        )
