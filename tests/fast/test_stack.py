"""Dense layers of stacks against autograd."""

import torch

from fedprophet.fast.draws import Draws
from fedprophet.fast.program import Dense
from fedprophet.fast.stack import dense_backward, dense_forward

CPU = torch.device("cpu")


def test_dense_layers_against_autograd():
    layers = (Dense("a", 6, 5, bias=True, relu=True), Dense("b", 5, 4, bias=False))
    weights = [torch.randn(2, 6, 5), torch.randn(2, 5, 4)]
    biases = [torch.randn(2, 5), None]
    x, gradient = torch.randn(2, 3, 6), torch.randn(2, 3, 4)
    run = dense_forward(layers, weights, biases, x)
    back, found = dense_backward(layers, weights, run, gradient)
    for client in range(2):
        leaves = [t[client].clone().requires_grad_() for t in (x, weights[0], biases[0], weights[1])]
        inputs, first, bias, second = leaves
        scores = (inputs @ first + bias).relu() @ second
        torch.testing.assert_close(run.scores[client], scores)
        expected = torch.autograd.grad(scores, leaves, gradient[client])
        mine = (back[client], found[0][0][client], found[0][1][client], found[1][0][client])
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_dropout_keeps_its_share_scales_the_rest_and_is_in_the_gradient():
    layers = (Dense("a", 4, 4000, bias=False, relu=False, dropout=0.3), Dense("b", 4000, 1, bias=False))
    weights = [torch.ones(1, 4, 4000), torch.ones(1, 4000, 1)]
    draws = Draws(CPU)
    draws.renew([5])
    run = dense_forward(layers, weights, [None, None], torch.full((1, 1, 4), 0.25), draws.uniform)
    outputs = run.inputs[1][0, 0]
    assert set(outputs.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}
    assert abs(float((outputs == 0).float().mean()) - 0.3) < 0.03
    back, _ = dense_backward(layers, weights, run, torch.ones(1, 1, 1))
    torch.testing.assert_close(back[0, 0], outputs.sum().expand(4), rtol=1e-5, atol=0)
    without = dense_forward(layers, weights, [None, None], torch.full((1, 1, 4), 0.25))
    assert (without.inputs[1] == 1).all()
