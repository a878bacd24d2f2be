"""What was measured, as JSON, as Markdown and as tables for a terminal."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedprophet.bench import count
from fedprophet.bench.rounds import CUDA, EVALUATION, PARTS, PLAIN_SIDES, TRAINING, WARMUP, Measured, Sample, Settings
from fedprophet.config.config import Config
from fedprophet.durations import clock
from fedprophet.engines import cores
from fedprophet.sizes import format_size

NONE = "–"
FLOAT32 = "float32"
Document = dict[str, Any]


@dataclass(frozen=True)
class TextTable:
    """A table for people; all columns but the first `labels` hold numbers."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1


# JSON ----------------------------------------------------------------------------------------------------------------


def document(settings: Settings, about: Document, products: Mapping[str, Any], found: Sequence[Measured]) -> Document:
    """Return everything that was measured, and on what."""
    rows = [row for measured in found for row in _rows(measured, found, products["flops"])]
    configs = {method: settings.config(method) for method in settings.methods}
    return {
        "benchmark": "rounds",
        "machine": about,
        "product": dict(products),
        "counting": count.RULE,
        "settings": {
            "preset": settings.preset,
            "overrides": list(settings.overrides),
            "engines": {engine: _engine(settings, engine) for engine in settings.engines},
            "repeat": settings.repeat,
            "limit_s": settings.limit,
            "data": "the preset's own" if settings.real_data else "random images of the preset's shape",
            "config": {method: config.model_dump() for method, config in configs.items()},
        },
        "measurements": rows,
        "rounds": [_rounds(measured) for measured in found],
        "mean_round": mean_rounds(rows),
        "projection": projections(configs, found),
    }


def _engine(settings: Settings, engine: str) -> Document:
    """Return the numbers that an engine computes with, and how many cores it was given."""
    config = settings.measured(settings.methods[0], engine)
    return {"precision": config.precision if engine == CUDA else FLOAT32, "cores": cores(config)}


def _rows(measured: Measured, found: Sequence[Measured], product: float) -> Iterator[Document]:
    """Yield a row for each part of a case on an engine."""
    where = {"method": measured.case.method, "stage": stage_number(measured), "engine": measured.engine}
    for part in PARTS:
        samples = measured.parts.get(part, [])
        if not samples:
            yield {**where, "part": part, "failure": measured.failure}
            continue
        rate = statistics.median(sample.flops / sample.seconds for sample in samples)
        yield {
            **where,
            "part": part,
            "failure": measured.failure,
            "rounds": len(samples),
            "tasks": samples[0].tasks,
            **_spread([sample.seconds for sample in samples]),
            "flop": statistics.median(sample.flops for sample in samples),
            "flop_per_s": rate,
            "of_product": rate / product,
            "peak_bytes": max(sample.peak_bytes for sample in samples),
            "first_s": max(sample.first for sample in samples),
            "speedup": _speedup(measured, part, found),
        }


def stage_number(measured: Measured) -> int | None:
    """Return the stage as people count."""
    return None if measured.case.stage is None else measured.case.stage + 1


def _spread(seconds: Sequence[float]) -> Document:
    return {"seconds": statistics.median(seconds), "seconds_least": min(seconds), "seconds_most": max(seconds)}


def _speedup(measured: Measured, part: str, found: Sequence[Measured]) -> float | None:
    """Return how many times faster than the plain loop: the median over the rounds that both have played.

    Of several plain loops the fastest counts, which has no speed-up of its own.
    """
    plain = _fastest_plain(measured, part, found)
    if plain is None or plain is measured:
        return None
    slow, fast = ({s.round: s for s in side.parts.get(part, [])} for side in (plain, measured))
    ratios = [slow[number].seconds / fast[number].seconds for number in slow if number in fast]
    return statistics.median(ratios) if ratios else None


def _fastest_plain(measured: Measured, part: str, found: Sequence[Measured]) -> Measured | None:
    sides = [side for side in found if side.case == measured.case and side.engine in PLAIN_SIDES]
    done = [side for side in sides if side.parts.get(part)]
    return min(done, key=lambda side: statistics.median(s.seconds for s in side.parts[part]), default=None)


def _rounds(measured: Measured) -> Document:
    """Return the single rounds of a case on an engine."""
    return {
        "method": measured.case.method,
        "stage": stage_number(measured),
        "engine": measured.engine,
        "server_s": measured.server,
        "assigned": measured.assigned,
        **{part: [_sample(sample) for sample in samples] for part, samples in measured.parts.items()},
    }


def _sample(sample: Sample) -> Document:
    return {
        "round": sample.round,
        "tasks": sample.tasks,
        "seconds": sample.seconds,
        "flop": sample.flops,
        "peak_bytes": sample.peak_bytes,
        "first_s": sample.first,
    }


def mean_rounds(rows: Sequence[Document]) -> list[Document]:
    """Return the mean over stages of each method, engine and part whose every case was measured.

    Its speed-up is over the plain loop that has the lowest mean; None for that one itself.
    """
    means: list[Document] = []
    for method, engine, part in dict.fromkeys((row["method"], row["engine"], row["part"]) for row in rows):
        cases = [r for r in rows if (r["method"], r["engine"], r["part"]) == (method, engine, part)]
        if all("seconds" in row for row in cases):
            mean = statistics.mean(row["seconds"] for row in cases)
            means.append({"method": method, "engine": engine, "part": part, "cases": len(cases), "seconds": mean})
    for row in means:
        alike = [mean for mean in means if (mean["method"], mean["part"]) == (row["method"], row["part"])]
        plain = [mean for mean in alike if mean["engine"] in PLAIN_SIDES and mean["cases"] == row["cases"]]
        best = min(plain, key=lambda mean: mean["seconds"], default=None)
        row["speedup"] = None if best is None or best is row else best["seconds"] / row["seconds"]
    return means


def projections(configs: Mapping[str, Config], found: Sequence[Measured]) -> list[Document]:
    """Return what a whole run would take, with every stage at all its rounds: measured seconds times their number.

    Only where all of its stages were measured. A run also measures perturbations at the end of a stage and writes
    checkpoints, and its stages may end early.
    """
    made = []
    for method, engine in dict.fromkeys((measured.case.method, measured.engine) for measured in found):
        sides = [measured for measured in found if (measured.case.method, measured.engine) == (method, engine)]
        complete = all(part in side.parts for side in sides for part in PARTS)
        if complete and len(sides) == sides[0].stages:
            made.append({"method": method, "engine": engine, **_projection(configs[method], sides)})
    return made


def _projection(config: Config, sides: Sequence[Measured]) -> Document:
    evaluations = -(-config.rounds // config.evaluate.every)
    attacked = config.rounds - config.warmup_rounds
    times = {WARMUP: config.warmup_rounds, TRAINING: attacked, EVALUATION: evaluations}
    parts = {
        part: sum(number * statistics.median(s.seconds for s in side.parts[part]) for side in sides)
        for part, number in times.items()
    }
    server = sum(config.rounds * statistics.median(side.server) for side in sides)
    return {
        "stages": len(sides),
        "rounds_per_stage": config.rounds,
        "warmup_rounds": config.warmup_rounds,
        "evaluations": evaluations,
        "seconds_by_part": {**parts, "server": server},
        "seconds": sum(parts.values()) + server,
    }


# For people ----------------------------------------------------------------------------------------------------------


def headline(found: Document) -> list[str]:
    """Return the lines above the tables: the machine, versions, precision, what was measured."""
    about, settings, product = found["machine"], found["settings"], found["product"]
    unit = unit_of(product["flops"])
    gpu = f"{about['gpu']} ({format_size(about['gpu_memory_bytes'])}), " if about["gpu"] else ""
    versions = {"Python": about["python"], "torch": about["torch"], "CUDA": about["cuda"], "Triton": about["triton"]}
    named = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    engines = ", ".join(_engine_text(engine, about["gpu"], **how) for engine, how in settings["engines"].items())
    changed = "".join(f" --set {text}" for text in settings["overrides"])
    return [
        f"{gpu}{processor_line(about)}",
        f"{named}, fedprophet {about['fedprophet']}, {about['date']}",
        f"{settings['preset']}{changed}, {settings['data']}",
        f"engines: {engines}{_tf32(about)}",
        f"matrix product of {product['side']}×{product['side']} in {product['type']}: "
        f"{unit.of(product['flops'])} {unit.name}",
    ]


def processor_line(about: Document) -> str:
    """Return the processor, and how busy it was."""
    busy = f"load {about['load']} before and {about['load_after']} after"
    return f"{about['processor']}, {about['cores']} cores, {busy}"


def _engine_text(engine: str, gpu: str | None, precision: str, cores: int) -> str:
    """Return `workers in float32 on 2 cores`; a GPU's work is not done by cores."""
    return f"{engine} in {precision}" + ("" if gpu else f" on {cores} {'core' if cores == 1 else 'cores'}")


def _tf32(about: Document) -> str:
    if not about["tf32"]:
        return ""
    kinds = " and ".join(kind for kind, on in about["tf32"].items() if on)
    return f" (float32 {kinds} in TF32, as torch is set)" if kinds else " (no TF32)"


def tables(found: Document) -> list[TextTable]:
    """Return a table for each part, then the projection."""
    rows, unit = found["measurements"], unit_of(found["product"]["flops"])
    shown = [_table(part, [row for row in rows if row["part"] == part], unit) for part in PARTS]
    means = TextTable(
        "mean over the cases of a method, seconds a round",
        ("method", "engine", *PARTS),
        tuple(_mean_lines(found["mean_round"])),
        labels=2,
    )
    projected = tuple(_projection_line(row) for row in found["projection"])
    headings = ("method", "engine", "stages × rounds", "training", "evaluation", "server", "together")
    title = "projection of a whole run, every stage with all its rounds, hours:minutes:seconds"
    return [*shown, means, *([TextTable(title, headings, projected, labels=2)] if projected else [])]


def _table(part: str, rows: Sequence[Document], unit: "Unit") -> TextTable:
    headings = ("case", "engine", "seconds", "range", unit.name, "of product", "memory", "speed-up")
    return TextTable(f"{part}, seconds a round", headings, tuple(_line(row, unit) for row in rows), labels=2)


def case_name(row: Document) -> str:
    """Return `jfat` or `stage 3`."""
    return row["method"] if row["stage"] is None else f"stage {row['stage']}"


def _line(row: Document, unit: "Unit") -> tuple[str, ...]:
    label = case_name(row), row["engine"]
    if "seconds" not in row:
        return (*label, (row["failure"] or NONE).split(":")[0], *[NONE] * 5)
    least, most = short(row["seconds_least"]), short(row["seconds_most"])
    return (
        *label,
        short(row["seconds"]),
        f"{least}–{most}" if row["rounds"] > 1 else "one round",
        unit.of(row["flop_per_s"]),
        f"{100 * row['of_product']:.1f} %",
        format_size(row["peak_bytes"]),
        NONE if row["speedup"] is None else f"{row['speedup']:.2f}×",
    )


def _mean_lines(means: Iterable[Document]) -> Iterator[tuple[str, ...]]:
    found = {(row["method"], row["engine"], row["part"]): row for row in means}
    for method, engine in dict.fromkeys((method, engine) for method, engine, _ in found):
        rows = [found.get((method, engine, part)) for part in PARTS]
        stages = max(row["cases"] for row in rows if row is not None)
        yield f"{method}, {stages} stages" if stages > 1 else method, engine, *map(_mean_text, rows)


def _mean_text(row: Document | None) -> str:
    """Return `0.148 (2.31×)`: seconds, and the speed-up where there is one."""
    if row is None:
        return NONE
    return short(row["seconds"]) + ("" if row["speedup"] is None else f" ({row['speedup']:.2f}×)")


def _projection_line(row: Document) -> tuple[str, ...]:
    parts = row["seconds_by_part"]
    spans = (parts[TRAINING] + parts[WARMUP], parts[EVALUATION], parts["server"], row["seconds"])
    return (
        row["method"],
        row["engine"],
        f"{row['stages']} × {row['rounds_per_stage']}",
        *(clock(span, with_hours=True) for span in spans),
    )


_TWO_PLAIN = (
    " The plain loop has torch's threads, and one as plain-1: of both the faster one counts, which is the one "
    "without a speed-up."
)


def notes(found: Document) -> list[str]:
    """Return what a reader must know to read the tables."""
    loops = _TWO_PLAIN if set(PLAIN_SIDES) <= set(found["settings"]["engines"]) else ""
    repeat = found["settings"]["repeat"]
    rounds = "those of one round" if repeat == 1 else f"medians over up to {repeat} rounds with different cohorts"
    lines = [
        f"Seconds are {rounds}, the same on every engine; each piece of work was done once before it was timed. The "
        f"speed-up is over the plain loop, in the rounds that both have played.{loops}",
        f"{found['counting']}. Memory is the peak: torch's on a GPU; resident pages on a CPU, where those "
        "that worker processes share count for each of them.",
        "Warm-up training has no attack; a stage begins with it. The server's time is its own work in a round: asking, "
        "assigning, checking and averaging. Measuring perturbations and writing checkpoints are not in a projection.",
    ]
    failed = dict.fromkeys((case_name(r), r["engine"], r["failure"]) for r in found["measurements"] if r["failure"])
    return [*lines, *(f"{case} on {engine}: {failure}" for case, engine, failure in failed)]


def short(value: float) -> str:
    """Return a number with three digits that count."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


class Unit(NamedTuple):
    """A unit of speed."""

    name: str
    flops: float

    def of(self, flops: float) -> str:
        """Return a number of FLOP/s in this unit."""
        return short(flops / self.flops)


def unit_of(product: float) -> Unit:
    """Return the unit that suits a machine: the one in which its matrix products have a digit before the point."""
    return Unit("TFLOP/s", 1e12) if product >= 1e12 else Unit("GFLOP/s", 1e9)


def markdown(title: str, lines: Sequence[str], shown: Sequence[TextTable], remarks: Sequence[str]) -> str:
    """Return a page: headline, tables, remarks."""
    parts = [f"# {title}", "\n".join(f"- {line}" for line in lines)]
    for table in shown:
        rule = ["---"] * table.labels + ["---:"] * (len(table.headings) - table.labels)
        rows = [table.headings, tuple(rule), *table.rows]
        parts.append(f"## {table.title[0].upper()}{table.title[1:]}")
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join([*parts, *remarks]) + "\n"
