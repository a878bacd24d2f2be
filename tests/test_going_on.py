"""Which command or call goes on with a run."""

import pytest

from fedprophet.errors import CheckpointError
from fedprophet.going_on import how_to_evaluate, how_to_resume
from fedprophet.storage.files import is_deployed


@pytest.mark.parametrize("where", ["pilot/runs/run 1", "alone/run 1"])
def test_how_a_deployed_run_goes_on(tmp_path, where):
    path = tmp_path / where
    path.mkdir(parents=True)
    assert how_to_resume(path) == f"fedprophet train --resume '{path}'"
    (tmp_path / "pilot").mkdir(exist_ok=True)
    (tmp_path / "pilot" / "deploy.toml").touch()
    (path / "flower.json").write_text('{"run": "ab", "deployed": true}')
    assert (
        how_to_resume(path)
        == {
            "pilot/runs/run 1": f"fedprophet deploy run {tmp_path}/pilot --name 'run 1' --resume",
            "alone/run 1": f"flwr run APP SERVER --run-config 'out=\"{path}\" resume=true'",
        }[where]
    )
    (path / "flower.json").write_text('{"run": "ab", "deployed": false}')
    assert how_to_resume(path) == f"fedprophet train --resume '{path}'"
    (path / "flower.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"flower\.json is damaged. Put it back from a copy"):
        is_deployed(path)


def test_a_pilots_run_is_known_before_its_first_task(tmp_path):
    (tmp_path / "deploy.toml").touch()
    assert "deploy run" in how_to_resume(tmp_path / "runs" / "run-1")
    assert "train --resume" in how_to_resume(tmp_path / "other" / "run-1")


@pytest.mark.parametrize(
    ("model", "data", "again"),
    [("custom", "custom", "model=…, data=…"), ("custom", "digits", "model=…"), ("vgg-small", "custom", "data=…")],
)
def test_a_run_of_ones_own_model_or_data_goes_on_in_python(tmp_path, model, data, again):
    path = tmp_path / "run 1"
    path.mkdir()
    (path / "config.toml").write_text(f'[model]\nname = "{model}"\n[data]\nname = "{data}"\n')
    assert how_to_resume(path) == f"fedprophet.resume('{path}', {again})"
    assert how_to_resume(path, round=3) == f"fedprophet.resume('{path}', from_round=3, {again})"
    found = how_to_evaluate(path, "clean", samples=2, masking_check=False)
    assert found == f"fedprophet.evaluate('{path}', 'clean', samples=2, masking_check=False, {again})"


@pytest.mark.parametrize("text", ['[model]\nname = "cnn3"\n[data]\nname = "digits"\n', "", "model = 3", "[", "\x00"])
def test_other_runs_go_on_by_a_command(tmp_path, text):
    (tmp_path / "config.toml").write_text(text)
    found = how_to_evaluate(tmp_path, "clean", samples=2, masking_check=False)
    assert found == f"fedprophet evaluate {tmp_path} --attack clean --samples 2 --no-masking-check"
    assert how_to_resume(tmp_path) == f"fedprophet train --resume {tmp_path}"
