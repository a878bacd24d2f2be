"""Values as TOML, with tables and lists on one line."""

import tomllib
from collections.abc import Mapping
from typing import Any

import tomlkit
from tomlkit.items import Item


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table in a TOML text; ValueError if there is none, whatever is wrong with the text."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("lists or tables are nested too deeply") from None


def toml_item(value: object) -> Item:
    """Return a value as a part of a TOML document; ValueError if TOML has no such value."""
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        for key in sorted(value):
            table.append(key, toml_item(value[key]))
        return table
    if isinstance(value, list):
        array = tomlkit.array()
        array.extend(map(toml_item, value))
        return array
    return tomlkit.item(value)


def shown(value: object) -> str:
    """Return a value as a user would write it: as TOML if possible."""
    try:
        return toml_item(value).as_string()
    except (ValueError, TypeError, RecursionError):
        pass
    try:
        return repr(value)
    except (ValueError, RecursionError):
        return f"something endless of the type {type(value).__name__}"
