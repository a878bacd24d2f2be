"""What the tests of Flower share."""

import shlex
import sys

import pytest

from fedprophet.flower.offline import stay_offline

stay_offline()  # before any test imports Flower or Ray, which read their settings then


@pytest.fixture(scope="session")
def ray_starts() -> None:
    """Leave out what starts Ray where it cannot start this Python; `test_offline.py` has what is said then."""
    if shlex.quote(sys.executable) != sys.executable:
        pytest.skip("Ray cannot start a Python whose path has a blank")
