"""Settings files of a pilot: TOML, read and checked."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from fedprophet.deploy import DeployError
from fedprophet.errors import ConfigError
from fedprophet.settings.describe import explain
from fedprophet.settings.toml import parse_toml

Settings = TypeVar("Settings", bound=BaseModel)


def read_settings(file: Path, model: type[Settings], missing: str) -> Settings:
    """Return the settings in a file; `missing` begins the error if the file cannot be read."""
    try:
        data = parse_toml(file.read_text("utf-8"))
    except OSError as error:
        raise DeployError(f"{missing}: cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise DeployError(f"{file} is not valid TOML: {error}") from None
    for name, field in model.model_fields.items():
        if field.is_required() and name not in data:
            raise ConfigError(f"{file} has no {name!r}: {field.description}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, model, data, f"in {file}", ()))) from None
