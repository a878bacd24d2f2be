"""A client carries out tasks: what it trains, what it keeps, what it sends back."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedprophet.cascade.atoms import explicit_chain
from fedprophet.cascade.heads import build_head
from fedprophet.client.features import FeatureCache
from fedprophet.client.layer_store import ClientStore
from fedprophet.client.run import Client, run_client
from fedprophet.client.workspace import Workspace
from fedprophet.data.dataset import ClientData
from fedprophet.data.examples import LocalExamples, TensorExamples
from fedprophet.messages.modules import ModuleStore, digest
from fedprophet.messages.tasks import Evaluate, Measure, ModelTask, Report, Task, Train
from fedprophet.messages.values import FrozenModule, LocalTraining, Resources
from fedprophet.threat import feature_threat, input_threat

HYPER = LocalTraining(2, 5, learning_rate=0.1, momentum=0.9, weight_decay=0.0, strong_convexity=1e-3)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


@pytest.fixture
def workspace() -> Workspace:
    torch.manual_seed(0)
    last = nn.Sequential(nn.Flatten(), nn.Linear(4 * 16, 3))
    chain = explicit_chain([("one", _block(1, 4)), ("two", _block(4, 4)), ("three", last)])
    return Workspace(chain, (1, 4, 4), 3, ModuleStore(), ClientStore(None, 10**6), FeatureCache(10**6, 10**6))


@pytest.fixture
def client() -> Client:
    torch.manual_seed(1)
    examples = TensorExamples(torch.rand(12, 1, 4, 4), torch.arange(12) % 3)
    data = ClientData(LocalExamples(examples, np.arange(9)), LocalExamples(examples, np.arange(9, 12)))
    return Client(data, lambda number: Resources(1000 + number, 5.0, 2.0))


def _shared(workspace: Workspace, first: int, last: int) -> dict[str, Tensor]:
    return {name: workspace.chain.tensors[name].detach().clone() for name in workspace.chain.shared(first, last)}


def _train_task(workspace: Workspace, first: int, last: int, head: int | None, **more: object) -> Task:
    parameters = _shared(workspace, first, last)
    if head is not None:
        torch.manual_seed(5)
        layer = build_head((4, 4, 4), 3)
        parameters |= {f"heads/{head}.{name}": p.detach() for name, p in layer.named_parameters()}
    return Train(
        round=1, client=0, seed=0, first=first, last=last, head=head, training=HYPER, parameters=parameters, **more
    )


def _evaluation(task: Train, **changes: object) -> Evaluate:
    same = {each.name: getattr(task, each.name) for each in fields(ModelTask)}
    return Evaluate(**{**same, **changes})


def test_report_tells_what_the_device_can_spare(workspace: Workspace, client: Client) -> None:
    update = run_client(Report(round=4, client=0, seed=0), client, workspace)
    assert update.resources == Resources(1004, 5.0, 2.0)
    assert update.weight == 12.0
    assert update.local == {}


def test_training_sends_shared_parameters_and_head_and_keeps_norm_layers(workspace: Workspace, client: Client) -> None:
    task = _train_task(workspace, 0, 1, head=0, threat=input_threat(0.1, 0.05, 2))
    update = run_client(task, client, workspace)
    assert set(update.parameters) == {"one.0.weight", "one.0.bias", "heads/0.weight", "heads/0.bias"}
    assert all(not torch.equal(update.parameters[name], task.parameters[name]) for name in task.parameters)
    own = run_client(Report(round=1, client=0, seed=0, wants_local=True), client, workspace).local
    assert set(own) == {f"one.1.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert int(own["one.1.num_batches_tracked"]) == 2
    assert not torch.equal(own["one.1.running_mean"], torch.zeros(4))


def test_joint_training_of_two_modules_goes_through_the_last_ones_exit(workspace: Workspace, client: Client) -> None:
    update = run_client(_train_task(workspace, 0, 2, head=1), client, workspace)
    names = {"one.0.weight", "one.0.bias", "two.0.weight", "two.0.bias", "heads/1.weight", "heads/1.bias"}
    assert set(update.parameters) == names
    whole = run_client(_train_task(workspace, 0, 3, head=None), client, workspace)
    assert {"three.1.weight", "three.1.bias"} <= set(whole.parameters)
    assert not any(name.startswith("heads/") for name in whole.parameters)


def test_a_model_may_have_heads_of_its_own(client: Client) -> None:
    """Vision transformers call their classifier `heads`: it is the model's, and the module's exit is another one."""
    torch.manual_seed(0)
    last = nn.Sequential(nn.Flatten(), nn.Linear(4 * 16, 3))
    chain = explicit_chain([("one", _block(1, 4)), ("two", _block(4, 4)), ("heads", last)])
    workspace = Workspace(chain, (1, 4, 4), 3, ModuleStore(), ClientStore(None, 10**6), FeatureCache(10**6, 10**6))
    task = _train_task(workspace, 0, 3, head=None)
    own = "heads.1.weight"
    assert own in task.parameters
    first, second = (run_client(task, client, workspace).parameters for _ in range(2))
    assert torch.equal(first[own], second[own])  # trained from what the task has, not from what the last one left
    assert not torch.equal(first[own], task.parameters[own])
    early = run_client(_train_task(workspace, 0, 1, head=0), client, workspace).parameters
    assert {"heads/0.weight", "heads/0.bias"} < set(early)
    assert own not in early


def test_the_same_task_gives_the_same_update(workspace: Workspace, client: Client) -> None:
    task = _train_task(workspace, 0, 1, head=0, threat=input_threat(0.1, 0.05, 2))
    first = run_client(task, client, workspace)
    torch.manual_seed(99)
    run_client(replace(task, client=3), client, workspace)
    second = run_client(task, client, workspace)
    assert first.parameters.keys() == task.parameters.keys() != set()
    assert _same(first.parameters, second.parameters)


def _frozen(workspace: Workspace, last: int) -> tuple[FrozenModule, ...]:
    return (FrozenModule(0, last, workspace.modules.add(_shared(workspace, 0, last))),)


def test_a_frozen_prefix_feeds_cached_features_and_does_not_change(workspace: Workspace, client: Client) -> None:
    frozen = _frozen(workspace, 1)
    before = _shared(workspace, 0, 1)
    task = _train_task(workspace, 1, 2, head=1, frozen=frozen, threat=feature_threat(0.5, 2, (0.0, float("inf"))))
    run_client(task, client, workspace)
    assert _same(before, _shared(workspace, 0, 1))
    assert workspace.features.memory.size == 9 * 4 * 16 * 4
    images = client.data.train.fetch(torch.arange(9))
    with torch.no_grad(), workspace.chain.mode(0, 1, training=False):
        expected = workspace.chain.run(images, 0, 1)
    key = (0, (frozen[0].digest,), digest({}))
    assert torch.equal(workspace.features.get(key, lambda: torch.empty(0)), expected)


def test_the_prefix_runs_with_the_clients_own_norm_layers(workspace: Workspace, client: Client) -> None:
    run_client(_train_task(workspace, 0, 1, head=0), client, workspace)
    frozen = _frozen(workspace, 1)
    measure = Measure(
        round=2, client=0, seed=0, first=1, last=2, frozen=frozen, threat=feature_threat(1.0, 3, (0.0, 9.0))
    )
    measure = replace(measure, parameters=_shared(workspace, 1, 2))
    trained = run_client(measure, client, workspace)
    stranger = run_client(replace(measure, client=1), client, workspace)
    assert trained.weight == stranger.weight == 9.0
    assert trained.magnitude > 0
    assert trained.magnitude != stranger.magnitude


def test_evaluation_uses_what_the_client_trained_in_this_round(workspace: Workspace, client: Client) -> None:
    task = _train_task(workspace, 0, 3, head=None)
    run_client(task, client, workspace)
    seen: list[Tensor] = []
    hook = workspace.chain.atoms[0].register_forward_hook(
        lambda *_: seen.append(workspace.chain.tensors["one.1.running_mean"].clone())
    )
    run_client(_evaluation(task), client, workspace)
    run_client(_evaluation(task, round=0), client, workspace)
    hook.remove()
    own = workspace.layers.get("backbone", 0, task.timeline, before=2)
    assert own is not None
    assert torch.equal(seen[0], own["one.1.running_mean"])
    assert torch.equal(seen[-1], torch.zeros(4))


def test_a_diverged_client_keeps_its_own_layers(workspace: Workspace, client: Client) -> None:
    task = _train_task(workspace, 0, 1, head=0)
    poisoned = {**task.parameters, "one.0.weight": torch.full((4, 1, 3, 3), float("nan"))}
    update = run_client(replace(task, parameters=poisoned), client, workspace)
    assert update.loss != update.loss
    assert workspace.layers.get("backbone", 0, task.timeline, before=9) is None


def test_norm_statistics_that_overflow_make_the_update_unusable():
    """A feature of 10^25 has an infinite variance, by which it is normalised to zero: loss and weights look healthy."""
    chain = explicit_chain(
        [("one", nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)))]
    )
    layers = ClientStore(None, 10**6)
    workspace = Workspace(chain, (1, 2, 2), 3, ModuleStore(), layers, FeatureCache(10**6, 10**6))
    with torch.no_grad():
        chain.tensors["one.0.weight"].fill_(1e25)
    parameters = {name: chain.tensors[name].detach().clone() for name in chain.shared()}
    torch.manual_seed(0)
    examples = TensorExamples(torch.rand(8, 1, 2, 2), torch.arange(8) % 3)
    data = ClientData(LocalExamples(examples, np.arange(6)), LocalExamples(examples, np.arange(6, 8)))
    training = LocalTraining(1, 6, learning_rate=0.1, momentum=0.0, weight_decay=0.0, strong_convexity=0.0)
    task = Train(round=1, client=0, seed=0, last=1, training=training, parameters=parameters)
    update = run_client(task, Client(data, lambda _: Resources(1, 1.0, 1.0)), workspace)
    assert all(bool(torch.isfinite(value).all()) for value in update.parameters.values())
    assert math.isinf(float(chain.tensors["one.1.running_var"].max()))
    assert math.isnan(update.loss), "the server does not see the statistics: the loss has to tell it"
    assert layers.get("backbone", 0, task.timeline, before=2) is None


def test_empty_and_tiny_shards_work(workspace: Workspace, client: Client) -> None:
    one = ClientData(LocalExamples(client.data.train, np.arange(1)), client.data.validation)
    update = run_client(_train_task(workspace, 0, 3, head=None), Client(one, client.resources), workspace)
    assert all(bool(torch.isfinite(value).all()) for value in update.parameters.values())
    nobody = ClientData(one.train, LocalExamples(client.data.train, np.arange(0)))
    task = _evaluation(_train_task(workspace, 0, 3, head=None))
    answer = run_client(task, Client(nobody, client.resources), workspace)
    assert (answer.samples, answer.clean, answer.adversarial) == (0, 0, 0)


def test_a_task_without_a_handler_is_refused(workspace: Workspace, client: Client) -> None:
    with pytest.raises(NotImplementedError, match="no handler for a task of the class Task"):
        run_client(Task(round=1, client=0, seed=0), client, workspace)


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)
