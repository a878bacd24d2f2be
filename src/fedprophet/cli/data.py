"""`fedprophet data`: look at the files of a dataset, and fetch them."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedprophet.data import DATASETS, data_options, find_dataset
from fedprophet.data.options import DEFAULT_ROOT, DataOptions, Findings

data_app = typer.Typer(help="Look at the files of datasets, and fetch them.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="DATASET", help=f"One of {', '.join(DATASETS)}.")]


@data_app.command()
def check(
    name: Name,
    root: Annotated[Path | None, typer.Option(help=f"Folder of its files. Default: {DEFAULT_ROOT}")] = None,
    size: Annotated[int | None, typer.Option(help="Image folders: side of the images in pixels.")] = None,
    test_per_class: Annotated[int | None, typer.Option(help="Image folders: test images of each class.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Image folders: where decoded images are kept.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is there of a dataset and what is missing; exit code 2 where it is not complete.

    Example: fedprophet data check cifar10 --root data
    """
    options = data_options(name, root, size=size, test_per_class=test_per_class, cache=cache)
    findings = find_dataset(name).check(options)
    if json_:
        typer.echo(json.dumps(_document(name, options, findings), indent=2))
    else:
        typer.echo("\n".join(_lines(name, findings)))
    if not findings.complete:
        raise typer.Exit(2)


@data_app.command()
def get(
    name: Name,
    root: Annotated[Path, typer.Option(help="The folder to put it in.")] = DEFAULT_ROOT,
) -> None:
    """Fetch a published dataset and verify it; a broken download is continued.

    Example: fedprophet data get cifar10 --root data
    """
    typer.echo(find_dataset(name).get(root.expanduser()))


def _document(name: str, options: DataOptions, findings: Findings) -> dict[str, Any]:
    return {
        "dataset": name,
        "root": None if options.root is None else str(options.root),
        "found": None if findings.found is None else str(findings.found),
        "complete": findings.complete,
        "problems": list(findings.problems),
        "train": findings.train,
        "test": findings.test,
        "classes": len(findings.images),
        "images_per_class": dict(findings.images),
        "files": dict(findings.files),
        "notes": list(findings.notes),
        "advice": findings.advice or None,
    }


def _lines(name: str, findings: Findings) -> list[str]:
    where = f" in {findings.found}" if findings.found else ""
    lines = [f"{name}: {'complete' if findings.complete else 'not complete'}{where}"]
    lines += [f"  {file}: {status}" for file, status in findings.files.items()]
    # What a file's own line says already needs no second one.
    said = {f"{file} {status}" for file, status in findings.files.items()}
    lines += [f"  {problem}" for problem in findings.problems if problem not in said]
    if findings.images:
        lines.append(f"{findings.train} training images, {findings.test} test images")
        lines.append(_classes(findings))
    return [*lines, *findings.notes, *([findings.advice] if findings.advice else [])]


def _classes(findings: Findings) -> str:
    counts = sorted(findings.images.values())
    each = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    names = list(findings.images)
    shown = ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:3])}, …, {names[-1]}"
    return f"{len(names)} classes with {each} images each: {shown}"
