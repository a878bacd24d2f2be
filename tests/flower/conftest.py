"""What the tests of Flower share."""

import shlex
import sys

import pytest


@pytest.fixture(scope="session")
def ray_starts() -> None:
    """Leave out what starts Ray where it cannot start this Python; `test_init.py` has what is said then."""
    if shlex.quote(sys.executable) != sys.executable:
        pytest.skip("Ray cannot start a Python whose path has a blank")
