"""FedDF: who trains what, what is averaged, what every architecture distils, and what the result is."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedprophet import models
from fedprophet.messages.answers import Trained
from fedprophet.messages.codec import decode, encode
from fedprophet.messages.values import BACKBONE, SERVER, Resources
from fedprophet.methods.distillation import DistillationSettings
from fedprophet.methods.feddf import mean_prediction
from fedprophet.methods.jfat import JointTraining
from fedprophet.models.normalize import Normalize
from fedprophet.runs.evaluator import evaluate
from fedprophet.runs.export import exported_model
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import play_round

SMALLEST, MIDDLE, LARGEST = "vgg-small-3", "vgg-small-5", BACKBONE
NAMES = {SMALLEST: SMALLEST, MIDDLE: MIDDLE, BACKBONE: "vgg-small"}
MEMORY = {SMALLEST: 60_696, MIDDLE: 163_088, LARGEST: 235_920}
"""What training takes at width 4 in batches of 16."""
PUBLIC = 40
SETTINGS = {
    "method": "feddf",
    "model.options": {"width": 4},
    "population.clients": 4,
    "population.cohort": 4,
    "distillation.public": PUBLIC,
    "distillation.iterations": 3,
    "evaluate.steps": 1,
    "evaluate.clients": 2,
}
TRAINED = {
    1: {0: LARGEST, 1: SMALLEST, 2: LARGEST, 3: SMALLEST},
    2: {0: SMALLEST, 1: MIDDLE, 2: LARGEST, 3: MIDDLE},
    3: {0: MIDDLE, 1: MIDDLE, 2: SMALLEST, 3: SMALLEST},
}
"""Who trains what in each round; in each of them one architecture is trained by nobody or by one client alone."""
ACCURACIES = {1: (0.5, 0.2), 2: (0.4, 0.3), 3: (0.6, 0.1)}


@pytest.fixture(scope="module")
def with_memories(memories):
    """Return what is wrapped around an engine."""
    return lambda engine: memories(engine, MEMORY, TRAINED)


@pytest.fixture(scope="module")
def played(tiny, play_in_memory, scripted, with_memories):
    return play_in_memory(tiny(SETTINGS), lambda engine: with_memories(scripted(ACCURACIES)(engine)))


def weighted(updates: Iterable[Trained], name: str) -> Tensor:
    """Σ q_k w_k / Σ q_k over shards of q_k samples, written out."""
    sums, total = 0.0, 0.0
    for update in updates:
        sums = sums + update.weight * {**update.parameters, **update.local}[name].double()
        total += update.weight
    return sums / total


def scores(session, name: str, tensors: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """Return what a bare model of the registry says, its norm layers in evaluation mode."""
    model = models.build(NAMES[name], (1, 8, 8), 10, width=4)
    model.load_state_dict(dict(tensors))
    with torch.no_grad():
        return nn.Sequential(Normalize(session.dataset.mean, session.dataset.std), model).eval()(images)


def public_images(session) -> Tensor:
    return session.population.client_data(SERVER).train.fetch(torch.arange(PUBLIC))


# The target.


def test_the_target_is_the_softmax_of_the_mean_score() -> None:
    logits = torch.tensor([[[0.0, 2.0, 4.0], [1.0, 1.0, 1.0]], [[2.0, 2.0, 0.0], [1.0, 5.0, -1.0]]])
    target = mean_prediction(logits)
    # The means are (1, 2, 2) and (1, 3, 0).
    e = 2.718281828459045
    first = [e / (e + 2 * e**2), e**2 / (e + 2 * e**2), e**2 / (e + 2 * e**2)]
    second = [e / (e + e**3 + 1), e**3 / (e + e**3 + 1), 1 / (e + e**3 + 1)]
    assert torch.allclose(target["probabilities"], torch.tensor([first, second]), atol=1e-6)
    # Not the mean of the probabilities, which for the first sample is far more even.
    assert not torch.allclose(target["probabilities"], torch.softmax(logits, 2).mean(0), atol=1e-2)
    assert target["weights"].tolist() == [1.0, 1.0]
    assert set(target) == {"probabilities", "weights"}


# Who trains what.


def test_the_sizes_in_this_file_are_those_of_the_models(played) -> None:
    assert {name: member.cost.total_memory for name, member in played.session.world.family.items()} == MEMORY


def test_a_client_trains_the_largest_model_that_fits_its_available_memory(played) -> None:
    method = played.session.method
    expected = {
        MEMORY[LARGEST]: LARGEST,
        MEMORY[LARGEST] - 1: MIDDLE,
        MEMORY[MIDDLE]: MIDDLE,
        MEMORY[MIDDLE] - 1: SMALLEST,
        MEMORY[SMALLEST]: SMALLEST,
        MEMORY[SMALLEST] - 1: SMALLEST,  # nothing fits
    }
    assert {memory: method.architecture(Resources(memory, 1.0, 1.0)) for memory in expected} == expected


def test_norm_layers_never_travel_to_a_client(played) -> None:
    for task in played.of(2, "train")[0]:
        model = models.build(NAMES[task.architecture], (1, 8, 8), 10, width=4)
        norms = {n for n, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)}
        assert set(task.parameters) == {n for n in model.state_dict() if n.rpartition(".")[0] not in norms}


def test_clients_train_under_the_attack_after_the_warm_up(played) -> None:
    for number in (1, 2, 3):
        tasks, _ = played.of(number, "train")
        assert {(task.first, task.head, task.frozen) for task in tasks} == {(0, None, ())}
        assert {task.threat and (task.threat.radius, task.threat.steps) for task in tasks} == (
            {None} if number == 1 else {(0.1, 2)}
        )


def test_the_journal_says_who_trained_what_and_at_what_cost(played) -> None:
    for number, record in enumerate(played.records, start=1):
        chosen = TRAINED[number]
        assert record["architectures"] == {str(client): NAMES[name] for client, name in chosen.items()}
        for client, name in chosen.items():
            assert record["times"][str(client)]["memory_bytes"] == MEMORY[name]


def test_a_client_starts_with_the_servers_parameters_of_its_architecture(played) -> None:
    for number in (1, 2, 3):
        for task in played.of(number, "train")[0]:
            model = played.states[number - 1].models[task.architecture]
            assert all(torch.equal(value, model[name]) for name, value in task.parameters.items())


def test_a_client_keeps_the_norm_layers_of_each_architecture_for_itself(played, same_tensors) -> None:
    """Client 1 trained the smallest model in round 1 and the middle one from round 2 on."""
    layers, timeline = played.session.layers, played.session.method.timeline(played.states[2])
    first, second = (played.of(number, "train")[1][1] for number in (1, 2))
    assert same_tensors(layers.get(SMALLEST, 1, timeline, 4), first.local)
    assert same_tensors(layers.get(MIDDLE, 1, timeline, 3), second.local)
    assert layers.get(BACKBONE, 1, timeline, 4) is None
    # Two batches in the first round, two more on top of them in the second.
    (third,) = (u for u in played.of(3, "train")[1] if u.client == 1)
    assert int(third.local["features.1.num_batches_tracked"]) == 4


# Averaging and the ensemble.


def test_each_architecture_is_averaged_over_those_who_trained_it(played) -> None:
    for number, chosen in TRAINED.items():
        updates = played.of(number, "train")[1]
        assert len({update.weight for update in updates}) > 1, "the weights must be able to matter"
        students = {task.architecture: task.parameters for task in played.of(number, "distill")[0]}
        assert set(students) == set(MEMORY)
        for architecture, student in students.items():
            before = played.states[number - 1].models[architecture]
            its = [update for update in updates if chosen[update.client] == architecture]
            assert set(student) == set(before)
            for name, value in student.items():
                if not its:
                    assert torch.equal(value, before[name]), "nobody trained it"
                elif value.is_floating_point():
                    assert torch.allclose(value.double(), weighted(its, name), rtol=1e-6, atol=1e-7), name
            if its:
                assert not torch.equal(student["features.0.weight"], before["features.0.weight"])


def test_every_clients_model_speaks_with_its_own_norm_layers(played) -> None:
    images = public_images(played.session)
    for number, chosen in TRAINED.items():
        updates = played.of(number, "train")[1]
        tasks, answers = played.of(number, "predict")
        assert [task.client for task in tasks] == [SERVER] * 4
        for update, answer in zip(updates, answers, strict=True):
            own = {**update.parameters, **update.local}
            expected = scores(played.session, chosen[update.client], own, images)
            assert torch.allclose(answer.logits, expected, rtol=1e-4, atol=1e-5)
        # Two clients of one architecture have different layers, so the check above can tell them apart.
        same = [u for u in updates if chosen[u.client] == chosen[3]]
        assert len(same) == 2
        swapped = {**same[0].parameters, **same[1].local}
        assert not torch.allclose(
            scores(played.session, chosen[3], swapped, images),
            scores(played.session, chosen[3], {**same[0].parameters, **same[0].local}, images),
            atol=1e-3,
        )


def test_every_architecture_distils_the_mean_of_all_clients_models(played) -> None:
    for number in TRAINED:
        _, answers = played.of(number, "predict")
        mean = torch.stack([answer.logits for answer in answers]).double().mean(0)
        tasks, trained = played.of(number, "distill")
        assert [task.architecture for task in tasks] == [SMALLEST, MIDDLE, LARGEST]
        for task, update in zip(tasks, trained, strict=True):
            assert task.client == SERVER
            assert task.training.iterations == 3
            assert task.training.learning_rate == pytest.approx(0.1 * 0.994 ** (number - 1))
            assert (task.training.momentum, task.training.batch) == (0.9, 16)
            assert torch.allclose(task.targets["probabilities"].double(), torch.softmax(mean, 1), atol=1e-6)
            assert "labels" not in task.targets
            assert not torch.equal(update.parameters["features.0.weight"], task.parameters["features.0.weight"])
            counter = "features.1.num_batches_tracked"
            assert int(update.parameters[counter]) == int(task.parameters[counter]) + 3, "three steps"


def test_norm_layers_can_go_on_from_those_of_the_servers_models(tiny, fleet, play_in_memory) -> None:
    """Otherwise they begin each distillation as the clients' average; the convolutions do so in both cases."""
    settings = {"method": "feddf", "distillation.family": ["vgg-small"], "distillation.iterations": 3}
    settings |= {"distillation.norm_layers": "kept", **fleet(10**15)}
    found = play_in_memory(tiny(settings), rounds=2)
    for number in (1, 2):
        (task,), _ = found.of(number, "distill")
        (before, after) = (found.states[number - 1].model, task.parameters)
        local = set(found.session.world.chain.local())
        assert local
        assert all(torch.equal(before[name], after[name]) == (name in local) for name in before)


def test_the_paper_distils_for_128_iterations() -> None:
    assert DistillationSettings().iterations == 128


def test_what_was_distilled_is_the_state_and_the_largest_is_the_result(played, same_tensors) -> None:
    for number in (1, 2):
        state, (_, trained) = played.states[number], played.of(number, "distill")
        for update, name in zip(trained, MEMORY, strict=True):
            assert same_tensors(state.models[name], update.parameters)
        assert same_tensors(state.model, state.models[BACKBONE])


def test_the_journal_has_the_loss_of_every_distillation(played) -> None:
    for number, record in enumerate(played.records, start=1):
        losses = {NAMES[n]: u.loss for n, u in zip(MEMORY, played.of(number, "distill")[1], strict=True)}
        assert record["distillation"] == losses
        assert all(0 < loss < 10 for loss in losses.values())


# The result.


def test_the_best_round_comes_back_and_the_last_is_reported_too(played, same_tensors) -> None:
    """0.4 + 1.5 · 0.3 = 0.85 beats 0.8 and 0.75."""
    end = played.states[-1]
    assert same_tensors(end.model, played.states[2].model)
    assert not same_tensors(end.model, end.models[BACKBONE])
    results = played.session.method.results(end)
    assert {name: (r["round"], r["clean"], r["adversarial"]) for name, r in results.items()} == {
        "best": (2, pytest.approx(0.4), pytest.approx(0.3)),
        "last": (3, pytest.approx(0.6), pytest.approx(0.1)),
    }


def _told_apart(state):
    """Return a state whose model says class 3 with the norm layers it was distilled with, and class 7 with any others.

    Its last norm layer gives out nothing, so that the bias alone decides.
    """
    last = [name for name in state.model if name.endswith(".running_mean")][-1].removesuffix(".running_mean")
    weight, bias = torch.zeros(10, 16), torch.zeros(10)
    weight[7], bias[3] = 1000.0, 1.0
    changes = {f"{last}.weight": torch.zeros(16), f"{last}.bias": torch.zeros(16)}
    changes |= {"classifier.0.weight": weight, "classifier.0.bias": bias}
    return replace(state, model={**state.model, **changes}), changes


def test_clients_evaluate_the_servers_model_with_its_norm_layers_and_not_their_own(played) -> None:
    session = played.session
    state, changes = _told_apart(played.states[1])
    local = set(session.world.chain.local())
    assert set(changes) & local, "a norm layer is among the changes"
    for client in (0, 2):  # both have norm layers of their own for this architecture
        task = session.method.evaluation_task(state, client, None)
        labels = session.population.client_data(client).validation.labels
        (answer,) = session.engine.map([task])
        assert answer.clean == int((labels == 3).sum())
        own = replace(task, parameters={n: v for n, v in task.parameters.items() if n not in local})
        (answer,) = session.engine.map([own])
        assert answer.clean == int((labels == 7).sum()), "the check would see the client's own layers"


def test_the_exported_model_has_the_servers_norm_layers(played, same_tensors) -> None:
    state = played.states[2]
    exported = exported_model(played.session, state, played.session.engine)
    assert set(exported) == set(models.build("vgg-small", (1, 8, 8), 10, width=4).state_dict())
    assert same_tensors(exported, state.model)
    assert played.session.method.norm_layers != JointTraining.norm_layers


@pytest.mark.parametrize("layers", ["local", "shared", "statistics-local", "frozen"])
def test_wherever_norm_layers_live_results_say_that_they_were_distilled(layers, tiny) -> None:
    method = assemble(tiny({**SETTINGS, "norm.layers": layers})).method
    assert set(method.layers_of(method.initial()).values()) == {"those that the server's model was distilled with"}


def test_the_global_accuracy_leaves_the_public_set_out(played) -> None:
    session = played.session
    state, _ = _told_apart(played.states[1])
    held_out = session.population.client_data(SERVER).validation.labels
    assert len(held_out) == len(session.dataset.test) - PUBLIC
    found = evaluate(session, state, ("clean",), session.engine)["global"]["clean"]
    assert found["samples"] == len(held_out)
    assert found["accuracy"] == pytest.approx(int((held_out == 3).sum()) / len(held_out))


# What goes wrong.


def _broken(update):
    name = "features.0.weight"
    return replace(update, parameters={**update.parameters, name: update.parameters[name] * float("nan")})


def test_a_client_that_diverged_is_in_neither_average_nor_ensemble(
    tiny, play_in_memory, poisoned, with_memories
) -> None:
    played = play_in_memory(tiny(SETTINGS), lambda engine: with_memories(poisoned(_broken, [1], [0])(engine)), rounds=1)
    assert played.records[0]["dropped"] == {"0": "features.0.weight is not finite"}
    updates = played.of(1, "train")[1]
    asked, answers = played.of(1, "predict")
    images = public_images(played.session)
    assert [task.architecture for task in asked] == [SMALLEST, LARGEST, SMALLEST]
    for update, task, answer in zip(updates[1:], asked, answers, strict=True):
        expected = scores(played.session, task.architecture, {**update.parameters, **update.local}, images)
        assert torch.allclose(answer.logits, expected, rtol=1e-4, atol=1e-5)
    tasks = played.of(1, "distill")[0]
    mean = torch.stack([answer.logits for answer in answers]).mean(0)
    assert torch.allclose(tasks[0].targets["probabilities"], torch.softmax(mean, 1), atol=1e-6)
    assert torch.allclose(tasks[2].parameters["features.0.weight"], updates[2].parameters["features.0.weight"])
    assert all(bool(torch.isfinite(value).all()) for value in played.states[1].model.values())


def _diverged(answer):
    """Two of three distillations fail, in the two ways that there are."""
    return {0: _broken, 2: lambda a: replace(a, loss=float("inf"))}.get(answer.number, lambda a: a)(answer)


def test_a_distillation_that_diverged_leaves_the_model_as_averaged(
    tiny, play_in_memory, poisoned, with_memories, same_tensors
) -> None:
    diverging = poisoned(_diverged, [1], kind="distill")
    played = play_in_memory(tiny(SETTINGS), lambda engine: with_memories(diverging(engine)), rounds=1)
    students = {task.architecture: task.parameters for task in played.of(1, "distill")[0]}
    state, losses = played.states[1], played.records[0]["distillation"]
    assert same_tensors(state.models[SMALLEST], students[SMALLEST])
    assert same_tensors(state.models[LARGEST], students[LARGEST])
    assert same_tensors(state.model, students[LARGEST])
    assert not same_tensors(state.models[MIDDLE], students[MIDDLE])
    assert losses[SMALLEST] is None
    assert losses["vgg-small"] is None
    assert losses[MIDDLE] > 0


# Resuming, and any order.


@pytest.mark.slow
def test_a_round_that_was_stopped_at_its_end_is_played_again(tiny, fleet, resumed, tmp_path, same_tensors) -> None:
    config = tiny({**SETTINGS, **fleet(1000, 10**12), "memory.budget": MEMORY[MIDDLE], "evaluate.clients": 1})
    _, state, record = resumed(config, tmp_path, 2)
    assert set(record["architectures"].values()) == {MIDDLE, "vgg-small"}
    session = assemble(config)
    straight = session.method.initial()
    for _ in range(2):
        straight, expected = play_round(session.method.round(straight), session.engine)
    assert record == expected
    assert all(same_tensors(state.models[name], straight.models[name]) for name in MEMORY)


def test_a_checkpoint_holds_the_result_once(played) -> None:
    """It is the largest of the family's models, and here the best round's too."""
    state = played.states[1]
    once = sum(len(model) for model in state.models.values())
    data, tensors = encode(state)
    assert len(tensors) == once
    assert len(encode(decode(type(state), data, tensors))[1]) == once


def test_the_order_in_which_an_engine_answers_does_not_matter(
    tiny, played, play_in_memory, scripted, shuffled, with_memories, same_tensors
) -> None:
    wrapped = lambda engine: shuffled(with_memories(scripted(ACCURACIES)(engine)))  # noqa: E731
    mixed = play_in_memory(tiny(SETTINGS), wrapped, rounds=1)
    assert mixed.records == played.records[:1]
    assert all(same_tensors(mixed.states[1].models[name], played.states[1].models[name]) for name in MEMORY)


# A model of the user's own.


def test_a_model_of_ones_own_is_the_largest_of_a_family_of_ones_choice(tiny) -> None:
    torch.manual_seed(4)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10)
    )
    before = {name: value.clone() for name, value in net.state_dict().items()}
    family = {"model.name": "custom", "distillation.family": [SMALLEST, "custom"]}
    session = assemble(tiny({**SETTINGS, **family}), model=net)
    assert list(session.world.family) == [SMALLEST, BACKBONE]
    assert session.world.family[BACKBONE].chain is session.world.chain
    state, record = play_round(session.method.round(session.method.initial()), session.engine)
    assert set(record["distillation"]) == {SMALLEST, "custom"}
    assert set(record["architectures"].values()) <= {SMALLEST, "custom"}
    assert set(state.model) == set(before)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items()), "theirs stays as it is"
