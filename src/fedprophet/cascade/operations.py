"""What a single operation of a traced model does: its kind, the rank and range of its result, and what it writes to.

Modules, functions and methods of one operation share one name here: nn.MaxPool2d, F.max_pool2d and the method are all
`maxpool2d`. An operation that is not known gets the careful answer: unbounded, maybe a view, batch dimension unknown.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Set

from torch import nn
from torch.fx import Node

Range = tuple[float, float]
ModuleOf = Callable[[Node], nn.Module]
"""Gives the layer that a `call_module` node calls."""

UNBOUNDED: Range = (-math.inf, math.inf)
ASSIGNMENTS = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem)
"""What Python's assignments to a traced value become. torch.fx would make new tensors of them, or refuse them."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
RANGES: Mapping[str, Range] = {
    "relu": (0.0, math.inf),
    "relu6": (0.0, 6.0),
    "sigmoid": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
}
MATRIX_FUNCTIONS: Mapping[str, str] = {
    "linear": "Linear",
    "bilinear": "Bilinear",
    "embedding": "Embedding",
    "einsum": "Einsum",
    **dict.fromkeys(("matmul", "mm", "bmm", "addmm", "baddbmm", "tensordot"), "Matmul"),
    "multiheadattentionforward": "Attention",
    **{f"conv{n}d": "Conv" for n in (1, 2, 3)},
    **{f"convtranspose{n}d": "ConvTranspose" for n in (1, 2, 3)},
}
ELEMENTWISE = _words(
    "relu relu6 leakyrelu prelu rrelu elu selu celu gelu silu mish softplus softsign sigmoid logsigmoid "
    "hardsigmoid tanh hardtanh hardswish hardshrink softshrink tanhshrink threshold add sub mul truediv div neg "
    "pow exp sqrt clamp"
)
NORM_NAMES = _words("batchnorm batchnorm1d batchnorm2d batchnorm3d layernorm groupnorm rmsnorm instancenorm")
RESHAPES = _words("flatten view reshape unflatten permute transpose squeeze unsqueeze contiguous clone expand")
SELECTIONS = _words("getitem select narrow amax amin mean")
NO_TENSORS = _words("size shape dim ndim ndimension numel nelement dtype device stride len")
SEVERAL_TENSORS = _words("chunk split tensorsplit unbind topk sort lstm gru rnn multiheadattention aminmax meshgrid")
_POOL = re.compile(r"(adaptive|lp|fractional)?(max|avg)?pool(\d)d")
_CONVOLUTION = re.compile(r"conv(transpose)?(\d)d")
_DROPOUT = re.compile(r"(feature)?(alpha)?dropout\d?d?")


def operation(node: Node, module_of: ModuleOf) -> str:
    """Return the name of what a node does, the same for module, function and method; '' where it is not torch's."""
    if node.op == "call_module":
        return _plain(torch_class(module_of(node)).__name__)
    if node.op == "call_method":
        return _plain(str(node.target))
    if node.op != "call_function" or isinstance(node.target, str):
        return ""
    if node.target is getattr:
        return _plain(str(node.args[1]))
    if node.target in ASSIGNMENTS:
        return node.target.__name__.removeprefix("i")  # as `x + y` for `x += y`
    origin = getattr(node.target, "__module__", None) or "torch"
    return _plain(node.target.__name__) if origin.split(".")[0] in ("torch", "_operator") else ""


def torch_class(module: nn.Module) -> type[nn.Module]:
    """Return the layer of torch that a module is, or is made of: subclasses and parametrised layers have one."""
    return next(c for c in type(module).__mro__ if c is nn.Module or c.__module__.startswith("torch.nn.modules"))


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def is_pool(name: str) -> bool:
    """Whether an operation is a maximum or average pool."""
    return _POOL.fullmatch(name) is not None


def is_dropout(name: str) -> bool:
    """Whether an operation is one of the dropouts."""
    return _DROPOUT.fullmatch(name) is not None


def writes_first_argument(node: Node, module_of: ModuleOf) -> bool:
    """Whether a node works in place on its first argument."""
    if node.op == "call_module":
        return bool(getattr(module_of(node), "inplace", False))
    if node.target in ASSIGNMENTS:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return bool(node.kwargs.get("inplace")) or (name.endswith("_") and not name.startswith("__"))


def may_be_view(node: Node, module_of: ModuleOf) -> bool:
    """Whether the result may lie in the memory of an argument. A needless yes costs a copy, a wrong no is a bug."""
    name = operation(node, module_of)
    computes = name in ELEMENTWISE or name in NORM_NAMES or name in MATRIX_FUNCTIONS or is_pool(name)
    return is_dropout(name) or not (
        computes or name in ("cat", "stack", "softmax", "mean", "sum", "scaleddotproductattention")
    )


def keeps_batch(node: Node, module_of: ModuleOf) -> bool:
    """Whether dimension 0 of the result is dimension 0 of the node's tensors; False where that is not known."""
    name = operation(node, module_of)
    if name == "flatten":
        return flatten_dimensions(node, module_of)[0] >= 1
    keeping = name in ELEMENTWISE or name in NORM_NAMES or name in ("linear", "identity", "contiguous", "clone")
    return keeping or is_pool(name) or is_dropout(name) or _CONVOLUTION.fullmatch(name) is not None


def option(node: Node, module_of: ModuleOf, position: int, name: str, default: object) -> object:
    """Return a setting of an operation: a layer's attribute, or a call's argument by position or by name."""
    if node.op == "call_module":
        return getattr(module_of(node), name, default)
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def flatten_dimensions(node: Node, module_of: ModuleOf) -> tuple[int, int]:
    """Return the first and the last dimension that a flatten merges."""
    first, last = option(node, module_of, 1, "start_dim", 0), option(node, module_of, 2, "end_dim", -1)
    return (first if isinstance(first, int) else 0), (last if isinstance(last, int) else -1)


def result_range(node: Node, module_of: ModuleOf, inside: Set[Node], input_range: Range = UNBOUNDED) -> Range:
    """Return the range of a node's result, found by walking back through operations that keep it to one that sets it.

    `inside` are the operations that have run by then: one of them may have written over the result.
    """
    if any(
        user in inside and writes_first_argument(user, module_of) and user.args[:1] == (node,) for user in node.users
    ):
        return UNBOUNDED
    if node.op == "placeholder":
        return input_range
    name = operation(node, module_of)
    if name == "hardtanh":
        limits = (option(node, module_of, 1, "min_val", -1.0), option(node, module_of, 2, "max_val", 1.0))
        return (float(limits[0]), float(limits[1]))  # type: ignore[arg-type]
    if name in RANGES:
        return RANGES[name]
    keeps = is_pool(name) or is_dropout(name) or name == "identity" or name in RESHAPES or name in SELECTIONS
    if not keeps or name.startswith("lppool") or not node.args or not isinstance(node.args[0], Node):
        return UNBOUNDED
    low, high = result_range(node.args[0], module_of, inside - {node}, input_range)
    if name.startswith("avgpool"):
        # Zeros of the padding may be averaged in.
        plain = option(node, module_of, 6, "divisor_override", None) is None
        return (min(low, 0.0), max(high, 0.0)) if plain else UNBOUNDED
    if is_dropout(name) and node.op != "call_module" and option(node, module_of, 2, "training", True) is not False:
        # It stays on in evaluation: what it keeps is scaled up.
        return (0.0 if low >= 0 else -math.inf, 0.0 if high <= 0 else math.inf)
    return low, high


def result_rank(node: Node, module_of: ModuleOf, ranks: Mapping[Node, int | None]) -> int | None:
    """Return the number of dimensions of a node's result, from those of its arguments; None where it is not known."""
    name = operation(node, module_of)
    sized = _CONVOLUTION.fullmatch(name) or _POOL.fullmatch(name)
    if sized:
        return int(sized[sized.re.groups]) + 2
    rank = max((rank for arg in node.all_input_nodes if (rank := ranks.get(arg)) is not None), default=None)
    return _RANK_RULES[name](node, module_of, rank) if name in _RANK_RULES else rank


def _flattened(node: Node, module_of: ModuleOf, rank: int | None) -> int | None:
    first, last = flatten_dimensions(node, module_of)
    if rank is None:
        return first + 1 if last == -1 and first >= 0 else None
    return rank - (last % rank - first % rank)


def _reshaped(node: Node, module_of: ModuleOf, rank: int | None) -> int | None:
    sizes = node.args[1:] or (node.kwargs.get("shape"),)
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        return len(sizes[0])
    # One node alone may be a whole shape: its length is not known.
    return None if len(sizes) == 1 and isinstance(sizes[0], Node) else len(sizes)


def _reduced(node: Node, module_of: ModuleOf, rank: int | None) -> int | None:
    dims = option(node, module_of, 1, "dim", None)
    if option(node, module_of, 2, "keepdim", False):
        return rank
    if dims is None:
        return 0
    return None if rank is None else rank - (len(dims) if isinstance(dims, tuple | list) else 1)


def _indexed(node: Node, module_of: ModuleOf, rank: int | None) -> int | None:
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    source = node.args[0]
    of_several = isinstance(source, Node) and operation(source, module_of) in SEVERAL_TENSORS
    if rank is None or of_several or any(isinstance(item, Node | list) for item in index):
        return rank
    return rank - sum(isinstance(item, int) for item in index) + sum(item is None for item in index)


def _squeezed(node: Node, module_of: ModuleOf, rank: int | None) -> int | None:
    # Without a dimension everything but batch and channels is taken to be of size one.
    return 2 if option(node, module_of, 1, "dim", None) is None else _reduced(node, module_of, rank)


def _contracted(node: Node, module_of: ModuleOf, rank: int | None) -> int | None:
    equation = node.args[0]
    if not isinstance(equation, str) or "->" not in equation or "..." in equation:
        return None
    return len(equation.split("->")[1].strip())


_RANK_RULES: Mapping[str, Callable[[Node, ModuleOf, int | None], int | None]] = {
    "flatten": _flattened,
    "view": _reshaped,
    "reshape": _reshaped,
    "unflatten": lambda node, module_of, rank: None,
    "mean": _reduced,
    "sum": _reduced,
    "amax": _reduced,
    "select": lambda node, module_of, rank: None if rank is None else rank - 1,
    "getitem": _indexed,
    "squeeze": _squeezed,
    "unsqueeze": lambda node, module_of, rank: None if rank is None else rank + 1,
    "embedding": lambda node, module_of, rank: 3 if rank is None else rank + 1,
    "einsum": _contracted,
    "multiheadattention": lambda node, module_of, rank: 3 if rank is None else rank,
    "transformerencoderlayer": lambda node, module_of, rank: 3 if rank is None else rank,
}
