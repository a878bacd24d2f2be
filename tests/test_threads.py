"""Torch's number of threads: set for a while, put back afterwards."""

import pytest
import torch

from fedprophet.threads import ONE_THREAD, OneThread, set_threads, torch_threads


@pytest.fixture(autouse=True)
def _threads():
    with torch_threads(3):
        yield


def test_threads_come_back_after_an_error_too():
    with torch_threads(2):
        assert torch.get_num_threads() == 2
    with pytest.raises(KeyError), torch_threads(2):
        raise KeyError
    assert torch.get_num_threads() == 3


def test_one_thread_ends_with_its_last_holder():
    one = OneThread()
    with one:
        with one:
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_what_a_run_sets_stays_when_an_earlier_one_lets_go():
    """An engine that nobody closed lets go when it is collected, perhaps in the middle of the next run."""
    with ONE_THREAD:
        set_threads(2)
    assert torch.get_num_threads() == 2
