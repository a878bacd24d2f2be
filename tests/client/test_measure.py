"""Accuracy counts and the perturbation magnitude against values that are known exactly."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedprophet.cascade.atoms import explicit_chain
from fedprophet.client.measure import evaluate, perturbation_magnitude
from fedprophet.client.segment import Segment
from fedprophet.client.task import ClientTask
from fedprophet.data.dataset import LocalExamples, TensorExamples
from fedprophet.threat import feature_threat, input_threat

TASK = ClientTask("measure", 1, 0, seed=0, batch=3)


def _threshold() -> Segment:
    """Class 1 where the one pixel is above 0.5."""
    layer = nn.Linear(1, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0], [10.0]]))
        layer.bias.copy_(torch.tensor([0.0, -5.0]))
    return Segment(explicit_chain([("layer", layer)]), 0, 1, None)


def test_evaluation_counts_clean_and_attacked_hits() -> None:
    pixels = torch.tensor([[0.1], [0.45], [0.55], [0.9], [0.2]])
    examples = LocalExamples(TensorExamples(pixels, torch.tensor([0, 0, 1, 1, 1])), np.arange(5))
    task = replace(TASK, kind="evaluate", threat=input_threat(0.1, 0.05, 10))
    counts = evaluate(task, _threshold(), examples)
    # 0.2 is wrong already; 0.45 and 0.55 lie within 0.1 of the threshold and fall to the attack.
    assert counts == {"samples": 5.0, "clean": 4.0, "adversarial": 2.0}
    assert evaluate(replace(task, threat=None), _threshold(), examples) == {"samples": 5.0, "clean": 4.0}


def test_magnitude_of_a_linear_map_is_its_largest_singular_value() -> None:
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
    segment = Segment(explicit_chain([("layer", layer)]), 0, 1, None)
    task = replace(TASK, threat=feature_threat(0.5, 40, (-math.inf, math.inf)))
    found = perturbation_magnitude(task, segment, torch.randn(7, 2, generator=torch.Generator().manual_seed(0)))
    assert found["samples"] == 7.0
    assert found["magnitude"] == pytest.approx(1.5, rel=0.01)
    assert found["magnitude"] <= 1.5 + 1e-5


def test_magnitude_is_a_mean_of_per_sample_norms() -> None:
    """z = relu(2x − 0.5): within 0.1 of x = 0.5 it moves by 0.2, within 0.1 of x = 0 it stays 0; their mean is 0.1."""
    layer = nn.Linear(1, 1)
    with torch.no_grad():
        layer.weight.fill_(2.0)
        layer.bias.fill_(-0.5)
    segment = Segment(explicit_chain([("layer", nn.Sequential(layer, nn.ReLU()))]), 0, 1, None)
    task = replace(TASK, threat=input_threat(0.1, 0.05, 20))
    found = perturbation_magnitude(task, segment, torch.tensor([[0.5], [0.0]]))
    assert found == {"samples": 2.0, "magnitude": pytest.approx(0.1, abs=1e-6)}
