"""AutoAttack over the rows of many clients: seconds of each component, and whether verdicts are those of one client.

    python benchmarks/autoattack.py                       # VGG16 on 32×32, 100 clients × 100 samples, on a GPU
    python benchmarks/autoattack.py --clients 20 --compare 1  # one batch of rows: a fifth of it
    python benchmarks/autoattack.py --run RUN --samples 20 --compare 3  # 20 samples of each of a run's own clients

Without a run, clients have a VGG16 of random weights and norm layers of their own, and random images. What an attack
costs depends on how many samples withstand it: labels are such that the share --standing of them is right, and the
radius is so small that hardly any falls. Each component then meets the same number of rows. With --compare the first
clients are attacked alone as well, by plain torch models with their norm layers; all that differs is counted.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedprophet.attacks.autoattack import SUITES, RowOutcome, Samples, attack_rows
from fedprophet.cascade.atoms import Chain, chain_of
from fedprophet.cascade.norms import statistics_names
from fedprophet.client.part import ModelPart
from fedprophet.engines.plain import PlainEngine
from fedprophet.engines.row_attacks import ROWS, packed
from fedprophet.engines.row_model import RowModel
from fedprophet.machine import processor
from fedprophet.models.registry import build
from fedprophet.randomness import generator
from fedprophet.runs.evaluator import threat_of
from fedprophet.runs.run import open_to_read
from fedprophet.threat import input_threat

SHAPE, CLASSES, BATCH = (3, 32, 32), 10, 64


class Fleet:
    """Clients of one random VGG16, with norm statistics of their own, and their samples."""

    def __init__(self, clients: int, samples: int, standing: float, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = build("vgg16", SHAPE, CLASSES).to(device).eval()
        self.chain: Chain = chain_of(self.model)
        self.clients = [self._tensors(number) for number in range(clients)]
        self.images = torch.rand((clients, samples, *SHAPE), generator=generator(0, "images")).to(device)
        self.device = device
        self.labels = torch.stack([self._labels(number, standing) for number in range(clients)])

    def _tensors(self, client: int) -> dict[str, Tensor]:
        draw, tensors = generator(0, "norms", client), dict(self.model.state_dict())
        for name in statistics_names(self.chain):
            spread = torch.rand(tensors[name].shape, generator=draw).to(tensors[name].device)
            tensors[name] = tensors[name] * (0.8 + 0.4 * spread) if name.endswith("var") else 0.1 * spread
        return tensors

    def alone(self, client: int) -> Callable[[Tensor, Tensor], Tensor]:
        """Load a client's tensors into the model, and return it."""
        self.model.load_state_dict(self.clients[client])
        return lambda x, _: self.model(x)

    def _labels(self, client: int, standing: float) -> Tensor:
        logits, images = self.alone(client), self.images[client]
        with torch.no_grad():
            found = logits(images, images).argmax(dim=1)
        wrong = torch.arange(len(found), device=found.device) >= round(standing * len(found))
        return (found + wrong.long()) % CLASSES

    def together(self, clients: Sequence[int]) -> tuple[Callable[[Tensor, Tensor], Tensor], Samples]:
        """Return the networks and samples of some clients as rows, in groups of one batch of one client."""
        numbers = torch.tensor(clients, device=self.device)
        rows = RowModel(ModelPart(self.chain, 0, len(self.chain), None), [self.clients[c] for c in clients], None)
        samples = self.images.shape[1]
        owners = torch.arange(len(clients), device=self.device).repeat_interleave(samples)
        batches = -(-samples // BATCH)
        groups = owners * batches + torch.arange(samples, device=self.device).repeat(len(clients)) // BATCH
        seeds = [client * batches + number for client in clients for number in range(batches)]
        found = Samples(self.images[numbers].flatten(0, 1), self.labels[numbers].flatten(), groups, seeds)
        return lambda x, at: rows.logits(x, owners[at]), found

    def by_itself(self, client: int) -> tuple[Callable[[Tensor, Tensor], Tensor], Samples]:
        """Return a client's model and its samples."""
        _, samples = self.together([client])
        return self.alone(client), samples


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long work took on a device, and its result."""
    began = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, result


def components(fleet: Fleet, asked: argparse.Namespace) -> Iterator[tuple[str, float, list[RowOutcome]]]:
    """Yield each component, its seconds over all clients, and its outcomes."""
    threat, samples = input_threat(asked.radius, asked.radius, 1), fleet.images.shape[1]
    batches = list(packed(range(len(fleet.clients)), lambda _: samples, asked.rows))
    for name in SUITES[asked.suite]:
        outcomes, seconds = [], 0.0
        for number, clients in enumerate(batches, start=1):
            spent, found = timed(fleet.device, partial(attack_rows, (name,), *fleet.together(clients), threat))
            seconds += spent
            outcomes.append(found)
            print(f"  {name}: batch {number} of {len(batches)}, {spent:.1f} s", flush=True)
        yield name, seconds, outcomes


def synthetic(asked: argparse.Namespace) -> None:
    """Measure random networks."""
    device = torch.device(asked.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else processor()
    print(f"{name}, torch {torch.__version__}: {asked.clients} clients × {asked.samples} samples")
    fleet = Fleet(asked.clients, asked.samples, asked.standing, device)
    threat, total = input_threat(asked.radius, asked.radius, 1), 0.0
    for component, seconds, outcomes in components(fleet, asked):
        total += seconds
        verdicts = {field: torch.cat([getattr(found, field) for found in outcomes]) for field in ("clean", "correct")}
        right, left = (int(verdicts[field].sum()) for field in ("clean", "correct"))
        print(f"{component}: {seconds:.1f} s for {right} rows, of which {left} stand", flush=True)
        differ = 0
        for client in range(asked.compare):
            spent, alone = timed(device, partial(attack_rows, (component,), *fleet.by_itself(client), threat))
            own = slice(client * asked.samples, (client + 1) * asked.samples)
            differ += int((alone.correct != verdicts["correct"][own]).sum())
            print(f"  client {client} alone: {spent:.1f} s", flush=True)
        if asked.compare:
            print(f"  verdicts that differ from those of clients alone: {differ} of {asked.compare * asked.samples}")
    print(f"in all {total:.1f} s")
    if device.type == "cuda":
        print(f"largest memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")


def of_run(asked: argparse.Namespace) -> None:
    """Measure a run's clients on its own engine, and some of them on the plain path of the same device."""
    run = open_to_read(asked.run)
    session, state = run.session, run.state
    attack, threat = threat_of(session, asked.suite)
    world, method = session.world, session.method
    clients = world.clients.sample(session.config.evaluate.clients, state.round, "evaluate")
    asks = [method.evaluation_task(state, client, threat) for client in clients]
    tasks = [replace(task, attack=attack, samples=asked.samples) for task in asks]
    began, found = time.perf_counter(), {}
    for answer in session.engine.map(tasks):
        found[answer.client] = answer
        print(f"  {len(found)} of {len(tasks)} clients after {time.perf_counter() - began:.0f} s", flush=True)
    samples = sum(answer.samples for answer in found.values())
    print(f"{samples} samples of {len(found)} clients: {time.perf_counter() - began:.1f} s")
    plain: PlainEngine = getattr(session.engine, "_plain", session.engine)
    for alone in plain.map(tasks[: asked.compare]):
        same = alone == found[alone.client]
        print(f"client {alone.client}: {'the same' if same else f'alone {alone}, together {found[alone.client]}'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run's folder")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=100, help="of each client")
    parser.add_argument("--standing", type=float, default=0.55, help="the share of samples that are right")
    parser.add_argument("--radius", type=float, default=1e-6)
    parser.add_argument("--rows", type=int, default=ROWS, help="rows at once")
    parser.add_argument("--suite", choices=sorted(SUITES), default="autoattack")
    parser.add_argument("--compare", type=int, default=0, help="clients that are attacked alone, too")
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    of_run(asked) if asked.run else synthetic(asked)


if __name__ == "__main__":
    main()
