"""What every method is given: the world, and the table of methods."""

import pytest
import torch

from fedprophet.errors import ConfigError
from fedprophet.methods import METHODS, find_method
from fedprophet.runs.session import assemble


@pytest.fixture(scope="module")
def world(tiny):
    return assemble(tiny({"train.decay": 0.5, "evaluate.batch": 0})).world


def test_an_unknown_method_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown method 'fedprofet'\. Did you mean 'fedprophet'\? Known: .*jfat"):
        find_method("fedprofet")
    assert find_method("jfat") is METHODS["jfat"]


def test_the_learning_rate_decays_from_the_second_round_on(world):
    assert [world.local_training(t).learning_rate for t in (1, 2, 3)] == [0.1, 0.05, 0.025]


def test_a_cohort_depends_on_seed_and_round_alone(world, tiny):
    other = assemble(tiny({"train.batch": 8, "assignment.enabled": False})).world
    third = assemble(tiny({"seed": 1})).world
    cohorts = [world.cohort(r) for r in range(1, 30)]
    assert cohorts == [other.cohort(r) for r in range(1, 30)]
    assert all(len(set(cohort)) == 2 and cohort == tuple(sorted(cohort)) for cohort in cohorts)
    assert set().union(*cohorts) == set(range(6))
    assert cohorts != [third.cohort(r) for r in range(1, 30)]


def test_a_sample_is_everybody_or_as_many_as_asked(world):
    assert world.sample("all", 1, "evaluate") == (0, 1, 2, 3, 4, 5)
    assert len(world.sample(4, 1, "evaluate")) == 4
    assert len({world.sample(2, r, "evaluate") for r in range(20)}) > 1


def test_the_evaluation_batch_keeps_activations_within_the_budget(world, tiny):
    budget = max(module.memory for module in world.modules)
    for last in range(2, len(world.chain) + 1):
        batch = world.evaluation_batch(last)
        per_sample = 4 * sum(atom.activations for atom in world.cost.atoms[:last]) / world.cost.batch
        assert 1 <= batch <= 16
        assert batch * per_sample <= budget
        assert batch == 16 or (batch + 1) * per_sample > budget
    assert world.evaluation_batch(len(world.chain)) < 16
    assert assemble(tiny({"evaluate.batch": 100})).world.evaluation_batch(1) == 100


def test_heads_fit_their_features_and_come_from_the_seed(world, tiny):
    heads, again = world.initial_heads(), assemble(tiny()).world.initial_heads()
    assert set(heads) == {"heads.0.weight", "heads.0.bias", "heads.1.weight", "heads.1.bias"}
    assert all(torch.equal(heads[name], again[name]) for name in heads)
    other = assemble(tiny({"seed": 9})).world.initial_heads()
    assert not torch.equal(heads["heads.0.weight"], other["heads.0.weight"])
    for module in world.modules[:-1]:
        assert heads[f"heads.{module.index}.weight"].shape[0] == 10
        channels = world.cost.atoms[module.last - 1].output[1]
        assert heads[f"heads.{module.index}.weight"].shape[1] % channels == 0


def test_the_initial_model_is_a_copy(world):
    model = world.initial_model()
    name = world.chain.shared()[0]
    assert set(model) == set(world.chain.shared())
    model[name].zero_()
    assert bool(world.chain.tensors[name].detach().abs().sum() > 0)
