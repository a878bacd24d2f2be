"""Local iterations on stacks against the plain trainer: the same batches, no attack, so the same parameters."""

import math
from dataclasses import replace

import pytest
import torch

from fedprophet.client.boundary import server_probabilities
from fedprophet.client.descent import batches
from fedprophet.client.memory_plan import PLAIN
from fedprophet.client.statistics import ADVERSARIAL
from fedprophet.client.trainer import train
from fedprophet.fast.aims import Teacher
from fedprophet.fast.draws import Draws
from fedprophet.fast.folded import FoldedStack
from fedprophet.fast.kernels import Kernels
from fedprophet.fast.program import Ladder
from fedprophet.fast.rounds import Backend, StackEvaluation, TrainingPlan, uncaptured
from fedprophet.fast.training import TrainingStack
from fedprophet.messages.tasks import Task, Train
from fedprophet.messages.values import LocalTraining
from fedprophet.threat import ThreatModel, input_threat

CPU = torch.device("cpu")
HYPER = LocalTraining(iterations=4, batch=3, learning_rate=0.05, momentum=0.9, weight_decay=0.01, strong_convexity=0.02)


def task_of(client: int, hyper: LocalTraining = HYPER) -> Task:
    return Train(round=1, client=client, seed=0, training=hyper)


def trained_plainly(case, hyper: LocalTraining):
    """Train every client with the plain trainer; return its losses."""
    pairs = zip(case.segments, case.x, case.labels, strict=True)
    return [train(task_of(k, hyper), segment, x, labels) for k, (segment, x, labels) in enumerate(pairs)]


def trained_stacked(case, kernels, hyper: LocalTraining, seeds=None):
    """Train the same on a stack, on the plain trainer's batches; return its losses and tensors."""
    clients, samples = case.labels.shape
    training = TrainingStack(case.ladder, kernels, torch.float32, case.stacks(kernels.multiple), hyper)
    if case.segments[0].prior is not None:
        training.prior = torch.stack([segment.prior for segment in case.segments])
    if hyper.proximal:
        names = {name for segment in case.segments for name in segment.chain.shared(segment.first, segment.last)}
        training.anchors = {n: v.clone() for n, v in training.stacks.items() if n in names or n.startswith("heads/")}
    training.reset(hyper.learning_rate)
    teacher = consistent(predicted(case, kernels, training.prior), hyper) if hyper.consistency else None
    rows = torch.arange(clients).unsqueeze(1)
    drawn = [list(batches(samples, hyper.batch, hyper.iterations, task_of(k))) for k in range(clients)]
    draws: dict[int, Draws] = {}
    for iteration in range(hyper.iterations):
        chosen = torch.stack([positions[iteration] for positions in drawn])
        renewed = draws.setdefault(chosen.shape[1], Draws(CPU))
        renewed.renew([iteration + 100 * seed for seed in (seeds or range(clients))])
        drawn_to = None if teacher is None else teacher[rows, chosen]
        training.step(training.prepare(case.stacked[rows, chosen]), case.targets[rows, chosen], renewed, drawn_to)
    found = {name: training.layout.unstacked(name, stack) for name, stack in training.stacks.items()}
    return (training.losses / hyper.iterations).tolist(), found


def predicted(case, kernels, prior=None):
    """Return what the networks predict for their inputs as they are now."""
    folded = FoldedStack(case.ladder, kernels, torch.float32)
    folded.prior = prior
    folded.fold(case.stacks(kernels.multiple))
    return folded.scores(folded.prepare(case.stacked)).softmax(dim=2)


def consistent(probabilities, hyper: LocalTraining) -> Teacher:
    """Return what draws all samples back to probabilities alike."""
    return Teacher(probabilities, torch.full(probabilities.shape[:2], hyper.consistency))


def errors(case, before, found) -> tuple[float, float]:
    """Return how far the stacks' tensors are from the segments': relative to these, and to how far training moved."""
    to_value = to_move = 0.0
    for client, tensors in enumerate(case.parameters()):
        for name, values in found.items():
            error = float((values[client] - tensors[name]).norm())
            moved = float((tensors[name] - before[client][name]).norm())
            to_value = max(to_value, error / float(tensors[name].norm()))
            to_move = max(to_move, error / max(moved, 1e-4))
    return to_value, to_move


def test_observing_a_batch_moves_the_second_statistics_alone(case, kernels):
    """They go where a step on the same batch takes the first."""
    observing, stepping = (
        TrainingStack(case.ladder, kernels, torch.float32, case.stacks(kernels.multiple), HYPER) for _ in range(2)
    )
    before = case.stacks(kernels.multiple)
    observing.observed = {name: before[name].clone() for name in observing.layout.statistics()}
    z = observing.prepare(case.stacked)
    observing.observe(z)
    stepping.step(z, case.targets, Draws(CPU))
    for name, stack in observing.stacks.items():
        assert torch.equal(stack, before[name]), name
    for name, values in observing.observed.items():
        assert not torch.equal(values, before[name]), name
        assert torch.equal(values, stepping.stacks[name]), name


@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": 0.0, "weight_decay": 0.0},
        {"strong_convexity": 0.0},
        {"iterations": 1},
        {"batch": 5, "learning_rate": 0.2},
    ],
    ids=["bare", "no-mu", "one-step", "one-batch-size"],
)
def test_steps_of_other_settings(make_case, changes):
    check_steps(make_case(span=(0, 4, 0)), Kernels(16), **changes)


def test_steps_equal_the_plain_trainers(case, kernels):
    check_steps(case, kernels)


def test_steps_of_a_model_for_large_images(make_case, kernels):
    """Maxima of 7×7 parts, and a hidden layer behind them."""
    check_steps(make_case("cnn4", shape=(3, 112, 112), width=2), kernels, iterations=2)


def test_calibrated_steps_equal_the_plain_trainers(case, kernels):
    case.calibrate()
    check_steps(case, kernels)


def test_steps_with_statistics_that_are_fixed(case, kernels):
    """Also the gradient of a convolution's bias, which no mean of a batch takes away again."""
    before = case.parameters()
    hyper = replace(HYPER, learning_rate=0.002, weight_decay=0.0, strong_convexity=1e-4, fixed_statistics=True)
    losses, found = trained_stacked(case, kernels, hyper)
    assert losses == pytest.approx(trained_plainly(case, hyper), rel=1e-5)
    to_value, to_move = errors(case, before, found)
    assert to_value < 2e-5
    assert to_move < 5e-4
    for name in found:
        assert torch.equal(found[name][0], before[0][name]) is ("running" in name), name


def test_steps_that_are_drawn_back(case, kernels):
    """Only what the server sent is: not the norm layers of these chains, which are the clients' own."""
    check_steps(case, kernels, proximal=2.0, summed_heads=True)
    check_steps(case, kernels, proximal=2.0, momentum=0.0, weight_decay=0.0, iterations=2)


def test_steps_that_are_drawn_back_by_hand(make_case):
    """A convolution's bias has no gradient, so that two steps from w end where decay and μ (w − w₀) take it."""
    case = make_case(span=(0, 2, 0))
    start = case.parameters()[0]["features.0.bias"]
    hyper = replace(HYPER, iterations=2, learning_rate=0.5, momentum=0.0, weight_decay=0.1, proximal=0.4)
    _, found = trained_stacked(case, Kernels(), hyper)
    once = 0.95 * start  # w − 0.5 · 0.1 w
    torch.testing.assert_close(found["features.0.bias"][0], 0.95 * once - 0.5 * 0.4 * (once - start))


@pytest.mark.parametrize("calibrated", [False, True], ids=["plain", "calibrated"])
def test_steps_that_are_drawn_to_the_servers_predictions(case, kernels, calibrated):
    if calibrated:
        case.calibrate()
    check_steps(case, kernels, consistency=1.5)


def test_a_step_towards_labels_and_predictions_by_hand(make_case):
    """An exit of zeros gives q = 0.1 for each of ten labels. With p = 0.91 for one of them, 0.01 for the others and
    β = 2, targets sum to 3: the gradient is 3 · 0.1 − y − 2 p, and the loss ln 10 + 2 (Σ p ln p + ln 10).
    """
    case = make_case(span=(0, 4, 0), samples=2)
    stacks = case.stacks()
    weight, bias = stacks["heads/0.weight"].zero_(), stacks["heads/0.bias"].zero_()
    hyper = replace(HYPER, learning_rate=0.5, momentum=0.0, weight_decay=0.0, strong_convexity=0.0, consistency=2.0)
    training = TrainingStack(case.ladder, Kernels(), torch.float32, stacks, hyper)
    y, server = torch.zeros(2, 2, 10), torch.full((2, 2, 10), 0.01)
    y[0, :, 4] = 1
    y[1, 0, 4] = y[1, 1, 5] = 1
    server[0, :, 7] = server[1, :, 4] = 0.91
    training.step(training.prepare(case.stacked), y, Draws(CPU), consistent(server, hyper))
    # Both samples of the first client say 4 and are drawn to 7; of the second one's, one says 4 and one 5, drawn to 4.
    expected = torch.full((2, 10), 0.3 - 0.02)
    expected[0, 4] = 0.3 - 1 - 0.02
    expected[0, 7] = 0.3 - 1.82
    expected[1, 4] = 0.3 - 0.5 - 1.82
    expected[1, 5] = 0.3 - 0.5 - 0.02
    torch.testing.assert_close(bias, -0.5 * expected)
    assert weight.any()
    loss = math.log(10) + 2 * (0.91 * math.log(0.91) + 0.09 * math.log(0.01) + math.log(10))
    assert training.losses.tolist() == pytest.approx([loss, loss], rel=1e-6)


def check_steps(case, kernels, **changes):
    hyper = replace(HYPER, **changes)
    before = case.parameters()
    losses, found = trained_stacked(case, kernels, hyper)
    # Where rounding switches a ReLU, what lies in front of it moves: seldom and not far, but a ResNet has many ReLUs.
    loose = 100 if any(block.residual for block in case.program.blocks) else 1
    assert losses == pytest.approx(trained_plainly(case, hyper), rel=loose * 1e-5)
    to_value, to_move = errors(case, before, found)
    assert to_value < loose * 2e-5
    assert to_move < loose * 5e-4
    # Nothing of this is so because nothing moved.
    changed = [name for name in found if not torch.equal(found[name][0], before[0][name])]
    assert len(changed) >= len(found) - 8 * (changes.get("weight_decay") == 0)


def test_running_statistics_follow_as_torchs(make_case, distance):
    case = make_case(span=(0, 2, 0), samples=6)
    hyper = replace(HYPER, iterations=1, batch=6, learning_rate=0.0)
    before = case.parameters()[1]
    _, found = trained_stacked(case, Kernels(), hyper)
    with torch.no_grad():
        z = case.segments[1].chain.run(case.x[1], 0, 1)
        z = torch.nn.functional.conv2d(z, before["features.0.weight"], before["features.0.bias"], padding=1)
    mean, variance = z.mean(dim=(0, 2, 3)), z.var(dim=(0, 2, 3), correction=1)
    expected = 0.9 * before["features.1.running_mean"] + 0.1 * mean
    assert distance(found["features.1.running_mean"][1], expected) < 1e-5
    assert distance(found["features.1.running_var"][1], 0.9 * before["features.1.running_var"] + 0.1 * variance) < 1e-5


def test_a_convolutions_bias_has_no_gradient_but_decays(make_case):
    case = make_case(span=(0, 2, 0))
    before = case.parameters()[0]["features.0.bias"]
    hyper = replace(HYPER, iterations=1, learning_rate=0.5, weight_decay=0.1)
    _, found = trained_stacked(case, Kernels(), hyper)
    torch.testing.assert_close(found["features.0.bias"][0], before * (1 - 0.5 * 0.1))


def test_padding_stays_zero(make_case):
    case = make_case()
    kernels = Kernels(16)
    training = TrainingStack(case.ladder, kernels, torch.float32, case.stacks(16), HYPER)
    for _ in range(3):
        training.step(training.prepare(case.stacked), case.targets, Draws(CPU))
    for name, stack in training.stacks.items():
        assert stack.count_nonzero() == training.layout.unstacked(name, stack).count_nonzero()


def test_clients_do_not_touch_each_other(make_case):
    case = make_case()
    _, whole = trained_stacked(case, Kernels(), HYPER)
    training = TrainingStack(case.ladder, Kernels(), torch.float32, case.stacks(), HYPER)
    x = case.stacked.clone()
    x[0] = float("nan")
    training.step(training.prepare(x), case.targets, Draws(CPU))
    assert not all(torch.isfinite(stack[0]).all() for stack in training.stacks.values())
    assert all(torch.isfinite(stack[1]).all() for stack in training.stacks.values())
    assert torch.isfinite(training.losses).tolist() == [False, True]
    assert all(torch.isfinite(values).all() for values in whole.values())


def _dropping(make_case, rate: float):
    return make_case("vgg11", shape=(3, 32, 32), samples=4, width=2, dropout=rate)


def test_dropout_is_drawn_by_the_clients_seed(make_case):
    hyper = replace(HYPER, batch=4, iterations=2)
    case = _dropping(make_case, 0.5)
    (a, first), (b, second) = (trained_stacked(case, Kernels(), hyper, seeds=(1, 2)) for _ in range(2))
    assert a == b
    assert all(torch.equal(first[name], second[name]) for name in first)
    _, third = trained_stacked(case, Kernels(), hyper, seeds=(1, 3))
    name = "classifier.0.weight"
    assert torch.equal(first[name][0], third[name][0])
    assert not torch.equal(first[name][1], third[name][1])


@pytest.mark.parametrize("calibrated", [False, True], ids=["plain", "calibrated"])
def test_without_dropout_a_vgg_trains_as_plainly(make_case, calibrated):
    """It has three dense layers."""
    case = _dropping(make_case, 0.0)
    if calibrated:
        case.calibrate()
    hyper = replace(HYPER, batch=4, iterations=2)
    before = case.parameters()
    losses, found = trained_stacked(case, Kernels(), hyper)
    assert losses == pytest.approx(trained_plainly(case, hyper), rel=1e-5)
    assert errors(case, before, found)[0] < 1e-4  # batches of four at 1×1 positions magnify rounding


# Plans.


def backend(kernels=None) -> Backend:
    return Backend(CPU, kernels or Kernels(), torch.float32, uncaptured)


def plan_of(case, threat: ThreatModel | None = None, hyper: LocalTraining = HYPER) -> TrainingPlan:
    return TrainingPlan(case.ladder, backend(), case.labels.shape[1], hyper, threat)


def play(plan: TrainingPlan, case, threat=None, hyper=HYPER, seeds=(1, 2)):
    data = list(zip(case.stacked, case.labels, strict=True))
    plan.load(case.parameters(), data, hyper, threat)
    samples = case.labels.shape[1]
    drawn = [list(batches(samples, hyper.batch, hyper.iterations, task_of(k))) for k in range(len(data))]
    plan.run((torch.stack(positions) for positions in zip(*drawn, strict=True)), seeds)
    return plan.results()


def test_a_plan_is_used_again_without_a_trace(make_case):
    """Velocity, losses, draws and the attack's radius of a round must not reach into the next."""
    case, other = make_case(), make_case(span=(0, None, None), samples=5)
    weak, strong = (replace(input_threat(0.1, 0.05, 2), radius=radius) for radius in (0.01, 0.3))
    used = plan_of(case, weak)
    play(used, other, strong, replace(HYPER, learning_rate=0.5), seeds=(8, 9))
    again, fresh = play(used, case, weak), play(plan_of(case, weak), case, weak)
    assert again[1:] == fresh[1:]
    for one, other in zip(again[0], fresh[0], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
    stronger = play(used, case, strong)
    assert stronger[1] != again[1]


def test_a_plan_reports_losses_and_who_is_finite(make_case):
    case = make_case()
    plan = plan_of(case)
    _, losses, sound = play(plan, case)
    assert sound == [True, True]
    assert losses == pytest.approx(trained_plainly(case, HYPER), rel=1e-5)
    spoilt = make_case()
    spoilt.x[1, :, :, 0, 0] = float("inf")
    _, losses, sound = play(plan, spoilt)
    assert sound == [True, False]


def test_results_are_in_memory_of_their_own(make_case):
    case = make_case()
    plan = plan_of(case)
    tensors, _, _ = play(plan, case)
    copies = [{name: value.clone() for name, value in own.items()} for own in tensors]
    play(plan, case, hyper=replace(HYPER, learning_rate=0.3))
    for own, copy in zip(tensors, copies, strict=True):
        assert all(torch.equal(own[name], copy[name]) for name in copy)


def test_a_plan_says_how_much_memory_it_holds(make_case):
    case = make_case()
    threat = input_threat(0.1, 0.05, 1)
    plan = plan_of(case, threat)
    inputs = case.stacked.nbytes + case.labels.nbytes
    assert plan.nbytes == inputs
    play(plan, case, threat)
    parameters = sum(value.nbytes for value in case.stacks().values())
    assert plan.nbytes > inputs + 2 * parameters


DRAWN = replace(HYPER, consistency=1.5)


@pytest.mark.parametrize("calibrated", [False, True], ids=["plain", "calibrated"])
def test_a_plan_predicts_what_the_plain_trainer_draws_to(case, calibrated):
    """Before anything is trained, and anew for what the next round brings; a step sees three of five samples."""
    prior = case.calibrate() if calibrated else None
    plan = TrainingPlan(case.ladder, backend(), 5, DRAWN, None, calibrated=calibrated)
    seen = []
    for number in range(2):
        expected = []
        for client, segment in enumerate(case.segments):
            with torch.no_grad():
                segment.parameters()[0].mul_(1 + number)
            expected.append(server_probabilities(task_of(client, DRAWN), segment, case.x[client], PLAIN))
        plan.load(case.parameters(), list(zip(case.stacked, case.labels, strict=True)), DRAWN, None, prior=prior)
        torch.testing.assert_close(plan.teacher.probabilities, torch.stack(expected), rtol=1e-4, atol=1e-6)
        assert plan.teacher.weights.unique().tolist() == [1.5]
        seen.append(plan.teacher.probabilities.clone())
    assert (seen[1] - seen[0]).abs().max() > 1e-3


def test_of_two_sets_of_statistics_a_plan_predicts_by_the_clean_one(make_case):
    case = make_case()
    both = []
    for tensors in case.parameters():
        second = {ADVERSARIAL + name: 2 * value + 1 for name, value in tensors.items() if "running" in name}
        both.append({**tensors, **second})
    plan = TrainingPlan(case.ladder, backend(), 5, DRAWN, None, observes=True)
    plan.load(both, list(zip(case.stacked, case.labels, strict=True)), DRAWN, None)
    torch.testing.assert_close(plan.teacher.probabilities, predicted(case, Kernels()), rtol=1e-5, atol=1e-7)
    assert plan.training is not None
    name = "features.1.running_mean"
    assert torch.equal(plan.training.stacks[name][0], both[0][ADVERSARIAL + name])  # and trains with the other


def test_the_attack_does_not_see_the_draw(make_case):
    case, threat = make_case(span=(0, 4, 0)), input_threat(0.1, 0.05, 2)
    found = []
    for hyper in (replace(HYPER, iterations=1), replace(DRAWN, iterations=1)):
        plan = plan_of(case, threat, hyper)
        _, losses, _ = play(plan, case, threat, hyper)
        (iteration,) = plan._iterations.values()
        found.append((iteration._perturbed, losses))
    assert torch.equal(found[0][0], found[1][0])
    assert min(other - one for one, other in zip(found[0][1], found[1][1], strict=True)) > 0.01


def test_plans_without_a_draw_hold_nothing_for_it(make_case):
    """Eleven numbers for each of the five samples of both clients, and for each of the samples of both batch sizes."""
    case, sizes = make_case(), []
    for hyper in (HYPER, DRAWN):
        plan = plan_of(case, None, hyper)
        play(plan, case, hyper=hyper)
        sizes.append(plan.nbytes - plan.folded.nbytes)
    assert sizes[1] - sizes[0] == 4 * 11 * 2 * (5 + 3 + 2)


def evaluation(case, threat: ThreatModel | None) -> StackEvaluation:
    folded = FoldedStack(case.ladder, Kernels(), torch.float32)
    folded.fold(case.stacks())
    return StackEvaluation(folded, case.stacked, case.labels, threat, (1, 2))


def test_clients_of_a_ladder_have_scores_at_their_own_exits(make_case):
    ends = ((0, None, None), (0, 6, 1), (0, 4, 0), (0, 4, 0))
    alone = [make_case(span=span, clients=4) for span in ends]
    prior = torch.randn(4, 10, generator=torch.Generator().manual_seed(3))
    folded = FoldedStack(Ladder(tuple(case.program for case in alone)), Kernels(), torch.float32)
    folded.prior = prior
    parameters = [case.parameters()[number] for number, case in enumerate(alone)]
    folded.fold(folded.layout.stacked(parameters, CPU))
    found = folded.scores(folded.prepare(alone[0].stacked))
    for number, case in enumerate(alone):
        segment = replace(case.segments[number], prior=prior[number])
        with torch.no_grad(), segment.still():
            torch.testing.assert_close(found[number], segment.logits(case.x[number]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threat", [ThreatModel("l2", 0.0, 0.1, 5), ThreatModel("linf", 0.1, 0.1, 0)])
def test_a_harmless_threat_moves_nothing(make_case, threat):
    case, whole = make_case(span=(0, 4, None)), make_case()
    assert evaluation(case, threat).magnitudes().tolist() == [0.0, 0.0]
    found = evaluation(whole, threat)
    assert torch.equal(found.clean(), found.adversarial())


def test_clients_on_a_ladder_train_as_each_does_alone(make_case):
    ends = ((0, None, None), (0, 6, 1), (0, 4, 0), (0, 4, 0))
    alone = [make_case(span=span, clients=4) for span in ends]
    threat = input_threat(0.05, 0.02, 2)
    ladder = Ladder(tuple(case.program for case in alone))
    data = list(zip(alone[0].stacked, alone[0].labels, strict=True))
    parameters = [case.parameters()[number] for number, case in enumerate(alone)]
    drawn = [list(batches(5, 3, 4, task_of(k))) for k in range(4)]

    def trained(ladder, numbers):
        plan = TrainingPlan(ladder, backend(), 5, HYPER, threat)
        plan.load([parameters[n] for n in numbers], [data[n] for n in numbers], HYPER, threat)
        chosen = zip(*(drawn[n] for n in numbers), strict=True)
        plan.run((torch.stack(positions) for positions in chosen), [n + 1 for n in numbers])
        return plan.results()

    together, losses, sound = trained(ladder, range(4))
    assert sound == [True] * 4
    for number, case in enumerate(alone):
        (expected,), (loss,), _ = trained(Ladder((case.program,)), [number])
        assert losses[number] == pytest.approx(loss, rel=1e-4)
        assert set(together[number]) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(together[number][name], value, rtol=1e-3, atol=1e-4)
