"""DBFAT's weights and draw against numbers and steps worked out by hand, by every way to compute them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from iterations import perturbed
from torch import Tensor, nn

from fedprophet.attacks.pgd import pgd
from fedprophet.cascade.atoms import explicit_chain
from fedprophet.client import trainer
from fedprophet.client.aims import Aim, Labels
from fedprophet.client.boundary import aim_of, boundary_weights, counter, server_probabilities
from fedprophet.client.captured import Ascent
from fedprophet.client.descent import batches
from fedprophet.client.inputs import FetchedInputs, Inputs
from fedprophet.client.memory_plan import PLAIN, MemoryPlan, Step
from fedprophet.client.part import ModelPart
from fedprophet.client.statistics import ADVERSARIAL, TwoSets
from fedprophet.client.trainer import train
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import LocalTraining
from fedprophet.randomness import generator
from fedprophet.threat import ThreatModel, input_threat

HYPER = LocalTraining(1, 8, learning_rate=0.5, momentum=0.0, weight_decay=0.0, strong_convexity=0.0)
WEIGHTED, DRAWN = replace(HYPER, boundary_weights=True), replace(HYPER, consistency=2.0)
TASK = Train(round=3, client=7, seed=11, training=HYPER, threat=input_threat(0.4, 0.1, 4))
STEPS = ThreatModel("linf", 1.0, 0.25, 4)


def _sign() -> nn.Linear:
    """Return a model of scores x and −x: class 0 where x is positive."""
    layer = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    return layer


def _part(layers: nn.Module, prior: Tensor | None = None) -> ModelPart:
    chain = explicit_chain([("layers", layers)])
    return ModelPart(chain, 0, len(chain), None, prior)


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))


def _samples(count: int = 8, features: int = 3, classes: int = 3) -> tuple[Tensor, Tensor]:
    return torch.rand(count, features, generator=torch.Generator().manual_seed(4)), torch.arange(count) % classes


# κ -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize(
    ("prior", "expected"),
    [
        # Steps of 0.25 towards the other class begin at 0.6, 0.35, 0.1, −0.15; at −0.1; at 2, …; at −0.3, −0.05, 0.2, …
        (None, [3, 0, 4, 2]),
        # With a prior that favours class 1 the boundary is at 0.5.
        (torch.tensor([0.0, 1.0]), [1, 0, 4, 4]),
    ],
    ids=["plain", "calibrated"],
)
def test_steps_are_counted_before_which_a_sample_was_still_right(
    norm: str, prior: Tensor | None, expected: list[int]
) -> None:
    part = _part(_sign(), prior)
    x, labels = torch.tensor([[0.6], [-0.1], [2.0], [-0.3]]), torch.tensor([0, 0, 0, 1])
    withstood = torch.zeros(4, dtype=torch.long)
    with part.still(), part.untrained():
        ascend = Ascent(part, replace(STEPS, norm=norm), 0.0)
        found = ascend(x, x, labels, withstood)
        assert torch.equal(ascend(x, x, labels), found)
    assert withstood.tolist() == expected
    assert found.flatten().tolist() == pytest.approx([-0.4, -1.1, 1.0, 0.7])


def test_counting_takes_no_further_pass() -> None:
    layer, passes = _sign(), []
    layer.register_forward_hook(lambda *_: passes.append(1))
    x, labels = torch.rand(6, 1), torch.arange(6) % 2
    for withstood in (None, torch.zeros(6, dtype=torch.long)):
        passes.clear()
        perturbed(TASK, _part(layer), x, labels, PLAIN, withstood)
        assert len(passes) == 4


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_an_attack_on_some_samples_at_a_time_counts_what_the_whole_one_counts(norm: str, size: int) -> None:
    part, x, labels = _part(_sign()), torch.linspace(-1, 1, 8)[:, None], torch.tensor([0, 1, 0, 1, 1, 0, 1, 0])
    task = replace(TASK, threat=ThreatModel(norm, 1.0, 0.2, 6))
    whole, cut = torch.zeros_like(labels), torch.zeros_like(labels)
    perturbed(task, part, x, labels, PLAIN, whole)
    perturbed(task, part, x, labels, MemoryPlan(attack=size), cut)
    assert torch.equal(cut, whole)
    assert len(set(whole.tolist())) > 2


def test_nothing_is_counted_where_nothing_is_weighted_or_attacked() -> None:
    labels = torch.tensor([3, 4])
    assert counter(HYPER, TASK.threat, labels) is None
    for threat in (None, input_threat(0.0, 0.1, 4), input_threat(0.4, 0.1, 0)):
        assert counter(WEIGHTED, threat, labels) is None
    counted = counter(WEIGHTED, TASK.threat, labels)
    assert counted is not None
    assert counted.tolist() == [0, 0]


# Weights -------------------------------------------------------------------------------------------------------------


def test_weights_are_gairats_function_of_the_steps_with_a_mean_of_one() -> None:
    """ω = 0.999665, 0.119203 and 0.00000614 for 0, 5 and 10 of 10 steps, by hand; their mean is 0.372958."""
    weights = boundary_weights(torch.tensor([0, 5, 10]), 10)
    assert weights.tolist() == pytest.approx([2.680368, 0.319615, 1.64741e-5], rel=1e-5)
    assert float(weights.mean()) == pytest.approx(1.0)


@pytest.mark.parametrize("withstood", [0, 4])
def test_samples_that_are_all_alike_weigh_one(withstood: int) -> None:
    assert boundary_weights(torch.full((5,), withstood), 4).tolist() == pytest.approx([1.0] * 5, rel=1e-6)


def test_without_either_an_aim_are_the_labels() -> None:
    assert aim_of(HYPER, None, torch.tensor([1]), None, None) == Labels(torch.tensor([1]))


def _by_hand(layer: nn.Linear, x: Tensor, labels: Tensor, threat: ThreatModel, draw: torch.Generator) -> Tensor:
    """Return the weighted loss of an attack that is written out, κ included."""
    kappa = torch.zeros(len(x))

    def objective(z: Tensor) -> Tensor:
        scores = layer(z)
        kappa.add_((scores.max(dim=1).indices == labels).float())
        return F.cross_entropy(scores, labels, reduction="sum")

    attacked = pgd(objective, x, threat, draw)
    omega = (1 + torch.tanh(-1 + 5 * (1 - 2 * kappa.double() / threat.steps))) / 2
    assert omega.min() < 0.2
    assert omega.max() > 0.9
    return (omega / omega.mean() * F.cross_entropy(layer(attacked), labels, reduction="none")).mean()


def test_a_step_goes_along_the_weighted_losses_and_not_through_the_weights() -> None:
    torch.manual_seed(1)
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.mul_(8)
    task, (x, labels) = replace(TASK, training=WEIGHTED), _samples()
    order = next(batches(8, 8, 1, task))
    assert task.threat is not None
    draw = generator(11, "attack", 3, 7, 0)
    expected = _by_hand(layer, x[order], labels[order], task.threat, draw)
    (gradient,) = torch.autograd.grad(expected, layer.weight)
    weight = layer.weight.detach().clone()
    assert train(task, _part(layer), x, labels) == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(layer.weight, weight - 0.5 * gradient, atol=1e-6)
    with torch.no_grad():
        layer.weight.copy_(weight)
    plain = train(TASK, _part(layer), x, labels)
    assert plain != pytest.approx(expected.item(), rel=1e-2)


def test_weights_leave_the_strongly_convex_term_alone() -> None:
    """With μ = 2 it is ‖z‖², which every sample keeps."""
    torch.manual_seed(2)
    body, head = nn.Linear(2, 2), nn.Linear(2, 2)
    part = replace(_part(body), head=head)  # type: ignore[arg-type]
    x, labels = torch.rand(2, 2), torch.tensor([0, 1])
    aim = aim_of(WEIGHTED, STEPS, labels, torch.tensor([0, 4]), None)
    weights, z = boundary_weights(torch.tensor([0, 4]), 4), body(x)
    expected = weights * F.cross_entropy(head(z), labels, reduction="none") + z.square().sum(dim=1)
    assert torch.allclose(part.exit_losses(z, aim, 2.0), expected)


@pytest.mark.parametrize("threat", [None, input_threat(0.0, 0.1, 4), input_threat(0.4, 0.1, 0)], ids=str)
def test_where_nothing_is_attacked_weighting_changes_no_bit(threat: ThreatModel | None) -> None:
    ends = []
    for hyper in (HYPER, WEIGHTED):
        network, (x, labels) = _network(), _samples()
        loss = train(replace(TASK, training=hyper, threat=threat), _part(network), x, labels)
        ends.append([torch.tensor(loss), *(value.clone() for value in network.state_dict().values())])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


# The draw ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", [None, torch.tensor([0.5, -1.0, 1.0])], ids=["plain", "calibrated"])
def test_the_servers_probabilities_are_those_of_the_part_as_it_came(prior: Tensor | None) -> None:
    """Of clean samples, in evaluation mode, the prior included; whatever is computed at a time."""
    network, (x, _) = _network(), _samples()
    with torch.no_grad():
        network[1].running_mean.add_(0.3)
        scores = network.eval()(x)
        network.train()
    expected = (scores if prior is None else scores + prior).softmax(dim=1)
    task = replace(TASK, training=replace(DRAWN, batch=3))
    fetched = FetchedInputs(8, x.__getitem__)
    for inputs, plan, memory in ((x, PLAIN, 0), (x, MemoryPlan(attack=2), 0), (fetched, PLAIN, 10**9)):
        found = server_probabilities(replace(task, memory=memory), _part(network, prior), inputs, plan)
        assert found is not None
        assert not found.requires_grad
        assert torch.allclose(found, expected, atol=1e-6)
        assert (found.untyped_storage().filename is not None) == (memory > 0), "in a file where memory is limited"
    assert network.training


def test_as_many_samples_are_computed_at_a_time_as_the_plan_has_room_for() -> None:
    network, (x, _) = _network(), _samples()
    seen: list[int] = []
    network[0].register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    pieces = MemoryPlan(step=Step.PIECES, piece=2)
    for plan, threat, sizes in (
        (PLAIN, TASK.threat, [6, 2]),
        (MemoryPlan(attack=4), TASK.threat, [4, 4]),
        (pieces, TASK.threat, [6, 2]),  # the attack has room for all
        (pieces, None, [2, 2, 2, 2]),
    ):
        seen.clear()
        server_probabilities(replace(TASK, training=replace(DRAWN, batch=6), threat=threat), _part(network), x, plan)
        assert seen == sizes


def _drawn_by_hand(task: Train, layer: nn.Linear, x: Tensor, labels: Tensor, prior: Tensor) -> list[float]:
    """Train a linear layer without an attack, every step written out; return the losses."""
    with torch.no_grad():
        server = (layer(x) + prior).softmax(dim=1)
    losses = []
    hyper = task.training
    for order in batches(len(x), hyper.batch, hyper.iterations, task):
        local = (layer(x[order]) + prior).log_softmax(dim=1)
        p = server[order]
        divergence = (p * (p.log() - local)).sum(dim=1)
        loss = (F.nll_loss(local, labels[order], reduction="none") + hyper.consistency * divergence).mean()
        gradients = torch.autograd.grad(loss, list(layer.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
                parameter.sub_(hyper.learning_rate * gradient)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("fetched", [False, True])
def test_each_batch_is_drawn_to_the_rows_of_its_own_samples(fetched: bool) -> None:
    """Three batches of 3, 2 and 3 of five samples in other orders, with a prior."""
    torch.manual_seed(1)
    layer, reference = nn.Linear(3, 3), nn.Linear(3, 3)
    reference.load_state_dict(layer.state_dict())
    (x, labels), prior = _samples(5), torch.tensor([0.5, -1.0, 1.0])
    task = replace(TASK, training=replace(DRAWN, iterations=3, batch=3), threat=None)
    losses = _drawn_by_hand(task, reference, x, labels, prior)
    inputs: Inputs = FetchedInputs(5, x.__getitem__) if fetched else x
    assert train(task, _part(layer, prior), inputs, labels) == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert torch.allclose(layer.weight, reference.weight, atol=1e-6)


def test_the_first_clean_step_feels_no_draw_and_the_second_does() -> None:
    ends = []
    for iterations in (1, 2):
        for strength in (0.0, 5.0):
            torch.manual_seed(1)
            layer, (x, labels) = nn.Linear(3, 3), _samples()
            hyper = replace(HYPER, iterations=iterations, consistency=strength)
            train(replace(TASK, training=hyper, threat=None), _part(layer), x, labels)
            ends.append(layer.weight.detach())
    assert torch.allclose(ends[0], ends[1], atol=1e-6)
    assert not torch.allclose(ends[2], ends[3], atol=1e-3)


def test_the_attack_does_not_see_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    real = trainer.training_loss

    def spied(training: LocalTraining, part: ModelPart, x: Tensor, aim: Aim, plan: MemoryPlan) -> Any:
        seen.append(x)
        return real(training, part, x, aim, plan)

    monkeypatch.setattr(trainer, "training_loss", spied)
    for hyper in (HYPER, replace(DRAWN, boundary_weights=True)):
        network, (x, labels) = _network(), _samples()
        train(replace(TASK, training=hyper), _part(network), x, labels)
    assert torch.equal(*seen)


def test_of_two_sets_of_statistics_the_server_speaks_by_the_clean_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Tensor] = []

    def spied(training: Any, threat: Any, labels: Tensor, withstood: Any, server: Tensor) -> Aim:
        rows.append(server)
        return Labels(labels)

    monkeypatch.setattr(trainer, "aim_of", spied)
    network, (x, labels) = _network(), _samples()
    with torch.no_grad():
        expected = network.eval()(x).softmax(dim=1)
        network.train()
    part = _part(network)
    own = {f"{ADVERSARIAL}{n}": torch.full((6,), 0.7) for n in part.chain.tensors if n.endswith("running_mean")}
    sets = TwoSets(part.chain, own)
    task = replace(TASK, training=DRAWN)
    train(task, part, x, labels, sets)
    assert torch.allclose(rows[0], expected[next(batches(8, 8, 1, task))], atol=1e-6)
    assert torch.allclose(network[1].running_mean, torch.full((6,), 0.7), atol=0.2), "and goes on with the other"


# Both, by every plan -------------------------------------------------------------------------------------------------


PLANS = [
    MemoryPlan(attack=3),
    MemoryPlan(step=Step.FUSED),
    MemoryPlan(2, Step.ATOMS),
    MemoryPlan(2, Step.PIECES, 3),
    MemoryPlan(2, Step.PIECES, 2),
    MemoryPlan(4, Step.FUSED, sliced=True, attack_sliced=True),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("clean", [False, True])
def test_every_plan_takes_the_plain_steps(plan: MemoryPlan, clean: bool) -> None:
    """Batches of 7 and 4 samples, whose weights have a mean of one over them all and not over a piece."""
    hyper = replace(WEIGHTED, consistency=1.5, iterations=4, batch=7, learning_rate=0.1, momentum=0.9)
    task = replace(TASK, training=hyper, threat=None if clean else TASK.threat)
    ends = []
    for way in (PLAIN, plan):
        network, (x, labels) = _network().double(), _samples(11)
        with torch.no_grad():
            network[0].weight.mul_(4)
        layers = [nn.Sequential(*network[:3]), nn.Sequential(*network[3:])]
        chain = explicit_chain([("one", layers[0]), ("two", layers[1])])
        loss = train(task, ModelPart(chain, 0, 2, None), x.double(), labels, plan=way)
        ends.append((loss, [value.clone() for value in network.state_dict().values()]))
    assert ends[1][0] == pytest.approx(ends[0][0], rel=1e-9)
    for found, expected in zip(ends[1][1], ends[0][1], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
