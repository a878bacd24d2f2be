"""Attacks by the names that people write: `clean`, `pgd20`, `autoattack`."""

import importlib.util
import re
from typing import NamedTuple

from fedprophet.attacks import ATTACKS, AttackEntry
from fedprophet.errors import ConfigError

CLEAN = "clean"


class NamedAttack(NamedTuple):
    """An attack that a name stands for: pgd20 is `pgd` with 20 `steps`."""

    key: str
    entry: AttackEntry
    steps: int | None


def find_attack(name: str) -> NamedAttack | None:
    """Return the attack of that name; None for `clean` and for names that stand for nothing."""
    match = re.fullmatch(r"([a-z-]+)([1-9][0-9]{0,6})?", name)
    entry = ATTACKS.get(match[1]) if match else None
    if match is None or entry is None or entry.takes_steps != (match[2] is not None):
        return None
    return NamedAttack(match[1], entry, int(match[2]) if match[2] else None)


def parse_attacks(text: str) -> tuple[str, ...]:
    """Return the names of attacks in `clean,pgd20`, checked; the packages they need must be installed."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = ", ".join(repr(name) for name in names if name != CLEAN and find_attack(name) is None)
    if wrong or not names:
        what = f"unknown attack {wrong}" if wrong else "no attack is given"
        raise ConfigError(f"{what}. Allowed: {', '.join(allowed_attacks())}; several separated by commas")
    for name in names:
        entry = ATTACKS.get(name)
        if entry is not None and entry.module is not None and importlib.util.find_spec(entry.module) is None:
            raise ConfigError(
                f"the attack {name} needs the extra `{entry.extra}`: pip install 'fedprophet[{entry.extra}]'"
            )
    return names


def allowed_attacks() -> list[str]:
    """Return what an evaluation can measure, as people write it."""
    steps = [f"{name}N with N steps (as in {name}20)" for name, entry in ATTACKS.items() if entry.takes_steps]
    return [CLEAN, *steps, *(name for name, entry in ATTACKS.items() if not entry.takes_steps)]


def attack_label(name: str) -> str:
    """Return an attack's name for tables, such as PGD-20."""
    found = find_attack(name)
    if found is None:
        return "Clean"
    return found.entry.label if found.steps is None else f"{found.entry.label}-{found.steps}"


def is_stepwise(name: str) -> bool:
    """Whether an attack's name has a number of steps, as pgd20 does."""
    found = find_attack(name)
    return found is not None and found.steps is not None
