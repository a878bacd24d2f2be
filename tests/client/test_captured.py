"""Attacks that replay a graph give what the eager ones give, in memory that the step shares; most of it needs a GPU."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fedprophet.attacks.pgd import climb
from fedprophet.cascade.allocator import allocator_limit, spare_memory
from fedprophet.cascade.atoms import chain_of, explicit_chain
from fedprophet.cascade.cost import cost_of
from fedprophet.cascade.partition import partition
from fedprophet.client import captured as captured_steps
from fedprophet.client import trainer
from fedprophet.client.aims import Labels, Weighted
from fedprophet.client.boundary import boundary_weights
from fedprophet.client.budget import checked
from fedprophet.client.captured import Ascent, CapturedAscent, ascent_of
from fedprophet.client.descent import Descent, Loss
from fedprophet.client.inputs import FetchedInputs
from fedprophet.client.iteration import LocalIteration, iteration_of
from fedprophet.client.limits import limited
from fedprophet.client.memory_plan import PLAIN, MemoryPlan, Step
from fedprophet.client.part import ModelPart
from fedprophet.client.planning import Planner
from fedprophet.client.statistics import TwoSets
from fedprophet.client.trainer import attacked, train, training_loss
from fedprophet.client.trials import tried_within
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import LocalTraining
from fedprophet.models import build
from fedprophet.models.normalize import Normalize
from fedprophet.threat import ThreatModel, input_threat

if torch.cuda.is_available():
    spare_memory()  # before the first test multiplies
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
CUDA = torch.device("cuda", 0)
HYPER = LocalTraining(4, 8, learning_rate=0.05, momentum=0.9, weight_decay=1e-4, strong_convexity=1e-5)
PIXELS = input_threat(0.1, 0.05, 3)
FEATURES = ThreatModel("l2", 1.0, 0.25, 3, (0.0, float("inf")))
BUDGET = 60 * 10**6


def _part(device: torch.device) -> ModelPart:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    last = nn.Sequential(nn.Flatten(), nn.Linear(16 * 64, 10))
    network = nn.Sequential(nn.Sequential(*layers), last).to(device)
    chain = explicit_chain(network, Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.3)))
    return ModelPart(chain, 0, len(chain), None)


def _batch(samples: int, device: torch.device, seed: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(samples, 3, 16, 16, generator=draw).to(device), torch.arange(samples, device=device) % 10


def test_elsewhere_an_ascent_is_the_attack_itself() -> None:
    part = _part(torch.device("cpu"))
    x, labels = _batch(4, torch.device("cpu"))
    ascend = ascent_of(part, PIXELS, 0.01, 2)
    assert type(ascend) is Ascent
    with part.still(), part.untrained():
        expected = climb(lambda z: part.exit_losses(part.features(z), Labels(labels), 0.01).sum(), x, x, PIXELS)
        assert torch.equal(ascend(x, x, labels), expected)
    assert not torch.equal(expected, x)
    loss = Loss(torch.zeros(()), lambda descent: None)
    assert ascend.step(lambda: loss) is loss


@pytest.fixture
def deterministic() -> Iterator[None]:
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    yield
    torch.backends.cudnn.deterministic = before


@needs_gpu
def test_on_a_gpu_micro_batches_are_captured_and_nothing_else_is() -> None:
    part = _part(CUDA)
    assert isinstance(ascent_of(part, PIXELS, 0.01, 2), CapturedAscent)
    for threat, size in ((None, 2), (replace(PIXELS, radius=0.0), 2), (PIXELS, 0)):
        assert type(ascent_of(part, threat, 0.01, size)) is Ascent


def _iterate(part: ModelPart, ascend: Ascent, descent: Descent, threat: ThreatModel, number: int) -> Tensor:
    """Attack a batch of 10, four at a time, step on it, and return what was found."""
    x, labels = _batch(10, CUDA, seed=number)
    labels = labels.roll(number)
    found = attacked(part, x, labels, threat, torch.Generator().manual_seed(number), 4, ascend)
    plan = MemoryPlan(attack=4)
    ascend.step(lambda: training_loss(HYPER, part, found, Labels(labels), plan)).backward(descent)
    return found


@needs_gpu
@pytest.mark.parametrize("threat", [PIXELS, FEATURES], ids=["linf", "l2"])
def test_a_captured_attack_finds_what_the_eager_one_finds_while_the_part_learns(
    deterministic: None, threat: ThreatModel
) -> None:
    """Bit for bit, with other inputs, labels, parameters and norm statistics each time; the last piece has 2 of 10."""
    found = []
    for captured in (False, True):
        part = _part(CUDA)
        size = 4 if captured else 0
        ascend = ascent_of(part, threat, HYPER.strong_convexity, size)
        descent = Descent.of(part, HYPER)
        found.append([_iterate(part, ascend, descent, threat, number) for number in range(5)])
        found[-1].append(torch.cat([p.detach().flatten() for p in part.parameters()]))
        if isinstance(ascend, CapturedAscent):
            assert ascend._graph is not None
    for eager, replayed in zip(*found, strict=True):
        assert torch.equal(eager, replayed)


@needs_gpu
@pytest.mark.parametrize(
    "step", [MemoryPlan(), MemoryPlan(step=Step.FUSED), MemoryPlan(step=Step.PIECES, piece=4)], ids=str
)
def test_a_training_with_captured_attacks_ends_where_an_eager_one_does(
    deterministic: None, monkeypatch: pytest.MonkeyPatch, step: MemoryPlan
) -> None:
    x, labels = _batch(20, CUDA)
    task = Train(round=1, client=2, seed=3, training=replace(HYPER, iterations=6), threat=PIXELS)
    ends = []
    for captured in (True, False):
        if not captured:
            monkeypatch.setattr(trainer, "ascent_of", _eagerly)
        part = _part(CUDA)
        sets = TwoSets(part.chain, {})
        loss = train(task, part, x, labels, sets, plan=replace(step, attack=4))
        ends.append((loss, torch.cat([t.detach().double().flatten() for t in (*part.tensors, *sets.aside)])))
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


@needs_gpu
def test_a_graph_counts_the_steps_that_samples_withstand(deterministic: None) -> None:
    """Those of this batch alone, whatever the one before it left; the last piece has 2 of 10, and is eager."""
    counts = []
    for size in (0, 4):
        part = _part(CUDA)
        ascend, descent = ascent_of(part, PIXELS, HYPER.strong_convexity, size), Descent.of(part, HYPER)
        counts.append([])
        for number in range(4):
            x, labels = _batch(10, CUDA, seed=number)
            withstood = torch.zeros_like(labels)
            with part.still():
                labels[::2] = part.logits(x).argmax(dim=1)[::2]
            found = attacked(part, x, labels, PIXELS, torch.Generator().manual_seed(number), 4, ascend, withstood)
            aim = Weighted(Labels(labels), boundary_weights(withstood, PIXELS.steps))
            ascend.step(partial(training_loss, HYPER, part, found, aim, PLAIN)).backward(descent)
            counts[-1].append(withstood.tolist())
        if isinstance(ascend, CapturedAscent):
            assert ascend._graph is not None
    assert counts[0] == counts[1]
    assert {0, PIXELS.steps} <= {count for batch in counts[0] for count in batch}


class _Replayed:
    """Work in the place of a graph that a GPU would have recorded of it."""

    def __init__(self, work: Callable[[], None], *_: object) -> None:
        self.replay = work


class _NoPool:
    id = None

    def __init__(self, device: torch.device) -> None: ...

    def used(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_what_is_replayed_begins_to_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no GPU: the bookkeeping around a graph, which reads and writes memory of its own."""
    cpu = torch.device("cpu")
    for name, value in {"on_own_stream": lambda _: nullcontext(), "own_stream": lambda _: None}.items():
        monkeypatch.setattr(captured_steps, name, value)
    monkeypatch.setattr(captured_steps, "_Pool", _NoPool)
    monkeypatch.setattr(captured_steps, "record", _Replayed)
    monkeypatch.setattr(CapturedAscent, "_allocated", lambda self: set())
    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    part, nothing = _part(cpu), Loss(torch.zeros(()), lambda descent: None)
    replaying, eager = CapturedAscent(part, PIXELS, 0.0, 4, cpu), Ascent(part, PIXELS, 0.0)
    for number in range(3):
        x, labels = _batch(4, cpu, seed=number)
        with part.still(), part.untrained():
            labels[:3] = part.logits(x).argmax(dim=1)[:3]
            found, expected = torch.zeros_like(labels), torch.zeros_like(labels)
            ended = replaying(x, x, labels, found).clone()
            assert torch.equal(ended, eager(x, x, labels, expected))
        assert found.tolist() == expected.tolist()
        assert 0 < int(found.sum()) < 12
        replaying.step(lambda: nothing)
    assert isinstance(replaying._graph, _Replayed)


def _eagerly(part: ModelPart, threat: ThreatModel, strong_convexity: float, size: int, sliced: bool) -> Ascent:
    return Ascent(part, threat, strong_convexity)


def test_all_of_an_iteration_is_computed_where_its_ascent_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is the memory of a graph, which keeps it: what is computed elsewhere takes its memory beside it."""
    where: list[str] = []

    class Told(Ascent):
        def __call__(self, clean: Tensor, perturbed: Tensor, labels: Tensor, withstood: Tensor | None = None) -> Tensor:
            where.append("attack")
            return super().__call__(clean, perturbed, labels, withstood)

        def before(self, compute: Callable[[], None]) -> None:
            where.append("before")
            super().before(compute)

        def step(self, compute: Callable[[], Loss]) -> Loss:
            where.append("step")
            return super().step(compute)

    class Sets(TwoSets):
        def observe(self, part: ModelPart, x: Tensor, plan: MemoryPlan) -> None:
            assert torch.equal(x.sort(dim=0).values, images.sort(dim=0).values)
            where.append("observe")

    monkeypatch.setattr(trainer, "ascent_of", lambda part, threat, *_: Told(part, threat, 0.01))
    images, labels = _batch(8, torch.device("cpu"))
    task = Train(round=1, client=2, seed=3, training=replace(HYPER, iterations=1), threat=PIXELS)
    part = _part(torch.device("cpu"))
    train(task, part, images, labels, Sets(part.chain, {}), MemoryPlan(attack=4))
    assert where == ["before", "observe", "attack", "attack", "step"]


@needs_gpu
def test_what_a_step_keeps_where_the_graph_writes_is_an_error() -> None:
    part = _part(CUDA)
    ascend, descent = ascent_of(part, PIXELS, 0.01, 4), Descent.of(part, HYPER)
    kept: list[Tensor] = []

    def compute(x: Tensor) -> Loss:
        kept.append(x * 2)
        return training_loss(HYPER, part, x, Labels(labels), PLAIN)

    x, labels = _batch(8, CUDA)

    def attack() -> Tensor:
        return attacked(part, x, labels, PIXELS, torch.Generator(), 4, ascend)

    for _ in range(2):
        found = attack()
        ascend.step(lambda found=found: compute(found)).backward(descent)
    with pytest.raises(RuntimeError, match="1 tensors of a step are still there"):
        attack()


@needs_gpu
def test_a_graph_and_the_step_share_their_memory() -> None:
    """The allocator holds what the larger half takes, and some for what is in pieces; not both."""
    part = _part(CUDA)
    ascend, descent = ascent_of(part, PIXELS, 0.01, 256), Descent.of(part, HYPER)
    x, labels = _batch(1024, CUDA)
    held = []

    def iterate() -> None:
        found = attacked(part, x, labels, PIXELS, torch.Generator(), 256, ascend)
        ascend.step(lambda: training_loss(HYPER, part, found, Labels(labels), MemoryPlan(256))).backward(descent)

    for _ in range(3):
        iterate()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_reserved())
    assert held[2] == held[1] <= held[0] + 20 * 2**20


def _modules() -> list[LocalIteration]:
    chain = chain_of(build("vgg16", (3, 32, 32), 10).to(CUDA))
    cost = cost_of(chain, (3, 32, 32), 64, 10)
    hyper = replace(HYPER, batch=64, learning_rate=1e-4)
    return [iteration_of(chain, cost, module.first, module.last, hyper) for module in partition(cost, BUDGET)]


@needs_gpu
@pytest.mark.parametrize("number", range(7))
def test_every_module_of_vgg16_keeps_within_its_budget_on_a_gpu(number: int) -> None:
    """In a trial, and when the plan is trained by under the limit that it was tried under."""
    iteration = _modules()[number]
    found = checked(iteration, BUDGET)
    assert 0.95 * found.peak <= found.measured <= BUDGET
    assert found.limit is not None
    trial = tried_within(iteration, found.plan, found.limit, 64)
    assert max(trial.attack, trial.step) <= BUDGET


@needs_gpu
@pytest.mark.parametrize("number", range(7))
def test_every_module_of_vgg16_is_trained_within_its_limit_on_a_gpu(number: int) -> None:
    """In passes of two whole batches and one of two samples, beside tensors with gaps between them; then once more,
    when the plan is known.
    """
    others = [torch.zeros(3 * 10**6, dtype=torch.uint8, device=CUDA) for _ in range(40)]
    del others[::2]
    iteration, planner = _modules()[number], Planner()
    training, part = replace(iteration.training, iterations=6), iteration.part
    task = Train(round=1, client=2, seed=3, training=training, threat=iteration.threat, memory=BUDGET)
    images, labels = torch.rand(130, *iteration.input_shape), torch.arange(130, device=CUDA) % 10
    inputs = FetchedInputs(130, lambda positions: images[positions].to(CUDA))
    peaks, before = [], torch.cuda.memory_allocated()
    for _ in range(2):
        with limited(task, part, inputs, (), planner) as terms:
            train(task, part, inputs, labels, plan=terms.plan)
        peaks.append(terms.peak)
    assert 0 < peaks[0] <= BUDGET
    assert 0 < peaks[1] <= BUDGET
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() <= before
    assert all(not other.any() for other in others)


@needs_gpu
def test_a_plan_that_does_not_fit_runs_out_and_leaves_no_trace() -> None:
    iteration = _modules()[0]
    before = torch.cuda.memory_allocated()
    trial = tried_within(iteration, PLAIN, 20 * 10**6, 64)
    assert trial.attack > BUDGET
    assert torch.cuda.memory_allocated() <= before + 10**6  # cuBLAS keeps its workspaces
    with allocator_limit(CUDA, 10**6), pytest.raises(torch.OutOfMemoryError):
        iteration.inputs().repeat(100, 1, 1, 1)
