"""Two sets of norm statistics: hand-computed after each iteration, kept apart, used where they belong."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import fedprophet.client.captured as captured
from fedprophet.cascade.atoms import explicit_chain
from fedprophet.client.features import FeatureCache
from fedprophet.client.layer_store import ClientStore
from fedprophet.client.run import Client, run_client
from fedprophet.client.statistics import ADVERSARIAL, statistics_names
from fedprophet.client.workspace import Workspace
from fedprophet.data.dataset import ClientData
from fedprophet.data.examples import LocalExamples, TensorExamples
from fedprophet.messages.answers import Adopted
from fedprophet.messages.modules import ModuleStore
from fedprophet.messages.tasks import Adopt, Evaluate, Train
from fedprophet.messages.values import LocalTraining, Resources, Timeline
from fedprophet.threat import input_threat

MEAN, VAR, COUNT = "all.1.running_mean", "all.1.running_var", "all.1.num_batches_tracked"
AFFINE = ("all.1.weight", "all.1.bias")
PIXELS = (0.0, 0.2, 0.4, 1.0)
SPREAD = 0.56 / 3
"""Their unbiased variance; their mean is 0.4."""
CLEAN_MEAN, CLEAN_VAR = 1.8, 4 * SPREAD
"""Of what the norm layer reads for clean pixels, 2 x + 1."""
ATTACKED_MEAN, ATTACKED_VAR = 2.0, SPREAD
"""And for attacked ones, which are x / 2 + 0.3."""
THREAT = input_threat(1e-4, 1e-4, 1)


def workspace_of(momentum: float | None = 0.1) -> Workspace:
    """The convolution 2 x + 1, a norm layer, and scores −z and z for two classes."""
    norm = nn.BatchNorm2d(1, momentum=momentum)
    layers = nn.Sequential(nn.Conv2d(1, 1, 1), norm, nn.Flatten(), nn.Linear(1, 2, bias=False))
    chain = explicit_chain([("all", layers)])
    with torch.no_grad():
        chain.tensors["all.0.weight"].fill_(2.0)
        chain.tensors["all.0.bias"].fill_(1.0)
        chain.tensors["all.3.weight"].copy_(torch.tensor([[-1.0], [1.0]]))
    return Workspace(chain, (1, 1, 1), 2, ModuleStore(), ClientStore(None, 10**6), FeatureCache(10**6, 10**6))


@pytest.fixture
def workspace() -> Workspace:
    return workspace_of()


def client_of(*pixels: float) -> Client:
    """Return a client whose brightest pixel alone is of class 1."""
    examples = TensorExamples(torch.tensor(pixels).view(-1, 1, 1, 1), torch.tensor([int(p == 1) for p in pixels]))
    everything = LocalExamples(examples, np.arange(len(pixels)))
    return Client(ClientData(everything, everything), lambda _: Resources(1, 1.0, 1.0))


@pytest.fixture
def client() -> Client:
    return client_of(*PIXELS)


@pytest.fixture(autouse=True)
def attacks(workspace, monkeypatch) -> list[tuple[float, bool]]:
    """Replace the attack, and list the running mean and the mode of the norm layer that it met."""
    met: list[tuple[float, bool]] = []

    def attack(objective, x, perturbed, threat):
        met.append((float(workspace.chain.tensors[MEAN]), workspace.chain.model.all[1].training))
        return x / 2 + 0.3

    monkeypatch.setattr(captured, "climb", attack)
    return met


def train(workspace, client, attacked, round=1, iterations=1, rate=0.0, **more):
    hyper = LocalTraining(iterations, 4, learning_rate=rate, momentum=0.0, weight_decay=0.0, strong_convexity=0.0)
    tensors = workspace.chain.tensors
    shared = {name: tensors[name].detach().clone() for name in workspace.chain.shared()}
    two_sets = {"threat": THREAT, "adversarial_statistics": True} if attacked else {}
    where = {"round": round, "client": 0, "seed": 0, "last": 1}
    return run_client(Train(**where, training=hyper, parameters=shared, **{**more, **two_sets}), client, workspace)


def own(workspace, before=99):
    return workspace.layers.get("backbone", 0, Timeline(), before)


def numbers(workspace, *names):
    return pytest.approx([float(own(workspace)[name]) for name in names], rel=1e-5)


# Training ------------------------------------------------------------------------------------------------------------


def test_one_iteration_by_hand(workspace, client, attacks):
    """The clean batch moves one set by a tenth of the way, the attacked batch the other."""
    train(workspace, client, attacked=True)
    assert numbers(workspace, MEAN, VAR) == [0.1 * CLEAN_MEAN, 0.9 + 0.1 * CLEAN_VAR]
    assert numbers(workspace, ADVERSARIAL + MEAN, ADVERSARIAL + VAR) == [0.1 * ATTACKED_MEAN, 0.9 + 0.1 * ATTACKED_VAR]
    assert attacks == [(0.0, False)]


def test_two_iterations_by_hand(workspace, client, attacks):
    """The attack, in evaluation mode, meets the adversarial set."""
    train(workspace, client, attacked=True, iterations=2)
    assert numbers(workspace, MEAN, VAR) == [0.19 * CLEAN_MEAN, 0.81 + 0.19 * CLEAN_VAR]
    assert numbers(workspace, ADVERSARIAL + MEAN, ADVERSARIAL + VAR) == [
        0.19 * ATTACKED_MEAN,
        0.81 + 0.19 * ATTACKED_VAR,
    ]
    assert attacks == [(0.0, False), (pytest.approx(0.1 * ATTACKED_MEAN), False)]


def test_the_clean_batch_is_seen_before_the_step_and_is_no_step(workspace, client):
    """Were it seen after the step, the convolution would be another; the step is that on the attacked batch alone."""
    update = train(workspace, client, attacked=True, rate=0.5)
    assert numbers(workspace, MEAN) == [0.1 * CLEAN_MEAN]
    weight = update.parameters["all.0.weight"]
    assert float(weight) != 2.0
    alone = workspace_of()
    x = torch.tensor(PIXELS).view(4, 1, 1, 1) / 2 + 0.3
    loss = nn.functional.cross_entropy(alone.chain.model.train()(x), torch.tensor([0, 0, 0, 1]))
    loss.backward()
    assert float(weight) == pytest.approx(2.0 - 0.5 * float(alone.chain.tensors["all.0.weight"].grad), rel=1e-5)


def test_the_affine_transformation_is_shared(workspace, client):
    update = train(workspace, client, attacked=True, rate=0.5, wants_local=True)
    statistics = {MEAN, VAR, COUNT}
    assert set(own(workspace)) == {*AFFINE, *statistics, *(ADVERSARIAL + name for name in statistics)}
    assert float(own(workspace)["all.1.weight"]) != 1.0
    assert all(torch.equal(value, update.local[name]) for name, value in own(workspace).items())
    assert set(update.parameters) == {"all.0.weight", "all.0.bias", "all.3.weight"}


def test_a_client_without_attack_touches_its_clean_set_alone(workspace, client, attacks):
    train(workspace, client, attacked=False)
    assert set(own(workspace)) == {*AFFINE, MEAN, VAR, COUNT}
    assert numbers(workspace, MEAN) == [0.1 * CLEAN_MEAN]
    train(workspace, client, attacked=True, round=2)
    train(workspace, client, attacked=False, round=3)
    clean = 0.271 * CLEAN_MEAN  # three tenths of the way, one after the other
    # The adversarial set began with the clean one of round 1, and stays as round 2 left it.
    adversarial = 0.9 * 0.1 * CLEAN_MEAN + 0.1 * ATTACKED_MEAN
    assert [clean, adversarial] == numbers(workspace, MEAN, ADVERSARIAL + MEAN)
    assert attacks == [(pytest.approx(0.1 * CLEAN_MEAN), False)]


def test_later_rounds_go_on_with_both_sets(workspace, client):
    train(workspace, client, attacked=True)
    train(workspace, client, attacked=True, round=2)
    assert numbers(workspace, MEAN, ADVERSARIAL + MEAN) == [0.19 * CLEAN_MEAN, 0.19 * ATTACKED_MEAN]
    train(workspace, client, attacked=True, round=2)
    assert numbers(workspace, MEAN, ADVERSARIAL + MEAN) == [0.19 * CLEAN_MEAN, 0.19 * ATTACKED_MEAN]


def test_each_set_counts_its_own_batches(client):
    """Without a momentum, running statistics are the mean over all batches that were counted."""
    workspace = workspace_of(momentum=None)
    train(workspace, client, attacked=True, iterations=3)
    assert numbers(workspace, MEAN, VAR) == [CLEAN_MEAN, CLEAN_VAR]
    assert numbers(workspace, ADVERSARIAL + MEAN, ADVERSARIAL + VAR) == [ATTACKED_MEAN, ATTACKED_VAR]
    assert numbers(workspace, COUNT, ADVERSARIAL + COUNT) == [3.0, 3.0]


def test_a_single_sample_moves_no_statistics(workspace):
    train(workspace, client_of(0.5), attacked=True)
    assert numbers(workspace, MEAN, VAR, ADVERSARIAL + MEAN, ADVERSARIAL + VAR) == [0, 1, 0, 1]


def test_a_clean_set_that_is_not_finite_makes_the_update_unusable(workspace, client):
    """Neither the loss nor the trained parameters would tell: the clean set takes no part in them."""
    train(workspace, client, attacked=True)
    broken = {**own(workspace), MEAN: torch.tensor([-math.inf])}
    workspace.layers.put("backbone", 0, 1, broken, Timeline())
    update = train(workspace, client, attacked=True, round=2)
    assert math.isnan(update.loss)
    after_round_1 = Timeline(discarded=((0, 1),))
    assert workspace.layers.get("backbone", 0, after_round_1, 99) is None, "nothing of round 2 is kept"


# Evaluation and adoption ---------------------------------------------------------------------------------------------


def evaluate(workspace, client, **more):
    tensors = workspace.chain.tensors
    shared = {name: tensors[name].detach().clone() for name in workspace.chain.shared()}
    task = Evaluate(round=1, client=0, seed=0, last=1, parameters=shared, **more)
    answer = run_client(task, client, workspace)
    return answer.samples, answer.clean, answer.adversarial


def test_clean_images_meet_the_clean_statistics_and_attacked_ones_the_others(workspace, client):
    """With mean 2.2 all four are right; with mean 5 everything looks like class 0, which one of four is not."""
    tensors = {MEAN: torch.tensor([2.2]), ADVERSARIAL + MEAN: torch.tensor([5.0])}
    workspace.layers.put("backbone", 0, 1, tensors, Timeline())
    two_sets = evaluate(workspace, client, threat=THREAT, adversarial_statistics=True)
    assert two_sets == (4, 4, 3)
    assert evaluate(workspace, client) == (4, 4, 0), "the next task finds the clean set"
    assert evaluate(workspace, client, threat=THREAT) == (4, 4, 4)


def test_without_adversarial_statistics_the_clean_ones_serve(workspace, client):
    workspace.layers.put("backbone", 0, 1, {MEAN: torch.tensor([2.2])}, Timeline())
    found = evaluate(workspace, client, threat=THREAT, adversarial_statistics=True)
    assert found == (4, 4, 4)


def test_what_is_adopted_changes_nothing_else(workspace, client):
    train(workspace, client, attacked=False, round=2)
    before = own(workspace)
    given = {ADVERSARIAL + MEAN: torch.tensor([5.0]), ADVERSARIAL + VAR: torch.tensor([2.0])}
    update = run_client(Adopt(round=2, client=0, seed=0, parameters=given), client, workspace)
    assert update == Adopted(round=2, client=0, weight=8.0)
    after = own(workspace)
    assert set(after) == {*before, *given}
    assert all(torch.equal(after[name], value) for name, value in {**before, **given}.items())
    assert own(workspace, before=2) is None, "it belongs to the round in which it was given"


def test_names_of_statistics(workspace):
    assert statistics_names(workspace.chain) == (MEAN, VAR)
