"""Bytes of small computations, counted by hand; and what is predicted against what the allocator says."""

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprophet.cascade import measure
from fedprophet.cascade.measure import CUDA, Account, LiveBytes, account_of, bytes_of, measured_peak, without_allocating
from fedprophet.storage.mapped import empty_in_file

CPU = torch.device("cpu")
KB = 1000 * 4
"""Bytes of a thousand float32."""


def _tensor(thousands: int) -> Tensor:
    return torch.empty(1000 * thousands)


def test_live_bytes_are_those_of_the_tensors_that_are_alive() -> None:
    """a (1), b (2): 3. c = a + 1 (1): 4. Without a: 3, and d (1): 4 again, so the peak stays."""
    with LiveBytes() as live:
        a, b = _tensor(1), _tensor(2)
        assert live.now == 3 * KB
        c = a + 1
        assert (live.now, live.peak) == (4 * KB, 4 * KB)
        del a
        assert live.now == 3 * KB
        d = c * 2
        assert (live.now, live.peak) == (4 * KB, 4 * KB)
        del b, c, d
    assert (live.now, live.peak) == (0, 4 * KB)


def test_a_view_costs_nothing_and_keeps_what_it_is_a_view_of() -> None:
    with LiveBytes() as live:
        a = _tensor(3)
        view, other = a[:10], a.view(3, 1000)
        assert live.now == 3 * KB
        del a, other
        assert live.now == 3 * KB
        del view
        assert live.now == 0
        b = _tensor(2)
        b.add_(1)
        assert (live.now, live.peak) == (2 * KB, 3 * KB)


def test_memory_that_is_a_file_counts_only_where_it_is_held() -> None:
    held = empty_in_file((1000,), torch.float32)
    with LiveBytes([held]) as live:
        file = empty_in_file((2, 1000), torch.float32)
        file[1] = held[:1000]
        assert (live.now, live.peak) == (KB, KB)
        rows = file[torch.tensor([1, 1, 0])]
        assert live.now == 4 * KB
        del rows
    assert torch.equal(file[1], held)


def test_what_is_held_from_the_beginning_counts_once() -> None:
    held = _tensor(2)
    with LiveBytes([held, held[:5], held.view(2, 1000)]) as live:
        assert live.now == 2 * KB
        other = held + 1
        assert (live.now, live.peak) == (4 * KB, 4 * KB)
        del other
    assert bytes_of([held, held[:5], _tensor(1)]) == 3 * KB


def test_autograd_keeps_what_it_needs_for_the_way_back() -> None:
    """x (1), w (1), and sin's argument x·w: 3; sin's result 4. Backward frees; the gradients of x and w stay."""
    x, w = (_tensor(1).requires_grad_() for _ in range(2))
    with LiveBytes([x, w]) as live:
        y = (x * w).sin()
        assert live.now == 4 * KB
        y.backward(y.detach())
        assert live.now == 5 * KB
        del y
        assert live.now == 4 * KB


def test_an_operation_of_the_table_is_counted_at_its_own_peak() -> None:
    transients = {torch.ops.aten.add.Tensor: lambda arguments, result: 7 * KB}
    with LiveBytes(account=Account(transients)) as live:
        a = _tensor(2)
        b = a + a
        assert (live.now, live.peak) == (4 * KB, 9 * KB)
        del b


def test_sizes_are_rounded_up_to_what_an_allocator_gives() -> None:
    """1 byte and 512 take 512, 513 take 1024; nothing takes nothing."""
    with LiveBytes(account=CUDA) as live:
        kept = [torch.empty(size, dtype=torch.uint8) for size in (1, 512, 513, 0)]
        assert live.now == 512 + 512 + 1024
        del kept[2]
    assert (live.now, live.peak) == (1024, 2048)
    assert [account_of(torch.device(name)) for name in ("cuda:1", "cpu", "meta")] == [CUDA, measure.CPU, measure.CPU]


def test_a_measurement_sees_what_was_allocated_at_a_time() -> None:
    """Two of 2 at a time, then one of 3: the peak is 4."""

    def compute() -> None:
        a, b = _tensor(2), _tensor(2)
        del a, b
        _tensor(3)

    assert measured_peak(compute, CPU) == pytest.approx(4 * KB, rel=0.01)
    assert measured_peak(lambda: None, CPU) == 0


def test_a_measurement_sees_workspaces_that_no_tensor_shows() -> None:
    x, layer = torch.rand(8, 16, 32, 32), nn.Conv2d(16, 16, 3, padding=1)
    with torch.no_grad():
        assert measured_peak(lambda: layer(x), CPU) > 1.5 * x.nbytes


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "3 channels": (lambda: nn.Conv2d(3, 64, 3, padding=1), (32, 3, 32, 32)),
    "square": (lambda: nn.Conv2d(64, 64, 3, padding=1), (32, 64, 16, 16)),
    "wider": (lambda: nn.Conv2d(64, 128, 3, padding=1), (32, 64, 16, 16)),
    "large weight": (lambda: nn.Conv2d(256, 256, 3, padding=1), (8, 256, 4, 4)),
    "strided": (lambda: nn.Conv2d(64, 128, 3, 2, 1), (32, 64, 16, 16)),
    "strided 1x1": (lambda: nn.Conv2d(64, 128, 1, 2, bias=False), (32, 64, 16, 16)),
    "17 channels": (lambda: nn.Conv2d(17, 17, 3, padding=1), (32, 17, 16, 16)),
    "20 channels": (lambda: nn.Conv2d(20, 50, 3, padding=1), (32, 20, 16, 16)),
    "24 channels": (lambda: nn.Conv2d(24, 17, 3, padding=1), (32, 24, 16, 16)),
    "50 channels": (lambda: nn.Conv2d(50, 24, 3, padding=1), (32, 50, 16, 16)),
    "large weight, 20 channels": (lambda: nn.Conv2d(20, 500, 3, padding=1), (8, 20, 4, 4)),
    "few results": (lambda: nn.Conv2d(40, 9, 3, padding=1), (32, 40, 16, 16)),
    "image, 20 channels": (lambda: nn.Conv2d(1, 20, 3, padding=1), (32, 1, 16, 16)),
    "strided 1x1, 3 channels": (lambda: nn.Conv2d(3, 24, 1, 2), (32, 3, 16, 16)),
    "first of a ResNet": (lambda: nn.Conv2d(3, 64, 7, 2, 3, bias=False), (8, 3, 64, 64)),
    "norm": (lambda: nn.BatchNorm2d(64), (32, 64, 16, 16)),
    "linear": (lambda: nn.Linear(512, 1024), (64, 512)),
    "max pool": (lambda: nn.MaxPool2d(2), (32, 64, 16, 16)),
    "average pool": (lambda: nn.AdaptiveAvgPool2d(4), (32, 64, 16, 16)),
    "relu in place": (lambda: nn.Sequential(nn.Conv2d(16, 64, 1), nn.ReLU(inplace=True)), (32, 16, 16, 16)),
}


# Without a gradient at its input a pool has none at all, and torch predicts one for a norm that it does not make.
FIRST = [name for name in LAYERS if name not in ("norm", "max pool", "average pool")]


@pytest.mark.parametrize(("name", "wanted"), [*((name, False) for name in FIRST), *((name, True) for name in LAYERS)])
def test_a_layers_step_takes_what_is_predicted(name: str, wanted: bool) -> None:
    """Forward, then backward; with and without a gradient at the input."""
    build, shape = LAYERS[name]
    layer = build()

    def compute() -> None:
        output = layer(torch.rand(shape).requires_grad_(wanted))
        output.backward(torch.ones_like(output))
        layer.zero_grad()

    with without_allocating(list(layer.modules())), LiveBytes([*layer.parameters(), *layer.buffers()]) as live:
        compute()
    held = bytes_of([*layer.parameters(), *layer.buffers()])
    assert measured_peak(compute, CPU) + held == pytest.approx(live.peak, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "weight"), [((32, 3, 16, 16), (256, 3, 3, 3)), ((4, 16, 8, 8), (512, 16, 3, 3))], ids=["image", "wider"]
)
def test_the_result_of_a_convolution_is_there_twice_while_it_is_copied_back(shape, weight) -> None:
    x, w = torch.rand(shape), torch.rand(weight)
    with torch.no_grad(), LiveBytes() as live:
        result = torch.conv2d(x, w, padding=1)
    assert measured_peak(lambda: torch.conv2d(x, w, padding=1), CPU) == live.peak == 2 * result.nbytes


def test_at_an_image_a_strided_convolution_has_rows_of_products() -> None:
    """64 outputs · 3 channels · 64 rows · 7 columns are 344,064 bytes: where images are few, a large part."""
    gradient, x, weight = torch.rand(2, 64, 32, 32), torch.rand(2, 3, 64, 64), torch.rand(64, 3, 7, 7)

    def compute() -> None:
        backward, asked = torch.ops.aten.convolution_backward, [True, False, False]
        backward(gradient, x, weight, None, [2, 2], [3, 3], [1, 1], False, [0, 0], 1, asked)

    compute()
    with LiveBytes() as live:
        compute()
    assert measured_peak(compute, CPU) == pytest.approx(live.peak, rel=0.07)


def test_a_prediction_allocates_nothing() -> None:
    """A layer and a batch of petabytes are predicted; and the module has its own tensors back."""
    with torch.device("meta"):
        huge = nn.Linear(10**8, 10**8, bias=False)
    before = huge.weight
    with without_allocating([huge]), LiveBytes() as live:
        huge(torch.rand(10**6, 10**8))
    assert live.peak == 4 * (10**16 + 2 * 10**14)
    assert huge.weight is before

    small = nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64))
    tensors = {**dict(small.named_parameters()), **dict(small.named_buffers())}
    values = {name: tensor.clone() for name, tensor in tensors.items()}

    def predict() -> None:
        with without_allocating(list(small.modules())), LiveBytes():
            F.relu(small(torch.rand(64, 64, 32, 32))).sum().backward()

    assert measured_peak(predict, CPU) < 10_000
    for name, tensor in (*small.named_parameters(), *small.named_buffers()):
        assert tensor is tensors[name]
        assert torch.equal(tensor, values[name])
    assert all(parameter.grad is None for parameter in small.parameters())


def test_tied_parameters_stay_tied_in_a_prediction() -> None:
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = layer.weight
    with without_allocating([layer, other]):
        assert other.weight is layer.weight
    assert other.weight is layer.weight


def test_tensors_that_stay_do_not_follow_what_counted_them() -> None:
    """A model is counted in every training of a run."""
    model, counts = nn.Linear(3, 3), []
    for _ in range(3):
        with LiveBytes(model.parameters()) as live:
            kept = model(torch.ones(1, 3))
        counts.append(len(weakref.finalize._registry))  # type: ignore[attr-defined]
        assert live.now >= 4 * (9 + 3)
    assert len(set(counts)) == 1
    assert kept is not None
