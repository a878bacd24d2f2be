"""The way into a stack and back."""

import pytest
import torch

from fedprophet.fast.layout import StackLayout

CPU = torch.device("cpu")


@pytest.mark.parametrize("multiple", [1, 16])
def test_every_tensor_comes_back_as_it_was(case, multiple):
    layout, parameters = StackLayout(case.ladder, multiple), case.parameters()
    stacks = layout.stacked(parameters, CPU)
    back = {name: layout.unstacked(name, stack) for name, stack in stacks.items()}
    assert set(back) == set(case.program.tensors)
    for client, tensors in enumerate(parameters):
        for name, values in back.items():
            assert torch.equal(values[client], tensors[name])
            assert values[client].is_contiguous()


def test_the_shapes_of_a_padded_stack(make_case):
    case = make_case(span=(0, 3, 0), shape=(2, 8, 8))  # channels 2 → 4 → 6, a head on 2×2 positions
    stacks = case.stacks(16)
    assert stacks["features.0.weight"].shape == (2, 9, 16, 16)
    assert stacks["features.4.running_var"].shape == (2, 16)
    assert stacks["heads/0.weight"].shape == (2, 4 * 16, 10)
    assert stacks["heads/0.bias"].shape == (2, 10)
    real = stacks["features.0.weight"][:, :, :2, :4]
    assert real.count_nonzero() == real.numel() == stacks["features.0.weight"].count_nonzero()


def test_taps_and_dense_inputs_lie_as_the_kernels_read_them(make_case):
    case = make_case(span=(0, 3, 0), shape=(2, 8, 8))
    stacks, (_, second) = case.stacks(), case.parameters()
    weight = second["features.3.weight"]
    assert stacks["features.3.weight"][1, 5, 3, 1] == weight[1, 3, 1, 2]  # tap 5: second row, third column
    head = second["heads/0.weight"].view(10, 6, 2, 2)
    assert torch.equal(stacks["heads/0.weight"][1].view(2, 2, 6, 10)[1, 0, 4], head[:, 4, 1, 0])


def test_what_all_clients_share_lies_in_memory_once(make_case):
    case = make_case(clients=3)
    first, second, _ = case.parameters()
    local = {name: second[name] for name in second if "running" in name}
    stacks = StackLayout(case.ladder, 1).stacked([first, first | local, first], CPU)
    assert stacks["features.0.weight"].stride(0) == 0
    assert stacks["features.1.running_mean"].stride(0) > 0
    assert torch.equal(stacks["features.1.running_mean"][1], second["features.1.running_mean"])
    assert torch.equal(stacks["features.1.running_mean"][2], first["features.1.running_mean"])
