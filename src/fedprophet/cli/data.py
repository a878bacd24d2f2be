"""`fedprophet data`: check the files of a dataset, and download them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedprophet import data
from fedprophet.cli.options import AsJson, print_json, tell
from fedprophet.data.registry import DATASETS, DEFAULT_ROOT, Findings, find_dataset

data_app = typer.Typer(help="Check the files of datasets, and download them.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="DATASET", help=f"One of {', '.join(DATASETS)}.")]


@data_app.command()
def check(
    name: Name,
    root: Annotated[Path | None, typer.Option(help=f"The folder of its files. Default: {DEFAULT_ROOT}")] = None,
    size: Annotated[int | None, typer.Option(help="For image folders: the side of the images in pixels.")] = None,
    test_per_class: Annotated[int | None, typer.Option(help="For image folders: test images per class.")] = None,
    cache: Annotated[Path | None, typer.Option(help="For image folders: where decoded images are kept.")] = None,
    json_: AsJson = False,
) -> None:
    """Say whether a dataset is complete and what is missing; exit code 2 if it is not complete.

    Example: fedprophet data check cifar10 --root data
    """
    given = {"size": size, "test_per_class": test_per_class, "cache": cache}
    findings = data.check(name, root, **{option: value for option, value in given.items() if value is not None})
    if json_:
        print_json(_document(name, root, findings))
    else:
        tell("\n".join(_lines(name, findings)))
    if not findings.complete:
        raise typer.Exit(2)


@data_app.command()
def get(
    name: Name,
    root: Annotated[Path, typer.Option(help="The folder to download to.")] = DEFAULT_ROOT,
) -> None:
    """Download a dataset and verify it; an interrupted download continues.

    Example: fedprophet data get cifar10 --root data
    """
    tell(find_dataset(name).get(root.expanduser()))


def _document(name: str, root: Path | None, findings: Findings) -> dict[str, Any]:
    return {
        "dataset": name,
        "root": None if root is None else str(root.expanduser()),
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
    # A problem that a file's own line states is not repeated.
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
