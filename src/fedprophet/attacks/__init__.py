"""Attacks on images and on features."""

from collections.abc import Mapping

from fedprophet.attacks.attack import AttackEntry, Outcome
from fedprophet.attacks.autoattack import aa_fast, autoattack
from fedprophet.attacks.pgd import pgd, pgd_attack

ATTACKS: Mapping[str, AttackEntry] = {
    "pgd": AttackEntry(pgd_attack, "PGD", cut=pgd_attack, takes_steps=True),
    "autoattack": AttackEntry(autoattack, "AutoAttack", module="pyautoattack", extra="attacks"),
    "aa-fast": AttackEntry(aa_fast, "AA-fast", module="pyautoattack", extra="attacks"),
}
"""The attacks that an evaluation can name."""

__all__ = ["ATTACKS", "AttackEntry", "Outcome", "pgd"]
