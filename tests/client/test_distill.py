"""Distillation on public samples against the same numbers and steps written out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedprophet.cascade.atoms import explicit_chain
from fedprophet.client.descent import batches
from fedprophet.client.distill import distill, distillation_losses
from fedprophet.client.features import FeatureCache
from fedprophet.client.layer_store import ClientStore
from fedprophet.client.part import ModelPart
from fedprophet.client.run import Client, run_client
from fedprophet.client.workspace import Workspace
from fedprophet.data.dataset import ClientData
from fedprophet.data.examples import LocalExamples, TensorExamples
from fedprophet.messages.modules import ModuleStore
from fedprophet.messages.tasks import Distill, Predict
from fedprophet.messages.values import SERVER, LocalTraining, Resources, Timeline

HYPER = LocalTraining(3, 2, learning_rate=0.5, momentum=0.9, weight_decay=0.1, strong_convexity=1.0)


def examples(count: int, seed: int = 3) -> LocalExamples:
    images = torch.rand(count, 1, 2, 2, generator=torch.Generator().manual_seed(seed))
    return LocalExamples(TensorExamples(images, torch.arange(count) % 3), np.arange(count))


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3)
    )


def whole(model: nn.Sequential) -> ModelPart:
    chain = explicit_chain(model)
    return ModelPart(chain, 0, len(chain), None)


# The loss.


def test_the_divergence_is_that_of_the_target_from_the_model() -> None:
    """Σ p ln(p / q), where p is the target and q the model; it is not Σ q ln(q / p)."""
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).log() + 3.0
    target = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.5, 0.0]])
    losses = distillation_losses(logits, {"probabilities": target, "weights": torch.tensor([1.0, 0.5])})
    first = 0.25 * math.log(0.5) + 0.5 * math.log(2.0)
    second = 0.5 * (0.5 * math.log(5.0) + 0.5 * math.log(5.0))  # a class of no probability adds nothing
    assert losses.tolist() == pytest.approx([first, second], rel=1e-5)
    reverse = 0.1 * math.log(0.2) * 2
    assert second != pytest.approx(0.5 * reverse)


def test_labels_add_their_cross_entropy_which_no_weight_touches() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).log()
    target = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.5, 0.0]])
    targets = {"probabilities": target, "weights": torch.tensor([0.2, 0.0]), "labels": torch.tensor([2, 0])}
    divergence = 0.25 * math.log(0.5) + 0.5 * math.log(2.0)
    expected = [math.log(4.0) + 0.2 * divergence, math.log(10.0)]
    assert distillation_losses(logits, targets).tolist() == pytest.approx(expected, rel=1e-5)


# Learning.


def test_distillation_is_sgd_on_the_mean_loss_of_each_batch() -> None:
    """The gradient of KL(p ‖ q) in the scores is q − p, that of the cross-entropy q − e_y."""
    torch.manual_seed(1)
    layer, public = nn.Linear(4, 3), examples(5)
    p = torch.softmax(torch.randn(5, 3), 1)
    targets = {"probabilities": p, "weights": torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0])}
    targets["labels"] = torch.tensor([0, 2, 1, 1, 0])
    task = Distill(round=4, client=SERVER, seed=11, training=HYPER, targets=targets)
    x, w, b = public.fetch(torch.arange(5)).flatten(1), layer.weight.detach().clone(), layer.bias.detach().clone()
    weight_speed, bias_speed, losses = torch.zeros_like(w), torch.zeros_like(b), []
    sizes = []
    for batch in batches(5, 2, 3, task):
        q = torch.softmax(x[batch] @ w.T + b, 1)
        share, label = targets["weights"][batch], targets["labels"][batch]
        divergence = (p[batch] * (p[batch] / q).log()).sum(1)
        losses.append((share * divergence - q[range(len(batch)), label].log()).mean())
        slope = (share.view(-1, 1) * (q - p[batch]) + q - nn.functional.one_hot(label, 3)) / len(batch)
        weight_speed = 0.9 * weight_speed + slope.T @ x[batch] + 0.1 * w
        bias_speed = 0.9 * bias_speed + slope.sum(0) + 0.1 * b
        w, b = w - 0.5 * weight_speed, b - 0.5 * bias_speed
        sizes.append(len(batch))
    assert sizes == [2, 2, 1]
    loss = distill(task, whole(nn.Sequential(nn.Flatten(), layer)), public)
    assert torch.allclose(layer.weight, w, atol=1e-5)
    assert torch.allclose(layer.bias, b, atol=1e-5)
    assert loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    assert layer.weight.grad is None


def even(count: int) -> dict[str, Tensor]:
    return {"probabilities": torch.full((count, 3), 1 / 3), "weights": torch.ones(count)}


def test_norm_layers_learn_too_but_not_their_statistics_from_a_single_sample() -> None:
    model = normed().eval()
    task = Distill(round=1, client=SERVER, seed=0, training=HYPER, targets=even(5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    distill(task, whole(model), examples(5))
    assert int(model[1].num_batches_tracked) == 2, "the third batch has one sample"
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert not torch.equal(model[1].weight, before["1.weight"])
    assert not any(module.training for module in model), "flags are given back as they were found"


def test_a_loss_that_is_not_finite_ends_it() -> None:
    model = normed()
    targets = {**even(5), "probabilities": torch.full((5, 3), float("nan"))}
    before = model[5].weight.detach().clone()
    loss = distill(Distill(round=1, client=SERVER, seed=0, training=HYPER, targets=targets), whole(model), examples(5))
    assert math.isnan(loss)
    assert torch.equal(model[5].weight, before)


# Predicting.


def test_predictions_are_those_of_evaluation_mode_whatever_the_micro_batch() -> None:
    model, public = normed().train(), examples(7)
    model[1].running_mean.fill_(0.3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    part = whole(model)
    found = [part.run_over(public, batch=size) for size in (1, 3, 7, 64)]
    assert all(module.training for module in model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        expected = model.eval()(public.fetch(torch.arange(7)))
        assert not torch.allclose(expected, model.train()(public.fetch(torch.arange(7))), atol=1e-3)
    for scores in found:
        assert scores.shape == (7, 3)
        assert not scores.requires_grad
        assert torch.allclose(scores, expected, atol=1e-6)


# As tasks.


@pytest.fixture
def server() -> Client:
    """The server: five public samples, and held-out ones that no task here may see."""
    data = ClientData(examples(5), examples(4, seed=8))
    return Client(data, lambda _: Resources(1, 1.0, 1.0))


def workspace() -> Workspace:
    return Workspace(
        explicit_chain(normed()), (1, 2, 2), 3, ModuleStore(), ClientStore(None, 10**6), FeatureCache(10**6, 10**6)
    )


def changed_tensors(work: Workspace) -> dict[str, Tensor]:
    """Return all tensors of a model, norm layers included, unlike those that the workspace holds."""
    torch.manual_seed(9)
    tensors = {n: value.detach() + torch.rand(value.shape) for n, value in work.chain.tensors.items() if value.ndim}
    return {**tensors, "1.num_batches_tracked": torch.tensor(5)}


def test_a_model_predicts_the_public_samples_with_the_norm_layers_it_came_with(server: Client) -> None:
    work = workspace()
    tensors = changed_tensors(work)
    task = Predict(round=1, client=SERVER, seed=0, number=3, last=6, batch=2, parameters=tensors)
    update = run_client(task, server, work)
    model = normed().eval()
    model.load_state_dict(tensors)
    with torch.no_grad():
        expected = model(server.data.train.fetch(torch.arange(5)))
    assert torch.allclose(update.logits, expected, atol=1e-5)
    assert (update.kind, update.client, update.number) == ("predict", SERVER, 3)
    second = run_client(replace(task, parameters={}), server, work).logits
    assert not torch.allclose(second, expected, atol=1e-3), "norm layers of a task do not stay behind"


def test_a_distilled_model_comes_back_whole_and_the_server_keeps_nothing(server: Client) -> None:
    work = workspace()
    tensors = changed_tensors(work)
    task = Distill(
        round=1, client=SERVER, seed=0, number=1, last=6, training=HYPER, targets=even(5), parameters=tensors
    )
    update = run_client(task, server, work)
    assert set(update.parameters) == set(normed().state_dict())
    assert int(update.parameters["1.num_batches_tracked"]) == 7
    assert not torch.equal(update.parameters["1.running_mean"], tensors["1.running_mean"])
    assert update.number == 1
    assert work.layers.get("backbone", SERVER, Timeline(), before=9) is None


def test_draws_have_names_and_the_callers_generator_is_left_alone(server: Client) -> None:
    """Dropout is drawn anew for each of the models that are distilled side by side."""
    task = Distill(round=1, client=SERVER, seed=0, last=6, training=HYPER, targets=even(5))
    task = replace(task, parameters=changed_tensors(workspace()))
    found = []
    for disturbance, number in ((0, 0), (1, 0), (1, 1)):
        work = workspace()
        torch.manual_seed(disturbance)
        before = torch.random.get_rng_state()
        found.append(run_client(replace(task, number=number), server, work).parameters["5.weight"])
        assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    run_client(Predict(round=1, client=SERVER, seed=0, last=6, parameters=task.parameters), server, work)
    assert torch.equal(torch.random.get_rng_state(), before)
