"""What stays on a device, and what is evaluated."""

from dataclasses import replace

import torch

from fedprophet.engines.inputs import Resident, evaluated_positions
from fedprophet.messages.task import ClientTask


def test_which_samples_are_evaluated():
    task = ClientTask("evaluate", 1, 3, 0, samples=5, part=(2, 9))
    chosen = evaluated_positions(replace(task, part=None), 20)
    assert len(chosen) == 5
    assert torch.equal(evaluated_positions(task, 20), chosen[2:])
    assert torch.equal(evaluated_positions(replace(task, samples=None, part=None), 4), torch.arange(4))


def test_residents_make_room_for_others():
    made = []

    def make(name):
        return lambda: (made.append(name), torch.zeros(10))[1]

    kept = Resident(80)
    for name in ("a", "b", "a", "c", "a", "b"):
        kept.get(name, make(name))
    assert made == ["a", "b", "c", "b"]  # "c" displaced "b", which was not used for longest
    assert kept.nbytes == 80
    assert Resident(1).get("large", lambda: torch.zeros(10)).numel() == 10
