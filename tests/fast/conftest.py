"""What the tests of stacks share: small networks with statistics that matter, as segments of a chain and as stacks."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedprophet import models
from fedprophet.cascade.atoms import Chain, chain_of
from fedprophet.cascade.heads import build_head
from fedprophet.client.part import ModelPart
from fedprophet.fast.kernels import Kernels
from fedprophet.fast.layout import StackLayout
from fedprophet.fast.program import Ladder, LayerProgram
from fedprophet.fast.reading import read_program
from fedprophet.models.normalize import Normalize

CLASSES = 10


def unlike(model: nn.Module, seed: int) -> nn.Module:
    """Draw every tensor of a model anew, norm layers and biases included, so that nothing is 0 or 1 by chance."""
    draw = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.uniform_(-0.2, 0.2, generator=draw)
            layer.running_var.uniform_(0.5, 1.5, generator=draw)
            layer.weight.data.uniform_(0.5, 1.5, generator=draw)
            layer.bias.data.uniform_(-0.2, 0.2, generator=draw)
        elif isinstance(layer, nn.Conv2d | nn.Linear):
            layer.weight.data.add_(0.1 * torch.randn(layer.weight.shape, generator=draw))
            if layer.bias is not None:
                layer.bias.data.uniform_(-0.1, 0.1, generator=draw)
    return model


@dataclass(frozen=True)
class Case:
    """Several clients' segments of one kind with a batch for each, and their program."""

    segments: list[ModelPart]
    program: LayerProgram
    head: int | None
    x: Tensor
    """Clients × samples × channels × height × width, as the segments read them."""
    labels: Tensor

    @property
    def stacked(self) -> Tensor:
        """The batches as stacks read them."""
        return self.x.permute(0, 1, 3, 4, 2).contiguous()

    @property
    def ladder(self) -> Ladder:
        """The clients' programs, which are all the same."""
        return Ladder((self.program,) * len(self.segments))

    @property
    def targets(self) -> Tensor:
        return torch.eye(CLASSES)[self.labels]

    def calibrate(self) -> Tensor:
        """Let every client add numbers of its own to class scores from now on; return them, one row for each."""
        drawn = torch.randn(len(self.segments), CLASSES, generator=torch.Generator().manual_seed(9))
        prior = (3 * drawn).log_softmax(dim=1)
        self.segments[:] = [replace(segment, prior=own) for segment, own in zip(self.segments, prior, strict=True)]
        return prior

    def parameters(self) -> list[dict[str, Tensor]]:
        """Return every client's tensors as they are now, in memory of their own."""
        return [tensors_of(segment, self.head) for segment in self.segments]

    def stacks(self, multiple: int = 1) -> dict[str, Tensor]:
        """Return the same as stacks, in memory of their own."""
        stacks = StackLayout(self.ladder, multiple).stacked(self.parameters(), torch.device("cpu"))
        return {name: value.clone(memory_format=torch.contiguous_format) for name, value in stacks.items()}


def tensors_of(segment: ModelPart, head: int | None) -> dict[str, Tensor]:
    found = {name: value.detach().clone() for name, value in segment.chain.tensors.items()}
    if segment.head is not None:
        found |= {f"heads/{head}.{name}": value.detach().clone() for name, value in segment.head.named_parameters()}
    return found


def features_before(chain: Chain, x: Tensor, first: int) -> Tensor:
    with torch.no_grad(), chain.mode(0, first, training=False):
        return chain.run(x, 0, first)


def segment_of(chain: Chain, first: int, last: int, head: int | None, x: Tensor) -> ModelPart:
    body = ModelPart(chain, first, last, None)
    if head is None:
        return body
    with torch.no_grad(), body.mode(training=False):
        return ModelPart(chain, first, last, build_head(tuple(body.features(x[:1]).shape[1:]), CLASSES))


@pytest.fixture(scope="session")
def make_case() -> Callable[..., Case]:
    """Return a function that makes clients with different parameters and batches. Each kind is traced once."""

    @cache
    def traced(name: str, shape: tuple[int, int, int], clients: int, **options: Any) -> list[Chain]:
        torch.manual_seed(3)
        normalize = Normalize((0.4,) * shape[0], (0.3,) * shape[0])
        chain = chain_of(models.build(name, shape, CLASSES, **options), normalize)
        chains = [deepcopy(chain) for _ in range(clients)]
        for client, own in enumerate(chains):
            unlike(own.model, client)
        return chains

    @cache
    def made(
        name: str = "vgg-small",
        span: tuple[int, int | None, int | None] = (0, None, None),
        shape: tuple[int, int, int] = (1, 8, 8),
        clients: int = 2,
        samples: int = 5,
        **options: Any,
    ) -> Case:
        first, last, head = span
        segments: list[ModelPart] = []
        batches: list[Tensor] = []
        for client, chain in enumerate(traced(name, shape, clients, **{"width": 4, **options})):
            images = torch.rand(samples, *shape, generator=torch.Generator().manual_seed(50 + client))
            x = features_before(chain, images, first)
            batches.append(x)
            segments.append(segment_of(chain, first, len(chain) if last is None else last, head, x))
        end = segments[0].last
        program = read_program(segments[0].chain, first, end, head, tuple(batches[0].shape[1:]), CLASSES)
        labels = torch.randint(CLASSES, (clients, samples), generator=torch.Generator().manual_seed(7))
        return Case(segments, program, head, torch.stack(batches), labels)

    return lambda *arguments, **options: deepcopy(made(*arguments, **options))


SPANS: Sequence[Any] = (
    pytest.param({}, id="whole"),
    pytest.param({"span": (0, 4, 0)}, id="first-module"),
    pytest.param({"span": (3, 6, 1)}, id="later-module"),
    pytest.param({"span": (3, None, None)}, id="last-module"),
    # Three channels for ten classes: the head reads 2×2 positions.
    pytest.param({"span": (0, 3, 0), "shape": (2, 8, 8), "width": 2}, id="head-of-four-positions"),
    pytest.param({"name": "resnet10", "shape": (3, 16, 16)}, id="resnet"),
    # 7×7 with stride 2 and a 3×3 pool in front, and images with more than a spread gradient's few channels.
    pytest.param(
        {"name": "resnet10", "shape": (4, 72, 72), "width": 2, "span": (0, 3, 0)}, id="resnet-of-large-images"
    ),
    pytest.param({"name": "resnet10", "shape": (3, 16, 16), "span": (2, 4, 1)}, id="residual-blocks"),
    # Maxima of 2×2 parts at the exit.
    pytest.param({"name": "cnn3", "shape": (3, 16, 16)}, id="cnn3"),
    pytest.param({"name": "cnn3", "shape": (1, 8, 8), "span": (0, 2, 0)}, id="cnn3-first-module"),
)


@pytest.fixture(params=SPANS)
def case(request: pytest.FixtureRequest, make_case: Callable[..., Case]) -> Case:
    """Every kind of segment that a cascade has."""
    return make_case(**request.param)


@pytest.fixture(params=[Kernels(), Kernels(16)], ids=["exact", "padded"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    found: Kernels = request.param
    return found


def relative(found: Tensor, expected: Tensor) -> float:
    """Return ‖found − expected‖ / ‖expected‖."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


@pytest.fixture(scope="session")
def distance() -> Callable[[Tensor, Tensor], float]:
    return relative
