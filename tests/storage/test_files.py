"""Which command goes on with a run."""

import pytest

from fedprophet.errors import CheckpointError
from fedprophet.storage.files import how_to_resume, is_deployed


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
