"""What a simulation needs before it starts."""

import importlib.util
import sys

import pytest

if importlib.util.find_spec("ray") is None:  # importing it here would let it read its settings too early
    pytest.skip("Flower's simulation is not installed", allow_module_level=True)

from fedprophet.errors import ConfigError
from fedprophet.runs.run import start
from fedprophet.runs.session import assemble

SIMULATED = {"engine": "flower-sim", "threads": 2, "method": "jfat", "rounds": 3}


@pytest.mark.parametrize("python", ["/home/me/my env/bin/python", "/opt/a&b/bin/python"])
def test_python_that_ray_cannot_start(tiny, tmp_path, monkeypatch, python):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(ConfigError, match=r"cannot start .*bin/python: it cuts paths at blanks"):
        start(tiny(SIMULATED), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # a cluster of the user's has Pythons of its own
    assemble(tiny(SIMULATED)).close()
