import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedprophet.cli.config import config_app
from fedprophet.config.load import PRESETS, load_config
from fedprophet.config.reference import reference_markdown
from fedprophet.errors import ConfigError

runner = CliRunner()


def output(*arguments: str) -> str:
    result = runner.invoke(config_app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_show_prints_toml_that_can_be_used(tmp_path: Path) -> None:
    text = output("show", "digits", "--set", "seed=5", "--set", "model.name=vgg16")
    path = tmp_path / "mine.toml"
    path.write_text(text, "utf-8")
    assert load_config(path) == load_config("digits", ["seed=5", "model.name=vgg16"])
    assert "# Seed of every random draw of the run." in text


def test_show_is_the_default_preset_without_argument() -> None:
    assert output("show") == output("show", "digits")


def test_show_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("seed = 77")
    assert tomllib.loads(output("show", str(path)))["seed"] == 77


def test_show_as_json() -> None:
    table = json.loads(output("show", "--set", "train.batch=9", "--json"))
    assert table["train"]["batch"] == 9
    assert table == load_config(None, ["train.batch=9"]).model_dump()


def test_show_of_a_method_has_its_settings_and_no_table_of_methods(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("rounds = 5\n[methods.jfat]\nrounds = 9\n")
    assert tomllib.loads(output("show", str(path)))["rounds"] == 5
    table = tomllib.loads(output("show", str(path), "--method", "jfat"))
    assert (table["method"], table["rounds"]) == ("jfat", 9)
    assert "methods" not in table
    assert json.loads(output("show", str(path), "--set", "method=jfat", "--json"))["rounds"] == 9


def test_presets() -> None:
    assert output("presets").splitlines()[0].split("  ")[0] in PRESETS
    assert json.loads(output("presets", "--json")) == dict(PRESETS)


def test_reference() -> None:
    assert output("reference") == reference_markdown()


def test_errors_are_ours() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'digts'"):
        runner.invoke(config_app, ["show", "digts"], catch_exceptions=False)
    for name in ("nope", ""):
        with pytest.raises(ConfigError, match=f'method: given "{name}"'):
            runner.invoke(config_app, ["show", "digits", "--method", name], catch_exceptions=False)
