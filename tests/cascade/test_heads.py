"""The auxiliary head: its shape, its arithmetic, its cost."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedprophet.cascade.heads import build_head, head_cost, head_shape
from fedprophet.errors import ModelError


@pytest.mark.parametrize(
    ("feature", "classes", "pool", "inputs"),
    [
        ((64, 16, 16), 10, (1, 1), 64),
        ((3, 8, 8), 10, (2, 2), 12),  # ceil(sqrt(10 / 3)) = 2
        ((3, 2, 2), 10, None, 12),  # H > w does not hold
        ((3, 1, 1), 10, None, 3),  # fewer positions than the head wants
        ((64, 56, 56), 256, (2, 2), 256),
        ((256, 14, 14), 256, (1, 1), 256),
        ((255, 14, 14), 256, (2, 2), 1020),
        ((1, 7, 7), 10, (4, 4), 16),
        ((512, 1, 1), 10, None, 512),
        ((64, 1, 9), 10, (1, 1), 64),  # not square: what is longer than w is pooled
        ((2, 1, 9), 10, (1, 3), 6),
        ((65, 192), 10, None, 192),  # tokens
        ((512,), 10, None, 512),  # a vector
    ],
)
def test_shape(feature, classes, pool, inputs):
    assert head_shape(feature, classes) == (pool, inputs)
    head = build_head(feature, classes)
    assert head.weight.shape == (classes, inputs)
    assert head(torch.randn(3, *feature)).shape == (3, classes)


@given(channels=st.integers(1, 600), classes=st.integers(1, 600))
def test_side_is_the_notes_formula(channels, classes):
    side = math.ceil(math.sqrt(classes / channels))
    assert head_shape((channels, 100, 100), classes) == ((side, side), channels * side * side)


def test_only_weight_and_bias_drawn_as_a_linear_layer_is():
    torch.manual_seed(3)
    head = build_head((3, 8, 8), 10)
    torch.manual_seed(3)
    linear = nn.Linear(12, 10)
    assert list(head.state_dict()) == ["weight", "bias"]
    assert torch.equal(head.weight, linear.weight)
    assert torch.equal(head.bias, linear.bias)


def test_maps_are_averaged_in_quarters():
    head = build_head((1, 4, 4), 4)  # w = 2
    with torch.no_grad():
        head.weight.copy_(torch.eye(4))
        head.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 100.0]))
    feature = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert head(feature).tolist() == [[2.5, 4.5, 10.5, 112.5]]


def test_tokens_are_averaged_to_one():
    head = build_head((2, 3), 3)
    with torch.no_grad():
        head.weight.copy_(torch.eye(3))
        head.bias.zero_()
    assert head(torch.tensor([[[1.0, 2.0, 3.0], [3.0, 6.0, 9.0]]])).tolist() == [[2.0, 4.0, 6.0]]


def test_vectors_go_straight_to_the_linear_layer():
    head = build_head((3,), 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]]))
        head.bias.copy_(torch.tensor([0.0, 1.0]))
    assert head(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[7.0, 3.0]]


@pytest.mark.parametrize(
    ("feature", "classes", "copies", "expected"),
    [
        # 3 · 8 · 8 = 192 elements a sample, pooled to 12: 130 parameters; 4 · (2 · 192 + copies · 130 + 20)
        ((2, 3, 8, 8), 10, 3, (4 * (384 + 390 + 20), 2 * 120 + 384, 130)),
        ((2, 3, 8, 8), 10, 2, (4 * (384 + 260 + 20), 2 * 120 + 384, 130)),
        ((2, 3, 8, 8), 10, 4, (4 * (384 + 520 + 20), 2 * 120 + 384, 130)),
        ((2, 3, 2, 2), 10, 3, (4 * (24 + 390 + 20), 2 * 120, 130)),  # not pooled
        ((2, 5, 6), 4, 3, (4 * (60 + 84 + 8), 2 * 24, 28)),  # tokens
        ((2, 6), 4, 3, (4 * (12 + 84 + 8), 2 * 24, 28)),  # vectors
    ],
)
def test_cost(feature, classes, copies, expected):
    assert head_cost(feature, classes, copies) == expected
    assert build_head(feature[1:], classes).weight.numel() + classes == expected[2]


@pytest.mark.parametrize("feature", [(), (1, 2, 3, 4)])
def test_other_features_are_refused(feature):
    with pytest.raises(ModelError, match="not a feature of shape"):
        build_head(feature, 10)
