"""Attacks by name: what is understood, what is refused, and what tables call them."""

import sys

import pytest

from fedprophet.attacks.names import attack_label, find_attack, is_stepwise, parse_attacks
from fedprophet.errors import ConfigError


def test_names_and_labels() -> None:
    assert parse_attacks(" clean, pgd20,autoattack ,aa-fast,pgd20") == ("clean", "pgd20", "autoattack", "aa-fast")
    labels = {"clean": "Clean", "pgd20": "PGD-20", "autoattack": "AutoAttack", "aa-fast": "AA-fast"}
    assert {name: attack_label(name) for name in labels} == labels
    assert [name for name in labels if is_stepwise(name)] == ["pgd20"]
    found = find_attack("pgd20")
    assert found is not None
    assert (found.key, found.steps) == ("pgd", 20)
    assert find_attack("clean") is None


@pytest.mark.parametrize(
    "wrong", ["pgd", "pgd0", "pgd-5", "pgd020", "autoattack5", "PGD20", "clean1", "pgd" + "9" * 5000]
)
def test_other_names_are_refused_with_what_is_allowed(wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_attacks(f"clean,{wrong}")
    assert str(caught.value) == (
        f"unknown attack {wrong!r}. Allowed: clean, pgdN with N steps (as in pgd20), autoattack, aa-fast; "
        "several separated by commas"
    )
    with pytest.raises(ConfigError, match="no attack is given"):
        parse_attacks(" , ")


def test_a_missing_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    for attack in ("autoattack", "aa-fast"):
        with pytest.raises(ConfigError) as caught:
            parse_attacks(f"clean,{attack}")
        assert str(caught.value) == f"the attack {attack} needs the extra `attacks`: pip install 'fedprophet[attacks]'"
    assert parse_attacks("clean,pgd3") == ("clean", "pgd3")
