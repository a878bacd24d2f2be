"""`fedprophet runs`: runs as folders, which move from machine to machine."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedprophet.cli.options import AsJson, print_json, tell
from fedprophet.display.numbers import counted
from fedprophet.errors import ConfigError
from fedprophet.progress import progress_bar
from fedprophet.runs.files import resume_hint
from fedprophet.runs.pack import pack, unpack
from fedprophet.sizes import format_size, parse_size

runs_app = typer.Typer(help="Move runs from machine to machine.", no_args_is_help=True)


@runs_app.command("pack")
def pack_command(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    part: Annotated[str, typer.Option(metavar="SIZE", help="The most that one file may have.")] = "16MiB",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new folder for the parts. Default: RUN.pack")
    ] = None,
    round_: Annotated[
        str | None,
        typer.Option(
            "--round", metavar="N", help="Pack the checkpoint of round N, or of the best round; default: the newest."
        ),
    ] = None,
    most: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Write nothing if all parts together are larger.")
    ] = None,
    json_: AsJson = False,
) -> None:
    """Pack a run, finished or not, into files of limited size, to go on with it on another machine.

    One checkpoint is packed, and all that a resume from it needs; of a finished run also its results and its model.
    Other checkpoints stay here. The data and the starting weights are not packed: the other machine needs its own.

    With --round best a run takes the least room, since its best model is not another one. What was trained since the
    best round is trained again.

    Examples:

      fedprophet runs pack runs/cifar10-fedprophet-1 --part 16MiB

      fedprophet runs pack runs/cifar10-fedprophet-1 --out parts --round best --most 60MiB
    """
    sizes = {"--part": part, **({} if most is None else {"--most": most})}
    limits = {option: _size(option, text) for option, text in sizes.items()}
    folder = out or _beside(run)
    with progress_bar(in_bytes=True) as watch:
        packed = pack(run, folder, limits["--part"], _round(round_), limits.get("--most"), watch)
    for note in packed.notes:
        tell(f"note: {note}", err=True)
    if json_:
        print_json({**packed._asdict(), "run": str(run), "parts": [str(path) for path in packed.parts]})
        return
    state = "finished" if packed.finished else "to be resumed"
    tell(f"{run}, round {packed.round}, {state}: {format_size(packed.unpacked_bytes)}")
    tell(f"in {folder}: {counted(len(packed.parts), 'file')}, {format_size(packed.bytes)}")
    if packed.left_out:
        tell(f"left out: {', '.join(packed.left_out)}")
    tell(f"On the other machine: fedprophet runs unpack {shlex.quote(folder.name)}")


@runs_app.command("unpack")
def unpack_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the parts.")],
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A new folder for the run. Default: the name it had, in runs/")
    ] = None,
    json_: AsJson = False,
) -> None:
    """Make a run's folder again from the parts that `fedprophet runs pack` has made.

    Every part is checked. Nothing is overwritten, and the folder is there when it is complete.

    Examples:

      fedprophet runs unpack cifar10-fedprophet-1.pack

      fedprophet runs unpack parts --out runs/moved && fedprophet train --resume runs/moved
    """
    with progress_bar(in_bytes=True) as watch:
        unpacked = unpack(folder, out, watch)
    for note in unpacked.notes:
        tell(f"note: {note}", err=True)
    if json_:
        print_json({**unpacked._asdict(), "run": str(unpacked.run)})
        return
    tell(f"{unpacked.run}, round {unpacked.round}: {format_size(unpacked.bytes)}")
    tell("It is finished." if unpacked.finished else resume_hint(unpacked.run))


def _beside(run: Path) -> Path:
    named = run if run.name.strip(".") else run.resolve()
    return named.with_name(f"{named.name}.pack")


def _round(text: str | None) -> int | Literal["best"] | None:
    if text is None:
        return None
    if text == "best":
        return "best"
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"--round: {text!r} is neither a round's number nor best")
    return int(text)


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None
