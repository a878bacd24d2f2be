"""FedET: the consensus of the clients' models, what the server's model learns of it, and the last layer they share."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedprophet import models
from fedprophet.cascade.atoms import chain_of
from fedprophet.errors import ConfigError
from fedprophet.messages.answers import Trained
from fedprophet.messages.codec import decode, encode
from fedprophet.messages.values import BACKBONE, SERVER
from fedprophet.methods.fedet import consensus, last_layer
from fedprophet.runs.export import exported_model
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import play_round

SMALLEST, MIDDLE, LARGEST = "vgg-small-3", "vgg-small-5", BACKBONE
FAMILY = (SMALLEST, MIDDLE, LARGEST)
LAST = ("classifier.0.weight", "classifier.0.bias")
TRAINED = {
    1: {0: LARGEST, 1: SMALLEST, 2: LARGEST, 3: SMALLEST},
    2: {0: MIDDLE, 1: MIDDLE, 2: SMALLEST, 3: SMALLEST},
}
"""Who trains what; nobody trains the middle one in round 1, nor the largest in round 2."""
SETTINGS = {
    "method": "fedet",
    "rounds": 2,
    "population.clients": 4,
    "population.cohort": 4,
    "distillation.public": 40,
    "distillation.iterations": 3,
    "distillation.diversity": 0.5,
    "evaluate.steps": 1,
    "evaluate.clients": 2,
    "train.iterations": 8,  # so that the clients come to disagree
}
ACCURACIES = {1: (0.5, 0.2), 2: (0.4, 0.3)}


@pytest.fixture(scope="module")
def with_memories(tiny, scripted, memories):
    """Return what is wrapped around an engine."""
    family = assemble(tiny(SETTINGS)).world.family
    needed = {name: member.cost.total_memory for name, member in family.items()}
    return lambda engine: memories(scripted(ACCURACIES)(engine), needed, TRAINED)


@pytest.fixture(scope="module")
def played(tiny, play_in_memory, with_memories):
    return play_in_memory(tiny(SETTINGS), with_memories)


def logits_of(*models_: list[list[float]]) -> Tensor:
    """Return scores whose softmax is the probabilities given, shifted, which changes nothing."""
    return torch.tensor(models_).log() + torch.arange(len(models_)).view(-1, 1, 1)


# The target.


def test_the_consensus_counts_a_model_as_much_as_its_probabilities_vary() -> None:
    """Two of three models say class 0, but the third is surer of class 2.

    The variances of (.7, .2, .1), (.6, .3, .1) and (.1, .1, .8) are .54/3 − 1/9, .46/3 − 1/9 and .66/3 − 1/9, that is
    .62/9, .38/9 and .98/9. Class 0 has (.62 · .7 + .38 · .6 + .98 · .1) / 1.98 = .760 / 1.98, class 2 has
    (.062 + .038 + .784) / 1.98 = .884 / 1.98. In the plain mean class 0 has 1.4 / 3, class 2 has 1 / 3.
    """
    found = consensus(logits_of([[0.7, 0.2, 0.1]], [[0.6, 0.3, 0.1]], [[0.1, 0.1, 0.8]]), 0.05)
    assert found["labels"].tolist() == [2]
    # The first two disagree: .62 · (.7, .2, .1) + .38 · (.6, .3, .1), and .62 + .38 = 1.
    assert torch.allclose(found["probabilities"], torch.tensor([[0.662, 0.238, 0.1]]), atol=1e-6)
    assert found["weights"].tolist() == pytest.approx([0.05])


def test_one_dissenter_is_heard_alone() -> None:
    found = consensus(logits_of([[0.8, 0.1, 0.1]], [[0.7, 0.2, 0.1]], [[0.3, 0.5, 0.2]]), 0.2)
    assert found["labels"].tolist() == [0]
    assert torch.allclose(found["probabilities"], torch.tensor([[0.3, 0.5, 0.2]]), atol=1e-6)
    assert found["weights"].tolist() == pytest.approx([0.2])


def test_where_all_agree_only_the_label_counts() -> None:
    found = consensus(logits_of([[0.2, 0.5, 0.3]], [[0.1, 0.8, 0.1]]), 0.05)
    assert found["labels"].tolist() == [1]
    assert found["weights"].tolist() == [0.0]
    assert bool(torch.isfinite(found["probabilities"]).all())


@pytest.mark.parametrize("classes", [2, 3, 4, 10])
def test_models_that_know_nothing_give_numbers_all_the_same(classes: int) -> None:
    found = consensus(torch.zeros(3, 1, classes), 0.05)
    assert 0 <= int(found["labels"]) < classes
    assert all(bool(torch.isfinite(value).all()) for value in found.values())


@pytest.mark.parametrize("classes", [2, 4, 8])  # their shares are exact, and so is the variance of zero
def test_a_dissenter_without_any_confidence_is_still_the_only_one_heard(classes: int) -> None:
    sure = torch.zeros(1, classes)
    sure[0, 1] = 5.0
    found = consensus(torch.stack([sure, sure, torch.zeros(1, classes)]), 0.05)
    assert found["labels"].tolist() == [1]
    assert torch.allclose(found["probabilities"], torch.full((1, classes), 1 / classes))
    assert found["weights"].tolist() == pytest.approx([0.05])


def test_samples_are_judged_each_for_itself() -> None:
    first, second = [0.7, 0.2, 0.1], [0.1, 0.1, 0.8]
    found = consensus(logits_of([first, first], [[0.6, 0.3, 0.1], first], [second, [0.5, 0.4, 0.1]]), 0.05)
    assert found["labels"].tolist() == [2, 0]
    assert torch.allclose(found["probabilities"][0], torch.tensor([0.662, 0.238, 0.1]), atol=1e-6)
    assert found["weights"].tolist() == pytest.approx([0.05, 0.0])


# The last layer.


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("cnn3", (3, 32, 32), "classifier.0"),
        ("cnn4", (3, 64, 64), "classifier.2"),
        ("vgg11", (3, 32, 32), "classifier.6"),
        ("resnet10", (3, 16, 16), "fc"),
        ("vgg-small", (1, 8, 8), "classifier.0"),
    ],
)
def test_the_last_layer_is_the_linear_one_that_gives_the_scores(name, shape, expected) -> None:
    chain = chain_of(models.build(name, shape, 7, width=2))
    found = last_layer(chain)
    assert found == {"weight": f"{expected}.weight", "bias": f"{expected}.bias"}
    assert chain.tensors[found["weight"]].shape[0] == 7
    assert set(found.values()) <= set(chain.shared())


def test_a_family_whose_last_layers_differ_is_refused(tiny) -> None:
    text = (
        r"^distillation\.family: fedet needs models whose last linear layers have the same shape "
        r"\(cnn3: weight 10×32, bias 10; vgg-small: weight 10×16, bias 10\)\. "
    )
    with pytest.raises(ConfigError, match=text):
        assemble(tiny({**SETTINGS, "distillation.family": ["cnn3", "vgg-small"]}))
    assemble(tiny({**SETTINGS, "method": "feddf", "distillation.family": ["cnn3", "vgg-small"]}))


def test_the_papers_families_have_one_last_layer() -> None:
    for family, shape in ((("cnn3", "vgg11", "vgg16"), (3, 32, 32)), (("cnn4", "resnet10", "resnet18"), (3, 64, 64))):
        shapes = set()
        for name in family:
            tensors = models.build(name, shape, 5, width=4).state_dict()
            shapes.add(tuple(tensors[[n for n in tensors if n.endswith("weight")][-1]].shape))
        assert shapes == {(5, 32)}


# A round.


def weighted(updates: Iterable[Trained], name: str) -> Tensor:
    """Σ q_k w_k / Σ q_k over shards of q_k samples, written out."""
    sums, total = 0.0, 0.0
    for update in updates:
        sums = sums + update.weight * {**update.parameters, **update.local}[name].double()
        total += update.weight
    return sums / total


def test_the_servers_model_alone_is_distilled(played) -> None:
    for number in TRAINED:
        tasks, _ = played.of(number, "distill")
        assert [(task.client, task.architecture) for task in tasks] == [(SERVER, BACKBONE)]
        assert set(played.records[number - 1]["distillation"]) == {"vgg-small"}
        assert played.records[number - 1]["distillation"]["vgg-small"] > 0


def test_its_last_layer_starts_as_the_average_of_all_clients_last_layers(played) -> None:
    for number in TRAINED:
        updates = played.of(number, "train")[1]
        assert len({update.weight for update in updates}) > 1
        (task,), _ = played.of(number, "distill")
        for name in LAST:
            assert torch.allclose(task.parameters[name].double(), weighted(updates, name), rtol=1e-6, atol=1e-8)
        largest = [u for u in updates if TRAINED[number][u.client] == LARGEST]
        if largest:
            alone = weighted(largest, LAST[0])
            assert not torch.allclose(task.parameters[LAST[0]].double(), alone, atol=1e-4)


def test_all_else_of_it_is_what_it_was_whatever_clients_trained(played) -> None:
    for number in TRAINED:
        before = played.states[number - 1].model
        (task,), _ = played.of(number, "distill")
        assert set(task.parameters) == set(before)
        for name, value in task.parameters.items():
            assert torch.equal(value, before[name]) == (name not in LAST), name
    assert not torch.equal(
        played.states[1].model["features.0.weight"], played.states[1].models[BACKBONE]["features.0.weight"]
    )


def test_it_learns_the_consensus_of_all_clients_models(played) -> None:
    for number in TRAINED:
        logits = torch.stack([answer.logits for answer in played.of(number, "predict")[1]])
        (task,), _ = played.of(number, "distill")
        for sample in range(40):
            p = torch.softmax(logits[:, sample].double(), 1)
            v = p.square().mean(1) - 0.01  # ten classes, whose mean probability is a tenth
            label = int((v @ p).argmax())
            against = [k for k in range(4) if int(p[k].argmax()) != label]
            assert int(task.targets["labels"][sample]) == label
            assert float(task.targets["weights"][sample]) == (0.5 if against else 0.0)
            if against:
                expected = (v[against] @ p[against]) / v[against].sum()
                assert torch.allclose(task.targets["probabilities"][sample].double(), expected, atol=1e-4)
        assert int((task.targets["weights"] > 0).sum()) > 0, "somebody disagrees somewhere"


def test_what_it_learned_is_the_result_and_its_last_layer_goes_to_every_architecture(played, same_tensors) -> None:
    (_, (update,)) = played.of(1, "distill")
    state = played.states[1]
    assert same_tensors(state.model, update.parameters)
    for name in FAMILY:
        for tensor in LAST:
            assert torch.equal(state.models[name][tensor], state.model[tensor])
    tasks, _ = played.of(2, "train")
    assert {task.architecture for task in tasks} == {SMALLEST, MIDDLE}
    assert all(torch.equal(task.parameters[tensor], state.model[tensor]) for task in tasks for tensor in LAST)


def test_all_else_of_an_architecture_is_averaged_over_those_who_trained_it(played) -> None:
    for number, chosen in TRAINED.items():
        updates, before, after = played.of(number, "train")[1], played.states[number - 1], played.states[number]
        for architecture in FAMILY:
            its = [update for update in updates if chosen[update.client] == architecture]
            assert set(after.models[architecture]) == set(before.models[architecture])
            for name, value in after.models[architecture].items():
                if name in LAST or not value.is_floating_point():
                    continue
                if its:
                    assert torch.allclose(value.double(), weighted(its, name), rtol=1e-6, atol=1e-7), name
                else:
                    assert torch.equal(value, before.models[architecture][name]), "nobody trained it"


def test_the_result_is_the_best_rounds_server_model_with_its_own_norm_layers(played, same_tensors) -> None:
    """0.4 + 1.5 · 0.3 beats 0.5 + 1.5 · 0.2."""
    end, session = played.states[2], played.session
    assert played.session.method.results(end)["best"]["round"] == 2
    assert same_tensors(exported_model(session, end, session.engine), played.of(2, "distill")[1][0].parameters)
    task = session.method.evaluation_task(end, 0, None)
    assert task.architecture == BACKBONE
    assert same_tensors(task.parameters, end.model)


def test_a_distillation_that_diverged_keeps_the_averaged_last_layer(
    tiny, play_in_memory, with_memories, poisoned
) -> None:
    diverging = poisoned(lambda answer: replace(answer, loss=float("nan")), [1], kind="distill")
    played = play_in_memory(tiny(SETTINGS), lambda engine: diverging(with_memories(engine)), rounds=1)
    (task,), _ = played.of(1, "distill")
    state = played.states[1]
    assert all(torch.equal(state.model[name], value) for name, value in task.parameters.items())
    assert all(torch.equal(state.models[name][tensor], task.parameters[tensor]) for name in FAMILY for tensor in LAST)
    assert played.records[0]["distillation"] == {"vgg-small": None}


def test_a_state_that_was_written_and_read_goes_on_to_the_same_bits(
    tiny, played, with_memories, shuffled, same_tensors
) -> None:
    """Also where the engine answers in an order of its own."""
    session = assemble(tiny(SETTINGS))
    engine = shuffled(with_memories(session.engine))
    state, _ = play_round(session.method.round(session.method.initial()), engine)
    state, record = play_round(session.method.round(decode(session.method.state, *encode(state))), engine)
    assert record == played.records[1]
    assert same_tensors(state.model, played.states[2].model)
    assert all(same_tensors(state.models[name], played.states[2].models[name]) for name in FAMILY)
