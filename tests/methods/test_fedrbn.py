"""FedRBN: who attacks, how adversarial statistics reach the others, and which statistics judge what."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedprophet.client.statistics import ADVERSARIAL
from fedprophet.data.dataset import from_tensors
from fedprophet.errors import ModelError
from fedprophet.fleet.network import draw_link
from fedprophet.messages.tasks import Adopt
from fedprophet.messages.values import SERVER, Resources
from fedprophet.methods.fedrbn import propagate, similarity
from fedprophet.runs.evaluator import Evaluator
from fedprophet.runs.export import exported_model
from fedprophet.runs.run import start
from fedprophet.runs.session import assemble
from fedprophet.threat import input_threat

ATTACK = input_threat(0.1, 0.025, 2)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@pytest.fixture(scope="module")
def settings(fleet):
    """Devices that can hold the model and devices that cannot; everyone trains."""
    return {"method": "fedrbn", "rounds": 4, "population.cohort": 6, "evaluate.clients": 2, **fleet(1, 10**15)}


@pytest.fixture(scope="module")
def played(settings, tiny, play_in_memory):
    """Three rounds of four, the first of them warm-up."""
    return play_in_memory(tiny(settings), rounds=3)


def strong(played, number):
    whole = played.session.world.cost.total_memory
    return [report.client for report in played.of(number, "report")[1] if report.resources.memory >= whole]


def statistics(played):
    return [name for name in played.session.world.chain.local() if name.endswith(("running_mean", "running_var"))]


# Who attacks ---------------------------------------------------------------------------------------------------------


def test_clients_that_can_hold_the_model_attack_after_the_warm_up(played):
    for number in (1, 2, 3):
        attackers = strong(played, number) if number > 1 else []
        assert played.records[number - 1]["attacked"] == attackers
        for task in played.of(number, "train")[0]:
            attacks = task.client in attackers
            assert task.threat == (ATTACK if attacks else None)
            assert task.adversarial_statistics == attacks
            assert task.wants_local
            assert (task.first, task.last, task.kept_channels) == (0, len(played.session.world.chain), {})
            assert set(task.parameters) == set(played.states[0].model)
    assert 0 < len(strong(played, 2)) < 6


def test_the_last_byte_decides(played):
    method = played.session.method
    whole = played.session.world.cost.total_memory
    available = {0: Resources(whole - 1, 1.0, 1.0), 1: Resources(whole, 1.0, 1.0), 2: Resources(whole + 1, 1.0, 1.0)}
    for number, attackers in ((1, []), (2, [1, 2])):
        record: dict[str, object] = {}
        tasks = method.assign(replace(played.states[0], round=number), available, record)
        assert record["attacked"] == attackers == [task.client for task in tasks if task.threat is not None]


def test_all_models_are_averaged(played):
    """With attack or without, weighted by shard size."""
    for number in (1, 2, 3):
        updates = played.of(number, "train")[1]
        for name, value in played.states[number].model.items():
            parts = [update.parameters[name].numpy().astype(float) for update in updates]
            expected = np.average(parts, axis=0, weights=[update.weight for update in updates])
            np.testing.assert_allclose(value.numpy(), expected, rtol=1e-6, atol=1e-8)


def test_time_is_that_of_the_whole_model_and_attacks_take_theirs(played):
    """On 1 GFLOPS, 2 W for the step and 2 W for each attack step."""
    world = played.session.world
    for number in (1, 2, 3):
        for report in played.of(number, "report")[1]:
            time = played.records[number - 1]["times"][str(report.client)]
            steps = 2 if report.client in played.records[number - 1]["attacked"] else 0
            work = 2 * (1 + steps) * 2 * world.cost.total_flops
            assert time["computation_s"] == pytest.approx(work / report.resources.performance)
            assert time["memory_bytes"] == world.cost.total_memory


def bytes_of(tensors):
    return sum(4 * tensor.numel() if tensor.is_floating_point() else 8 for tensor in tensors.values())


def test_statistics_that_a_client_receives_take_their_time_too(played):
    """Two floats for each channel of each norm layer, and the latency both ways once more."""
    channels = sum(m.num_features for m in played.session.world.chain.modules() if isinstance(m, nn.BatchNorm2d))
    assert channels > 0
    receivers = 0
    for number in (1, 2, 3):
        attacked = played.records[number - 1]["attacked"]
        for task, update in zip(*played.of(number, "train"), strict=True):
            link = draw_link(0, number, update.client)
            up = bytes_of(update.parameters) + bytes_of(update.local)
            seconds = 8 * bytes_of(task.parameters) / link.download + 8 * up / link.upload + 2 * link.latency
            if attacked and update.client not in attacked:
                seconds += 8 * (2 * 4 * channels) / link.download + 2 * link.latency
                receivers += 1
            found = played.records[number - 1]["times"][str(update.client)]["communication_s"]
            assert found == pytest.approx(seconds, rel=1e-12)
    assert receivers > 0


# Propagation ---------------------------------------------------------------------------------------------------------


def test_similarity_by_hand():
    """Layer 1: cosines 1 (means) and 0.6 (variances); layer 2: 0 and −1."""
    one = {"1.running_mean": t(2, 0), "1.running_var": t(1, 0), "2.running_mean": t(0, 3), "2.running_var": t(1, 1)}
    two = {"1.running_mean": t(5, 0), "1.running_var": t(3, 4), "2.running_mean": t(1, 0), "2.running_var": t(-2, -2)}
    assert similarity(one, two) == pytest.approx(((1 + 0.6) / 2 + (0 - 1) / 2) / 2)
    assert similarity(two, one) == similarity(one, two)
    assert similarity(one, one) == pytest.approx(1.0)


def test_propagation_by_hand():
    """Similarities are 0.5 and 0.3; at temperature 0.1 the weights are e⁵ and e³ over their sum."""
    clean = {"running_mean": t(1, 0), "running_var": t(1, 0)}
    near = {"running_mean": t(4, 0), "running_var": t(0, 7)}, {"running_mean": t(10, 0), "running_var": t(1, 2)}
    far = {"running_mean": t(0, 2), "running_var": t(3, 4)}, {"running_mean": t(20, 4), "running_var": t(3, 6)}
    a = 1 / (1 + math.exp(-2))
    given = propagate(clean, [near, far], temperature=0.1)
    assert set(given) == {"running_mean", "running_var"}
    torch.testing.assert_close(given["running_mean"], t(a * 10 + (1 - a) * 20, (1 - a) * 4))
    torch.testing.assert_close(given["running_var"], t(a * 1 + (1 - a) * 3, a * 2 + (1 - a) * 6))
    assert given["running_mean"].dtype == torch.float32
    alone = propagate(clean, [far], temperature=0.01)
    assert all(torch.equal(alone[name], far[1][name]) for name in alone)


def test_a_low_temperature_does_not_overflow():
    clean = {"running_mean": t(1, 0)}
    sources = [({"running_mean": t(1, 0)}, {"running_mean": t(5)}), ({"running_mean": t(0, 1)}, {"running_mean": t(9)})]
    assert propagate(clean, sources, temperature=1e-5)["running_mean"].tolist() == [5]


def cosine(a, b):
    a, b = a.numpy().astype(float), b.numpy().astype(float)
    return a @ b / np.sqrt((a @ a) * (b @ b))


def test_clients_without_attack_receive_the_weighted_statistics_of_this_rounds_attackers(played):
    names = statistics(played)
    for number in (2, 3):
        trained = {update.client: update for update in played.of(number, "train")[1]}
        sources = [trained[client] for client in strong(played, number)]
        receivers = [update for client, update in trained.items() if client not in strong(played, number)]
        adopted, _ = played.of(number, "adopt")
        assert [task.client for task in adopted] == [update.client for update in receivers]
        for update in receivers:
            similar = [np.mean([cosine(update.local[n], source.local[n]) for n in names]) for source in sources]
            weights = np.exp((np.array(similar) - max(similar)) / 0.01)
            weights /= weights.sum()
            stored = played.layers[number - 1][update.client]
            for name in names:
                parts = [source.local[ADVERSARIAL + name].numpy().astype(float) for source in sources]
                expected = np.average(parts, axis=0, weights=weights)
                np.testing.assert_allclose(stored[ADVERSARIAL + name].numpy(), expected, rtol=1e-4, atol=1e-6)
            # Its own clean statistics and affine parameters are as it trained them.
            assert all(torch.equal(stored[n], v) for n, v in update.local.items() if not n.startswith(ADVERSARIAL))
        for source in sources:
            stored = played.layers[number - 1][source.client]
            assert set(stored) == set(source.local)
            assert all(torch.equal(stored[name], value) for name, value in source.local.items())
    assert len(sources) > 1, "with one source the weights would not matter"


def test_a_round_without_an_attacked_client_propagates_nothing(played, settings, tiny, fleet, play_in_memory):
    assert played.of(1, "adopt") == ([], [])
    assert not any(name.startswith(ADVERSARIAL) for own in played.layers[0].values() for name in own)
    weak = play_in_memory(tiny({**settings, **fleet(1), "train.warmup": 0}), rounds=1)
    assert weak.records[0]["adversarial_training"]
    assert weak.records[0]["attacked"] == []
    assert weak.of(1, "adopt") == ([], [])
    assert "adversarial" in weak.records[0], "the clean statistics serve where there are no others"


def test_where_everyone_can_attack_nothing_is_propagated(settings, tiny, fleet, play_in_memory):
    played = play_in_memory(tiny({**settings, **fleet(10**15), "train.warmup": 0}), rounds=1)
    assert played.records[0]["attacked"] == [0, 1, 2, 3, 4, 5]
    assert played.of(1, "adopt") == ([], [])


def test_a_diverged_attacker_is_no_source(settings, tiny, play_in_memory, poisoned, played):
    """Its adversarial statistics alone are not finite, which its loss and its parameters do not show."""
    victims = strong(played, 1)
    name = ADVERSARIAL + statistics(played)[0]

    def broken(update):
        return replace(update, local={**update.local, name: update.local[name] * math.nan})

    config = tiny({**settings, "train.warmup": 0})
    one = play_in_memory(config, poisoned(broken, [1], victims[:1]), rounds=1)
    assert set(one.records[0]["dropped"]) == {str(victims[0])}
    adopted, _ = one.of(1, "adopt")
    assert adopted
    assert all(bool(torch.isfinite(value).all()) for task in adopted for value in task.parameters.values())
    assert victims[0] not in {task.client for task in adopted}
    all_of_them = play_in_memory(config, poisoned(broken, [1], victims), rounds=1)
    assert set(all_of_them.records[0]["dropped"]) == {str(client) for client in victims}
    assert all_of_them.of(1, "adopt") == ([], [])


# Evaluation and export -----------------------------------------------------------------------------------------------


def test_attacked_images_are_judged_with_the_adversarial_statistics(played):
    method, state = played.session.method, played.states[3]
    for number in (1, 2, 3):
        assert all(task.adversarial_statistics for task in played.of(number, "evaluate")[0])
    assert not method.evaluation_task(state, 0, None).adversarial_statistics
    assert not method.evaluation_task(state, SERVER, ATTACK).adversarial_statistics


def test_the_two_sets_make_different_accuracies(played):
    """Clients whose adversarial statistics are nonsense are right about clean images as before."""
    session, state = played.session, played.states[3]
    tasks = [session.method.evaluation_task(state, client, ATTACK) for client in range(6)]
    before = list(session.engine.map(tasks))
    nonsense = {
        ADVERSARIAL + name: torch.full_like(session.world.initial_layers[name], 1e6) for name in statistics(played)
    }
    adopt = [Adopt(round=4, client=t.client, seed=0, timeline=t.timeline, parameters=nonsense) for t in tasks]
    list(session.engine.map(adopt))
    after = list(session.engine.map([replace(task, round=4) for task in tasks]))
    constant = [answer.adversarial for answer in after]
    assert [answer.clean for answer in after] == [answer.clean for answer in before]
    assert constant != [answer.adversarial for answer in before]
    # A model that says the same of everything is right about one class alone.
    for client, right in enumerate(constant):
        labels = session.population.client_data(client).validation.labels
        assert right in torch.bincount(labels, minlength=10).tolist()


def test_the_exported_model_has_the_averaged_adversarial_statistics(played):
    session, names = played.session, statistics(played)
    model = exported_model(session, played.states[2], session.engine)
    assert set(model) == set(session.world.chain.tensors)
    weights = [session.population.samples(client) for client in range(6)]
    for name in session.world.chain.local():
        if name.endswith("num_batches_tracked"):
            continue
        source = ADVERSARIAL + name if name in names else name
        parts = [played.layers[1][client][source].numpy().astype(float) for client in range(6)]
        expected = np.average(parts, axis=0, weights=weights)
        np.testing.assert_allclose(model[name].numpy(), expected, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(model[name], value) for name, value in played.states[2].model.items())
    early = exported_model(session, played.states[1], session.engine)
    assert not torch.equal(early[names[0]], model[names[0]])


def test_before_any_attack_the_exported_statistics_are_the_clean_ones(played):
    session = played.session
    model = exported_model(session, played.states[1], session.engine)
    weights = [session.population.samples(client) for client in range(6)]
    for name in statistics(played):
        parts = [played.layers[0][client][name].numpy().astype(float) for client in range(6)]
        np.testing.assert_allclose(
            model[name].numpy(), np.average(parts, axis=0, weights=weights), rtol=1e-5, atol=1e-7
        )
    found = Evaluator(session, played.states[1], model, session.engine).over_test_set("pgd", ATTACK, 32, "test")
    assert sum(update.samples for update in found) == 32


# Resuming and refusals -----------------------------------------------------------------------------------------------


def test_a_round_that_is_repeated_after_a_stop_is_the_same(played, resumed, tmp_path, same_tensors):
    session, state, record = resumed(played.session.config, tmp_path, 2)
    assert record == played.records[1]
    assert same_tensors(state.model, played.states[2].model)
    for client, own in played.layers[1].items():
        stored = session.layers.get("backbone", client, session.method.timeline(state), 3)
        assert same_tensors(stored, own)


def test_the_order_in_which_an_engine_works_does_not_matter(
    settings, played, tiny, play_in_memory, shuffled, same_tensors
):
    mixed = play_in_memory(tiny(settings), shuffled, rounds=2)
    assert mixed.records == played.records[:2]
    assert all(same_tensors(own, played.layers[1][client]) for client, own in mixed.layers[1].items())


def test_a_model_without_norm_statistics_is_refused_before_anything_is_written(tiny, tmp_path):
    images, labels = torch.rand(8, 1, 2, 2), torch.arange(8) % 2
    data = from_tensors(images, labels, images, labels)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    config = tiny({"method": "fedrbn", "population.clients": 2, "shards.kind": "iid"})
    with pytest.raises(ModelError, match=r"method fedrbn needs norm layers that keep statistics.*Sequential has none"):
        start(config, tmp_path / "run", model, data)
    assert not (tmp_path / "run").exists()
    assert assemble(config.model_copy(update={"method": "jfat"}), model=model, dataset=data)
