"""Values as TOML. Python reads TOML but does not write it, and this is all that a configuration needs."""

import re
from collections.abc import Mapping

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def toml_value(value: object) -> str:
    """Return a value as TOML, tables inline and sorted by key; ValueError where TOML has no such value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        names = {key: key if _BARE_KEY.fullmatch(key) else _text(key) for key in sorted(value)}
        return "{" + ", ".join(f"{name} = {toml_value(value[key])}" for key, name in names.items()) + "}"
    raise ValueError(f"TOML cannot hold {value!r}")


def shown(value: object) -> str:
    """Return a value for people, as it would be written in TOML where it can be."""
    try:
        return toml_value(value)
    except ValueError:
        return repr(value)


def _text(text: str) -> str:
    plain = (_ESCAPES.get(c) or (f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c) for c in text)
    return f'"{"".join(plain)}"'
