"""Comparing configurations: what differs, and what an old one leaves out."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fedprophet.config.config import Config
from fedprophet.config.load import merged
from fedprophet.config.renamed import with_new_names
from fedprophet.settings.toml import shown


def differences(
    here: Config | Mapping[str, Any], there: Config | Mapping[str, Any], apart_from: Collection[str] = ()
) -> list[str]:
    """Return "key: here X, there Y" for every key whose values differ, `apart_from` some."""
    ours, theirs = ({key: shown(value) for key, value in flat(table)} for table in (here, there))
    return [
        f"{key}: here {ours.get(key, 'not set')}, there {theirs.get(key, 'not set')}"
        for key in dict.fromkeys((*ours, *theirs))
        if ours.get(key) != theirs.get(key) and key not in apart_from
    ]


def completed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration of any version; keys that did not exist then have their defaults."""
    return merged(Config().model_dump(), with_new_names(stored))


def flat(table: Config | Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of a configuration, such as `train.batch`, with its value."""
    for name, value in (table.model_dump() if isinstance(table, Config) else table).items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
