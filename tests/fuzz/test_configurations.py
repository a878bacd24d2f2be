"""Configurations as tables, as `--set`, and as files with damage; device pools; a few go through a round."""

import random
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from fedprophet.config.config import config_model
from fedprophet.config.load import load_config, parse_config
from fedprophet.config.reference import to_toml
from fedprophet.fleet.availability import draw_device
from fedprophet.fleet.device import POOLS, load_pool
from fedprophet.methods import METHODS
from fedprophet.runs.journal import journal_line
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import play_round
from fedprophet.server.rules import RULES
from fedprophet.settings.describe import tables
from fedprophet.settings.toml import parse_toml

from .conftest import TEXTS, Input, anything, damaged

pytestmark = pytest.mark.slow

KEYS = [f"{table}.{key}".strip(".") for table, _, fields in tables(config_model()) for key in fields]
PRESET = files("fedprophet.presets").joinpath("cifar10-balanced.toml").read_bytes()
AMOUNTS = (5e-324, 1e-300, 1e-30, 1e-9, 1e-3, 0.1, 0.5, 0.9, 1.0, 2.0, 10.0, 1e3, 1e9, 1e30, -1.0, -50.0)
AMOUNT_KEYS = [
    f"{table}.{key}"
    for table, _, fields in tables(config_model())
    for key, field in fields.items()
    if table and isinstance(field.default, float)
]
"""Keys whose value costs no time, however large it is."""


def _key(rng: random.Random) -> str:
    if rng.random() < 0.9:
        return rng.choice(KEYS)
    return rng.choice((*TEXTS, "nope", "train", "train.nope", "model.options.width", "methods.jfat.rounds", "." * 99))


def _kept(config: Any) -> None:
    """A configuration that is accepted can be written, and read back as it was."""
    assert parse_config(parse_toml(to_toml(config))) == config


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        inner = table.get(section)
        table[section] = dict(inner) if isinstance(inner, Mapping) else {}
        table = table[section]
    table[name] = value


def test_tables(fuzz: Any) -> None:
    def make(rng: random.Random) -> Input:
        given: dict[str, Any] = {}
        for _ in range(rng.randint(1, 3)):
            _put(given, _key(rng), 10**5000 if rng.random() < 0.02 else anything(rng))
        return list(given), lambda: _kept(parse_config(given))

    tried = fuzz("tables", 1600, make)
    assert tried.accepted > 30


def _text(rng: random.Random) -> str:
    value = rng.choice(TEXTS) if rng.random() < 0.5 else anything(rng)
    return value if isinstance(value, str) else repr(value).lower() if isinstance(value, bool) else repr(value)


def test_overrides(fuzz: Any) -> None:
    def make(rng: random.Random) -> Input:
        given = [f"{_key(rng)}{rng.choice('====.')}{_text(rng)}" for _ in range(rng.randint(1, 2))]
        return given, lambda: _kept(load_config(rng.choice((None, "digits", "")), given))

    tried = fuzz("overrides", 1200, make)
    assert tried.accepted > 10


@pytest.mark.parametrize("kind", ["configurations", "pools"])
def test_files(fuzz: Any, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "mine.toml"
    pool = POOLS["cifar10"].read_bytes()

    def make(rng: random.Random) -> Input:
        data = damaged(rng, PRESET if kind == "configurations" else pool)

        def read() -> None:
            file.write_bytes(data)
            if kind == "configurations":
                _kept(load_config(file))
            else:
                draw_device(load_pool(file), 0, 0, rng.uniform(-100, 100))

        return data, read

    tried = fuzz(kind, 800, make)
    assert tried.accepted > 30


def test_rounds(fuzz: Any, tiny: Callable[..., Any]) -> None:
    """What is accepted can be trained with: each method and each rule, with extreme amounts."""
    quick = {"evaluate.clients": 2, "measure.clients": 2, "train.iterations": 1, "distillation.iterations": 1}

    def make(rng: random.Random) -> Input:
        given = {**quick, "method": rng.choice(list(METHODS)), "aggregate.rule": rng.choice(list(RULES))}
        given |= {"shards.kind": rng.choice(("skewed", "dirichlet")), "engine": "plain"}
        given |= {key: rng.choice(AMOUNTS) for key in rng.sample(AMOUNT_KEYS, rng.randint(1, 2))}

        def play() -> None:
            session = assemble(tiny(given))
            _, record = play_round(session.method.round(session.method.initial()), session.engine)
            journal_line(record)

        return given, play

    tried = fuzz("rounds", 100, make)
    assert tried.accepted > 30
