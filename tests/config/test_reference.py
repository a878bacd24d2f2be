"""The configuration as text: TOML that reads back, differences, and the reference page."""

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprophet.config.choices import engines, methods
from fedprophet.config.compare import completed, differences
from fedprophet.config.config import Config
from fedprophet.config.load import load_config, parse_config
from fedprophet.config.reference import reference_markdown, to_toml
from fedprophet.models import MODELS, ModelSettings
from fedprophet.settings.describe import as_toml

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"


def keys() -> list[str]:
    """Every dotted key, found without the code under test."""
    values = Config().model_dump()
    sections = {name for name, value in values.items() if isinstance(value, dict)}
    top = [name for name in values if name not in sections]
    return top + [f"{name}.{key}" for name in values if name in sections for key in values[name]]


# Writing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("comments", [False, True])
def test_toml_round_trip(tmp_path: Path, comments: bool) -> None:
    options = {"b": [1, 2.5, True, "x"], "a": {"deep key": 'q"\\\n\t\x00\x7fé'}, "": -1}
    config = parse_config(
        {"model": {"name": "custom", "options": options}, "attack": {"step": 1 / 3}, "memory": {"budget": 12345}}
    )
    path = tmp_path / "c.toml"
    path.write_text(to_toml(config, comments), encoding="utf-8")
    assert load_config(path) == config
    assert to_toml(load_config(path), comments) == to_toml(config, comments)


def test_toml_has_every_key_in_a_fixed_order() -> None:
    text = to_toml(Config())
    table = tomllib.loads(text)
    assert table == Config().model_dump()
    assert list(table)[:7] == ["method", "seed", "rounds", "threads", "engine", "precision", "model"]
    assert text.startswith('method = "fedprophet"\nseed = 0\nrounds = 500\nthreads = 0\nengine = "auto"\n')
    assert 'precision = "bfloat16"\n\n[model]\n' in text


def test_options_are_written_in_one_order() -> None:
    one, two = (
        {"model": {"name": "custom", "options": dict(pairs)}} for pairs in ([("a", 1), ("b", 2)], [("b", 2), ("a", 1)])
    )
    assert to_toml(parse_config(one)) == to_toml(parse_config(two))


def test_comments_stand_above_every_key() -> None:
    lines = to_toml(Config(), comments=True).splitlines()
    assignments = [number for number, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    assert len(assignments) == len(keys())
    assert all(lines[number - 1].startswith("# ") for number in assignments)
    assert max(map(len, lines)) <= 100


tables = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=5),
    st.recursive(
        st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(codec="utf-8")),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
        max_leaves=5,
    ),
    max_size=3,
)


@settings(max_examples=40)
@given(tables)
def test_any_options_round_trip(options: dict[str, object]) -> None:
    section = ModelSettings(name="custom", options=options)
    again = tomllib.loads(as_toml(section, comments=False))["options"]
    assert json.dumps(again, sort_keys=True) == json.dumps(options, sort_keys=True)


# Comparing -----------------------------------------------------------------------------------------------------------


def test_differences() -> None:
    here = parse_config(
        {"seed": 1, "train": {"batch": 8}, "model": {"name": "custom", "options": {"width": 1, "same": 2}}}
    )
    there = parse_config(
        {"seed": 2, "train": {"batch": 8, "momentum": 0}, "model": {"name": "custom", "options": {"same": 2}}}
    )
    assert differences(here, there) == [
        "seed: here 1, there 2",
        "model.options.width: here 1, there not set",
        "train.momentum: here 0.9, there 0.0",
    ]
    assert differences(here, here) == []
    assert differences(here, there, {"seed", "train.momentum"}) == ["model.options.width: here 1, there not set"]


def test_differences_to_the_table_of_another_version() -> None:
    stored = json.loads(json.dumps(Config().model_dump()))
    del stored["seed"]
    stored["train"]["new_key"] = None
    assert differences(Config(), stored) == ["seed: here 0, there not set", "train.new_key: here not set, there None"]


def test_a_stored_configuration_gets_the_defaults_of_new_keys() -> None:
    stored = {"seed": 3, "train": {"batch": 8}, "gone": 1}
    assert completed(stored) == {**parse_config({"seed": 3, "train": {"batch": 8}}).model_dump(), "gone": 1}


# Reference -----------------------------------------------------------------------------------------------------------


def test_every_key_is_on_the_reference_page() -> None:
    rows = {line.split("|")[1].strip(): line for line in reference_markdown().splitlines() if line.startswith("| `")}
    assert sorted(rows) == sorted(f"`{key}`" for key in keys())
    for line in rows.values():
        cells = [cell.strip() for cell in line.split(" | ")]
        assert len(cells) == 5
        assert all(cell.strip("| ") for cell in cells)
    assert "| `train.momentum` | number | `0.9` | a number of at least 0 and below 1 |" in rows["`train.momentum`"]
    assert '| `shards.kind` | text | `"skewed"` | see below |' in rows["`shards.kind`"]
    assert '| `evaluate.clients` | text or integer | `"all"` |' in rows["`evaluate.clients`"]


def test_the_committed_page_is_current() -> None:
    assert REFERENCE.read_text("utf-8") == reference_markdown(), (
        "run: fedprophet config reference > docs/reference/configuration.md"
    )


def test_the_page_has_a_line_for_every_choice() -> None:
    lines = reference_markdown().splitlines()
    for choices in (methods(), engines(), {name: entry.help for name, entry in MODELS.items()}):
        assert all(f'- `"{name}"`: {text}' in lines for name, text in choices.items())
