"""Stacks of clients in evaluation mode against the chain and autograd."""

import pytest
import torch
from torch import nn

from fedprophet.cascade.atoms import explicit_chain
from fedprophet.client.aims import Labels
from fedprophet.fast.folded import FoldedStack, as_matrix
from fedprophet.fast.kernels import Kernels, gathered
from fedprophet.fast.layout import StackLayout
from fedprophet.fast.program import Ladder
from fedprophet.fast.reading import read_program

CPU = torch.device("cpu")
MU = 0.01


def folded(case, kernels) -> FoldedStack:
    network = FoldedStack(case.ladder, kernels, torch.float32)
    network.fold(case.stacks(kernels.multiple))
    return network


@pytest.mark.parametrize("clients", [1, 2])
def test_folding_again_changes_nothing_that_was_brought(make_case, clients):
    """A captured graph writes into a network's own copies; masters, and what tasks brought, must not be among them."""
    case = make_case(clients=clients)
    layout, parameters = StackLayout(case.ladder, 1), case.parameters()
    before = [{name: value.clone() for name, value in tensors.items()} for tensors in parameters]
    network = FoldedStack(case.ladder, Kernels(), torch.float32)
    network.fold(layout.stacked(parameters, CPU))
    kept = [*network.weights.values(), *network.shifts, *network.dense.values()]
    other = [{name: value + 1 for name, value in tensors.items()} for tensors in parameters]
    network.fold(layout.stacked(other, CPU))
    now = [*network.weights.values(), *network.shifts, *network.dense.values()]
    assert all(a is b for a, b in zip(kept, now, strict=True))
    fresh = FoldedStack(case.ladder, Kernels(), torch.float32)
    fresh.fold(layout.stacked(other, CPU))
    z = network.prepare(case.stacked)
    assert torch.equal(network.scores(z), fresh.scores(z))
    for tensors, copy in zip(parameters, before, strict=True):
        assert all(torch.equal(tensors[name], copy[name]) for name in copy)


def gradient(network, x, targets, mu):
    """Return the gradient of the losses with respect to float32 inputs."""
    found = network.loss_gradient(network.prepare(x), targets, mu)
    return network.scaling(CPU).back(gathered(found, x.shape[-1]) if network.spreads else found)


def test_scores_and_features(case, kernels, distance):
    network = folded(case, kernels)
    z = network.prepare(case.stacked)
    scores, features = network.scores(z), network.features(z)
    for client, segment in enumerate(case.segments):
        with torch.no_grad(), segment.mode(training=False):
            assert distance(scores[client], segment.logits(case.x[client])) < 1e-5
            if segment.head is not None:
                expected = segment.features(case.x[client]).permute(0, 2, 3, 1)
                channels = expected.shape[-1]
                assert distance(features[client, ..., :channels], expected) < 1e-5
                assert not features[client, ..., channels:].any()  # padding stays zero


@pytest.mark.parametrize("calibrated", [False, True], ids=["plain", "calibrated"])
def test_loss_gradients(case, kernels, distance, calibrated):
    network = folded(case, kernels)
    network.prior = case.calibrate() if calibrated else None
    found = gradient(network, case.stacked, case.targets, MU)
    for client, segment in enumerate(case.segments):
        x = case.x[client].clone().requires_grad_()
        with segment.mode(training=False):
            loss = segment.exit_losses(segment.features(x), Labels(case.labels[client]), MU).sum()
        (expected,) = torch.autograd.grad(loss, x)
        assert distance(found[client].permute(0, 3, 1, 2), expected) < 1e-5


def test_calibrated_scores(case, kernels, distance):
    network = folded(case, kernels)
    z = network.prepare(case.stacked)
    plain, network.prior = network.scores(z), case.calibrate()
    found = network.scores(z)
    assert not torch.equal(plain.argmax(dim=2), found.argmax(dim=2))
    for client, segment in enumerate(case.segments):
        with torch.no_grad(), segment.mode(training=False):
            assert distance(found[client], segment.logits(case.x[client])) < 1e-5


def test_the_strong_convexity_term_counts_behind_a_head_alone(make_case, distance):
    for span, matters in (((0, 4, 0), True), ((0, None, None), False)):
        case = make_case(span=span)
        network = folded(case, Kernels())
        none, much = (gradient(network, case.stacked, case.targets, mu) for mu in (0.0, 1.0))
        assert (distance(none, much) > 0.1) is matters


def test_the_gradient_of_a_shift(make_case, kernels, distance):
    """Of ‖z(x) − z‖², the square of what Eq. 11 maximises."""
    case = make_case(span=(3, 6, None))
    network = folded(case, kernels)
    clean = network.features(network.prepare(case.stacked))
    moved = case.x + 0.1
    z = network.prepare(moved.permute(0, 1, 3, 4, 2).contiguous())
    found = network.scaling(CPU).back(network.shift_gradient(z, clean))
    for client, segment in enumerate(case.segments):
        x = moved[client].clone().requires_grad_()
        with segment.mode(training=False):
            target = segment.features(case.x[client]).detach()
            objective = (segment.features(x) - target).square().sum()
        (expected,) = torch.autograd.grad(objective, x)
        assert distance(found[client].permute(0, 3, 1, 2), expected) < 1e-4


def exit_of(inputs: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(inputs, 7, bias=False), nn.ReLU(), nn.Linear(7, 4)]


@pytest.mark.parametrize(
    "end",
    [
        lambda: [nn.MaxPool2d(2), *exit_of(12)],
        # Maxima of all there is, of parts of a feature with and without a pool in front, and of single positions.
        lambda: [nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(3, 4)],
        lambda: [nn.AdaptiveMaxPool2d(2), *exit_of(12)],
        lambda: [nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(1), *exit_of(3)],
        lambda: [nn.AdaptiveMaxPool2d(4), *exit_of(48)],
    ],
    ids=["no-pool", "one-maximum", "four-maxima", "pool-and-maximum", "maxima-of-one"],
)
def test_other_exits(end, distance):
    """Without a pool every position is read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(), *end())
    chain = explicit_chain([("all", model)])
    program = read_program(chain, 0, 1, None, (2, 4, 4), 4)
    for multiple in (1, 16):
        kernels = Kernels(multiple)
        network = FoldedStack(Ladder((program,)), kernels, torch.float32)
        network.fold(network.layout.stacked([{n: t.detach() for n, t in chain.tensors.items()}], CPU))
        x, labels = torch.rand(6, 2, 4, 4, requires_grad=True), torch.tensor([0, 1, 2, 3, 0, 1])
        with chain.mode(0, 1, training=False):
            scores = chain.run(x)
        (expected,) = torch.autograd.grad(nn.functional.cross_entropy(scores, labels, reduction="sum"), x)
        stacked = x.detach().permute(0, 2, 3, 1).unsqueeze(0)
        assert distance(network.scores(network.prepare(stacked))[0], scores.detach()) < 1e-5
        found = gradient(network, stacked, torch.eye(4)[labels].unsqueeze(0), 0.0)
        assert distance(found[0].permute(0, 3, 1, 2), expected) < 1e-5


@pytest.mark.parametrize("side", [1, 2])
def test_a_small_convolution_as_a_matrix(side):
    x = torch.randn(2, 3, side, side, 5)
    weight = torch.randn(2, 9, 5, 7)
    found = torch.bmm(x.view(2, 3, -1), as_matrix(weight, side)).view(2, 3, side, side, 7)
    torch.testing.assert_close(found, Kernels().convolve(x, weight), rtol=1e-5, atol=1e-5)


# Clients that go on for different lengths.


@pytest.mark.parametrize(("name", "shape"), [("vgg-small", (1, 8, 8)), ("resnet10", (3, 16, 16))])
def test_clients_on_a_ladder_get_what_each_gets_alone(make_case, kernels, name, shape):
    ends = ((0, None, None), (0, None, None), (0, 5, 1), (0, 4, 0), (0, 4, 0))
    cases = {span: make_case(name, span, shape, clients=5) for span in set(ends)}
    alone = [cases[span] for span in ends]
    ladder = Ladder(tuple(case.program for case in alone))
    depths = [len(case.program.blocks) for case in alone]
    assert depths[0] == depths[1] > depths[2] > depths[3] == depths[4]
    assert ladder.reach == tuple(sum(depth > block for depth in depths) for block in range(depths[0]))
    assert [(exits.low, exits.high) for exits in ladder.exits] == [(0, 2), (2, 3), (3, 5)]
    network = FoldedStack(ladder, kernels, torch.float32)
    parameters = [case.parameters()[number] for number, case in enumerate(alone)]
    network.fold(network.layout.stacked(parameters, CPU))
    x, targets = alone[0].stacked, alone[0].targets
    found = gradient(network, x, targets, MU)
    for number, case in enumerate(alone):
        single = FoldedStack(Ladder((case.program,)), kernels, torch.float32)
        single.fold(single.layout.stacked([parameters[number]], CPU))
        own = slice(number, number + 1)
        torch.testing.assert_close(found[own], gradient(single, x[own], targets[own], MU), rtol=1e-4, atol=1e-6)


def test_a_ladder_begins_with_the_longest_and_all_begin_alike(make_case):
    long, short, later = (make_case(span=span).program for span in ((0, None, None), (0, 4, 0), (3, 6, 1)))
    for programs in ((short, long), (long, later)):
        with pytest.raises(ValueError, match="begin alike"):
            Ladder(programs)
    spans = Ladder((long, long, short)).spans
    assert spans["features.0.weight"] == (0, 3)
    assert spans["heads/0.weight"] == (2, 3)
    assert spans[long.dense[-1].name + ".weight"] == (0, 2)
    assert spans[long.blocks[-1].norm + ".running_var"] == (0, 2)


def test_bf16_is_close_and_masters_stay_float32(make_case, distance):
    case = make_case()
    network = FoldedStack(case.ladder, Kernels(), torch.bfloat16)
    network.fold(case.stacks())
    assert {weight.dtype for weight in network.weights.values()} == {torch.bfloat16}
    assert {shift.dtype for shift in network.shifts} == {torch.float32}
    exact = folded(case, Kernels())
    expected = exact.scores(exact.prepare(case.stacked))
    assert 1e-6 < distance(network.scores(network.prepare(case.stacked)), expected) < 0.03
