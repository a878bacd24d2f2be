"""A step atom by atom, and in pieces, gives what the plain step gives, whatever an atom is made of."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from fedprophet.cascade.atoms import Chain, chain_of, explicit_chain
from fedprophet.cascade.heads import Head, HeadShape
from fedprophet.cascade.measure import LiveBytes
from fedprophet.client import atomwise
from fedprophet.client.aims import Labels
from fedprophet.client.atomwise import AtomwiseStep, pieces
from fedprophet.client.memory_plan import PLAIN, MemoryPlan, Step
from fedprophet.client.part import ModelPart
from fedprophet.client.trainer import train
from fedprophet.engines.cpu_plan import fast_plan
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import LocalTraining

HYPER = LocalTraining(3, 7, learning_rate=0.1, momentum=0.9, weight_decay=0.01, strong_convexity=0.01)
TASK = Train(round=1, client=2, seed=3, training=HYPER)
FUSED, ATOMS = MemoryPlan(step=Step.FUSED), MemoryPlan(step=Step.ATOMS)
EVERY_PLAN = [FUSED, ATOMS, *(MemoryPlan(step=Step.PIECES, piece=piece) for piece in (4, 2, 1))]
CLASSES = 3
Result = tuple[float, dict[str, Tensor]]


class Residual(nn.Module):
    """The block of a ResNet that halves the side; its second norm layer and the shortcut's are called side by side."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4, **options)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4, **options)
        self.shortcut = nn.Sequential(nn.Conv2d(3, 4, 1, 2, bias=False), nn.BatchNorm2d(4, **options))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


class Twice(nn.Module):
    """Calls one convolution and one norm layer twice, so that its statistics see two batches in one step."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(self.norm(self.conv(x)))
        return x


class OwnNorm(nn.Module):
    """A norm layer as users write them: no layer of torch, and its statistics are written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x - self.running_mean.view(1, -1, 1, 1)
        mean = x.mean((0, 2, 3))
        self.running_mean.mul_(0.9).add_(0.1 * mean.detach())
        return x - mean.view(1, -1, 1, 1)


class Centred(nn.Module):
    """Lets samples know each other, and keeps nothing that would tell."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Folded(nn.Module):
    """Works on a batch whose samples are taken apart."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


class Unfolded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x).unflatten(0, (-1, 4))


def _ending(*layers: nn.Module) -> nn.Sequential:
    """Return a network of these atoms, the first of which reads 3x8x8 and the last of which gives 4 channels."""
    return nn.Sequential(*layers, nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)))


def _plain_cnn(**options: object) -> nn.Sequential:
    norm = nn.BatchNorm2d(4, **options)
    second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, **options), nn.ReLU(inplace=True))
    return _ending(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(inplace=True), nn.MaxPool2d(2)), second)


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {
    "conv, norm, relu in place, pool": _plain_cnn,
    "momentum None": lambda: _plain_cnn(momentum=None),
    "no affine part": lambda: _plain_cnn(affine=False),
    "no statistics kept": lambda: _plain_cnn(track_running_stats=False),
    "residual": lambda: _ending(Residual()),
    "residual, momentum None": lambda: _ending(nn.Conv2d(3, 3, 1), Residual(momentum=None)),
    "instance norm": lambda: _ending(nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True))),
    "vectors": lambda: nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(192, 5)),
        nn.Sequential(nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, CLASSES)),
    ),
    "dropout": lambda: _ending(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)), nn.Dropout2d(0.3)
    ),
    "called twice": lambda: _ending(nn.Conv2d(3, 4, 3), Twice()),
    "called twice, momentum None": lambda: _ending(nn.Conv2d(3, 4, 3), Twice(None)),
    "spectral norm": lambda: _ending(nn.Sequential(spectral_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4))),
    "a norm layer of one's own": lambda: _ending(nn.Sequential(nn.Conv2d(3, 4, 3), OwnNorm()), nn.ReLU()),
    "a mean over the batch": lambda: _ending(nn.Sequential(nn.Conv2d(3, 4, 3), Centred()), nn.ReLU()),
    "samples taken apart": lambda: _ending(nn.Conv2d(3, 4, 3), Folded(), Unfolded()),
    "reshaping": lambda: _ending(
        nn.Conv2d(3, 4, 3), nn.Identity(), nn.ReLU(inplace=True), nn.Flatten(2), nn.Unflatten(2, (6, 6))
    ),
}


def _head(network: nn.Sequential, last: int) -> Head | None:
    if last == len(network):
        return None
    with torch.no_grad():
        feature = network[:last].eval()(torch.zeros(1, 3, 8, 8, dtype=torch.float64))
    network.train()
    return Head(HeadShape((2, 2), 16) if feature.dim() == 4 else HeadShape(None, feature[0].numel()), CLASSES).double()


def _trained(
    network: nn.Sequential,
    plan: MemoryPlan,
    *,
    hyper: LocalTraining = HYPER,
    last: int | None = None,
    samples: int = 17,
    prior: Tensor | None = None,
    chain: Callable[[nn.Sequential], Chain] = explicit_chain,
) -> Result:
    """Train a copy of a network; return the loss and all that training changes."""
    network = copy.deepcopy(network)
    torch.manual_seed(5)
    last = len(network) if last is None else last
    head = _head(network, last)
    x = torch.randn(samples, 3, 8, 8, dtype=torch.float64)
    x[::3] += 2  # pieces of a batch have other statistics than the batch
    atoms = chain(network)
    part = ModelPart(atoms, 0, last if chain is explicit_chain else len(atoms), head, prior)
    loss = train(replace(TASK, training=hyper), part, part.take(x), torch.arange(samples) % CLASSES, plan=plan)
    assert all(parameter.grad is None or hyper.summed_heads for parameter in part.parameters())
    values = {**network.state_dict(), **({f"head.{k}": v for k, v in head.state_dict().items()} if head else {})}
    return loss, values


def _assert_same(found: Result, expected: Result) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-10)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-10, atol=1e-12)


def _network(name: str) -> nn.Sequential:
    torch.manual_seed(1)
    return NETWORKS[name]().double()


@pytest.mark.parametrize("plan", EVERY_PLAN, ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_plan_gives_what_the_plain_step_gives(name: str, plan: MemoryPlan) -> None:
    """17 samples in batches of 7, 7 and 3: no piece divides them all. Statistics and counters are compared too."""
    network = _network(name)
    expected = _trained(network, PLAIN)
    assert not torch.equal(next(iter(expected[1].values())), next(iter(network.state_dict().values())))
    _assert_same(_trained(network, plan), expected)


@pytest.mark.parametrize("plan", EVERY_PLAN, ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {"summed_heads": True},
        {"proximal": 0.5},
        {"fixed_statistics": True},
        {"momentum": 0.0, "weight_decay": 0.0},
        {"strong_convexity": 0.0},
        {"consistency": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["conv, norm, relu in place, pool", "residual", "dropout"])
def test_every_plan_knows_every_hyper_parameter(name: str, changes: dict[str, float], plan: MemoryPlan) -> None:
    network, hyper = _network(name), replace(HYPER, **changes)
    expected = _trained(network, PLAIN, hyper=hyper, last=1)
    assert expected[0] != _trained(network, PLAIN, hyper=replace(HYPER, learning_rate=0.2), last=1)[0]
    _assert_same(_trained(network, plan, hyper=hyper, last=1), expected)


@pytest.mark.parametrize("plan", EVERY_PLAN, ids=str)
def test_an_auxiliary_head_and_a_prior_are_part_of_the_step(plan: MemoryPlan) -> None:
    network, prior = _network("conv, norm, relu in place, pool"), torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    for last in (1, 2, 3):
        expected = _trained(network, PLAIN, last=last, prior=prior)
        assert expected[0] != _trained(network, PLAIN, last=last)[0]
        _assert_same(_trained(network, plan, last=last, prior=prior), expected)


@pytest.mark.parametrize("plan", EVERY_PLAN, ids=str)
@pytest.mark.parametrize("samples", [1, 2, 8])
def test_batches_of_one_and_of_few_samples(samples: int, plan: MemoryPlan) -> None:
    """8 samples are a batch of 7 and one of 1, whose norm layers stay in evaluation mode."""
    network = _network("residual")
    _assert_same(_trained(network, plan, samples=samples), _trained(network, PLAIN, samples=samples))


@pytest.mark.parametrize("plan", EVERY_PLAN, ids=str)
@pytest.mark.parametrize("name", ["conv, norm, relu in place, pool", "residual", "a norm layer of one's own"])
def test_a_model_that_was_traced_is_stepped_as_an_explicit_one(name: str, plan: MemoryPlan) -> None:
    network = _network(name)
    _assert_same(_trained(network, plan, chain=chain_of), _trained(network, PLAIN, chain=chain_of))


@pytest.mark.parametrize("plan", EVERY_PLAN, ids=str)
@pytest.mark.parametrize("name", ["conv, norm, relu in place, pool", "residual"])
def test_the_workers_fast_plan_is_cut_up_too_and_keeps_channels_last(name: str, plan: MemoryPlan) -> None:
    network, formats = _network(name), []

    def fast(network: nn.Sequential) -> Chain:
        chain = fast_plan(chain_of(network))
        assert chain.memory_format == torch.channels_last
        for layer in chain.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.register_forward_pre_hook(
                    lambda _, inputs: formats.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
                )
        return chain

    expected = _trained(network, PLAIN, chain=fast)
    _assert_same(_trained(network, plan, chain=fast), expected)
    assert len(formats) > 10
    assert all(formats)


@pytest.mark.parametrize("plan", EVERY_PLAN, ids=str)
def test_parameters_that_want_no_gradient_stay(plan: MemoryPlan) -> None:
    network = _network("conv, norm, relu in place, pool")
    frozen = network[0][0].weight.requires_grad_(False)
    expected = _trained(network, PLAIN)
    assert torch.equal(expected[1]["0.0.weight"], frozen)
    _assert_same(_trained(network, plan), expected)


@pytest.mark.parametrize("plan", EVERY_PLAN, ids=str)
def test_what_does_not_depend_on_the_input_passes_no_gradient_on(plan: MemoryPlan) -> None:
    class Detached(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach()

    torch.manual_seed(1)
    network = _ending(nn.Conv2d(3, 4, 3), Detached()).double()
    _assert_same(_trained(network, plan), _trained(network, PLAIN))


def test_nothing_is_stepped_before_the_way_back_and_each_atom_once_on_it() -> None:
    """The loss can be looked at between the halves: parameters are as they were, and the last atom is stepped first."""
    network = _network("conv, norm, relu in place, pool")
    chain, stepped = explicit_chain(network), []
    part = ModelPart(chain, 0, 3, None)
    step = AtomwiseStep(part, 2)
    before = {name: value.clone() for name, value in network.named_parameters()}
    with part.mode(training=True):
        step.forward(torch.randn(5, 3, 8, 8, dtype=torch.float64), Labels(torch.arange(5) % CLASSES), 0.0)
        assert all(torch.equal(value, before[name]) for name, value in network.named_parameters())
        names = {id(value): name for name, value in network.named_parameters()}
        step.backward(lambda parameters: stepped.append([names[id(p)] for p in parameters if p.grad is not None]))
    assert [{name[0] for name in group} for group in stepped] == [{"2"}, {"1"}, {"0"}]
    assert sum(map(len, stepped)) == len(before)


def test_inputs_are_not_written_to() -> None:
    network = _network("reshaping")
    part = ModelPart(explicit_chain(network), 0, len(network), None)
    x = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    before = x.clone()
    for piece in (1, 5):
        step = AtomwiseStep(part, piece)
        with part.mode(training=True):
            step.forward(x, Labels(torch.arange(5) % CLASSES), 0.0)
            step.backward(lambda parameters: [setattr(p, "grad", None) for p in parameters] and None)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("name", "states"), [("conv, norm, relu in place, pool", 0), ("dropout", 2)])
def test_the_generators_state_is_kept_for_atoms_that_draw_and_counts(name: str, states: int, monkeypatch) -> None:
    """It has 5 kB, and a megabyte here. Two of three atoms have dropout."""
    with LiveBytes() as live:
        state, _ = atomwise._random_state(torch.device("cpu"))
        assert live.now == state.nbytes == torch.get_rng_state().nbytes
    monkeypatch.setattr(atomwise, "_random_state", lambda _: (torch.zeros(10**6, dtype=torch.uint8), None))
    network = _network(name)
    part, x = ModelPart(explicit_chain(network), 0, len(network), None), torch.randn(5, 3, 8, 8, dtype=torch.float64)
    step = AtomwiseStep(part, 5)
    with part.mode(training=True), LiveBytes([*part.tensors, x]) as live:
        before = live.now
        step.forward(x, Labels(torch.arange(5) % CLASSES), 0.0)
        assert (live.now - before) // 10**6 == states


@pytest.mark.parametrize("shaped", [nn.Identity(), nn.Flatten(2)], ids=["as it is", "flat"])
def test_an_atom_that_only_reshapes_gives_memory_of_its_own(shaped: nn.Module) -> None:
    """The way back writes to an output, and the input is kept."""
    part, x = ModelPart(explicit_chain(nn.Sequential(shaped)), 0, 1, None), torch.randn(5, 3, 8, 8)
    output = AtomwiseStep(part, 5).run_of(0, x, 5).forward(owned=True)
    assert torch.equal(output.flatten(), x.flatten())
    assert output.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_pieces_cover_all_samples_once() -> None:
    assert list(pieces(7, 3)) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert list(pieces(2, 4)) == [slice(0, 2)]
