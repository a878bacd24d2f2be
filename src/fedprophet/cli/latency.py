"""`fedprophet latency`: how long a client trains in one round, and what of it is swapping."""

import json
from collections.abc import Callable
from typing import Annotated, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Table

from fedprophet.cascade.atoms import chain_of
from fedprophet.cascade.cost import COPIES, cost_of
from fedprophet.errors import ConfigError, unknown
from fedprophet.fleet.device import parse_bandwidth, parse_memory, parse_performance
from fedprophet.fleet.latency import Time, Workload, local_time, workload_of
from fedprophet.messages.task import Resources
from fedprophet.models import MODELS, build
from fedprophet.sizes import format_size, parse_shape

N = TypeVar("N", int, float)


def latency_command(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}.")],
    memory: Annotated[str, typer.Option(help="Memory that the device can spare: 60MB, 64MiB or bytes.")],
    performance: Annotated[str, typer.Option(help="What it computes: '1.3 TFLOPS' or a number of FLOP/s.")],
    bandwidth: Annotated[str, typer.Option(help="To its storage: 1.5GB/s or a number of bytes/s.")],
    input_: Annotated[str, typer.Option("--input", help="Shape of one input.")] = "3x32x32",
    classes: Annotated[int, typer.Option(help="Number of classes.", min=2)] = 10,
    batch: Annotated[int, typer.Option(help="Samples in a local batch.", min=1)] = 64,
    batches: Annotated[int, typer.Option(help="Local batches of a round, all of them full.", min=1)] = 30,
    attack_steps: Annotated[int, typer.Option(help="Attack steps on each batch; 0: no attack.", min=0)] = 10,
    optimizer: Annotated[str, typer.Option(help=f"What the client trains with: {', '.join(COPIES)}.")] = "sgd-momentum",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, in seconds.")] = False,
) -> None:
    """Estimate the time of one round of local training of a whole model, memory swapping included.

    Example: fedprophet latency vgg16 --memory 60MB --performance 1.3e12 --bandwidth 1.5e9
    """
    if optimizer not in COPIES:
        raise ConfigError(f"--optimizer: {unknown('optimizer', optimizer, COPIES)}")
    resources = Resources(
        _quantity("--memory", memory, parse_memory),
        _quantity("--performance", performance, parse_performance),
        _quantity("--bandwidth", bandwidth, parse_bandwidth),
    )
    shape = parse_shape(input_)
    with torch.device("meta"):  # A cost needs no weights: a model of any size is built at once.
        chain = chain_of(build(model, shape, classes))
    workload = workload_of(cost_of(chain, shape, batch, classes, COPIES[optimizer]))
    time = local_time(workload, resources, [batch] * batches, attack_steps)
    if json_:
        typer.echo(json.dumps(_document(time), indent=2))
    else:
        plain = local_time(workload, resources, [batch] * batches, 0)
        _show(f"{model}, {batches} batches of {batch}", plain, time, attack_steps)
        typer.echo(_explanation(workload, resources, attack_steps))


def _quantity(option: str, text: str, parse: Callable[[object], N]) -> N:
    """Return what the text of an option says: a plain number, or a number with its unit."""
    try:
        value: object = float(text)
    except ValueError:
        value = text
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def _document(time: Time) -> dict[str, float | bool]:
    return {
        "computation_s": time.computation,
        "access_s": time.access,
        "total_s": time.total,
        "fits": time.fits,
    }


def _show(title: str, plain: Time, time: Time, attack_steps: int) -> None:
    attack = Time(time.computation - plain.computation, time.access - plain.access, time.fits)
    table = Table(title=title)
    table.add_column("Seconds of a round")
    for heading in ("Computation", "Data access", "Total"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = {"training steps": plain, f"attack, {attack_steps} steps a batch": attack, "together": time}
    for label, part in rows.items():
        table.add_row(label, f"{part.computation:.2f}", f"{part.access:.2f}", f"{part.total:.2f}")
    Console(highlight=False).print(table)


def _explanation(workload: Workload, resources: Resources, attack_steps: int) -> str:
    """Say what fits and what is swapped, a line for each kind of step."""
    needs = {"a training step": workload.training_bytes(workload.batch)}
    if attack_steps:
        needs["an attack step"] = workload.attack_bytes(workload.batch)
    available = format_size(resources.memory, 2)
    return "\n".join(
        f"{step} takes {format_size(need, 2)}: "
        + (f"fits in {available}" if need <= resources.memory else f"swapped, it does not fit in {available}")
        for step, need in needs.items()
    )
