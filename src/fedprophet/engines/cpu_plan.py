"""The fast plan: how workers compute a client's model on a CPU. It does the same work, rounded differently.

It makes fewer passes over memory: norm layers are folded into convolutions while no parameter changes
(`engines.folding`), and images and features have their channels last, the memory format in which convolutions and
pools of narrow layers are quick. Layers that it does not know stay as the model has them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.fx import Node

from fedprophet.cascade.atoms import Atom, Body, Chain
from fedprophet.cascade.narrow import Scaler
from fedprophet.cascade.trace import TracedProgram
from fedprophet.engines.folding import FoldedConvolution, Pointwise, folded, held, is_hooked, is_strided_pointwise
from fedprophet.engines.rewriting import layers_of, rewritten, takes_one
from fedprophet.models.normalize import Normalize

MemoryFormat = torch.memory_format
AS_WRITTEN = torch.contiguous_format
"""Dimensions lie in memory in the order in which they are written: torch's default."""
KERNELS = frozenset((side, side) for side in (1, 3, 5, 7))
STRIDES = frozenset((step, step) for step in (1, 2))
FORMAT_DEPENDENT = frozenset({"view", "view_as", "as_strided", "stride", "is_contiguous", "data_ptr"})
"""Operations that fail on a tensor in another memory format, or that depend on it."""


@dataclass(frozen=True, eq=False)
class PlannedChain(Chain):
    """A chain that reads batches in a memory format, and folds its norm layers once while nothing changes."""

    memory_format: MemoryFormat = AS_WRITTEN

    def take(self, x: Tensor) -> Tensor:
        """Return a batch on the chain's device, in its memory format."""
        return to_format(super().take(x), self.memory_format)

    @contextmanager
    def still(self, first: int, last: int | None) -> Iterator[None]:
        """Set evaluation mode and fold norm layers in a `with` block."""
        with super().still(first, last), held(self, first, last):
            yield


def fast_plan(chain: Chain) -> PlannedChain:
    """Return a chain that runs the same model by the fast plan."""
    fast = planned(chain)
    fast = replace(fast, memory_format=memory_format_of(fast))
    for layer in fast.model.modules():
        if isinstance(layer, nn.Conv2d):  # once, or it would be done at every use
            layer.weight.data = layer.weight.data.contiguous(memory_format=fast.memory_format)
    return fast


def planned(chain: Chain) -> PlannedChain:
    """Return a chain in which faster layers replace those that can be replaced."""
    return PlannedChain(chain.model, tuple(map(_planned_atom, chain.atoms)), chain.shared_names, chain.local_names)


def memory_format_of(chain: Chain) -> MemoryFormat:
    """Return the memory format for a planned chain's images and features.

    Channels go last if every convolution is of the common kind: rare ones are slower that way, or go wrong.
    """
    kinds = nn.modules.conv._ConvNd | FoldedConvolution | Pointwise
    convolutions = [layer for layer in chain.modules() if isinstance(layer, kinds)]
    known = all(_is_known(atom) for atom in chain.atoms)
    return torch.channels_last if convolutions and known and all(map(_is_common, convolutions)) else AS_WRITTEN


def to_format(x: Tensor, memory_format: MemoryFormat) -> Tensor:
    """Return a batch of images in a memory format; anything else as it is."""
    return x.contiguous(memory_format=memory_format) if x.ndim == 4 else x


def _is_known(atom: Atom) -> bool:
    """Whether all that an atom computes can be seen, and none of it depends on the memory format."""
    works = (atom.body.train, atom.body.evaluate)
    if all(isinstance(work, Normalize) for work in works):
        return True
    return all(isinstance(work, TracedProgram) and _is_ordinary(work) for work in works)


def _is_ordinary(program: TracedProgram) -> bool:
    """Whether a program calls only layers of torch's or ours, and nothing that depends on the memory format."""
    nodes = program.code.graph.nodes
    names = [getattr(node.target, "__name__", "") for node in nodes if node.op == "call_function"]
    methods = {node.target for node in nodes if node.op == "call_method"}
    known = all(_is_known_layer(layer) for layer in layers_of(program).values())
    # "conv": F.conv2d, F.conv_transpose2d and all their relatives, which `memory_format_of` does not see.
    return known and not any("conv" in name or name in FORMAT_DEPENDENT for name in (*names, *methods))


def _is_known_layer(layer: nn.Module) -> bool:
    layer_type = Scaler if isinstance(layer, Scaler) else type(layer)
    return layer_type.__module__.startswith(("torch.nn.", "fedprophet."))


def _is_common(layer: nn.Module) -> bool:
    replaced = isinstance(layer, FoldedConvolution | Pointwise)
    convolution = layer.convolution if replaced else layer
    if not isinstance(convolution, nn.Conv2d) or convolution.groups != 1 or convolution.dilation != (1, 1):
        return False
    if convolution.kernel_size == (1, 1) and convolution.stride != (1, 1):
        return replaced and is_strided_pointwise(convolution)
    return convolution.kernel_size in KERNELS and convolution.stride in STRIDES


def _planned_atom(atom: Atom) -> Atom:
    train, evaluate = atom.body.train, atom.body.evaluate
    # Layers that several atoms run have one flag for all of them, which an atom sets around its own run.
    if atom.reused or not (isinstance(train, TracedProgram) and isinstance(evaluate, TracedProgram)):
        return atom
    programs = rewritten(train, _strided(train)), rewritten(evaluate, _strided(evaluate) | _foldable(evaluate))
    leaves = tuple(dict.fromkeys(layer for program in programs for layer in layers_of(program).values()))
    body = Body(*programs, leaves, atom.body.writes_input)
    return Atom(atom.name, atom.layers, atom.bounds, body, atom.training)


def _strided(program: TracedProgram) -> dict[Node, nn.Module]:
    """Return the replacements of strided 1×1 convolutions."""
    return {
        node: Pointwise(layer)
        for node, layer in layers_of(program).items()
        if type(layer) is nn.Conv2d and is_strided_pointwise(layer) and not is_hooked(layer) and takes_one(node)
    }


def _foldable(program: TracedProgram) -> dict[Node, nn.Module]:
    """Return the replacements of convolutions whose result only a norm layer reads, and of those norm layers."""
    layers = layers_of(program)
    replacements: dict[Node, nn.Module] = {}
    for node, convolution in layers.items():
        (reader,) = node.users if len(node.users) == 1 else (None,)
        if reader in layers and takes_one(node) and takes_one(reader):
            both = folded(convolution, layers[reader])
            if both is not None:
                replacements |= {node: both, reader: nn.Identity()}
    return replacements
