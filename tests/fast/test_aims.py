"""What batches are trained towards, by hand: labels, a teacher's probabilities, their weights."""

import math

import pytest
import torch
from torch import Tensor

from fedprophet.client.distill import distillation_losses
from fedprophet.fast.aims import UNLABELLED, Teacher, aimed, one_hot

CPU = torch.device("cpu")


def test_one_hot():
    assert one_hot(torch.tensor([[2, 0]]), 3).tolist() == [[[0, 0, 1], [1, 0, 0]]]


def test_a_sample_without_a_label():
    assert one_hot(torch.tensor([[UNLABELLED, 1]]), 3).tolist() == [[[0, 0, 0], [0, 1, 0]]]


def test_labels_alone():
    """q is ½, ¼, ¼ for both samples: the loss is ln 2 and ln 4, and its gradient (q − y) / 2."""
    scores = torch.tensor([[[0.5, 0.25, 0.25]] * 2]).log() + 3
    loss, gradient = aimed(scores, one_hot(torch.tensor([[0, 2]]), 3), None)
    assert loss.tolist() == pytest.approx([1.5 * math.log(2)])
    torch.testing.assert_close(gradient, torch.tensor([[[-0.25, 0.125, 0.125], [0.25, 0.125, -0.375]]]))


def test_a_teacher_of_other_weights_and_labels_by_hand():
    """q = ½, ¼, ¼ in both samples. The first has no label, the weight 2 and p = ¼, ½, ¼: its loss is
    2 (¼ ln ½ + ½ ln 2) = ½ ln 2, and its gradient 2 q − 2 p. The second has label 2, the weight ½ and p = ½, ½, 0: its
    loss is ln 4 + ½ · ½ ln 2, and its gradient 1.5 q − (¼, ¼, 1). The batch has two samples.
    """
    scores = torch.tensor([[[0.5, 0.25, 0.25]] * 2]).log() - 1
    p = torch.tensor([[[0.25, 0.5, 0.25], [0.5, 0.5, 0.0]]])
    teacher = Teacher(p, torch.tensor([[2.0, 0.5]]))
    loss, gradient = aimed(scores, one_hot(torch.tensor([[UNLABELLED, 2]]), 3), teacher)
    assert loss.tolist() == pytest.approx([(0.5 + 2 + 0.25) * math.log(2) / 2])
    expected = torch.tensor([[[0.5, -0.5, 0.0], [0.5, 0.125, -0.625]]]) / 2
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("labelled", [False, True])
def test_the_loss_and_its_gradient_are_those_of_the_plain_path(labelled):
    draw = torch.Generator().manual_seed(1)
    scores, p = (torch.randn(2, 5, 4, generator=draw) for _ in range(2))
    p, weights = p.softmax(dim=2), torch.rand(2, 5, generator=draw)
    labels = torch.randint(4, (2, 5), generator=draw) if labelled else torch.full((2, 5), UNLABELLED)
    losses, gradients = aimed(scores, one_hot(labels, 4), Teacher(p, weights))
    for client in range(2):
        given = {"probabilities": p[client], "weights": weights[client]}
        targets: dict[str, Tensor] = {**given, "labels": labels[client]} if labelled else given
        own = scores[client].clone().requires_grad_()
        loss = distillation_losses(own, targets).mean()
        loss.backward()
        assert float(losses[client]) == pytest.approx(float(loss.detach()), rel=1e-5)
        torch.testing.assert_close(gradients[client], own.grad)


def test_a_weight_of_zero_and_probabilities_of_zero_leave_the_label_alone():
    """As FedET's where no model disagrees: nothing there is no number."""
    scores, labels = torch.tensor([[[1.0, 2.0, 4.0]]]), one_hot(torch.tensor([[1]]), 3)
    nobody = aimed(scores, labels, Teacher(torch.zeros(1, 1, 3), torch.zeros(1, 1)))
    for found, expected in zip(nobody, aimed(scores, labels, None), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_probability_of_zero_draws_to_nothing():
    """What the teacher thinks impossible adds 0 · log 0 = 0 to the loss, and not what is no number."""
    sure = torch.eye(10)[torch.zeros(2, 5, dtype=torch.long)]
    losses, gradient = aimed(torch.zeros(2, 5, 10), sure, Teacher(sure, torch.full((2, 5), 2.0)))
    assert losses.tolist() == pytest.approx([3 * math.log(10)] * 2)
    torch.testing.assert_close(gradient[0, 0], torch.tensor([(0.3 - 3) / 5, *[0.3 / 5] * 9]))


def test_a_teacher_takes_over_what_another_says_in_its_own_memory():
    kept = Teacher.empty((2, 3), 4, CPU)
    assert kept.nbytes == 2 * 3 * 5 * 4
    memory = kept.probabilities
    kept[1].take(Teacher(torch.full((3, 4), 0.25), torch.tensor([1.0, 0.5, 0.0])))
    assert kept.probabilities is memory
    assert kept.weights.tolist() == [[0, 0, 0], [1, 0.5, 0]]
    rows, positions = torch.tensor([[0], [1]]), torch.tensor([[0, 2], [1, 2]])
    assert kept[rows, positions].weights.tolist() == [[0, 0], [0.5, 0]]
    assert kept[slice(1, 2)].probabilities.tolist() == [[[0.25] * 4] * 3]
