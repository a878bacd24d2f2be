"""The table of aggregation rules. A rule is one file of this package: its function, name, help and settings."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from fedprophet.settings.section import Section

Parameters = Mapping[str, Tensor]
Update = tuple[float, Parameters]
"""A client's weight q_k and the parameters that it sent."""
Join = Callable[[Parameters, Iterable[Update]], dict[str, Tensor]]
"""Joins updates into the server's current parameters: each parameter over the clients that sent it."""
F = TypeVar("F", bound=Callable[..., dict[str, Tensor]])


@dataclass(frozen=True)
class RuleEntry:
    """A rule and its line in the listing. `averaged` says what norm layers an exported model has under the rule.

    `numbers` joins single numbers that clients claim, such as accuracies, where the rule itself cannot.
    """

    function: Callable[..., dict[str, Tensor]]
    help: str
    averaged: str
    settings: type[Section] | None = None
    numbers: Join | None = None

    def configured(self, read: Callable[[type[Section]], Any]) -> Join:
        """Return the rule with its settings, which `read` returns for their class."""
        return partial(self.function, settings=read(self.settings)) if self.settings else self.function


RULES: dict[str, RuleEntry] = {}
"""Every rule by its name in the configuration."""


def rule(
    name: str, help: str, *, averaged: str, settings: type[Section] | None = None, numbers: Join | None = None
) -> Callable[[F], F]:
    """Make a function a rule. Where it has `settings`, it is called with them by that name."""

    def register(function: F) -> F:
        RULES[name] = RuleEntry(function, help, averaged, settings, numbers)
        return function

    return register
