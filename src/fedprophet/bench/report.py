"""What was measured, as JSON and as a page of tables."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from fedprophet.bench import count
from fedprophet.bench.rounds import CUDA, EVALUATION, PARTS, PLAIN_SIDES, TRAINING, WARMUP, CaseResult, RoundsSettings
from fedprophet.config.config import Config
from fedprophet.display.numbers import counted, digits, factor, percent
from fedprophet.display.tables import Column, Page, Table
from fedprophet.durations import clock
from fedprophet.engines import cores
from fedprophet.methods import METHODS
from fedprophet.methods.world import stage_rule
from fedprophet.sizes import format_size

FLOAT32 = "float32"
Document = dict[str, Any]


# JSON ----------------------------------------------------------------------------------------------------------------


def document(
    settings: RoundsSettings, about: Document, products: Mapping[str, Any], found: Sequence[CaseResult]
) -> Document:
    """Return everything that was measured, and the machine and settings it was measured with."""
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


def _engine(settings: RoundsSettings, engine: str) -> Document:
    config = settings.measured(settings.methods[0], engine)
    return {"precision": config.precision if engine == CUDA else FLOAT32, "cores": cores(config)}


def _rows(measured: CaseResult, found: Sequence[CaseResult], product: float) -> Iterator[Document]:
    """Yield a row for each part of a case on an engine."""
    for part in PARTS:
        row = {**_where(measured), "part": part, "failure": measured.failure}
        timings = measured.parts.get(part, [])
        if timings:
            rate = statistics.median(timing.flops / timing.seconds for timing in timings)
            row |= {
                "rounds": len(timings),
                "tasks": timings[0].tasks,
                **spread([timing.seconds for timing in timings]),
                "flop": statistics.median(timing.flops for timing in timings),
                "flop_per_s": rate,
                "of_product": rate / product,
                "peak_bytes": max(timing.peak_bytes for timing in timings),
                "first_s": max(timing.first for timing in timings),
                "speedup": _speedup(measured, part, found),
            }
        yield row


def _where(measured: CaseResult) -> Document:
    return {"method": measured.case.method, "stage": measured.case.number, "engine": measured.engine}


def spread(seconds: Sequence[float]) -> Document:
    """Return the median, the least and the most of some seconds."""
    return {"seconds": statistics.median(seconds), "seconds_least": min(seconds), "seconds_most": max(seconds)}


def _speedup(measured: CaseResult, part: str, found: Sequence[CaseResult]) -> float | None:
    """Return how many times faster than the plain loop: the median over the rounds that both have played.

    Of several plain loops the fastest one counts; it has no speed-up itself.
    """
    loops = [
        side for side in found if side.case == measured.case and side.engine in PLAIN_SIDES and side.parts.get(part)
    ]
    plain = min(loops, key=lambda side: statistics.median(s.seconds for s in side.parts[part]), default=None)
    if plain is None or plain is measured:
        return None
    slow, fast = ({s.round: s for s in side.parts.get(part, [])} for side in (plain, measured))
    ratios = [slow[number].seconds / fast[number].seconds for number in slow if number in fast]
    return statistics.median(ratios) if ratios else None


def _rounds(measured: CaseResult) -> Document:
    renamed = {"flops": "flop", "first": "first_s"}
    parts = {
        part: [{renamed.get(name, name): value for name, value in asdict(timing).items()} for timing in timings]
        for part, timings in measured.parts.items()
    }
    return {**_where(measured), "server_s": measured.server, "assigned": measured.assigned, **parts}


def mean_rounds(rows: Sequence[Document]) -> list[Document]:
    """Return the mean over the stages of each method, engine and part, if all of its cases were measured.

    Its speed-up is over the plain loop with the lowest mean; None for that loop itself.
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


def projections(configs: Mapping[str, Config], found: Sequence[CaseResult]) -> list[Document]:
    """Return what a whole run would take if every stage had all its rounds; only if all stages were measured.

    Not included: measuring perturbations at the end of a stage, and writing checkpoints. Stages may also end early.
    """
    made = []
    for method, engine in dict.fromkeys((measured.case.method, measured.engine) for measured in found):
        sides = [measured for measured in found if (measured.case.method, measured.engine) == (method, engine)]
        complete = all(part in side.parts for side in sides for part in PARTS)
        if complete and len(sides) == sides[0].stages:
            made.append({"method": method, "engine": engine, **_projection(configs[method], sides)})
    return made


def _projection(config: Config, sides: Sequence[CaseResult]) -> Document:
    """Return the projection; the numbers of rounds in it are those of the first stage."""
    times = [_times(config, side.case.stage or 0) for side in sides]
    parts = {
        part: sum(
            number[part] * statistics.median(s.seconds for s in side.parts[part])
            for number, side in zip(times, sides, strict=True)
        )
        for part in PARTS
    }
    server = sum(config.rounds * statistics.median(side.server) for side in sides)
    return {
        "stages": len(sides),
        "rounds_per_stage": config.rounds,
        "warmup_rounds": times[0][WARMUP],
        "evaluations": times[0][EVALUATION],
        "seconds_by_part": {**parts, "server": server},
        "seconds": sum(parts.values()) + server,
    }


def _times(config: Config, stage: int) -> dict[str, int]:
    """Return in how many rounds of a stage each part is played."""
    rule = stage_rule(config, stage)
    if not METHODS[config.method].cascade:
        rule = rule.ungated
    rounds = range(1, rule.rounds + 1)
    attacked, evaluated = sum(map(rule.adversarial, rounds)), sum(map(rule.evaluates, rounds))
    return {WARMUP: rule.rounds - attacked, TRAINING: attacked, EVALUATION: evaluated}


# For people ----------------------------------------------------------------------------------------------------------


def rounds_page(found: Document) -> Page:
    return Page("Rounds", tuple(_tables(found)), lines=tuple(_headline(found)), notes=tuple(_notes(found)))


def _headline(found: Document) -> Iterator[str]:
    """Yield the machine, versions, precision and what was measured."""
    about, settings, product = found["machine"], found["settings"], found["product"]
    unit, written = unit_of(product["flops"])
    gpu = f"{about['gpu']} ({format_size(about['gpu_memory_bytes'])}), " if about["gpu"] else ""
    yield gpu + processor_line(about)
    yield versions_line(about)
    yield f"{source_line(settings)}, {settings['data']}"
    engines = ", ".join(_engine_text(engine, about["gpu"], **how) for engine, how in settings["engines"].items())
    yield f"engines: {engines}{_tf32(about)}"
    side = product["side"]
    yield f"matrix product of {side}×{side} in {product['type']}: {written(product['flops'])} {unit}"


def processor_line(about: Document) -> str:
    return f"{about['processor']}, {about['cores']} cores, load {about['load']} before and {about['load_after']} after"


def versions_line(about: Document) -> str:
    names = {"Python": "python", "torch": "torch", "CUDA": "cuda", "Triton": "triton", "fedprophet": "fedprophet"}
    return ", ".join([*(f"{name} {about[key]}" for name, key in names.items() if about[key]), about["date"]])


def source_line(settings: Document) -> str:
    """Return the preset and what was changed in it."""
    return " ".join([settings["preset"], *(f"--set {text}" for text in settings["overrides"])])


def _engine_text(engine: str, gpu: str | None, precision: str, cores: int) -> str:
    """Return `workers in float32 on 2 cores`; on a GPU the cores do not matter."""
    return f"{engine} in {precision}" + ("" if gpu else f" on {counted(cores, 'core')}")


def _tf32(about: Document) -> str:
    if not about["tf32"]:
        return ""
    kinds = " and ".join(kind for kind, on in about["tf32"].items() if on)
    return f" (float32 {kinds} in TF32, as torch is set)" if kinds else " (no TF32)"


def _tables(found: Document) -> Iterator[Table]:
    """Yield a table for each part, the means, and the projection if there is one."""
    unit, written = unit_of(found["product"]["flops"])
    columns = (
        Column("case"),
        Column("engine"),
        Column("seconds"),
        Column("range"),
        Column(unit, form=written),
        Column("of product", form=percent),
        Column("memory", form=format_size),
        Column("speed-up", form=factor),
    )
    method = (Column("method"), Column("engine"))
    for part in PARTS:
        rows = tuple(_line(row) for row in found["measurements"] if row["part"] == part)
        yield Table(f"{part.capitalize()}, seconds per round", columns, rows, labels=2)
    means = tuple(_mean_lines(found["mean_round"]))
    yield Table("Mean over a method's cases, seconds per round", (*method, *map(Column, PARTS)), means, labels=2)
    if found["projection"]:
        times = ("training", "evaluation", "server", "together")
        spans = [Column(part, form=partial(clock, with_hours=True)) for part in times]
        title = "Projection of a whole run, if every stage has all its rounds, hours:minutes:seconds"
        rows = tuple(_projection_line(row) for row in found["projection"])
        yield Table(title, (*method, Column("stages × rounds"), *spans), rows, labels=2)


def case_name(row: Document) -> str:
    """Return `jfat` or `stage 3`."""
    return row["method"] if row["stage"] is None else f"stage {row['stage']}"


def _line(row: Document) -> tuple[object, ...]:
    label = case_name(row), row["engine"]
    if "seconds" not in row:
        return (*label, row["failure"] and row["failure"].split(":")[0], *[None] * 5)
    times = digits(row["seconds"]), range_text(row) if row["rounds"] > 1 else "one round"
    return *label, *times, *(row[name] for name in ("flop_per_s", "of_product", "peak_bytes", "speedup"))


def range_text(row: Document, scale: float = 1.0) -> str:
    """Return `1.00–9.00`: the fastest and the slowest round."""
    return "–".join(digits(scale * row[name]) for name in ("seconds_least", "seconds_most"))


def _mean_lines(means: Iterable[Document]) -> Iterator[tuple[str | None, ...]]:
    found = {(row["method"], row["engine"], row["part"]): row for row in means}
    for method, engine in dict.fromkeys((method, engine) for method, engine, _ in found):
        rows = [found.get((method, engine, part)) for part in PARTS]
        stages = max(row["cases"] for row in rows if row is not None)
        name = f"{method}, {stages} stages" if stages > 1 else method
        yield name, engine, *(None if row is None else _mean_text(row) for row in rows)


def _mean_text(row: Document) -> str:
    """Return `0.148 (2.31×)`: seconds, and the speed-up if there is one."""
    return digits(row["seconds"]) + ("" if row["speedup"] is None else f" ({factor(row['speedup'])})")


def _projection_line(row: Document) -> tuple[object, ...]:
    parts, size = row["seconds_by_part"], f"{row['stages']} × {row['rounds_per_stage']}"
    training = parts[TRAINING] + parts[WARMUP]
    return row["method"], row["engine"], size, training, parts[EVALUATION], parts["server"], row["seconds"]


_TWO_PLAIN = (
    " The plain loop is measured with torch's threads (plain) and with one thread (plain-1). The faster one counts: it "
    "is the one without a speed-up."
)


def _notes(found: Document) -> Iterator[str]:
    loops = _TWO_PLAIN if set(PLAIN_SIDES) <= set(found["settings"]["engines"]) else ""
    repeat = found["settings"]["repeat"]
    rounds = "of one round" if repeat == 1 else f"medians over up to {repeat} rounds with different cohorts"
    yield (
        f"Seconds are {rounds}, the same rounds on every engine. All work is done once before it is timed. The "
        f"speed-up is over the plain loop, in the rounds that both have played.{loops}"
    )
    yield (
        f"{found['counting']}. Memory is the peak: torch's memory on a GPU, resident pages on a CPU. Pages that worker "
        "processes share count once for each process."
    )
    yield (
        "Warm-up training has no attack; every stage begins with it. The server's time is its own work in a round: "
        "asking, assigning, checking and averaging. A projection leaves out perturbation measurements and checkpoints."
    )
    failed = dict.fromkeys((case_name(r), r["engine"], r["failure"]) for r in found["measurements"] if r["failure"])
    yield from (f"{case} on {engine}: {failure}" for case, engine, failure in failed)


def unit_of(product: float) -> tuple[str, Callable[[float], str]]:
    """Return the unit in which a machine's matrix products have a digit before the point, and how to write FLOP/s."""
    name, flops = ("TFLOP/s", 1e12) if product >= 1e12 else ("GFLOP/s", 1e9)
    return name, lambda rate: digits(rate / flops)
