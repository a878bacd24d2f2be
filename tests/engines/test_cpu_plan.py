"""The fast plan does what the model does: on every model that ships, on users' own, in every memory format."""

import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedprophet.attacks.pgd import pgd
from fedprophet.cascade.atoms import chain_of, explicit_chain
from fedprophet.cascade.channels import kept_channels
from fedprophet.cascade.heads import build_head
from fedprophet.cascade.narrow import slice_state
from fedprophet.client.aims import Labels
from fedprophet.client.features import FeatureCache
from fedprophet.client.layer_store import ClientStore
from fedprophet.client.run import Client, run_client
from fedprophet.client.subnetwork import narrowed
from fedprophet.client.workspace import Workspace
from fedprophet.data.dataset import ClientData
from fedprophet.data.examples import LocalExamples, TensorExamples
from fedprophet.engines.cpu_plan import AS_WRITTEN, PlannedChain, fast_plan, memory_format_of, planned, to_format
from fedprophet.engines.folding import FoldedConvolution, Pointwise
from fedprophet.messages.modules import ModuleStore
from fedprophet.messages.tasks import Evaluate, Measure, Train
from fedprophet.messages.values import FrozenModule, LocalTraining, Resources
from fedprophet.models import MODELS, build
from fedprophet.models.normalize import Normalize
from fedprophet.threat import feature_threat, input_threat

CLASSES = 5
OPTIONS = {"vit": {"patch": 4, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32}}
SHAPES = {"cnn4": (3, 56, 56), "vit": (3, 16, 16), "cnn3": (3, 16, 16), "own": (3, 12, 12), "vgg-small": (3, 16, 16)}
SOME = ("vgg-small", "resnet10", "cnn3", "vit", "own")
ALL = (*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted({*MODELS} - {*SOME})))


class Own(nn.Module):
    """A user's own: a shortcut, a join, a convolution that two layers read, a norm layer that follows none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.left, self.left_norm = nn.Conv2d(8, 6, 1, stride=2), nn.BatchNorm2d(6)
        self.right, self.right_norm = nn.Conv2d(8, 10, 3, stride=2, padding=1), nn.BatchNorm2d(10)
        self.both, self.before = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.last, self.last_norm = nn.Conv2d(16, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.classify = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = F.relu(self.stem_norm(self.stem(x)))
        x = torch.cat([self.left_norm(self.left(x)), self.right_norm(self.right(x))], dim=1)
        read_twice = self.both(F.relu(self.before(x)))
        x = F.relu(x + read_twice) * torch.sigmoid(read_twice)
        x = F.relu_(self.last_norm(self.last(x)))
        return self.classify(F.adaptive_avg_pool2d(x, 1).flatten(1))


def model_of(name: str) -> tuple[nn.Module, tuple[int, int, int]]:
    """Return a model as it is after some training, with parameters that no two layers share."""
    torch.manual_seed(0)
    shape = SHAPES.get(name, (3, 32, 32))
    model = Own() if name == "own" else build(name, shape, CLASSES, **OPTIONS.get(name, {"width": 4}))
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_(0.0, 0.2)
                layer.running_var.uniform_(0.5, 1.5)
                layer.weight.uniform_(0.8, 1.4)
                layer.bias.normal_(0.0, 0.2)
    return model, shape


def workspace_of(chain, shape, *, fast: bool) -> Workspace:
    layers = ClientStore(None, 10**6)
    workspace = Workspace(chain, shape, CLASSES, ModuleStore(), layers, FeatureCache(10**8, 10**8))
    if fast:
        workspace.run_by(fast_plan)
    return workspace


@pytest.fixture(scope="module")
def sides(request):
    """Return a workspace that computes as the model is written and one of the fast plan, and a batch."""
    model, shape = model_of(request.param)
    made = []
    for fast in (False, True):
        again, _ = model_of(request.param)
        again.load_state_dict(model.state_dict())
        made.append(workspace_of(chain_of(again, Normalize((0.5,) * 3, (0.25,) * 3)), shape, fast=fast))
    x = torch.rand(6, *shape, generator=torch.Generator().manual_seed(1))
    return *made, x, torch.arange(6) % CLASSES


def close(found, expected, tolerance=1e-4):
    """Whether two tensors are equal but for rounding, measured by the whole of the expected one."""
    return float((found - expected).norm()) <= tolerance * float(expected.norm())


def of(kind, chain):
    return [layer for layer in chain.modules() if isinstance(layer, kind)]


@pytest.mark.parametrize("sides", ALL, indirect=True)
def test_every_model_says_the_same_in_evaluation(sides):
    plain, fast, x, _ = sides
    slow, quick = (workspace.part(0, len(workspace.chain)) for workspace in (plain, fast))
    with torch.no_grad(), slow.still(), quick.still():
        expected = slow.logits(x)
        assert close(quick.logits(quick.take(x)), expected, 1e-4)
        # However the batch lies.
        assert close(quick.logits(x), expected, 1e-4)


@pytest.mark.parametrize("sides", SOME, indirect=True)
@pytest.mark.parametrize("threat", [input_threat(0.1, 0.03, 3), feature_threat(2.0, 3, (0.0, 1.0))])
def test_its_attack_finds_losses_as_high(sides, threat):
    plain, fast, x, labels = sides
    losses = []

    def losses_of(part, z):
        return part.exit_losses(part.features(z), Labels(labels), 0.0)

    judge = plain.part(0, len(plain.chain))
    with torch.no_grad(), judge.still():
        clean = float(losses_of(judge, x).mean())
    for workspace in (plain, fast):
        part = workspace.part(0, len(workspace.chain))
        with part.still():
            draw = torch.Generator().manual_seed(5)
            found = pgd(lambda z, s=part: losses_of(s, z).sum(), part.take(x), threat, draw)
        with torch.no_grad(), judge.still():
            losses.append(float(losses_of(judge, found).mean()))
    assert losses[0] > clean
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize("fixed", [False, True], ids=["", "fixed-statistics"])
@pytest.mark.parametrize("sides", SOME, indirect=True)
def test_a_step_on_a_given_batch_is_the_same(sides, fixed):
    plain, fast, x, labels = sides
    gradients, before = [], [tensor.clone() for tensor in _buffers(fast)]
    for workspace in (plain, fast):
        workspace.chain.model.zero_grad()
        part = workspace.part(0, len(workspace.chain))
        torch.manual_seed(3)
        with part.mode(training=True), part.fixed_statistics(fixed):
            part.exit_losses(part.features(part.take(x)), Labels(labels), 0.0).mean().backward()
        gradients.append({n: t.grad for n, t in workspace.chain.tensors.items() if isinstance(t, nn.Parameter)})
    slow, quick = gradients
    # A convolution's bias before a norm layer has no gradient but rounding.
    whole = torch.cat([g.flatten() for g in slow.values()]).norm()
    assert all(float((quick[name] - slow[name]).norm()) <= 1e-4 * float(whole) for name in slow)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(_buffers(plain), _buffers(fast), strict=True))
    moved = not all(torch.equal(a, b) for a, b in zip(before, _buffers(fast), strict=True))
    assert moved is (bool(before) and not fixed)


def _buffers(workspace):
    return [tensor.float() for tensor in workspace.chain.tensors.values() if not isinstance(tensor, nn.Parameter)]


@pytest.mark.parametrize("norm", [input_threat(0.1, 0.0, 1), replace(feature_threat(2.0, 1, (0.0, 1.0)), step=0.0)])
def test_a_random_start_does_not_depend_on_the_memory_format(norm):
    x = torch.rand(4, 3, 5, 6)
    starts = [
        pgd(lambda z: z.sum(), to_format(x, order), norm, torch.Generator().manual_seed(2))
        for order in (AS_WRITTEN, torch.channels_last)
    ]
    assert not torch.equal(starts[0], x)
    assert torch.allclose(starts[0], starts[1], rtol=1e-6, atol=1e-7)
    assert starts[1].is_contiguous(memory_format=torch.channels_last)


# What is exchanged ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "folds", "strided"),
    # All convolutions of a VGG; in a ResNet of four blocks a stem, two in each block and three shortcuts.
    [("vgg11", 8, 0), ("resnet10", 12, 3), ("cnn3", 2, 0), ("vit", 0, 0)],
)
def test_what_is_folded_in_the_models_that_ship(name, folds, strided):
    model, _ = model_of(name)
    chain = planned(chain_of(model))
    assert len(of(FoldedConvolution, chain)) == folds
    assert len(of(Pointwise, chain)) == strided
    assert memory_format_of(chain) == (AS_WRITTEN if name == "vit" else torch.channels_last)
    assert len(of(nn.BatchNorm2d, chain)) == folds, "training still has them"


def test_what_is_folded_in_a_model_of_ones_own():
    chain = planned(chain_of(model_of("own")[0]))
    convolutions = {id(layer.convolution) for layer in of(FoldedConvolution, chain)}
    model = chain.model
    assert convolutions == {id(layer) for layer in (model.stem, model.left, model.right, model.last)}
    assert memory_format_of(chain) == torch.channels_last


def test_atoms_without_anything_to_exchange_run_the_programs_they_had():
    chain = chain_of(model_of("vit")[0])
    for before, after in zip(chain.atoms, planned(chain).atoms, strict=True):
        assert after.body.train is before.body.train
        assert after.body.evaluate is before.body.evaluate


def test_parts_of_an_explicit_chain_are_left_as_they_are():
    block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    chain = explicit_chain([("one", block), ("two", nn.Sequential(nn.Flatten(), nn.Linear(144, 2)))])
    again = planned(chain)
    assert again.atoms == chain.atoms
    assert memory_format_of(again) == AS_WRITTEN


class Functional(nn.Module):
    """A convolution that is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3))

    def forward(self, x):
        return F.conv2d(x, self.weight)


def classifier(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, (1, 3)),
        nn.Conv2d(4, 4, 4, stride=4),
        nn.Conv2d(4, 4, 1, stride=2, padding=1),
        nn.ConvTranspose2d(4, 4, 3),
        Functional(),
    ],
)
def test_a_rare_convolution_keeps_the_format_of_the_model(layer):
    assert memory_format_of(planned(chain_of(classifier(layer)))) == AS_WRITTEN


def test_common_convolutions_have_their_channels_last():
    assert memory_format_of(planned(chain_of(classifier(nn.ReLU())))) == torch.channels_last
    without_any = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    assert memory_format_of(planned(chain_of(without_any))) == AS_WRITTEN
    tokens = torch.rand(2, 3, 4)
    assert to_format(tokens, torch.channels_last) is tokens


class Viewing(nn.Module):
    """As people often write it: view() wants a tensor in the order of its dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.classify = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(144, 2)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        return self.classify(x.view(x.size(0), -1))


def test_a_model_that_depends_on_its_memory_format_keeps_it():
    chain = chain_of(Viewing())
    workspace = workspace_of(chain, (3, 8, 8), fast=True)
    part = workspace.part(0, len(chain))
    assert part.chain.memory_format == AS_WRITTEN
    assert len(of(FoldedConvolution, part.chain)) == 1
    x = torch.rand(2, 3, 8, 8)
    with torch.no_grad(), part.still(), chain.mode(0, None, training=False):
        assert close(part.logits(part.take(x)), chain.run(x))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.classify = nn.Conv2d(3, 4, 1, stride=2), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.classify(self.norm(self.conv(input=x)).mean((2, 3)))


def test_a_layer_that_is_called_by_name_is_left_alone():
    chain = planned(chain_of(Named()))
    assert of(FoldedConvolution, chain) + of(Pointwise, chain) == []
    assert memory_format_of(chain) == AS_WRITTEN


# Tasks ---------------------------------------------------------------------------------------------------------------

ONE_STEP = LocalTraining(1, 6, learning_rate=0.1, momentum=0.0, weight_decay=0.0, strong_convexity=1e-3)


def client_of(shape) -> Client:
    torch.manual_seed(7)
    examples = TensorExamples(torch.rand(6, *shape), torch.arange(6) % CLASSES)
    everything = LocalExamples(examples, np.arange(6))
    return Client(ClientData(everything, everything), lambda _: Resources(1, 1.0, 1.0))


def training_task(workspace, first, last, head_shape=None, **more) -> Train:
    parameters = workspace.values(workspace.chain.shared(first, last))
    if head_shape is not None:
        torch.manual_seed(9)
        parameters |= {f"heads/0.{n}": p.detach() for n, p in build_head(head_shape, CLASSES).named_parameters()}
    head = None if head_shape is None else 0
    span = {"first": first, "last": last, "head": head}
    return Train(round=1, client=0, seed=0, **span, training=ONE_STEP, parameters=parameters, **more)


@pytest.mark.parametrize("sides", ["resnet10"], indirect=True)
def test_clients_do_the_same_work_behind_frozen_modules(sides):
    answers = []
    for workspace in sides[:2]:
        chain = workspace.chain
        digest = workspace.modules.add(workspace.values(chain.shared(0, 3)))
        frozen = (FrozenModule(0, 3, digest),)
        task = training_task(workspace, 3, 4, (8, 16, 16), frozen=frozen, wants_local=True)
        threat = feature_threat(1.0, 3, (0.0, 99.0))
        measuring = Measure(round=1, client=0, seed=0, first=3, last=4, frozen=frozen, threat=threat)
        measuring = replace(measuring, parameters=workspace.values(chain.shared(3, 4)))
        client = client_of((3, 32, 32))
        answers.append([run_client(measuring, client, workspace), run_client(task, client, workspace)])
    (slow_measure, slow), (fast_measure, fast) = answers
    assert fast_measure.magnitude == pytest.approx(slow_measure.magnitude, rel=1e-3)
    assert fast.loss == pytest.approx(slow.loss, rel=1e-4)
    assert fast.parameters.keys() == slow.parameters.keys()
    assert all(close(fast.parameters[name], slow.parameters[name]) for name in slow.parameters)
    assert all(tensor.is_contiguous() for tensor in (*fast.parameters.values(), *fast.local.values()))


def shortened(suite):
    """Give every attack of AutoAttack a few steps."""

    def make(*arguments):
        made = suite(*arguments)
        made.apgd.n_iter = made.apgd_targeted.n_iter = made.fab.n_iter = made.square.n_queries = 3
        return made

    return make


@pytest.mark.parametrize(("radius", "component"), [(0.002, None), (0.3, "apgd-ce")])
def test_any_attack_may_be_carried_out(radius, component, monkeypatch):
    """AutoAttack counts on the order of dimensions: what it is given and what it gets back has it."""
    pytest.importorskip("pyautoattack")
    module = importlib.import_module("fedprophet.attacks.autoattack")
    monkeypatch.setattr(module, "_suite", shortened(module._suite))
    torch.manual_seed(0)
    body = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    model = nn.Sequential(*body, nn.Linear(32, CLASSES)).eval()
    images = torch.rand(3, 3, 6, 6)
    examples = LocalExamples(TensorExamples(images, model(images).argmax(1)), np.arange(3))
    client = Client(ClientData(examples, examples), lambda _: Resources(1, 1.0, 1.0))
    workspace = workspace_of(chain_of(model), (3, 6, 6), fast=True)
    assert workspace.part(0, 1).chain.memory_format == torch.channels_last
    task = Evaluate(
        round=1,
        client=0,
        seed=0,
        last=len(workspace.chain),
        parameters=workspace.values(workspace.chain.shared()),
        threat=input_threat(radius, 0.1, 1),
        attack="autoattack",
    )
    counts = run_client(task, client, workspace)
    # All stand in a tiny ball, so that every component has its turn; in a large one none does.
    assert counts.clean == 3
    assert counts.adversarial == (3 if component is None else 0)
    assert component is None or counts.broken[component] == 3


@pytest.mark.parametrize("sides", ["vgg-small", "resnet10"], indirect=True)
def test_sub_networks_take_the_plan_of_their_model(sides):
    plain, fast, *_ = sides
    shape = plain.input_shape
    kept = kept_channels(plain.channels, 0.5, lambda width, count: torch.arange(width)[-count:])
    answers = []
    for workspace in (plain, fast):
        task = training_task(workspace, 0, len(workspace.chain), kept_channels=kept)
        part = slice_state(workspace.channels, kept, task.parameters)
        answers.append(run_client(replace(task, parameters=part), client_of(shape), workspace))
    slow, quick = answers
    # Taken together: a convolution's bias before a norm layer is moved by nothing but rounding.
    assert close(*(torch.cat([t.flatten() for t in side.parameters.values()]) for side in (quick, slow)))
    assert not isinstance(narrowed(plain, kept).part(0, 1).chain, PlannedChain)
    narrow = narrowed(fast, kept)
    # The scaled shortcuts of a narrow ResNet cannot be exchanged, so its convolutions lie as they are written.
    found = narrow.part(0, 1).chain.memory_format
    assert found == (AS_WRITTEN if "layer1.0.conv1.weight" in slow.parameters else torch.channels_last)
    weights = [layer.weight for layer in narrow.chain.model.modules() if isinstance(layer, nn.Conv2d)]
    assert all(weight.is_contiguous(memory_format=found) for weight in weights)
