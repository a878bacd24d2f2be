"""`fedprophet bench`: how fast this machine plays rounds on each engine, and what a large population costs."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from fedprophet import machine
from fedprophet.bench import growth, report, rounds
from fedprophet.bench.report import Document
from fedprophet.cli.options import Overrides, open_folder, print_json
from fedprophet.display.tables import Page, markdown, show
from fedprophet.errors import ConfigError, unknown
from fedprophet.storage.files import write_atomic_all

PRESET, SMALL = "cifar10-balanced", "cifar10-balanced-small"
ALL = ",".join(rounds.METHODS)
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
        int | None, typer.Option(min=1, help=f"Rounds to time. Default: {REPEAT}; {GROWTH_ROUNDS} with --growth.")
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
        _open(out)
        _deliver(*_growth(chosen), out, "growth", json_)
        return
    if sizes is not None:
        raise ConfigError("--sizes needs --growth")
    wanted = rounds.Settings(
        preset or (SMALL if quick else PRESET),
        overrides,
        _methods(only),
        None if stages is None else tuple(stage - 1 for stage in _numbers("--stages", stages)),
        repeat or REPEAT,
        limit,
        _engines(engine, plain, overrides),
        real_data,
    )
    _open(out)
    _deliver(*_rounds(wanted, out), out, "bench", json_)


# Options -------------------------------------------------------------------------------------------------------------


def _refuse(options: dict[str, object]) -> None:
    """Refuse options that only apply to training."""
    given = next((option for option, value in options.items() if value), None)
    if given is not None:
        raise ConfigError(f"--growth measures the cost besides training: leave out {given}")


def _methods(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = next((name for name in names if name not in rounds.METHODS), None)
    if wrong is not None or not names:
        raise ConfigError(f"--only: {unknown('method', wrong or '', rounds.METHODS)}")
    return names


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Return the numbers in `1,3`, in ascending order."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option}: {text!r} is not a list of positive numbers. An example: {option} 1,3")
    return tuple(sorted({int(part) for part in parts}))


def _engines(engine: str | None, plain: bool, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Return the engines to measure, the plain loop first."""
    fast = rounds.check_engine(engine) if engine is not None else rounds.fast_engine()
    slow = rounds.plain_sides(overrides) if plain else ()
    chosen = tuple(dict.fromkeys([*slow, *([fast] if fast else [])]))
    if not chosen:
        raise ConfigError("this machine has only the plain loop: leave out --no-plain")
    return chosen


def _growth_settings(
    preset: str | None, overrides: tuple[str, ...], sizes: str | None, repeat: int | None, quick: bool
) -> growth.GrowthSettings:
    populations = _numbers("--sizes", sizes) if sizes is not None else QUICK_SIZES if quick else growth.SIZES
    played = repeat or (QUICK_ROUNDS if quick else GROWTH_ROUNDS)
    return growth.GrowthSettings(preset or SMALL, overrides, populations, rounds=played)


def _open(out: Path | None) -> None:
    """Refuse a folder that cannot be written to before measuring for minutes."""
    if out is not None:
        open_folder(out)


# Measuring -----------------------------------------------------------------------------------------------------------


@contextmanager
def _watching() -> Iterator[Callable[[str], None]]:
    """Show on standard error what is being measured, in a terminal only."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield lambda text: status.update(Text(text))


def _rounds(settings: rounds.Settings, out: Path | None) -> tuple[Document, Page]:
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
    if as_json:
        print_json(found)
    else:
        show(page)
    if out is not None:
        typer.echo(f"written: {', '.join(map(str, _write(found, page, out, stem)))}", err=True)


def _write(found: Document, page: Page, out: Path, stem: str) -> tuple[Path, Path]:
    files = out / f"{stem}.json", out / f"{stem}.md"
    texts = json.dumps(found, indent=2) + "\n", markdown(page)
    write_atomic_all((file, text.encode()) for file, text in zip(files, texts, strict=True))
    return files
