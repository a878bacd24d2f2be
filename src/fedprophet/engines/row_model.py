"""One network for rows of many clients: shared layers run on all rows at once, norm layers with each row's own numbers.

In evaluation mode a batch norm is an affine map of each channel,

    BN(x) = s·x + (beta − mean·s)    with    s = gamma / sqrt(variance + eps),

so that rows of clients that differ in their norm layers alone can be one batch: s and the shift are looked up by row.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fedprophet.cascade.atoms import Atom, Body, Chain
from fedprophet.cascade.norms import MEAN, VARIANCE, norm_modules, norm_names
from fedprophet.cascade.trace import TracedProgram
from fedprophet.client.part import ModelPart
from fedprophet.engines.folding import is_hooked
from fedprophet.engines.rewriting import layers_of, rewritten, takes_one
from fedprophet.fast.reading import NotFusableError

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Tensors = Mapping[str, Tensor]


class RowNorm(nn.Module):
    """A batch norm in evaluation mode, with the numbers of each row's client; they are K×C."""

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self._of_clients = scale, shift
        self._of_rows = scale, shift

    def choose(self, clients: Tensor) -> None:
        """Let the rows of the next batches be of these clients."""
        scale, shift = self._of_clients
        self._of_rows = scale[clients], shift[clients]

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self._of_rows
        if len(x) != len(scale):
            raise NotFusableError("a norm layer that does not read one row for each sample")
        places = (*scale.shape, *(1,) * (x.ndim - 2))
        return torch.addcmul(shift.view(places), x, scale.view(places))


class RowModel:
    """A model part for rows of clients that differ in norm layers, and in what they add to class scores (K×classes)."""

    def __init__(self, part: ModelPart, clients: Sequence[Tensors], prior: Tensor | None) -> None:
        layers = norm_modules(part.chain, part.first, part.last)
        self._norms = {layer: _row_norm(name, layer, clients, part.chain.device) for name, layer in layers.items()}
        self._part = replace(part, chain=_with_layers(part.chain, self._norms), prior=None)
        self._prior = None if prior is None else prior.to(part.chain.device)

    def still(self) -> AbstractContextManager[None]:
        """Set evaluation mode within a `with` block."""
        return self._part.still()

    def logits(self, x: Tensor, clients: Tensor) -> Tensor:
        """Return the class scores of rows, each by its client's network."""
        for norm in self._norms.values():
            norm.choose(clients)
        scores = self._part.logits(x)
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


def _with_layers(chain: Chain, replacements: Mapping[nn.Module, nn.Module]) -> Chain:
    """Return a chain for evaluation in which other layers take the place of some."""

    def atom(old: Atom) -> Atom:
        program = old.body.evaluate
        if not isinstance(program, TracedProgram):
            return old
        layers = layers_of(program)
        program = rewritten(
            program, {node: replacements[layer] for node, layer in layers.items() if layer in replacements}
        )
        body = Body(program, program, tuple(dict.fromkeys(layers_of(program).values())), old.body.writes_input)
        return Atom(old.name, old.layers, old.bounds, body, training=False)

    return Chain(chain.model, tuple(map(atom, chain.atoms)), chain.shared_names, chain.local_names)
