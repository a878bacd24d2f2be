"""A limit on the memory of training: the plan that it leads to, what is counted, and the error where it is exceeded."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedprophet.cascade import allocator
from fedprophet.cascade.atoms import Chain, explicit_chain
from fedprophet.cascade.heads import Head, build_head
from fedprophet.cascade.measure import LiveBytes, bytes_of, measured_peak
from fedprophet.client.budget import Planned, least
from fedprophet.client.features import FeatureCache
from fedprophet.client.inputs import FetchedInputs
from fedprophet.client.iteration import LocalIteration
from fedprophet.client.job import Client
from fedprophet.client.layer_store import ClientStore
from fedprophet.client.limits import Terms, _alone, _on_cuda, limited, name_of, within
from fedprophet.client.memory_plan import PLAIN, MemoryPlan, Step
from fedprophet.client.part import ModelPart
from fedprophet.client.planning import Planner
from fedprophet.client.run import run_client
from fedprophet.client.statistics import TwoSets
from fedprophet.client.trainer import train
from fedprophet.client.workspace import Workspace
from fedprophet.data.dataset import ClientData
from fedprophet.data.examples import LocalExamples, TensorExamples
from fedprophet.errors import BudgetError
from fedprophet.messages.answers import Trained
from fedprophet.messages.modules import ModuleStore
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import FrozenModule, LocalTraining, Resources
from fedprophet.threads import torch_threads
from fedprophet.threat import input_threat

HYPER = LocalTraining(3, 8, learning_rate=0.05, momentum=0.9, weight_decay=1e-4, strong_convexity=1e-5)
THREAT = input_threat(0.1, 0.05, 2)
SAMPLES, SHAPE = 20, (3, 16, 16)
PLANS = [
    PLAIN,
    MemoryPlan(4),
    MemoryPlan(4, Step.FUSED),
    MemoryPlan(4, Step.ATOMS),
    MemoryPlan(4, Step.PIECES, 4),
    MemoryPlan(2, Step.PIECES, 2),
]


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def _chain(width: int = 16) -> Chain:
    torch.manual_seed(0)
    last = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, 10))
    return explicit_chain([("one", _block(3, width)), ("two", _block(width, width)), ("three", last)])


def _head() -> Head:
    torch.manual_seed(1)
    return build_head((16, 16, 16), 10)


def _task(**more: Any) -> Train:
    return Train(round=1, client=7, seed=3, last=3, **{"training": HYPER, "threat": THREAT, **more})


def _inputs(part: ModelPart) -> tuple[Tensor, Tensor]:
    images = torch.rand(SAMPLES, *SHAPE, generator=torch.Generator().manual_seed(2))
    return images, torch.arange(SAMPLES) % 10


class _Fixed(Planner):
    """Chooses one plan, whatever the limit."""

    def __init__(self, plan: MemoryPlan) -> None:
        super().__init__()
        self.plan, self.limit = plan, 0

    def cheapest(self, iteration: LocalIteration, limit: int) -> Planned:
        self.limit = limit
        return Planned(self.plan, 0)


def _train(task: Train, part: ModelPart, planner: Planner, beside: Sequence[Tensor] = ()) -> Terms:
    images, labels = _inputs(part)
    with limited(task, part, images, beside, planner, classes=10) as terms:
        train(task, part, images, labels, plan=terms.plan)
    return terms


def test_every_byte_that_is_alive_counts_from_the_part_on() -> None:
    """Linear layer: 2·3 weights and 2 biases are 32 bytes; beside it 40; then 400, of which 80 stay while 200 come."""
    part = ModelPart(explicit_chain(nn.Sequential(nn.Linear(3, 2))), 0, 1, None)
    terms = Terms(PLAIN, 552)
    with within(terms, part, [torch.zeros(10)], "a test"):
        first = torch.zeros(100)
        kept = first[:20].clone()
        del first
        torch.zeros(50)
    assert terms.peak == 32 + 40 + 400 + 80 > 32 + 40 + 80 + 200
    assert len(kept) == 20


def test_the_byte_too_many_ends_it_with_who_what_how_and_how_much() -> None:
    part = ModelPart(explicit_chain(nn.Sequential(nn.Linear(3, 2))), 0, 1, None)
    with (
        pytest.raises(BudgetError, match=r"^client 7, module 2: it may take 431 B, and took 432 B\. .* memory\.budget"),
        within(Terms(PLAIN, 431), part, (), "client 7, module 2"),
    ):
        torch.zeros(100)
    with within(Terms(PLAIN, 432), part, (), ""):
        torch.zeros(100)


def test_without_a_limit_nothing_is_counted_or_planned() -> None:
    class Never(Planner):
        def cheapest(self, iteration: LocalIteration, limit: int) -> Planned:
            raise AssertionError

    terms = _train(_task(), ModelPart(_chain(), 0, 3, None), Never())
    assert (terms.plan, terms.peak, str(terms)) == (PLAIN, 0, "")


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("case", ["model", "head", "prior", "anchors", "summed", "fixed", "clean", "boundary", "drawn"])
def test_what_is_counted_is_what_was_predicted(plan: MemoryPlan, case: str) -> None:
    """Over several iterations, and within what the plan is chosen by; nothing of a batch stays for the next one."""
    hyper = replace(
        HYPER, proximal=0.1 * (case == "anchors"), summed_heads=case == "summed", fixed_statistics=case == "fixed"
    )
    hyper = replace(hyper, boundary_weights=case == "boundary", consistency=0.5 * (case in ("boundary", "drawn")))
    task = _task(training=hyper, threat=None if case in ("clean", "drawn") else THREAT, memory=10**9)
    headed = case in ("head", "summed")
    prior = torch.rand(10) if case == "prior" else None
    part = ModelPart(_chain(), 0, 2 if headed else 3, _head() if headed else None, prior)
    planner = _Fixed(plan)
    peak = _train(task, part, planner).peak
    predicted = LocalIteration(replace(part, prior=None), SHAPE, hyper, task.threat, classes=10).predicted(plan)
    unpredicted = task.memory - planner.limit
    assert peak <= predicted + unpredicted
    assert peak == pytest.approx(predicted, rel=0.05)
    assert unpredicted < 0.02 * predicted


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[3], PLANS[4]], ids=str)
def test_rows_of_probabilities_count_where_classes_are_many_and_those_of_all_samples_lie_in_a_file(
    plan: MemoryPlan,
) -> None:
    """3,000 classes: a row is 12 kB, those of a batch 96 kB and those of 20 samples 240 kB."""
    torch.manual_seed(0)
    part = ModelPart(explicit_chain(nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(768, 3000)))), 0, 1, None)
    peaks, predictions = [], []
    for strength in (0.0, 0.5):
        hyper = replace(HYPER, momentum=0.0, consistency=strength)
        task, planner, (images, labels) = _task(training=hyper, memory=10**9), _Fixed(plan), _inputs(part)
        inputs = FetchedInputs(SAMPLES, images.__getitem__)
        with limited(task, part, inputs, (), planner, classes=3000) as terms:
            train(task, part, inputs, labels, plan=plan)
        peaks.append(terms.peak)
        iteration = LocalIteration(part, SHAPE, hyper, THREAT, classes=3000)
        predictions.append(iteration.predicted(plan))
        assert terms.peak <= predictions[-1] + task.memory - planner.limit
        assert terms.peak == pytest.approx(predictions[-1], rel=0.05)
    assert peaks[1] - peaks[0] == pytest.approx(predictions[1] - predictions[0], abs=2000)


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[-1]], ids=str)
@pytest.mark.parametrize("width", [16, 20])
def test_the_allocator_has_seen_no_more(plan: MemoryPlan, width: int) -> None:
    """Neither than what was counted, nor than the limit, which is just what the plan is predicted to need."""
    task, part = _task(memory=10**9), ModelPart(_chain(width), 0, 3, None)
    images, labels = _inputs(part)
    planner = _Fixed(plan)
    _train(task, part, planner)  # also sets up what is set up once
    unpredicted = task.memory - planner.limit
    limit = LocalIteration(part, SHAPE, HYPER, THREAT).predicted(plan) + unpredicted
    peak = _train(replace(task, memory=limit), part, planner).peak
    measured = measured_peak(lambda: train(task, part, images, labels, plan=plan), torch.device("cpu"))
    assert measured + bytes_of(part.tensors) <= peak <= limit
    assert measured + bytes_of(part.tensors) >= 0.95 * peak


def test_a_tighter_limit_leads_to_a_dearer_plan_that_keeps_within_it() -> None:
    part = ModelPart(_chain(), 0, 3, None)
    iteration = LocalIteration(part, SHAPE, HYPER, THREAT)
    planner, plans = Planner(), []
    spare = SAMPLES * 8  # their order
    for limit in (iteration.predicted(PLAIN) + spare, iteration.predicted(PLAIN), least(iteration) + spare):
        terms = _train(_task(memory=limit), part, planner)
        assert terms.peak <= limit
        plans.append(terms.plan)
    assert plans[0] == PLAIN
    assert len(set(plans)) == 3
    assert str(terms) == str(plans[-1])


def test_training_within_a_limit_has_one_thread_and_afterwards_there_are_as_many_as_before() -> None:
    part = ModelPart(_chain(), 0, 3, None)
    with torch_threads(3):
        with limited(_task(memory=10**9), part, _inputs(part)[0], (), _Fixed(PLAIN)):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        with pytest.raises(BudgetError), limited(_task(memory=1), part, _inputs(part)[0], (), Planner()):
            raise AssertionError
        assert torch.get_num_threads() == 3
        with pytest.raises(KeyError), limited(_task(memory=10**9), part, _inputs(part)[0], (), _Fixed(PLAIN)):
            raise KeyError
        assert torch.get_num_threads() == 3
        with limited(_task(), part, _inputs(part)[0], (), Planner()):
            assert torch.get_num_threads() == 3


def test_a_limit_that_no_plan_fits_is_refused_before_training() -> None:
    part = ModelPart(_chain(), 0, 2, _head())
    before = [tensor.clone() for tensor in part.tensors]
    task = _task(memory=10**5, frozen=(FrozenModule(0, 0, "x"),), head=1)
    with pytest.raises(
        BudgetError, match=r"^client 7, module 2: Conv 1, .*Conv 2.* cannot be trained within 9\d\.\d kB"
    ):
        _train(task, part, Planner())
    assert all(torch.equal(a, b) for a, b in zip(before, part.tensors, strict=True))


def test_a_plan_that_takes_more_than_was_predicted_ends_in_an_error_that_names_it() -> None:
    part = ModelPart(_chain(), 0, 2, _head())
    limit = LocalIteration(part, SHAPE, HYPER, THREAT).predicted(PLAIN) - 1
    task = _task(memory=limit, head=0)
    with pytest.raises(BudgetError) as error:
        _train(task, part, _Fixed(PLAIN))
    text = str(error.value)
    assert text.startswith("client 7, module 1 (Conv 1")
    assert "Conv 2" in text
    assert "plan 'plain'" in text
    assert f"{limit / 1e6:.2f} MB" in text


@pytest.mark.parametrize(
    ("frozen", "first", "last", "head", "name"),
    [
        (0, 0, 3, None, "the model"),
        (0, 0, 1, 0, "module 1"),
        (0, 0, 2, 1, "modules 1 to 2"),
        (1, 1, 2, 1, "module 2"),
        (1, 1, 3, None, "modules 2 to the last"),
    ],
)
def test_how_people_call_what_is_trained(frozen: int, first: int, last: int, head: int | None, name: str) -> None:
    task = _task(frozen=(FrozenModule(0, 1, "x"),) * frozen, head=head)
    assert name_of(task, ModelPart(_chain(), first, last, None)) == name


def _workspace(frugal: bool) -> tuple[Workspace, Client]:
    stores = ModuleStore(), ClientStore(None, 10**6), FeatureCache(10**8, 0)
    workspace = Workspace(_chain(), SHAPE, 10, *stores, frugal)
    if frugal:
        workspace.move_to_files()
    images, labels = _inputs(ModelPart(workspace.chain, 0, 3, None))
    examples = TensorExamples(images, labels)
    data = ClientData(LocalExamples(examples, np.arange(SAMPLES)), LocalExamples(examples, np.arange(4)))
    return workspace, Client(data, lambda _: Resources(1, 1.0, 1.0))


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return float(torch.cat([(one[name] - other[name]).flatten() for name in one]).norm())


@pytest.mark.parametrize("case", ["model", "two statistics", "calibrated", "summed", "anchors", "boundary"])
@pytest.mark.parametrize("plan", PLANS[1:], ids=str)
def test_a_client_learns_by_every_plan_what_it_learns_plainly(case: str, plan: MemoryPlan) -> None:
    """The same update, up to rounding, with all that methods add to training; and the layers that stay with it."""
    hyper = replace(HYPER, summed_heads=case == "summed", proximal=0.5 * (case == "anchors"))
    hyper = replace(hyper, boundary_weights=case == "boundary", consistency=1.0 * (case == "boundary"))
    ends: list[Trained] = []
    for way, memory in ((PLAIN, 0), (plan, 10**9)):
        workspace, client = _workspace(frugal=memory > 0)
        shared = {n: workspace.chain.tensors[n].detach().clone() for n in workspace.chain.shared()}
        last, head = (2, 0) if case == "summed" else (3, None)
        heads = {f"heads/0.{name}": value.detach() for name, value in _head().named_parameters()}
        two, calibration = case == "two statistics", 1.0 * (case == "calibrated")
        parameters = {n: shared[n] for n in workspace.chain.shared(0, last)} | (heads if head == 0 else {})
        task = _task(training=hyper, memory=memory, parameters=parameters, wants_local=True, head=head)
        task = replace(task, last=last, calibration=calibration, adversarial_statistics=two)
        workspace.planner = _Fixed(way)
        ends.append(run_client(task, client, workspace))
    plain, planned = ends
    assert (plain.plan, plain.peak) == ("", 0)
    assert planned.plan == str(plan)
    assert planned.peak > 0
    assert planned.loss == pytest.approx(plain.loss, rel=1e-5)
    assert _distance(plain.parameters, planned.parameters) < 1e-5 * _distance(plain.parameters, parameters)
    assert plain.local.keys() == planned.local.keys()
    assert any(name.startswith("adversarial.") for name in plain.local) == (case == "two statistics")
    for name, value in plain.local.items():
        assert torch.allclose(planned.local[name].double(), value.double(), rtol=1e-4, atol=1e-6), name


def test_two_sets_of_statistics_stay_where_they_are() -> None:
    """What is there all the time lies beside what comes and goes; the copies of an exchange do not last."""
    chain = _chain()
    part, sets = ModelPart(chain, 1, 2, _head()), TwoSets(chain, {})
    where = [tensor.data_ptr() for tensor in (*part.tensors, *sets.aside)]
    before = [tensor.clone() for tensor in sets.aside]
    sets.observe(part, torch.rand(8, 16, 16, 16), PLAIN)
    assert [tensor.data_ptr() for tensor in (*part.tensors, *sets.aside)] == where
    assert any(not torch.equal(new, old) for new, old in zip(sets.aside, before, strict=True))


def test_an_observer_takes_no_more_than_the_step() -> None:
    """A second set of statistics is updated on clean batches: as a whole they would take more than small pieces do."""
    chain, plan, x = _chain(), MemoryPlan(2, Step.PIECES, 2), torch.rand(32, 16, 16, 16)
    part = ModelPart(chain, 1, 2, _head())
    peaks = []
    for way in (PLAIN, plan):
        sets = TwoSets(chain, {})
        with LiveBytes([*part.tensors, *sets.aside, x]) as live:
            sets.observe(part, x, way)
        peaks.append(live.peak)
    predicted = LocalIteration(part, (16, 16, 16), replace(HYPER, batch=32), None).predicted(plan)
    assert peaks[1] <= predicted < peaks[0]


def test_what_is_not_predicted_is_left_out_of_the_limit_that_is_planned_for() -> None:
    """20 samples in some order are 160 bytes; statistics of 100 and 40 bytes, the larger of which is copied, 240."""

    class Tried(Planner):
        def cheapest(self, iteration: LocalIteration, limit: int) -> Planned:
            assert limit == 10**9 - 400
            return Planned(PLAIN, 0)

    beside = [torch.zeros(25), torch.zeros(10)]
    assert _train(_task(memory=10**9), ModelPart(_chain(), 0, 3, None), Tried(), beside).limit == 10**9


class _Cuda:
    """A GPU of 1000 bytes, as far as a limit asks for it: 300 are allocated, of which 100 are the part's."""

    def __init__(self, peak: int) -> None:
        self.fraction, self.fractions, self.peak = 0.9, list[float](), peak

    def put_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def set_fraction(fraction: float, _: torch.device) -> None:
            self.fraction = fraction
            self.fractions.append(fraction)

        answers: dict[str, Any] = {
            "synchronize": lambda _: None,
            "empty_cache": lambda: None,
            "memory_allocated": lambda _: 300,
            "memory_reserved": lambda _: 300,
            "max_memory_allocated": lambda _: self.peak,
            "reset_peak_memory_stats": lambda _: None,
            "get_device_properties": lambda _: SimpleNamespace(total_memory=1000),
            "get_per_process_memory_fraction": lambda _: self.fraction,
            "set_per_process_memory_fraction": set_fraction,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        monkeypatch.setattr(allocator, "_first_graph", lambda _: None)
        monkeypatch.setattr(allocator, "on_own_stream", lambda _: nullcontext())


HELD = [torch.zeros(25)]
CPU = torch.device("cpu")


def _exceeded(size: int | None) -> BudgetError:
    return BudgetError(f"took {size}")


def test_on_a_gpu_the_allocator_gets_the_limit_beside_what_it_holds_for_others(monkeypatch) -> None:
    """Of 300 bytes 200 are others': a limit of 150 and room for gaps of 20 let the process have 370 of 1000."""
    gpu, terms = _Cuda(peak=340), Terms(PLAIN, 150)
    gpu.put_in_place(monkeypatch)
    monkeypatch.setattr("fedprophet.client.limits.ROOM", 20)
    with _on_cuda(terms, CPU, HELD, _exceeded):
        assert gpu.fraction == pytest.approx(0.3705)
    assert gpu.fractions == [pytest.approx(0.3705), 0.9]
    assert terms.peak == 340 - 200


def _refused() -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize(("work", "text"), [(lambda: None, "took 151"), (_refused, "took None")])
def test_on_a_gpu_what_exceeds_the_limit_is_our_error(work, text: str, monkeypatch) -> None:
    gpu = _Cuda(peak=351)
    gpu.put_in_place(monkeypatch)
    with pytest.raises(BudgetError, match=text), _on_cuda(Terms(PLAIN, 150), CPU, HELD, _exceeded):
        work()
    assert gpu.fraction == 0.9


def test_on_a_gpu_an_error_that_has_nothing_to_do_with_memory_stays_as_it_is(monkeypatch) -> None:
    gpu = _Cuda(peak=300)
    gpu.put_in_place(monkeypatch)
    with pytest.raises(RuntimeError, match="shapes"), _on_cuda(Terms(PLAIN, 150), CPU, HELD, _exceeded):
        raise RuntimeError("shapes")
    assert gpu.fraction == 0.9


def test_on_a_gpu_the_first_iteration_that_exceeds_the_limit_is_the_last(monkeypatch) -> None:
    """Of 300 bytes 200 are others': 350 are allowed. The third of five iterations takes 351."""
    gpu, part, terms, checked = _Cuda(peak=350), ModelPart(_chain(), 0, 2, _head()), Terms(PLAIN, 150), []
    gpu.put_in_place(monkeypatch)
    task = replace(_task(head=0), training=replace(HYPER, iterations=5))

    def check() -> None:
        checked.append(gpu.peak)
        gpu.peak = 351 if len(checked) > 2 else 350
        terms.check()

    with pytest.raises(BudgetError, match="took 151"), _on_cuda(terms, CPU, HELD, _exceeded):
        train(task, part, *_inputs(part), check=check)
    assert checked == [350, 350, 350]


def test_on_a_gpu_a_limit_never_raises_the_one_that_is_there(monkeypatch) -> None:
    gpu = _Cuda(peak=300)
    gpu.put_in_place(monkeypatch)
    with _on_cuda(Terms(PLAIN, 10**6), CPU, HELD, _exceeded):
        assert gpu.fraction == 0.9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_the_part_alone_is_there_and_too_little_memory_is_refused() -> None:
    chain, device = _chain(), torch.device("cuda", 0)
    chain.model.to(device)
    part, x = ModelPart(chain, 0, 2, _head().to(device)), _inputs(ModelPart(chain, 0, 3, None))
    others = [tensor for name, tensor in chain.tensors.items() if name.startswith("three")]
    images, labels = x[0].to(device), x[1].to(device)
    before = torch.cuda.get_per_process_memory_fraction(device)
    ample, task = Terms(PLAIN, 10**9), _task(head=0)
    with _alone(part), within(ample, part, (), "a test"):
        assert {tensor.device.type for tensor in others} == {"cpu"}
        train(task, part, images, labels)
    assert ample.peak > bytes_of(part.tensors)
    assert {tensor.device.type for tensor in others} == {"cuda"}
    refused = pytest.raises(BudgetError, match="it may take")
    # What workspaces take differs from the first training to the next; gradients are needed in any case.
    with refused, _alone(part), within(Terms(PLAIN, bytes_of(part.tensors)), part, (), "a test"):
        train(task, part, images, labels)
    assert torch.cuda.get_per_process_memory_fraction(device) == before
    assert {tensor.device.type for tensor in others} == {"cuda"}
