"""How a client computes on a CPU: as the model is written, or by the fast plan, which rounds otherwise.

The fast plan does the same with fewer passes over memory: norm layers are folded into convolutions where no parameter
changes (`engines.folding`), and images and features lie with their channels last, which is the order that convolutions
and pools are quick in where layers are narrow. Whatever it does not know stays as the model has it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from fedprophet.cascade.atoms import Atom, Body, Chain
from fedprophet.cascade.narrow import Scaler
from fedprophet.cascade.trace import Program
from fedprophet.engines.folding import Folded, Pointwise, folded, held, is_hooked, is_strided_pointwise
from fedprophet.models.normalize import Normalize

Layout = torch.memory_format
AS_WRITTEN = torch.contiguous_format
"""The order of a tensor's dimensions, which is how torch makes it."""
KERNELS = frozenset((side, side) for side in (1, 3, 5, 7))
STRIDES = frozenset((step, step) for step in (1, 2))
ORDERED = frozenset({"view", "view_as", "as_strided", "stride", "is_contiguous", "data_ptr"})
"""What refuses a tensor that does not lie in the order of its dimensions, or tells how it lies."""


@dataclass(frozen=True, eq=False)
class PlannedChain(Chain):
    """A chain that reads batches in a memory format, and folds its norm layers once where nothing changes."""

    layout: Layout = AS_WRITTEN

    def take(self, x: Tensor) -> Tensor:
        """Return a batch on the chain's device, in its layout."""
        return lay_out(super().take(x), self.layout)

    @contextmanager
    def still(self, first: int, last: int | None) -> Iterator[None]:
        """Set evaluation mode, and fold norm layers for as long."""
        with super().still(first, last), held(self, first, last):
            yield


def fast_plan(chain: Chain) -> PlannedChain:
    """Return a chain that runs the same model by the fast plan: the same work, rounded differently."""
    fast = planned(chain)
    fast = replace(fast, layout=layout_of(fast))
    lay_out_weights(fast, fast.layout)
    return fast


def planned(chain: Chain) -> PlannedChain:
    """Return a chain with other layers in the places of those that can be run faster."""
    return PlannedChain(chain.model, tuple(map(_planned_atom, chain.atoms)), chain.shared_names, chain.local_names)


def layout_of(chain: Chain) -> Layout:
    """Return how a planned chain's images and features should lie.

    Channels go last where every convolution is of the common kind: rare ones are slower that way, or go wrong.
    """
    leaves = chain.modules()
    convolutions = [layer for layer in leaves if isinstance(layer, nn.modules.conv._ConvNd | Folded | Pointwise)]
    known = all(_is_known(atom) for atom in chain.atoms)
    return torch.channels_last if convolutions and known and all(map(_is_common, convolutions)) else AS_WRITTEN


def lay_out(x: Tensor, layout: Layout) -> Tensor:
    """Return a batch in a layout. What has no channels beside its positions is left as it is."""
    return x.contiguous(memory_format=layout) if x.ndim == 4 else x


def lay_out_weights(chain: Chain, layout: Layout) -> None:
    """Bring the weights of convolutions into a layout, or each of their uses would."""
    for layer in chain.model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=layout)


def _is_known(atom: Atom) -> bool:
    """Whether everything that an atom does is to be seen, and none of it asks how a tensor lies."""
    works = (atom.body.train, atom.body.evaluate)
    if all(isinstance(work, Normalize) for work in works):
        return True
    programs = [work for work in works if isinstance(work, Program)]
    return len(programs) == len(works) and all(map(_is_ordinary, programs))


def _is_ordinary(program: Program) -> bool:
    """Whether a program calls torch's own layers, no convolution beside them, and nothing that depends on a layout."""
    nodes = program.code.graph.nodes
    names = [getattr(node.target, "__name__", "") for node in nodes if node.op == "call_function"]
    methods = {node.target for node in nodes if node.op == "call_method"}
    own = all(_is_torchs(layer) for layer in _layers(program).values())
    # F.conv2d, F.conv_transpose2d and all their relatives.
    return own and not methods & ORDERED and not any("conv" in name or name in ORDERED for name in names)


def _is_torchs(layer: nn.Module) -> bool:
    layer_type = Scaler if isinstance(layer, Scaler) else type(layer)
    return layer_type.__module__.startswith(("torch.nn.", "fedprophet."))


def _is_common(layer: nn.Module) -> bool:
    exchanged = isinstance(layer, Folded | Pointwise)
    convolution = layer.convolution if exchanged else layer
    if not isinstance(convolution, nn.Conv2d) or convolution.groups != 1 or convolution.dilation != (1, 1):
        return False
    if convolution.kernel_size == (1, 1) and convolution.stride != (1, 1):
        return exchanged and is_strided_pointwise(convolution)
    return convolution.kernel_size in KERNELS and convolution.stride in STRIDES


def _planned_atom(atom: Atom) -> Atom:
    train, evaluate = atom.body.train, atom.body.evaluate
    # Layers that several atoms run have one flag for all of them, which an atom sets around its own run.
    if atom.reused or not (isinstance(train, Program) and isinstance(evaluate, Program)):
        return atom
    programs = _rewritten(train, _strided(train)), _rewritten(evaluate, {**_strided(evaluate), **_foldable(evaluate)})
    leaves = tuple(dict.fromkeys(layer for program in programs for layer in _layers(program).values()))
    body = Body(*programs, leaves, atom.body.writes_input)
    return Atom(atom.name, atom.layers, atom.bounds, body, atom.training)


def _layers(program: Program) -> dict[Node, nn.Module]:
    """Return the layer behind each of a program's calls."""
    calls = (node for node in program.code.graph.nodes if node.op == "call_module")
    return {node: program.code.get_submodule(str(node.target)) for node in calls}


def _strided(program: Program) -> dict[Node, nn.Module]:
    """Return what takes the place of strided 1×1 convolutions."""
    return {
        node: Pointwise(layer)
        for node, layer in _layers(program).items()
        if type(layer) is nn.Conv2d and is_strided_pointwise(layer) and not is_hooked(layer) and _takes_one(node)
    }


def _foldable(program: Program) -> dict[Node, nn.Module]:
    """Return what takes the place of convolutions whose result goes to a norm layer alone, and of those layers."""
    layers = _layers(program)
    places: dict[Node, nn.Module] = {}
    for node, convolution in layers.items():
        (reader,) = node.users if len(node.users) == 1 else (None,)
        if reader in layers and _takes_one(node) and _takes_one(reader):
            both = folded(convolution, layers[reader])
            if both is not None:
                places |= {node: both, reader: nn.Identity()}
    return places


def _takes_one(node: Node) -> bool:
    return len(node.args) == 1 and not node.kwargs


def _rewritten(program: Program, places: Mapping[Node, nn.Module]) -> Program:
    """Return the program with other layers in some places; an identity leaves nothing behind."""
    if not places:
        return program
    graph = fx.Graph()
    copies: dict[Node, Node] = {}
    root: dict[str, nn.Module] = {}
    layers = {**_layers(program), **places}
    for number, node in enumerate(program.code.graph.nodes):
        layer = layers.get(node)
        if node in places and isinstance(layer, nn.Identity):
            copies[node] = copies[node.args[0]]
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if layer is not None:
            copies[node].target = f"layer_{number}"
            root[f"layer_{number}"] = layer
    return Program(fx.GraphModule(root, graph), program.host, program.attributes)
