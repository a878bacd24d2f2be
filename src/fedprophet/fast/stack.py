"""Networks of several clients in one tensor for each parameter, in the layout that the kernels read.

Parameters are float32 masters; `compute` is the type of activations and of the copies that products read. Channels are
padded with zeros where the kernels want it: zeros stay zeros in training, so nobody notices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprophet.fast.draws import Draws
from fedprophet.fast.kernels import Kernels
from fedprophet.fast.program import Dense, Program

Tensors = Mapping[str, Tensor]


class Layout:
    """Where each tensor of a program lies in a stack, and back. All clients are moved at once."""

    def __init__(self, program: Program, multiple: int) -> None:
        self.program = program
        self.multiple = multiple
        self._side = program.side if program.side is not None else program.feature[1]
        self._blocks = {name: block for block in program.blocks for name in block.tensors}
        self._first = {name for layer in program.dense[:1] for name in layer.tensors}

    def padded(self, channels: int) -> int:
        """Return a number of channels, padded."""
        return -(-channels // self.multiple) * self.multiple

    def names(self) -> tuple[str, ...]:
        """Return the state-dict names of the program's tensors."""
        return self.program.tensors

    def parameters(self) -> list[str]:
        """Return those that gradients change: all but the norm layers' statistics."""
        return [name for name in self.names() if not name.endswith((".running_mean", ".running_var"))]

    def stacked(self, parameters: Sequence[Tensors], device: torch.device) -> dict[str, Tensor]:
        """Return the parameters of several clients as stacks; what all of them share lies in memory once."""
        first = parameters[0]
        shared = {name for name in self.names() if all(tensors[name] is first[name] for tensors in parameters)}
        stacks = {name: self._into(name, first[name].to(device).unsqueeze(0)) for name in shared}
        stacks = {name: one.expand(len(parameters), *one.shape[1:]) for name, one in stacks.items()}
        others: dict[torch.device, list[str]] = {}
        for name in self.names():
            if name not in shared:
                others.setdefault(first[name].device, []).append(name)
        for home, names in others.items():
            together = moved([[tensors[name] for name in names] for tensors in parameters], home, device)
            stacks |= {name: self._into(name, value) for name, value in zip(names, together, strict=True)}
        return {name: stacks[name] for name in self.names()}

    def clients(self, stacks: Tensors) -> dict[str, Tensor]:
        """Return the parameters of all clients under their own shapes, clients first, in memory of their own."""
        return {
            name: self._out_of(name, stacks[name]).clone(memory_format=torch.contiguous_format) for name in self.names()
        }

    def _into(self, name: str, values: Tensor) -> Tensor:
        if values.ndim == 5:
            clients, outputs, inputs, _, _ = values.shape
            taps = values.permute(0, 3, 4, 2, 1).reshape(clients, 9, inputs, outputs)
            return F.pad(taps, (0, self.padded(outputs) - outputs, 0, self.padded(inputs) - inputs))
        if values.ndim == 3:
            return self._dense_into(name, values)
        return F.pad(values, (0, self.padded(values.shape[1]) - values.shape[1])) if name in self._blocks else values

    def _out_of(self, name: str, values: Tensor) -> Tensor:
        block = self._blocks.get(name)
        if block is None:
            return self._dense_out_of(name, values) if values.ndim == 3 else values
        if values.ndim == 2:
            return values[:, : block.outputs]
        kept = values[:, :, : block.inputs, : block.outputs]
        return kept.reshape(-1, 3, 3, block.inputs, block.outputs).permute(0, 4, 3, 1, 2)

    def _dense_into(self, name: str, values: Tensor) -> Tensor:
        """Return in × out; the first layer reads positions before channels, and padded channels."""
        clients, outputs, _ = values.shape
        if name in self._first:
            channels, side = self.program.feature[0], self._side
            values = values.reshape(clients, outputs, channels, side, side).permute(0, 1, 3, 4, 2)
            values = F.pad(values, (0, self.padded(channels) - channels)).reshape(clients, outputs, -1)
        return values.transpose(1, 2).contiguous()

    def _dense_out_of(self, name: str, values: Tensor) -> Tensor:
        values = values.transpose(1, 2)
        clients, outputs, _ = values.shape
        if name in self._first:
            channels, side = self.program.feature[0], self._side
            values = values.reshape(clients, outputs, side, side, -1)[..., :channels]
            values = values.permute(0, 1, 4, 2, 3).reshape(clients, outputs, -1)
        return values


def moved(rows: Sequence[Sequence[Tensor]], home: torch.device, device: torch.device) -> list[Tensor]:
    """Return the columns of a table of tensors as stacks on a device, all of them in one transfer."""
    flat = torch.stack([torch.cat([value.to(home).reshape(-1) for value in row]) for row in rows]).to(device)
    parts = torch.split(flat, [value.numel() for value in rows[0]], dim=1)
    return [part.reshape(len(rows), *value.shape) for part, value in zip(parts, rows[0], strict=True)]


@dataclass(frozen=True)
class Exit:
    """What the dense layers made of a feature: the inputs of each, with its dropout applied, and the scores."""

    inputs: tuple[Tensor, ...]
    kept: tuple[Tensor | None, ...]
    """By which factor dropout kept each input; None without dropout."""
    scores: Tensor


class Network:
    """The parts that folded networks and those in training share: preparing inputs, and the exit."""

    def __init__(self, program: Program, kernels: Kernels, compute: torch.dtype) -> None:
        self.program = program
        self.kernels = kernels
        self.compute = compute
        self.layout = Layout(program, kernels.multiple)
        self._statistics: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def _normalization(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of the inputs' channels; made once, since a graph must not copy from the host."""
        assert self.program.normalize is not None
        if device not in self._statistics:
            mean, std = self.program.normalize
            self._statistics[device] = torch.tensor(mean, device=device), torch.tensor(std, device=device)
        return self._statistics[device]

    def prepare(self, x: Tensor) -> Tensor:
        """Return float32 inputs as the first convolution reads them: normalised, in the compute type, padded."""
        if self.program.normalize is not None:
            mean, std = self._normalization(x.device)
            x = (x - mean) / std
        channels = self.program.shape[0]
        padding = self.layout.padded(channels) - channels
        x = x.to(self.compute)
        return F.pad(x, (0, padding)) if padding else x

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of `prepare`: that of the float32 inputs."""
        g = gradient[..., : self.program.shape[0]].float()
        if self.program.normalize is not None:
            g = g / self._normalization(g.device)[1]
        return g

    def pooled(self, feature: Tensor) -> Tensor:
        """Return the feature as the first dense layer reads it: K×N×inputs."""
        k, n, h, w, c = feature.shape
        side = self.program.side
        if side is not None and side != h:
            feature = feature.float().view(k, n, side, h // side, side, w // side, c).mean(dim=(3, 5))
        return feature.reshape(k, n, -1).to(self.compute)

    def unpooled(self, gradient: Tensor, feature: Tensor) -> Tensor:
        """Return the gradient of `pooled` with respect to the feature."""
        k, n, h, w, c = feature.shape
        side = self.program.side
        if side is None or side == h:
            return gradient.reshape(feature.shape)
        share = (h // side) * (w // side)
        g = (gradient.float() / share).view(k, n, side, 1, side, 1, c)
        return g.expand(k, n, side, h // side, side, w // side, c).reshape(feature.shape).to(self.compute)


def dense_forward(
    layers: Sequence[Dense],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    x: Tensor,
    draws: Draws | None = None,
) -> Exit:
    """Run the dense layers of all clients; dropout acts where there are `draws` for it."""
    inputs: list[Tensor] = []
    kept: list[Tensor | None] = []
    for layer, weight, bias in zip(layers, weights, biases, strict=True):
        inputs.append(x)
        x = torch.bmm(x, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight)
        x = x.relu_() if layer.relu else x
        keep = None
        if draws is not None and layer.dropout > 0:
            drawn = draws.uniform(f"dropout {layer.name}", tuple(x.shape))
            keep = (drawn >= layer.dropout).to(x.dtype) / (1 - layer.dropout)
            x = x * keep
        kept.append(keep)
    return Exit(tuple(inputs), tuple(kept), x.float())


def dense_backward(
    layers: Sequence[Dense], weights: Sequence[Tensor], run: Exit, gradient: Tensor
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return the gradient of the exit's input, and those of each layer's weight and bias in float32."""
    found: list[tuple[Tensor, Tensor]] = []
    outputs = (*run.inputs[1:], run.scores)
    for number in range(len(layers) - 1, -1, -1):
        keep = run.kept[number]
        gradient = gradient if keep is None else gradient * keep
        if layers[number].relu:
            gradient = gradient * (outputs[number] > 0)
        x = run.inputs[number]
        found.append((torch.bmm(x.transpose(1, 2), gradient).float(), gradient.float().sum(dim=1)))
        gradient = torch.bmm(gradient, weights[number].transpose(1, 2))
    return gradient, found[::-1]


class Folded(Network):
    """Networks in evaluation mode: batch norm is part of the convolutions. Only gradients of inputs are ever needed."""

    def __init__(self, program: Program, kernels: Kernels, compute: torch.dtype) -> None:
        super().__init__(program, kernels, compute)
        self.forward_weights: list[Tensor] = []
        self.backward_weights: list[Tensor] = []
        self.shifts: list[Tensor] = []
        self.dense_weights: list[Tensor] = []
        self.dense_biases: list[Tensor | None] = []

    @property
    def nbytes(self) -> int:
        """How much memory its copies of the parameters take."""
        copies = (*self.forward_weights, *self.backward_weights, *self.shifts, *self.dense_weights, *self.dense_biases)
        return sum(copy.nbytes for copy in copies if copy is not None)

    def fold(self, stacks: Tensors) -> None:
        """Take over the parameters; storage that is there already is written again, as a captured graph needs."""
        forward, shifts = [], []
        for block in self.program.blocks:
            scale = stacks[f"{block.norm}.weight"] * torch.rsqrt(stacks[f"{block.norm}.running_var"] + block.epsilon)
            weight = (stacks[f"{block.convolution}.weight"] * scale[:, None, None, :]).to(self.compute)
            offset = -stacks[f"{block.norm}.running_mean"]
            offset = offset + stacks[f"{block.convolution}.bias"] if block.bias else offset
            forward.append(weight)
            shifts.append(stacks[f"{block.norm}.bias"] + scale * offset)
        dense = [stacks[f"{layer.name}.weight"] for layer in self.program.dense]
        biases = [stacks[f"{d.name}.bias"] if d.bias else None for d in self.program.dense]
        self.forward_weights = _refill(self.forward_weights, forward, self.compute)
        self.backward_weights = _refill(self.backward_weights, [turned(weight) for weight in forward], self.compute)
        self.shifts = _refill(self.shifts, shifts, torch.float32)
        self.dense_weights = _refill(self.dense_weights, dense, self.compute)
        self.dense_biases = _refill(self.dense_biases, biases, self.compute)

    def features(self, x: Tensor) -> Tensor:
        """Return the feature before the exit."""
        z = self.prepare(x)
        for block, weight, shift in zip(self.program.blocks, self.forward_weights, self.shifts, strict=True):
            z = self.kernels.convolve(z, weight, shift)
            z = self.kernels.pool(z) if block.pool else z
        return z

    def scores(self, x: Tensor) -> Tensor:
        """Return the class scores, K×N×classes."""
        return self._exit(self.features(x)).scores

    def loss_gradient(self, x: Tensor, targets: Tensor, strong_convexity: float) -> Tensor:
        """Return the gradient of each sample's loss with respect to its input; `targets` are one-hot."""
        saved = self._run(x)
        feature = saved[-1][1]
        run = self._exit(feature)
        gradient = (run.scores.softmax(dim=2) - targets).to(self.compute)
        gradient, _ = dense_backward(self.program.dense, self.dense_weights, run, gradient)
        gradient = self.unpooled(gradient, feature)
        if self.program.convex and strong_convexity:
            gradient = gradient + (strong_convexity * feature).to(self.compute)
        return self._back(saved, gradient)

    def shift_gradient(self, x: Tensor, clean: Tensor) -> Tensor:
        """Return the gradient of ‖z(x) − z‖² with respect to the input, where z are the clean features."""
        saved = self._run(x)
        return self._back(saved, (2 * (saved[-1][1].float() - clean.float())).to(self.compute))

    def _exit(self, feature: Tensor) -> Exit:
        return dense_forward(self.program.dense, self.dense_weights, self.dense_biases, self.pooled(feature))

    def _run(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return for each block what its ReLU gave and what left it (the same where there is no pool)."""
        z = self.prepare(x)
        saved = []
        for block, weight, shift in zip(self.program.blocks, self.forward_weights, self.shifts, strict=True):
            active = self.kernels.convolve(z, weight, shift)
            z = self.kernels.pool(active) if block.pool else active
            saved.append((active, z))
        return saved

    def _back(self, saved: list[tuple[Tensor, Tensor]], gradient: Tensor) -> Tensor:
        """Go back from the gradient of the feature to that of the input."""
        blocks = self.program.blocks
        active, _ = saved[-1]
        g = self.kernels.unpool(active, gradient) if blocks[-1].pool else gradient * (active > 0)
        for number in range(len(blocks) - 1, 0, -1):
            active, _ = saved[number - 1]
            if blocks[number - 1].pool:
                g = self.kernels.unpool(active, self.kernels.convolve(g, self.backward_weights[number]))
            else:
                g = self.kernels.convolve(g, self.backward_weights[number], mask=active)
        return self.input_gradient(self.kernels.convolve(g, self.backward_weights[0]))


def turned(weight: Tensor) -> Tensor:
    """Return the convolution that takes gradients back: taps in reverse order, inputs and outputs exchanged."""
    return weight.flip(1).transpose(2, 3)


def _refill(old: list[Any], new: list[Any], dtype: torch.dtype) -> list[Any]:
    """Write new values into the tensors that are there; None stays None."""
    if not old:
        # Stacks of what all clients share are views, and masters must not be written through.
        fresh = torch.contiguous_format
        return [value if value is None else value.to(dtype, copy=True, memory_format=fresh) for value in new]
    for there, value in zip(old, new, strict=True):
        if there is not None:
            there.copy_(value)
    return old
