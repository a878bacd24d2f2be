"""The round in which clients measure norm statistics anew: what is pooled, what is refused, and where it ends up."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import fedprophet
from fedprophet.cascade.norms import norm_modules, norm_names, statistics_names
from fedprophet.data.dataset import from_tensors
from fedprophet.messages.answers import Refreshed
from fedprophet.messages.codec import decode, encode
from fedprophet.messages.tasks import Refresh
from fedprophet.messages.values import SERVER
from fedprophet.methods import METHODS
from fedprophet.methods.refresh import Renewal
from fedprophet.runs.evaluator import Evaluator
from fedprophet.runs.export import exported_model
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import play_round

SMALL = {"rounds": 1, "population.cohort": 3, "train.iterations": 1, "train.warmup": 0, "attack.steps": 1}
SMALL |= {"attack.feature_steps": 1, "evaluate.steps": 1, "evaluate.clients": 2, "measure.steps": 1}
SMALL |= {"memory.budget": "60%", "distillation.family": ["vgg-small"], "distillation.iterations": 1}
SMALL |= {"norm.refresh": "clean"}
SUB_NETWORKS = ("heterofl", "feddrop", "fedrolex")
SERVERS_MODEL = ("feddf", "fedet")
CHOICES = [(m, c) for m in METHODS for c in ("local", "shared", "statistics-local") if (m, c) != ("fedrbn", "shared")]


def asked(exchanges, kind="refresh"):
    """Return the passes of a round, each with its tasks and answers."""
    return [(tasks, answers) for tasks, answers in exchanges if tasks and tasks[0].kind == kind]


def pooled_by_hand(answers, name, weights=None):
    """Return the mean, or the variance of all samples together, of what clients measured."""
    q = torch.tensor(weights or [a.weight for a in answers], dtype=torch.float64)[:, None]
    mean = name.replace("running_var", "running_mean")
    means = torch.stack([a.statistics[mean].double() for a in answers])
    centre = (q * means).sum(0) / q.sum()
    if name == mean:
        return centre
    wide = torch.stack([a.statistics[name].double() for a in answers]) + (means - centre).square()
    return (q * wide).sum(0) / q.sum()


def close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


# Every method --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "layers"), CHOICES)
def test_the_exported_model_has_the_pooled_statistics_of_all_clients(method, layers, tiny, fleet, play_in_memory):
    config = tiny({**SMALL, "method": method, "norm.layers": layers, **fleet(10**6, 10**15)})
    played = play_in_memory(config)
    session, state, record = played.session, played.states[-1], played.records[-1]
    trained, chain = played.states[-2], session.world.chain
    assert session.method.finished(state)
    assert not session.method.finished(trained)
    own = layers != "shared" and method in SUB_NETWORKS
    assert record == {
        "round": trained.round + 1,
        "refresh": "clean",
        "times": {},
        "dropped": {},
        "refreshed": sorted(statistics_names(chain)),
        **({"renewed": 6} if own else {}),
    }
    passes = asked(played.exchanges[-1])
    assert len(passes) == 1 + own
    tasks, answers = passes[-1]
    assert [task.client for task in tasks] == list(range(6))
    whole = exported_model(session, state, session.engine)
    assert set(whole) == set(chain.tensors)
    for name in statistics_names(chain):
        close(whole[name], pooled_by_hand(answers, name))
    before = exported_model(session, trained, session.engine)
    rest = set(whole) - set(statistics_names(chain))
    assert all(torch.equal(whole[name], before[name]) for name in rest), "nothing else has changed"
    assert all(torch.equal(tasks[0].parameters[name], before[name]) for name in before), "that model was measured"
    if layers == "shared" or method in SERVERS_MODEL:
        assert all(torch.equal(state.model[name], whole[name]) for name in statistics_names(chain))
        assert state.norm_layers == {}
    else:
        assert set(state.norm_layers) == set(norm_names(chain))
        assert all(torch.equal(state.model[name], trained.model[name]) for name in trained.model)


def inputs_of(chain, images):
    """Return what each norm layer reads in evaluation mode."""
    read = {}
    hooks = [
        norm.register_forward_pre_hook(lambda _, inputs, name=name: read.__setitem__(name, inputs[0]))
        for name, norm in norm_modules(chain).items()
    ]
    with torch.no_grad(), chain.mode(0, None, training=False):
        chain.run(images)
    for hook in hooks:
        hook.remove()
    return read


@pytest.mark.parametrize("method", SUB_NETWORKS)
@pytest.mark.parametrize("layers", ["local", "statistics-local"])
def test_clients_of_sub_network_methods_renew_their_own_statistics(method, layers, tiny, fleet, play_in_memory):
    """A client's are those of its own images, behind its own affine layers, or those that newcomers begin with.

    All its images are one batch, so that layers that normalise by their batch do what they do with what was measured.
    """
    settings = {**SMALL, "method": method, "norm.layers": layers, "norm.newcomers": "average", "evaluate.batch": 400}
    played = play_in_memory(tiny({**settings, "train.iterations": 4, **fleet(10**6)}))
    session, state = played.session, played.states[-1]
    (tasks, answers), _ = asked(played.exchanges[-1])
    assert all(task.keeps for task in tasks)
    assert all(answer.statistics == {} for answer in answers), "they stay with the client"
    chain = session.world.chain
    assert not all(played.layers[-2].values()), "somebody has not trained"
    for client, own in played.layers[-1].items():
        images = session.population.client_data(client).train
        images = images.fetch(torch.arange(len(images)))
        assert len(images) <= session.config.evaluate.batch, "one batch"
        chain.load({**state.starting, **state.model, **own})
        for name, read in inputs_of(chain, images).items():
            rows = read.double().transpose(0, 1).flatten(1)
            torch.testing.assert_close(own[f"{name}.running_mean"].double(), rows.mean(1), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                own[f"{name}.running_var"].double(), rows.var(1, correction=0), rtol=1e-4, atol=1e-5
            )
        for each, value in played.layers[-2][client].items():
            assert each in statistics_names(chain) or torch.equal(own[each], value)
    found = Evaluator(session, state, exported_model(session, state, session.engine), session.engine).measure(
        ("clean",)
    )
    assert len(found["clean"].clients) == 2


def test_the_clients_own_layers_of_other_methods_stay(tiny, play_in_memory, same_tensors):
    played = play_in_memory(tiny({**SMALL, "method": "jfat"}))
    assert all(same_tensors(own, played.layers[-1][client]) for client, own in played.layers[-2].items())


def test_layer_after_layer_each_behind_those_already_renewed(tiny, play_in_memory):
    played = play_in_memory(
        tiny({**SMALL, "method": "jfat", "norm.layers": "shared", "norm.refresh_layers": "in-turn"})
    )
    chain = played.session.world.chain
    passes, layers = asked(played.exchanges[-1]), dict.fromkeys(n.rpartition(".")[0] for n in statistics_names(chain))
    assert [tasks[0].layer for tasks, _ in passes] == list(layers)
    known = played.states[-2].model
    for tasks, answers in passes:
        assert all(torch.equal(value, known[name]) for name, value in tasks[0].parameters.items())
        names = [f"{tasks[0].layer}.{ending}" for ending in ("running_mean", "running_var")]
        assert all(list(answer.statistics) == names for answer in answers)
        known = {**known, **{name: pooled_by_hand(answers, name).float() for name in names}}
        for name in names:
            close(played.states[-1].model[name], pooled_by_hand(answers, name))
            known[name] = played.states[-1].model[name]


def test_only_some_clients_measure(tiny, play_in_memory):
    played = play_in_memory(tiny({**SMALL, "method": "jfat", "norm.refresh_clients": 2}))
    ((tasks, _),) = asked(played.exchanges[-1])
    assert len(tasks) == 2


def test_images_are_attacked_where_that_is_asked_for(tiny, play_in_memory):
    played = play_in_memory(
        tiny({**SMALL, "method": "jfat", "norm.refresh": "attacked", "train.calibration": "labels"})
    )
    ((tasks, _),) = asked(played.exchanges[-1])
    assert {(task.threat, task.calibration) for task in tasks} == {(played.session.world.image_threat(1), 1.0)}


def test_without_norm_layers_nobody_is_asked(tiny, play_in_memory):
    images, labels = torch.rand(40, 1, 2, 2), torch.arange(40) % 2
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    config = tiny({**SMALL, "method": "jfat", "population.clients": 4, "shards.kind": "iid"})
    session = assemble(config, model=model, dataset=from_tensors(images, labels, images, labels))
    state, _ = play_round(session.method.round(session.method.initial()), session.engine)
    nobody = type("Nobody", (), {"map": lambda self, tasks: iter(list(tasks) and pytest.fail("was asked"))})()
    refreshed, record = play_round(session.method.round(state), nobody)
    assert session.method.finished(refreshed)
    assert record["refreshed"] == []
    assert set(session.method.layers_of(refreshed).values()) == {"none that keep statistics"}


class Buffered(nn.Module):
    """Has a buffer that is no norm layer's."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Linear(8, 2)
        self.register_buffer("scale", torch.full((2, 1, 1), 2.0))

    def forward(self, x):
        return self.last((self.norm(self.conv(x)) * self.scale).flatten(1))


@pytest.mark.parametrize("layers", ["local", "shared", "statistics-local", "frozen"])
def test_other_buffers_are_exported_as_ever(layers, tiny, tmp_path):
    images, labels = torch.rand(40, 1, 2, 2), torch.arange(40) % 2
    changes = {"method": "jfat", "population.clients": 4, "shards.kind": "iid", "norm.layers": layers, "rounds": 2}
    config = tiny({**SMALL, **changes})
    data = from_tensors(images, labels, images, labels)
    run = fedprophet.train(config, model=Buffered(), data=data, out=tmp_path / "run")
    whole = fedprophet.storage.files.tensors_from_bytes((tmp_path / "run" / "model.safetensors").read_bytes())
    assert set(whole) == set(Buffered().state_dict())
    assert whole["scale"].flatten().tolist() == [2.0, 2.0]
    assert run.results["global"]["clean"]["samples"] == 40


# Bad answers ---------------------------------------------------------------------------------------------------------

JFAT = {**SMALL, "method": "jfat", "norm.layers": "shared", "shards.kind": "iid"}
LIAR = 3


def changed_statistics(change):
    """Return what changes every tensor of a client's answer, given its name and value."""
    return lambda answer: replace(answer, statistics={n: change(n, v) for n, v in answer.statistics.items()})


def without_one(answer):
    return replace(answer, statistics=dict(list(answer.statistics.items())[1:]))


BAD = {
    "shape": (changed_statistics(lambda n, v: v[:1]), "instead of"),
    "type": (changed_statistics(lambda n, v: v.long()), "has type"),
    "nan": (changed_statistics(lambda n, v: v * math.nan), "is not finite"),
    "infinite": (changed_statistics(lambda n, v: v + math.inf), "is not finite"),
    "negative": (changed_statistics(lambda n, v: v - 1e6 if n.endswith("var") else v), "is negative"),
    "foreign": (lambda a: replace(a, statistics={**a.statistics, "w": torch.ones(1)}), "that the model does not have"),
    "lacking": (without_one, "it did not send layers that were asked for"),
    "nothing": (lambda a: replace(a, statistics={}), "it did not send layers that were asked for"),
    "no weight": (lambda a: replace(a, weight=0.0), "its weight is 0.0"),
    "a weight of nan": (lambda a: replace(a, weight=math.nan), "its weight is nan"),
    "a weight below a sample": (lambda a: replace(a, weight=0.25), "its weight is 0.25"),
    "a negative weight": (lambda a: replace(a, weight=-3.0), "its weight is -3.0"),
}


@pytest.fixture(scope="module")
def honest(tiny, play_in_memory):
    return play_in_memory(tiny(JFAT))


@pytest.mark.parametrize("fault", BAD)
def test_answers_that_cannot_be_pooled_are_dropped_and_named(fault, honest, tiny, play_in_memory, poisoned):
    poison, reason = BAD[fault]
    played = play_in_memory(tiny(JFAT), poisoned(poison, [2], [LIAR], "refresh"))
    dropped = played.records[-1]["dropped"]
    assert list(dropped) == [str(LIAR)]
    assert reason in dropped[str(LIAR)]
    ((_, answers),) = asked(honest.exchanges[-1])
    others = [answer for answer in answers if answer.client != LIAR]
    for name in statistics_names(played.session.world.chain):
        close(played.states[-1].model[name], pooled_by_hand(others, name))


def test_a_huge_claim_of_samples_is_cut_to_the_shard(honest, tiny, play_in_memory, poisoned):
    """The server knows the shard: all samples of it, where honest clients measure on the training part."""
    poison = partial(replace, weight=2.0**53)
    played = play_in_memory(tiny(JFAT), poisoned(poison, [2], [LIAR], "refresh"))
    assert played.records[-1]["capped"] == {str(LIAR): 2.0**53}
    ((_, answers),) = asked(honest.exchanges[-1])
    size = float(played.session.population.samples(LIAR))
    weights = [size if answer.client == LIAR else answer.weight for answer in answers]
    for name in statistics_names(played.session.world.chain):
        close(played.states[-1].model[name], pooled_by_hand(answers, name, weights))


@pytest.mark.parametrize("number", ["weight", "samples"])
@pytest.mark.parametrize("lie", [0, -1, 1, 2**53, 2**60, 1e308, 5e-324, math.inf, math.nan])
def test_no_number_that_a_client_claims_spoils_the_statistics(number, lie, honest):
    method, state = honest.session.method, honest.states[-2]
    ((_, answers),) = asked(honest.exchanges[-1])
    lying = [replace(answer, **{number: lie}) if answer.client == LIAR else answer for answer in answers]
    engine = type("Said", (), {"map": lambda self, tasks: iter(lying)})()
    found, record = play_round(method.round(state), engine)
    assert list(record["dropped"]) in ([], [str(LIAR)])
    for name in statistics_names(honest.session.world.chain):
        values = torch.stack([answer.statistics[name] for answer in answers])
        if name.endswith("running_mean"):
            assert bool((found.model[name] >= values.amin(0) - 1e-6).all())
            assert bool((found.model[name] <= values.amax(0) + 1e-6).all())
        assert bool(torch.isfinite(found.model[name]).all())


@pytest.mark.parametrize("rule", ["median", "trimmed-mean"])
@pytest.mark.parametrize("lie", [lambda n, v: v + 20, lambda n, v: v * 50 if n.endswith("var") else v - 20])
def test_robust_rules_bound_what_a_client_can_do(rule, lie, honest, tiny, play_in_memory, poisoned):
    """The joined mean lies among those of the honest, and the variance among theirs about it."""
    wrap = poisoned(changed_statistics(lie), [2], [LIAR], "refresh")
    played = play_in_memory(tiny({**JFAT, "aggregate.rule": rule}), wrap)
    assert played.records[-1]["dropped"] == {}
    ((_, answers),) = asked(played.exchanges[-1])
    others = [answer.statistics for answer in answers if answer.client != LIAR]
    model = played.states[-1].model
    for name in statistics_names(played.session.world.chain):
        values = torch.stack([statistics[name] for statistics in others])
        if name.endswith("running_mean"):
            slack = 1e-6
        else:
            means = torch.stack([statistics[name.replace("running_var", "running_mean")] for statistics in others])
            slack = (means.amax(0) - means.amin(0)).square() + 1e-6
        assert bool((model[name] >= values.amin(0) - 1e-6).all()), name
        assert bool((model[name] <= values.amax(0) + slack).all()), name


@pytest.mark.parametrize("rule", ["mean", "clip", "median", "trimmed-mean"])
@pytest.mark.parametrize("lie", [1e20, 3e38])
def test_statistics_out_of_all_proportion_are_dropped_under_every_rule(
    rule, lie, honest, tiny, play_in_memory, poisoned
):
    wrap = poisoned(changed_statistics(lambda n, v: torch.full_like(v, lie)), [2], [LIAR], "refresh")
    played = play_in_memory(tiny({**JFAT, "aggregate.rule": rule}), wrap)
    assert "times the median of all clients'" in played.records[-1]["dropped"][str(LIAR)]
    found = played.states[-1].model
    assert all(bool((found[name].abs() < 1e3).all()) for name in statistics_names(played.session.world.chain))


class Away:
    """An engine whose clients do not answer one kind of task."""

    def __init__(self, engine, kind):
        self.engine, self.kind = engine, kind

    def map(self, tasks):
        yield from self.engine.map([task for task in tasks if task.kind != self.kind])


@pytest.mark.parametrize("layers", ["local", "shared"])
@pytest.mark.parametrize("turn", ["together", "in-turn"])
def test_where_nobody_answers_the_statistics_stay_and_the_run_ends(layers, turn, tiny, play_in_memory):
    config = tiny({**JFAT, "norm.layers": layers, "norm.refresh_layers": turn})
    played = play_in_memory(config, lambda engine: Away(engine, "refresh"))
    session, (before, after) = played.session, played.states[-2:]
    assert session.method.finished(after)
    assert played.records[-1]["refreshed"] == []
    assert set(played.records[-1]["not_refreshed"]["layers"]) == set(norm_modules(session.world.chain))
    texts = session.method.layers_of(after)
    assert not [text for text in texts.values() if "measured anew on" in text]
    assert texts["global"].endswith("; at the end, statistics were not measured anew: too few usable answers")
    assert ("at the end" in texts["personalised"]) == (layers == "shared")
    whole, old = (exported_model(session, state, session.engine) for state in (after, before))
    assert all(torch.equal(whole[name], old[name]) for name in old)


def test_fewer_measurements_than_the_minimum_change_nothing(tiny, play_in_memory, poisoned):
    """Three of four clients' answers are needed, and two are of no use: the statistics stay."""
    config = tiny({**JFAT, "population.clients": 4, "aggregate.minimum": 3})
    useless = changed_statistics(lambda n, v: v * math.nan)
    played = play_in_memory(config, poisoned(useless, [2], [0, 1], "refresh"))
    record, (before, after) = played.records[-1], played.states[-2:]
    assert played.session.method.finished(after)
    layers = list(norm_modules(played.session.world.chain))
    assert (record["refreshed"], record["not_refreshed"]) == ([], {"layers": layers, "usable": 2, "minimum": 3})
    assert "too_few" not in record, "that is said of updates"
    assert after.renewal == Renewal((), tuple(layers))
    assert all(torch.equal(after.model[name], before.model[name]) for name in before.model)
    enough = play_in_memory(config, poisoned(useless, [2], [0], "refresh")).records[-1]
    assert enough["refreshed"] == sorted(statistics_names(played.session.world.chain))
    assert "not_refreshed" not in enough


class AwayFor(Away):
    """Whose clients answer no task about one norm layer."""

    def __init__(self, engine, layer):
        self.engine, self.layer = engine, layer

    def map(self, tasks):
        yield from self.engine.map([task for task in tasks if getattr(task, "layer", None) != self.layer])


def test_layers_that_nobody_measured_in_their_turn_are_named(tiny, play_in_memory):
    config = tiny({**JFAT, "norm.refresh_layers": "in-turn"})
    layers = list(norm_modules(assemble(config).world.chain))
    assert len(layers) > 2
    played = play_in_memory(config, lambda engine: AwayFor(engine, layers[1]))
    record, (before, after) = played.records[-1], played.states[-2:]
    assert record["not_refreshed"] == {"layers": [layers[1]], "usable": 0, "minimum": 1}
    assert after.renewal == Renewal((layers[0], *layers[2:]), (layers[1],))
    for name in statistics_names(played.session.world.chain):
        assert torch.equal(after.model[name], before.model[name]) == name.startswith(f"{layers[1]}.")
    texts = played.session.method.layers_of(after)
    assert texts["global"] == texts["personalised"]
    assert texts["global"].endswith(
        f"; at the end, statistics measured anew on clean images, but not those of {layers[1]} (too few usable answers)"
    )
    table, tensors = encode(after)
    assert decode(type(after), json.loads(json.dumps(table)), tensors).renewal == after.renewal


class AwayAtFirst(Away):
    """Some of whose clients do not renew their own statistics, and answer what is pooled."""

    def __init__(self, engine, away):
        self.engine, self.away = engine, away

    def map(self, tasks):
        yield from self.engine.map([t for t in tasks if not getattr(t, "keeps", False) or t.client not in self.away])


@pytest.mark.parametrize(
    ("away", "asked_clients", "text"),
    [
        ((), "all", "each client's own; at the end, statistics measured anew on clean images"),
        ((1, 4), "all", "each client's own; at the end, statistics measured anew on clean images by 4 of 6 clients"),
        ((), 2, "each client's own; at the end, statistics measured anew on clean images by 2 of 6 clients"),
        (range(6), "all", "each client's own; at the end, no client measured its statistics anew"),
    ],
)
def test_results_say_how_many_clients_renewed_their_own_statistics(away, asked_clients, text, tiny, play_in_memory):
    config = tiny({**SMALL, "method": "heterofl", "norm.refresh_clients": asked_clients})
    played = play_in_memory(config, lambda engine: AwayAtFirst(engine, away))
    texts = played.session.method.layers_of(played.states[-1])
    assert texts["personalised"] == text
    assert texts["global"].endswith("; at the end, statistics measured anew on clean images")


def test_clients_that_cannot_be_reached_for_their_layers_are_left_out(tiny, play_in_memory):
    """Nobody sends the layers it keeps: those of the untrained model are measured anew."""
    played = play_in_memory(tiny({**JFAT, "norm.layers": "local"}), rounds=1)
    session, state = played.session, played.states[-1]
    refreshed, _ = play_round(session.method.round(state), Away(session.engine, "report"))
    for name, value in refreshed.norm_layers.items():
        assert torch.equal(value, session.world.initial_layers[name]) == (
            name not in statistics_names(session.world.chain)
        )


def test_a_client_without_samples_does_not_count_and_is_no_trouble(honest, tiny, play_in_memory, poisoned):
    empty = partial(replace, samples=0, weight=0.0, statistics={})
    played = play_in_memory(tiny(JFAT), poisoned(empty, [2], [LIAR], "refresh"))
    assert played.records[-1]["dropped"] == {}
    ((_, answers),) = asked(honest.exchanges[-1])
    others = [answer for answer in answers if answer.client != LIAR]
    for name in statistics_names(played.session.world.chain):
        close(played.states[-1].model[name], pooled_by_hand(others, name))


# After a stage -------------------------------------------------------------------------------------------------------


def test_a_module_is_fixed_with_the_statistics_measured_after_its_stage(tiny, play_in_memory):
    settings = {**SMALL, "norm.layers": "shared", "norm.refresh_after": "stage", "norm.refresh": "attacked"}
    played = play_in_memory(tiny(settings))
    world, chain = played.session.world, played.session.world.chain
    assert len(world.modules) == 2
    assert [record.get("module") for record in played.records] == [1, 2, None]
    for number, module in enumerate(world.modules):
        names = [n for n in statistics_names(chain) if n in chain.shared(module.first, module.last)]
        ((tasks, answers),) = asked(played.exchanges[number])
        assert {(task.first, task.last, len(task.frozen)) for task in tasks} == {(module.first, module.last, number)}
        assert played.records[number]["refreshed"] == sorted(names)
        fixed = played.states[number + 1]
        for name in names:
            close(fixed.model[name], pooled_by_hand(answers, name))
        stored = world.frozen[fixed.fixed[number].digest]
        assert all(torch.equal(stored[name], fixed.model[name]) for name in names), "so it is frozen"
    ((tasks, _),) = asked(played.exchanges[0], "measure")
    assert all(torch.equal(tasks[0].parameters[n], played.states[1].model[n]) for n in tasks[0].parameters)
    ((tasks, answers),) = asked(played.exchanges[2])
    assert (tasks[0].first, tasks[0].last, tasks[0].frozen) == (0, len(chain), ())
    for name in statistics_names(chain):
        close(played.states[3].model[name], pooled_by_hand(answers, name))
        assert not torch.equal(played.states[3].model[name], played.states[2].model[name]) or name in str(names)


def test_after_the_run_modules_are_measured_as_one_model(tiny, play_in_memory):
    """Fixed modules have other statistics then; clients and server evaluate with the new ones, after a resume too."""
    config = tiny({**SMALL, "norm.layers": "shared"})
    played = play_in_memory(config)
    again = assemble(config)
    table, tensors = encode(played.states[-1])
    saved = decode(again.method.state, json.loads(json.dumps(table)), tensors)
    for session, state in ((played.session, played.states[-1]), (again, saved)):
        for client in (0, SERVER):
            task = session.method.evaluation_task(state, client, None)
            assert task.frozen
            held = {name: v for module in task.frozen for name, v in session.world.frozen[module.digest].items()}
            model = {**held, **task.parameters}
            assert all(torch.equal(model[name], value) for name, value in played.states[-1].model.items())


# Rounds --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", ["clean", "attacked"])
@pytest.mark.parametrize(("method", "layers"), [("jfat", "local"), ("heterofl", "local"), ("fedprophet", "shared")])
def test_the_round_that_is_repeated_after_a_stop_is_the_same(
    method, layers, images, tiny, resumed, tmp_path, play_in_memory, same_tensors
):
    """Even if clients have kept what they measured before the stop: an attack reads the statistics that they had."""
    config = tiny(
        {**SMALL, "method": method, "norm.layers": layers, "norm.newcomers": "average", "norm.refresh": images}
    )
    played = play_in_memory(config)
    session, state, record = resumed(config, tmp_path, len(played.records))
    assert record == played.records[-1]
    assert state.refreshed
    for part in ("model", "norm_layers", "starting"):
        assert same_tensors(getattr(state, part), getattr(played.states[-1], part))
    for client, own in played.layers[-1].items():
        stored = session.layers.get("backbone", client, session.method.timeline(state), state.round + 1)
        assert same_tensors(stored or {}, own)


def test_a_measurement_proves_no_model(honest):
    """The round that trains on from a model is what shows that it is sound; measuring its statistics does not."""
    before, after = honest.states[-2:]
    assert after.round == before.round + 1
    assert after.proven == before.proven


@pytest.mark.parametrize("kind", [Refresh, Refreshed])
def test_messages_have_all_their_fields(kind, honest):
    ((tasks, answers),) = asked(honest.exchanges[-1])
    table, tensors = encode(tasks[0] if kind is Refresh else answers[0])
    assert decode(kind, table, tensors).client == tasks[0].client
    for name in table:
        with pytest.raises(ValueError, match=f"lacks '{name}'"):
            decode(kind, {n: v for n, v in table.items() if n != name}, tensors)


def test_the_run_says_where_its_statistics_come_from(tiny):
    """Before the last round nothing was measured anew, and nothing is said of it."""
    texts = {}

    def said(**settings):
        method = assemble(tiny({**JFAT, "norm.layers": "local", "norm.refresh": "attacked", **settings})).method
        state = method.initial()
        assert "measured anew" not in str(method.layers_of(state))
        done = method.layers_of(replace(state, renewal=Renewal(("a",), (), own=6)))
        assert list(done) == ["personalised", "global"]
        return done["global"], done["personalised"]

    for method in ("jfat", "heterofl", "feddf"):
        texts[method] = said(method=method)
    measured = "statistics measured anew on attacked images"
    assert {m: tuple(measured in text for text in both) for m, both in texts.items()} == {
        "jfat": (True, False),
        "heterofl": (True, True),
        "feddf": (True, True),
    }
    assert measured in said(**{"norm.layers": "shared"})[1]


@pytest.mark.parametrize("harmless", [{"attack.steps": 0}, {"attack.radius": 0.0}])
def test_where_there_is_no_attack_images_are_clean_and_are_called_so(harmless, tiny, play_in_memory):
    played = play_in_memory(tiny({**JFAT, **harmless, "norm.refresh": "attacked"}))
    ((tasks, _),) = asked(played.exchanges[-1])
    assert {task.threat for task in tasks} == {None}
    assert played.records[-1]["refresh"] == "clean"
    said = played.session.method.layers_of(played.states[-1])["global"]
    assert said.endswith("; at the end, statistics measured anew on clean images")


def test_the_server_evaluates_what_was_pooled(honest):
    """Global accuracy by hand: the model with its new statistics on the test set."""
    session, state = honest.session, honest.states[-1]
    whole = exported_model(session, state, session.engine)
    found = Evaluator(session, state, whole, session.engine).measure(("clean",), of=("global",))["clean"]
    data, chain = session.population.client_data(SERVER).validation, session.world.chain
    chain.load(state.model)
    with torch.no_grad(), chain.mode(0, None, training=False):
        scores = chain.run(data.fetch(torch.arange(len(data))))
    assert sum(answer.clean for answer in found.test) == int((scores.argmax(1) == data.labels).sum())
