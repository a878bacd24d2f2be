"""The values that settings take besides plain numbers and texts: shares, sizes, names from a registry, tables."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from fedprophet.errors import ConfigError
from fedprophet.settings.section import MOST
from fedprophet.settings.toml import toml_item
from fedprophet.sizes import parse_budget, parse_share, parse_size

DEEPEST = 8
"""How deep lists and tables may be nested in the options of a model or dataset."""
CUSTOM = "custom"
"""The name of a model or dataset that was passed in from Python."""
_RATIO = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*/\s*([0-9]+(?:\.[0-9]+)?)\s*")


@dataclass(frozen=True)
class Allowed:
    """Put into `Annotated`: the name of a type, and the values it accepts, in words."""

    kind: str
    text: str


@dataclass(frozen=True)
class OneOf:
    """Put into `Annotated`: the text must be a name in a registry, which also has a line of help for each name.

    The registry is read when a value is checked, so names that are registered later count too.
    """

    choices: Callable[[], Mapping[str, str]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, name: str) -> str:
        if name not in self.choices():
            raise ValueError("not in the registry")
        return name


@dataclass(frozen=True)
class OfClients:
    """Put into `Annotated`: the number is one of clients, so it is at most `population.clients`."""


def share_of(value: int | str, whole: int) -> int:
    """Return a number as it is, and a share such as "20%" as its part of the whole, rounded down."""
    share = parse_share(value)
    return int(value) if share is None else math.floor(share * whole)


def _ratio(value: object) -> object:
    """Turn "8/255" into its number; leave everything else to the check of the type."""
    match = _RATIO.fullmatch(value) if isinstance(value, str) else None
    return float(match[1]) / float(match[2]) if match and float(match[2]) > 0 else value


def _number_or_share(least: int) -> AfterValidator:
    """Return a check of a whole number from `least` to MOST, or a share below 100 %; "0%" counts as 0."""

    def check(value: int | str) -> int | str:
        share = parse_share(value)
        number = isinstance(value, int) and least <= value <= MOST
        fits = number if share is None else share < 1 and (share or not least)
        if not fits:
            raise ValueError("neither a number nor a share")
        return value

    return AfterValidator(check)


def _parsed_by(parse: Callable[[int | str], int]) -> AfterValidator:
    """Return a check that a value can be parsed; the value stays as it was written."""

    def check(value: int | str) -> int | str:
        try:
            parse(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(check)


def _check_options(table: dict[str, Any]) -> dict[str, Any]:
    """Refuse what TOML or JSON cannot hold: the options are written to both."""
    _check_depth(table, DEEPEST)
    toml_item(table).as_string().encode()
    try:
        json.dumps(table, allow_nan=False)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return table


def _check_depth(value: Any, levels: int) -> None:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if parts and not levels:
        raise ValueError("nested too deeply")
    for part in parts:
        _check_depth(part, levels - 1)


Ratio = Annotated[float, BeforeValidator(_ratio)]
Rounds = Annotated[
    int | str,
    _number_or_share(least=0),
    Allowed(
        "integer or text",
        f'a whole number of at least 0, or a share of `rounds` below 100 %, such as "20%"; at most {MOST}',
    ),
]
Samples = Annotated[
    int | str,
    _number_or_share(least=1),
    Allowed(
        "integer or text",
        f'a whole number of at least 1, or a share above 0 and below 100 %, such as "50%"; at most {MOST}',
    ),
]
Budget = Annotated[
    int | str,
    _parsed_by(lambda value: parse_budget(value, whole=10**12)),
    Allowed("text or integer", 'a size such as "60MB", "64MiB" or a number of bytes, or a share such as "25%"'),
]
Size = Annotated[
    int | str,
    _parsed_by(parse_size),
    Allowed("text or integer", 'a size such as "2GB", "512MiB" or a number of bytes'),
]
Options = Annotated[
    dict[str, Any],
    AfterValidator(_check_options),
    Allowed("table", "a table of numbers, texts, true/false, lists and tables"),
]
Counts = Annotated[
    list[Annotated[int, Field(ge=1, le=MOST)]], Allowed("list", "a list of counts from 1 on, such as [120, 80]")
]
Names = Annotated[list[str], Allowed("list", 'a list of names, such as ["vgg11", "vgg16"]')]
Clients = Annotated[Literal["all"] | Annotated[int, Field(ge=1, le=MOST)], OfClients()]
