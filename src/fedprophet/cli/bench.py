"""`fedprophet bench`: how fast this machine plays rounds on each engine, and what a large population costs."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fedprophet import machine
from fedprophet.bench import growth, report, rounds
from fedprophet.bench.report import Document
from fedprophet.cli.options import Overrides, open_folder, print_result, tell
from fedprophet.console import console_on
from fedprophet.display.tables import Page, markdown
from fedprophet.engines import ENGINES
from fedprophet.errors import ConfigError, unknown
from fedprophet.storage.files import write_atomic_all

PRESET, SMALL = "cifar10-balanced", "cifar10-balanced-small"
ALL = ",".join(rounds.MEASURED_METHODS)
REPEAT, GROWTH_ROUNDS = 3, 20
QUICK_SIZES, QUICK_ROUNDS = (100, 1_000, 10_000), 5


def bench_command(
    preset: Annotated[
        str | None, typer.Option(help=f"A preset or a TOML file. Default: {PRESET}; {SMALL} with --growth.")
    ] = None,
    settings: Overrides = None,
    only: Annotated[str, typer.Option(help="Methods, separated by commas.")] = ALL,
    stages: Annotated[str | None, typer.Option(help="FedProphet's stages, as in 1,3. Default: all.")] = None,
    repeat: Annotated[
        int | None,
        typer.Option(min=1, max=10**6, help=f"Rounds to time. Default: {REPEAT}; {GROWTH_ROUNDS} with --growth."),
    ] = None,
    limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Start no further round of a case after this time.")
    ] = 20.0,
    engine: Annotated[str | None, typer.Option(help="The fast engine. Default: this machine's fastest.")] = None,
    plain: Annotated[bool, typer.Option("--plain/--no-plain", help="Measure the plain loop as well.")] = True,
    real_data: Annotated[
        bool, typer.Option("--real-data", help="Use the preset's own dataset instead of random images.")
    ] = False,
    growth_: Annotated[
        bool, typer.Option("--growth", help="Measure the cost besides training, for 10^2 to 10^6 clients.")
    ] = False,
    sizes: Annotated[str | None, typer.Option(help="With --growth: populations, as in 100,10000.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"Use {SMALL}: a minute on two CPU cores.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write Markdown and JSON there.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON: seconds, FLOP/s, bytes.")] = False,
) -> None:
    """Time rounds on this machine: the plain loop and the fast engine side by side.

    Measures jFAT and every FedProphet stage, training and evaluation separately: seconds per round, FLOP/s and their
    share of the machine's matrix products, peak memory, and a projection of a whole run. Random images replace the
    dataset, so nothing is downloaded.

    Examples:

      fedprophet bench --quick

      fedprophet bench --out benchmarks/results

      fedprophet bench --only fedprophet --stages 1,7 --no-plain --set precision=float32

      fedprophet bench --growth
    """
    overrides = tuple(settings or ())
    if quick and preset is not None:
        raise ConfigError(f"--quick uses {SMALL}: leave out --preset or --quick")
    if growth_:
        training = {"--only": only != ALL, "--stages": stages, "--engine": engine, "--no-plain": not plain}
        _refuse({**training, "--real-data": real_data})
        chosen = _growth_settings(preset, overrides, sizes, repeat, quick)
        open_folder(out)
        _deliver(*_growth(chosen), out, "growth", json_)
    else:
        if sizes is not None:
            raise ConfigError("--sizes needs --growth")
        methods = _methods(only)
        wanted = rounds.RoundsSettings(
            preset or (SMALL if quick else PRESET),
            overrides,
            methods,
            _stages(stages, methods),
            repeat or REPEAT,
            limit,
            _engines(engine, plain, overrides),
            real_data,
        )
        open_folder(out)
        _deliver(*_rounds(wanted, out), out, "bench", json_)


# Options -------------------------------------------------------------------------------------------------------------


def _refuse(training: Mapping[str, object]) -> None:
    """Refuse options about training, by whether they are given, where its cost is not what is measured."""
    for option in (option for option, given in training.items() if given):
        raise ConfigError(f"--growth measures the cost besides training: leave out {option}")


def _growth_settings(
    preset: str | None, overrides: tuple[str, ...], sizes: str | None, repeat: int | None, quick: bool
) -> growth.GrowthSettings:
    """Return what --growth measures, as it is asked for or by default."""
    populations = _numbers("--sizes", sizes) if sizes is not None else QUICK_SIZES if quick else growth.SIZES
    played = repeat or (QUICK_ROUNDS if quick else GROWTH_ROUNDS)
    return growth.GrowthSettings(preset or SMALL, overrides, populations, rounds=played)


def _stages(text: str | None, methods: Sequence[str]) -> tuple[int, ...] | None:
    """Return FedProphet's stages, counted from 0; None: all of them."""
    if text is None:
        return None
    if "fedprophet" not in methods:
        raise ConfigError("--stages are FedProphet's: add it to --only, or leave out --stages")
    return tuple(stage - 1 for stage in _numbers("--stages", text))


def _methods(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = next((name for name in names if name not in rounds.MEASURED_METHODS), None)
    if wrong is not None or not names:
        raise ConfigError(f"--only: {unknown('method', wrong or '', rounds.MEASURED_METHODS)}")
    return names


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Return the numbers in `1,3`, in ascending order."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) > 0 for part in parts):
        raise ConfigError(f"{option}: {text!r} is not a list of positive numbers. An example: {option} 1,3")
    return tuple(sorted({int(part) for part in parts}))


def _engines(engine: str | None, plain: bool, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Return the engines to measure, the plain loop first."""
    fast = rounds.fast_engine() if engine is None else engine
    if fast not in ENGINES:
        raise ConfigError(f"--engine: {unknown('engine', fast, ENGINES)}")
    slow = rounds.plain_sides(overrides) if plain else ()
    return tuple(dict.fromkeys([*slow, fast]))


# Measuring -----------------------------------------------------------------------------------------------------------


@contextmanager
def _watching() -> Iterator[Callable[[str], None]]:
    """Show on standard error what is being measured, in a terminal only."""
    console = console_on(err=True)
    with console.status("starting") if console.is_terminal else nullcontext() as status:
        yield lambda text: status.update(Text(text)) if status else None


def _rounds(settings: rounds.RoundsSettings, out: Path | None) -> tuple[Document, Page]:
    with _watching() as watch:
        watch("matrix product")
        about = machine.describe()
        dataset = rounds.dataset_of(settings)
        cases = rounds.cases_of(settings, dataset)
        product = machine.product()

        def reported(measured: Sequence[rounds.CaseResult]) -> tuple[Document, Page]:
            found = report.document(settings, {**about, "load_after": machine.load()}, product, measured)
            return found, report.rounds_page(found)

        def keep(measured: Sequence[rounds.CaseResult]) -> None:
            if out is not None:  # a measurement takes minutes: if it is killed, something should be left
                _write(*reported(measured), out, "bench")

        return reported(rounds.measure(settings, cases, dataset, watch, keep))


def _growth(settings: growth.GrowthSettings) -> tuple[Document, Page]:
    about = machine.describe()
    with _watching() as watch:
        rows = growth.measure_growth(settings, watch)
    found = growth.growth_document(settings, {**about, "load_after": machine.load()}, rows)
    return found, growth.growth_page(found)


def _deliver(found: Document, page: Page, out: Path | None, stem: str, as_json: bool) -> None:
    print_result(found, page, as_json)
    if out is not None:
        tell(f"written: {', '.join(map(str, _write(found, page, out, stem)))}", err=True)


def _write(found: Document, page: Page, out: Path, stem: str) -> tuple[Path, Path]:
    files = out / f"{stem}.json", out / f"{stem}.md"
    texts = json.dumps(found, indent=2) + "\n", markdown(page)
    write_atomic_all((file, text.encode()) for file, text in zip(files, texts, strict=True))
    return files
