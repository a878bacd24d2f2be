"""Where norm layers live, for every method: what is sent and averaged, what stays, and what newcomers begin with."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from fedprophet.cascade.norms import norm_names, statistics_names
from fedprophet.client.statistics import ADVERSARIAL
from fedprophet.data.dataset import from_tensors
from fedprophet.errors import ConfigError
from fedprophet.messages.answers import Trained
from fedprophet.messages.values import SERVER, Resources
from fedprophet.methods import METHODS
from fedprophet.runs.evaluator import Evaluator
from fedprophet.runs.export import exported_model
from fedprophet.runs.run import start
from fedprophet.runs.session import assemble

LAYERS = ("local", "shared", "statistics-local", "frozen")
SMALL = {"rounds": 2, "population.cohort": 3, "train.iterations": 1, "train.warmup": 0, "attack.steps": 1}
SMALL |= {"attack.feature_steps": 1, "evaluate.steps": 1, "evaluate.clients": 2, "measure.steps": 1}
SMALL |= {"memory.budget": "60%", "distillation.family": ["vgg-small"], "distillation.iterations": 1}
SUB_NETWORKS = ("heterofl", "feddrop", "fedrolex")
SERVERS_MODEL = ("feddf", "fedet")
PAIRS = [(m, layers) for m in METHODS for layers in LAYERS if m != "fedrbn" or layers in ("local", "statistics-local")]


def kept(name):
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


@pytest.mark.parametrize(("method", "layers"), PAIRS)
def test_every_method_runs_with_every_choice(method, layers, tiny, fleet, play_in_memory):
    config = tiny({**SMALL, "method": method, "norm.layers": layers, **fleet(10**6, 10**15)})
    played = play_in_memory(config)
    session, state = played.session, played.states[-1]
    chain, norms = session.world.chain, set(norm_names(session.world.chain))
    assert session.method.finished(state)
    assert all(s.failures == 0 for s in played.states)
    sent = {"local": set(), "statistics-local": {n for n in norms if not kept(n)}}.get(layers, norms)
    assert norms & set(chain.shared()) == sent
    for number in range(1, len(played.records) + 1):
        assert played.records[number - 1]["dropped"] == {}
        for task, update in zip(*played.of(number, "train"), strict=True):
            own = set(
                session.world.family[task.architecture].chain.shared() if session.world.family else chain.shared()
            )
            assert {name for name in update.parameters if not name.startswith("heads/")} <= own
    for own in played.layers[-1].values():
        assert {name.removeprefix(ADVERSARIAL) for name in own} <= norms - sent
    if method not in SERVERS_MODEL:
        assert set(state.model) == set(chain.shared())
    whole = exported_model(session, state, session.engine)
    assert set(whole) == set(chain.tensors)
    assert all(bool(torch.isfinite(value).all()) for value in whole.values())
    for name in statistics_names(chain):
        assert not torch.equal(whole[name], torch.full_like(whole[name], name.endswith("var"))), "as if never trained"
    found = Evaluator(session, state, whole, session.engine).measure(("clean",))["clean"]
    assert {answer.samples > 0 for answer in (*found.clients, *found.test)} == {True}


@pytest.mark.parametrize("layers", ["shared", "frozen"])
def test_fedrbn_needs_statistics_of_the_clients_own(layers, tiny, tmp_path):
    config = tiny({**SMALL, "method": "fedrbn", "norm.layers": layers})
    with pytest.raises(ConfigError, match=rf"norm\.layers: given '{layers}', but fedrbn .*statistics-local"):
        start(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def pooled_by_hand(updates, mean, variance, part="parameters"):
    """Return mean and variance of what all clients read, from their own."""
    weights = np.array([update.weight for update in updates])
    means = np.stack([getattr(update, part)[mean].double().numpy() for update in updates])
    wide = np.stack([getattr(update, part)[variance].double().numpy() for update in updates])
    centre = np.average(means, axis=0, weights=weights)
    return centre, np.average(wide + (means - centre) ** 2, axis=0, weights=weights)


def averaged(updates, name):
    return np.average([u.parameters[name].numpy() for u in updates], axis=0, weights=[u.weight for u in updates])


@pytest.fixture(scope="module")
def shared(tiny, play_in_memory):
    return play_in_memory(tiny({**SMALL, "train.iterations": 10, "method": "jfat", "norm.layers": "shared"}), rounds=2)


def test_shared_statistics_are_pooled_and_the_affine_part_is_averaged(shared):
    chain, wider = shared.session.world.chain, []
    for number in (1, 2):
        updates, model = shared.of(number, "train")[1], shared.states[number].model
        if number == 2:  # the best round may have been restored
            model = shared.of(number, "evaluate")[0][0].parameters
        for name in statistics_names(chain, ("running_var",)):
            mean = name.replace("running_var", "running_mean")
            found = pooled_by_hand(updates, mean, name)
            np.testing.assert_allclose(model[mean].numpy(), found[0], rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(model[name].numpy(), found[1], rtol=1e-5)
            wider.append(float((model[name].numpy() - averaged(updates, name)).max()))
            weight = name.replace("running_var", "weight")
            np.testing.assert_allclose(model[weight].numpy(), averaged(updates, weight), rtol=1e-5)
    assert max(wider) > 0.01, "the means of the clients do differ"


def test_clients_that_share_their_layers_have_none(shared):
    assert all(own == {} for own in shared.layers[-1].values())
    for task in shared.of(2, "evaluate")[0]:
        assert set(task.parameters) == set(shared.session.world.chain.tensors)


def test_frozen_statistics_are_fixed_after_their_rounds_of_every_stage(tiny, play_in_memory):
    """Of four rounds a stage, the first two move them; the affine part goes on."""
    settings = {**SMALL, "rounds": 4, "norm.layers": "frozen", "norm.frozen_after": 2, "convergence.patience": 4}
    played = play_in_memory(tiny(settings), rounds=8)
    chain, modules = played.session.world.chain, played.session.world.modules
    for number, record in enumerate(played.records, start=1):
        module = modules[record["module"] - 1]
        names = [n for n in statistics_names(chain) if n in chain.shared(module.first, module.last)]
        for task, update in zip(*played.of(number, "train"), strict=True):
            fixed = record["stage_round"] > 2
            assert task.training.fixed_statistics == fixed
            assert all(torch.equal(update.parameters[n], task.parameters[n]) == fixed for n in names)
            affine = [n.replace("running_mean", "weight") for n in names if n.endswith("running_mean")]
            assert not any(torch.equal(update.parameters[n], task.parameters[n]) for n in affine)
        if number not in (1, 5):  # what the server makes of statistics that are the same at all clients is the same
            before, after = ({n: played.states[k].model[n] for n in names} for k in (number - 1, number))
            if record["stage_round"] == 3:
                assert all(torch.equal(before[n], after[n]) for n in names)


def test_fedrbn_with_local_statistics_still_spreads_them(tiny, fleet, play_in_memory):
    settings = {**SMALL, "rounds": 4, "method": "fedrbn", "population.cohort": 6, **fleet(1, 10**15)}
    played = play_in_memory(tiny({**settings, "norm.layers": "statistics-local"}), rounds=2)
    chain = played.session.world.chain
    attacked = set(played.records[1]["attacked"])
    assert 0 < len(attacked) < 6
    names = statistics_names(chain)
    for client, own in played.layers[-1].items():
        assert {ADVERSARIAL + name for name in names} <= set(own), "attacked, or adopted"
        assert not any(name.endswith((".weight", ".bias")) for name in own)
        assert any(not torch.equal(own[ADVERSARIAL + name], own[name]) for name in names), client
    adopted = played.of(2, "adopt")[0]
    assert {task.client for task in adopted} == set(range(6)) - attacked
    updates = played.of(2, "train")[1]
    for name in [n for n in chain.shared() if n in norm_names(chain)]:
        np.testing.assert_allclose(played.states[2].model[name].numpy(), averaged(updates, name), rtol=1e-5, atol=1e-8)
    whole = exported_model(played.session, played.states[-1], played.session.engine)
    name = next(n for n in names if n.endswith("running_mean"))
    own = [(played.session.population.samples(k), played.layers[-1][k][ADVERSARIAL + name]) for k in range(6)]
    expected = sum(q * value.double() for q, value in own) / sum(q for q, _ in own)
    torch.testing.assert_close(whole[name].double(), expected, rtol=1e-5, atol=1e-7)


# Sub-networks --------------------------------------------------------------------------------------------------------


def sub_network_method(tiny, changes):
    """Return HeteroFL for conv 1 → 4, batch norm, linear 4 → 2 on single pixels."""
    images, labels = torch.rand(8, 1, 1, 1), torch.arange(8) % 2
    settings = {"method": "heterofl", "population.clients": 3, "shards.kind": "iid", **changes}
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    return assemble(tiny(settings), model=model, dataset=from_tensors(images, labels, images, labels)).method


@pytest.mark.parametrize(
    ("rule", "mean", "variance"),
    [
        # Channels 0 and 1: weights 1, 1, 2, means 0, 4, 4 around 3, variances 1, 2, 3. Channel 2: means 4 and 4.
        ("mean", [3, 3, 4, 4], [(1 + 9 + 2 + 1 + 2 * (3 + 1)) / 4] * 2 + [(2 + 2 * 3) / 3, 3]),
        # The middle of three is 4: variances about it 1 + 16, 2, 3, of which 3 is the middle. Two or one: their mean.
        ("median", [4, 4, None, None], [3, 3, None, None]),
        ("trimmed-mean", [4, 4, None, None], [3, 3, None, None]),
    ],
)
@pytest.mark.parametrize("gathers", [True, False], ids=["newcomers", "shared"])
def test_statistics_of_sub_networks_are_pooled_channel_by_channel(rule, mean, variance, gathers, tiny):
    """Three clients have the first two, three and four of four channels."""
    own = {"norm.newcomers": "average"} if gathers else {"norm.layers": "shared"}
    method = sub_network_method(tiny, {"aggregate.rule": rule, **own})
    whole, state = method.world.cost.total_memory, method.initial()
    available = {k: Resources(math.ceil(r * whole), 1.0, 1.0) for k, r in enumerate((0.5, 0.75, 1.0))}
    tasks = method.assign(state, available, {})
    assert [len(task.kept_channels["0"]) for task in tasks] == [2, 3, 4]
    usable = []
    for task, m, v, q in zip(tasks, (0.0, 4.0, 4.0), (1.0, 2.0, 3.0), (1.0, 1.0, 2.0), strict=True):
        n = len(task.kept_channels["0"])
        statistics = {"1.running_mean": torch.full((n,), m), "1.running_var": torch.full((n,), v)}
        counter = {"1.num_batches_tracked": torch.tensor(6 + int(q))}
        affine = {"1.weight": torch.full((n,), m), "1.bias": torch.full((n,), v)}
        own = {**statistics, **counter, **affine}
        parameters = task.parameters if gathers else {**task.parameters, **own}
        usable.append(
            (
                task,
                Trained(round=1, client=task.client, weight=q, loss=1.0, samples=1, parameters=parameters, local=own),
            )
        )
    if gathers:
        found = method.gathered(state, usable)
    else:
        with pytest.raises(StopIteration) as end:
            next(method.join(state, usable, {}))
        found = end.value.value.model
    for name, expected in (("1.running_mean", mean), ("1.running_var", variance)):
        for channel, value in enumerate(expected):
            assert value is None or found[name][channel].item() == pytest.approx(value), (name, channel)
    assert found["1.running_var"].min() > 0
    if rule == "mean":
        assert found["1.bias"].tolist() == pytest.approx([(1 + 2 + 6) / 4, (1 + 2 + 6) / 4, 8 / 3, 3]), "not pooled"
    assert found["1.num_batches_tracked"].item() == 7


# Newcomers -----------------------------------------------------------------------------------------------------------


def newcomers(played, number):
    """Return the clients that were drawn in no round up to one."""
    return set(range(6)) - set(played.session.world.clients.trained(number))


def average_settings(method, fleet, rounds=2):
    return {
        **SMALL,
        "rounds": rounds,
        "method": method,
        "population.cohort": 2,
        "norm.newcomers": "average",
        **fleet(10**15),
    }


@pytest.mark.parametrize("method", ["jfat", "fedprophet", "fedrbn", *SUB_NETWORKS])
def test_a_newcomer_begins_with_the_joined_layers_of_the_cohort(method, tiny, fleet, play_in_memory):
    """Devices hold the whole model, so sub-networks are whole ones, and every client of fedrbn attacks."""
    played = play_in_memory(tiny({**average_settings(method, fleet), "evaluate.clients": "all"}), rounds=1)
    chain, updates = played.session.world.chain, played.of(1, "train")[1]
    assert newcomers(played, 1), "somebody has not been drawn"
    trained = {name for update in updates for name in update.local}
    assert trained
    starting = played.of(1, "evaluate")[0][0].starting
    for name in trained:
        have = [update for update in updates if name in update.local]
        weights = [update.weight for update in have]
        if name.endswith("running_var"):
            expected = pooled_by_hand(have, name.replace("running_var", "running_mean"), name, "local")[1]
        elif name.endswith("num_batches_tracked"):
            continue
        else:
            expected = np.average([update.local[name].double().numpy() for update in have], axis=0, weights=weights)
        if name in starting or name in chain.local(0, played.of(1, "evaluate")[0][0].last):
            np.testing.assert_allclose(starting[name].numpy(), expected, rtol=1e-5, atol=1e-7)
    if method == "fedrbn":
        assert any(name.startswith(ADVERSARIAL) for name in starting)


@pytest.mark.parametrize("method", ["jfat", "fedprophet", "fedrbn", "heterofl", "feddf", "fedet"])
def test_nobody_sends_layers_or_gets_any_where_newcomers_begin_anew(method, tiny, fleet, play_in_memory):
    settings = {**average_settings(method, fleet), "norm.newcomers": "initial"}
    played = play_in_memory(tiny(settings), rounds=1)
    assert played.states[-1].starting == {}
    for tasks, _ in played.exchanges[0]:
        assert all(getattr(task, "starting", {}) == {} for task in tasks)
    wanted = {task.wants_local for task in played.of(1, "train")[0]}
    assert wanted == {method in ("fedrbn", *SERVERS_MODEL)}, "as these always did"


@pytest.mark.parametrize("choice", ["initial", "average"])
def test_what_a_newcomer_is_evaluated_with(choice, tiny, fleet, play_in_memory):
    """Its number of right samples is that of a model put together by hand."""
    settings = {**average_settings("jfat", fleet), "norm.newcomers": choice, "evaluate.clients": "all"}
    settings |= {"train.iterations": 4, "rounds": 3}
    played = play_in_memory(tiny(settings), rounds=1)
    session, state = played.session, played.states[1]
    own = state.starting if choice == "average" else session.world.initial_layers
    assert set(own) == set(session.world.chain.local())
    chain = session.world.chain
    for answer in played.of(1, "evaluate")[1]:
        if answer.client not in newcomers(played, 1):
            continue
        data = session.population.client_data(answer.client).validation
        chain.load({**state.model, **own})
        with torch.no_grad(), chain.mode(0, None, training=False):
            scores = chain.run(data.fetch(torch.arange(len(data))))
        assert answer.clean == int((scores.argmax(1) == data.labels).sum())


def test_starting_layers_go_back_with_the_best_round(tiny, fleet, play_in_memory, scripted):
    """The first of two rounds is the better one; what newcomers begin with afterwards is that round's."""
    config = tiny({**average_settings("fedprophet", fleet), "convergence.patience": 2})
    played = play_in_memory(config, scripted({1: (0.9, 0.9), 2: (0.1, 0.1)}), rounds=3)
    assert [record["module"] for record in played.records] == [1, 1, 2]
    one, two, three = (played.states[n].starting for n in (1, 2, 3))
    assert played.states[2].discarded == ((1, 2),)
    chain, module = played.session.world.chain, played.session.world.modules[0]
    first = chain.local(0, module.last)
    assert all(torch.equal(two[name], one[name]) for name in first)
    assert all(torch.equal(three[name], one[name]) for name in first), "and stays as it is in the next stage"
    second = [name for name in chain.local(module.last) if not torch.equal(three[name], one[name])]
    assert second
    updates = {client: u.local for u in played.of(2, "train")[1] for client in [u.client]}
    assert any(not torch.equal(own[name], one[name]) for own in updates.values() for name in own)


@pytest.mark.parametrize("layers", LAYERS)
def test_a_client_that_only_evaluates_has_sound_layers_in_every_choice(layers, tiny, fleet, play_in_memory):
    """Statistics that it is sent are those of what its layers read, roughly; an untrained model's are far off."""
    settings = {**average_settings("jfat", fleet, rounds=4), "norm.layers": layers, "train.iterations": 20}
    settings |= {"norm.frozen_after": 3, "shards.kind": "iid", "train.learning_rate": 0.05}
    played = play_in_memory(tiny(settings), rounds=3)
    session, state = played.session, played.states[3]
    (client, *_) = newcomers(played, 3)
    task = session.method.evaluation_task(state, client, None)
    chain, data = session.world.chain, session.population.client_data(client).train
    sent = {**task.starting, **task.parameters}
    untrained = {n: torch.full_like(sent[n], n.endswith("var")) for n in statistics_names(chain)}
    assert set(sent) == set(chain.tensors)
    images = data.fetch(torch.arange(len(data)))
    sound, unsound = (_misfit(chain, {**sent, **statistics}, images) for statistics in ({}, untrained))
    assert sound < 0.5
    assert unsound > 1.5 * sound


def _misfit(chain, tensors, images):
    """Return by what factor, as a logarithm, the spread of what norm layers read differs from what they expect."""
    chain.load(tensors)
    found = []

    def compare(norm, inputs):
        expected = (norm.running_var + norm.eps).log()
        found.append(float((inputs[0].transpose(0, 1).flatten(1).var(1).log() - expected).abs().mean()))

    hooks = [m.register_forward_pre_hook(compare) for m in chain.modules() if isinstance(m, nn.BatchNorm2d)]
    with torch.no_grad(), chain.mode(0, None, training=False):
        chain.run(images)
    for hook in hooks:
        hook.remove()
    return sum(found) / len(found)


# Calibration ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_clients_are_calibrated_and_the_server_is_not(method, tiny, fleet, play_in_memory):
    settings = {
        **SMALL,
        "method": method,
        "train.calibration": "labels",
        "train.smoothing": 0.5,
        **fleet(10**6, 10**15),
    }
    settings |= {"norm.refresh": "clean", "rounds": 1}
    played = play_in_memory(tiny(settings))
    asked = [task for exchanges in played.exchanges for tasks, _ in exchanges for task in tasks]
    calibrated = {(task.kind, task.client == SERVER): getattr(task, "calibration", None) for task in asked}
    expected = {("train", False): 0.5, ("evaluate", False): 0.5, ("refresh", False): 0.5, ("report", False): None}
    assert expected.items() <= calibrated.items()
    others = {kind: value for kind, value in calibrated.items() if kind not in expected}
    assert set(others.values()) <= {None}, "predictions, distillation, magnitudes and adoption know none"
    session, state = played.session, played.states[-1]
    assert session.method.evaluation_task(state, SERVER, None).calibration == 0


def test_the_exported_model_with_a_clients_label_frequencies_is_the_clients_own(tiny, play_in_memory):
    """Where norm layers are shared: by hand, from the exported model and what the client knows."""
    settings = {**SMALL, "method": "jfat", "norm.layers": "shared", "train.calibration": "labels"}
    played = play_in_memory(tiny({**settings, "rounds": 1, "evaluate.clients": "all", "train.iterations": 4}))
    session, state = played.session, played.states[-1]
    whole, chain = exported_model(session, state, session.engine), session.world.chain
    found = Evaluator(session, state, whole, session.engine).measure(("clean",))["clean"]
    chain.load(whole)
    right = {}
    for client in range(session.config.population.clients):
        data = session.population.client_data(client)
        counts = torch.bincount(data.own.labels, minlength=10) + 1.0
        with torch.no_grad(), chain.mode(0, None, training=False):
            scores = chain.run(data.validation.fetch(torch.arange(len(data.validation)))).double()
        added = (scores + torch.log(counts.double() / counts.sum()), scores)
        right[client] = tuple(int((each.argmax(1) == data.validation.labels).sum()) for each in added)
    measured = {answer.client: answer.clean for answer in found.clients}
    plain = {answer.client: answer.clean for answer in found.uncalibrated}
    assert {client: (measured[client], plain[client]) for client in measured} == right
    assert measured != plain, "the frequencies matter here"


def test_norm_layers_that_are_no_layers_of_the_chain_are_named(tiny, play_in_memory):
    class OwnNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(2))
            self.register_buffer("running_var", torch.ones(2))

        def forward(self, x):
            return nn.functional.batch_norm(x, self.running_mean, self.running_var, training=self.training)

    model = nn.Sequential(nn.Conv2d(1, 2, 3), OwnNorm(), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10))
    for changes in ({"norm.layers": "frozen"}, {"norm.refresh": "clean"}):
        with pytest.raises(ConfigError, match="norm: 1 keeps statistics"):
            assemble(tiny({"model.name": "custom", "method": "jfat", **changes}), model=model)
    assemble(tiny({"model.name": "custom", "method": "jfat", "norm.layers": "shared"}), model=model)
