"""The default run learns what it promises: robust where plain training is not, and nearly as good as one module."""

import pytest

import fedprophet

pytestmark = pytest.mark.slow


def _accuracy(tmp_path, *overrides: str, of: str = "personalised") -> tuple[float, float]:
    run = fedprophet.train("digits", overrides=["threads=1", *overrides], out=tmp_path / "run")
    reached = run.results[of]
    return reached["clean"]["accuracy"], reached["pgd20"]["accuracy"]


def test_the_default_is_robust_and_close_to_one_module(tmp_path) -> None:
    clean, adversarial = _accuracy(tmp_path / "cascade")
    assert clean >= 0.90
    assert adversarial >= 0.65
    whole_clean, whole_adversarial = _accuracy(tmp_path / "whole", "memory.budget=100%")
    assert clean >= whole_clean - 0.10
    assert adversarial >= whole_adversarial - 0.15


def test_plain_training_is_not_robust_at_this_radius(tmp_path) -> None:
    # A client that knows its labels resists a little, whatever the model: the model alone is judged.
    clean, adversarial = _accuracy(tmp_path, "memory.budget=100%", "attack.steps=0", of="uncalibrated")
    assert clean >= 0.90
    assert adversarial < 0.20
