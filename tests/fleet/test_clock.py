"""The simulated clock of a round against hand-computed numbers."""

from dataclasses import replace

import pytest
import torch

from fedprophet.cascade.cost import AtomCost, ChainCost
from fedprophet.fleet import clock
from fedprophet.fleet.network import Link
from fedprophet.messages.answers import Adopted, Trained
from fedprophet.messages.tasks import Adopt, Train
from fedprophet.messages.values import LocalTraining, Resources

COST = ChainCost((AtomCost("a", (), 100, 10, 1000, (1, 4), (0.0, float("inf"))),), (1, 4), batch=4, classes=2, copies=3)
"""One atom of 100 parameters: 4 · (3 · 100 + 10) = 1240 bytes, 1000 FLOPs for a batch of 4."""
PLENTY = Resources(10**6, 1e3, 1e3)


@pytest.fixture(autouse=True)
def _link(monkeypatch):
    """A link of 1 kB/s up and 2 kB/s down, with a latency of 0.25 s."""
    monkeypatch.setattr(clock, "draw_link", lambda *_: Link("hand", 8e3, 16e3, 0.25))


def _task(client: int) -> Train:
    training = LocalTraining(3, 4, 0.1, 0.9, 0.0, 0.0)
    return Train(round=1, client=client, seed=0, last=1, training=training, parameters={"w": torch.zeros(500)})


def _update(client: int, samples: int) -> Trained:
    parameters, local = {"w": torch.zeros(200)}, {"n": torch.zeros(50)}
    return Trained(round=1, client=client, weight=1.0, loss=1.0, samples=samples, parameters=parameters, local=local)


def test_training_takes_computation_access_and_communication():
    """Three batches of 4 take 2 · 1000 FLOPs each; 2000 bytes go down in 1 s, 1000 up in 1 s, with 2 · 0.25 s latency.

    Each batch reads 4 · 4 bytes in 0.016 s and one access of 0.17 s; the parameters, 400 bytes, are read once.
    """
    found = clock.training_times([_task(1)], [_update(1, 8)], {1: PLENTY}, lambda task: COST)
    assert found["1"] == pytest.approx(
        {"computation_s": 6.0, "access_s": 3 * (0.016 + 0.17) + 0.4, "communication_s": 2.5, "memory_bytes": 1240}
    )


def test_a_client_that_keeps_within_its_memory_by_a_plan_swaps_nothing():
    """With 1000 of 1240 bytes it would swap; by its plan it reads its batches, as with plenty."""
    poor = Resources(1000, 1e3, 1e3)
    plain, planned = (
        clock.training_times([_task(1)], [replace(_update(1, 8), plan=plan)], {1: poor}, lambda task: COST)["1"]
        for plan in ("", "attack 2 at a time")
    )
    assert planned["access_s"] == pytest.approx(3 * (0.016 + 0.17) + 0.4)
    assert plain["access_s"] > 2 * planned["access_s"]


def test_only_clients_that_were_asked_and_have_samples_are_timed():
    updates = [_update(1, 0), _update(2, 1), _update(9, 8)]
    assert set(clock.training_times([_task(1), _task(2)], updates, {1: PLENTY, 2: PLENTY}, lambda task: COST)) == {"2"}


def test_a_client_that_claims_any_number_of_samples_takes_no_longer_than_a_round():
    found = [
        clock.training_times([_task(1)], [_update(1, samples)], {1: PLENTY}, lambda task: COST)["1"]["computation_s"]
        for samples in (12, 10**300)
    ]
    assert found == [6.0, 6.0]


def test_adopting_layers_adds_to_the_communication():
    """500 floats down take 1 s, and the latency counts once each way."""
    tasks = [Adopt(round=2, client=k, seed=0, parameters={"a": torch.zeros(500)}) for k in (1, 3, 4)]
    answers = [Adopted(round=2, client=k, weight=1.0) for k in (1, 4, 5)]
    times = {name: {"computation_s": 7.0, "communication_s": 10.0} for name in ("1", "3", "5")}
    clock.add_adoption(times, tasks, answers)
    # 3 has not answered, 4 has no time of its own, 5 was not asked.
    assert {name: time["communication_s"] for name, time in times.items()} == {"1": 11.5, "3": 10, "5": 10}
    assert all(time["computation_s"] == 7.0 for time in times.values())
