"""The time that a test may take: what is not marked slow has three seconds, or CI fails."""

import os
import time
from collections.abc import Generator

import pytest

SECONDS = 3.0
OVERLOADED = 2.0
"""With more processes than this waiting for each core, the clock says nothing about a test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", action="store_true", help=f"fail tests not marked slow that take over {SECONDS:g} s")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    if took > SECONDS and item.config.getoption("--budget") and not item.get_closest_marker("slow"):
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load <= OVERLOADED * cores:
            pytest.fail(f"it took {took:.1f} s: make it quicker than {SECONDS:g} s, or mark it slow", pytrace=False)
