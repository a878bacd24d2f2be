"""Find the exponent of unbalanced fleets: P(device) ∝ (performance · memory)^s, which the paper does not give.

    python benchmarks/calibrate_unbalanced.py          # about half a minute on one core

The paper prints training times of FedProphet without module assignment, balanced and unbalanced. This script computes
the expected time of a round with our own clock and looks for the s at which unbalanced / balanced has the printed
ratio. A round lasts as long as the slowest of its clients, who all train module m alone; stages are weighted equally,
and in each a fifth of the rounds is warm-up without attack. The devices of a cohort are taken as independent draws from
the pool, which they are on average over fleets.

A client's time takes few values (devices × co-running loads × strata of its free memory), so E[max] is computed from
their distribution, not sampled. A Monte Carlo simulation with the draws of a real run checks it.

The paper's speed-ups over jFAT and its times with assignment give a second ratio, that of jFAT. jFAT always runs its
500 rounds, while stages of FedProphet may end early, sooner in one fleet than in another.
"""

import argparse
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

import fedprophet
from fedprophet.cascade.atoms import chain_of
from fedprophet.cascade.cost import cost_of
from fedprophet.cascade.partition import partition
from fedprophet.fleet import (
    APPS,
    Availability,
    Workload,
    batch_sizes,
    device_probabilities,
    draw_device,
    load_pool,
    local_time,
    workload_of,
)
from fedprophet.messages.values import Resources
from fedprophet.models import build
from fedprophet.randomness import numpy_generator

Array = npt.NDArray[np.float64]
CLIENTS, COHORT, ITERATIONS, ATTACK_STEPS, MEMORY_SHARE = 100, 10, 30, 10, 0.2
WARMUP = 0.2
STRATA = 50
LIMIT = -50.0
"""So far below zero that every client has the pool's weakest device."""
CURVE = (0.0, -0.25, -0.5, -0.75, -1.0, -1.25, -1.5, -2.0, -3.0, -5.0, LIMIT)


@dataclass(frozen=True)
class Setting:
    """One of the paper's two experiments, and the ratios unbalanced / balanced of its printed times."""

    pool: str
    model: str
    shape: tuple[int, ...]
    classes: int
    batch: int
    budget: int
    samples: int
    """Training samples of one client: 80 % of a hundredth of the training set."""
    ratio: float
    jfat_ratio: float

    @cached_property
    def workloads(self) -> tuple[list[Workload], list[Workload]]:
        """The modules one by one, and the whole model alone."""
        with torch.device("meta"):
            chain = chain_of(build(self.model, self.shape, self.classes))
        cost = cost_of(chain, self.shape, self.batch, self.classes)
        modules = [workload_of(cost, module.first, module.last) for module in partition(cost, self.budget)]
        return modules, [workload_of(cost)]


SETTINGS = (
    Setting("cifar10", "vgg16", (3, 32, 32), 10, 64, 60_000_000, 400, 2.1, 1.9 * 1.8e5 / (2.4 * 9.2e4)),
    Setting("caltech256", "resnet34", (3, 224, 224), 256, 32, 224_000_000, 187, 1.55, 7.7 * 6.2e4 / (10.8 * 3.6e4)),
)


@dataclass(frozen=True)
class Times:
    """What one client's round takes, as a discrete distribution: sorted seconds, and the device each belongs to."""

    seconds: Array
    device: npt.NDArray[np.int64]

    def slowest(self, probabilities: Array) -> float:
        """Return E[max] over a cohort: Σ t · (P(one ≤ t)^C − P(one < t)^C)."""
        each = probabilities / np.bincount(self.device)
        cumulated = np.cumsum(each[self.device]) ** COHORT
        return float(self.seconds @ np.diff(cumulated, prepend=0.0))


class Clock:
    """The expected time of a round, the mean over the workloads (stages) and over warm-up and attacked rounds."""

    def __init__(self, setting: Setting, workloads: list[Workload], batches: tuple[int, ...], warmup: float) -> None:
        self.pool = load_pool(setting.pool)
        self._steps = {0: warmup, ATTACK_STEPS: 1 - warmup}
        self._batches, self._budget, self._workloads = batches, setting.budget, workloads
        self._times = {steps: [self._distribution(w, steps) for w in workloads] for steps in self._steps}

    def _distribution(self, workload: Workload, steps: int) -> Times:
        shares = MEMORY_SHARE * (np.arange(STRATA) + 0.5) / STRATA
        pairs = [
            (self.client(workload, steps, Resources(memory, d.performance * f, d.bandwidth)), k)
            for k, d in enumerate(self.pool.devices)
            for memory in [max(self._budget, int(d.memory * share)) for share in shares]
            for f in APPS.values()
        ]
        seconds, device = map(np.array, zip(*sorted(pairs), strict=True))
        return Times(seconds, device)

    def client(self, workload: Workload, steps: int, resources: Resources) -> float:
        """Return the seconds of one client's round."""
        return local_time(workload, resources, self._batches, steps).total

    def expected(self, probabilities: Array) -> float:
        """Return the expected seconds of a round where devices have these probabilities."""
        return sum(
            share * float(np.mean([times.slowest(probabilities) for times in self._times[steps]]))
            for steps, share in self._steps.items()
        )

    def ratio(self, exponent: float) -> float:
        """Return unbalanced / balanced."""
        return self.expected(device_probabilities(self.pool, exponent)) / self.expected(device_probabilities(self.pool))

    def spread(self, exponent: float, seed: int, pairs: int = 500) -> Array:
        """Return the 5 % and 95 % quantiles of the ratio between two single fleets, each with its own 100 devices."""
        rng = numpy_generator(seed, "fleets")

        def fleet(s: float) -> float:
            return self.expected(rng.multinomial(CLIENTS, device_probabilities(self.pool, s)) / CLIENTS)

        return np.quantile([fleet(exponent) / fleet(0.0) for _ in range(pairs)], [0.05, 0.95])

    def simulate(self, exponent: float, seed: int, rounds: int) -> tuple[float, float]:
        """Return the mean round by Monte Carlo, with the draws of a run, and its standard error."""
        how = Availability("apps", memory_share=MEMORY_SHARE)
        means = []
        for round_ in range(rounds):
            clients = range(COHORT * round_, COHORT * (round_ + 1))
            devices = [draw_device(self.pool, seed, client, exponent) for client in clients]
            free = [how.resources(d, seed, round_, k, self._budget) for d, k in zip(devices, clients, strict=True)]
            slowest = [
                share * max(self.client(workload, steps, resources) for resources in free)
                for workload in self._workloads
                for steps, share in self._steps.items()
            ]
            means.append(sum(slowest) / len(self._workloads))
        return float(np.mean(means)), float(np.std(means) / np.sqrt(rounds))


def solve(ratio: Callable[[float], float], target: float) -> float | None:
    """Return the exponent with this ratio, by bisection; None where not even the weakest device alone reaches it."""
    low, high = LIMIT, 0.0
    if ratio(low) < target:
        return None
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) >= target else (low, middle)
    return (low + high) / 2


def report(setting: Setting, seed: int, rounds: int) -> None:
    """Print what was found for one pool."""
    modules, whole = setting.workloads
    batches = batch_sizes(setting.samples, setting.batch, ITERATIONS)
    cascade, jfat = Clock(setting, modules, batches, WARMUP), Clock(setting, whole, batches, WARMUP)
    plain = Clock(setting, modules, (setting.batch,) * ITERATIONS, 0.0)
    found, second = solve(cascade.ratio, setting.ratio), solve(jfat.ratio, setting.jfat_ratio)
    print(f"\n## {setting.pool} ({setting.model}, {len(modules)} modules)\n")
    print("| s | FedProphet, unbalanced / balanced | jFAT, unbalanced / balanced |\n| --- | --- | --- |")
    for s in CURVE:
        print(f"| {'−∞' if s == LIMIT else f'{s:g}'} | {cascade.ratio(s):.3f} | {jfat.ratio(s):.3f} |")
    print(f"| paper | {setting.ratio:.2f} | {setting.jfat_ratio:.2f} |\n")
    print(f"FedProphet's {setting.ratio} at s = {shown(found)}")
    print(f"the same with full batches and no warm-up at s = {shown(solve(plain.ratio, setting.ratio))}")
    print(f"jFAT's {setting.jfat_ratio:.3f} at s = {shown(second)}")
    chosen = round(found if found is not None else second or 0.0, 2)
    low, high = cascade.spread(chosen, seed)
    print(f"chosen s = {chosen}: ratio {cascade.ratio(chosen):.3f}")
    print(f"between two single fleets of {CLIENTS} clients: {low:.2f} … {high:.2f} (5–95 %)")
    for name, clock in {"FedProphet": cascade, "jFAT": jfat}.items():
        check(name, clock, chosen, seed, rounds)


def check(name: str, clock: Clock, exponent: float, seed: int, rounds: int) -> None:
    """Print the Monte Carlo beside the computed values."""
    (low, low_error), (high, high_error) = (clock.simulate(s, seed, rounds) for s in (0.0, exponent))
    error = high / low * np.hypot(low_error / low, high_error / high)
    exact = [clock.expected(device_probabilities(clock.pool, s)) for s in (0.0, exponent)]
    print(
        f"{name}, seconds of a round, balanced and unbalanced: {exact[0]:.2f}, {exact[1]:.2f}, "
        f"ratio {exact[1] / exact[0]:.3f}; Monte Carlo {low:.2f} ± {low_error:.2f}, {high:.2f} ± {high_error:.2f}, "
        f"ratio {high / low:.3f} ± {error:.3f}"
    )


def shown(exponent: float | None) -> str:
    """Return an exponent for people."""
    return "none: the curve ends below it" if exponent is None else f"{exponent:.3f}"


def main() -> None:
    """Calibrate both pools."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2000, help="Rounds of each Monte Carlo check.")
    arguments = parser.parse_args()
    print(
        f"fedprophet {fedprophet.__version__}, torch {torch.__version__}, NumPy {np.__version__}, "
        f"Python {platform.python_version()}; Monte Carlo: {arguments.rounds} rounds of {COHORT} clients, "
        f"seed {arguments.seed}"
    )
    for setting in SETTINGS:
        report(setting, arguments.seed, arguments.rounds)


if __name__ == "__main__":
    main()
