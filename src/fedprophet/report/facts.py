"""What a reader must know of a run before its numbers: what was trained, on what, with what; in words."""

from collections.abc import Iterator
from dataclasses import dataclass

from fedprophet.config.config import Config
from fedprophet.display.numbers import counted
from fedprophet.durations import format_duration
from fedprophet.methods import METHODS
from fedprophet.methods.refresh import measured_text
from fedprophet.report.compare import changed_settings
from fedprophet.report.runs import DEPLOYED, ReadFolder
from fedprophet.runs.engine_history import engines_text
from fedprophet.settings.toml import shown
from fedprophet.sizes import format_size

SAID = frozenset(
    ("rounds", "data.name", "fleet.pool", "attack.radius", "attack.steps", "norm.layers", "norm.refresh")
) | {"train.calibration", "aggregate.rule", "aggregate.horizon"}
SAID_SECTIONS = ("model.", "shards.", "population.")
"""What has a fact of its own; whatever else changes what is learnt is in one line, if it is not at its default."""


@dataclass(frozen=True)
class Fact:
    """A line: what it is about, and what is said."""

    label: str
    text: str


def run_facts(folder: ReadFolder) -> Iterator[Fact]:
    """Yield what was trained and on what."""
    summary = folder.summary
    config, entry = summary.config, METHODS[summary.config.method]
    yield Fact("Method", f"{entry.paper}: {entry.help}")
    yield Fact("Model", _model(folder))
    yield Fact("Data", _data(folder))
    yield Fact("Clients", f"{config.population.clients}, of which {config.population.cohort} train in a round")
    yield Fact("Shards", _shards(config))
    yield Fact("Fleet", DEPLOYED if summary.deployed else f"device pool {config.fleet.pool} (simulated)")
    if entry.cascade:
        size = f" ({format_size(folder.setup.budget_bytes)})" if folder.setup.budget_bytes else ""
        yield Fact("Memory budget", f"{config.memory.budget}{size}{', enforced' if config.memory.enforce else ''}")
    yield Fact("Attack", f"PGD-{config.attack.steps}, eps {config.attack.radius:.4g} on images in [0, 1]")
    yield Fact("Norm layers", config.norm.layers + _refresh(folder))
    calibrated = "with the client's label frequencies" if config.train.calibration == "labels" else "none"
    yield Fact("Calibration", calibrated)
    averaged = f"; judged is the mean of up to {config.horizon_rounds} rounds" if config.horizon_rounds else ""
    yield Fact("Aggregation", config.aggregate.rule + averaged)
    others = {key: value for key, value in changed_settings(summary).items() if not _is_said(key, entry.cascade)}
    if others:
        yield Fact("Not at the default", ", ".join(f"{key} = {value}" for key, value in others.items()))
    yield Fact("Rounds", _rounds(folder))
    yield Fact("Seed", str(config.seed))


def _is_said(key: str, cascade: bool) -> bool:
    """Whether another fact has a key's value."""
    return key in SAID or key.startswith(SAID_SECTIONS) or (cascade and key in ("memory.budget", "memory.enforce"))


def machine_facts(folder: ReadFolder) -> Iterator[Fact]:
    """Yield the engine and precision, what the rounds took on the clock, and the machines and versions."""
    summary, config = folder.summary, folder.summary.config
    if summary.deployed or not summary.engines:
        yield Fact("Engine", summary.engine)
    else:
        yield Fact("Engine", engines_text(summary.engines))
    precisions = dict.fromkeys(span.use.precision for span in summary.engines)
    yield Fact("Precision", ", then ".join(precisions) or f"{config.precision} on a GPU, else float32")
    if folder.seconds is not None:
        yield Fact("Wall-clock time", f"{format_duration(folder.seconds)} for {counted(summary.rounds, 'round')}")
    if not folder.setup.machines:
        versions = [f"fedprophet {summary.version}"] if summary.version else []
        yield Fact("Machine", ", ".join(["not recorded: the run is of an earlier version", *versions]))
    for machine in folder.setup.machines:
        several = len(folder.setup.machines) > 1
        yield Fact(f"Machine from round {machine.get('round')}" if several else "Machine", _machine(machine))
        names = ("fedprophet", "torch", "python", "cuda", "triton")
        yield Fact("Versions", ", ".join(f"{name} {machine[name]}" for name in names if machine.get(name)))


def _machine(machine: dict[str, object]) -> str:
    parts = [str(machine.get("processor", "processor not known"))]
    cores, memory, gpu_memory = (machine.get(key) for key in ("cores", "memory_bytes", "gpu_memory_bytes"))
    if isinstance(cores, int):
        parts.append(counted(cores, "core"))
    if isinstance(memory, int):
        parts.append(f"{format_size(memory)} memory")
    if machine.get("gpu"):
        parts.append(str(machine["gpu"]) + (f" with {format_size(gpu_memory)}" if isinstance(gpu_memory, int) else ""))
    return ", ".join(parts)


def _model(folder: ReadFolder) -> str:
    config, setup = folder.summary.config, folder.setup
    parts = [config.model.name]
    if config.model.options:
        parts.append(", ".join(f"{key} {shown(value)}" for key, value in config.model.options.items()))
    if setup.model:
        parts.append(f"{setup.model.parameters:,} parameters")
    weights = setup.starting_weights or config.model.weights
    return "; ".join([*parts, f"starting weights {weights}" if weights else "starting weights drawn at random"])


def _data(folder: ReadFolder) -> str:
    data, name = folder.setup.data, folder.summary.config.data.name
    if data is None:
        return name
    shape = "×".join(map(str, data.shape))
    return f"{name}: {data.train:,} training and {data.test:,} test images of {shape}, {data.classes} classes"


def _shards(config: Config) -> str:
    shards = config.shards
    details = {
        "skewed": f"{shards.classes_per_client} pieces of sorted labels for each client, "
        f"{100 * shards.iid_fraction:.0f} % spread evenly",
        "dirichlet": f"concentration {shards.concentration:g}",
    }
    detail = details.get(shards.kind)
    return f"{shards.kind}: {detail}" if detail else shards.kind


def _refresh(folder: ReadFolder) -> str:
    """Say what became of measuring statistics anew; if a round's record is lost, nothing is said of it."""
    stages = [
        str(record["fixed"]["module"]) for record in folder.records if "fixed" in record and record.get("refreshed")
    ]
    played = next((record for record in folder.records if "refresh" in record), None)
    refresh = folder.summary.config.refresh_images
    if played is not None:
        after = f", and after stage {' and '.join(stages)}" if stages else ""
        return f"; statistics at the end: {measured_text(played)}{after}"
    to_come = refresh != "none" and folder.setup.refreshes and not folder.summary.finished
    return f"; statistics are to be measured anew on {refresh} images at the end" if to_come else ""


def _rounds(folder: ReadFolder) -> str:
    summary = folder.summary
    most = f"at most {summary.config.rounds} a stage" if METHODS[summary.config.method].cascade else ""
    asked = most or f"{summary.config.rounds} asked for"
    return f"{summary.rounds} played, {asked}" + ("" if summary.finished else "; not finished")
