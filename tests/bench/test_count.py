"""The FLOPs of tasks, by hand on a model of one convolution and one linear layer."""

import pytest
from torch import nn

from fedprophet.bench.count import task_flops
from fedprophet.cascade.atoms import chain_of, explicit_chain
from fedprophet.cascade.cost import cost_of
from fedprophet.messages.tasks import Evaluate, Train
from fedprophet.messages.values import LocalTraining
from fedprophet.models import build
from fedprophet.threat import input_threat

CONVOLUTION = 2 * 4 * 4 * 9
"""Multiply-accumulates of a 3×3 convolution from one channel to two, on 4×4 pixels."""
LINEAR = 32 * 3
HEAD = 8 * 3 + 32
"""The convolution's exit: 2×4×4 pooled to 2×2×2, which reads 32 elements, then 8 inputs for each of 3 classes."""


@pytest.fixture
def cost():
    chain = explicit_chain(
        [
            ("conv", nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU())),
            ("classifier", nn.Sequential(nn.Flatten(), nn.Linear(32, 3))),
        ]
    )
    return cost_of(chain, (1, 4, 4), batch=4, classes=3)


def training(first, last, steps, iterations=4):
    hyper = LocalTraining(iterations, batch=4, learning_rate=0.1, momentum=0.9, weight_decay=0, strong_convexity=0)
    threat = input_threat(0.1, 0.025, steps) if steps is not None else None
    return Train(round=1, client=0, seed=0, first=first, last=last, threat=threat, training=hyper)


def test_training_the_whole_model_under_attack(cost):
    # Ten samples in batches of 4, 4, 2, and a new pass of 4: 14. Two attack steps of 2 forwards and a step of 3: 7.
    assert task_flops(cost, training(0, 2, steps=2), 10) == 14 * 7 * 2 * (CONVOLUTION + LINEAR)


@pytest.mark.parametrize("steps", [None, 0])
def test_training_without_an_attack(cost, steps):
    assert task_flops(cost, training(0, 2, steps), 10) == 14 * 3 * 2 * (CONVOLUTION + LINEAR)


def test_a_module_is_counted_with_its_exit_and_without_what_is_frozen(cost):
    assert task_flops(cost, training(0, 1, steps=2), 10) == 14 * 7 * 2 * (CONVOLUTION + HEAD)
    assert task_flops(cost, training(1, 2, steps=2), 10) == 14 * 7 * 2 * LINEAR


def test_evaluation_runs_from_the_image_on_whatever_is_frozen(cost):
    task = Evaluate(round=1, client=0, seed=0, first=1, last=2, threat=input_threat(0.1, 0.025, 3))
    # One forward for the clean answer, two for each of three steps, one for the attacked answer.
    assert task_flops(cost, task, 5) == 5 * 8 * 2 * (CONVOLUTION + LINEAR)
    clean = Evaluate(round=1, client=0, seed=0, first=1, last=2)
    assert task_flops(cost, clean, 5) == 5 * 1 * 2 * (CONVOLUTION + LINEAR)


def test_the_papers_jfat_round():
    """30 batches of 64 (400 samples: 6 full ones and one of 16 a pass) through VGG16, 23 forwards each."""
    cost = cost_of(chain_of(build("vgg16", (3, 32, 32), 10)), (3, 32, 32), 64, 10)
    hyper = LocalTraining(30, 64, 0.1, 0.9, 0, 0)
    task = Train(round=1, client=0, seed=0, last=len(cost.atoms), threat=input_threat(0.1, 0.025, 10), training=hyper)
    # Four passes of 400 samples are 28 batches; two more of 64.
    samples = 4 * 400 + 2 * 64
    assert task_flops(cost, task, 400) == samples * 23 * 2 * cost.total_flops / 64
    assert 10 * task_flops(cost, task, 400) == pytest.approx(2.5e14, rel=0.01)
