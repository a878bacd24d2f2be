"""One local iteration against the same step written out by hand."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from iterations import perturbed
from torch import nn

from fedprophet.attacks.pgd import pgd
from fedprophet.cascade.atoms import Chain, explicit_chain
from fedprophet.cascade.heads import build_head
from fedprophet.cascade.norms import NormLayers, share_norm_layers
from fedprophet.client.descent import Descent, batches
from fedprophet.client.memory_plan import MemoryPlan
from fedprophet.client.part import ModelPart
from fedprophet.client.trainer import train
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import LocalTraining
from fedprophet.randomness import generator
from fedprophet.threat import ThreatModel, input_threat

HYPER = LocalTraining(1, 4, learning_rate=0.5, momentum=0.9, weight_decay=0.1, strong_convexity=0.0)
TASK = Train(round=3, client=7, seed=11, training=HYPER)


def _linear(inputs: int = 2, classes: int = 2) -> tuple[nn.Linear, ModelPart]:
    torch.manual_seed(1)
    layer = nn.Linear(inputs, classes)
    return layer, ModelPart(explicit_chain([("layer", layer)]), 0, 1, None)


def test_one_iteration_is_one_sgd_step_with_weight_decay() -> None:
    layer, part = _linear()
    x, labels = torch.tensor([[1.0, 2.0], [-1.0, 0.5]]), torch.tensor([0, 1])
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    probabilities = torch.softmax(x @ weight.T + bias, dim=1)
    residual = (probabilities - nn.functional.one_hot(labels, 2)) / 2
    loss = train(TASK, part, x, labels)
    assert torch.allclose(layer.weight, weight - 0.5 * (residual.T @ x + 0.1 * weight), atol=1e-6)
    assert torch.allclose(layer.bias, bias - 0.5 * (residual.sum(0) + 0.1 * bias), atol=1e-6)
    assert loss == pytest.approx(-probabilities[[0, 1], labels].log().mean().item(), rel=1e-5)
    assert layer.weight.grad is None


def test_momentum_carries_from_iteration_to_iteration_and_starts_at_zero() -> None:
    layer, part = _linear()
    x, labels = torch.tensor([[1.0, 2.0], [-1.0, 0.5]]), torch.tensor([0, 1])
    reference = nn.Linear(2, 2)
    reference.load_state_dict(layer.state_dict())
    velocity = [torch.zeros_like(p) for p in reference.parameters()]
    for _ in range(2):
        loss = nn.functional.cross_entropy(reference(x), labels)
        gradients = torch.autograd.grad(loss, list(reference.parameters()))
        with torch.no_grad():
            for p, g, v in zip(reference.parameters(), gradients, velocity, strict=True):
                v.mul_(0.9).add_(g + 0.1 * p)
                p.sub_(0.5 * v)
    train(replace(TASK, training=replace(HYPER, iterations=2)), part, x, labels)
    assert torch.allclose(layer.weight, reference.weight, atol=1e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_heads_gradients_can_be_summed_over_the_iterations(weight_decay: float) -> None:
    """By hand, three steps: the module's gradient is that of its iteration, the head's the sum of all so far."""
    torch.manual_seed(3)
    body, head = nn.Linear(2, 3), build_head((3,), 2)
    x, labels = torch.tensor([[1.0, 2.0], [-1.0, 0.5]]), torch.tensor([0, 1])
    ours = [*body.parameters(), *head.parameters()]
    values = [p.detach().clone().requires_grad_() for p in ours]
    velocity, sums = [torch.zeros_like(p) for p in values], [torch.zeros_like(p) for p in values]
    for _ in range(3):
        scores = (x @ values[0].T + values[1]) @ values[2].T + values[3]
        gradients = torch.autograd.grad(nn.functional.cross_entropy(scores, labels), values)
        with torch.no_grad():
            for number, (p, g, v, total) in enumerate(zip(values, gradients, velocity, sums, strict=True)):
                total += g
                v.mul_(0.9).add_((total if number >= 2 else g) + weight_decay * p)
                p.sub_(0.5 * v)
    hyper = replace(HYPER, iterations=3, weight_decay=weight_decay, summed_heads=True)
    train(replace(TASK, training=hyper), ModelPart(explicit_chain([("layer", body)]), 0, 1, head), x, labels)
    for found, expected in zip(ours, values, strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


def test_the_step_is_taken_on_the_batch_that_the_attack_found() -> None:
    layer, part = _linear()
    x, labels = torch.rand(4, 2), torch.tensor([0, 1, 1, 0])
    task = replace(TASK, threat=input_threat(0.2, 0.1, 3))
    order = next(batches(4, 4, 1, task))
    weight = layer.weight.detach().clone()
    draw = generator(11, "attack", 3, 7, 0)
    attacked = pgd(
        lambda z: nn.functional.cross_entropy(layer(z), labels[order], reduction="sum"), x[order], task.threat, draw
    )
    assert not torch.allclose(attacked, x[order])
    loss = nn.functional.cross_entropy(layer(attacked), labels[order])
    (gradient,) = torch.autograd.grad(loss, layer.weight)
    train(task, part, x, labels)
    assert torch.allclose(layer.weight, weight - 0.5 * (gradient + 0.1 * weight), atol=1e-6)


@pytest.mark.parametrize("size", [1, 3, 4, 8])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_an_attack_on_some_samples_at_a_time_is_the_attack_on_all(norm: str, size: int) -> None:
    """The same random start and the same steps: samples do not know each other."""
    network, chain = _normed()
    part = ModelPart(chain, 0, len(chain), None)
    x, labels = torch.rand(8, 3, generator=torch.Generator().manual_seed(4)), torch.arange(8) % 2
    task = replace(TASK, threat=ThreatModel(norm, 0.2, 0.05, 3, (0.0, 1.0)))
    together = perturbed(task, part, x, labels)
    assert not torch.equal(together, x)
    assert torch.allclose(perturbed(task, part, x, labels, MemoryPlan(attack=size)), together, rtol=0, atol=1e-6)
    assert all(parameter.requires_grad for parameter in network.parameters())


def _normed() -> tuple[nn.Sequential, Chain]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))
    return network, explicit_chain(network)


def test_the_attack_leaves_norm_statistics_alone_and_the_step_moves_them() -> None:
    network, chain = _normed()
    part = ModelPart(chain, 0, len(chain), None)
    x, labels = torch.rand(8, 3), torch.randint(0, 2, (8,))
    before = network[1].running_mean.clone()
    task = replace(TASK, threat=input_threat(0.1, 0.05, 2))
    perturbed(task, part, x, labels)
    assert torch.equal(network[1].running_mean, before)
    train(task, part, x, labels)
    assert not torch.equal(network[1].running_mean, before)
    assert int(network[1].num_batches_tracked) == 1


def test_flags_are_given_back_as_they_were_found() -> None:
    network, chain = _normed()
    network.eval()
    network[3].train()
    part = ModelPart(chain, 0, len(chain), None)
    train(replace(TASK, threat=input_threat(0.1, 0.05, 2)), part, torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))
    assert [module.training for module in network] == [False, False, False, True, False]


def test_a_batch_of_one_sample_trains_with_its_norm_layers_in_evaluation_mode() -> None:
    network, chain = _normed()
    weight = network[0].weight.detach().clone()
    train(TASK, ModelPart(chain, 0, len(chain), None), torch.rand(1, 3), torch.tensor([1]))
    assert int(network[1].num_batches_tracked) == 0
    assert not torch.equal(network[0].weight, weight)


def test_dropout_draws_depend_on_the_names_of_the_draw_alone() -> None:
    results = []
    for disturbance in (0, 1):
        network, chain = _normed()
        torch.manual_seed(disturbance)
        train(TASK, ModelPart(chain, 0, len(chain), None), torch.ones(4, 3).cumsum(0), torch.tensor([0, 1, 0, 1]))
        results.append(network[4].weight.detach().clone())
    assert torch.equal(*results)


def test_training_stops_at_a_loss_that_is_not_finite() -> None:
    layer, part = _linear()
    weight = layer.weight.detach().clone()
    loss = train(TASK, part, torch.full((4, 2), float("nan")), torch.tensor([0, 1, 0, 1]))
    assert loss != loss
    assert torch.equal(layer.weight, weight)


def test_the_proximal_term_draws_back_to_what_training_began_with() -> None:
    """By hand, two steps at rate 0.5 with μ = 0.2: the first is a plain one, the second feels how far that one went."""
    layer, part = _linear()
    x, labels = torch.tensor([[1.0, 2.0], [-1.0, 0.5]]), torch.tensor([0, 1])
    start = [p.detach().clone() for p in layer.parameters()]
    values = [p.clone().requires_grad_() for p in start]
    for step in range(2):
        gradients = torch.autograd.grad(nn.functional.cross_entropy(x @ values[0].T + values[1], labels), values)
        with torch.no_grad():
            for p, g, before in zip(values, gradients, start, strict=True):
                assert step or torch.equal(p, before)
                p.sub_(0.5 * (g + 0.1 * p + 0.2 * (p - before)))
    hyper = replace(HYPER, iterations=2, momentum=0.0, proximal=0.2)
    train(replace(TASK, training=hyper), part, x, labels)
    for found, expected in zip(layer.parameters(), values, strict=True):
        assert torch.allclose(found, expected, atol=1e-6)
    free, other = _linear()
    train(replace(TASK, training=replace(hyper, proximal=0.0)), other, x, labels)
    assert not torch.allclose(free.weight, layer.weight, atol=1e-4)


@pytest.mark.parametrize("layers", ["local", "shared"])
def test_a_strong_proximal_term_holds_what_the_server_sent_and_nothing_else(layers: NormLayers) -> None:
    """With rate 0.5 and μ = 2, the second step undoes the first, momentum aside; own layers go where they like."""
    network, chain = _normed()
    chain = share_norm_layers(chain, layers)
    part = ModelPart(chain, 0, len(chain), None)
    assert ({id(p) for p in network[1].parameters()} <= {id(p) for p in part.shared_parameters()}) == (
        layers != "local"
    )
    hyper = LocalTraining(1, 8, 0.5, momentum=0.0, weight_decay=0.0, strong_convexity=0.0, proximal=2.0)
    x, labels = torch.rand(8, 3), torch.arange(8) % 2
    start = {name: p.detach().clone() for name, p in network.named_parameters()}
    steps = Descent(part.parameters(), hyper, anchored=part.shared_parameters())
    for push in (1.0, 0.0):
        for parameter in part.parameters():
            parameter.grad = torch.full_like(parameter, push)
        steps(part.parameters())
    for name, parameter in network.named_parameters():
        own = layers == "local" and name.startswith("1.")
        assert torch.allclose(parameter, start[name] - (0.5 if own else 0.0), atol=1e-6), name
    assert math.isfinite(train(replace(TASK, training=hyper), part, x, labels))


def test_heads_are_drawn_back_too() -> None:
    torch.manual_seed(3)
    body, head = nn.Linear(2, 3), build_head((3,), 2)
    part = ModelPart(explicit_chain([("layer", body)]), 0, 1, head)
    assert {id(p) for p in head.parameters()} <= {id(p) for p in part.shared_parameters()}


@pytest.mark.parametrize("attacks", [False, True])
def test_fixed_statistics_stay_while_the_affine_part_is_trained(attacks: bool) -> None:
    """The step is that of a network whose norm layer is in evaluation mode, dropout being on as ever."""
    network, chain = _normed()
    network[3].p = 0.0
    with torch.no_grad():
        network[1].running_mean.copy_(torch.tensor([0.5, -0.5, 1.0, 0.0]))
        network[1].running_var.copy_(torch.tensor([0.5, 2.0, 1.0, 4.0]))
    reference = copy.deepcopy(network).eval()
    x, labels = torch.rand(4, 3), torch.tensor([0, 1, 1, 0])
    task = replace(TASK, training=replace(HYPER, fixed_statistics=True))
    task = replace(task, threat=input_threat(0.2, 0.1, 3)) if attacks else task
    order = next(batches(4, 4, 1, task))
    z, y = x[order], labels[order]
    if attacks:
        draw = generator(11, "attack", 3, 7, 0)
        z = pgd(lambda v: nn.functional.cross_entropy(reference(v), y, reduction="sum"), z, task.threat, draw)
    nn.functional.cross_entropy(reference(z), y).backward()
    train(task, ModelPart(chain, 0, len(chain), None), x, labels)
    for found, expected in zip(network.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(found, expected - 0.5 * (expected.grad + 0.1 * expected), atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(network.buffers(), reference.buffers(), strict=True))
    assert not torch.equal(network[1].weight, reference[1].weight)


def test_dropout_stays_on_where_statistics_are_fixed() -> None:
    network, chain = _normed()
    part, seen = ModelPart(chain, 0, len(chain), None), []
    network[3].register_forward_hook(lambda module, inputs, output: seen.append(module.training))
    network[1].register_forward_hook(lambda module, inputs, output: seen.append(module.training))
    task = replace(TASK, training=replace(HYPER, fixed_statistics=True))
    train(task, part, torch.rand(4, 3), torch.tensor([0, 1, 1, 0]))
    assert seen == [False, True]
