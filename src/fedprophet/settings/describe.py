"""Text made from settings: error messages, TOML with comments, a reference page.

A model holds keys and, one level down, sections. Every text comes from a key's type, limits and description.
"""

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomlkit
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fedprophet.errors import did_you_mean, nearest
from fedprophet.settings.toml import shown, toml_item
from fedprophet.settings.values import Allowed, OneOf

Model = type[BaseModel]

_KINDS: Mapping[object, tuple[str, str]] = {
    bool: ("true/false", "true or false"),
    int: ("integer", "a whole number"),
    float: ("number", "a number"),
    str: ("text", "a text in quotes"),
}
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}


def section_of(field: FieldInfo) -> Model | None:
    """Return the model of a field that is a section."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def tables(model: Model) -> Iterator[tuple[str, Model, Mapping[str, FieldInfo]]]:
    """Yield the top level ("") and every section: its name, model and plain keys."""
    fields = model.model_fields
    yield "", model, {name: field for name, field in fields.items() if section_of(field) is None}
    for name, field in fields.items():
        section = section_of(field)
        if section is not None:
            yield name, section, section.model_fields


def choices(field: FieldInfo) -> Mapping[str, str]:
    """Return the names that a key accepts, each with its line of help; {} if it takes other values too."""
    if get_origin(field.annotation) is Literal:
        return dict.fromkeys(get_args(field.annotation), "")
    return next((mark.choices() for mark in field.metadata if isinstance(mark, OneOf)), {})


def _allowed(field: FieldInfo) -> str:
    """Return what a key accepts, in words."""
    return "a table" if section_of(field) else _describe(field.annotation, field.metadata)[1]


def _describe(annotation: object, metadata: Sequence[object]) -> tuple[str, str]:
    """Return a type's name and what it accepts."""
    for mark in metadata:
        if isinstance(mark, Allowed):
            return mark.kind, mark.text
        if isinstance(mark, OneOf):
            return "text", ", ".join(map(shown, mark.choices()))
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        marks = [inner for mark in parts[1:] for inner in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
        return _describe(parts[0], marks)
    if origin in (Union, UnionType):
        kinds, texts = zip(*(_describe(part, ()) for part in parts), strict=True)
        return " or ".join(kinds), " or ".join(texts)
    if origin is Literal:
        return "text", ", ".join(map(shown, parts))
    kind, text = _KINDS[annotation]
    pairs = ((words, getattr(mark, name, None)) for mark in metadata for name, words in _BOUNDS.items())
    limits = " and ".join(f"{words} {shown(limit)}" for words, limit in pairs if limit is not None)
    return kind, f"{text} {limits}".strip()


def default_of(field: FieldInfo) -> Any:
    """Return the value of a key that nobody sets."""
    return field.get_default(call_default_factory=True)


# Errors --------------------------------------------------------------------------------------------------------------


def misfit(key: str, given: object, allowed: str, origin: str = "") -> str:
    """Return the line for a value that does not fit its key."""
    text = shown(given)
    return f"{key}: given {text if len(text) <= 80 else text[:79] + '…'}{origin}, allowed: {allowed}"


def explain(
    error: ValidationError, model: Model, data: Mapping[str, Any], place: str, overridden: Collection[str]
) -> list[str]:
    """Return a line for each key of `data` that does not fit; `place` and `overridden` say where its value is from."""
    lines: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        if not problem["loc"]:
            return str(problem.get("ctx", {}).get("error", problem["msg"])).splitlines()
        key, field = _locate(model, problem["loc"])
        by_hand = any(key == name or name.startswith(f"{key}.") for name in overridden)
        origin = " (--set)" if by_hand else f" ({place})" if place else ""
        if field is None:
            lines[key] = _unknown_key(model, key, origin)
        else:
            # As it was written: pydantic reports what a conversion made of it.
            given: Any = reduce(getitem, key.split("."), data)
            hint = did_you_mean(nearest(given, choices(field)) if isinstance(given, str) else [])
            lines[key] = misfit(key, given, _allowed(field), origin) + (f".{hint}" if hint else "")
    return list(lines.values())


def _locate(model: Model, loc: tuple[int | str, ...]) -> tuple[str, FieldInfo | None]:
    """Return the dotted key that an error is about, and its field; None if there is no such key."""
    names: list[str] = []
    field: FieldInfo | None = None
    table: Model | None = model
    for part in loc:
        if table is None:
            break
        names.append(str(part))
        field = table.model_fields.get(str(part))
        table = section_of(field) if field else None
    return ".".join(names), field


def _unknown_key(model: Model, key: str, origin: str) -> str:
    """Say which key is unknown. The nearest match is one of its own level (`lr` too), else the same name elsewhere.

    At the top level, which is mostly sections, the same name in one of them is nearer than a section's name.
    """
    known = {where: table for where, table, _ in tables(model)}
    section, _, name = key.rpartition(".")
    if section not in known:
        section, name = "", key  # a name with dots of its own, such as "rounds."
    names = list(known[section].model_fields)
    initials = [other for other in names if "".join(word[0] for word in other.split("_")) == name]
    elsewhere = [f"{where}.{name}".strip(".") for where, _, fields in tables(model) if name in fields]
    near = [f"{section}.{guess}".strip(".") for guess in (*nearest(name, names), *initials)]
    guesses = [guess for guess in ([*near, *elsewhere] if section else [*elsewhere, *near]) if guess != key]
    return f"unknown key {key!r}{origin}.{did_you_mean(guesses)} Known: {', '.join(sorted(names))}"


# Pages ---------------------------------------------------------------------------------------------------------------


def as_toml(config: BaseModel, comments: bool) -> str:
    """Return a filled-in model as TOML; with `comments`, each key's meaning stands above it."""
    values = config.model_dump()
    document = tomlkit.document()
    for name, model, fields in tables(type(config)):
        table = tomlkit.table() if name else document
        if comments and name:
            table.add(tomlkit.comment(str(model.__doc__)))
            table.add(tomlkit.nl())
        for key, field in fields.items():
            for line in _comment(field) if comments else ():
                table.add(tomlkit.comment(line))
            table.add(key, toml_item((values[name] if name else values)[key]))
        if name:
            document.add(name, table)
    return tomlkit.dumps(document)


def _comment(field: FieldInfo) -> Iterator[str]:
    helps = {name: text for name, text in choices(field).items() if text}
    allowed = "" if helps else f" Allowed: {_allowed(field)}."
    yield from textwrap.wrap(f"{field.description}{allowed}", 98, break_long_words=False)
    for name, text in helps.items():
        yield from textwrap.wrap(f"{shown(name)}: {text}", 98, initial_indent="  ", subsequent_indent="    ")


def as_markdown(model: Model) -> str:
    """Return a table of the keys of each section and, below it, the names of each registry with their help."""
    blocks = []
    for name, table, fields in tables(model):
        keys = {f"{name}.{key}".strip("."): field for key, field in fields.items()}
        lines = [f"## [{name}]" if name else "## Top level", "", str(table.__doc__), ""]
        lines += ["| key | type | default | allowed | meaning |", "| --- | --- | --- | --- | --- |"]
        lines += [_row(key, field) for key, field in keys.items()]
        for key, field in keys.items():
            helps = [f"- `{shown(choice)}`: {text}" for choice, text in choices(field).items() if text]
            lines += ["", f"`{key}`:", "", *helps] if helps else []
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _row(key: str, field: FieldInfo) -> str:
    default = default_of(field)
    kind, accepts = _describe(field.annotation, field.metadata)
    accepts = "see below" if any(choices(field).values()) else accepts
    cells = (f"`{key}`", kind, f"`{shown(default)}`", accepts, field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
