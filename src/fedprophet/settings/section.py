"""A table of settings: keys with their types, defaults, limits and meaning, defined beside the code that uses them."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

MOST, MOST_REAL = 10**9, 1e30
"""The upper limits of whole and other numbers that have none of their own."""
_REGISTERED: dict[str, type["Section"]] = {}


class Section(BaseModel):
    """The base of all tables: fixed once made, no unknown key, no silent conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    machine_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys about the machine a run uses: a resumed run may have other values."""

    def conflicts(self, config: Any) -> Iterator[str]:
        """Yield a line for each value that does not fit the rest of the configuration."""
        yield from ()

    def idle(self, config: Any) -> Iterator[tuple[str, str]]:
        """Yield each key that changes nothing, whatever its value, and the setting elsewhere that makes it so."""
        yield from ()

    @classmethod
    def __pydantic_init_subclass__(cls, **how: Any) -> None:
        """Give every number an upper limit: one without would overflow somewhere, or fill the memory."""
        for field in cls.model_fields.values():
            limited = any(hasattr(mark, "le") or hasattr(mark, "lt") for mark in field.metadata)
            if field.annotation in (int, float) and not limited:
                field.metadata += Field(le=MOST if field.annotation is int else MOST_REAL).metadata
        cls.model_rebuild(force=True)

    @field_validator("*")
    @classmethod
    def _writable(cls, value: Any) -> Any:
        """Refuse texts that no file can have in it or as its name."""
        if isinstance(value, str) and ("\0" in value or value.encode(errors="ignore").decode() != value):
            raise ValueError("not a text")
        return value


S = TypeVar("S", bound=type[Section])


def section(name: str) -> Callable[[S], S]:
    """Make a class a table of the configuration: `[name]` in a file, `config.of(the class)` in the code."""

    def register(kind: S) -> S:
        known = _REGISTERED.setdefault(name, kind)
        if (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
            raise TypeError(f"the table [{name}] is defined by {known.__module__}.{known.__qualname__} already")
        _REGISTERED[name] = kind
        return kind

    return register


def registered_sections() -> Mapping[str, type[Section]]:
    """Return every table that was registered, by its name."""
    return MappingProxyType(_REGISTERED)
