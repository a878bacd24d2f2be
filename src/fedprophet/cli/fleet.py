"""`fedprophet fleet`: look at device pools and at the fleets drawn from them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from fedprophet.cli.options import print_json
from fedprophet.display.numbers import percent
from fedprophet.display.tables import Column, Page, Table, show
from fedprophet.fleet.availability import SHARES, Availability, device_probabilities, draw_device
from fedprophet.fleet.device import POOLS, Device, Pool, load_pool, pool_text
from fedprophet.messages.values import Resources
from fedprophet.sizes import format_count, format_size, parse_size

fleet_app = typer.Typer(
    help="Look at device pools: which devices, how likely, what they have available.", no_args_is_help=True
)
QUANTILES = {"lowest": 0.0, "10%": 0.1, "25%": 0.25, "median": 0.5, "75%": 0.75, "90%": 0.9, "highest": 1.0}
ROUND = 1


@dataclass(frozen=True)
class Sample:
    """How many clients have which device, and what is available on each client in the first round."""

    clients: Mapping[Device, int]
    available: Sequence[Resources]

    def quantiles(self, what: str) -> dict[str, float]:
        """Return the quantiles of the available memory in bytes or performance in FLOP/s."""
        values = [getattr(resources, what) for resources in self.available]
        return {name: float(np.quantile(values, share)) for name, share in QUANTILES.items()}


@fleet_app.callback()
def _fleet() -> None:
    """Keep `show` a command of its own, although it is the only one."""


@fleet_app.command("show")
def show_command(
    pool: Annotated[str, typer.Argument(help=f"One of {', '.join(sorted(POOLS))}, or the path of a .toml file.")],
    clients: Annotated[int, typer.Option(help="Clients to draw.", min=1)] = 100,
    exponent: Annotated[
        float, typer.Option(help="Devices are drawn ∝ (performance · memory)^exponent; 0: all equally likely.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the run.", min=0)] = 0,
    performance: Annotated[
        str, typer.Option(help=f"How available performance is drawn, as in fleet.performance: {', '.join(SHARES)}.")
    ] = "uniform",
    budget: Annotated[
        str | None, typer.Option(help="Memory that is always available on every client: 60MB, 64MiB or bytes.")
    ] = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print the pool's TOML file, to copy and edit.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON: bytes, FLOP/s, bytes/s.")] = False,
) -> None:
    """Show a pool's devices, and the devices and available resources of a run's clients in its first round.

    Examples: fedprophet fleet show cifar10 --exponent=-1     fedprophet fleet show cifar10 --toml > mine.toml
    """
    found = load_pool(pool)
    if toml:
        typer.echo(pool_text(pool), nl=False)
        return
    minimum = 0 if budget is None else parse_size(budget)
    sample = _draw(found, clients, exponent, seed, Availability(performance), minimum)
    settings = {
        "exponent": exponent,
        "seed": seed,
        "round": ROUND,
        "clients": clients,
        "performance": performance,
        "budget_bytes": minimum,
    }
    if json_:
        print_json(_document(found, settings, sample))
    else:
        show(_page(found, settings, sample))


def _draw(pool: Pool, clients: int, exponent: float, seed: int, availability: Availability, minimum: int) -> Sample:
    devices = [draw_device(pool, seed, client, exponent) for client in range(clients)]
    available = [availability.resources(device, seed, ROUND, client, minimum) for client, device in enumerate(devices)]
    return Sample(Counter(devices), available)


def _document(pool: Pool, settings: dict[str, Any], sample: Sample) -> dict[str, Any]:
    probabilities = device_probabilities(pool, settings["exponent"]).tolist()
    return {
        "pool": pool.name,
        "description": pool.description,
        **settings,
        "devices": [
            {
                "name": device.name,
                "performance": device.performance,
                "memory_bytes": device.memory,
                "bandwidth": device.bandwidth,
                "probability": probability,
                "clients": sample.clients[device],
            }
            for device, probability in zip(pool.devices, probabilities, strict=True)
        ],
        "available": {"memory_bytes": sample.quantiles("memory"), "performance": sample.quantiles("performance")},
    }


def _page(pool: Pool, settings: dict[str, Any], sample: Sample) -> Page:
    exponent, budget = settings["exponent"], settings["budget_bytes"]
    columns = (
        Column("Device"),
        Column("Performance", form=_flops),
        Column("Memory", form=format_size),
        Column("Storage", form=lambda rate: f"{format_size(round(rate))}/s"),
        Column("Probability", form=percent),
        Column("Clients"),
    )
    devices = (
        (device.name, device.performance, device.memory, device.bandwidth, probability, sample.clients[device])
        for device, probability in zip(pool.devices, device_probabilities(pool, exponent), strict=True)
    )
    performance, memory = sample.quantiles("performance"), sample.quantiles("memory")
    free = tuple((name, performance[name], memory[name]) for name in QUANTILES)
    quantiles = (Column("Quantile"), Column("Performance", form=_flops), Column("Memory", form=_size))
    draw = (
        f"Drawn with seed {settings['seed']} for round {settings['round']}, exponent {exponent:g}, "
        f"performance {settings['performance']}, {f'budget {format_size(budget)}' if budget else 'no budget'}."
    )
    return Page(
        f"Device pool {pool.name}, exponent {exponent:g}",
        (
            Table("Devices", columns, tuple(devices)),
            Table(f"Available on {len(sample.available)} clients", quantiles, free),
        ),
        notes=(*([pool.description] if pool.description else []), draw),
    )


def _flops(performance: float) -> str:
    return f"{format_count(round(performance))}FLOPS"


def _size(size: float) -> str:
    return format_size(round(size))
