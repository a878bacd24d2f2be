"""The paper's own numbers: `paper.toml`, read and checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from fedprophet.settings.toml import parse_toml

Text = Annotated[str, Field(min_length=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class PaperNumber:
    """A number, its unit, and where in the paper it stands; `derived` says how it follows from printed ones."""

    value: float
    unit: str
    where: str
    derived: str = ""


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class _Grid:
    """A block of a table: rows of numbers under common columns."""

    experiment: Text
    part: Text
    where: Text
    columns: Annotated[tuple[Text, ...], Field(min_length=1)]
    unit: str | tuple[str, ...]
    rows: Annotated[dict[Text, tuple[Number, ...]], Field(min_length=1)]
    derived: str = field(default="")

    def __post_init__(self) -> None:
        for row, values in self.rows.items():
            if len(values) != len(self.columns):
                raise ValueError(f"{self.where}, row {row}: {len(values)} numbers for {len(self.columns)} columns")
        if not isinstance(self.unit, str) and len(self.unit) != len(self.columns):
            raise ValueError(f"{self.where}: {len(self.unit)} units for {len(self.columns)} columns")

    @property
    def units(self) -> tuple[str, ...]:
        return (self.unit,) * len(self.columns) if isinstance(self.unit, str) else self.unit

    def numbers(self) -> dict[str, dict[str, PaperNumber]]:
        """Return the block as row → column → number."""
        return {
            row: {
                column: PaperNumber(value, unit, f"{self.where}, row {row}, column {column}", self.derived)
                for column, unit, value in zip(self.columns, self.units, values, strict=True)
            }
            for row, values in self.rows.items()
        }


Numbers = Mapping[str, Mapping[str, PaperNumber]]
"""By row and column."""


@cache
def paper_numbers() -> Mapping[str, Mapping[str, Numbers]]:
    """Return all numbers by experiment and part."""
    return parse_numbers(files("fedprophet.reproduce").joinpath("paper.toml").read_text("utf-8"))


def parse_numbers(text: str) -> Mapping[str, Mapping[str, Numbers]]:
    """Return the numbers of a file; raise ValueError where a block is not whole or stands there twice."""
    found: dict[str, dict[str, Numbers]] = {}
    for grid in TypeAdapter(tuple[_Grid, ...]).validate_python(parse_toml(text)["grid"]):
        parts = found.setdefault(grid.experiment, {})
        if grid.part in parts:
            raise ValueError(f"{grid.experiment}, {grid.part} stands there twice")
        parts[grid.part] = grid.numbers()
    return found


def numbers_of(experiment: str, part: str) -> Numbers:
    """Return the numbers that the paper has for a part of an experiment; none where it has none."""
    return paper_numbers().get(experiment, {}).get(part, {})
