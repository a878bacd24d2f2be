"""`fedprophet fleet`: look at device pools and at the fleets drawn from them."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import typer

from fedprophet.cli.options import print_result
from fedprophet.config.load import parse_config
from fedprophet.display.numbers import percent
from fedprophet.display.tables import Column, Page, Table
from fedprophet.fleet.availability import SHARES, FleetSettings, device_probabilities, draw_device
from fedprophet.fleet.device import POOLS, Pool, load_pool, pool_text
from fedprophet.sizes import format_count, format_size, parse_size

fleet_app = typer.Typer(
    help="Look at device pools: which devices, how likely, what they have available.", no_args_is_help=True
)
QUANTILES = {"lowest": 0.0, "10%": 0.1, "25%": 0.25, "median": 0.5, "75%": 0.75, "90%": 0.9, "highest": 1.0}
ROUND = 1


@fleet_app.callback()
def _fleet() -> None:
    """Keep `show` a command of its own, although it is the only one."""


@fleet_app.command("show")
def show_command(
    pool: Annotated[str, typer.Argument(help=f"One of {', '.join(sorted(POOLS))}, or the path of a .toml file.")],
    clients: Annotated[int, typer.Option(help="Clients to draw.", min=1, max=10**6)] = 100,
    exponent: Annotated[
        float,
        typer.Option(
            min=-100, max=100, help="Devices are drawn ∝ (performance · memory)^exponent; 0: all equally likely."
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the run.", min=0, max=2**63 - 1)] = 0,
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
    config = parse_config({"fleet": {"performance": performance}}, "--performance")
    document = _document(found, clients, exponent, seed, config.fleet, minimum)
    print_result(document, _page(document), json_)


def _document(
    pool: Pool, clients: int, exponent: float, seed: int, fleet: FleetSettings, budget: int
) -> dict[str, Any]:
    drawn = [draw_device(pool, seed, client, exponent) for client in range(clients)]
    available = [fleet.resources(device, seed, ROUND, client, budget) for client, device in enumerate(drawn)]
    counts, probabilities = Counter(drawn), device_probabilities(pool, exponent).tolist()
    return {
        "pool": pool.name,
        "description": pool.description,
        "exponent": exponent,
        "seed": seed,
        "round": ROUND,
        "clients": clients,
        "performance": fleet.performance,
        "budget_bytes": budget,
        "devices": [
            {
                "name": device.name,
                "performance": device.performance,
                "memory_bytes": device.memory,
                "bandwidth": device.bandwidth,
                "probability": probability,
                "clients": counts[device],
            }
            for device, probability in zip(pool.devices, probabilities, strict=True)
        ],
        "available": {
            "memory_bytes": _quantiles([resources.memory for resources in available]),
            "performance": _quantiles([resources.performance for resources in available]),
        },
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {name: float(np.quantile(values, share)) for name, share in QUANTILES.items()}


def _page(found: dict[str, Any]) -> Page:
    columns = {
        "name": Column("Device"),
        "performance": Column("Performance", form=_flops),
        "memory_bytes": Column("Memory", form=format_size),
        "bandwidth": Column("Storage", form=lambda rate: f"{_size(rate)}/s"),
        "probability": Column("Probability", form=percent),
        "clients": Column("Clients"),
    }
    devices = tuple(tuple(device[key] for key in columns) for device in found["devices"])
    performance, memory = found["available"]["performance"], found["available"]["memory_bytes"]
    quantiles = (Column("Quantile"), Column("Performance", form=_flops), Column("Memory", form=_size))
    free = tuple((name, performance[name], memory[name]) for name in QUANTILES)
    budget = f"budget {format_size(found['budget_bytes'])}" if found["budget_bytes"] else "no budget"
    draw = (
        f"Drawn with seed {found['seed']} for round {found['round']}, exponent {found['exponent']:g}, "
        f"performance {found['performance']}, {budget}."
    )
    return Page(
        f"Device pool {found['pool']}, exponent {found['exponent']:g}",
        (
            Table("Devices", tuple(columns.values()), devices),
            Table(f"Available on {found['clients']} clients", quantiles, free),
        ),
        notes=(*([found["description"]] if found["description"] else []), draw),
    )


def _flops(performance: float) -> str:
    return f"{format_count(round(performance))}FLOPS"


def _size(size: float) -> str:
    return format_size(round(size))
