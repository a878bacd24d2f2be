"""One network for rows of several clients, which differ in their norm layers."""

import pytest
import torch
from torch import nn

from fedprophet.cascade.atoms import chain_of, explicit_chain
from fedprophet.client.part import ModelPart
from fedprophet.engines.row_model import RowModel, check_rows
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


@pytest.mark.parametrize("affine", [True, False])
def test_each_row_has_the_scores_and_the_gradient_of_its_clients_model(affine):
    model = _net(affine)
    chain, clients = chain_of(model), _clients(model, 3)
    owners, x = torch.tensor([2, 0, 0, 1, 2]), torch.rand(5, 1, 4, 4)
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
