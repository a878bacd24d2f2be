"""What a chain of atoms costs: the paper's model of training memory and forward FLOPs.

Memory of training = 4 bytes · (copies · parameters + the inputs of every layer that has a weight); a tensor that two
layers of an atom read counts once. FLOPs are the multiply-accumulates of convolutions, linear layers and attention,
5 for each element out of a norm layer, 1 for each element into an adaptive average pool. A chain costs the sum of its
atoms, plus its auxiliary head where it is not the last of the model.

Everything is counted on tensors without data (torch's meta device): at once for any model and batch, in no memory.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedprophet.cascade.atoms import Atom, Chain
from fedprophet.cascade.heads import BYTES, HeadCost, head_cost
from fedprophet.cascade.swap import swapped
from fedprophet.cascade.trace import without_data
from fedprophet.errors import ConfigError, ModelError

COPIES = {"sgd": 2, "sgd-momentum": 3, "adam": 4}
"""How many numbers an optimiser keeps for each parameter: the parameter, its gradient, and its moments."""

NORMS = frozenset({"batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"})
CONVOLUTIONS = frozenset(f"conv{transpose}{rank}d" for transpose in ("", "_transpose") for rank in (1, 2, 3))
PRODUCTS = frozenset({"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "mv", "einsum"})
LAYERS = (
    NORMS
    | CONVOLUTIONS
    | PRODUCTS
    | {"linear", "bilinear", "embedding", "embedding_bag", "prelu", "multi_head_attention_forward"}
    | {"lstm", "gru", "rnn_tanh", "rnn_relu"}
)
"""The functions that are layers with a weight when a parameter is among their arguments. Adding a parameter, as a
position embedding, is none: its gradient needs no input."""
FLOPS_PER_NORM = 5
POOLS = frozenset({"adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"})


@dataclass(frozen=True)
class AtomCost:
    """One atom for one batch; `activations` are the elements that training keeps, `output` has the batch first."""

    name: str
    layers: tuple[str, ...]
    parameters: int
    activations: int
    flops: int
    output: tuple[int, ...]
    bounds: tuple[float, float] = (-math.inf, math.inf)

    @property
    def label(self) -> str:
        """The atom as an error names it: `Conv 2 (features.3)`."""
        return _label(self.name, self.layers)


@dataclass(frozen=True)
class ChainCost:
    """A whole chain for one batch. Ranges are atoms `first` … `last` − 1; one that ends early has an auxiliary head."""

    atoms: tuple[AtomCost, ...]
    input: tuple[int, ...]
    batch: int
    classes: int
    copies: int = COPIES["sgd-momentum"]

    def parameters(self, first: int, last: int) -> int:
        """Return the backbone's parameters, without the auxiliary head."""
        return sum(atom.parameters for atom in self.atoms[first:last])

    def activations(self, first: int, last: int) -> int:
        """Return the elements that training keeps for its backward pass, without the auxiliary head."""
        return sum(atom.activations for atom in self.atoms[first:last])

    def memory(self, first: int, last: int) -> int:
        """Return the bytes that training takes, auxiliary head included."""
        own = BYTES * (self.copies * self.parameters(first, last) + self.activations(first, last))
        return own + (0 if last == len(self.atoms) else self._head(last).memory)

    def flops(self, first: int, last: int) -> int:
        """Return the FLOPs of one forward pass, auxiliary head included."""
        own = sum(atom.flops for atom in self.atoms[first:last])
        return own + (0 if last == len(self.atoms) else self._head(last).flops)

    @property
    def total_parameters(self) -> int:
        """The parameters of the whole model."""
        return self.parameters(0, len(self.atoms))

    @property
    def total_memory(self) -> int:
        """The bytes that training the whole model takes: the paper's R_max."""
        return self.memory(0, len(self.atoms))

    @property
    def clean_memory(self) -> int:
        """The same without an attack, which takes no memory of its own in the paper's model."""
        return self.total_memory

    @property
    def total_flops(self) -> int:
        """The FLOPs of one forward pass of the whole model."""
        return self.flops(0, len(self.atoms))

    def _head(self, last: int) -> HeadCost:
        return head_cost(self.atoms[last - 1].output, self.classes, self.copies)


class _Counter(TorchFunctionMode):
    """Watches an atom run: the inputs of its layers with a weight, and the FLOPs that torch's own counter leaves out.

    A tensor made from parameters alone (a normalised weight, a transposed one) is a weight as well; one made from
    buffers or from nothing (positions, masks), and one that has data, is a constant. Tensors are told apart by identity
    and kept, so that no identity is used twice.
    """

    def __init__(self, parameters: Iterable[Tensor], buffers: Iterable[Tensor]) -> None:
        super().__init__()
        self._weights = {id(tensor): tensor for tensor in parameters}
        self._constants = {id(tensor): tensor for tensor in buffers}
        self._inputs: dict[int, Tensor] = {}
        self._hidden = 0
        self.flops = 0

    @property
    def activations(self) -> int:
        """The elements of all inputs, each tensor once."""
        return self._hidden + sum(tensor.numel() for tensor in self._inputs.values())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = _tensors((args, kwargs))
        inputs = {
            id(t): t for t in tensors if t.is_meta and id(t) not in self._weights and id(t) not in self._constants
        }
        weighted = any(id(t) in self._weights for t in tensors)
        if not inputs:
            kept = self._weights if weighted else self._constants
            kept.update((id(tensor), tensor) for tensor in _tensors(result))
        else:
            self._count(getattr(func, "__name__", ""), inputs, weighted, result)
            # What an input was written into is no constant any more; an assignment returns nothing.
            for tensor in _tensors(result) or tensors[:1]:
                self._constants.pop(id(tensor), None)
        return result

    def _count(self, name: str, inputs: dict[int, Tensor], weighted: bool, result: Any) -> None:
        if weighted and name in LAYERS:
            self._inputs.update(inputs)
            if name == "multi_head_attention_forward":
                # Its output projection reads a tensor inside the function, of the output's size.
                self._hidden += result[0].numel()
        if name in NORMS:
            self.flops += FLOPS_PER_NORM * result.numel()
        if name in POOLS:
            self.flops += sum(tensor.numel() for tensor in inputs.values())


def _label(name: str, layers: tuple[str, ...]) -> str:
    return f"{', '.join(layers)} ({name})" if layers else repr(name)


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _run(atom: Atom, x: Tensor, counter: _Counter) -> tuple[Tensor, int, int]:
    """Return an atom's output, activations and FLOPs, on tensors without data."""
    products = FlopCounterMode(display=False)
    try:
        # Only the plain implementation of attention shows its products to the counter.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), torch.device("meta"), products, counter:
            output = atom(x)
    except ModelError:
        raise
    except Exception as reason:
        raise ModelError(
            f"atom {_label(atom.name, atom.layers)} does not run on an input of shape {_shape(x)} without data: "
            f"{type(reason).__name__}: {reason}. Is this the model's input shape? An atom may not look at the values "
            "of its tensors, and every tensor it keeps must be a parameter or a buffer"
        ) from reason
    return output, counter.activations, products.get_total_flops() // 2 + counter.flops


def _parameters(chain: Chain) -> list[int]:
    """Return how many parameters each atom owns, tied ones counted once."""
    parameters = {name: tensor for name, tensor in chain.tensors.items() if isinstance(tensor, nn.Parameter)}
    counts = []
    for number in range(len(chain)):
        names = (*chain.shared(number, number + 1), *chain.local(number, number + 1))
        owned = {id(parameters[name]): parameters[name].numel() for name in names if name in parameters}
        counts.append(sum(owned.values()))
    return counts


def cost_of(chain: Chain, input_shape: tuple[int, ...], batch: int, classes: int, copies: int = 3) -> ChainCost:
    """Return the cost of a chain for one batch of inputs (their shape without the batch); the model stays as it is."""
    if not input_shape or min(*input_shape, batch, classes, copies) < 1:
        raise ConfigError(
            f"input shape {input_shape}, batch {batch}, classes {classes} and copies {copies} must all be positive"
        )
    x = torch.empty((batch, *input_shape), device="meta")
    costs = []
    # The input normalisation is a layer of the chain, not of the model.
    modules = dict.fromkeys(module for root in (chain.model, *chain.modules()) for module in root.modules())
    parameters = _parameters(chain)
    with chain.mode(0, len(chain), training=False), swapped(modules, without_data) as (weights, buffers):
        for atom, owned in zip(chain.atoms, parameters, strict=True):
            x, activations, flops = _run(atom, x, _Counter(weights, buffers))
            costs.append(AtomCost(atom.name, atom.layers, owned, activations, flops, tuple(x.shape), atom.bounds))
    if tuple(x.shape) != (batch, classes):
        raise ModelError(
            f"the model's output for a batch of {batch} has shape {_shape(x)}; {classes} classes need {batch}x{classes}"
        )
    return ChainCost(tuple(costs), (batch, *input_shape), batch, classes, copies)
