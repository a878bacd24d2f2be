"""What HeteroFL, FedDrop and FedRolex share: how wide, what is sent, what is averaged, what clients keep, the cost."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedprophet
from fedprophet.cascade.atoms import chain_of
from fedprophet.cascade.cost import cost_of
from fedprophet.errors import ModelError
from fedprophet.fleet.clock import training_times
from fedprophet.messages.answers import Trained
from fedprophet.messages.values import Resources
from fedprophet.models import build
from fedprophet.runs.run import start
from fedprophet.runs.session import assemble

WHOLE = 235_920
"""Bytes of training the tiny model at full width."""
CLASSES = 10


@pytest.fixture(scope="module")
def settings(fleet):
    """A device at the budget (r = 0.3), two whose memory is drawn around the model's, and one with plenty."""
    devices = fleet(1, 10**15, 300_000, 310_000)
    return {"rounds": 4, "population.cohort": 4, "memory.budget": "30%", "evaluate.clients": 2, **devices}


@pytest.fixture(scope="module")
def played(settings, tiny, play_in_memory):
    """Three rounds of four: the best round is not restored yet. Random channels are the most general ones."""
    return play_in_memory(tiny({**settings, "method": "feddrop"}), rounds=3)


def layers_of(model):
    """Return the names of the convolutions, in order; the linear layer follows them."""
    return [name.removesuffix(".weight") for name, value in model.items() if value.ndim == 4]


def places(model, kept):
    """Return the coordinates of each tensor that a sub-network has: rows are a layer's own channels, columns inputs."""
    found, before = {}, range(1)
    for layer in layers_of(model):
        own = kept[layer].tolist()
        found[f"{layer}.weight"] = np.ix_(own, before, range(3), range(3))
        found[f"{layer}.bias"] = np.ix_(own)
        before = own
    return {**found, "classifier.0.weight": np.ix_(range(CLASSES), before), "classifier.0.bias": np.ix_(range(CLASSES))}


def average(old, parts):
    """Return the mean of each coordinate over (q, places, tensors), and whether anyone had it."""
    result = {}
    for name, value in old.items():
        total, weight = np.zeros(value.shape), np.zeros(value.shape)
        for q, where, tensors in parts:
            total[where[name]] += q * tensors[name].numpy().astype(float)
            weight[where[name]] += q
        touched = weight > 0
        result[name] = np.where(touched, total / np.where(touched, weight, 1), value.numpy()), touched
    return result


def check_average(old, new, parts):
    """Check a new model coordinate by coordinate; return how many of them nobody trained."""
    left = 0
    for name, (expected, touched) in average(old, parts).items():
        np.testing.assert_allclose(new[name].numpy(), expected, rtol=1e-6, atol=1e-9, err_msg=name)
        assert np.array_equal(new[name].numpy()[~touched], old[name].numpy()[~touched]), f"{name}: bit for bit"
        left += int((~touched).sum())
    return left


# Width and channels --------------------------------------------------------------------------------------------------


def test_the_width_is_the_share_of_the_whole_model_that_memory_holds(played):
    assert played.session.world.cost.total_memory == WHOLE
    seen = set()
    for number, record in enumerate(played.records, start=1):
        reports = played.of(number, "report")[1]
        widths = {report.client: min(report.resources.memory / WHOLE, 1.0) for report in reports}
        assert record["widths"] == {str(client): r for client, r in widths.items()}
        tasks = played.of(number, "train")[0]
        assert [task.client for task in tasks] == list(widths)
        for task in tasks:
            counts = [max(1, math.floor(widths[task.client] * C)) for C in (4, 6, 8, 16, 16, 16, 16)]
            assert [len(channels) for channels in task.kept_channels.values()] == counts
            assert list(task.kept_channels) == layers_of(played.states[0].model)
        seen |= set(widths.values())
    assert min(seen) == int(0.3 * WHOLE) / WHOLE
    assert max(seen) == 1.0
    assert len(seen) > 3, "memory is drawn anew for each round"


def test_clients_are_sent_the_kept_part_of_the_model_and_send_it_back(played):
    for number in (1, 2, 3):
        model = played.states[number - 1].model
        for task, update in zip(*played.of(number, "train"), strict=True):
            where = places(model, task.kept_channels)
            assert set(task.parameters) == set(update.parameters) == set(model)
            for name, value in task.parameters.items():
                assert np.array_equal(value.numpy(), model[name].numpy()[where[name]]), name
                assert update.parameters[name].shape == value.shape
            assert not torch.equal(update.parameters["features.0.weight"], task.parameters["features.0.weight"])


def test_clients_train_under_the_attack_after_the_warm_up(played):
    for number in (1, 2, 3):
        steps = {task.threat.steps if task.threat else 0 for task in played.of(number, "train")[0]}
        assert steps == {0 if number == 1 else 2}


# Averages ------------------------------------------------------------------------------------------------------------


def test_each_coordinate_is_averaged_over_those_who_trained_it(played):
    left = []
    for number in (1, 2, 3):
        old, new = played.states[number - 1].model, played.states[number].model
        pairs = zip(*played.of(number, "train"), strict=True)
        left.append(check_average(old, new, [(u.weight, places(old, t.kept_channels), u.parameters) for t, u in pairs]))
    assert left[0] > 0, "in the first round nobody has the full width"
    assert left[1:] == [0, 0]


def test_a_diverged_client_is_left_out(played, play_in_memory, poisoned):
    config = played.session.config
    victim = int(max(played.records[0]["widths"], key=played.records[0]["widths"].get))

    def nan(update):
        return replace(update, parameters={name: value * math.nan for name, value in update.parameters.items()})

    other = play_in_memory(config, poisoned(nan, [1], [victim]), rounds=1)
    assert set(other.records[0]["dropped"]) == {str(victim)}
    assert set(other.records[0]["times"]) == set(played.records[0]["times"]), "its time was spent all the same"
    old = played.states[0].model
    pairs = [(t, u) for t, u in zip(*played.of(1, "train"), strict=True) if t.client != victim]
    parts = [(u.weight, places(old, t.kept_channels), u.parameters) for t, u in pairs]
    check_average(old, other.states[1].model, parts)


def test_an_update_of_the_full_width_is_refused(settings, tiny, play_in_memory, poisoned):
    """What a client that ignores `kept_channels` would send."""
    config = tiny({**settings, "method": "heterofl"})
    full = assemble(config).method.initial().model
    played = play_in_memory(config, poisoned(lambda update: replace(update, parameters=full), [1]), rounds=1)
    narrow = {client for client, r in played.records[0]["widths"].items() if r < 1}
    assert set(played.records[0]["dropped"]) == narrow
    assert all("instead of" in reason for reason in played.records[0]["dropped"].values())


@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
def test_with_plenty_of_memory_it_is_joint_training(method, tiny, fleet, play_in_memory, same_tensors):
    plenty = {"train.warmup": 0, "evaluate.clients": 2, **fleet(10**15)}
    mine, joint = (play_in_memory(tiny({**plenty, "method": name}), rounds=1) for name in (method, "jfat"))
    assert set(mine.records[0].pop("widths").values()) == {1.0}
    assert mine.records == joint.records
    assert same_tensors(mine.states[-1].model, joint.states[-1].model)
    assert all(same_tensors(own, joint.layers[-1][client]) for client, own in mine.layers[-1].items())


# What clients keep ---------------------------------------------------------------------------------------------------


def norm_of(layer):
    """Return the name of the norm layer behind a convolution of the small VGG."""
    number = int(layer.rpartition(".")[2])
    return f"features.{number + 1}"


def test_norm_layers_change_where_they_were_trained_and_nowhere_else(played):
    before = {client: {} for client in played.layers[0]}
    repeated = 0
    for number in (1, 2, 3):
        tasks = {task.client: task for task in played.of(number, "train")[0]}
        for client, own in played.layers[number - 1].items():
            old = {**played.session.world.initial_layers, **before[client]}
            if client not in tasks:
                assert all(torch.equal(own[name], before[client][name]) for name in own)
                continue
            repeated += bool(before[client])
            for layer, kept in tasks[client].kept_channels.items():
                norm, rest = norm_of(layer), torch.ones(len(old[f"{norm_of(layer)}.weight"]), dtype=torch.bool)
                rest[kept] = False
                for part in ("weight", "bias", "running_mean", "running_var"):
                    assert torch.equal(own[f"{norm}.{part}"][rest], old[f"{norm}.{part}"][rest]), (number, norm, part)
                for part in ("running_mean", "running_var"):
                    changed = own[f"{norm}.{part}"][kept] != old[f"{norm}.{part}"][kept]
                    assert bool(changed.all()), (number, client, norm, part)
        before = played.layers[number - 1]
    assert repeated > 2, "clients come back, so that an earlier round's channels are among those left alone"


def test_the_full_model_is_evaluated(played):
    for number in (1, 2, 3):
        tasks, answers = played.of(number, "evaluate")
        assert len(tasks) == 2
        for task, answer in zip(tasks, answers, strict=True):
            assert task.kept_channels == {}
            assert all(torch.equal(value, played.states[number].model[name]) for name, value in task.parameters.items())
            assert answer.samples > 0


def test_a_round_that_is_repeated_after_a_stop_is_the_same(played, resumed, tmp_path, same_tensors):
    session, state, record = resumed(played.session.config, tmp_path, 2)
    assert record == played.records[1]
    assert same_tensors(state.model, played.states[2].model)
    for client, own in played.layers[1].items():
        stored = session.layers.get("backbone", client, session.method.timeline(state), 3)
        assert same_tensors(stored or {}, own)


def test_the_order_in_which_an_engine_works_does_not_matter(played, play_in_memory, shuffled, same_tensors):
    mixed = play_in_memory(played.session.config, shuffled, rounds=1)
    assert mixed.records == played.records[:1]
    assert same_tensors(mixed.states[1].model, played.states[1].model)


# What it costs -------------------------------------------------------------------------------------------------------


def convolution(inputs, outputs, kernel, side, stride=1, bias=True, read=False):
    """Return parameters, elements kept for one sample, and FLOPs of a convolution with its batch norm.

    `read`: another layer reads the same input, which counts once.
    """
    positions = (side // stride) ** 2
    parameters = kernel**2 * inputs * outputs + bias * outputs + 2 * outputs
    kept = (0 if read else inputs * side**2) + outputs * positions
    return parameters, kept, kernel**2 * inputs * outputs * positions + 5 * outputs * positions


def linear(inputs, outputs):
    return inputs * outputs + outputs, inputs, inputs * outputs


def average_pool(channels, side):
    return 0, 0, channels * side**2


def vgg_small(w):
    """The small VGG on 8×8 images: two pools, an average pool, one linear layer."""
    sides = zip(
        (1, w(4), w(6), w(8), w(16), w(16), w(16)), (w(4), w(6), w(8), *[w(16)] * 4), (8, 8, 4, 4, 2, 2, 2), strict=True
    )
    convolutions = [convolution(inputs, outputs, 3, side) for inputs, outputs, side in sides]
    return [*convolutions, average_pool(w(16), 2), linear(w(16), CLASSES)]


def vgg16(w):
    """VGG16 for 32×32 images at an eighth of its width: 8 channels in the first block, 64 in the last."""
    found, inputs = [], 3
    for channels, count, side in ((8, 2, 32), (16, 2, 16), (32, 3, 8), (64, 3, 4), (64, 3, 2)):
        for _ in range(count):
            found.append(convolution(inputs, w(channels), 3, side))
            inputs = w(channels)
    hidden = w(64)
    return [*found, average_pool(hidden, 1), linear(hidden, hidden), linear(hidden, hidden), linear(hidden, CLASSES)]


def cnn3(w):
    """CNN3 on 8×8 images: its second convolution is pooled to 2×2."""
    return [convolution(3, w(16), 3, 8), convolution(w(16), w(32), 3, 8, stride=2), linear(4 * w(32), CLASSES)]


def cnn4(w):
    """CNN4 on 56×56 images: its second convolution reads 14×14, and gives 7×7."""
    classifier = [linear(49 * w(32), w(128)), linear(w(128), CLASSES)]
    return [convolution(3, w(16), 7, 56, stride=2), convolution(w(16), w(32), 7, 14, stride=2), *classifier]


def resnet18(w):
    """ResNet18 on 16×16 images: a 3×3 stem, four layers of two blocks, the last three with a shortcut's convolution."""
    found, inputs, side = [convolution(3, w(8), 3, 16, bias=False)], w(8), 16
    for outputs, stride in ((w(8), 1), (w(16), 2), (w(32), 2), (w(64), 2)):
        found.append(convolution(inputs, outputs, 3, side, stride, bias=False))
        found.append(convolution(outputs, outputs, 3, side // stride, bias=False))
        if stride == 2:
            found.append(convolution(inputs, outputs, 1, side, stride, bias=False, read=True))
        side, inputs = side // stride, outputs
        found += [convolution(inputs, inputs, 3, side, bias=False)] * 2
    return [*found, average_pool(inputs, side), linear(inputs, CLASSES)]


COUNTED = {
    "vgg-small": ((1, 8, 8), 4, vgg_small),
    "vgg16": ((3, 32, 32), 8, vgg16),
    "cnn3": ((3, 8, 8), 16, cnn3),
    "cnn4": ((3, 56, 56), 16, cnn4),
    "resnet18": ((3, 16, 16), 8, resnet18),
}
"""Image, width of the first convolution, and the count by hand."""
BATCH = 16


def seconds(parameters, elements, flops, image, resources, batches, steps):
    """Return computation and access of a round, `elements` with the output among them."""
    m, b = resources.memory, resources.bandwidth
    attack, train = 4 * (elements + parameters), 4 * (elements + 3 * parameters)
    computation = batches * (1 + steps) * 2 * flops / resources.performance
    if train <= m:
        access = batches * (4 * image / b + 0.17) + 4 * parameters / b
    else:
        pieces = math.ceil(attack / m) + math.ceil(train / m)
        access = batches * (4 * (2 * elements + 6 * parameters) / b + 0.17 * pieces)
    if attack > m:
        access += batches * steps * (4 * (2 * elements + 4 * parameters) / b + 0.34 * math.ceil(attack / m))
    return computation, access


def check_demand(found, counts, image, resources, batches, steps):
    parameters, kept, flops = (sum(column) for column in zip(*counts, strict=True))
    assert found["memory_bytes"] == 4 * (3 * parameters + BATCH * kept)
    expected = seconds(
        parameters, BATCH * (kept + CLASSES), BATCH * flops, BATCH * image, resources, batches=batches, steps=steps
    )
    assert (found["computation_s"], found["access_s"]) == pytest.approx(expected, rel=1e-12)


def test_the_journal_has_the_demand_of_the_width_that_was_trained(played):
    """Each client has two batches of 16."""
    for number in (1, 2, 3):
        for report in played.of(number, "report")[1]:
            r = min(report.resources.memory / WHOLE, 1.0)
            counts = vgg_small(lambda channels, r=r: max(1, math.floor(r * channels)))
            found = played.records[number - 1]["times"][str(report.client)]
            check_demand(found, counts, 64, report.resources, batches=2, steps=0 if number == 1 else 2)


@pytest.fixture(scope="module")
def of_model(tiny):
    """Return a function that makes HeteroFL for one of the models, which no client ever trains."""
    made = {}

    def method(name):
        shape, width, _ = COUNTED[name]
        if name not in made:
            images, labels = torch.rand(20, *shape), torch.arange(20) % CLASSES
            config = tiny({"method": "heterofl", "model.name": name, "model.options": {"width": width}})
            made[name] = assemble(config, dataset=fedprophet.from_tensors(images, labels, images, labels)).method
        return made[name]

    return method


def demand(method, memory, round=2):
    """Return the task of a client with that much memory, and what the journal would say after 40 samples."""
    state = replace(method.initial(), round=round)
    available = {0: Resources(memory, 1e9, 1e7)}
    (task,) = method.assign(state, available, {})
    update = Trained(round=round, client=0, weight=1.0, loss=0.0, samples=40, parameters=task.parameters)
    return task, training_times([task], [update], available, method.cost)["0"]


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("share", [1.0, 0.37, 0.13, 0.001])
def test_a_client_of_width_r_costs_what_a_network_of_width_r_costs(of_model, name, share):
    shape, _, by_hand = COUNTED[name]
    method = of_model(name)
    whole = method.world.cost.total_memory
    memory = int(share * whole)
    task, found = demand(method, memory)
    counts = by_hand(lambda channels: max(1, math.floor(memory / whole * channels)))
    resources = Resources(memory, 1e9, 1e7)
    check_demand(found, counts, math.prod(shape), resources, batches=2, steps=2)
    norms = sum(2 * len(task.kept_channels[group]) for group in norm_groups(method, task))
    assert sum(value.numel() for value in task.parameters.values()) + norms == sum(p for p, _, _ in counts)


def norm_groups(method, task):
    """Return the group of each batch norm, by the width of its weight."""
    axes = method.channels.axes
    return [axes[name][0].group for name in method.world.chain.local() if name.endswith("running_mean")]


@pytest.mark.parametrize("name", COUNTED)
def test_half_the_memory_costs_what_the_model_built_at_half_the_width_costs(of_model, name):
    shape, width, _ = COUNTED[name]
    method = of_model(name)
    task, found = demand(method, method.world.cost.total_memory // 2)
    half = build(name, shape, CLASSES, width=width // 2)
    cost = cost_of(chain_of(half), shape, BATCH, CLASSES)
    assert found["memory_bytes"] == cost.total_memory
    mine, theirs = method.cost(task), cost
    assert mine.total_flops == theirs.total_flops
    assert mine.total_parameters == sum(parameter.numel() for parameter in half.parameters())
    shapes = {name: value.shape for name, value in half.state_dict().items()}
    assert all(value.shape == shapes[name] for name, value in task.parameters.items())


def test_hardly_any_memory_still_trains_a_channel_of_each_layer(tiny, play_in_memory, fleet):
    settings = {"method": "fedrolex", "memory.budget": 1, "train.warmup": 0, "evaluate.clients": 1}
    played = play_in_memory(tiny({**settings, **fleet(1)}), rounds=1)
    assert set(played.records[0]["widths"].values()) == {1 / WHOLE}
    for task in played.of(1, "train")[0]:
        assert {len(channels) for channels in task.kept_channels.values()} == {1}
    assert played.records[0]["dropped"] == {}
    assert math.isfinite(played.records[0]["loss"])


# Models --------------------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_narrowed_is_found_before_anything_is_written(tiny, tmp_path):
    config = tiny({"method": "feddrop", "model.name": "vit", "model.options": {}})
    with pytest.raises(ModelError, match=r"method feddrop .*VisionTransformer cannot be narrowed at .*use a method"):
        start(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_chain_of_the_users_own_is_narrowed_too(tiny, fleet, tmp_path):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
    last = nn.Sequential(nn.Flatten(), nn.Linear(24, 10))
    chain = fedprophet.explicit_chain([("body", body), ("last", last)])
    config = tiny({"method": "fedrolex", "rounds": 2, "memory.budget": "50%", **fleet(1)})
    run = fedprophet.train(config, model=chain, out=tmp_path / "run")
    assert set(run.results["personalised"]) == {"clean", "pgd2"}
    again = fedprophet.resume(tmp_path / "run", model=chain)
    assert again.results == run.results
    assert body[0].weight.shape == (6, 1, 3, 3)
