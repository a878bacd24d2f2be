"""The presets that ship: the paper's numbers, and small ones that run every method on stand-in images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedprophet.cascade.atoms import chain_of
from fedprophet.cascade.cost import cost_of
from fedprophet.cascade.partition import partition
from fedprophet.config.config import Config
from fedprophet.config.load import PRESETS, load_config
from fedprophet.fleet.device import load_pool
from fedprophet.methods import METHODS
from fedprophet.models import build
from fedprophet.runs.session import Session, assemble
from fedprophet.server.coordinator import play_round
from fedprophet.sizes import parse_budget

SMALL = sorted(name for name in PRESETS if name.endswith("-small"))
FULL = sorted(name.removesuffix("-small") for name in SMALL)

# The appendix of the paper; what it leaves open is what its authors ran.
COMMON: Mapping[str, Any] = {
    "model.weights": "",
    "population.clients": 100,
    "population.cohort": 10,
    "data.validation": 0.2,
    "data.mirror": False,
    "data.shift": 0,
    "shards.kind": "skewed",
    "shards.iid_fraction": 0.2,
    "fleet.performance": "apps",
    "fleet.memory_share": 0.2,
    "train.iterations": 30,
    "train.decay": 0.994,
    "train.momentum": 0.9,
    "train.weight_decay": 0.0001,
    "train.strong_convexity": 0.00001,
    "attack.radius": 8 / 255,
    "attack.step": 2 / 255,
    "attack.steps": 10,
    "attack.feature_steps": 10,
    "perturbation.change": 0.1,
    "perturbation.threshold": 0.05,
    "perturbation.every": 50,
    "perturbation.window": 5,
    "evaluate.steps": 20,
    "evaluate.clients": "all",
    "evaluate.test_samples": 0,
    "measure.clients": "all",
    "distillation.family": [],
    "distillation.iterations": 128,
    "distillation.diversity": 0.05,
    "propagation.temperature": 0.01,
}
# Where the runs behind the paper's tables differ from its text (docs/how-to/paper.md), and rules that are not theirs.
AS_IN_ITS_RUNS: Mapping[str, Any] = {
    "perturbation.counted_from": "warmup",
    "perturbation.restart": "start",
    "train.head_gradients": "summed",
    "train.warmup_stages": "all",
    "train.calibration": "none",
    "assignment.heads": "passed",
    "attack.ramp": 0,
    "convergence.weight": "ratio",
    "convergence.patience_after": "best",
    "evaluate.every": 1,
    "distillation.learning_rate": 0.005,
    "distillation.weight_decay": 0.0,
    "distillation.norm_layers": "kept",
    "norm.layers": "local",
    "norm.newcomers": "initial",
    "norm.refresh": "none",
}
OF_THE_DATASET: Mapping[str, Mapping[str, Any]] = {
    "cifar10": {
        "model.name": "vgg16",
        "model.options": {},
        "data.name": "cifar10",
        "shards.classes_per_client": 2,
        "fleet.pool": "cifar10",
        "memory.budget": "60MB",
        "train.batch": 64,
        "train.learning_rate": 0.005,
        "perturbation.start": 0.3,
        "perturbation.floor": 0.3,
        "distillation.public": 5000,
    },
    "caltech256": {
        "model.name": "resnet34",
        "model.options": {},
        "data.name": "caltech256",
        "data.options": {"size": 224, "test_per_class": 25},
        "shards.classes_per_client": 46,
        "fleet.pool": "caltech256",
        "memory.budget": "224MB",
        "train.batch": 32,
        "train.learning_rate": 0.001,
        "perturbation.start": 0.4,
        "perturbation.floor": 0.4,
        "distillation.public": 2500,
    },
}
EXPONENTS = {
    "cifar10-balanced": 0.0,
    "cifar10-unbalanced": -1.6,
    "caltech256-balanced": 0.0,
    "caltech256-unbalanced": -1.13,
}
ROUNDS = {
    "fedprophet": (500, 100),
    "jfat": (500, 100),
    "fedrbn": (500, 100),
    "feddf": (1000, 200),
    "fedet": (1000, 200),
    "heterofl": (1000, 200),
    "feddrop": (1000, 200),
    "fedrolex": (1000, 200),
}


def value(config: Config, key: str) -> Any:
    table: Any = config.model_dump()
    for part in key.split("."):
        table = table[part]
    return table


# The paper's experiments ----------------------------------------------------------------------------------------------


def test_each_experiment_has_a_preset_and_a_small_one():
    assert sorted(EXPONENTS) == FULL
    assert set(FULL) < set(PRESETS)


@pytest.mark.parametrize("preset", FULL)
def test_the_numbers_are_the_papers(preset):
    config = load_config(preset)
    own = {**OF_THE_DATASET[preset.partition("-")[0]], "fleet.exponent": EXPONENTS[preset]}
    expected = {**COMMON, **AS_IN_ITS_RUNS, **own}
    assert {key: value(config, key) for key in expected} == expected
    assert (config.gate_rounds, config.patience_rounds) == (25, 50)


@pytest.mark.parametrize("preset", FULL)
def test_each_method_has_its_rounds_and_warm_up(preset):
    configs = {method: load_config(preset, [f"method={method}"]) for method in METHODS}
    assert {name: (config.rounds, config.warmup_rounds) for name, config in configs.items()} == ROUNDS


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_loads_for_every_method(preset):
    for method in METHODS:
        assert load_config(preset, [f"method={method}"]).method == method


@pytest.mark.parametrize("preset", SMALL)
def test_a_small_preset_is_the_same_experiment_in_little(preset):
    small, full = load_config(preset), load_config(preset.removesuffix("-small"))
    for key in (
        "data.name",
        "shards",
        "fleet.pool",
        "fleet.exponent",
        "fleet.performance",
        "attack.radius",
    ):
        assert value(small, key) == value(full, key)
    for method in METHODS:
        long = ROUNDS[method][0] == 1000
        assert load_config(preset, [f"method={method}"]).rounds == small.rounds * (2 if long else 1)


BEST = {
    "train.warmup_stages": "first",
    "perturbation.start": 0.4,
    "perturbation.every": 15,
    "perturbation.window": 2,
    "convergence.patience": "20%",
    "convergence.patience_after": "alpha",
    "convergence.weight": 1.5,
    "evaluate.every": 5,
    "evaluate.before_gate": 25,
}
SHORT = {"rounds": 120, "train.decay": 0.99, "train.warmup": "10%", "attack.ramp": "30%"}


@pytest.mark.parametrize("method", METHODS)
def test_the_best_preset_is_the_one_for_everyone_with_rules_of_our_own_and_short_stages(method):
    settings = [f"{key}={rule}" for key, rule in (BEST | (SHORT if METHODS[method].cascade else {})).items()]
    assert load_config("cifar10-balanced-best", [f"method={method}"]) == load_config(
        "cifar10-balanced-global", [f"method={method}", *settings]
    )


def test_a_learning_rate_ends_where_the_papers_does():
    """0.994^500 is 0.049; so is 0.973^110."""
    for preset, method in (("balanced", "jfat"), ("balanced-global", "jfat"), ("balanced-best", "jfat")):
        config = load_config(f"cifar10-{preset}", [f"method={method}"])
        assert config.train.decay**config.rounds == pytest.approx(0.049, abs=0.001)


# Stand-ins for the datasets ------------------------------------------------------------------------------------------

RECORDS = 8


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> dict[str, Path]:
    """Return a root for each dataset, with a few images in the dataset's own files."""
    roots = {name: tmp_path_factory.mktemp(name) for name in ("cifar10", "caltech256")}
    random = np.random.default_rng(0)
    folder = roots["cifar10"] / "cifar-10-batches-bin"
    folder.mkdir()
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        labels = random.integers(0, 10, (RECORDS, 1), dtype=np.uint8)
        pixels = random.integers(0, 256, (RECORDS, 3072), dtype=np.uint8)
        (folder / name).write_bytes(np.hstack([labels, pixels]).tobytes())
    save = pytest.importorskip("PIL.Image").fromarray
    for place in ("001.ak47", "002.american-flag", "003.backpack", "257.clutter"):
        (roots["caltech256"] / "256_ObjectCategories" / place).mkdir(parents=True)
        for number in range(16):
            path = roots["caltech256"] / "256_ObjectCategories" / place / f"{place[:3]}_{number:04}.jpg"
            save(random.integers(0, 256, (60, 70, 3), dtype=np.uint8)).save(path)
    return roots


QUICK = (
    "rounds=2",
    "threads=1",
    "population.clients=4",
    "population.cohort=2",
    "train.warmup=1",
    "train.iterations=1",
    "train.batch=4",
    "attack.steps=1",
    "attack.feature_steps=1",
    "convergence.gate=0",
    "evaluate.every=2",
    "evaluate.steps=1",
    "evaluate.clients=1",
    "measure.steps=1",
    "measure.clients=1",
    "distillation.public=4",
    "distillation.iterations=1",
)
OF_THE_STAND_IN = {
    "cifar10": (),
    "caltech256": ("data.options.test_per_class=4", "shards.classes_per_client=2"),
}


@pytest.fixture
def made(images, monkeypatch):
    """Return a function that puts a run on stand-in images together."""
    monkeypatch.setattr("fedprophet.data.cifar10.RECORDS", RECORDS)

    def make(preset: str, *overrides: str) -> Session:
        dataset = preset.partition("-")[0]
        settings = [f"data.root={images[dataset]}", *OF_THE_STAND_IN[dataset], *overrides]
        return assemble(load_config(preset, settings))

    return make


def _slow(preset, *methods):
    return [pytest.param(preset, method, marks=pytest.mark.slow) for method in methods]


OTHERS = [method for method in METHODS if method != "fedprophet"]
# The unbalanced presets differ from the balanced ones in their fleet alone.
PLAYED = [
    *((preset, "fedprophet") for preset in SMALL),
    *(("cifar10-balanced-small", method) for method in OTHERS if method not in ("feddrop", "fedrolex")),
    *_slow("cifar10-balanced-small", "feddrop", "fedrolex"),
    *_slow("caltech256-balanced-small", *OTHERS),
]


@pytest.mark.parametrize(("preset", "method"), PLAYED)
def test_two_rounds_of_every_small_preset_and_of_every_method(preset, method, made):
    session = made(preset, *QUICK, f"method={method}")
    states, records = [session.method.initial()], []
    for _ in range(2):
        state, record = play_round(session.method.round(states[-1]), session.engine)
        states.append(state)
        records.append(record)
    assert [record["round"] for record in records] == [1, 2]
    assert [record["adversarial_training"] for record in records] == [False, True]
    cohorts = [[str(client) for client in session.world.clients.cohort(number)] for number in (1, 2)]
    assert [sorted(record["times"]) for record in records] == cohorts
    assert all(time["computation_s"] > 0 for record in records for time in record["times"].values())
    assert all(0 <= records[1][name] <= 1 for name in ("clean", "adversarial"))
    trained = [session.method.exported(state, session.world.initial_layers) for state in (states[0], states[-1])]
    assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in trained[1].values())
    assert any(not torch.equal(before, trained[1][name]) for name, before in trained[0].items())


def test_the_best_preset_warms_up_once_and_begins_every_stage_with_the_same_alpha(made):
    narrow = ("model.options.width=4", "memory.budget=50%", "perturbation.every=1")
    session = made("cifar10-balanced-best", *QUICK, *narrow, "evaluate.every=1")
    assert len(session.world.modules) == 3
    state, records = session.method.initial(), []
    while not session.method.finished(state):
        state, record = play_round(session.method.round(state), session.engine)
        records.append(record)
    assert [record["adversarial_training"] for record in records] == [False, True, True, True, True, True]
    assert [record["alpha"] for record in records[::2]] == [None, 0.4, 0.4]


@pytest.mark.parametrize("preset", SMALL)
def test_a_small_preset_has_several_modules_and_clients_of_unlike_memory(preset, made):
    session = made(preset, "population.clients=8", "population.cohort=2", "evaluate.clients=2", "measure.clients=2")
    whole, modules = session.world.cost.total_memory, session.world.modules
    assert 3 <= len(modules) <= 7
    # With a share of the devices' memory that shrank with the model, some clients hold all of it and some do not.
    pool, share = load_pool(session.config.fleet.pool), session.config.fleet.memory_share
    assert min(device.memory for device in pool.devices) * share < whole
    assert max(device.memory for device in pool.devices) * share > whole


def test_the_full_preset_cuts_vgg16_as_the_paper_does(made):
    session = made("cifar10-balanced", "population.clients=10")
    modules = session.world.modules
    assert session.world.cost.total_memory == 301_663_096
    assert [module.memory for module in modules] == [
        55_790_456,
        46_090_872,
        50_432_632,
        34_685_560,
        33_112_696,
        59_345_528,
        36_137_080,
    ]
    assert session.budget == 60_000_000


def test_the_full_preset_cuts_resnet34_as_the_paper_does():
    config = load_config("caltech256-unbalanced")
    model = build(config.model.name, (3, 224, 224), 256)
    cost = cost_of(chain_of(model), (3, 224, 224), config.train.batch, 256, config.train.copies)
    modules = partition(cost, parse_budget(config.memory.budget, cost.total_memory))
    assert cost.total_memory == 1_130_521_344
    assert [round(module.memory / 1e6, 2) for module in modules] == [
        148.65,
        130.16,
        130.16,
        197.93,
        221.58,
        206.54,
        203.97,
    ]


@pytest.mark.slow
def test_the_full_family_of_vgg16_is_that_of_the_paper(made):
    session = made("cifar10-unbalanced", "population.clients=10", "method=feddf", "distillation.public=4")
    memory = [architecture.cost.total_memory for architecture in session.world.family.values()]
    assert len(memory) == 4
    assert memory == sorted(memory)
    # cnn3: 81,162 parameters, and the inputs of two convolutions, two norm layers and the linear one.
    assert memory[0] == 4 * (3 * 81_162 + 64 * (3 * 32 * 32 + 2 * 64 * 32 * 32 + 128 * 16 * 16 + 512))
    assert memory[0] <= session.budget < memory[1]
    assert memory[-1] == 301_663_096
