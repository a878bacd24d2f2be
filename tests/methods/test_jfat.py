"""Joint training of the whole model, the reference that FedProphet is compared with."""

import pytest
import torch

from fedprophet.errors import BudgetError
from fedprophet.runs.session import assemble
from fedprophet.threat import input_threat

SETTINGS = {"method": "jfat", "rounds": 6, "population.cohort": 3, "train.iterations": 1, "evaluate.clients": 2}
ACCURACIES = {1: (0.6, 0.1), 2: (0.3, 0.2), 3: (0.5, 0.4), 4: (0.8, 0.2), 5: (0.9, 0.1), 6: (0.4, 0.3)}


@pytest.fixture(scope="module")
def played(tiny, play_in_memory, scripted):
    return play_in_memory(tiny(SETTINGS), scripted(ACCURACIES))


def test_everyone_trains_the_whole_model_under_the_attack_on_images(played):
    whole = len(played.session.world.chain)
    for record in played.records:
        tasks, _ = played.of(record["round"], "train")
        assert {(task.first, task.last, task.head, task.frozen) for task in tasks} == {(0, whole, None, ())}
        attack = input_threat(0.1, 0.025, 2) if record["round"] > 1 else None
        assert {task.threat for task in tasks} == {attack}
        assert record["adversarial_training"] == (record["round"] > 1)
        assert {task.training.learning_rate for task in tasks} == {0.1 * 0.994 ** (record["round"] - 1)}


def test_the_attack_may_grow_after_the_warm_up(tiny, play_in_memory, scripted):
    """Of five rounds the first is the warm-up; the radius of 0.1 is reached in the fourth, in three equal steps."""
    played = play_in_memory(tiny({**SETTINGS, "rounds": 5, "attack.ramp": 3}), scripted(ACCURACIES))
    assert [record["epsilon"] for record in played.records] == pytest.approx([0.1, 0.1 / 3, 0.2 / 3, 0.1, 0.1])
    assert [record["adversarial_training"] for record in played.records] == [False, True, True, True, True]
    threats = [played.of(number, "train")[0][0].threat for number in range(1, 6)]
    assert threats[0] is None
    assert [threat.step / threat.radius for threat in threats[1:]] == pytest.approx([0.25] * 4)
    evaluated = [task.threat for number in range(1, 6) for task in played.of(number, "evaluate")[0]]
    assert {threat.radius for threat in evaluated} == {0.1}, "it is judged under the whole attack"


def test_it_plays_all_rounds_whatever_the_patience(played):
    assert [record["round"] for record in played.records] == [1, 2, 3, 4, 5, 6]


def test_the_best_round_has_the_highest_clean_plus_one_and_a_half_times_adversarial_accuracy(played):
    best = None
    for record in played.records:
        assert record["score"] == record["clean"] + 1.5 * record["adversarial"]
        if best is None or record["score"] > best["score"]:
            best = record
        assert record["best_round"] == best["round"]


def test_the_best_round_comes_back_at_the_end_and_both_are_reported(played, same_tensors):
    best = played.records[-1]["best_round"]
    assert best == 3
    end = played.states[-1]
    assert same_tensors(end.model, played.states[best].model)
    assert not same_tensors(end.model, played.states[5].model)
    assert end.discarded == ((best, 6),)
    for client, own in played.layers[best - 1].items():
        assert same_tensors(own, played.layers[5][client])
    results = played.session.method.results(end)
    for name, number in (("best", best), ("last", 6)):
        record = played.records[number - 1]
        assert results[name]["round"] == number
        assert (results[name]["clean"], results[name]["adversarial"]) == (record["clean"], record["adversarial"])


def test_the_order_in_which_an_engine_works_does_not_matter(played, tiny, play_in_memory, scripted, shuffled):
    mixed = play_in_memory(tiny(SETTINGS), lambda engine: shuffled(scripted(ACCURACIES)(engine)), rounds=2)
    assert mixed.records == played.records[:2]


def test_it_needs_no_cut(tiny):
    """It takes the memory of the whole model, whatever the budget."""
    world = assemble(tiny({**SETTINGS, "memory.budget": "2%"})).world
    assert [module.memory for module in world.modules] == [world.cost.total_memory]
    with pytest.raises(BudgetError):
        assemble(tiny({"memory.budget": "2%"}))


def test_the_mean_waits_for_the_whole_attack(tiny, play_in_memory):
    """Round 1 is the warm-up, and the attack grows in rounds 2 and 3: the mean begins with round 4."""
    played = play_in_memory(tiny({**SETTINGS, "attack.ramp": 3, "aggregate.horizon": 2}), rounds=5)
    assert [state.mean.rounds if state.mean else 0 for state in played.states] == [0, 0, 0, 0, 1, 2]


def test_the_mean_of_the_last_rounds_may_be_what_is_judged_and_kept(tiny, play_in_memory, scripted, same_tensors):
    """Round 1 is the warm-up; the mean begins with round 2 and is of rounds 2 and 3 when round 3 is the best."""
    averaged = play_in_memory(tiny({**SETTINGS, "aggregate.horizon": 3}), scripted(ACCURACIES))
    plain = play_in_memory(tiny(SETTINGS), scripted(ACCURACIES))
    second, third = plain.states[2].model, plain.states[3].model
    mean = {name: (second[name] + third[name]) / 2 for name in third}
    assert averaged.states[1].mean is None
    assert same_tensors(averaged.states[3].model, third), "training goes on from the last round's"
    evaluated, _ = averaged.of(3, "evaluate")
    for task in evaluated:
        for name, value in task.parameters.items():
            assert torch.allclose(value.cpu(), mean[name], atol=1e-6), name
    end = averaged.states[-1]
    assert averaged.records[-1]["best_round"] == 3
    assert end.mean is None
    assert same_tensors(end.model, averaged.states[3].judged.model)
    assert not same_tensors(end.model, third)
