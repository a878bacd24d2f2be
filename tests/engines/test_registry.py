"""The table of engines: who is in it, what "auto" means, and how another engine is added."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch

from fedprophet.config.choices import engines
from fedprophet.config.load import parse_config
from fedprophet.engines import registry
from fedprophet.engines.registry import ENGINES, EngineParts, chosen_engine, engine, make_engine, place_of, threads_of
from fedprophet.threads import ONE_THREAD, torch_threads


def test_the_engines_that_ship_are_registered_with_their_help():
    assert set(ENGINES) == {"plain", "workers", "cuda", "flower-sim"}
    assert {name for name, entry in ENGINES.items() if entry.single_threaded} == {"workers", "flower-sim"}
    assert set(engines()) == {"auto", *ENGINES}
    assert all(engines().values())
    assert ENGINES["cuda"].line.endswith("(settings: precision)")


def test_an_engine_registers_itself_and_is_made_by_its_name(monkeypatch):
    monkeypatch.setattr(registry, "ENGINES", {})
    engine("plain", "one line")(lambda parts: parts)
    parts = EngineParts(None, {}, 0, parse_config({"engine": "plain"}), None)
    assert make_engine(parts) is parts
    assert registry.ENGINES["plain"].line == "one line"


@pytest.mark.parametrize(
    ("settings", "gpu", "threads", "chosen"),
    [
        ({}, False, 4, "workers"),
        ({}, False, 1, "plain"),
        ({}, True, 4, "cuda"),
        ({"threads": 1}, False, 4, "plain"),
        ({"threads": 2}, False, 1, "workers"),
        ({"engine": "plain", "threads": 2}, True, 4, "plain"),
        ({"engine": "workers", "threads": 1}, True, 4, "workers"),
    ],
)
def test_auto_is_the_gpu_or_all_cores(settings, gpu, threads, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with torch_threads(threads):
        assert chosen_engine(parse_config(settings)) == chosen
        assert place_of(parse_config(settings)) == (torch.device("cuda") if chosen == "cuda" else None)


@pytest.mark.parametrize("obstacle", ["another system", "a daemonic process"])
def test_auto_is_plain_where_no_workers_can_be_started(obstacle, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if obstacle == "another system":
        monkeypatch.setattr(registry, "sys", SimpleNamespace(platform="darwin"))
    else:
        monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    assert chosen_engine(parse_config({"threads": 2})) == "plain"


def test_a_configuration_decides_the_threads():
    with torch_threads(3):
        assert threads_of(parse_config({"engine": "workers", "threads": 2})) is ONE_THREAD
        assert torch.get_num_threads() == 3
        with threads_of(parse_config({"engine": "plain", "threads": 2})):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
