"""Reading a configuration: a preset or a TOML file, tables for single methods, and `key=value` overrides."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedprophet.config.choices import methods, reads
from fedprophet.config.config import Config, config_model
from fedprophet.config.renamed import assign, renamed_path, with_new_names
from fedprophet.errors import ConfigError, unknown
from fedprophet.going_on import how_to_resume
from fedprophet.settings.describe import explain, misfit, section_of
from fedprophet.settings.toml import parse_toml

DEFAULT_PRESET = "digits"
PER_METHOD = "methods"
"""The table that holds a table for each method; a loaded configuration has none."""


def _preset_texts() -> dict[str, str]:
    files = [file for file in resources.files("fedprophet.presets").iterdir() if file.name.endswith(".toml")]
    return dict(sorted((file.name.removesuffix(".toml"), file.read_text("utf-8")) for file in files))


PRESETS: Mapping[str, str] = {name: text.partition("\n")[0].lstrip("# ") for name, text in _preset_texts().items()}
"""Name and one-line description of every preset that ships: the first line of its file."""


@contextmanager
def _shallow() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise ConfigError("the configuration has tables or lists that are nested too deeply") from None


@_shallow()
def load_config(source: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a preset's name or a TOML file's path, with "key.sub=value" overrides on top."""
    data, place = _read(source)
    changes = [_parse_override(text) for text in overrides]
    chosen = [value for path, value in changes if list(path) == ["method"]]
    data = _for_method(data, place, *chosen[-1:])
    for path, value in changes:
        assign(data, path, value)
    config = _validated(data, place, [".".join(path) for path, _ in changes])
    by_hand = {".".join(path[:2]) for path, _ in changes}
    return _with_chosen(config, by_hand if source is None or source in PRESETS else by_hand | _read_keys(config))


@_shallow()
def parse_config(data: Mapping[str, Any], place: str = "") -> Config:
    """Return the configuration in a nested table; `place` says in errors where it came from."""
    config = _validated(_for_method(data, place), place)
    return _with_chosen(config, _read_keys(config))


def _validated(data: Mapping[str, Any], place: str, overridden: Collection[str] = ()) -> Config:
    model = config_model()
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, model, data, place, overridden))) from None


def _read_keys(config: Config) -> set[str]:
    """Return the keys that are set, but for those of other methods: a file may serve several."""
    keys = {f"{name}.{key}" for name, table in config.tables() for key in table.model_fields_set}
    return {key for key in keys if reads(config.method, key)}


def _with_chosen(config: Config, keys: Collection[str]) -> Config:
    """Return the configuration with only these keys among those that are set: what a person chose for this run."""
    tables = {
        name: type(table).model_construct({k for k in table.model_fields_set if f"{name}.{k}" in keys}, **dict(table))
        for name, table in config.tables()
    }
    return config.model_copy(update=tables)


def _for_method(data: Mapping[str, Any], place: str, method: object = None) -> dict[str, Any]:
    """Return a table in which the settings for single methods are replaced by those for the run's method."""
    rest = with_new_names(_nested(data))
    tables = rest.pop(PER_METHOD, {})
    problems = list(_method_problems(tables, place))
    if problems:
        raise ConfigError("\n".join(problems))
    chosen = rest.get("method", Config.model_fields["method"].default) if method is None else method
    return merged(rest, with_new_names(_nested(tables.get(chosen, {}))) if isinstance(chosen, str) else {})


def _nested(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table in which a key such as "train.batch" is the key `batch` of the table `train`, as in overrides.

    Where both are there it counts, as overrides do: whoever adds it to a table of settings means to change them.
    """
    result = dict(data)
    for name, value in data.items():
        path = name.split(".") if isinstance(name, str) else []
        if len(path) > 1 and all(path) and isinstance(result.get(path[0], {}), Mapping):
            del result[name]
            assign(result, path, value)
    return result


def _method_problems(tables: object, place: str) -> Iterator[str]:
    """Yield a line for every mistake in the methods' tables, also in those of methods that the run does not use."""
    origin = f" ({place})" if place else ""
    if not isinstance(tables, Mapping):
        yield misfit(PER_METHOD, tables, f"a table for each method, such as [{PER_METHOD}.jfat]", origin)
        return
    for name, table in tables.items():
        where = f"{PER_METHOD}.{name}"
        if name not in methods():
            yield f"{PER_METHOD}{origin}: {unknown('method', name, methods())}"
        elif not isinstance(table, Mapping):
            yield misfit(where, table, "a table", origin)
        elif "method" in table:
            yield misfit(f"{where}.method", table["method"], "any other key: the table's name is the method", origin)
        else:
            yield from _key_problems(with_new_names(_nested(table)), ", ".join(filter(None, (place, f"[{where}]"))))


def _key_problems(table: Mapping[str, Any], place: str) -> Iterator[str]:
    model = config_model()
    try:
        model.model_validate(dict(table))
    except ValidationError as error:
        # Whether keys fit together is checked for the whole configuration: here they would meet mere defaults.
        if any(problem["loc"] for problem in error.errors(include_url=False)):
            yield from explain(error, model, table, place, ())


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested table with the values of both; if both have one, that of `above`."""
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        if isinstance(value, Mapping):
            value = merged(under if isinstance(under, Mapping) else {}, value)
        result[key] = value
    return result


def _read(source: str | Path | None) -> tuple[dict[str, Any], str]:
    name = DEFAULT_PRESET if source is None else source
    if isinstance(name, str) and name in PRESETS:
        return parse_toml(_preset_texts()[name]), f"in preset {name!r}"
    path = Path(name)
    if name != "" and path.is_dir():
        file = path / "config.toml"
        text = "Give a preset or a TOML file"
        if file.is_file():
            text = f"Go on with the run in it: {how_to_resume(path)}. Or repeat it: give {file}"
        raise ConfigError(f"{path} is a folder. {text}")
    if isinstance(name, str) and not (path.suffix == ".toml" or len(path.parts) > 1 or path.is_file()):
        raise ConfigError(f"{unknown('preset', name, PRESETS)}. A TOML file's path works too")
    try:
        return parse_toml(path.read_bytes().decode("utf-8-sig")), f"in {path}"
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config file {path} is not UTF-8 text: byte {error.start} does not fit") from None
    except ValueError as error:
        raise ConfigError(f"the config file {path} is not valid TOML: {error}") from None


def _parse_override(text: str) -> tuple[Sequence[str], Any]:
    key, equals, value = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise ConfigError(f"--set {text!r} is not KEY=VALUE. An example: --set train.batch=32")
    if text.encode(errors="ignore").decode() != text:
        raise ConfigError(f"--set {text!r} is not UTF-8 text")
    field = config_model().model_fields.get(path[0])
    if len(path) == 1 and field is not None and section_of(field) is not None:
        raise ConfigError(f"--set {text!r}: {path[0]!r} is a table. Set its keys one by one, as {path[0]}.KEY=VALUE")
    return renamed_path(path, _parse_value(value))


def _parse_value(text: str) -> Any:
    """Return the value as TOML; text that is not TOML (an unquoted name) stands for itself."""
    try:
        table = parse_toml(f"value = {text}")
    except ValueError:
        return text
    return table["value"] if len(table) == 1 else text
