"""Where the tensors of several clients lie: one stack for each parameter, in the layout that the kernels read.

Channels are padded with zeros where the kernels want it: zeros stay zeros in training (`narrow` says why).
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprophet.cascade.norms import STATISTICS
from fedprophet.fast.program import Ladder, LayerProgram

Tensors = Mapping[str, Tensor]
STATISTICS_ENDINGS = tuple(f".{name}" for name in STATISTICS)


def rounded_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not below a size."""
    return -(-size // multiple) * multiple


class StackLayout:
    """Where each tensor of a ladder's clients lies in a stack, and back. All clients are moved at once."""

    def __init__(self, ladder: Ladder, multiple: int) -> None:
        self.ladder = ladder
        self.multiple = multiple
        self._convolutions = {name: part for part in ladder.longest.convolutions for name in part.tensors}
        first = {exits.program.dense[0].name: exits.program for exits in ladder.exits if exits.program.dense}
        self._flattens = {f"{name}.weight": program for name, program in first.items()}

    def padded(self, channels: int) -> int:
        """Return a number of channels, padded."""
        return rounded_up(channels, self.multiple)

    def names(self) -> tuple[str, ...]:
        """Return the state-dict names of the ladder's tensors."""
        return tuple(self.ladder.spans)

    def parameters(self) -> list[str]:
        """Return the names of what gradients change: everything but the norm layers' statistics."""
        return [name for name in self.names() if not name.endswith(STATISTICS_ENDINGS)]

    def statistics(self) -> list[str]:
        """Return the names of the norm layers' statistics."""
        return [name for name in self.names() if name.endswith(STATISTICS_ENDINGS)]

    def stacked(self, parameters: Sequence[Tensors], device: torch.device) -> dict[str, Tensor]:
        """Return the clients' parameters as stacks; what all of them share is held in memory once."""
        columns = {
            name: [tensors[name] for tensors in parameters[low:high]] for name, (low, high) in self.ladder.spans.items()
        }
        stacks: dict[str, Tensor] = {}
        others: dict[torch.device, list[str]] = {}
        for name, column in columns.items():
            if all(value is column[0] for value in column):
                one = self._into(name, column[0].to(device).unsqueeze(0))
                stacks[name] = one.expand(len(column), *one.shape[1:])
            else:
                others.setdefault(column[0].device, []).append(name)
        for home, names in others.items():
            together = moved([columns[name] for name in names], home, device)
            stacks |= {name: self._into(name, value) for name, value in zip(names, together, strict=True)}
        return {name: stacks[name] for name in self.names()}

    def unstacked(self, name: str, stack: Tensor) -> Tensor:
        """Return a parameter of the clients that have it in its own shape, clients first, in memory of its own."""
        return self._out_of(name, stack).clone(memory_format=torch.contiguous_format)

    def _into(self, name: str, values: Tensor) -> Tensor:
        if values.ndim == 5:
            clients, outputs, inputs, side, _ = values.shape
            taps = values.permute(0, 3, 4, 2, 1).reshape(clients, side * side, inputs, outputs)
            return F.pad(taps, (0, self.padded(outputs) - outputs, 0, self.padded(inputs) - inputs)).contiguous()
        if values.ndim == 3:
            return self._dense_into(name, values)
        padding = self.padded(values.shape[1]) - values.shape[1] if name in self._convolutions else 0
        return F.pad(values, (0, padding)) if padding else values

    def _out_of(self, name: str, values: Tensor) -> Tensor:
        part = self._convolutions.get(name)
        if part is None:
            return self._dense_out_of(name, values) if values.ndim == 3 else values
        if values.ndim == 2:
            return values[:, : part.outputs]
        kept = values[:, :, : part.inputs, : part.outputs]
        return kept.reshape(-1, part.kernel, part.kernel, part.inputs, part.outputs).permute(0, 4, 3, 1, 2)

    def _dense_into(self, name: str, values: Tensor) -> Tensor:
        """Return in × out; the first layer of an exit reads positions before channels, and padded channels."""
        clients, outputs, _ = values.shape
        if name in self._flattens:
            channels, side = _flattened(self._flattens[name])
            values = values.reshape(clients, outputs, channels, side, side).permute(0, 1, 3, 4, 2)
            values = F.pad(values, (0, self.padded(channels) - channels)).reshape(clients, outputs, -1)
        return values.transpose(1, 2).contiguous()

    def _dense_out_of(self, name: str, values: Tensor) -> Tensor:
        values = values.transpose(1, 2)
        clients, outputs, _ = values.shape
        if name in self._flattens:
            channels, side = _flattened(self._flattens[name])
            values = values.reshape(clients, outputs, side, side, -1)[..., :channels]
            values = values.permute(0, 1, 4, 2, 3).reshape(clients, outputs, -1)
        return values


def _flattened(program: LayerProgram) -> tuple[int, int]:
    """Return channels and side of what the first dense layer reads."""
    channels, height, _ = program.feature
    return channels, height if program.side is None else program.side


def moved(columns: Sequence[Sequence[Tensor]], home: torch.device, device: torch.device) -> list[Tensor]:
    """Return columns of tensors as stacks on a device, all of them in one transfer."""
    flat = torch.cat([value.to(home).reshape(-1) for column in columns for value in column])
    parts = torch.split(sent(flat, device), [len(column) * column[0].numel() for column in columns])
    return [part.view(len(column), *column[0].shape) for part, column in zip(parts, columns, strict=True)]


def transferred(values: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of one type on a device, those that come from elsewhere in one transfer."""
    elsewhere = [value for value in values if value.device != device]
    if not elsewhere:
        return list(values)
    flat = sent(torch.cat([value.reshape(-1) for value in elsewhere]), device)
    parts = iter(torch.split(flat, [value.numel() for value in elsewhere]))
    return [value if value.device == device else next(parts).view(value.shape) for value in values]


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; a copy to a GPU does not wait for the work that is queued there."""
    if values.device.type == "cpu" and device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
