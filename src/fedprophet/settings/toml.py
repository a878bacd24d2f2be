"""Values as TOML, with tables and lists on one line."""

from collections.abc import Mapping

import tomlkit
from tomlkit.items import Item


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
    except (ValueError, TypeError):
        return repr(value)
