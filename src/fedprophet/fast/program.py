"""A part of a chain as a program that stacks of clients can run: blocks, then an exit. `reading` makes it.

A block is a convolution with batch norm and ReLU, perhaps with a max-pool behind it. Two blocks may have a shortcut
around them, as in a ResNet. The exit pools the feature, to averages or maxima, and ends in dense layers: the backbone's
own classifier, or an auxiliary head.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class Convolution:
    """A convolution and the batch norm behind it, by the names of both layers. Its padding is half its kernel."""

    convolution: str
    norm: str
    inputs: int
    outputs: int
    bias: bool
    epsilon: float
    momentum: float
    kernel: int = 3
    stride: int = 1

    @property
    def tensors(self) -> tuple[str, ...]:
        """The state-dict names of what it computes with."""
        bias = (f"{self.convolution}.bias",) if self.bias else ()
        parts = ("weight", "bias", "running_mean", "running_var")
        return (f"{self.convolution}.weight", *bias, *(f"{self.norm}.{part}" for part in parts))


@dataclass(frozen=True)
class Block(Convolution):
    """A convolution, its batch norm and a ReLU, then a max-pool of `pool` positions a side that halves (0: none).

    `residual`: what the block before this one read is added in front of the ReLU, through `projection` if there is one.
    """

    pool: int = 0
    residual: bool = False
    projection: Convolution | None = None

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """Its own convolution, and the one on its shortcut."""
        return (self,) if self.projection is None else (self, self.projection)

    @property
    def shrinks(self) -> int:
        """The factor by which it shortens each side."""
        return self.stride * (2 if self.pool else 1)


@dataclass(frozen=True)
class Dense:
    """A linear layer by its name, with what follows it."""

    name: str
    inputs: int
    outputs: int
    bias: bool
    relu: bool = False
    dropout: float = 0.0

    @property
    def tensors(self) -> tuple[str, ...]:
        """The state-dict names of what it computes with."""
        return (f"{self.name}.weight", *((f"{self.name}.bias",) if self.bias else ()))


@dataclass(frozen=True)
class LayerProgram:
    """Blocks, then an exit: the feature is averaged to `side` × `side` positions (None: left alone) and goes through
    `dense`. Without dense layers the feature is what comes out. `convex`: the exit is an auxiliary head, so the feature
    before it has the strong-convexity term. `maximum`: the exit takes the largest number of each part, not the average.
    """

    shape: tuple[int, int, int]
    """Channels, height and width of one input."""
    normalize: tuple[tuple[float, ...], tuple[float, ...]] | None
    blocks: tuple[Block, ...]
    side: int | None
    dense: tuple[Dense, ...]
    convex: bool
    maximum: bool = False

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """The convolutions of all blocks, in order."""
        return tuple(part for block in self.blocks for part in block.convolutions)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The state-dict names of all that it computes with."""
        parts: tuple[Convolution | Dense, ...] = (*self.convolutions, *self.dense)
        return tuple(name for part in parts for name in part.tensors)

    @property
    def feature(self) -> tuple[int, int, int]:
        """Channels, height and width of the feature that the exit reads."""
        return (self.blocks[-1].outputs, *self.sizes[-1]) if self.blocks else self.shape

    def weighted(self, strong_convexity: float) -> float:
        """Return the weight that the strong-convexity term has here."""
        return strong_convexity if self.convex else 0.0

    @cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Height and width of what the first block reads, and of what each block leaves."""
        sizes = [self.shape[1:]]
        for block in self.blocks:
            height, width = sizes[-1]
            sizes.append((height // block.shrinks, width // block.shrinks))
        return tuple(sizes)


@dataclass(frozen=True)
class Exits:
    """Clients `low` … `high` − 1 of a ladder: they leave it after the same number of blocks, through the same exit."""

    low: int
    high: int
    program: LayerProgram

    @property
    def depth(self) -> int:
        """After how many blocks they leave."""
        return len(self.program.blocks)


@dataclass(frozen=True)
class Ladder:
    """The programs of several clients that begin alike: each one's blocks are the first of those before it.

    So a block is run for the first `reach` clients at once.
    """

    programs: tuple[LayerProgram, ...]

    def __post_init__(self) -> None:
        if not all(continues(one, other) for one, other in pairwise(self.programs)):
            raise ValueError("the programs of a ladder must begin alike, the longest first")

    @property
    def clients(self) -> int:
        return len(self.programs)

    @property
    def longest(self) -> LayerProgram:
        """The program that has all blocks."""
        return self.programs[0]

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """How many clients, the first ones, have each block."""
        depths = [len(program.blocks) for program in self.programs]
        return tuple(sum(depth > block for depth in depths) for block in range(depths[0]))

    @cached_property
    def exits(self) -> tuple[Exits, ...]:
        """The clients by their exits, in order."""
        found: list[Exits] = []
        for number, program in enumerate(self.programs):
            if found and found[-1].program == program:
                found[-1] = replace(found[-1], high=number + 1)
            else:
                found.append(Exits(number, number + 1, program))
        return tuple(found)

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """The clients that have each tensor, by its name: the first of them, and the one behind the last."""
        blocks = zip(self.longest.blocks, self.reach, strict=True)
        parts = [(part, reach) for block, reach in blocks for part in block.convolutions]
        spans = {name: (0, reach) for part, reach in parts for name in part.tensors}
        return spans | {
            name: (exits.low, exits.high)
            for exits in self.exits
            for layer in exits.program.dense
            for name in layer.tensors
        }


def continues(one: LayerProgram, other: LayerProgram) -> bool:
    """Whether a program does all that another one does before its exit, and perhaps more."""
    alike = one.shape == other.shape and one.normalize == other.normalize
    return alike and one.blocks[: len(other.blocks)] == other.blocks
