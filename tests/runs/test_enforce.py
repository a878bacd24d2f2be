"""Runs with `memory.enforce`: the same model where memory suffices, plans where it does not, errors where none fits."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedprophet.cascade.atoms import Chain
from fedprophet.client.budget import cheapest, least
from fedprophet.client.iteration import LocalIteration, iteration_of
from fedprophet.client.memory_plan import MemoryPlan
from fedprophet.client.planned_cost import LEAST_ALLOWANCE, PlannedCost, TriedCost
from fedprophet.engines import EngineParts
from fedprophet.errors import BudgetError
from fedprophet.messages.answers import Reported
from fedprophet.messages.values import Resources
from fedprophet.methods import METHODS
from fedprophet.runs.play import play
from fedprophet.runs.run import RunStoppedError, reopen, start
from fedprophet.runs.session import Session, _as_tried, assemble
from fedprophet.runs.setup import module_rows
from fedprophet.server.coordinator import Record, play_round
from fedprophet.storage import mapped

LIMITED = {"memory.enforce": True, "fleet.memory_share": 1e-9, "engine": "plain"}
"""Nobody has more memory available than R_min."""
TIGHT = {"memory.budget": "60%", "train.warmup": 0}
"""Two modules, which have to be trained in pieces."""
JOINT = {"method": "jfat", "memory.budget": "100%"}
CUT = {"memory.budget": "43%", "train.batch": 8, "train.warmup": 0}
"""Three modules on paper, of which the second fits no plan."""
Round = tuple[Session, Any, Record]


@pytest.fixture(scope="module")
def first_round(tiny: Any) -> Round:
    """A session of clients that have R_min alone, the state after its first round, and the round's record."""
    session = assemble(tiny({**LIMITED, **TIGHT}))
    return session, *play_round(session.method.round(session.method.initial()), session.engine)


def _journal(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "journal.jsonl").read_text().splitlines()]


def _plans(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [plan for record in records for plan in record["plans"].values()]


@pytest.mark.slow
def test_where_every_plan_is_plain_the_model_is_the_same_to_the_byte(tiny, small, tmp_path) -> None:
    """Clients have gigabytes. An evaluation takes no more than R_min, so that it has small batches in both runs."""
    made = []
    for enforce in (True, False):
        path = tmp_path / str(enforce)
        changes = {"memory.enforce": enforce, "engine": "plain", "evaluate.batch": 4, "fleet.pool": "cifar10"}
        play(start(tiny({**small, **changes}), path))
        made.append(load_file(path / "model.safetensors"))
        records = _journal(path)
        assert [("plans" in record) for record in records] == [enforce] * len(records)
        assert not enforce or {plan["plan"] for plan in _plans(records)} == {"plain"}
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[1])


def test_a_tight_budget_is_kept_by_plans_that_learn_the_same(tiny, first_round: Round) -> None:
    session, state, record = first_round
    plans = _plans([record])
    assert plans
    assert all(plan["plan"].endswith("step atom by atom in pieces of 4") for plan in plans)
    assert all(plan["peak_bytes"] <= plan["limit_bytes"] == session.budget for plan in plans)
    free = assemble(tiny({**LIMITED, **TIGHT, "memory.enforce": False}))
    before = free.method.initial()
    plain, _ = play_round(free.method.round(before), free.engine)
    models = [{**each.model, **each.heads} for each in (state, plain, before)]
    assert 0 < _distance(*models[:2]) < 1e-5 * _distance(*models[1:])


def _distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    return float(torch.cat([(one[name] - other[name]).flatten() for name in one]).norm())


@pytest.mark.slow
def test_nothing_is_measured_beyond_the_peaks_in_the_journal(tiny) -> None:
    """Beside what is measured here, a client holds the order of its samples."""
    config = tiny({**LIMITED, **TIGHT, "model.options": {}, "train.batch": 64, "evaluate.clients": 1})
    session, again = assemble(config), assemble(config).world
    _, record = play_round(session.method.round(session.method.initial()), session.engine)
    plan, module = _plans([record])[0], again.modules[0]
    iteration = iteration_of(again.chain, again.cost, module.first, module.last, again.local_training(1))
    found = cheapest(iteration, session.budget - LEAST_ALLOWANCE)
    assert str(found.plan) == plan["plan"]
    iteration.measured(found.plan)  # what is set up once
    measured = iteration.measured(found.plan)
    assert 0.95 * plan["peak_bytes"] <= measured <= plan["peak_bytes"] <= plan["limit_bytes"]


@pytest.mark.slow
def test_workers_give_what_the_plain_engine_gives(tiny, same_tensors) -> None:
    """They compute as the model is written, which is what predictions are made for, each in memory of its own."""
    ends = []
    for name, threads in (("plain", 1), ("workers", 2)):
        session = assemble(tiny({**LIMITED, **TIGHT, "engine": name, "threads": threads, "population.cohort": 4}))
        state, record = play_round(session.method.round(session.method.initial()), session.engine)
        ends.append((state.model, record))
        session.close()
    assert same_tensors(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_a_client_that_has_more_may_take_more(tiny) -> None:
    session = assemble(tiny({**LIMITED, **TIGHT, "fleet.memory_share": 1.0, "evaluate.clients": 1}))
    _, record = play_round(session.method.round(session.method.initial()), session.engine)
    for client, plan in record["plans"].items():
        available = session.population.resources(int(client), 1, session.budget).memory
        assert plan["limit_bytes"] == available > session.budget
        assert plan["plan"] == "plain"


def test_modules_are_assigned_by_what_plans_need(first_round: Round) -> None:
    """A client has less than both modules take on paper, and just what they need by the most economical plan."""
    session, state, _ = first_round
    world, needs = session.world, session.world.needs
    assert isinstance(needs, PlannedCost)
    enough = needs.total_memory
    assert enough < world.cost.total_memory
    for memory, modules in ((enough, 2), (enough - 1, 1)):
        conversation = session.method.round(state)
        next(conversation)
        powers = {0: 1e12, 1: 1.0}  # the first is so much quicker that its memory alone decides
        reports = [
            Reported(round=state.round + 1, client=client, weight=1.0, resources=Resources(memory, power, 1e9))
            for client, power in powers.items()
        ]
        task, slow = conversation.send(reports)
        assert task.last == world.modules[modules - 1].last
        assert slow.last == world.modules[0].last
        assert task.memory == slow.memory == memory


REFUSED = {
    "fedprophet": (r"module 2 \(Conv 1\)", "memory.budget of at least 63392"),
    "jfat": ("the whole model", "use fedprophet"),
    "fedrbn": ("the whole model", "use fedprophet"),
    "feddf": ("vgg-small", "use fedprophet"),
    "heterofl": ("a sub-network of width ", "use fedprophet"),
}


@pytest.mark.parametrize("method", REFUSED)
def test_a_budget_that_is_too_small_is_refused_at_the_start(method, tiny) -> None:
    family = {"distillation.family": ["vgg-small"]}
    settings = {**LIMITED, **family, "method": method, "memory.budget": "20%" if method != "heterofl" else 2000}
    if method == "fedprophet":
        settings |= {"train.batch": 8, "memory.budget": "25%"}
    name, advice = REFUSED[method]
    with pytest.raises(BudgetError, match=rf"^memory\.enforce: {name}.* cannot be trained within memory\.budget") as e:
        assemble(tiny(settings))
    assert advice in str(e.value)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_within_its_limits(method, tiny, play_in_memory) -> None:
    own = TIGHT if method == "fedprophet" else {"memory.budget": "80%", "train.warmup": 0}
    family = (
        {"distillation.family": ["vgg-small"], "distillation.iterations": 1} if method in ("feddf", "fedet") else {}
    )
    played = play_in_memory(tiny({**LIMITED, **own, **family, "method": method}), rounds=2)
    for record in played.records:
        assert record["dropped"] == {}
        plans = record["plans"]
        assert sorted(plans) == sorted(record["times"])
        assert all(0 < plan["peak_bytes"] <= plan["limit_bytes"] == played.session.budget for plan in plans.values())


@pytest.mark.slow
def test_sub_networks_are_cut_until_they_fit(tiny) -> None:
    session = assemble(tiny({**LIMITED, "method": "heterofl", "memory.budget": "30%"}))
    method = session.method
    for memory in (session.budget, 2 * session.budget, 10**9):
        width = method._width(memory)
        assert method._cost_of_widths(method._channels_at(width)).total_memory <= memory
    assert method._width(10**9) == 1.0


def test_evaluation_takes_batches_that_fit_by_prediction(tiny, first_round: Round) -> None:
    world = first_round[0].world
    last = len(world.chain)
    assert assemble(tiny({**TIGHT, "engine": "plain"})).world.evaluation_batch(last) == 64
    assert isinstance(world.needs, PlannedCost)
    images = 2 * 64 * 4 * 8 * 8  # and where their attacks start
    batch = world.evaluation_batch(last)
    assert world.needs.attack_memory(last, batch) + images <= world.budget
    assert world.needs.attack_memory(last, 2 * batch) + images > world.budget
    assert world.evaluation_draws(last) == 64, "those of a run without limits"


@pytest.mark.parametrize(
    ("budget", "batch", "draws", "asked"),
    [
        (64_000, 64, 0, [64]),
        (63_999, 16, 64, [64, 32, 16]),
        (32_000, 32, 0, [64, 32, 16, 8, 4, 2, 1]),
        (999, 1, 0, [64, 32, 16, 8, 4, 2, 1]),
    ],
    ids=["it fits", "beside the images", "not beside the images", "nothing fits"],
)
def test_every_batch_is_predicted_once_and_none_without_need(
    budget: int, batch: int, draws: int, asked: list[int], first_round: Round, monkeypatch
) -> None:
    """An attack takes 1000 bytes a sample. 64 images of 8 × 8 numbers, and where their attacks start, are 32,768."""
    made: list[int] = []
    monkeypatch.setattr(PlannedCost, "attack_memory", lambda self, last, size: made.append(size) or 1000 * size)
    world = replace(first_round[0].world, budget=budget)
    assert (world.evaluation_batch(8), world.evaluation_draws(8)) == (batch, draws)
    assert made == asked


@pytest.mark.slow
def test_only_what_is_in_training_is_in_memory(tiny) -> None:
    """The model, frozen modules and features are mappings of files; a forked worker has its own."""
    session = assemble(tiny({**LIMITED, **TIGHT}))
    state = session.method.initial()
    while not state.fixed:
        state, _ = play_round(session.method.round(state), session.engine)
    state, _ = play_round(session.method.round(state), session.engine)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines if "s" in line[1]]
    frozen = session.world.frozen[state.fixed[0].digest].values()
    features = [value for _, value in session.features.memory.items()]
    assert features
    for tensor in (*session.world.chain.tensors.values(), *frozen, *features):
        assert any(first <= tensor.data_ptr() < last for first, last in mapped)


def _spans(session: Session) -> list[tuple[int, int]]:
    return [(module.first, module.last) for module in session.world.modules]


def test_a_module_that_fits_no_plan_is_cut_further_and_only_where_memory_is_enforced(tiny) -> None:
    paper, session = (assemble(tiny({**LIMITED, **CUT, "memory.enforce": enforce})) for enforce in (False, True))
    assert _spans(paper) == [(0, 4), (4, 6), (6, 8)]
    assert _spans(session) == [(0, 4), (4, 5), (5, 6), (6, 8)]
    needs = session.world.needs
    assert needs.memory(4, 6) > session.budget
    assert all(needs.memory(*span) <= session.budget for span in _spans(session))
    assert [row["layers"] for row in module_rows(session)["modules"][1:3]] == [["Conv 4"], ["Conv 5"]]
    assert session.method.initial().heads.keys() > paper.method.initial().heads.keys()


def test_on_a_gpu_a_module_that_passes_no_trial_is_cut_further_as_well(tiny, monkeypatch) -> None:
    """Of the first four atoms more than two together pass none. A run that was begun keeps its modules."""
    config = tiny({**LIMITED, **CUT})
    predicted = assemble(config).world
    sizes = {span: predicted.needs.memory(*span) for span in [(0, 2), (2, 4), (4, 5), (5, 6), (6, 8)]}
    monkeypatch.setattr(TriedCost, "memory", lambda self, first, last: sizes.get((first, last), 10**12 + last))

    def engine(parts: EngineParts) -> None:
        """Bring the chain to a GPU."""
        monkeypatch.setattr(Chain, "device", torch.device("cuda", 0))

    tried = assemble(config, engine=engine)
    assert _spans(tried) == list(sizes)
    assert tried.world.needs.memory(0, 4) == 10**12 + 4
    begun = _as_tried(predicted, cut=False)
    assert (begun.modules, begun.needs.memory(0, 4)) == (predicted.modules, 10**12 + 4)


@pytest.mark.parametrize("model", ["paper", pytest.param("measured", marks=pytest.mark.slow)])
def test_memory_is_predicted_for_the_device_that_clients_train_on(model, tiny, monkeypatch) -> None:
    """Before the engine brings the chain there. On a GPU no plan is by slices of weights; on a CPU these take least."""
    plans: dict[str, list[MemoryPlan]] = {"cuda": [], "plain": []}
    peak, worlds = LocalIteration.step_peak, []
    for engine, made in plans.items():
        monkeypatch.setattr(LocalIteration, "step_peak", lambda *call, made=made: made.append(call[1]) or peak(*call))
        wide = {"model.options": {"width": 16}, "memory.budget": "150%", "memory.model": model}
        worlds.append(assemble(tiny({**LIMITED, **wide, "engine": engine}), engine=lambda parts: None).world)
        worlds[-1].needs.memory(6, 8)
    assert [any(plan.sliced for plan in made) for made in plans.values()] == [False, True]
    gpu, cpu = worlds
    there = least(iteration_of(gpu.chain, gpu.cost, 6, 8, gpu.local_training(1), torch.device("cuda")))
    assert cpu.needs.memory(6, 8) < there < gpu.needs.memory(6, 8) <= there * 1.15 + 1
    assert [world.needed(world.cost, world.chain).place for world in worlds] == [torch.device("cuda"), None]


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "modules"), [(TIGHT, 2), (CUT, 4)], ids=["as on paper", "cut further"])
def test_a_run_goes_on_after_a_stop_with_the_same_bytes(budget, modules, tiny, small, tmp_path, stop, contents) -> None:
    config = tiny({**small, **LIMITED, **budget})
    play(start(config, tmp_path / "whole"))
    assert len(json.loads((tmp_path / "whole" / "setup.json").read_text())["modules"]) == modules
    assert {record["module"] for record in _journal(tmp_path / "whole")} == set(range(1, modules + 1))
    assert all(p["peak_bytes"] <= p["limit_bytes"] for p in _plans(_journal(tmp_path / "whole")))
    with pytest.raises(RunStoppedError):
        play(start(config, tmp_path / "stopped"), stop(after_round=3))
    play(reopen(tmp_path / "stopped"))
    assert contents(tmp_path / "whole") == contents(tmp_path / "stopped")


def test_who_has_just_what_a_module_needs_can_train_it(tiny) -> None:
    """There is a plan, whatever else the client holds."""
    settings = {"train.calibration": "labels", "train.proximal": 0.1, "train.head_gradients": "summed"}
    settings |= {"train.weighting": "boundary", "train.consistency": 0.5}
    session = assemble(tiny({**LIMITED, **TIGHT, **settings}))
    module, method = session.world.modules[0], session.method
    needed = session.world.needs.memory(module.first, module.last)
    task = method._train_task(replace(method.initial(), round=1, stage_round=1), client=0, last=0)
    (answer,) = session.engine.map([replace(task, memory=needed)])
    assert 0.8 * needed < answer.peak <= needed


@pytest.mark.parametrize(("enforce", "kind", "said"), [(True, "tmpfs", 1), (True, "ext4", 0), (False, "tmpfs", 0)])
def test_a_run_says_if_its_files_are_memory(tiny, tmp_path, monkeypatch, enforce: bool, kind: str, said: int) -> None:
    (tmp_path / "mounts").write_text(f"none {tmp_path} {kind} rw 0 0\n")
    monkeypatch.setattr(mapped, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    notes = assemble(tiny({**JOINT, "memory.enforce": enforce, "engine": "plain"})).notes
    expected = f"files in {tmp_path}, which is a tmpfs and so is memory: it comes on top of their limits. Set TMPDIR"
    assert len([note for note in notes if expected in note]) == said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"threads": 2}, 1),
        ({"threads": 1}, 0),
        ({"threads": 2, "engine": "workers"}, 0),
        ({"threads": 2, "memory.enforce": False}, 0),
    ],
)
def test_a_run_says_if_its_clients_have_fewer_threads(tiny, settings, said: int) -> None:
    notes = assemble(tiny({**JOINT, "memory.enforce": True, "engine": "plain", **settings})).notes
    expected = "memory.enforce: each client trains on one thread, for which memory is predicted; evaluation has all 2"
    assert list(notes).count(expected) == said
