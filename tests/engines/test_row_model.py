"""One network for rows of several clients, which differ in their norm layers."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprophet.cascade.atoms import chain_of, explicit_chain
from fedprophet.client.part import ModelPart
from fedprophet.engines import row_model
from fedprophet.engines.row_model import Quick, RowModel, RowNorm, check_rows
from fedprophet.fast.reading import NotFusableError


def _layers(*shown: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*shown)


def _net(affine: bool = True) -> nn.Sequential:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16, 4), nn.BatchNorm1d(4, affine=affine))
    return _layers(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3, affine=affine), nn.ReLU(), *flat, nn.Dropout(0.5))


def _clients(model: nn.Module, count: int) -> list[dict[str, torch.Tensor]]:
    """Return tensors of clients whose norm layers differ, statistics and affine maps."""
    draw = torch.Generator().manual_seed(1)
    norms = [name for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)]
    state = model.state_dict()
    own = [name for name in state if name.rpartition(".")[0] in norms and state[name].is_floating_point()]
    return [state | {name: torch.rand(state[name].shape, generator=draw) + 0.5 for name in own} for _ in range(count)]


def test_by_hand():
    """(3 − 1) / √(4 + 0) · 5 + 7 = 12 for one client and (3 − 0) / √(9 + 0) · 2 − 1 = 1 for the other."""
    model = _layers(nn.BatchNorm1d(1, eps=0.0), nn.Identity())
    names = ("running_mean", "running_var", "weight", "bias")
    clients = [
        {f"0.{name}": torch.tensor([value]) for name, value in zip(names, values, strict=True)}
        for values in ((1.0, 4.0, 5.0, 7.0), (0.0, 9.0, 2.0, -1.0))
    ]
    chain = chain_of(model)
    rows = RowModel(ModelPart(chain, 0, len(chain), None), clients, torch.tensor([[0.5], [0.25]]))
    scores = rows.logits(torch.full((3, 1), 3.0), torch.tensor([1, 0, 1]))
    assert scores.flatten().tolist() == [1.25, 12.5, 1.25]


def _check_each_row(model: nn.Module, channels: int) -> None:
    """Each row has to have the scores and the gradient of its client's model."""
    chain, clients = chain_of(model), _clients(model, 3)
    owners, x = torch.tensor([2, 0, 0, 1, 2]), torch.rand(5, channels, 4, 4)
    rows = RowModel(ModelPart(chain, 0, len(chain), None), clients, None)
    with rows.still():
        together = x.clone().requires_grad_()
        scores = rows.logits(together, owners)
        scores.square().sum().backward()
    for number, owner in enumerate(owners.tolist()):
        model.load_state_dict(clients[owner])
        alone = x[number : number + 1].clone().requires_grad_()
        expected = model.eval()(alone)
        expected.square().sum().backward()
        torch.testing.assert_close(scores[number], expected[0])
        torch.testing.assert_close(together.grad[number], alone.grad[0])


@pytest.mark.parametrize("affine", [True, False])
def test_each_row_has_the_scores_and_the_gradient_of_its_clients_model(affine):
    _check_each_row(_net(affine), channels=1)


class Together(nn.Module):
    """What stands in for a convolution on a GPU, with the same arithmetic: norm layer and ReLU are part of it."""

    def __init__(self, layer: nn.Conv2d, norm: RowNorm | None, relu: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.relu = layer, norm, relu

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is None:
            y = self.layer(x)
        else:
            factor, shift = (numbers[:, :, None, None] for numbers in self.norm.numbers())
            y = F.conv2d(x, self.layer.weight, padding=1) * factor + shift
        return y.relu() if self.relu else y


class Block(nn.Module):
    """Two channels: a convolution, a norm layer and a ReLU, called as `how` says."""

    def __init__(self, how: Callable[["Block", Tensor], Tensor], bias: bool = True, inplace: bool = False) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 3, padding=1, bias=bias)
        self.norm, self.relu, self.how = nn.BatchNorm2d(2), nn.ReLU(inplace), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)

    def all(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.convolution(x)))


def _norm_read_twice(block: Block, x: Tensor) -> Tensor:
    y = block.norm(block.convolution(x))
    return block.relu(y) - y


def _convolution_read_twice(block: Block, x: Tensor) -> Tensor:
    y = block.convolution(x)
    return block.relu(block.norm(y)) - y


def _shortcut(block: Block, x: Tensor) -> Tensor:
    y = block.norm(block.convolution(x))
    y += x
    return block.relu(y)


def _with_hook(name: str) -> Block:
    block = Block(Block.all)
    block.get_submodule(name).register_forward_hook(lambda layer, given, found: found + 1)
    return block


STANDING_IN = {
    "all three": (lambda: Block(Block.all), [(True, True)]),
    "no bias, in place": (lambda: Block(Block.all, bias=False, inplace=True), [(True, True)]),
    "layers that are used twice": (lambda: Block(lambda block, x: block.all(block.all(x))), 2 * [(True, True)]),
    "no norm layer": (lambda: Block(lambda block, x: block.relu(block.convolution(x))), [(False, False)]),
    "a norm layer before": (lambda: Block(lambda block, x: block.convolution(block.norm(x))), [(False, False)]),
    "no ReLU": (lambda: Block(_shortcut), [(True, False)]),
    "a norm layer that is read twice": (lambda: Block(_norm_read_twice), [(True, False)]),
    "a convolution that is read twice": (lambda: Block(_convolution_read_twice), [(False, False)]),
    "a ReLU that is called by name": (
        lambda: Block(lambda block, x: block.relu(input=block.norm(block.convolution(x)))),
        [(True, False)],
    ),
    "a hooked ReLU": (lambda: _with_hook("relu"), [(True, False)]),
    "a hooked convolution": (lambda: _with_hook("convolution"), []),
}
"""For each model what stands in for its convolutions: whether the norm layer and the ReLU are part of it."""


@pytest.mark.parametrize("case", STANDING_IN)
def test_what_stands_in_for_convolutions_has_what_alone_follows_them(case, monkeypatch):
    make, expected = STANDING_IN[case]
    made = []

    def stand_in(layer: nn.Conv2d, norm: RowNorm | None, relu: bool) -> nn.Module:
        made.append((norm is not None, relu))
        return Together(layer, norm, relu)

    monkeypatch.setattr(row_model, "_quick_on", lambda device: Quick(lambda layer: layer.padding == (1, 1), stand_in))
    _check_each_row(_layers(make(), nn.Conv2d(2, 3, 1), nn.Flatten()), channels=2)
    assert made == expected


def test_a_norm_layer_takes_over_the_bias_before_it_by_hand():
    """2 · (x + 5) + 1 = 2 x + 11, and −1 · (x + 5) + 3 = −x − 2; without a bias the layer stays as it is."""
    norm = RowNorm(torch.tensor([[2.0], [-1.0]]), torch.tensor([[1.0], [3.0]]))
    behind = norm.behind(nn.Parameter(torch.tensor([5.0])))
    assert [numbers.flatten().tolist() for numbers in behind.numbers()] == [[2.0, -1.0], [11.0, -2.0]]
    assert not behind.numbers()[1].requires_grad
    assert norm.behind(None) is norm


def test_a_row_takes_what_is_kept_for_its_gradient():
    """A linear layer keeps its input, 8 numbers, and a ReLU its output, 4: 48 bytes. Weights do not count."""
    model = _layers(nn.Linear(8, 4), nn.ReLU())
    chain = chain_of(model)
    rows = RowModel(ModelPart(chain, 0, len(chain), None), [model.state_dict()], None)
    assert rows.row_bytes(torch.zeros(8)) == 48


class Counting(nn.Module):
    """Keeps a buffer that is no norm layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset


class InPairs(nn.Module):
    """Normalises the halves of a sample as if they were two."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.reshape(-1, 2)).reshape(-1, 4)


def _hooked() -> nn.Module:
    model = _net()
    model[1].register_forward_hook(lambda *_: None)
    return model


REFUSED = {
    "a buffer": (lambda: chain_of(_layers(nn.Linear(4, 4), Counting())), "clients that differ in more than"),
    "an explicit chain": (lambda: explicit_chain(_net()), "the norm layer '1'"),
    "a hook": (lambda: chain_of(_hooked()), "the norm layer '1'"),
    "another norm": (
        lambda: chain_of(_layers(nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3, track_running_stats=True))),
        "the norm layer '1'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_differences_between_clients_are_refused(case):
    make, reason = REFUSED[case]
    with pytest.raises(NotFusableError, match=reason):
        check_rows(make())


def test_rows_that_a_norm_layer_sees_otherwise_are_refused():
    model = _layers(InPairs())
    chain = chain_of(model)
    check_rows(chain)
    rows = RowModel(ModelPart(chain, 0, len(chain), None), [model.state_dict()], None)
    with pytest.raises(NotFusableError, match="does not read one row for each sample"):
        rows.row_bytes(torch.zeros(4))
