"""What an experiment finds: values in rows and columns, curves, and whether the paper's claims hold for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedprophet.report.compare import Statistic
from fedprophet.reproduce.paper import numbers_of

Values = Mapping[str, Mapping[str, Statistic]]
"""By row and quantity; what is not known is left out."""


class UnknownValueError(LookupError):
    """A value that was not found: what depends on it cannot be said."""


@dataclass(frozen=True)
class Quantity:
    """A column of an experiment: its name, its unit, and how its numbers are written."""

    name: str
    unit: str = ""
    form: str = "{:.1f}"

    @property
    def heading(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Curve:
    """Points that a figure draws; `borders` divide them, as the stages of a run."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    borders: tuple[float, ...] = ()


@dataclass(frozen=True)
class Part:
    """What was found in one setting, and which part of the paper's numbers stands beside it."""

    label: str
    paper: str
    values: Values
    curves: tuple[Curve, ...] = ()
    notes: tuple[str, ...] = ()

    def __call__(self, row: str, quantity: str) -> float:
        """Return a value; UnknownValueError where there is none."""
        try:
            return self.values[row][quantity].mean
        except KeyError:
            raise UnknownValueError(f"{quantity} of {row}") from None


@dataclass(frozen=True)
class Claim:
    """A sentence about each part, or only about those whose label ends with `about`."""

    text: str
    check: Callable[[Part], bool]
    about: str = ""

    def verdict(self, part: Part) -> bool | None:
        """Whether it holds for what was found; None if something that it is about is not known."""
        try:
            return self.check(part)
        except UnknownValueError:
            return None


def one(value: float) -> Statistic:
    """Return a value that is exact, or of one run."""
    return Statistic(float(value), None, 1)


def printed(experiment: str, part: str) -> Part:
    """Return the paper's own numbers as a part, to see whether a claim holds for them."""
    numbers = numbers_of(experiment, part)
    values = {row: {name: one(number.value) for name, number in cells.items()} for row, cells in numbers.items()}
    return Part(part, part, values)


def verdict_text(verdict: bool | None) -> str:
    """Return how a verdict is said."""
    return {True: "holds", False: "does not hold here", None: "cannot be said: numbers are missing"}[verdict]


def statistic_json(value: Statistic | None) -> dict[str, Any] | None:
    """Return a value for programs."""
    return None if value is None else {"mean": value.mean, "deviation": value.deviation, "runs": value.count}
