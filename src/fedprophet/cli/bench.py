"""`fedprophet bench`: how fast this machine plays rounds, on each engine; how little a large population costs."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedprophet import machine
from fedprophet.bench import growth, report, rounds
from fedprophet.bench.report import Document, TextTable
from fedprophet.cli.out import open_folder
from fedprophet.errors import ConfigError, unknown
from fedprophet.storage.files import write_atomic_all

PRESET, SMALL = "cifar10-balanced", "cifar10-balanced-small"
ALL = ",".join(rounds.METHODS)
REPEAT, GROWTH_ROUNDS = 3, 20
QUICK_SIZES, QUICK_ROUNDS = (100, 1_000, 10_000), 5


def bench_command(
    preset: Annotated[
        str | None, typer.Option(help=f"A preset or a TOML file. Default: {PRESET}; small with --growth.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key; may be repeated.")
    ] = None,
    only: Annotated[str, typer.Option(help="Methods, separated by commas.")] = ALL,
    stages: Annotated[str | None, typer.Option(help="FedProphet's stages, as in 1,3. Default: all.")] = None,
    repeat: Annotated[
        int | None, typer.Option(min=1, help=f"Rounds timed. Default: {REPEAT}; {GROWTH_ROUNDS} with --growth.")
    ] = None,
    limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="A case begins no further round after so long.")
    ] = 20.0,
    engine: Annotated[str | None, typer.Option(help="The fast side. Default: this machine's fastest.")] = None,
    plain: Annotated[bool, typer.Option("--plain/--no-plain", help="Measure the plain loop as well.")] = True,
    real_data: Annotated[
        bool, typer.Option("--real-data", help="The preset's own dataset instead of random images.")
    ] = False,
    growth_: Annotated[bool, typer.Option("--growth", help="Cost beside training, for 10^2 to 10^6 clients.")] = False,
    sizes: Annotated[str | None, typer.Option(help="With --growth: populations, as in 100,10000.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"{SMALL}: a minute on two CPU cores.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write the table and JSON there.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON: seconds, FLOP/s, bytes.")] = False,
) -> None:
    """Measure rounds on this machine: the plain loop and the fast engine side by side.

    jFAT and every FedProphet stage, training and evaluation apart: seconds a round, TFLOP/s, their share of the
    machine's own matrix products, peak memory, and a projection of a whole run. Random images stand for the dataset,
    so nothing is downloaded.

    Examples:

      fedprophet bench --quick

      fedprophet bench --out benchmarks/results

      fedprophet bench --only fedprophet --stages 1,7 --no-plain --set precision=float32

      fedprophet bench --growth
    """
    of_training = {"--only": only != ALL, "--stages": stages, "--engine": engine, "--no-plain": not plain}
    _check_options(quick and preset is not None, growth_, {**of_training, "--real-data": real_data}, sizes)
    overrides = tuple(settings or ())
    if growth_:
        chosen = _growth_settings(preset, overrides, _numbers("--sizes", sizes), repeat, quick)
        _open(out)
        _show(*_growth(chosen), out, "growth", json_)
        return
    wanted = rounds.Settings(
        preset or (SMALL if quick else PRESET),
        overrides,
        _methods(only),
        _stages(stages),
        repeat or REPEAT,
        limit,
        _engines(engine, plain, overrides),
        real_data,
    )
    _open(out)
    _show(*_rounds(wanted, out), out, "bench", json_)


def _open(out: Path | None) -> None:
    """Refuse a folder that cannot be written to: a measurement takes minutes."""
    if out is not None:
        open_folder(out)


@contextmanager
def _watching() -> Iterator[Callable[[str], None]]:
    """Say on standard error what is being measured: in a terminal only."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield lambda text: status.update(Text(text))


Page = tuple[str, list[str], list[TextTable], list[str]]
"""Title, headline, tables and remarks."""


def _rounds(settings: rounds.Settings, out: Path | None) -> tuple[Document, Page]:
    with _watching() as watch:
        watch("matrix product")
        about = machine.describe()
        dataset = rounds.dataset_of(settings)
        cases = rounds.cases_of(settings, dataset)
        device = "cuda" if machine.has_gpu() else "cpu"
        products = {
            "side": machine.PRODUCT_SIDE[device],
            "type": str(machine.PRODUCT_TYPE[device]).removeprefix("torch."),
            "flops": machine.product_rate(device),
        }

        def reported(measured: Sequence[rounds.Measured]) -> tuple[Document, Page]:
            found = report.document(settings, {**about, "load_after": machine.load()}, products, measured)
            return found, ("Rounds", report.headline(found), report.tables(found), report.notes(found))

        def keep(measured: Sequence[rounds.Measured]) -> None:
            if out is not None:  # a measurement takes minutes, and one that is killed should leave something
                _write(*reported(measured), out, "bench")

        return reported(rounds.measure(settings, cases, dataset, watch, keep))


def _growth_settings(
    preset: str | None, overrides: tuple[str, ...], sizes: tuple[int, ...], repeat: int | None, quick: bool
) -> growth.GrowthSettings:
    default = QUICK_SIZES if quick else growth.SIZES
    return growth.GrowthSettings(
        preset or SMALL, overrides, sizes or default, rounds=repeat or (QUICK_ROUNDS if quick else GROWTH_ROUNDS)
    )


def _growth(settings: growth.GrowthSettings) -> tuple[Document, Page]:
    about = machine.describe()
    with _watching() as watch:
        rows = growth.measure_growth(settings, watch)
    found = growth.growth_document(settings, {**about, "load_after": machine.load()}, rows)
    return found, ("Growth", growth.growth_headline(found), growth.growth_tables(found), growth.growth_notes(found))


def _check_options(two_presets: bool, of_growth: bool, of_training: Mapping[str, object], sizes: str | None) -> None:
    """Refuse options that do not go together; those `of_training` decide how training is measured."""
    if two_presets:
        raise ConfigError(f"--quick is {SMALL}: leave --preset out, or --quick")
    wrong = next((option for option, value in of_training.items() if value), None)
    if of_growth and wrong is not None:
        raise ConfigError(f"--growth measures what a round costs beside training: leave {wrong} out")
    if sizes is not None and not of_growth:
        raise ConfigError("--sizes is for --growth")


def _stages(text: str | None) -> tuple[int, ...] | None:
    """Return FedProphet's stages counted from 0; None for all."""
    return None if text is None else tuple(stage - 1 for stage in _numbers("--stages", text))


def _methods(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = next((name for name in names if name not in rounds.METHODS), None)
    if wrong is not None or not names:
        raise ConfigError(f"--only: {unknown('method', wrong or '', rounds.METHODS)}")
    return names


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Return the numbers in `1,3`, in ascending order; none where the option is not given."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option}: {text!r} is not a list of positive numbers. An example: {option} 1,3")
    return tuple(sorted({int(part) for part in parts}))


def _engines(engine: str | None, plain: bool, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Return the engines to measure: the plain loop first."""
    fast = rounds.check_engine(engine) if engine is not None else rounds.fast_engine()
    slow = rounds.plain_sides(overrides) if plain else ()
    chosen = tuple(dict.fromkeys([*slow, *([fast] if fast else [])]))
    if not chosen:
        raise ConfigError("this machine has no engine but the plain loop: leave --no-plain out")
    return chosen


def _show(found: Document, page: Page, out: Path | None, stem: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print(page)
    if out is not None:
        files = _write(found, page, out, stem)
        typer.echo(f"written: {', '.join(map(str, files))}", err=True)


def _write(found: Document, page: Page, out: Path, stem: str) -> tuple[Path, Path]:
    files = out / f"{stem}.json", out / f"{stem}.md"
    texts = json.dumps(found, indent=2) + "\n", report.markdown(*page)
    write_atomic_all((file, text.encode()) for file, text in zip(files, texts, strict=True))
    return files


def _print(page: Page) -> None:
    """Print tables in a terminal, Markdown elsewhere."""
    console = Console(highlight=False)
    if not console.is_terminal:
        typer.echo(report.markdown(*page), nl=False)
        return
    _, headline, tables, remarks = page
    _lines(console, headline)
    for table in tables:
        console.print(Text(f"\n{table.title}", style="bold"))
        console.print(_rich(table))
    console.print()
    _lines(console, remarks, "dim")


def _lines(console: Console, lines: Sequence[str], style: str = "") -> None:
    for line in lines:
        console.print(Text(line, style=style))


def _rich(table: TextTable) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(table.headings):
        shown.add_column(heading, justify="left" if number < table.labels else "right")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown
