"""One step on the loss in little memory: atom by atom, and each atom on a few samples at a time.

Only the inputs of the atoms are kept. On the way back each atom runs once more, its parameters are stepped as soon as
their gradients are complete, and these are forgotten. That is recomputation (Chen et al., 2016), and exact, unless the
inputs are kept in bfloat16: then the way back sees them rounded.

An atom may also see its batch in pieces. Convolutions do not mind; batch norms need the statistics of the whole batch
(`client.pooled_norms`), and each of them costs one more pass in either direction.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from fedprophet.cascade.atoms import Atom
from fedprophet.cascade.measure import predicting, repeated
from fedprophet.cascade.trace import TracedProgram, is_constant
from fedprophet.client.aims import Aim
from fedprophet.client.part import ModelPart
from fedprophet.client.pooled_norms import EnoughError, Moments, PooledNorm, PooledNorms

Descend = Callable[[Iterable[nn.Parameter]], None]


class AtomwiseStep:
    """The forward and the backward half of one step; between them the loss can be looked at."""

    def __init__(self, part: ModelPart, piece: int, rounded: bool = False) -> None:
        """Cut batches into pieces of at most `piece` samples, but for atoms that cannot be cut (see `_divisible`).

        Inputs are `rounded` to bfloat16 until the way back, but for the first atom's, which the caller keeps anyway.
        """
        self._part, self._piece, self._rounded = part, piece, rounded
        self._runs: list[_AtomRun] = []
        self._gradient: Tensor | None = None

    def forward(self, x: Tensor, aim: Aim, strong_convexity: float) -> Tensor:
        """Return the mean loss; gradients of the exit are ready, and nothing is changed but norm statistics."""
        part, samples = self._part, len(x)
        for number in range(part.first, part.last):
            run = self.run_of(number, x, samples)
            x = run.forward(owned=number > part.first)
            if self._rounded and number > part.first:
                run.round()
            self._runs.append(run)
        total = x.new_zeros(())
        for piece in pieces(len(x), self._piece):
            features = x[piece].detach().requires_grad_()
            loss = part.exit_losses(features, aim[piece], strong_convexity).sum() / len(x)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            assert features.grad is not None
            x[piece] = features.grad  # the features are not needed any more, and their gradient has their size
        self._gradient = x
        return total

    def backward(self, descend: Descend) -> None:
        """Go back through the atoms, and step each one's parameters as soon as their gradients are complete."""
        part, gradient, self._gradient = self._part, self._gradient, None
        assert gradient is not None
        tensors = part.chain.tensors
        if part.head is not None:
            descend(part.head.parameters())
        for number in reversed(range(part.first, part.last)):
            run = self._runs.pop()
            if gradient is None:
                continue  # nothing behind this atom depends on it
            gradient = run.backward(gradient, wanted=number > part.first)
            names = (*part.chain.shared(number, number + 1), *part.chain.local(number, number + 1))
            descend(tensor for name in names if isinstance(tensor := tensors[name], nn.Parameter))

    def run_of(self, number: int, x: Tensor, samples: int) -> "_AtomRun":
        """Return the run of an atom on its input, which is one of a batch of `samples`."""
        atom = self._part.chain.atoms[number]
        if len(x) == samples > self._piece and _divisible(atom, x):
            return _PiecewiseRun(atom, x, self._piece)
        return _WholeRun(atom, x)


def features_in_pieces(part: ModelPart, x: Tensor, piece: int) -> Tensor:
    """Return z_m of a batch, each atom on some samples at a time; norm layers see the statistics of all of them."""
    step, samples = AtomwiseStep(part, piece), len(x)
    for number in range(part.first, part.last):
        x = step.run_of(number, x, samples).forward(owned=False)
    return x


class _AtomRun(ABC):
    """An atom and the input it has in this step."""

    def __init__(self, atom: Atom, x: Tensor) -> None:
        self._atom, self._x, self._dtype = atom, x, x.dtype

    def round(self) -> None:
        """Keep the input in bfloat16 until the way back, if it is in float32."""
        if self._dtype is torch.float32:
            self._x = self._x.to(torch.bfloat16)

    @abstractmethod
    def forward(self, owned: bool) -> Tensor:
        """Return the output; `owned` inputs may be overwritten on the way back."""

    @abstractmethod
    def backward(self, gradient: Tensor, wanted: bool) -> Tensor | None:
        """Add to the gradients of the parameters; return that of the input, if it is wanted and there is one."""


class _WholeRun(_AtomRun):
    """The whole batch at once. The second run begins with the buffers and the random state that the first one had.

    That state is kept for atoms that draw: it would be more than all else that a small atom keeps.
    """

    def forward(self, owned: bool) -> Tensor:
        state, draws = _random_state(self._x.device), _Draws()
        self._buffers = [buffer.clone() for buffer in _buffers(self._atom)]
        with torch.no_grad(), draws:
            output: Tensor = self._atom(self._x)
        self._began = state if draws.any else None
        # An atom that only reshapes returns its input's memory, which the way back writes to.
        shared = output.untyped_storage()._cdata == self._x.untyped_storage()._cdata
        return output.clone() if shared else output

    def backward(self, gradient: Tensor, wanted: bool) -> Tensor | None:
        x = self._x.detach().to(self._dtype).requires_grad_(wanted)
        with _buffers_kept(self._atom, self._buffers):
            with nullcontext() if self._began is None else _random_state_of(self._began, x.device):
                output = self._atom(x)
            if output.requires_grad:
                torch.autograd.backward(output, gradient)
        return x.grad


class _PiecewiseRun(_AtomRun):
    """A few samples at a time, with norm statistics of the whole batch."""

    def __init__(self, atom: Atom, x: Tensor, piece: int) -> None:
        super().__init__(atom, x)
        self._piece = piece
        self._norms: list[PooledNorm] = []

    def forward(self, owned: bool) -> Tensor:
        self._owned = owned
        output: Tensor | None = None
        with torch.no_grad():
            while self._gather_moments():
                pass
            for piece in self._pieces():
                # One call counts, as if it were that of the whole batch.
                with _buffers_kept(self._atom) if output is not None else nullcontext():
                    part = self._call(self._x[piece])
                output = _empty(len(self._x), part) if output is None else output
                output[piece] = part
                del part
            for norm in self._norms:
                norm.remember(len(self._x))
        assert output is not None
        return output

    def backward(self, gradient: Tensor, wanted: bool) -> Tensor | None:
        with _buffers_kept(self._atom):
            for norm in reversed(self._norms):
                self._gather_gradient(norm, gradient)
            overwritten = (self._owned and self._x.dtype is self._dtype) or not wanted
            inputs = self._x if overwritten else torch.empty_like(self._x, dtype=self._dtype)
            depends = False
            for piece in self._pieces():
                x = self._input(piece).requires_grad_(wanted)
                output = self._call(x)
                if output.requires_grad:
                    torch.autograd.backward(output, gradient[piece])
                if x.grad is not None:
                    inputs[piece], depends = x.grad, True
                del x, output
        return inputs if depends else None

    def _pieces(self) -> Iterator[slice]:
        return pieces(len(self._x), self._piece)

    def _input(self, piece: slice) -> Tensor:
        return self._x[piece].detach().to(self._dtype)

    def _call(self, x: Tensor, norms: PooledNorms | None = None) -> Tensor:
        with norms or PooledNorms(self._norms):
            output: Tensor = self._atom(x)
        return output

    def _gather_moments(self) -> bool:
        """Find the statistics of the first norm layer that has none yet; False if there is none."""
        moments = Moments()
        for piece in self._pieces():
            try:
                with _buffers_kept(self._atom):
                    self._call(self._x[piece], PooledNorms(self._norms, moments))
            except EnoughError:
                continue
            return False
        assert moments.layer is not None
        self._norms.append(moments.layer.pooled(moments))
        return True

    def _gather_gradient(self, norm: PooledNorm, gradient: Tensor) -> None:
        """Sum up what a norm layer's gradient needs of the whole batch."""
        sums = torch.zeros_like(norm.mean), torch.zeros_like(norm.mean)
        for piece in self._pieces():
            norms = PooledNorms(self._norms, watched=norm)
            output = self._call(self._input(piece).requires_grad_(), norms)
            assert norms.seen is not None
            x = norms.seen
            torch.autograd.grad(output, x, gradient[piece])
            del output
            assert norms.gradient is not None
            g = norms.gradient
            sums[0].add_(norm.sum(g))
            sums[1].add_(norm.sum(norm.standardised(x.detach()).mul_(g)))
        count = len(self._x) * norm.positions
        norm.gradient_means = sums[0] / count, sums[1] / count


def pieces(samples: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` samples."""
    return repeated(slice(start, min(start + size, samples)) for start in range(0, samples, size))


class _Draws(TorchDispatchMode):
    """Notices whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.any = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.any |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


NEAR = 1e-3
"""What two samples give one by one may differ by this share from what they give together."""
_DIVISIBLE: WeakKeyDictionary[Atom, bool] = WeakKeyDictionary()


def _divisible(atom: Atom, x: Tensor) -> bool:
    """Whether an atom gives the same for a batch in pieces; it is tried out on two samples, once.

    It does not if it draws random numbers, as dropout does: pieces would draw others. Nor if it keeps something of each
    batch, unless that is a batch norm's; nor if its samples know each other in any other way.
    """
    if atom in _DIVISIBLE:
        return _DIVISIBLE[atom]
    draws, x, buffers = _Draws(), x[:2], _buffers(atom)
    with torch.no_grad(), _buffers_kept(atom), _random_state_of(_random_state(x.device), x.device):
        before = [buffer._version for buffer in buffers]
        with draws:
            whole = atom(x)
        written = {id(buffer) for buffer, was in zip(buffers, before, strict=True) if buffer._version != was}
        norms = (layer for layer in atom.body.leaves if isinstance(layer, _BatchNorm))
        simple = not draws.any and written <= {id(buffer) for norm in norms for buffer in norm.buffers()}
        if not simple or len(whole) != 2 or predicting():
            return simple and len(whole) == 2
        apart = _PiecewiseRun(atom, x, 1).forward(owned=False)
    near = NEAR * float(whole.abs().max())
    _DIVISIBLE[atom] = torch.allclose(apart, whole, rtol=0, atol=near, equal_nan=True)
    return _DIVISIBLE[atom]


def _buffers(atom: Atom) -> list[Tensor]:
    """Return all buffers that an atom may write to: those of its layers, and those that no layer of it holds."""
    works = (atom.body.train, atom.body.evaluate)
    held = [b for module in (*works, *atom.body.leaves) if isinstance(module, nn.Module) for b in module.buffers()]
    programs = [work for work in works if isinstance(work, TracedProgram)]
    values = [program.value(name) for program in programs for name in program.attributes if not is_constant(name)]
    raw = [value for value in values if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)]
    return list({id(buffer): buffer for buffer in (*held, *raw)}.values())


@contextmanager
def _buffers_kept(atom: Atom, values: Sequence[Tensor] = ()) -> Iterator[None]:
    """Put the atom's buffers back after a `with` block that runs it once more, perhaps from other values."""
    buffers = _buffers(atom)
    found = [buffer.clone() for buffer in buffers]

    def put(values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)

    try:
        if values:
            put(values)
        yield
    finally:
        put(found)


def _empty(samples: int, like: Tensor) -> Tensor:
    """Return memory for so many samples, in the memory format of some of them."""
    last = like.ndim == 4 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if last else torch.contiguous_format
    return torch.empty((samples, *like.shape[1:]), dtype=like.dtype, device=like.device, memory_format=memory_format)


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return a copy of the generator's state, which counts as a tensor; of a prediction's it has the size alone."""
    state = torch.get_rng_state()
    if predicting():
        return torch.empty(state.shape, dtype=state.dtype), None
    return state.clone(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextmanager
def _random_state_of(state: tuple[Tensor, Tensor | None], device: torch.device) -> Iterator[None]:
    """Draw from torch's global generator as from a state it was in, and put it back."""
    now = _random_state(device)
    try:
        _set_random_state(state, device)
        yield
    finally:
        _set_random_state(now, device)


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    if predicting():
        return  # nothing is drawn
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
