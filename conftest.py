"""The time that a test may take: what is not marked slow has three seconds, or CI fails."""

import os
import time
from collections.abc import Generator

import pytest

SECONDS = 3.0
WAITING_SECONDS = 10.0
"""A test that hardly computes may take this long, since a busy disk or another program can hold it up."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", action="store_true", help=f"fail tests not marked slow that take over {SECONDS:g} s")


def processor_seconds() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    began, computed = time.monotonic(), processor_seconds()
    yield
    took, computed = time.monotonic() - began, processor_seconds() - computed
    limit = SECONDS if computed > SECONDS / 2 else WAITING_SECONDS
    if took > limit and item.config.getoption("--budget") and not item.get_closest_marker("slow"):
        pytest.fail(f"it took {took:.1f} s: make it quicker than {limit:g} s, or mark it slow", pytrace=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Long tests come first, so that no process is left with one when the others are done.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
