"""Draws of repeated work: named by client, and drawn anew."""

import torch

from fedprophet.fast.draws import Draws

CPU = torch.device("cpu")


def test_draws_depend_on_the_client_and_the_name_alone():
    alone, together = Draws(CPU), Draws(CPU)
    alone.renew([7])
    together.renew([3, 7])
    expected = alone.uniform("start", (1, 5))[0].clone()
    normal = together.normal("direction", (2, 4)).clone()
    uniform = together.uniform("start", (2, 5))
    assert torch.equal(uniform[1], expected)
    assert not torch.equal(uniform[0], expected)
    assert not torch.equal(alone.uniform("share", (1, 5))[0], expected)
    address = uniform.data_ptr()
    together.renew([4, 8])
    assert not torch.equal(uniform[1], expected)
    together.renew([3, 7])
    assert torch.equal(uniform[1], expected)
    assert torch.equal(together.normal("direction", (2, 4)), normal)
    assert uniform.data_ptr() == address


def test_draws_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    draws = Draws(CPU)
    draws.renew([1])
    draws.uniform("start", (1, 3))
    draws.renew([2])
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_have_the_right_distribution():
    draws = Draws(CPU)
    draws.renew([11, 12])
    uniform, normal = draws.uniform("u", (2, 5000)), draws.normal("n", (2, 5000))
    assert float(uniform.min()) >= 0
    assert float(uniform.max()) < 1
    assert abs(float(uniform.mean()) - 0.5) < 0.02
    assert abs(float(normal.mean())) < 0.05
    assert abs(float(normal.std()) - 1) < 0.05
