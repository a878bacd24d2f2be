"""Batches of local training, and steps that are torch's own, at once or gradient by gradient."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedprophet.cascade.atoms import explicit_chain
from fedprophet.client.descent import Descent, batches, fused_loss, whole_loss
from fedprophet.client.memory_plan import MemoryPlan, Step
from fedprophet.client.part import ModelPart
from fedprophet.client.trainer import train
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import LocalTraining

HYPER = LocalTraining(1, 4, learning_rate=0.5, momentum=0.9, weight_decay=0.1, strong_convexity=0.0)
TASK = Train(round=3, client=7, seed=11, training=HYPER)


def _linear(inputs: int = 2, classes: int = 2) -> tuple[nn.Linear, ModelPart]:
    torch.manual_seed(1)
    layer = nn.Linear(inputs, classes)
    return layer, ModelPart(explicit_chain([("layer", layer)]), 0, 1, None)


def test_batches_are_shuffled_passes_whose_last_batch_may_be_smaller() -> None:
    found = list(batches(5, 2, 7, TASK))
    assert [len(batch) for batch in found] == [2, 2, 1, 2, 2, 1, 2]
    assert sorted(torch.cat(found[:3]).tolist()) == [0, 1, 2, 3, 4]
    assert sorted(torch.cat(found[3:6]).tolist()) == [0, 1, 2, 3, 4]
    assert torch.cat(found[:3]).tolist() != torch.cat(found[3:6]).tolist()
    again = list(batches(5, 2, 7, TASK))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    other = torch.cat(list(batches(50, 50, 1, replace(TASK, client=8))))
    assert other.tolist() != torch.cat(list(batches(50, 50, 1, TASK))).tolist()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("step", [Step.WHOLE, Step.FUSED, Step.ATOMS])
def test_training_takes_the_steps_of_torchs_own_optimiser_bit_for_bit(
    step: Step, momentum: float, weight_decay: float
) -> None:
    hyper = LocalTraining(7, 4, 0.3, momentum=momentum, weight_decay=weight_decay, strong_convexity=0.0)
    task = replace(TASK, training=hyper)
    inputs, labels = torch.randn(10, 5, generator=torch.Generator().manual_seed(2)), torch.arange(10) % 3
    (ours, part), (theirs, _) = _linear(5, 3), _linear(5, 3)
    # A parameter that the loss does not depend on has no gradient, and is not decayed either.
    ours.unused, theirs.unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    part = ModelPart(explicit_chain([("layer", ours)]), 0, 1, None)
    assert ours.unused in set(part.parameters())
    loss = train(task, part, inputs, labels, plan=MemoryPlan(step=step))
    optimiser = torch.optim.SGD(theirs.parameters(), lr=0.3, momentum=momentum, weight_decay=weight_decay)
    losses = []
    for batch in batches(10, 4, 7, task):
        value = nn.functional.cross_entropy(theirs(inputs[batch]), labels[batch], reduction="none").mean()
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        losses.append(float(value.detach()))
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name))
        assert parameter.grad is None
    assert loss == sum(losses) / 7
    assert len(set(losses)) == 7


class _Tied(nn.Module):
    """Uses one weight in two places: its gradient is complete when both have been passed on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_tied_parameters_are_stepped_once_and_when_their_gradient_is_complete() -> None:
    found = []
    for step in (Step.WHOLE, Step.FUSED, Step.ATOMS):
        torch.manual_seed(1)
        network = _Tied()
        part = ModelPart(explicit_chain([("tied", network)]), 0, 1, None)
        hyper = replace(HYPER, iterations=3)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
        train(replace(TASK, training=hyper), part, x, torch.arange(4) % 3, plan=MemoryPlan(step=step))
        found.append(network.first.weight.detach().clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("at_a_time", [whole_loss, fused_loss])
def test_a_fused_step_has_one_gradient_at_a_time(at_a_time: object) -> None:
    """The last layer is stepped when the first one has no gradient yet; as a whole, both have one at first."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    part, alive = ModelPart(explicit_chain(network), 0, 2, None), []

    class Watched(Descent):
        def __call__(self, parameters: object) -> None:
            for parameter in parameters:  # type: ignore[attr-defined]
                alive.append([name for name, p in network.named_parameters() if p.grad is not None])
                super().__call__([parameter])

    loss = at_a_time(network(torch.ones(2, 2)).sum(), part)  # type: ignore[operator]
    assert alive == []
    loss.backward(Watched.of(part, HYPER))
    if at_a_time is fused_loss:
        assert [len(names) for names in alive] == [1, 1, 1, 1]
        assert {alive[0][0][0], alive[1][0][0]} == {"1"}
    else:
        assert [len(names) for names in alive] == [4, 3, 2, 1]
    assert all(parameter.grad is None for parameter in network.parameters())
    network(torch.ones(2, 2)).sum().backward()  # no hook is left
    assert all(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momenta_may_be_there_from_the_beginning(momentum: float) -> None:
    """As the memory of training is predicted; the steps are the same."""
    hyper, ends = replace(HYPER, momentum=momentum), []
    for begun in (False, True):
        layer, part = _linear()
        descent = Descent.of(part, hyper, begun)
        assert [tensor.shape for tensor in descent.held] == ([(2, 2), (2,)] if begun and momentum else [])
        held = {id(tensor) for tensor in descent.held}
        for scale in (1.0, 2.0, -3.0):
            whole_loss(scale * layer(torch.ones(1, 2)).square().sum(), part).backward(descent)
        assert held in (set(), {id(tensor) for tensor in descent.held})
        ends.append(torch.cat([layer.weight.detach().flatten(), layer.bias.detach()]))
    assert torch.equal(*ends)


@pytest.mark.parametrize(("memory", "begun"), [(0, False), (10**9, True)])
def test_where_memory_is_limited_momenta_are_there_first(
    memory: int, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, asked = Descent.of, []
    monkeypatch.setattr(Descent, "of", lambda part, hyper, begun=False: asked.append(begun) or of(part, hyper, begun))
    train(replace(TASK, memory=memory), _linear()[1], torch.ones(4, 2), torch.zeros(4, dtype=torch.long))
    assert asked == [begun]


@pytest.mark.parametrize(
    ("samples", "batch", "iterations"),
    [(10, 4, 5), (10, 4, 2), (8, 4, 9), (3, 4, 1), (9, 4, 3), (1, 1, 1), (37, 8, 13), (9, 1, 20)],
)
def test_batches_have_the_sizes_that_are_reckoned_with(samples: int, batch: int, iterations: int) -> None:
    training = LocalTraining(iterations, batch, 0.1, momentum=0.0, weight_decay=0.0, strong_convexity=0.0)
    task = Train(round=1, client=0, seed=0, training=training)
    assert training.batch_sizes(samples) == tuple(map(len, batches(samples, batch, iterations, task)))
