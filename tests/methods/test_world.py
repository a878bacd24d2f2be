"""What every method is given: the values that the configuration makes, and the clients."""

import pytest
import torch

from fedprophet.errors import ConfigError
from fedprophet.methods.fedprophet import initial_heads
from fedprophet.methods.world import local_training
from fedprophet.runs.session import assemble


@pytest.fixture(scope="module")
def world(tiny):
    return assemble(tiny({"train.decay": 0.5, "evaluate.batch": 0})).world


@pytest.fixture(scope="module")
def other_seed(tiny):
    return assemble(tiny({"seed": 9, "evaluate.batch": 100})).world


def test_the_learning_rate_decays_from_the_second_round_on(world):
    assert [world.local_training(t).learning_rate for t in (1, 2, 3)] == [0.1, 0.05, 0.025]


def test_a_cohort_depends_on_seed_and_round_alone(world, other_seed, tiny):
    other = assemble(tiny({"train.batch": 8, "assignment.enabled": False})).world
    cohorts = [world.clients.cohort(r) for r in range(1, 30)]
    assert cohorts == [other.clients.cohort(r) for r in range(1, 30)]
    assert all(len(set(cohort)) == 2 and cohort == tuple(sorted(cohort)) for cohort in cohorts)
    assert set().union(*cohorts) == set(range(6))
    assert cohorts != [other_seed.clients.cohort(r) for r in range(1, 30)]


def test_a_sample_is_all_clients_or_as_many_as_asked(world):
    assert world.clients.sample("all", 1, "evaluate") == (0, 1, 2, 3, 4, 5)
    assert len(world.clients.sample(4, 1, "evaluate")) == 4
    assert len({world.clients.sample(2, r, "evaluate") for r in range(20)}) > 1


def test_the_evaluation_batch_keeps_activations_within_the_budget(world, other_seed):
    budget = max(module.memory for module in world.modules)
    for last in range(2, len(world.chain) + 1):
        batch = world.evaluation_batch(last)
        per_sample = 4 * sum(atom.activations for atom in world.cost.atoms[:last]) / world.cost.batch
        assert 1 <= batch <= 16
        assert batch * per_sample <= budget
        assert batch == 16 or (batch + 1) * per_sample > budget
    assert world.evaluation_batch(len(world.chain)) < 16
    assert other_seed.evaluation_batch(1) == 100


def test_heads_fit_their_features_and_come_from_the_seed(world, other_seed):
    heads, again, other = (initial_heads(w) for w in (world, world, other_seed))
    assert set(heads) == {"heads/0.weight", "heads/0.bias", "heads/1.weight", "heads/1.bias"}
    assert all(torch.equal(heads[name], again[name]) for name in heads)
    assert not torch.equal(heads["heads/0.weight"], other["heads/0.weight"])
    for module in world.modules[:-1]:
        assert heads[f"heads/{module.index}.weight"].shape[0] == 10
        channels = world.cost.atoms[module.last - 1].output[1]
        assert heads[f"heads/{module.index}.weight"].shape[1] % channels == 0


def test_the_initial_model_is_a_copy(world):
    model = world.initial_model()
    name = world.chain.shared()[0]
    assert set(model) == set(world.chain.shared())
    model[name].zero_()
    assert bool(world.chain.tensors[name].detach().abs().sum() > 0)


@pytest.mark.parametrize("method", ["jfat", "fedrbn"])
def test_a_run_says_how_its_norm_layers_were_joined(method, tiny):
    text = assemble(tiny({"method": method, "aggregate.rule": "median"})).method.norm_layers
    assert text.startswith("median over the clients that have trained")
    assert ("adversarial" in text) == (method == "fedrbn")
    assert assemble(tiny({"method": method})).method.norm_layers.startswith("mean over the clients")
    assert "pooled" not in assemble(tiny({"method": method})).method.norm_layers
    text = assemble(tiny({"method": method, "norm.layers": "statistics-local"})).method.norm_layers
    assert "statistics: mean over the clients that have trained, weighted by shard size, variances pooled" in text


@pytest.mark.parametrize(("after", "rounds"), [("50%", "4 rounds"), (1, "1 round")])
def test_a_run_says_when_statistics_were_fixed(after, rounds, tiny):
    settings = {"method": "jfat", "rounds": 8, "norm.layers": "frozen", "norm.frozen_after": after}
    method = assemble(tiny(settings)).method
    joined = "joined in every round like all parameters, variances pooled"
    text = f"{joined}; statistics fixed after {rounds} of a stage"
    assert method.layers_of(method.initial()) == {"personalised": text, "global": text}
    shared = assemble(tiny({**settings, "norm.layers": "shared"})).method
    assert "fixed" not in shared.layers_of(shared.initial())["global"]


def test_a_single_round_gathers_statistics_and_fixes_none(tiny):
    """A preset's share does not refuse it; a number of rounds that was asked for does."""
    single = {"method": "jfat", "rounds": 1, "train.warmup": 0, "norm.layers": "frozen"}
    config = tiny({**single, "norm.frozen_after": "50%"})
    method = assemble(config).method
    assert not local_training(config, stage_round=1).fixed_statistics
    assert "fixed" not in method.layers_of(method.initial())["global"]
    for given, rounds in ((1, 1), (0, 3), (3, 3)):
        with pytest.raises(ConfigError, match=rf"norm.frozen_after: given {given}, allowed: at least 1"):
            tiny({**single, "rounds": rounds, "norm.frozen_after": given})
    few = tiny({**single, "rounds": 3, "norm.frozen_after": "30%"})
    assert few.frozen_after_rounds == 1
