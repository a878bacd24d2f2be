"""`fedprophet latency`: how long a client trains in one round, and how much of that is swapping."""

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from fedprophet.cli.options import Batch, Classes, InputShape, ModelName, Optimizer, model_cost, print_json
from fedprophet.display.tables import Column, Page, Table, show
from fedprophet.errors import ConfigError
from fedprophet.fleet.device import parse_bandwidth, parse_memory, parse_performance
from fedprophet.fleet.latency import Time, Workload, local_time, workload_of
from fedprophet.messages.values import Resources
from fedprophet.sizes import format_size

N = TypeVar("N", int, float)


def latency_command(
    model: ModelName,
    memory: Annotated[str, typer.Option(help="The device's available memory: 60MB, 64MiB or bytes.")],
    performance: Annotated[str, typer.Option(help="Its speed: '1.3 TFLOPS' or a number of FLOP/s.")],
    bandwidth: Annotated[str, typer.Option(help="To its storage: 1.5GB/s or a number of bytes/s.")],
    input_: InputShape = "3x32x32",
    classes: Classes = 10,
    batch: Batch = 64,
    batches: Annotated[int, typer.Option(help="Local batches in a round, all of them full.", min=1, max=10**6)] = 30,
    attack_steps: Annotated[int, typer.Option(help="Attack steps on each batch; 0: no attack.", min=0, max=10**6)] = 10,
    optimizer: Optimizer = "sgd-momentum",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, in seconds.")] = False,
) -> None:
    """Estimate how long a client trains a whole model in one round, memory swapping included.

    Example: fedprophet latency vgg16 --memory 60MB --performance 1.3e12 --bandwidth 1.5e9
    """
    resources = Resources(
        _quantity("--memory", memory, parse_memory),
        _quantity("--performance", performance, parse_performance),
        _quantity("--bandwidth", bandwidth, parse_bandwidth),
    )
    workload = workload_of(model_cost(model, input_, classes, batch, optimizer))
    time = local_time(workload, resources, [batch] * batches, attack_steps)
    if json_:
        seconds = {"computation_s": time.computation, "access_s": time.access, "total_s": time.total}
        print_json({**seconds, "fits": time.fits})
        return
    plain = local_time(workload, resources, [batch] * batches, 0)
    attack = Time(time.computation - plain.computation, time.access - plain.access, time.fits)
    parts = {"training steps": plain, f"attack, {attack_steps} steps per batch": attack, "together": time}
    names = ("Computation", "Storage access", "Total")
    columns = (Column("Seconds"), *(Column(name, form="{:.2f}".format) for name in names))
    rows = tuple((label, part.computation, part.access, part.total) for label, part in parts.items())
    notes = _explanation(workload, resources, attack_steps)
    show(Page(f"{model}, {batches} batches of {batch}", (Table("", columns, rows),), notes=notes))


def _quantity(option: str, text: str, parse: Callable[[object], N]) -> N:
    """Return the value of an option: a plain number, or a number with its unit."""
    try:
        value: object = float(text)
    except ValueError:
        value = text
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def _explanation(workload: Workload, resources: Resources, attack_steps: int) -> tuple[str, ...]:
    """Say what fits and what is swapped, one line for each kind of step."""
    needs = {"a training step": workload.training_bytes(workload.batch)}
    if attack_steps:
        needs["an attack step"] = workload.attack_bytes(workload.batch)
    available = format_size(resources.memory, 2)
    verdicts = {True: f"it fits into {available}", False: f"it does not fit into {available} and is swapped"}
    return tuple(
        f"{step} takes {format_size(need, 2)}: {verdicts[need <= resources.memory]}" for step, need in needs.items()
    )
