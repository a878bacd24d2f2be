"""A model as a chain of atoms: the smallest pieces that a memory budget can be filled with.

An atom owns no tensor: it runs a stretch of the model with the model's own layers, so outputs, gradients and
state-dict names stay those of the model. `chain_of` finds the atoms; `explicit_chain` takes the user's.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedprophet.cascade.cut import Part, cut, inspect_module, kinds_of_part, label
from fedprophet.cascade.operations import UNBOUNDED, Range
from fedprophet.cascade.trace import REMEDY, TracedProgram, flags, is_constant
from fedprophet.errors import ModelError, unknown
from fedprophet.models.normalize import Normalize


@dataclass(frozen=True, eq=False)
class Body:
    """What an atom runs in training and in evaluation: programs from a trace, or a module of an explicit chain.

    `leaves` are the layers it calls. `writes_input` says that it works in place on the tensor it is given.
    """

    train: TracedProgram | nn.Module
    evaluate: TracedProgram | nn.Module
    leaves: tuple[nn.Module, ...]
    writes_input: bool


class Atom(nn.Module):
    """A stretch of the model from one tensor to one tensor.

    `name` is the qualified name of the part, `layers` labels for people, `bounds` the range of its output in
    evaluation. Layers, parameters and buffers are the model's own: `Chain.tensors`, `shared` and `local` give their
    state-dict names, and moving the model moves the atom.
    """

    def __init__(self, name: str, layers: tuple[str, ...], bounds: Range, body: Body, training: bool) -> None:
        super().__init__()
        self.name = name
        self.layers = layers
        self.bounds = bounds
        self.body = body
        self.training = training
        self.reused: tuple[nn.Module, ...] = ()
        """Those of its modules that another atom runs too: their flag cannot say which mode this atom is in."""
        self.calls = nn.ModuleList([body.evaluate] if isinstance(body.evaluate, nn.Module) else body.leaves)
        self._raw: dict[str, tuple[str, Tensor]] = {}
        self._register_raw()

    def forward(self, x: Tensor) -> Tensor:
        if self.body.writes_input:
            # The tensor is the caller's, and autograd refuses to write to a leaf.
            x = x.clone()
        work = self.body.train if self.training else self.body.evaluate
        with flags(self.reused, self.training) if self.reused else nullcontext():
            result = work(x, self._values(work, x.device)) if isinstance(work, TracedProgram) else work(x)
        if not isinstance(result, Tensor):
            raise ModelError(f"atom {self.name!r} must return one tensor, not {type(result).__name__}. {REMEDY}")
        return result

    def extra_repr(self) -> str:
        return ", ".join((repr(self.name), *self.layers))

    def _register_raw(self) -> None:
        """Let torch know the tensors that no layer holds as the atom's: for its parameters and for functional calls."""
        programs = [work for work in (self.body.train, self.body.evaluate) if isinstance(work, TracedProgram)]
        values = {attribute: program.value(attribute) for program in programs for attribute in program.attributes}
        for number, (attribute, value) in enumerate(values.items()):
            key = f"raw_{number}"
            if isinstance(value, nn.Parameter):
                self.register_parameter(key, value)
            elif isinstance(value, Tensor):
                self.register_buffer(key, value, persistent=False)
            else:
                continue
            self._raw[attribute] = (key, value)

    def _values(self, program: TracedProgram, device: torch.device) -> Iterator[Any]:
        for attribute in program.attributes:
            key, registered = self._raw.get(attribute, ("", None))
            own: Any = getattr(self, key) if key else None
            # A functional call puts another tensor into the atom; otherwise the model's counts.
            value = program.value(attribute) if own is registered else own
            yield value.to(device) if is_constant(attribute) else value


@dataclass(frozen=True, eq=False)
class Chain:
    """A model and the atoms it is made of, in the order they run.

    `shared_names` and `local_names` hold, for each atom, the state-dict names it owns. A tensor that no atom uses
    belongs to the last one. With a `Normalize` the chain is that and then the model; the model itself stays bare.
    An atom follows its own training flag, which `mode` sets; the model's train() and eval() do not reach it.
    """

    model: nn.Module
    atoms: tuple[Atom, ...]
    shared_names: tuple[tuple[str, ...], ...] = field(repr=False)
    local_names: tuple[tuple[str, ...], ...] = field(repr=False)
    _members: dict[tuple[int, int], list[nn.Module]] = field(init=False, repr=False, default_factory=dict)
    """All modules in a range of atoms. A chain is put into a mode for every batch, and its atoms stay the same."""
    _places: dict[str, tuple[dict[str, Any], str]] = field(init=False, repr=False, default_factory=dict)
    """Where each of the model's tensors is held. Every task asks for them, and a state dict takes its time."""

    def __len__(self) -> int:
        return len(self.atoms)

    def run(self, x: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Run atoms `first` … `last` − 1 (to the end where `last` is None)."""
        for atom in self.atoms[self._range(first, last)]:
            x = atom(x)
        return x

    def shared(self, first: int = 0, last: int | None = None) -> tuple[str, ...]:
        """Return the names that are federated: every parameter outside norm layers that keep statistics."""
        return tuple(name for names in self.shared_names[self._range(first, last)] for name in names)

    def local(self, first: int = 0, last: int | None = None) -> tuple[str, ...]:
        """Return the names that stay on a client: norm layers that keep statistics, and every other saved buffer."""
        return tuple(name for names in self.local_names[self._range(first, last)] for name in names)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The model's live parameters and saved buffers by state-dict name."""
        if not self._places:
            state = _state(self.model)
            self._places.update(_places_of(self.model, state))
            return state
        return {name: holder[key] for name, (holder, key) in self._places.items()}

    @property
    def device(self) -> torch.device:
        """Where the model computes. Tensors that are put aside meanwhile, in the machine's memory, do not count."""
        devices = dict.fromkeys(tensor.device for tensor in self.tensors.values())
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Copy values into the model's tensors: all of them or, where one does not fit, none."""
        tensors = self.tensors
        for name, value in values.items():
            if name not in tensors:
                raise ModelError(unknown("tensor of the model", name, tensors))
            if value.shape != tensors[name].shape:
                raise ModelError(
                    f"tensor {name!r} has shape {tuple(value.shape)}, the model's has {tuple(tensors[name].shape)}"
                )
        with torch.no_grad():
            for name, value in values.items():
                tensors[name].copy_(value)

    def modules(self, first: int = 0, last: int | None = None) -> tuple[nn.Module, ...]:
        """Return the layers that atoms `first` … `last` − 1 call, each once, in order."""
        return tuple(dict.fromkeys(leaf for atom in self.atoms[self._range(first, last)] for leaf in atom.body.leaves))

    @contextmanager
    def mode(self, first: int, last: int | None, training: bool) -> Iterator[None]:
        """Put atoms `first` … `last` − 1 into training or evaluation mode, and each flag back to what it was."""
        span = self._range(first, last)
        key = (span.start, span.stop)
        if key not in self._members:
            self._members[key] = [module for atom in self.atoms[span] for module in atom.modules()]
        with flags(self._members[key], training):
            yield

    def take(self, x: Tensor) -> Tensor:
        """Return a batch as this chain reads it: on its device. A plan may ask for another memory format."""
        return x.to(self.device)

    def still(self, first: int, last: int | None) -> AbstractContextManager[None]:
        """Set atoms to evaluation mode within a `with` block in which no parameter changes."""
        return self.mode(first, last, training=False)

    def _range(self, first: int, last: int | None) -> slice:
        end = len(self.atoms) if last is None else last
        if not 0 <= first <= end <= len(self.atoms):
            raise ModelError(f"there are no atoms {first} to {end} − 1 in a chain of {len(self.atoms)} atoms")
        return slice(first, end)


def chain_of(model: nn.Module, normalize: Normalize | None = None) -> Chain:
    """Cut a model into atoms with torch.fx; `fedprophet.cascade.cut` says where.

    Training and evaluation are traced apart, because a trace freezes what the model does with `self.training`.
    """
    train, evaluate = cut(model, training=True), cut(model, training=False)
    _check_same_atoms(model, train, evaluate)
    atoms = []
    for a, b in zip(train, evaluate, strict=True):
        leaves = tuple(dict.fromkeys((*a.leaves, *b.leaves)))
        body = Body(a.program, b.program, leaves, a.writes_input or b.writes_input)
        atoms.append(Atom(b.name, b.labels, b.bounds, body, model.training))
    return _chain(model, atoms, [part.tensors for part in evaluate], normalize)


def explicit_chain(atoms: Sequence[tuple[str, nn.Module]] | nn.Sequential, normalize: Normalize | None = None) -> Chain:
    """Make a chain of the user's own parts, each a module from one tensor to one tensor.

    State-dict names are the part's name, a dot and the names inside the part; an nn.Sequential keeps its own.
    """
    if isinstance(atoms, nn.Sequential):
        model: nn.Module = atoms
        # Not named_children, which skips the second place of a module that has two.
        parts = [(name, part) for name, part in atoms._modules.items() if part is not None]
    else:
        parts = _named_parts(atoms)
        model = ExplicitModel(parts)
    if not parts:
        raise ModelError("an explicit chain needs at least one part")
    counts: Counter[str] = Counter()
    built: list[Atom] = []
    for name, module in parts:
        facts = inspect_module(module, built[-1].bounds if built else UNBOUNDED)
        body = Body(module, module, facts.leaves, facts.writes_input)
        built.append(
            Atom(name, label(kinds_of_part(module, facts.layers), counts), facts.bounds, body, module.training)
        )
    used = [frozenset(id(t) for t in (*module.parameters(), *module.buffers())) for _, module in parts]
    return _chain(model, built, used, normalize)


def _named_parts(atoms: object) -> list[tuple[str, nn.Module]]:
    """Return the parts of an explicit chain; raise ModelError where one has no name, or is no module."""
    wanted = 'pass ("name", module) pairs, as in [("stem", stem), ("head", head)], or an nn.Sequential'
    if not isinstance(atoms, Iterable):
        raise ModelError(f"an explicit chain is made of parts, not of one {type(atoms).__name__}: {wanted}")
    parts = list(atoms)
    for number, part in enumerate(parts, start=1):
        match part:
            case (str(), nn.Module()):
                pass
            case (str(name), kind) if isinstance(kind, type):
                raise ModelError(f"part {name!r} is the class {kind.__name__}. Pass a module of it: {kind.__name__}(…)")
            case _:
                raise ModelError(f"part {number} of an explicit chain is a {type(part).__name__}, not a pair: {wanted}")
    return parts


class ExplicitModel(nn.Module):
    """The model that an explicit chain makes: its parts, one behind the other."""

    def __init__(self, parts: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._order = [name for name, _ in parts]
        for name, module in parts:
            if sum(f"{name}.".startswith(f"{other}.") for other in self._order) > 1:
                raise ModelError(f"part name {name!r} is used twice, or lies inside another part of the explicit chain")
            try:
                _mount(self, name, module)
            except (KeyError, TypeError) as error:
                raise ModelError(f"part name {name!r} does not fit an explicit chain: {error}") from error

    def forward(self, x: Tensor) -> Tensor:
        for name in self._order:
            x = self.get_submodule(name)(x)
        return x


def _mount(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Add a module under a name that may have dots."""
    *containers, last = name.split(".")
    for container in containers:
        if container not in owner._modules:
            owner.add_module(container, nn.Module())
        owner = owner.get_submodule(container)
    owner.add_module(last, module)


def _chain(model: nn.Module, atoms: Sequence[Atom], used: Sequence[Set[int]], normalize: Normalize | None) -> Chain:
    """Give every tensor of the model to the atom that uses it, and put the normalisation in front."""
    parts, used = list(atoms), list(used)
    if normalize is not None:
        body = Body(normalize, normalize, (normalize,), writes_input=False)
        parts.insert(0, Atom("normalize", (), UNBOUNDED, body, model.training))
        used.insert(0, frozenset())
    layers = statistics_layers(model)
    shared: list[list[str]] = [[] for _ in parts]
    local: list[list[str]] = [[] for _ in parts]
    for name, tensor in _state(model).items():
        owners = [number for number, identities in enumerate(used) if id(tensor) in identities]
        if len(owners) > 1:
            users = " and ".join(repr(parts[number].name) for number in owners)
            raise ModelError(f"tensor {name!r} is used by atoms {users}: put them into one part of the explicit chain")
        owner = owners[0] if owners else len(parts) - 1
        is_shared = isinstance(tensor, nn.Parameter) and name.rpartition(".")[0] not in layers
        (shared if is_shared else local)[owner].append(name)
    counts = Counter(module for atom in parts for module in atom.modules())
    for atom in parts:
        atom.reused = tuple(module for module in atom.modules() if counts[module] > 1)
    return Chain(model, tuple(parts), tuple(map(tuple, shared)), tuple(map(tuple, local)))


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def _places_of(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, tuple[dict[str, Any], str]]:
    """Return where a model holds the tensors of its state dict; nothing where a hook of its own puts others there."""
    holders: list[dict[str, Any]] = [held for part in model.modules() for held in (part._parameters, part._buffers)]
    found = {id(tensor): (holder, key) for holder in holders for key, tensor in holder.items()}
    known = all(id(tensor) in found for tensor in state.values())
    return {name: found[id(tensor)] for name, tensor in state.items()} if known else {}


def statistics_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the norm layers that keep statistics, however they are written, by their names."""
    named = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if isinstance(getattr(module, "running_mean", None), Tensor)}


def _check_same_atoms(model: nn.Module, train: Sequence[Part], evaluate: Sequence[Part]) -> None:
    for a, b in zip(train, evaluate, strict=False):
        if (a.name, a.labels, a.tensors) != (b.name, b.labels, b.tensors):
            raise ModelError(
                f"{type(model).__name__} does not do the same in training and in evaluation: where one has "
                f"{a.name!r} ({', '.join(a.labels)}), the other has {b.name!r} ({', '.join(b.labels)}). {REMEDY}"
            )
    if len(train) != len(evaluate):
        raise ModelError(
            f"{type(model).__name__} has {len(train)} atoms in training and {len(evaluate)} in evaluation. {REMEDY}"
        )
