"""Settings that were asked for and change nothing: they are noted, and it is true that they change nothing."""

import pytest
import torch
from torch import nn

from fedprophet.cascade.atoms import explicit_chain
from fedprophet.cascade.norms import statistics_names
from fedprophet.config.config import Config
from fedprophet.config.load import PRESETS, load_config, parse_config
from fedprophet.config.sections import NormSettings
from fedprophet.data.dataset import from_tensors
from fedprophet.methods import METHODS, reads
from fedprophet.runs.idle import doubtful_notes, idle_notes
from fedprophet.runs.run import reopen, start
from fedprophet.runs.session import assemble

QUICK = {"rounds": 2, "train.iterations": 2, "attack.steps": 1, "attack.feature_steps": 1, "evaluate.steps": 1}
QUICK |= {"train.warmup": 0, "measure.steps": 1, "evaluate.clients": 2, "distillation.family": ["vgg-small"]}
QUICK |= {"distillation.iterations": 1, "measure.clients": 2}
JFAT = {**QUICK, "method": "jfat"}
ONE_MODULE = {**QUICK, "memory.budget": "100%"}


def notes(config, **parts):
    return list(idle_notes(assemble(config, **parts).world))


# Each line: what the run has, the keys that are idle in it with another value for each, and what makes them so.
CIRCUMSTANCES = {
    "a round": (JFAT, {"aggregate.horizon": 1}, "a single round, which is its own mean"),
    "99 % of two": (JFAT, {"aggregate.horizon": "99%"}, "rounds = 2, of which it is fewer than two"),
    "a round of ramp": (JFAT, {"attack.ramp": 1}, "a single round to grow in, which meets the whole attack"),
    "30 % of two": (JFAT, {"attack.ramp": "30%"}, "rounds = 2, of which it is less than one"),
    "a round of ramp within the gate": (
        {**QUICK, "convergence.gate": 1},
        {"attack.ramp": "60%"},
        "a single round to grow in, which meets the whole attack",
    ),
    "no calibration": (JFAT, {"train.smoothing": 7.0}, 'train.calibration = "none"'),
    "no warm-up": (QUICK, {"train.warmup_stages": "first"}, "train.warmup = 0"),
    "one iteration": ({**JFAT, "train.iterations": 1}, {"train.proximal": 0.5}, "train.iterations = 1"),
    "not frozen": ({**JFAT, "norm.layers": "shared"}, {"norm.frozen_after": 1}, 'norm.layers = "shared"'),
    "frozen after the only round": (
        {**JFAT, "rounds": 1, "norm.layers": "frozen"},
        {"norm.frozen_after": "60%"},
        "rounds = 1",
    ),
    "no own layers": ({**JFAT, "norm.layers": "shared"}, {"norm.newcomers": "average"}, 'norm.layers = "shared"'),
    "no refresh": (JFAT, {"norm.refresh_layers": "in-turn", "norm.refresh_clients": 2}, 'norm.refresh = "none"'),
    "alpha stays": (
        {**QUICK, "perturbation.enabled": False},
        {
            "perturbation.restart": "last",
            "perturbation.change": 0.2,
            "perturbation.threshold": 0.2,
            "perturbation.every": 2,
            "perturbation.counted_from": "warmup",
            "perturbation.window": 2,
            "perturbation.floor": 0.1,
            "convergence.patience_after": "alpha",
        },
        "perturbation.enabled = false",
    ),
    "no later modules": (
        {**QUICK, "assignment.enabled": False},
        {"assignment.heads": "passed"},
        "assignment.enabled = false",
    ),
    "the mean": (JFAT, {"clip.norm": 0.001, "trimmed_mean.trim": 0.4}, 'aggregate.rule = "mean"'),
    "evenly": (
        {**JFAT, "shards.kind": "iid"},
        {"shards.classes_per_client": 3, "shards.iid_fraction": 0.5, "shards.concentration": 9.0},
        'shards.kind = "iid"',
    ),
    "apps": ({**JFAT, "fleet.performance": "apps"}, {"fleet.performance_floor": 0.9}, 'fleet.performance = "apps"'),
    "no attack": (
        {**JFAT, "attack.steps": 0},
        {"attack.ramp": 1, "train.weighting": "boundary"},
        "attack.steps = 0",
    ),
    "an attack that cannot move": (
        {**JFAT, "attack.radius": 0.0},
        {"attack.ramp": 1, "train.weighting": "boundary"},
        "attack.radius = 0",
    ),
    "no module attacked": (
        {**QUICK, "attack.steps": 0, "attack.feature_steps": 0},
        {"train.weighting": "boundary"},
        "attack.steps = 0 and attack.feature_steps = 0",
    ),
    "features that cannot be moved": (
        {**QUICK, "attack.radius": 0.0},
        {"train.weighting": "boundary"},
        "attack.radius = 0",
    ),
    "one module, no attack": (
        {**ONE_MODULE, "attack.steps": 0},
        {"train.weighting": "boundary"},
        "attack.steps = 0",
    ),
    "one module": (
        ONE_MODULE,
        {
            "perturbation.start": 0.9,
            "assignment.heads": "passed",
            "convergence.patience_after": "alpha",
            "train.head_gradients": "summed",
            "train.strong_convexity": 1.0,
        },
        'memory.budget = "100%", by which the model is one module',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_idle_keys_are_noted_and_change_nothing(name, tiny, play_in_memory, same_tensors):
    has, idle, reason = CIRCUMSTANCES[name]
    asked = tiny({**has, **idle})
    (note,) = [note for note in notes(asked) if note.endswith(f"no effect with {reason}")]
    assert all(f"{key} = " in note for key in idle), "all in one line"
    without = [note for note in notes(tiny(has)) if any(key in note for key in idle)]
    assert without == [], "nobody asked"
    ours, theirs = play_in_memory(asked), play_in_memory(tiny(has))
    assert ours.records == theirs.records
    assert same_tensors(ours.states[-1].model, theirs.states[-1].model)


@pytest.mark.parametrize(
    ("has", "key"),
    [
        ({**JFAT, "train.calibration": "labels"}, {"train.smoothing": 7.0}),
        ({**JFAT, "norm.layers": "frozen"}, {"norm.frozen_after": 1}),
        ({**JFAT, "norm.layers": "statistics-local"}, {"norm.newcomers": "initial"}),
        ({**JFAT, "norm.refresh": "clean"}, {"norm.refresh_clients": 2}),
        ({**JFAT, "aggregate.rule": "clip"}, {"clip.norm": 0.001}),
        (QUICK, {"perturbation.floor": 0.1}),
        (JFAT, {"data.mirror": True}),
        (JFAT, {"data.shift": 1}),
        (JFAT, {"aggregate.horizon": 2}),
        (QUICK, {"attack.ramp": 1}),
        (JFAT, {"train.weighting": "boundary"}),
        ({**QUICK, "attack.steps": 0}, {"train.weighting": "boundary"}),
        ({**JFAT, "train.iterations": 1, "attack.steps": 0}, {"train.consistency": 1.0}),
    ],
)
def test_keys_that_do_something_are_not_noted(has, key, tiny):
    assert notes(tiny({**has, **key})) == []


OTHERS = {
    "perturbation.enabled": False,
    "perturbation.start": 0.9,
    "perturbation.restart": "last",
    "perturbation.change": 0.2,
    "perturbation.threshold": 0.2,
    "perturbation.every": 2,
    "perturbation.counted_from": "warmup",
    "perturbation.window": 2,
    "perturbation.floor": 0.1,
    "assignment.enabled": False,
    "assignment.heads": "passed",
    "measure.steps": 3,
    "measure.clients": 3,
    "convergence.gate": 1,
    "convergence.patience": 1,
    "convergence.patience_after": "alpha",
    "convergence.weight": 3.0,
    "memory.model": "measured",
    "norm.refresh_after": "stage",
    "train.head_gradients": "summed",
    "train.warmup_stages": "first",
    "train.strong_convexity": 1.0,
    "attack.feature_steps": 3,
    "evaluate.before_gate": 2,
    "distillation.family": ["vgg-small"],
    "distillation.public": 7,
    "distillation.iterations": 5,
    "distillation.learning_rate": 0.5,
    "distillation.weight_decay": 0.5,
    "distillation.norm_layers": "kept",
    "distillation.diversity": 0.5,
    "propagation.temperature": 3.0,
}
"""Another value for every key that only some methods read."""


def test_other_values_are_there_for_every_key_that_only_some_methods_read():
    keys = [f"{name}.{key}" for name, table in Config().tables() for key in type(table).model_fields]
    assert {key for key in keys if not all(reads(method, key) for method in METHODS)} == set(OTHERS)
    for method in METHODS:
        assert any(not reads(method, key) for key in OTHERS)


@pytest.mark.parametrize("method", METHODS)
def test_keys_that_a_method_does_not_read_change_nothing(method, tiny, play_in_memory, same_tensors):
    """Statistics are shared and measured anew, where the method allows it, so that they could be after a stage."""
    shares = {"norm.layers": "shared", "norm.refresh": "clean"} if method != "fedrbn" else {}
    has = {**QUICK, **shares, "method": method}
    more = {key: value for key, value in OTHERS.items() if not reads(method, key)}
    ours, theirs = (play_in_memory(tiny({**has, **changes})) for changes in (more, {}))
    assert ours.records == theirs.records
    assert same_tensors(ours.states[-1].model, theirs.states[-1].model)


@pytest.mark.parametrize("method", METHODS)
def test_a_command_that_is_repeated_with_every_method_goes_through(method):
    """What a method does not read is noted, in one line."""
    changes = ["perturbation.start=0.5", "distillation.diversity=0.5", "norm.refresh_after=stage", "norm.refresh=clean"]
    changes += ["model.options.width=4", *(["norm.layers=shared"] if method != "fedrbn" else [])]
    config = load_config("digits", [f"method={method}", *changes])
    found = notes(config)
    unread = [key for key in config.chosen_keys() if not reads(method, key)]
    assert len(found) == bool(unread)
    for note in found:
        assert note.endswith(f" no effect with the method {method}")
        assert all(f"{key} = " in note for key in unread)


def test_a_mean_over_rounds_does_not_go_with_layers_that_stay_with_clients():
    asked = {"aggregate.horizon": 2, "norm.layers": "local"}
    note = (
        "aggregate.horizon = 2 with norm.layers = \"local\": clients' own norm layers have seen the last round's model "
        'and not the mean that is judged. norm.layers = "shared" goes with it'
    )
    others = ({**asked, "norm.layers": "shared"}, {"norm.layers": "local"})
    for changes, expected in ((asked, [note]), *((other, []) for other in others)):
        words = [f"{key}={value}" for key, value in {"method": "jfat", **changes}.items()]
        assert list(doubtful_notes(assemble(load_config("digits", words)).world)) == expected


@pytest.mark.parametrize(
    ("clients", "without"),
    # 1437 samples: of 1437 clients with one each nobody holds one out; 359 clients have four each, of which 0.8 is one.
    [(5000, "5,000"), (1437, "1,437"), (359, None), (20, None)],
)
def test_clients_too_small_to_be_judged_are_counted(clients, without):
    config = load_config("digits", [f"population.clients={clients}", "shards.kind=iid"])
    expected = (
        f"1,437 training samples for {clients:,} clients: {without} of them hold no held-out sample, so that they have "
        "no accuracy of their own. Fewer population.clients or a larger data.validation change that"
    )
    assert list(doubtful_notes(assemble(config).world)) == ([expected] if without else [])


# Where a value comes from --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_nobody_has_chosen_what_a_preset_says(preset, method):
    assert load_config(preset, [f"method={method}"]).chosen_keys() == {}


def test_what_counts_as_chosen(tmp_path):
    assert load_config("digits", ["train.batch=8", "model.options.width=4", "data.mirror=false"]).chosen_keys() == {
        "train.batch": 8,
        "model.options": {"width": 4},
    }, "no preset's key, and no default"
    file = tmp_path / "mine.toml"
    file.write_text('method = "jfat"\n[train]\nbatch = 8\nmomentum = 0.9\n[perturbation]\nstart = 0.7\n')
    assert load_config(file).chosen_keys() == {"train.batch": 8}, "a file may have other methods' keys"
    assert load_config(file, ["perturbation.floor=0.1"]).chosen_keys() == {"train.batch": 8, "perturbation.floor": 0.1}
    assert load_config(file, ["method=fedprophet"]).chosen_keys() == {"train.batch": 8, "perturbation.start": 0.7}
    assert parse_config({"train": {"batch": 8}}).chosen_keys() == {"train.batch": 8}
    assert Config(norm=NormSettings(newcomers="initial")).chosen_keys() == {"norm.newcomers": "initial"}


def test_marking_what_was_chosen_changes_no_value():
    config = load_config("cifar10-balanced", ["train.batch=8"])
    assert config == Config.model_validate(config.model_dump())
    assert hash(config.train) == hash(Config.model_validate(config.model_dump()).train)


def test_a_preset_that_is_changed_is_not_blamed_for_what_the_change_makes_idle(tiny):
    """The paper's presets name `norm.newcomers`; who shares the layers has not asked for that."""
    assert load_config("cifar10-balanced").norm.newcomers == "initial"
    assert "norm.newcomers" not in load_config("cifar10-balanced", ["norm.layers=shared"]).chosen_keys()


def test_a_run_says_it_when_it_is_started_and_opens_again_without(tiny, tmp_path):
    config = tiny({**JFAT, "norm.layers": "shared", "norm.newcomers": "initial"})
    run = start(config, tmp_path / "run")
    assert run.notes == ('norm.newcomers = "initial" has no effect with norm.layers = "shared"',)
    assert reopen(tmp_path / "run").notes == ()


# Models --------------------------------------------------------------------------------------------------------------


def test_a_model_without_norm_statistics_is_named(tiny):
    changes = {**JFAT, "model.name": "vit", "model.options": {}}
    found = notes(tiny({**changes, "norm.layers": "frozen", "norm.frozen_after": 1, "norm.refresh": "clean"}))
    reason = "the model vit, which has no norm layers that keep statistics"
    assert found == [
        f'norm.layers = "frozen", norm.frozen_after = 1, norm.refresh = "clean" have no effect with {reason}'
    ]
    assert notes(tiny({**changes, "norm.newcomers": "average"})) == [
        f'norm.newcomers = "average" has no effect with {reason}'
    ]
    assert notes(tiny(changes)) == []


class Buffered(nn.Module):
    """Has a buffer, which stays with the client wherever norm layers are."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm2d(1), nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.last((self.norm(x) * self.scale).flatten(1))


def test_newcomers_who_have_buffers_of_their_own_begin_with_something(tiny):
    images, labels = torch.rand(40, 1, 2, 2), torch.arange(40) % 2
    changes = {**JFAT, "shards.kind": "iid", "population.clients": 4}
    config = tiny({**changes, "norm.layers": "shared", "norm.newcomers": "average"})
    assert notes(config, model=Buffered(), dataset=from_tensors(images, labels, images, labels)) == []


class Counting(nn.Module):
    """Has no norm layer, and a buffer that every client's training changes by its own images."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.register_buffer("brightest", torch.ones(1))

    def forward(self, x):
        if self.training:
            self.brightest.copy_(x.amax().detach())
        return self.last(x.flatten(1) / self.brightest)


def test_where_newcomers_begin_with_the_average_of_other_buffers_norm_layers_is_not_idle(tiny):
    """`norm.newcomers = "auto"` asks `norm.layers`; a value that is given does not."""
    images, labels = torch.rand(40, 1, 2, 2), torch.arange(40) % 2
    dataset = from_tensors(images, labels, images, labels)
    changes = {**JFAT, "shards.kind": "iid", "population.clients": 4, "norm.layers": "statistics-local"}

    def found(more):
        chain = explicit_chain([("all", Counting())])
        world = assemble(tiny({**changes, **more}), model=chain, dataset=dataset).world
        return world.gathers_layers, [note.split(" = ")[0] for note in idle_notes(world)]

    assert found({}) == (True, [])
    assert found({"norm.layers": "shared"}) == (False, ["norm.layers"])
    assert found({"norm.newcomers": "average"}) == (True, ["norm.layers"])


def test_norm_layers_of_smaller_models_in_a_family_count(tiny):
    """Those of the family are shared or not, whatever the run's own model has; measured anew are that model's alone."""
    changes = {**QUICK, "method": "feddf", "model.name": "vit", "model.options": {}, "norm.layers": "shared"}
    changes["norm.refresh"] = "clean"
    family = {**changes, "distillation.family": ["cnn3", "vit"]}
    world = assemble(tiny(family)).world
    assert statistics_names(world.family["cnn3"].chain)
    assert not world.family["cnn3"].chain.local(), "shared, as asked"
    (note,) = idle_notes(world)
    assert note.startswith('norm.refresh = "clean" has no effect with the model vit')
