"""Keys that have a new name are read under the old one, with one note, wherever a configuration comes from."""

import json
import logging
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedprophet.config import renamed
from fedprophet.config.compare import completed, differences
from fedprophet.config.config import Config
from fedprophet.config.load import load_config, parse_config
from fedprophet.config.renamed import RENAMED, with_new_names
from fedprophet.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
OLD = """\
[data]
name = "folder"
size = 64
test_per_class = 3
cache = "there"

[flower]
minimum = 2
deadline = 30.0

[aggregate]
rule = "clip"
clip = 5.0
trim = 0.3

[budget]
enforce = true
"""
NEW: dict[str, Any] = {
    "data": {"name": "folder", "options": {"size": 64, "test_per_class": 3, "cache": "there"}},
    "flower": {"deadline": 30.0},
    "aggregate": {"rule": "clip", "minimum": 2},
    "clip": {"norm": 5.0},
    "trimmed_mean": {"trim": 0.3},
    "memory": {"enforce": True},
}


@pytest.fixture(autouse=True)
def notes(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    renamed._note.cache_clear()
    caplog.set_level(logging.WARNING, "fedprophet")
    yield caplog
    renamed._note.cache_clear()


def test_a_file(tmp_path: Path, notes: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "old.toml"
    path.write_text(OLD)
    assert load_config(path) == parse_config(NEW)
    load_config(path)
    assert len(notes.messages) == len(RENAMED), "each key is noted once"
    assert notes.messages[0].startswith("flower.minimum is now called aggregate.minimum")


def test_an_override(notes: pytest.LogCaptureFixture) -> None:
    config = load_config(None, ["aggregate.trim=0.3", "data.name=folder", "data.size=8"])
    assert config == load_config(None, ["trimmed_mean.trim=0.3", "data.name=folder", "data.options.size=8"])
    assert [text.partition(" ")[0] for text in notes.messages] == ["aggregate.trim", "data.size"]
    with pytest.raises(ConfigError, match=r"^aggregate\.minimum: given 0 \(--set\)"):
        load_config(None, ["flower.minimum=0"])


def test_an_override_with_the_old_default_takes_the_option_back() -> None:
    assert load_config("caltech256-balanced", ["data.size=0"]).data.options == {"test_per_class": 25}


def test_a_methods_table(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text("[flower]\nminimum = 2\n[methods.jfat.flower]\nminimum = 3\n[methods.jfat.aggregate]\nclip = 1.0\n")
    assert load_config(path).aggregate.minimum == 2
    jfat = load_config(path, ["method=jfat"]).model_dump()
    assert (jfat["aggregate"]["minimum"], jfat["clip"]["norm"]) == (3, 1.0)


def test_the_stored_configuration_of_an_old_run() -> None:
    """Old files have every key: 0 and "" stood for the dataset's own default."""
    config = parse_config({"seed": 3, "aggregate": {"minimum": 2}})
    stored = json.loads(json.dumps(config.model_dump()))
    del stored["data"]["options"], stored["clip"], stored["trimmed_mean"], stored["aggregate"]["minimum"]
    stored["data"] |= {"size": 0, "test_per_class": 0, "cache": ""}
    stored["aggregate"] |= {"clip": 0.0, "trim": 0.2}
    stored["flower"]["minimum"] = 2
    assert parse_config(stored) == config
    assert differences(config, completed(stored)) == []
    stored["flower"]["minimum"] = 4
    assert differences(config, completed(stored)) == ["aggregate.minimum: here 2, there 4"]


def test_the_old_defaults_are_read_silently(notes: pytest.LogCaptureFixture) -> None:
    old = {
        "flower": {"minimum": 1},
        "aggregate": {"clip": 0.0, "trim": 0.2},
        "data": {"size": 0, "test_per_class": 0, "cache": ""},
        "budget": {"enforce": False},
    }
    assert parse_config(old) == Config()
    assert notes.messages == []
    parse_config(old | {"aggregate": {"clip": 0.0, "trim": 0.3}})
    assert [text.partition(" ")[0] for text in notes.messages] == ["aggregate.trim"]


def test_an_old_default_replaces_another_value() -> None:
    """It is silent, but counts: a method's table may go back to it."""
    tables = {"aggregate": {"minimum": 2}, "methods": {"fedprophet": {"flower": {"minimum": 1}}}}
    assert parse_config(tables).aggregate.minimum == 1


def test_a_configuration_made_in_code(notes: pytest.LogCaptureFixture) -> None:
    old: dict[str, Any] = {"flower": {"minimum": 2}, "data": {"size": 32, "name": "folder"}}
    new = {"aggregate": {"minimum": 2}, "data": {"options": {"size": 32}, "name": "folder"}}
    assert Config(**old) == Config.model_validate(old) == Config.model_validate_json(json.dumps(old))
    assert Config(**old) == parse_config(new)
    assert [text.partition(" ")[0] for text in notes.messages] == ["flower.minimum", "data.size"]
    with pytest.raises(ConfigError, match=r"^data\.size is now called data\.options\.size, and both are set"):
        Config.model_validate({"data": {"size": 32, "options": {"size": 8}}})


@pytest.mark.parametrize("path", sorted(RESULTS.glob("**/config.toml")), ids=lambda path: path.parent.name)
def test_recorded_results_have_the_new_names(path: Path) -> None:
    stored = tomllib.loads(path.read_text("utf-8"))
    assert with_new_names(stored) == stored
    load_config(path)


def test_both_names_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^aggregate\.clip is now called clip\.norm, and both are set: remove aggre"):
        parse_config({"aggregate": {"clip": 1.0}, "clip": {"norm": 2.0}})


def test_the_given_table_stays_as_it_is() -> None:
    given = {"data": {"name": "folder", "size": 8}}
    assert parse_config(given).data.options == {"size": 8}
    assert given == {"data": {"name": "folder", "size": 8}}
