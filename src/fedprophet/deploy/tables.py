"""Settings files of a pilot: TOML that is read into a checked table."""

import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from fedprophet.deploy import DeployError
from fedprophet.errors import ConfigError
from fedprophet.settings.describe import explain

Settings = TypeVar("Settings", bound=BaseModel)


def read_settings(file: Path, model: type[Settings], otherwise: str) -> Settings:
    """Return a file's settings; a sentence where it cannot be read, begun by `otherwise`, or does not fit."""
    try:
        data = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise DeployError(f"{otherwise}: cannot read {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeployError(f"{file} is not valid TOML: {error}") from None
    for name, field in model.model_fields.items():
        if field.is_required() and name not in data:
            raise ConfigError(f"{file} has no {name!r}. It is: {field.description}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, model, data, f"in {file}", ()))) from None
