"""Traced programs with other layers in them: the same model, computed in another way."""

from collections.abc import Mapping

from torch import fx, nn
from torch.fx import Node

from fedprophet.cascade.trace import TracedProgram


def layers_of(program: TracedProgram) -> dict[Node, nn.Module]:
    """Return the layer behind each of a program's calls."""
    calls = (node for node in program.code.graph.nodes if node.op == "call_module")
    return {node: program.code.get_submodule(str(node.target)) for node in calls}


def takes_one(node: Node) -> bool:
    """Whether a call has its input as its only argument."""
    return len(node.args) == 1 and not node.kwargs


def rewritten(program: TracedProgram, replacements: Mapping[Node, nn.Module]) -> TracedProgram:
    """Return the program with some layers replaced; where one is replaced by an identity, its call is left out."""
    if not replacements:
        return program
    graph = fx.Graph()
    copies: dict[Node, Node] = {}
    root: dict[str, nn.Module] = {}
    layers = {**layers_of(program), **replacements}
    for number, node in enumerate(program.code.graph.nodes):
        layer = layers.get(node)
        if node in replacements and isinstance(layer, nn.Identity):
            copies[node] = copies[node.args[0]]
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if layer is not None:
            copies[node].target = f"layer_{number}"
            root[f"layer_{number}"] = layer
    return TracedProgram(fx.GraphModule(root, graph), program.host, program.attributes)
