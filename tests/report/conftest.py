"""Run folders written by hand, with numbers that can be added up in the head."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedprophet.config.load import load_config
from fedprophet.config.reference import to_toml

Client = tuple[float, float, float, float]
"""Computation, access and communication in seconds, and bytes of memory."""
KEYS = ("computation_s", "access_s", "communication_s", "memory_bytes")
ROUNDS: Sequence[Sequence[Client]] = [
    [(1, 10, 5, 30), (8, 2, 1, 20)],  # the first client is the slowest: 11 s, and has the slowest link
    [(4, 4, 2, 40), (3, 3, 7, 50)],  # the first again: 8 s; the second has the slowest link
]
"""Computation 5 s, access 14 s, communication 12 s; memory: least max(20, 40) bytes, peak 50 bytes."""


def cell(accuracy: float, samples: int = 100) -> dict[str, Any]:
    return {"accuracy": accuracy, "samples": samples}


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a run's folder; `finished=False` leaves its closing summary out.

    `notes` are what the first rounds of its journal have beside their times. `deployed` is what a run on Flower says of
    its clients.
    """

    def write(
        name: str,
        method: str = "jfat",
        *settings: str,
        rounds: Sequence[Sequence[Client]] = ROUNDS,
        clean: float = 0.8,
        pgd: float = 0.5,
        autoattack: float | None = None,
        results: Mapping[str, Any] | None = None,
        evaluation: Mapping[str, Any] | None = None,
        notes: Sequence[Mapping[str, Any]] = (),
        finished: bool = True,
        deployed: bool | None = None,
    ) -> Path:
        path = tmp_path / name
        (path / "checkpoints").mkdir(parents=True)
        config = load_config(None, [f"method={method}", *settings])
        (path / "config.toml").write_text(to_toml(config))
        times = [
            {str(number): dict(zip(KEYS, client, strict=True)) for number, client in enumerate(clients)}
            for clients in rounds
        ]
        more = [*notes, *[{}] * (len(times) - len(notes))]
        records = [{"round": n, "times": times[n - 1], **more[n - 1]} for n in range(1, len(times) + 1)]
        (path / "journal.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        attack = f"pgd{config.evaluate.steps}"
        summary = {
            "version": "0.1.0",
            "rounds": len(rounds),
            "personalised": {"clean": cell(clean), attack: cell(pgd)},
            "global": {"clean": cell(clean / 2, 360), attack: cell(pgd / 2, 360)},
            **(results or {}),
        }
        if deployed is not None:
            (path / "flower.json").write_text(json.dumps({"run": "0123", "deployed": deployed}))
        if finished:
            (path / "results.json").write_text(json.dumps(summary))
        if autoattack is not None:
            measured = {"autoattack": cell(autoattack, 50)}
            evaluation = {"round": len(rounds), "personalised": measured, "global": measured}
        if evaluation is not None:
            (path / "evaluation.json").write_text(json.dumps(evaluation))
        return path

    return write


SETUP = {
    "model": {"name": "vgg-small", "parameters": 12345},
    "data": {"name": "digits", "shape": [1, 8, 8], "classes": 10, "train": 1437, "test": 360},
    "budget_bytes": 60,
    "whole_model_bytes": 200,
    "modules": [
        {"index": 1, "atoms": ["a"], "layers": ["Conv 1", "Conv 2"], "memory_bytes": 50},
        {"index": 2, "atoms": ["b"], "layers": ["Linear 1"], "memory_bytes": 60},
    ],
    "machines": [
        {"round": 1, "processor": "Some Processor", "cores": 2, "memory_bytes": 8 * 10**9, "fedprophet": "0.1.0"}
    ],
}
"""What a run of two modules consists of: 50 and 60 of the 60 bytes that a client has, and 200 in all."""
CASCADE: Sequence[Mapping[str, Any]] = [
    {"module": 1, "adversarial_training": False, "epsilon": 0.1, "alpha": None, "assigned": {"0": 1, "3": 2}},
    {"module": 1, "epsilon": 0.1, "alpha": None, "assigned": {"0": 1}, "clean": 0.6, "adversarial": 0.4, "samples": 9,
     "fixed": {"module": 1, "round": 2, "clean": 0.6, "adversarial": 0.4}},
    {"module": 2, "epsilon": 1.5, "alpha": 0.3, "assigned": {"3": 2}, "clean": 0.8, "adversarial": 0.7, "samples": 9},
    {"module": 2, "epsilon": 2.5, "alpha": 0.5, "assigned": {"7": 2}, "clean": 0.9, "adversarial": 0.5, "samples": 9,
     "dropped": {"7": "its loss is nan"}, "fixed": {"module": 2, "round": 3, "clean": 0.8, "adversarial": 0.7}},
]  # fmt: skip
"""The records of two stages of two rounds; client 3 trains both modules in the first round."""
CASCADE_COSTS: Sequence[Sequence[Client]] = [
    [(1, 10, 5, 50), (8, 2, 1, 60)],
    [(4, 4, 2, 50)],
    [(3, 1, 2, 60)],
    [(5, 5, 2, 60)],
]
"""The slowest take 11, 8, 4 and 10 s."""


@pytest.fixture
def write_cascade(write_run: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that writes the folder of a run of two modules; options as those of `write_run`."""

    def write(name: str, *settings: str, setup: Mapping[str, Any] | None = SETUP, **options: Any) -> Path:
        options = {"rounds": CASCADE_COSTS, "notes": CASCADE, **options}
        path = write_run(name, "fedprophet", "population.clients=8", *settings, **options)
        if setup is not None:
            (path / "setup.json").write_text(json.dumps(setup))
        return path

    return write


PIECES = "attack 8 at a time, step atom by atom in pieces of 8"


def plan(name: str, peak: int, limit: int) -> dict[str, Any]:
    return {"plan": name, "peak_bytes": peak, "limit_bytes": limit}


PLANS: Sequence[Mapping[str, Any]] = [
    {"0": plan(PIECES, 54, 60), "1": plan("plain", 90, 400)},
    {"0": plan(PIECES, 57, 60)},
    {"0": plan("plain", 90, 100)},
    {},
]
ASSIGNED: Sequence[Mapping[str, int]] = [{"0": 1, "1": 2}, {"0": 1}, {"0": 2}, {"7": 2}]
"""How the clients of `CASCADE_COSTS` kept within their memory: 90 bytes at most, and 95 % of a limit of 60. Client 1
trains both modules in the first round."""


@pytest.fixture
def write_enforced(write_cascade: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that writes the folder of a run of two modules whose memory was enforced."""
    notes = [
        {**note, "assigned": who, "plans": plans} for note, who, plans in zip(CASCADE, ASSIGNED, PLANS, strict=True)
    ]
    return lambda name, *settings: write_cascade(name, "memory.enforce=true", *settings, notes=notes)
