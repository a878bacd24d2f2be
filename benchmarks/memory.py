"""The price of a memory budget: modules that keep within it by a plan, beside a whole model that is swapped to disk.

    python benchmarks/memory.py                             # VGG16 and ResNet34, in benchmarks/results/memory.{json,md}
    python benchmarks/memory.py --models vgg16 --budgets 60 --repeat 1
    python benchmarks/memory.py --device cuda --out benchmarks/results/memory-h200

For each budget the model is cut by the paper's Algorithm 1, and modules that fit no exact plan are cut further. Each
module has the cheapest plan that fits; its iteration (PGD-10, then a step) is timed plain and planned. An attack's
steps cost the same, so that on a CPU two of them are timed and counted five times. Computation is processor time, since
the machine may have other work; on a GPU it is wall time, all plain iterations come first (cuDNN remembers what it
chose under a limit), and plans run as limited as a training by them.

Both begin at the same parameters and draws once more, without TF32: the difference of their updates, as vectors, by the
length of the plain one is what a plan changes by rounding.

Beside it is what the paper's jFAT does on paper: the whole model in the same budget, with what does not fit on disk.
Activations go to a file by torch's saved-tensor hooks and come back for the backward pass, as many of them as must.
Where parameters, gradients and momenta do not fit either, as many bytes of them are read and written whenever a real
swap would have to; the computation then uses the copy that the process still has. The file is opened with O_DIRECT: the
page cache of this machine has no part in it (that of a host below a virtual machine may). Swapping is wall time. What
is then left in memory is what one layer takes while it runs, which may still be more than the budget. On a GPU
activations pass through the CPU's memory, and workspaces are what cuDNN likes best.
"""

import argparse
import json
import mmap
import os
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from fedprophet.cascade.allocator import allocator_limit, spare_memory
from fedprophet.cascade.atoms import Chain, chain_of
from fedprophet.cascade.cost import ChainCost, cost_of
from fedprophet.cascade.measure import bytes_of, measured_peak
from fedprophet.cascade.partition import cut_further, partition
from fedprophet.client.budget import Checked, LocalIteration, MeasuredCost, iteration_of
from fedprophet.client.captured import Ascent, ascent_of
from fedprophet.client.descent import Descent
from fedprophet.client.limits import ROOM
from fedprophet.client.memory_plan import PLAIN, MemoryPlan
from fedprophet.client.planning import TriedCost
from fedprophet.client.trainer import attacked, training_loss
from fedprophet.display.tables import Column, Page, Table, markdown
from fedprophet.errors import BudgetError
from fedprophet.machine import describe
from fedprophet.messages.values import LocalTraining
from fedprophet.models import build
from fedprophet.threads import torch_threads
from fedprophet.threat import with_steps

RESULTS = Path(__file__).parent / "results" / "memory"
ATTACK_STEPS = 10
TIMED_STEPS = {"cpu": 2, "cuda": ATTACK_STEPS}
MB = 10**6
STEP = (False, True)
"""A pass is one of the attack, or the step."""


@dataclass(frozen=True)
class Setting:
    """A model of the paper, its data and batch, and budgets in MB from the smallest that it can be cut for.

    Those for a GPU are fewer, so that it is done within two minutes.
    """

    shape: tuple[int, ...]
    classes: int
    batch: int
    budgets: dict[str, tuple[int, ...]]


SETTINGS = {
    "vgg16": Setting((3, 32, 32), 10, 64, {"cpu": (39, 60, 91, 151, 302), "cuda": (60, 91)}),
    "resnet34": Setting((3, 224, 224), 256, 32, {"cpu": (149, 224, 566, 1131), "cuda": (224,)}),
}


class SwapFile:
    """A file past the page cache: tensors are copied to an aligned buffer and from it to the disk, and back."""

    BUFFER = 8 * 2**20

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._buffer = mmap.mmap(-1, self.BUFFER)
        self._memory = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.end, self.seconds, self.written, self.read_bytes = 0, 0.0, 0, 0

    def write(self, tensor: Tensor) -> int:
        """Write a tensor's bytes; return where."""
        _finish(tensor.device)
        started, place = time.perf_counter(), self.end
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, len(data), self.BUFFER):
            piece = data[start : start + self.BUFFER]
            self._memory[: len(piece)].copy_(piece)
            size = -(-len(piece) // mmap.PAGESIZE) * mmap.PAGESIZE
            os.pwrite(self._file, memoryview(self._buffer)[:size], place + start)
            self.end = place + start + size
        self.written += len(data)
        self.seconds += time.perf_counter() - started
        return place

    def read(self, place: int, like: Tensor, device: torch.device) -> Tensor:
        """Return what was written at a place, as a new tensor that is like another one (which may have no data)."""
        _finish(device)
        started = time.perf_counter()
        result = torch.empty(like.shape, dtype=like.dtype, device=device)
        data = result.view(-1).view(torch.uint8)
        for start in range(0, len(data), self.BUFFER):
            piece = data[start : start + self.BUFFER]
            size = -(-len(piece) // mmap.PAGESIZE) * mmap.PAGESIZE
            os.preadv(self._file, [memoryview(self._buffer)[:size]], place + start)
            piece.copy_(self._memory[: len(piece)])
        self.read_bytes += len(data)
        self.seconds += time.perf_counter() - started
        return result


@dataclass
class Swap:
    """Saved tensors beyond an allowance of bytes, and parameters beyond what is left for them, on disk."""

    file: SwapFile
    allowance: int
    parameters: Sequence[Tensor]
    momenta: int = 0
    gradients: int = 0
    weights: int = 0
    """Bytes of them that do not fit: momenta are swapped once a step, gradients too, weights in every pass."""
    _places: dict[int, int] = field(default_factory=dict)
    _back: "weakref.WeakValueDictionary[int, Tensor]" = field(default_factory=weakref.WeakValueDictionary)
    kept: int = 0

    @contextmanager
    def one_pass(self, step: bool) -> Iterator[None]:
        """Swap during a forward and a backward pass."""
        self.kept, self.file.end = 0, 0
        known = {parameter.untyped_storage()._cdata for parameter in self.parameters}

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            name = storage._cdata
            if name in known or tensor.nbytes < mmap.PAGESIZE or tensor.nbytes != storage.nbytes():
                return tensor
            if name not in self._places:
                if self.kept + tensor.nbytes <= self.allowance:
                    self.kept += tensor.nbytes
                    return tensor
                self._places[name] = self.file.write(tensor)
                weakref.finalize(storage, self._places.pop, name, None)
            return self._places[name], torch.empty_like(tensor, device="meta")

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            place, like = packed
            found = self._back.get(place)
            if found is None:
                found = self._back[place] = self.file.read(place, like, self.parameters[0].device)
            return found.view(like.shape)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self._move(reads=2 * self.weights, writes=0)
        if step:
            moved = self.momenta + self.gradients
            self._move(reads=moved, writes=moved + self.weights)

    def _move(self, reads: int, writes: int) -> None:
        """Read and write so many bytes, a few at a time."""
        chunk = torch.empty(self.file.BUFFER, dtype=torch.uint8)
        for _ in range(-(-writes // len(chunk))):
            self.file.end = 0
            self.file.write(chunk)
        for _ in range(-(-reads // len(chunk))):
            self.file.read(0, chunk, chunk.device)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(device: torch.device) -> float:
    """Return seconds of computation."""
    _finish(device)
    return time.perf_counter() if device.type == "cuda" else time.process_time()


class Trial:
    """An iteration by a plan in its two halves, over and over."""

    def __init__(self, iteration: LocalIteration, plan: MemoryPlan, steps: int) -> None:
        self.part, self.training, self.plan = iteration.part, iteration.training, plan
        self.device, batch = iteration.part.chain.device, iteration.training.batch
        assert iteration.threat is not None
        self.threat = with_steps(iteration.threat, steps)
        self.labels = torch.arange(batch, device=self.device) % 10
        random = torch.rand(batch, *iteration.input_shape, generator=torch.Generator().manual_seed(1))
        self.inputs = iteration.part.take(random)
        self.descent = Descent.of(self.part, self.training, begun=True)  # as where memory is limited
        self._ascend: Ascent = ascent_of(
            self.part, self.threat, self.training.strong_convexity, plan.attack, plan.attack_sliced
        )

    @property
    def held(self) -> int:
        """The bytes that are there before it begins: parameters, norm statistics, momenta and the batch."""
        return bytes_of([*self._state(), *self.descent.held, self.labels, self.inputs])

    def attack(self) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        return attacked(self.part, self.inputs, self.labels, self.threat, draw, self.plan.attack, self._ascend)

    def step(self, x: Tensor | None = None) -> None:
        x = self.inputs if x is None else x
        loss = self._ascend.step(lambda: training_loss(self.training, self.part, x, self.labels, self.plan))
        loss.backward(self.descent)

    def seconds(self, repeat: int) -> float:
        """Return the seconds of an attack and a step, the quickest of some."""
        self.attack()
        self.step()  # a graph is captured after the first step
        share = ATTACK_STEPS / self.threat.steps
        return self._quickest(self.attack, repeat) * share + self._quickest(self.step, repeat)

    def update(self) -> Tensor:
        """Return what one iteration moves all parameters along, as one vector, and undo it.

        That is what momenta of zero have become. (The parameters themselves have changed by so little that their last
        bits count.) One iteration is computed and undone before, as a graph is captured after the first step.
        """
        state = self._state()
        start = [tensor.detach().to("cpu", copy=True) for tensor in state]
        moved = torch.empty(0)
        for _ in range(2):
            torch.manual_seed(0)  # dropout draws the same for every plan
            self.step(self.attack())
            moved = torch.cat([momentum.detach().cpu().double().flatten() for momentum in self.descent.held])
            with torch.no_grad():
                for tensor, value in zip(state, start, strict=True):
                    tensor.copy_(value)
                for momentum in self.descent.held:
                    momentum.zero_()
        return moved

    def _state(self) -> list[Tensor]:
        """Return what an iteration changes: the part's parameters and norm statistics."""
        part = self.part
        names = (*part.chain.shared(part.first, part.last), *part.chain.local(part.first, part.last))
        head = [] if part.head is None else list(part.head.parameters())
        return [*(part.chain.tensors[name] for name in names), *head]

    def _quickest(self, compute: Callable[[], object], repeat: int) -> float:
        found = []
        for _ in range(repeat + 1):  # the first sets up what is set up once
            started = clock(self.device)
            compute()
            found.append(clock(self.device) - started)
        return min(found[1:] or found)


class Model:
    """A model of the paper, whose modules are timed once for every plan."""

    def __init__(self, name: str, device: torch.device, repeat: int) -> None:
        setting = SETTINGS[name]
        torch.manual_seed(0)
        self.chain: Chain = chain_of(build(name, setting.shape, setting.classes).to(device))
        self.cost: ChainCost = cost_of(self.chain, setting.shape, setting.batch, setting.classes)
        self.training = LocalTraining(1, setting.batch, 1e-4, momentum=0.9, weight_decay=1e-4, strong_convexity=1e-5)
        self._repeat = repeat
        self._plain: dict[tuple[int, int], dict[str, Any]] = {}

    def iteration(self, first: int, last: int) -> LocalIteration:
        return iteration_of(self.chain, self.cost, first, last, self.training)

    def plain(self, first: int, last: int) -> dict[str, Any]:
        """Return what some atoms take as a module that is trained plainly; it is measured once."""
        if (first, last) not in self._plain:
            iteration = self.iteration(first, last)
            self._plain[first, last] = {
                "plain_measured_bytes": iteration.measured(PLAIN),
                "plain_seconds": self._trial(iteration, PLAIN).seconds(self._repeat),
            }
        return self._plain[first, last]

    def modules(self, budget: int) -> Iterator[dict[str, Any]]:
        """Yield what each module of a budget takes, plain and planned."""
        kind = TriedCost if self.chain.device.type == "cuda" else MeasuredCost
        needs = kind.of(self.cost, self.chain, self.training)
        for module in cut_further(partition(self.cost, budget), self.cost, needs, budget):
            iteration = self.iteration(module.first, module.last)
            found = {
                "module": module.index + 1,
                "paper_bytes": module.memory,
                **self.plain(module.first, module.last),
            }
            try:
                yield {**found, **self._planned(iteration, iteration.checked(budget))}
            except BudgetError:
                nothing = dict.fromkeys(("plan", "measured_bytes", "limit_bytes", "planned_seconds", "difference"))
                yield {**found, **nothing, "predicted_bytes": iteration.least(rounded=True)}

    def _planned(self, iteration: LocalIteration, checked: Checked) -> dict[str, Any]:
        plain = self._update(iteration, PLAIN)
        planned = plain if checked.plan == PLAIN else self._update(iteration, checked.plan)
        if checked.plan == PLAIN and checked.limit is None:
            seconds = self.plain(iteration.part.first, iteration.part.last)["plain_seconds"]
        else:
            trial = self._trial(iteration, checked.plan)
            with self._limited(trial, checked.limit):
                seconds = trial.seconds(self._repeat)
        return {
            "plan": str(checked.plan),
            "predicted_bytes": checked.peak,
            "measured_bytes": checked.measured,
            "limit_bytes": checked.limit,
            "planned_seconds": seconds,
            "difference": float((planned - plain).norm() / plain.norm()),
        }

    def _update(self, iteration: LocalIteration, plan: MemoryPlan) -> Tensor:
        """Return the update of an iteration by a plan, computed by torch's own convolutions.

        cuDNN has others for other sizes, which round in other ways: those would be compared, and not the plans.
        """
        with torch.backends.cudnn.flags(enabled=False):
            return self._trial(iteration, plan).update()

    def _trial(self, iteration: LocalIteration, plan: MemoryPlan, steps: int | None = None) -> Trial:
        return Trial(iteration, plan, steps or TIMED_STEPS[self.chain.device.type])

    def _limited(self, trial: Trial, limit: int | None) -> AbstractContextManager[None]:
        """Limit a trial as a training is limited: convolutions remember the workspaces of the plan's own limit."""
        return nullcontext() if limit is None else allocator_limit(trial.device, limit + ROOM - trial.held)

    def swapped(self, budget: int, folder: Path) -> dict[str, Any]:
        """Return what an iteration of the whole model takes in a budget, with what does not fit on disk."""
        iteration = self.iteration(0, len(self.chain))
        trial, file = self._trial(iteration, PLAIN, steps=1), SwapFile(folder / "swap")
        trial.step()
        passes = {
            step: self._swap_for(trial, Swap(file, 0, iteration.part.parameters()), step, budget) for step in STEP
        }
        attack, step = (self._swapped_pass(trial, passes[step][0], step) for step in STEP)
        total = {key: ATTACK_STEPS * attack[key] + step[key] for key in attack}
        return {**total, "in_memory_bytes": max(in_memory for _, in_memory in passes.values())}

    def _swap_for(self, trial: Trial, swap: Swap, step: bool, budget: int) -> tuple[Swap, int]:
        """Return the least that must be swapped in a pass of an attack or a step, and the bytes that stay in memory."""
        held, size = trial.held, bytes_of(trial.part.parameters())

        def peak(swap: Swap) -> int:
            return held + measured_peak(lambda: self._swapped_pass(trial, swap, step), trial.device)

        nothing = peak(swap)  # of the activations is kept
        missing = max(nothing - budget, 0)
        momenta = min(missing, size)
        gradients = min(missing - momenta, size) if step else 0
        weights = min(missing - momenta - gradients, size)
        swap = replace(swap, momenta=momenta, gradients=gradients, weights=weights)
        if missing:
            return swap, nothing - momenta - gradients - weights
        swap = replace(swap, allowance=budget)
        while (in_memory := peak(swap)) > budget:  # all of them are kept at first, then as many fewer as are too many
            swap = replace(swap, allowance=max(swap.kept - (in_memory - budget), 0))
        return swap, in_memory

    def _swapped_pass(self, trial: Trial, swap: Swap, step: bool) -> dict[str, float]:
        swap.file.reset()
        started = clock(trial.device)
        with swap.one_pass(step):
            trial.step() if step else trial.attack()
        elapsed = clock(trial.device) - started
        return {
            "computation_seconds": elapsed - swap.file.seconds if trial.device.type == "cuda" else elapsed,
            "swapping_seconds": swap.file.seconds,
            "written_bytes": swap.file.written,
            "read_bytes": swap.file.read_bytes,
        }


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def measured(
    name: str, budgets: Sequence[int], device: torch.device, repeat: int, folder: Path | None
) -> Iterator[dict[str, Any]]:
    """Yield everything about one model, again after every budget; without swapping where there is no folder for it."""
    model = Model(name, device, repeat)
    whole = model.plain(0, len(model.chain))
    if device.type == "cuda":
        for module in (module for budget in budgets for module in partition(model.cost, budget * MB)):
            model.plain(module.first, module.last)
    occasion = {"date": describe()["date"], "commit": commit(), "repeat": repeat}
    found: dict[str, Any] = {
        "paper_bytes": model.cost.total_memory,
        "measured_bytes": whole["plain_measured_bytes"],
        "seconds": whole["plain_seconds"],
        **occasion,
        "budgets": [],
    }
    for budget in budgets:
        print(f"{name}, {budget} MB", flush=True)
        modules = list(model.modules(budget * MB))
        swapped = {**model.swapped(budget * MB, folder), **occasion} if folder is not None else None
        found["budgets"].append({"budget_bytes": budget * MB, "modules": modules, "swapped": swapped, **occasion})
        yield found


def page(document: dict[str, Any]) -> Page:
    parts = [part for name, found in document["models"].items() for part in _model_page(name, found)]
    machine = document["machine"]
    place = f"{machine['gpu']}, " if document["device"] != "cpu" else ""
    time_ = "processor time" if document["device"] == "cpu" else "wall time"
    few = f", {TIMED_STEPS['cpu']} steps of the attack before" if document["device"] == "cpu" else ""
    note = (
        f"{place}{machine['processor']}, {machine['cores']} cores, one thread, load {machine['load']}; Python "
        f"{machine['python']}, torch {machine['torch']}. Computation: {time_}; swapping: wall time, O_DIRECT, beside "
        "other work. Difference: of one iteration's update by the plan from the plain one, by the length of that"
        f"{few}."
    )
    return Page("Time against budget", lines=(note,), parts=tuple(parts))


def _model_page(name: str, found: dict[str, Any]) -> Iterator[Page]:
    columns = (
        Column("Budget", form=_mb),
        Column("Modules"),
        Column("within", form=str),
        Column("plain", "One iteration of each, s", form=_seconds),
        Column("planned", "One iteration of each, s", form=_seconds),
        Column("ratio", "One iteration of each, s", form=_ratio),
        Column("worst ratio", form=_ratio),
        Column("computation", "Whole model swapped, s", form=_seconds),
        Column("disk", "Whole model swapped, s", form=_seconds),
        Column("moved", "Whole model swapped", form=_mb),
        Column("in memory", "Whole model swapped", form=_mb),
    )
    line = (
        f"whole model: {_mb(found['paper_bytes'])} on paper, {_mb(found['measured_bytes'])} measured, plain iteration "
        f"{_seconds(found['seconds'])} s; {_occasion(found)}"
    )
    table = Table("", columns, tuple(_summary(entry) for entry in found["budgets"]))
    yield Page(name, (table,), lines=(line,))
    for entry in found["budgets"]:
        yield Page(f"{name}, {_mb(entry['budget_bytes'])}", (_modules_table(entry),), lines=(_occasions(entry),))


def _occasions(entry: dict[str, Any]) -> str:
    """Say when modules were measured, and when swapping was, if that was at another time."""
    modules, swapped = _occasion(entry), _occasion({**entry, **(entry["swapped"] or {})})
    return modules if swapped == modules else f"{modules}; swapping: {swapped}"


def _occasion(measured: dict[str, Any]) -> str:
    return f"commit {measured['commit']}, {measured['date']}, quickest of {max(measured['repeat'], 1)}"


def _summary(entry: dict[str, Any]) -> tuple[Any, ...]:
    modules, swapped = entry["modules"], entry["swapped"] or {}
    planned = [module for module in modules if module["plan"] is not None]
    plain, fitted = (sum(module[key] for module in planned) for key in ("plain_seconds", "planned_seconds"))
    worst = max((module["planned_seconds"] / module["plain_seconds"] for module in planned), default=None)
    return (
        entry["budget_bytes"],
        len(modules),
        f"{len(planned)} of {len(modules)}",
        plain,
        fitted,
        fitted / plain if plain else None,
        worst,
        swapped.get("computation_seconds"),
        swapped.get("swapping_seconds"),
        swapped["written_bytes"] + swapped["read_bytes"] if swapped else None,
        swapped.get("in_memory_bytes"),
    )


def _modules_table(entry: dict[str, Any]) -> Table:
    columns = {
        "module": Column("Module"),
        "paper_bytes": Column("Paper", form=_mb),
        "plain_measured_bytes": Column("Plain measured", form=_mb),
        "plan": Column("Plan", words=True),
        "predicted_bytes": Column("Predicted", form=_mb),
        "measured_bytes": Column("Measured", form=_mb),
        "plain_seconds": Column("Plain, s", form=_seconds),
        "planned_seconds": Column("Planned, s", form=_seconds),
        "difference": Column("Difference", form=_difference),
    }
    return Table(
        "", tuple(columns.values()), tuple(tuple(module.get(key) for key in columns) for module in entry["modules"])
    )


def _mb(size: int) -> str:
    return f"{size / MB:.1f} MB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.4f}"


def _difference(difference: float) -> str:
    return f"{difference:.0e}" if difference else "0"


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}×"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--budgets", nargs="+", type=int, help="in MB, instead of the models' own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--no-swap", action="store_true", help="leave the swapped model as it was measured before")
    parser.add_argument("--out", type=Path, default=RESULTS, help="two files, .json and .md")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    if device.type == "cuda":
        spare_memory()
    path = chosen.out.with_suffix(".json")
    document = {
        "machine": describe(),
        "device": chosen.device,
        "models": _known(path),
    }
    with torch_threads(1), TemporaryDirectory() as folder:
        for name in chosen.models:
            budgets = chosen.budgets or SETTINGS[name].budgets[device.type]
            before = document["models"].get(name, {}).get("budgets", [])
            swap = None if chosen.no_swap else Path(folder)
            for found in measured(name, budgets, device, chosen.repeat, swap):
                document["models"][name] = {**found, "budgets": _together(before, found["budgets"])}
                path.write_text(json.dumps(document, indent=1) + "\n")
                chosen.out.with_suffix(".md").write_text(markdown(page(document)))


OCCASION = ("date", "commit", "repeat")


def _known(path: Path) -> dict[str, Any]:
    """Return what was measured before; a budget that does not say when was measured when its model was.

    So was what was swapped for it.
    """
    models = json.loads(path.read_text())["models"] if path.exists() else {}
    for model in models.values():
        model["budgets"] = [{**_when(model), **entry} for entry in model["budgets"]]
        for entry in model["budgets"]:
            entry["swapped"] = entry["swapped"] and {**_when(entry), **entry["swapped"]}
    return models


def _when(measured: dict[str, Any]) -> dict[str, Any]:
    return {key: measured[key] for key in OCCASION}


def _together(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was measured for other budgets before, and now; what is not swapped now, as it was before."""
    entries = {entry["budget_bytes"]: entry for entry in before}
    for entry in now:
        swapped = entry["swapped"] or entries.get(entry["budget_bytes"], {}).get("swapped")
        entries[entry["budget_bytes"]] = {**entry, "swapped": swapped}
    return [entries[budget] for budget in sorted(entries)]


if __name__ == "__main__":
    main()
