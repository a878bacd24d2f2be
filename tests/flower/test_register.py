"""The engine "flower-sim" is known without Flower, which is imported when a run asks for it."""

import os
import subprocess
import sys

import pytest

from fedprophet.errors import ConfigError
from fedprophet.flower.register import flower_sim


@pytest.mark.parametrize("missing", ["flwr", "ray"])
def test_missing_extra_is_named(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"pip install 'fedprophet\[flower\]'"):
        flower_sim(None)  # type: ignore[arg-type]  # it is refused before it looks at the run


@pytest.mark.slow
@pytest.mark.usefixtures("ray_starts")
def test_flower_is_loaded_late_and_offline():
    code = """
import os, sys, fedprophet.cli
assert not {"flwr", "ray"} & set(sys.modules)
import fedprophet.flower.register, fedprophet.flower.settings
assert not {"flwr", "ray"} & set(sys.modules)
assert not {"FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"} & set(os.environ)
from fedprophet.runs.session import assemble
assemble(fedprophet.load_config("digits", ["engine=flower-sim", "threads=2"]))
assert {"flwr", "ray"} <= set(sys.modules)
print(os.environ["FLWR_TELEMETRY_ENABLED"], os.environ["RAY_USAGE_STATS_ENABLED"])
"""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("FLWR", "RAY"))}
    done = subprocess.run([sys.executable, "-c", code], env=clean, check=True, capture_output=True, text=True)
    assert done.stdout == "0 0\n"
