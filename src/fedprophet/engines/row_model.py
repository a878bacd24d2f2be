"""One network for rows of many clients: shared layers run on all rows at once, norm layers with each row's own numbers.

In evaluation mode a batch norm is an affine map of each channel,

    BN(x) = s·x + (beta − mean·s)    with    s = gamma / sqrt(variance + eps),

so that rows of clients that differ in their norm layers alone can be one batch: s and the shift are looked up by row.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node

from fedprophet.cascade.atoms import Atom, Body, Chain
from fedprophet.cascade.norms import MEAN, VARIANCE, norm_modules, norm_names
from fedprophet.cascade.trace import TracedProgram
from fedprophet.client.part import ModelPart
from fedprophet.engines.cpu_plan import AS_WRITTEN, memory_format_of, to_format
from fedprophet.engines.folding import is_hooked
from fedprophet.engines.rewriting import layers_of, rewritten, takes_one
from fedprophet.fast.reading import NotFusableError

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Tensors = Mapping[str, Tensor]


class RowNorm(nn.Module):
    """A batch norm in evaluation mode, with the numbers of each row's client; they are K×C."""

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.of_clients = scale, shift
        self._of_rows = scale, shift

    def choose(self, clients: Tensor) -> None:
        """Let the rows of the next batches be of these clients."""
        scale, shift = self.of_clients
        self._of_rows = scale[clients], shift[clients]

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return what the channels of each row are multiplied by, and what is added to them."""
        return self._of_rows

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self._of_rows
        if len(x) != len(scale):
            raise NotFusableError("a norm layer that does not read one row for each sample")
        places = (*scale.shape, *(1,) * (x.ndim - 2))
        return torch.addcmul(shift.view(places), x, scale.view(places))

    def behind(self, bias: Tensor | None) -> "RowNorm":
        """Return the norm layer for a convolution that has lost its bias."""
        scale, shift = self.of_clients
        return self if bias is None else RowNorm(scale, torch.addcmul(shift, scale, bias.detach()))


class RowModel:
    """A model part for rows of clients that differ in norm layers, and in what they add to class scores (K×classes)."""

    def __init__(self, part: ModelPart, clients: Sequence[Tensors], prior: Tensor | None) -> None:
        chain, layers = part.chain, norm_modules(part.chain, part.first, part.last)
        norms = {layer: _row_norm(name, layer, clients, chain.device) for name, layer in layers.items()}
        quick = _quick_on(chain.device)
        atoms = [_by_rows(atom, norms, quick) for atom in chain.atoms]
        self._norms = [layer for atom in atoms for layer in atom.modules() if isinstance(layer, RowNorm)]
        rows = Chain(chain.model, tuple(atoms), chain.shared_names, chain.local_names)
        self._part = replace(part, chain=rows, prior=None)
        self._format = memory_format_of(chain) if chain.device.type == "cuda" else AS_WRITTEN
        self._prior = None if prior is None else prior.to(chain.device)

    def still(self) -> AbstractContextManager[None]:
        """Set evaluation mode within a `with` block."""
        return self._part.still()

    def logits(self, x: Tensor, clients: Tensor) -> Tensor:
        """Return the class scores of rows, each by its client's network."""
        for norm in self._norms:
            norm.choose(clients)
        scores = self._part.logits(to_format(x, self._format))
        return scores if self._prior is None else scores + self._prior[clients]

    def row_bytes(self, x: Tensor) -> int:
        """Return how much memory one more row like `x` takes until its gradient is there."""
        two, one = (self._saved_bytes(x.expand(count, *x.shape)) for count in (2, 1))
        return two - one

    def _saved_bytes(self, x: Tensor) -> int:
        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.enable_grad(), self.still(), saved_tensors_hooks(note, lambda tensor: tensor):
            self.logits(x.clone().requires_grad_(), torch.zeros(len(x), dtype=torch.long, device=x.device))
        return sum(sizes.values())


def check_rows(chain: Chain) -> None:
    """Raise NotFusableError where clients may differ in more than batch norms whose calls can be seen."""
    if set(chain.local()) - set(norm_names(chain)):
        raise NotFusableError("clients that differ in more than their norm layers")
    layers = norm_modules(chain)
    traced = [work for atom in chain.atoms if isinstance(work := atom.body.evaluate, TracedProgram)]
    calls = [(node, layer) for program in traced for node, layer in layers_of(program).items()]
    seen = {layer for node, layer in calls if type(layer) in KINDS and not is_hooked(layer) and takes_one(node)}
    strange = next((name for name, layer in layers.items() if layer not in seen), None)
    if strange is not None:
        raise NotFusableError(f"the norm layer {strange!r}, which is not one of torch's batch norms in a traced model")


def _row_norm(name: str, layer: nn.Module, clients: Sequence[Tensors], device: torch.device) -> RowNorm:
    assert isinstance(layer, KINDS)

    def stack(kind: str) -> Tensor:
        return torch.stack([tensors[f"{name}.{kind}"] for tensors in clients]).to(device)

    scale, mean = torch.rsqrt(stack(VARIANCE) + layer.eps), stack(MEAN)
    if not layer.affine:
        return RowNorm(scale, -mean * scale)
    scale = scale * stack("weight")
    return RowNorm(scale, stack("bias") - mean * scale)


class Quick(NamedTuple):
    """A quicker way to convolve: which layers it is for, and what stands in for one, with the norm layer and the ReLU
    behind it.
    """

    fits: Callable[[nn.Conv2d], bool]
    make: Callable[[nn.Conv2d, RowNorm | None, bool], nn.Module]


def _quick_on(device: torch.device) -> Quick | None:
    if device.type != "cuda":
        return None
    from fedprophet.fast.halves import HalvesConvolution, fits  # Triton comes with torch for CUDA alone

    return Quick(fits, HalvesConvolution)


def _by_rows(atom: Atom, norms: Mapping[nn.Module, RowNorm], quick: Quick | None) -> Atom:
    """Return an atom for evaluation whose norm layers have each row's numbers."""
    program = atom.body.evaluate
    if not isinstance(program, TracedProgram):
        return atom
    by_rows = {node: norms[layer] for node, layer in layers_of(program).items() if layer in norms}
    quicker = {} if quick is None else _quicker(program, by_rows, quick)
    program = rewritten(program, {**by_rows, **quicker})
    body = Body(program, program, tuple(dict.fromkeys(layers_of(program).values())), atom.body.writes_input)
    return Atom(atom.name, atom.layers, atom.bounds, body, training=False)


def _quicker(program: TracedProgram, norms: Mapping[Node, RowNorm], quick: Quick) -> dict[Node, nn.Module]:
    """Return what stands in for convolutions, and for the norm layer and the ReLU that alone follow one."""
    layers, replaced = layers_of(program), dict[Node, nn.Module]()

    def is_plain(node: Node, kind: type[nn.Module]) -> bool:
        return type(layers.get(node)) is kind and not is_hooked(layers[node]) and takes_one(node)

    for node, convolution in layers.items():
        if not (isinstance(convolution, nn.Conv2d) and is_plain(node, nn.Conv2d) and quick.fits(convolution)):
            continue
        second = _reader(node)
        if second not in norms or not takes_one(second):
            replaced[node] = quick.make(convolution, None, False)
            continue
        third = _reader(second)
        rectified = is_plain(third, nn.ReLU)
        replaced[node] = quick.make(convolution, norms[second].behind(convolution.bias), rectified)
        replaced |= {each: nn.Identity() for each in ((second, third) if rectified else (second,))}
    return replaced


def _reader(node: Node) -> Node:
    """Return what alone reads a result; the result's own node where several do."""
    (reader,) = node.users if len(node.users) == 1 else (node,)
    return reader
