"""Layers by slices of their weights: what they learn is what whole ones learn, in less memory, and never on a GPU."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from iterations import perturbed
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from fedprophet.cascade.atoms import chain_of, explicit_chain
from fedprophet.cascade.heads import Head, HeadShape
from fedprophet.client.budget import attacks, cheapest, checked, least, steps
from fedprophet.client.descent import Descent
from fedprophet.client.iteration import LocalIteration
from fedprophet.client.memory_plan import PLAIN, MemoryPlan, Step
from fedprophet.client.part import ModelPart
from fedprophet.client.sliced import _Convolution, by_slices
from fedprophet.client.statistics import TwoSets
from fedprophet.client.trainer import train
from fedprophet.errors import BudgetError
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import LocalTraining
from fedprophet.threat import ThreatModel

CLASSES = 3
HYPER = LocalTraining(3, 7, learning_rate=0.1, momentum=0.9, weight_decay=0.01, strong_convexity=0.01)
TASK = Train(round=1, client=2, seed=3, training=HYPER)
FUSED, ATOMS = (MemoryPlan(step=step, sliced=True) for step in (Step.FUSED, Step.ATOMS))
FEATURES = ThreatModel("l2", 1.0, 0.25, 3, (0.0, float("inf")))


class Named(nn.Module):
    """Layers that are called with all arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(16, 16, 3), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.convolution.weight, self.convolution.bias
        x = F.conv2d(input=x, weight=weight, bias=bias, padding=1).flatten(1)
        return F.linear(input=x, weight=self.linear.weight, bias=self.linear.bias).unflatten(1, (16, 2, 2))


class Twice(nn.Module):
    """Uses one convolution twice: its gradient is complete only when both have gone back."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(torch.tanh(self.conv(x))))


class Penalised(nn.Module):
    """Uses its weight beside the convolution as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.conv.weight.square().mean()


def _network(*layers: nn.Module) -> nn.Sequential:
    """Return a network of these atoms, which read and give 16 channels of 2x2, behind a convolution of 3x8x8."""
    first = nn.Sequential(nn.Conv2d(3, 16, 2, 4), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    return nn.Sequential(first, *layers, nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES)))


def _block(**options: object) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, **options), nn.BatchNorm2d(16), nn.ReLU(inplace=True))


NETWORKS: dict[str, tuple[Callable[[], nn.Sequential], set[str]]] = {
    "two blocks": (lambda: _network(_block(), _block(bias=False)), {"1.0.weight", "2.0.weight"}),
    "stride and dilation": (
        lambda: _network(nn.Sequential(nn.Conv2d(16, 19, 3, 2, 3, 2), nn.Conv2d(19, 16, 3, padding=1))),
        {"1.0.weight", "1.1.weight"},
    ),
    "one dimension": (
        lambda: _network(nn.Sequential(nn.Flatten(2), nn.Conv1d(16, 16, 3, padding=1), nn.Unflatten(2, (2, 2)))),
        {"1.1.weight"},
    ),
    "vectors": (
        lambda: _network(nn.Sequential(nn.Flatten(), nn.Linear(64, 65), nn.ReLU(), nn.Linear(65, 64))),
        {"1.1.weight", "1.3.weight"},
    ),
    "rows of tokens": (
        lambda: _network(nn.Sequential(nn.Flatten(1, 2), nn.Linear(2, 300, bias=False), nn.Linear(300, 2, bias=False))),
        {"1.1.weight"},  # 7 · 32 · 2 numbers are fewer than 600, 7 · 32 · 300 are more
    ),
    "arguments by name": (lambda: _network(Named()), {"1.convolution.weight", "1.linear.weight"}),
    "a weight used twice": (lambda: _network(Twice()), set()),
    "a weight used elsewhere": (lambda: _network(Penalised()), set()),
    "groups": (lambda: _network(_block(groups=2)), set()),
    "padding by a rule": (lambda: _network(nn.Conv2d(16, 16, 3, padding="same")), set()),
    "a weight that is no parameter": (lambda: _network(spectral_norm(nn.Conv2d(16, 16, 3, padding=1))), set()),
    "dropout": (lambda: _network(nn.Sequential(_block(), nn.Dropout(0.5))), {"1.0.0.weight"}),
}
"""Networks, and the weights that are stepped by slices: 7 samples of 16 · 4 numbers are fewer than 16 · 16 · 9."""


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """How many rows of each tensor were stepped as slices, by identity."""
    rows: dict[int, int] = {}
    whole = Descent.step_rows

    def step_rows(self: Descent, parameter: Tensor, some: slice, gradient: Tensor) -> None:
        rows[id(parameter)] = rows.get(id(parameter), 0) + len(gradient)
        whole(self, parameter, some, gradient)

    monkeypatch.setattr(Descent, "step_rows", step_rows)
    return rows


def _trained(
    network: nn.Sequential,
    plan: MemoryPlan,
    hyper: LocalTraining = HYPER,
    last: int | None = None,
    prior: Tensor | None = None,
    traced: bool = False,
) -> tuple[float, dict[str, Tensor], nn.Sequential]:
    """Train a copy of a network on 17 samples: batches of 7, 7 and 3. Return the loss, and all that it changes."""
    network = copy.deepcopy(network)
    torch.manual_seed(5)
    head = None if last is None else Head(HeadShape((2, 2), 64), CLASSES).double()
    chain = chain_of(network) if traced else explicit_chain(network)
    part = ModelPart(chain, 0, len(chain) if last is None else last, head, prior)
    x = torch.randn(17, 3, 8, 8, dtype=torch.float64)
    loss = train(replace(TASK, training=hyper), part, x, torch.arange(17) % CLASSES, plan=plan)
    assert all(parameter.grad is None or hyper.summed_heads for parameter in part.parameters())
    own = {} if head is None else {f"head.{name}": value for name, value in head.state_dict().items()}
    return loss, {**network.state_dict(), **own}, network


def _assert_same(found: tuple[float, dict[str, Tensor], nn.Sequential], expected: object) -> None:
    assert isinstance(expected, tuple)
    assert found[0] == pytest.approx(expected[0], rel=1e-10)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-10, atol=1e-12)


def _made(name: str) -> nn.Sequential:
    torch.manual_seed(1)
    return NETWORKS[name][0]().double()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("plan", [FUSED, ATOMS], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_slices_learn_what_whole_weights_learn(
    name: str, plan: MemoryPlan, traced: bool, stepped: dict[int, int]
) -> None:
    network = _made(name)
    expected = _trained(network, PLAIN, traced=traced)
    assert not stepped
    found = _trained(network, plan, traced=traced)
    _assert_same(found, expected)
    sliced = {key: value for key, value in found[2].named_parameters() if id(value) in stepped}
    assert sliced.keys() == NETWORKS[name][1]
    assert all(stepped[id(value)] == HYPER.iterations * len(value) for value in sliced.values())


@pytest.mark.parametrize("plan", [FUSED, ATOMS], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {"summed_heads": True},
        {"proximal": 0.5},
        {"fixed_statistics": True},
        {"momentum": 0.0},
        {"momentum": 0.0, "weight_decay": 0.0, "proximal": 0.5},
        {"consistency": 2.0},
    ],
    ids=str,
)
def test_slices_know_every_hyper_parameter(
    changes: dict[str, float], plan: MemoryPlan, stepped: dict[int, int]
) -> None:
    network, hyper = _made("two blocks"), replace(HYPER, **changes)
    prior = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    expected = _trained(network, PLAIN, hyper, last=3, prior=prior)
    assert expected[0] != _trained(network, PLAIN, last=3)[0]
    _assert_same(_trained(network, plan, hyper, last=3, prior=prior), expected)
    assert len(stepped) == 2


def test_gradients_that_are_summed_are_whole(stepped: dict[int, int]) -> None:
    """A head of 64 inputs and 9 outputs has more bytes than a sample; its gradients are those of all iterations."""
    torch.manual_seed(1)
    network, ends = _made("two blocks"), []
    for plan in (PLAIN, FUSED):
        body = copy.deepcopy(network)
        torch.manual_seed(5)
        head = Head(HeadShape((2, 2), 64), 9).double()
        part = ModelPart(explicit_chain(body), 0, 3, head)
        hyper = replace(HYPER, batch=2, summed_heads=True)
        train(replace(TASK, training=hyper), part, torch.randn(6, 3, 8, 8).double(), torch.arange(6), plan=plan)
        gradients = [parameter.grad for parameter in head.parameters()]
        assert all(gradient is not None for gradient in gradients)
        ends.append([*gradients, *(parameter.detach() for parameter in part.parameters())])
        assert not {id(parameter) for parameter in head.parameters()} & set(stepped)
    assert len(stepped) == 2
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [0, 4])
def test_an_attack_by_slices_finds_the_same(size: int) -> None:
    network = _made("two blocks")
    part = ModelPart(explicit_chain(network), 1, len(network), None)
    x = torch.rand(7, 16, 2, 2, dtype=torch.float64)
    task, labels = replace(TASK, threat=FEATURES), torch.arange(7) % CLASSES
    plain, sliced = (
        perturbed(task, part, x, labels, MemoryPlan(attack=size, attack_sliced=sliced)) for sliced in (False, True)
    )
    assert not torch.equal(plain, x)
    torch.testing.assert_close(sliced, plain, rtol=1e-10, atol=1e-12)


def test_a_second_set_of_statistics_is_observed_by_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the three convolutions two have large weights: 16 rows, by two."""
    rows, run = list[int](), _Convolution.run

    def counted(self: _Convolution, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows.append(len(weight))
        return run(self, x, weight, bias)

    monkeypatch.setattr(_Convolution, "run", counted)
    sets = []
    for plan, expected in ((PLAIN, []), (FUSED, [2] * 16)):
        chain = explicit_chain(_made("two blocks"))
        two = TwoSets(chain, {})
        x = torch.randn(7, 3, 8, 8, generator=torch.Generator().manual_seed(2)).double()
        two.observe(ModelPart(chain, 0, len(chain), None), x, plan)
        assert rows == expected
        sets.append(two.both())
    assert float(sets[0]["2.1.running_mean"].abs().max()) > 0
    torch.testing.assert_close(sets[1], sets[0], rtol=1e-12, atol=1e-14)


WEIGHT = 256 * 256 * 9 * 4
"""Bytes of the large weight."""


def _iteration(threat: ThreatModel | None = None) -> LocalIteration:
    torch.manual_seed(0)
    large = nn.Sequential(nn.Conv2d(256, 256, 3, padding=1, bias=False), nn.BatchNorm2d(256), nn.ReLU(inplace=True))
    chain = explicit_chain(nn.Sequential(nn.Conv2d(3, 256, 1), large, nn.Sequential(nn.Flatten(), nn.Linear(1024, 10))))
    return LocalIteration(ModelPart(chain, 1, 3, None), (256, 2, 2), replace(HYPER, batch=8), threat)


@pytest.mark.parametrize("plan", [FUSED, ATOMS], ids=str)
def test_a_step_has_an_eighth_of_a_weights_copies(plan: MemoryPlan) -> None:
    """Weight and momentum are there; whole, the gradient is there twice for a moment, by slices twice an eighth."""
    iteration = _iteration()
    whole = replace(plan, sliced=False)
    for each, weights in ((whole, 4.0), (plan, 2.25)):
        iteration.measured(each)  # what is set up once
        measured = iteration.measured(each)
        assert measured == pytest.approx(iteration.predicted(each), rel=0.05)
        assert weights * WEIGHT < measured < (weights + 0.15) * WEIGHT


def test_an_attack_has_an_eighth_of_a_weights_copy() -> None:
    """The step by slices is less than an attack's whole copy, and as much as its slices."""
    iteration = _iteration(FEATURES)
    whole, sliced = (replace(FUSED, attack=2, attack_sliced=sliced) for sliced in (False, True))
    for plan, weights in ((whole, 3.0), (sliced, 2.25)):
        iteration.measured(plan)
        assert iteration.measured(plan) == pytest.approx(iteration.predicted(plan), rel=0.05)
        assert weights * WEIGHT < iteration.measured(plan) < (weights + 0.15) * WEIGHT


def test_slices_are_taken_where_cheaper_plans_do_not_fit_and_what_does_not_fit_by_them_is_refused() -> None:
    iteration = _iteration(FEATURES)
    assert cheapest(iteration, 5 * WEIGHT).plan == PLAIN
    found = cheapest(iteration, int(3.2 * WEIGHT))
    assert found.plan == FUSED
    assert checked(iteration, int(3.2 * WEIGHT)).measured <= 3.2 * WEIGHT
    needed = least(iteration)
    assert 2.25 * WEIGHT < needed < 2.4 * WEIGHT
    found = cheapest(iteration, needed)
    assert found.plan.sliced
    assert found.plan.attack_sliced
    assert checked(iteration, needed).plan == found.plan
    with pytest.raises(BudgetError, match=r"Conv 2, Linear 1 cannot be trained within"):
        cheapest(iteration, needed - 1)


def test_order_of_plans() -> None:
    """Slices take next to no time: they come before recomputing. An attack has fewer samples at a time first."""
    iteration = _iteration(FEATURES)
    exact = list(map(str, steps(iteration)))
    assert exact[:5] == [
        "plain",
        "step fused into backward",
        "step fused into backward by slices of weights",
        "step atom by atom",
        "step atom by atom by slices of weights",
    ]
    assert [(plan.attack, plan.attack_sliced) for plan in attacks(iteration)] == [
        *((size, False) for size in (0, 4, 2)),
        *((size, True) for size in (0, 4, 2)),
    ]


def test_slices_are_not_planned_for_a_gpu() -> None:
    there = replace(_iteration(FEATURES), place=torch.device("cuda"))
    assert not any(plan.sliced or plan.attack_sliced for plan in (*steps(there), *attacks(there)))


def test_a_plan_by_slices_in_words() -> None:
    assert str(FUSED) == "step fused into backward by slices of weights"
    assert str(replace(ATOMS, attack=4)) == "attack 4 at a time, step atom by atom by slices of weights"
    assert str(MemoryPlan(attack_sliced=True)) == "attack by slices of weights"


def test_nothing_is_sliced_outside() -> None:
    layer, x = nn.Conv2d(16, 16, 3, padding=1), torch.randn(2, 16, 2, 2)
    with by_slices(False):
        assert type(layer(x).grad_fn).__name__ == "ConvolutionBackward0"
    with by_slices(True):
        assert type(layer(x).grad_fn).__name__ == "_SlicedBackward"
    assert type(layer(x).grad_fn).__name__ == "ConvolutionBackward0"
