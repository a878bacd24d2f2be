"""The modules that a run was begun with, as setup.json names them and, when the run is over, results.json.

Where modules are cut by what training is predicted to take, another version may cut others. A run goes on with its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from fedprophet.cascade.cost import ChainCost
from fedprophet.cascade.partition import Module, modules_of
from fedprophet.errors import CheckpointError
from fedprophet.runs.files import RunFiles, read_json


@dataclass(frozen=True)
class RecordedModules:
    """The names of each module's atoms, the file that has them, and the versions that wrote it, in words."""

    atoms: tuple[tuple[str, ...], ...]
    file: Path
    versions: str

    def of(self, cost: ChainCost) -> tuple[Module, ...]:
        """Return these modules with a cost; refuse a model whose atoms are others."""
        if [name for names in self.atoms for name in names] != [atom.name for atom in cost.atoms]:
            raise CheckpointError(
                f"{self.file} has modules of other atoms than the model: the run was played with {self.versions}. "
                "Go on with the same model and the same versions, or start a new run"
            )
        return modules_of(cost, pairwise(accumulate(map(len, self.atoms), initial=0)))


def recorded_modules(files: RunFiles) -> RecordedModules | None:
    """Return the modules that a run's folder names; None where it names none, or its files are damaged."""
    return next(filter(None, map(_read, (files.setup, files.results))), None)


def _read(file: Path) -> RecordedModules | None:
    try:
        table = read_json(file) if file.exists() else {}
        atoms = tuple(tuple(map(str, row["atoms"])) for row in table["modules"])
    except (CheckpointError, LookupError, TypeError):
        return None
    return RecordedModules(atoms, file, _versions(table))


def _versions(table: Mapping[str, Any]) -> str:
    try:
        machine = table["machines"][-1]
        return f"FedProphet {machine['fedprophet']} and torch {machine['torch']}"
    except (LookupError, TypeError):
        return "versions that it does not name"
