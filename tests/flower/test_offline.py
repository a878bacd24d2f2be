"""Flower and Ray stay on this machine, and a Python that Ray cannot start is refused."""

import os
import sys

import pytest

from fedprophet.errors import ConfigError
from fedprophet.flower.offline import expect_startable_python, stay_offline


@pytest.mark.parametrize("python", ["/home/me/my env/bin/python", "/opt/a&b/bin/python"])
def test_python_that_ray_cannot_start(monkeypatch, python):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    expect_startable_python()
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(ConfigError, match=r"cannot start .*bin/python: it cuts paths at blanks"):
        expect_startable_python()
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # a cluster of the user's has Pythons of its own
    expect_startable_python()


def test_what_the_user_says_about_the_network_counts(monkeypatch):
    expected = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }

    def environment(**given: str) -> dict[str, str]:
        with monkeypatch.context() as patch:
            for name in expected:
                patch.delenv(name, raising=False)
            for name, value in given.items():
                patch.setenv(name, value)
            stay_offline()
            return {name: os.environ[name] for name in expected if name in os.environ}

    assert environment() == expected
    assert environment(FLWR_TELEMETRY_ENABLED="1") == expected | {"FLWR_TELEMETRY_ENABLED": "1"}
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in environment(RAY_ADDRESS="10.0.0.1:6379")
