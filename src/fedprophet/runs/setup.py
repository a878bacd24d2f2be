"""What a run was put together of, and the machines it was played on.

It is written when a run begins, so that a run in progress can be looked at without its data and its model. A run that
goes on has the modules that it names (`runs.recorded`).
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fedprophet.client.planned_cost import MeasuredCost
from fedprophet.errors import CheckpointError
from fedprophet.machine import describe
from fedprophet.runs.engine_history import CUDA
from fedprophet.runs.files import RunFiles, read_json
from fedprophet.runs.run import Run
from fedprophet.runs.session import Session
from fedprophet.storage.files import write_json

PASSING = ("date", "load")
"""What a machine's description has that is another one a minute later."""


def note_setup(run: Run) -> None:
    """Write what a run consists of, and this machine, if the last rounds were played on another one."""
    session, dataset = run.session, run.session.dataset
    machine = {key: value for key, value in describe(session.engine_name == CUDA).items() if key not in PASSING}
    earlier = list(_machines(run.files, run.state.round))
    begins = {"round": run.state.round + 1, **machine}
    write_json(
        run.files.setup,
        {
            "model": {
                "name": session.config.model.name,
                "parameters": _parameters(session),
                "architecture": architecture(session.world.chain.model),
            },
            "data": {
                "name": dataset.name,
                "shape": list(dataset.shape),
                "classes": dataset.classes,
                "train": len(dataset.train),
                "test": len(dataset.test),
            },
            **module_rows(session),
            "refreshes": session.world.refreshes,
            "machines": earlier
            if earlier and {**earlier[-1], "round": 0} == {**begins, "round": 0}
            else [*earlier, begins],
        },
    )


def module_rows(session: Session) -> dict[str, Any]:
    """Return the modules and the memory of each, beside the budget and the whole model, and how it was counted."""
    atoms = session.world.cost.atoms
    return {
        "memory_model": "measured" if isinstance(session.world.cost, MeasuredCost) else "paper",
        "budget_bytes": session.budget,
        "whole_model_bytes": session.world.cost.total_memory,
        "modules": [
            {
                "index": module.index + 1,
                "atoms": [atom.name for atom in atoms[module.first : module.last]],
                "layers": [layer for atom in atoms[module.first : module.last] for layer in atom.layers],
                "memory_bytes": module.memory,
            }
            for module in session.world.modules
        ],
    }


def architecture(model: nn.Module) -> str:
    """Return what tells a model from others of its name, whatever its weights: a hash of its layers and tensors.

    What layers are set to beside their tensors' shapes, such as strides, is not part of it.
    """
    layers = [f"{name}:{type(layer).__qualname__}" for name, layer in model.named_modules()]
    tensors = [f"{name}:{tuple(tensor.shape)}" for name, tensor in model.state_dict().items()]
    return hashlib.blake2b("\n".join([*layers, *tensors]).encode(), digest_size=8).hexdigest()


def _parameters(session: Session) -> int:
    return sum(parameter.numel() for parameter in session.world.chain.model.parameters())


def _machines(files: RunFiles, played: int) -> Iterator[Mapping[str, Any]]:
    """Yield the machines of the rounds that are played; a file that is damaged is written anew."""
    try:
        machines = read_json(files.setup).get("machines") if files.setup.exists() else None
    except CheckpointError:
        return
    for machine in machines if isinstance(machines, list) else []:
        if isinstance(machine, dict) and isinstance(machine.get("round"), int) and machine["round"] <= played:
            yield machine
