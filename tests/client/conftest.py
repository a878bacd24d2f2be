"""What tests of a client's memory share beside its iterations."""

import pytest

from fedprophet.client.iteration import LocalIteration


@pytest.fixture
def predictions(monkeypatch) -> list[LocalIteration]:
    """Everything that is predicted from now on."""
    made: list[LocalIteration] = []
    peak = LocalIteration._peak
    monkeypatch.setattr(LocalIteration, "_peak", lambda self, compute: made.append(self) or peak(self, compute))
    return made
