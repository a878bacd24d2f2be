"""Where a round on a GPU spends its time: seconds and the kernels they go to, for jFAT and FedProphet's stages.

    python benchmarks/profile_gpu.py                    # jFAT and all stages of the paper's CIFAR-10 setting
    python benchmarks/profile_gpu.py jfat 1 7 --rounds 6 --kernels 12
    python benchmarks/profile_gpu.py jfat --preset caltech256-balanced

Random images stand for the dataset, and a stage begins with modules of random weights. Each round has a new cohort with
new assignments, as in a run, so what a plan costs when it is first used is in the numbers; the first round, which
compiles kernels, is printed apart. The last round is played once more under the profiler of torch.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

from fedprophet.bench.rounds import Case, RoundsSettings, cases_of, start_of
from fedprophet.bench.synthetic import sizes_of, synthetic
from fedprophet.messages.answers import Answer
from fedprophet.messages.tasks import Task
from fedprophet.runs.session import Session, assemble
from fedprophet.server.coordinator import Engine, play_round


class Clock:
    """An engine that notes how long each kind of task takes; the device is idle before and after."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.seconds: dict[str, float] = defaultdict(float)

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """Carry out the tasks."""
        tasks = list(tasks)
        torch.cuda.synchronize()
        began = time.perf_counter()
        updates = list(self._engine.map(tasks))
        torch.cuda.synchronize()
        if tasks:
            self.seconds[tasks[0].kind] += time.perf_counter() - began
        yield from updates


def play(session: Session, case: Case, number: int) -> dict[str, float]:
    """Play one round and return the seconds of its parts."""
    clock = Clock(session.engine)
    state = replace(start_of(session, case), round=number)
    began = time.perf_counter()
    play_round(session.method.round(state), clock)
    torch.cuda.synchronize()
    parts = {"train": clock.seconds["train"], "evaluate": clock.seconds["evaluate"]}
    return {**parts, "other": time.perf_counter() - began - sum(parts.values())}


def kernels(session: Session, case: Case, number: int, most: int) -> None:
    """Print which kernels a round spends its time in."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        play(session, case, number)
    rows = [
        (event.device_time_total / 1e3, event.count, event.key)
        for event in found.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    total = sum(milliseconds for milliseconds, _, _ in rows)
    print(f"    the device was busy for {total:.0f} ms")
    for milliseconds, count, name in sorted(rows, reverse=True)[:most]:
        print(f"    {milliseconds:8.1f} ms {100 * milliseconds / total:5.1f} % {count:6d} ×  {name[:90]}")


def main() -> None:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="jfat, or stages from 1 on; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", type=int, default=0, help="how many kernels to list")
    parser.add_argument("--preset", default="cifar10-balanced")
    arguments = parser.parse_args()
    settings = RoundsSettings(arguments.preset)
    data = synthetic(sizes_of(settings.config("jfat").data), 0)
    named = [Case("jfat") if name == "jfat" else Case("fedprophet", int(name) - 1) for name in arguments.cases]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; seconds a round: training, evaluation, other")
    for case in named or cases_of(settings, data):
        session = assemble(settings.measured(case.method, "cuda"), dataset=data)
        rounds = [play(session, case, number) for number in range(arguments.rounds)]
        mean = {part: sum(times[part] for times in rounds[1:]) / max(len(rounds) - 1, 1) for part in rounds[0]}
        first = ", ".join(f"{seconds:.3f}" for seconds in rounds[0].values())
        print(f"{case!s:20} {', '.join(f'{seconds:.3f}' for seconds in mean.values())}   (first round: {first})")
        if arguments.kernels:
            kernels(session, case, arguments.rounds, arguments.kernels)
        session.close()


if __name__ == "__main__":
    main()
