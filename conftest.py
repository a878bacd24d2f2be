"""What holds for all tests: one thread for each process, and how much processor time a test may take."""

import os
from collections.abc import Generator

import pytest

# Before torch and its relatives are imported, and for every process that a test starts. Sums differ between numbers of
# threads, and threads that wait for each other on busy cores take many times the processor time.
os.environ["OMP_NUM_THREADS"] = "1"

SECONDS = 3.0
"""What a test may take, of processor time: a clock on the wall shows what else the machine has to do as well."""
MARGIN = 3.0
"""Processor time depends on the machine too, and on who shares its caches: up to this many times the limit is said,
and only more than that fails. A check that fails on a slower machine says nothing about the change."""


def pytest_addoption(parser: pytest.Parser) -> None:
    text = (
        f"warn of tests not marked slow that take over {SECONDS:g} s of processor time, fail over {MARGIN:g} times that"
    )
    parser.addoption("--budget", action="store_true", help=text)


def processor_seconds() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    before = processor_seconds()
    yield
    took = processor_seconds() - before
    if took <= SECONDS or not item.config.getoption("--budget") or item.get_closest_marker("slow"):
        return
    text = f"it took {took:.1f} s of processor time: make it quicker than {SECONDS:g} s, or mark it slow"
    if took > MARGIN * SECONDS:
        pytest.fail(text, pytrace=False)
    item.warn(pytest.PytestWarning(text))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Long tests come first, so that no process is left with one when the others are done.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
