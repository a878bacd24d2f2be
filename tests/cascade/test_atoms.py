"""Cutting a model into atoms: the chain computes what the model computes, with the model's own tensors."""

import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm

from fedprophet.cascade.atoms import Chain, chain_of, explicit_chain
from fedprophet.errors import ModelError
from fedprophet.models import build
from fedprophet.models.normalize import Normalize

INF = math.inf


def gradients(run, model, x, training, seed=7):
    """Output, and gradients of its sum of squares for input and parameters; norm statistics are put back."""
    before = copy.deepcopy(model.state_dict())
    model.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_(True)
    torch.manual_seed(seed)
    output = run(leaf)
    output.square().sum().backward()
    found = [output.detach(), leaf.grad, *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    return found, after


def assert_same(chain: Chain, model: nn.Module, x: torch.Tensor) -> None:
    """The chain equals the model bit for bit, in training and evaluation, norm statistics included."""
    given = x.clone()
    for training in (True, False):
        model.train(training)
        # The model itself may write to what it is given; what it computes is the reference.
        expected, state = gradients(lambda z: model(z * 1), model, x, training)
        with chain.mode(0, None, training):
            found, chain_state = gradients(chain.run, model, x, training)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
        assert all(torch.equal(chain_state[name], state[name]) for name in state)
    assert torch.equal(x, given)


def assert_names(chain: Chain) -> None:
    """Every state-dict name belongs to exactly one atom, and is either shared or local."""
    names = [*chain.shared(), *chain.local()]
    assert sorted(names) == sorted(chain.model.state_dict())
    assert len(names) == len(set(names))
    for name, tensor in chain.tensors.items():
        assert tensor.data_ptr() == chain.model.state_dict()[name].data_ptr()


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("vgg16", (3, 32, 32), {"width": 8}),
        ("vgg-small", (1, 8, 8), {}),
        ("resnet10", (3, 72, 72), {"width": 8}),
        ("resnet18", (1, 8, 8), {"width": 8}),
        ("resnet34", (3, 16, 16), {"width": 4}),
        ("cnn3", (3, 8, 8), {}),
        ("cnn4", (3, 56, 56), {}),
        ("vit", (3, 16, 16), {"depth": 2, "dropout": 0.2}),
    ],
)
def test_registry_models_as_chains(name, shape, options):
    torch.manual_seed(0)
    model = build(name, shape, 5, **options)
    chain = chain_of(model)
    assert_names(chain)
    assert_same(chain, model, torch.rand(3, *shape))


def test_vgg16_atoms():
    chain = chain_of(build("vgg16", (3, 32, 32), 10))
    convolutions = (0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40)
    assert [atom.name for atom in chain.atoms] == [f"features.{n}" for n in convolutions]
    assert [atom.layers for atom in chain.atoms[:-1]] == [(f"Conv {n}",) for n in range(1, 13)]
    assert chain.atoms[-1].layers == ("Conv 13", "Linear 1", "Linear 2", "Linear 3")
    assert [atom.bounds for atom in chain.atoms] == [(0.0, INF)] * 12 + [(-INF, INF)]
    assert chain.shared(1, 2) == ("features.3.weight", "features.3.bias")
    statistics = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert chain.local(1, 2) == tuple(f"features.4.{name}" for name in statistics)
    classifier = [f"classifier.{n}.{kind}" for n in (0, 3, 6) for kind in ("weight", "bias")]
    assert chain.shared(12) == ("features.40.weight", "features.40.bias", *classifier)
    # The pool behind a convolution is the convolution's: atom 1 halves 32 × 32.
    with chain.mode(0, None, training=False):
        assert chain.run(torch.zeros(2, 3, 32, 32), 0, 2).shape == (2, 64, 16, 16)


def test_resnet34_atoms():
    with torch.device("meta"):
        chain = chain_of(build("resnet34", (3, 224, 224), 256))
    blocks = [f"layer{layer}.{block}" for layer, count in enumerate((3, 4, 6, 3), 1) for block in range(count)]
    assert [atom.name for atom in chain.atoms] == ["conv1", *blocks]
    assert chain.atoms[0].layers == ("Conv 1",)
    assert [atom.layers for atom in chain.atoms[1:16]] == [(f"BasicBlock {n}",) for n in range(1, 16)]
    assert chain.atoms[16].layers == ("BasicBlock 16", "Linear 1")
    assert all(atom.bounds == (0.0, INF) for atom in chain.atoms[:16])
    assert chain.shared(0, 1) == ("conv1.weight",)
    assert chain.shared(4, 5) == ("layer2.0.conv1.weight", "layer2.0.conv2.weight", "layer2.0.downsample.0.weight")
    assert chain.shared(16) == ("layer4.2.conv1.weight", "layer4.2.conv2.weight", "fc.weight", "fc.bias")


def test_vit_atoms():
    chain = chain_of(build("vit", (3, 16, 16), 10, depth=2, dim=32, heads=2))
    layer = "encoder.layers.encoder_layer_"
    expected = ["conv_proj", f"{layer}0.self_attention", f"{layer}0.mlp", f"{layer}1.self_attention", f"{layer}1.mlp"]
    assert [atom.name for atom in chain.atoms] == expected
    labels = [("Conv 1",), ("SelfAttention 1",), ("MLP 1",), ("SelfAttention 2",), ("MLP 2", "Linear 1")]
    assert [atom.layers for atom in chain.atoms] == labels
    assert chain.shared(0, 1) == ("class_token", "conv_proj.weight", "conv_proj.bias", "encoder.pos_embedding")
    assert set(chain.shared(4)) >= {f"{layer}1.ln_2.weight", "encoder.ln.weight", "heads.head.weight"}
    assert chain.local() == ()


class Functional(nn.Module):
    """Everything that a layer could be is a function here, and the batch size is noted first."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.conv10 = nn.Conv2d(4, 4, 3, padding=1)
        self.fc1 = nn.Linear(16, 8)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x, scale=2.0):
        assert x.dim() == 4
        batch = x.shape[0]
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.dropout(F.relu6(self.conv10(x)), 0.5, self.training)
        x = x.view(batch, -1)
        return self.fc2(F.relu(self.fc1(x))) * scale


def test_a_functional_model_follows_the_mode_of_its_atoms():
    torch.manual_seed(0)
    model, x = Functional(), torch.rand(6, 1, 4, 4)
    chain = chain_of(model.eval())
    assert not model.training
    assert [atom.name for atom in chain.atoms] == ["conv1", "conv10"]
    assert chain.atoms[1].layers == ("Conv 2", "Linear 1", "Linear 2")
    assert chain.shared(0, 1) == ("conv1.weight", "conv1.bias")
    assert chain.shared(1, 2)[:2] == ("conv10.weight", "conv10.bias")
    assert chain.atoms[0].bounds == (0.0, INF)
    assert_same(chain, model, x)
    with chain.mode(0, None, training=True):
        dropped = chain.run(x)
    assert not torch.equal(dropped, chain.run(x))


class Tokens(nn.Module):
    """Merges batch and tokens: the batch size is no size of the values in between, so it must stay alive."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        batch = x.size(0)
        x = self.second(F.relu(self.first(x.flatten(0, 1))))
        return x.view(batch, -1, 4).mean(1)


def test_a_batch_size_that_cannot_be_read_later_prevents_the_cut():
    model = Tokens()
    chain = chain_of(model)
    assert len(chain) == 1
    assert chain.atoms[0].name == "first..second"
    assert_same(chain, model, torch.rand(2, 3, 4))


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.norm(self.up(x))))


def test_residual_mlp_has_an_atom_for_each_linear_layer_and_block():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), ResidualBlock(6), ResidualBlock(6), nn.Linear(6, 2))
    chain = chain_of(model)
    assert [atom.name for atom in chain.atoms] == ["1", "3", "4", "5"]
    labels = [("Linear 1",), ("ResidualBlock 1",), ("ResidualBlock 2",), ("Linear 2",)]
    assert [atom.layers for atom in chain.atoms] == labels
    assert chain.atoms[0].bounds == (-1.0, 1.0)
    assert_names(chain)
    assert_same(chain, model, torch.rand(5, 2, 2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.one, self.two, self.leave = (nn.Linear(4, 4) for _ in range(4))
        self.two.weight = self.one.weight
        self.alias = self.enter

    def forward(self, x):
        return self.leave(F.relu(self.two(F.relu(self.one(F.relu(self.enter(x)))))))


def test_no_cut_between_two_uses_of_one_parameter():
    torch.manual_seed(0)
    model = Tied()
    chain = chain_of(model)
    assert [atom.name for atom in chain.atoms] == ["enter", "one..two", "leave"]
    assert [atom.layers for atom in chain.atoms] == [("Linear 1",), ("Block 1",), ("Linear 2",)]
    assert set(chain.shared(0, 1)) == {"enter.weight", "enter.bias", "alias.weight", "alias.bias"}
    assert set(chain.shared(1, 2)) == {"one.weight", "one.bias", "two.weight", "two.bias"}
    assert_names(chain)
    assert_same(chain, model, torch.rand(3, 4))


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.act, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.act(self.b(self.drop(self.act(self.a(x))))))


def test_a_layer_without_tensors_may_serve_two_atoms_in_two_modes():
    torch.manual_seed(0)
    model = Reused()
    chain = chain_of(model)
    assert [atom.name for atom in chain.atoms] == ["a", "b"]
    assert_same(chain, model, torch.rand(4, 4))
    x = torch.rand(4, 4)
    model.eval()
    with chain.mode(0, None, training=False):
        still = chain.run(x, 0, 1)
        with chain.mode(1, 2, training=True):
            assert model.drop.training
            assert torch.equal(chain.run(x, 0, 1), still)
            torch.manual_seed(1)
            dropped = chain.run(still, 1, 2)
        torch.manual_seed(1)
        assert torch.equal(dropped, F.dropout(F.relu(model.b(still)), 0.5, training=True))
    assert not model.drop.training


class WritesFirst(nn.Module):
    """A block that begins with writing over what it is given."""

    def __init__(self, write):
        super().__init__()
        self.write, self.inner = write, nn.Linear(3, 3)

    def forward(self, x):
        y = self.write(x)
        return y + self.inner(y)


@pytest.mark.parametrize(
    "write",
    [
        nn.ReLU(inplace=True),
        F.relu_,
        lambda x: F.relu(x, inplace=True),
        lambda x: x.relu_(),
        lambda x: F.relu(x.view(-1, 3), inplace=True),
        nn.Sequential(nn.Identity(), nn.Dropout(0.0), nn.ReLU(inplace=True)),
    ],
)
@pytest.mark.parametrize("make", [chain_of, explicit_chain])
def test_atoms_never_write_to_what_they_are_given(write, make):
    torch.manual_seed(0)
    model = nn.Sequential(WritesFirst(write), WritesFirst(write))
    chain = make(model)
    assert len(chain) == 2
    assert_same(chain, model, torch.randn(4, 3))
    z = torch.randn(4, 3)
    kept = z.clone()
    chain.run(z, 1, 2)
    assert torch.equal(z, kept)


def test_a_result_that_is_thrown_away_still_counts_where_it_was_written_in_place():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            x = F.hardtanh(self.a(x))
            x.sub_(1.0)
            return self.b(x)

    model = Model()
    chain = chain_of(model)
    assert chain.atoms[0].bounds == (-INF, INF)
    assert_same(chain, model, torch.rand(4, 3))


class Assigns(nn.Module):
    """Python's own in-place operators: a second name of the tensor sees what they do."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 2.0]))
        self.steps, self.seen = 0, None

    def forward(self, x):
        self.steps += 1
        x += 1.0
        x = self.enter(x)
        other = x
        x *= self.mask
        x[:, 1] = 5.0
        x /= 2.0
        x -= other
        self.seen = x
        return self.leave(x + other)


@pytest.mark.parametrize("make", [chain_of, lambda model: explicit_chain([("all", model)])])
def test_assignments_keep_their_meaning_and_leave_the_model_as_it_was(make):
    torch.manual_seed(0)
    model = Assigns()
    chain = make(model)
    assert (model.steps, model.seen) == (0, None)
    assert_same(chain, model, torch.rand(4, 3))
    x = torch.rand(4, 3)
    before = torch.clone(x)
    chain.run(x)
    assert torch.equal(x, before)


def test_no_copy_where_nothing_is_overwritten():
    for name, shape in {"vgg16": (3, 32, 32), "resnet18": (3, 32, 32), "vit": (3, 32, 32)}.items():
        with torch.device("meta"):
            chain = chain_of(build(name, shape, 10))
        assert not any(atom.body.writes_input for atom in chain.atoms)


def test_constants_of_forward_follow_the_device_of_the_input():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.b(self.a(x) * torch.tensor([1.0, 2.0, 3.0])) + torch.arange(3)

    model = Model()
    chain = chain_of(model)
    assert len(chain) == 2
    assert "_tensor_constant0" not in vars(model)
    assert_same(chain, model, torch.rand(4, 3))
    model.to("meta")
    assert chain.run(torch.empty(4, 3, device="meta")).device.type == "meta"


class Raw(nn.Module):
    """Tensors that no layer of torch holds, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 4))
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("factor", torch.full((1,), 2.0), persistent=False)

    def forward(self, x):
        x = F.relu(F.linear(x, self.first) + self.shift)
        rows = self.first.shape[0]
        return (x * self.factor) @ self.second.t() / rows + torch.tensor([1.0, 2.0], dtype=x.dtype)


def test_raw_parameters_and_buffers_are_the_models_live_ones():
    torch.manual_seed(0)
    model, x = Raw(), torch.rand(5, 3)
    chain = chain_of(model)
    assert [(atom.name, atom.layers) for atom in chain.atoms] == [("first", ("Linear 1",)), ("second", ("Matmul 1",))]
    assert (chain.shared(), chain.local()) == (("first", "second"), ("shift",))
    assert [id(p) for p in chain.atoms[1].parameters()] == [id(model.second)]
    with torch.no_grad():
        chain.load({"shift": torch.ones(4), "second": torch.zeros(2, 4)})
    assert torch.equal(chain.run(x), torch.tensor([1.0, 2.0]).expand(5, 2))
    chain.load({"second": torch.rand(2, 4)})
    assert_same(chain, model, x)
    # Moving a model replaces its buffers; loading and the chain must follow.
    model.double()
    chain.load({"shift": torch.full((4,), 3.0)})
    assert chain.run(x.double()).dtype == torch.float64
    assert_same(chain, model, x.double())


def test_an_atom_can_be_called_with_other_tensors():
    torch.manual_seed(0)
    model = Raw()
    atom = chain_of(model).atoms[0]
    tensors = {
        name: torch.empty_like(t, device="meta") for name, t in (*atom.named_parameters(), *atom.named_buffers())
    }
    assert len(tensors) == 2
    assert functional_call(atom, tensors, (torch.empty(5, 3, device="meta"),)).shape == (5, 4)
    assert atom(torch.rand(5, 3)).device.type == "cpu"


def test_a_copied_chain_has_tensors_of_its_own():
    torch.manual_seed(0)
    for model, x in ((build("vgg-small", (1, 8, 8), 3), torch.rand(4, 1, 8, 8)), (Raw(), torch.rand(4, 3))):
        chain = chain_of(model.eval())
        other = copy.deepcopy(chain)
        before = chain.run(x)
        assert torch.equal(other.run(x), before)
        other.load({name: torch.zeros_like(other.tensors[name]) for name in other.shared()})
        assert torch.equal(chain.run(x), before)
        assert not torch.equal(other.run(x), before)


def test_tensors_are_those_that_the_model_has_now():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    chain = chain_of(model)
    before = dict(chain.tensors)
    assert {name: id(tensor) for name, tensor in chain.tensors.items()} == {n: id(t) for n, t in before.items()}
    model[0].weight = nn.Parameter(torch.ones(2, 1, 3, 3))
    model[1].running_mean = torch.full((2,), 7.0)
    model.to(torch.float64)
    assert {name: id(tensor) for name, tensor in chain.tensors.items()} == {
        name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()
    }
    assert chain.tensors["1.running_mean"].tolist() == [7.0, 7.0]
    other = copy.deepcopy(chain)
    assert other.tensors["0.weight"] is other.model[0].weight
    assert other.tensors["0.weight"] is not model[0].weight


def test_tensors_of_a_model_with_a_state_dict_of_its_own():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    model.register_state_dict_post_hook(lambda module, state, prefix, data: state.update(total=module[1].weight.sum()))
    chain = chain_of(model)
    first = chain.tensors["total"].item()
    with torch.no_grad():
        model[1].weight += 1
    assert chain.tensors["total"].item() == pytest.approx(first + 8)


def test_layers_of_torch_that_give_several_tensors_are_not_cut_behind():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lstm = nn.Embedding(9, 6), nn.LSTM(6, 6, batch_first=True)
            self.attend, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

        def forward(self, x):
            x, _ = self.lstm(self.embed(x))
            x, _ = self.attend(x, x, x, need_weights=False)
            left, right = x.chunk(2, dim=1)
            return self.head((left + right).mean(1))

    torch.manual_seed(0)
    model, x = Recurrent(), torch.randint(0, 9, (3, 4))
    chain = chain_of(model)
    labels = [("Embedding 1",), ("LSTM 1",), ("MultiheadAttention 1", "Linear 1")]
    assert [atom.layers for atom in chain.atoms] == labels
    for end in (1, 2, 3):
        assert isinstance(chain.run(x, 0, end), torch.Tensor)
    assert torch.equal(chain.run(x), model(x))


@pytest.mark.parametrize(
    ("collapse", "atoms"),
    [
        (lambda x: x.view(x.size(0), -1)[:, :4], 1),
        (lambda x: x.reshape((x.shape[0], -1))[:, :4], 1),
        (lambda x: F.adaptive_avg_pool2d(x, 1).squeeze(), 1),
        (lambda x: F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1), 1),
        (lambda x: x.mean((2, 3)), 1),
        (lambda x: x.mean(3).amax(dim=2), 1),
        (lambda x: x.sum(dim=[2, 3]), 1),
        (lambda x: x[:, :, 0, 0], 1),
        (lambda x: x.select(3, 0).select(2, 0), 1),
        (lambda x: torch.einsum("nchw->nc", x), 1),
        # Tokens, maps of one pixel and channels last are not vectors yet: each linear layer is an atom.
        (lambda x: x.flatten(2).transpose(1, 2), 3),
        (lambda x: x.mean((2, 3), keepdim=True).permute(0, 2, 3, 1), 3),
        (lambda x: x.permute(0, 2, 3, 1), 3),
        (lambda x: x.mean((2, 3)).unsqueeze(1), 3),
    ],
)
def test_the_classifier_begins_where_maps_become_vectors(collapse, atoms):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.one, self.two = nn.Conv2d(1, 4, 1), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.two(F.relu(self.one(collapse(self.conv(x)))))

    torch.manual_seed(0)
    model = Model()
    chain = chain_of(model)
    assert len(chain) == atoms
    assert_same(chain, model, torch.rand(3, 1, 2, 2))


class Dense(nn.Module):
    """Every layer reads what all the layers before it gave."""

    def __init__(self, width, growth):
        super().__init__()
        self.steps = nn.ModuleList(self.step(width + n * growth, growth) for n in range(2))

    @staticmethod
    def step(width, growth):
        return nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, growth, 3, padding=1))

    def forward(self, x):
        seen = [x]
        for step in self.steps:
            seen.append(step(torch.cat(seen, 1)))
        return torch.cat(seen, 1)


class Squeeze(nn.Module):
    """A vector inside a block is no classifier."""

    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.down, self.up = nn.Linear(width, 2), nn.Linear(2, width)

    def forward(self, x):
        batch, channels, _, _ = x.size()
        y = self.norm(self.conv(x))
        weights = torch.sigmoid(self.up(F.relu(self.down(y.mean((2, 3)))))).view(batch, channels, 1, 1)
        y = y * weights
        y += x
        return F.relu(y, inplace=True)


class Preactivated(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(width), nn.Conv2d(width, out, 3, padding=1)
        self.again, self.shortcut = nn.Conv2d(out, out, 3, padding=1), nn.Conv2d(width, out, 1)

    def forward(self, x):
        x = F.relu(self.norm(x))
        return self.again(F.relu(self.conv(x))) + self.shortcut(x)


class Standardised(nn.Conv2d):
    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


@pytest.mark.parametrize(
    ("block", "atoms"),
    [
        (Dense(4, 2), [("0", ("Conv 1",)), ("1.steps", ("Dense 1", "Linear 1"))]),
        (Squeeze(4), [("0", ("Conv 1",)), ("1", ("Squeeze 1", "Linear 1"))]),
        # Its norm and activation come before its first matrix: they belong to the atom before.
        (Preactivated(4, 4), [("0", ("Conv 1",)), ("1", ("Preactivated 1", "Linear 1"))]),
        (Standardised(4, 4, 3, padding=1), [("0", ("Conv 1",)), ("1", ("Conv 2", "Linear 1"))]),
        (
            weight_norm(nn.Conv2d(4, 4, 1)),
            [("0", ("Conv 1",)), ("1", ("Conv 2", "Linear 1"))],
        ),
    ],
)
def test_blocks_that_people_write(block, atoms):
    torch.manual_seed(0)
    width = 8 if isinstance(block, Dense) else 4
    pool = nn.AdaptiveAvgPool2d(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), block, nn.BatchNorm2d(width), pool, nn.Flatten(), nn.Linear(width, 2))
    chain = chain_of(model)
    assert [(atom.name, atom.layers) for atom in chain.atoms] == atoms
    assert not any(atom.body.writes_input for atom in chain.atoms)
    assert ("1.norm.weight" in chain.local(0, 1)) == isinstance(block, Preactivated)
    assert_names(chain)
    assert_same(chain, model, torch.rand(3, 3, 6, 6))


def test_mixer_tokens_stay_atoms_until_they_become_vectors():
    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.channels = nn.Linear(4, 4), nn.Linear(6, 6)

        def forward(self, x):
            x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
            return x + self.channels(x)

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.mix, self.head = nn.Conv2d(1, 6, 2, stride=2), Mix(), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.mix(self.stem(x).flatten(2).permute(0, 2, 1)).mean(dim=1))

    model = Mixer()
    chain = chain_of(model)
    assert [atom.name for atom in chain.atoms] == ["stem", "mix.tokens", "mix.channels"]
    assert chain.atoms[2].layers == ("Linear 2", "Linear 3")
    assert_same(chain, model, torch.rand(2, 1, 4, 4))


def test_a_subclass_of_a_layer_is_that_layer():
    class OwnNorm(nn.BatchNorm2d):
        pass

    model = nn.Sequential(nn.Conv2d(1, 2, 3), OwnNorm(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    chain = chain_of(model)
    assert [atom.name for atom in chain.atoms] == ["0"]
    assert {name.split(".")[0] for name in chain.local()} == {"1"}
    assert int(model[1].num_batches_tracked) == 0
    assert_same(chain, model, torch.rand(2, 1, 4, 4))


def test_norms_that_keep_no_statistics_are_shared():
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    chain = chain_of(model)
    assert {name.split(".")[0] for name in chain.shared()} == {"0", "1", "4"}
    assert {name.split(".")[0] for name in chain.local()} == {"2"}


def test_tensors_that_no_atom_uses_belong_to_the_last():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.spare = nn.Identity()
    model.spare.weight = nn.Parameter(torch.zeros(3))
    chain = chain_of(model)
    assert chain.shared(len(chain) - 1)[-1] == "spare.weight"
    assert_names(chain)


@pytest.mark.parametrize(
    ("layers", "bounds"),
    [
        ([nn.ReLU()], (0.0, INF)),
        ([nn.ReLU6(), nn.MaxPool2d(2)], (0.0, 6.0)),
        ([nn.Hardtanh(-0.5, 2.0), nn.Identity()], (-0.5, 2.0)),
        ([nn.Sigmoid(), nn.AvgPool2d(2), nn.Dropout(0.5), nn.Flatten()], (0.0, 1.0)),
        ([nn.Hardtanh(1.0, 2.0), nn.AvgPool2d(2, padding=1)], (0.0, 2.0)),
        ([nn.ReLU6(), nn.AvgPool2d(2, divisor_override=1)], (-INF, INF)),
        ([nn.ReLU(), nn.BatchNorm2d(2)], (-INF, INF)),
        ([nn.LeakyReLU()], (-INF, INF)),
        ([nn.ReLU(), nn.Conv2d(2, 2, 1)], (-INF, INF)),
    ],
)
def test_bounds_of_what_an_atom_gives(layers, bounds):
    model = nn.Sequential(nn.Conv2d(1, 2, 1), *layers)
    assert chain_of(model).atoms[-1].bounds == bounds
    assert explicit_chain([("all", model)]).atoms[0].bounds == bounds
    assert explicit_chain(model).atoms[-1].bounds == bounds
    low, high = bounds
    with torch.no_grad():
        output = model.eval()(100 * torch.randn(20, 1, 4, 4))
    assert low <= float(output.min())
    assert float(output.max()) <= high


@pytest.mark.parametrize(
    ("function", "bounds"),
    [
        (lambda x: F.hardtanh(x, 0.0, 3.0).flatten(1), (0.0, 3.0)),
        (lambda x: torch.clamp(x, 0, 1), (-INF, INF)),
        (lambda x: F.dropout(torch.sigmoid(x)), (0.0, INF)),
        (lambda x: F.dropout(x.tanh(), training=False), (-1.0, 1.0)),
        (lambda x: F.adaptive_avg_pool2d(F.relu(x), 1)[:, :, 0, 0], (0.0, INF)),
        (lambda x: F.relu(x) + 1, (-INF, INF)),
    ],
)
def test_bounds_of_functions(function, bounds):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 1)

        def forward(self, x):
            return function(self.conv(x))

    assert chain_of(Model()).atoms[-1].bounds == bounds


def test_mode_puts_back_exactly_the_flags_it_found():
    model = build("vgg-small", (1, 8, 8), 3)
    chain = chain_of(model)
    model.features[1].eval()
    chain.atoms[2].eval()
    before = [module.training for module in (*model.modules(), *chain.atoms)]

    def stop():
        with chain.mode(1, 3, training=False):
            assert [atom.training for atom in chain.atoms] == [True, False, False, True, True, True, True]
            assert model.features[0].training
            assert not model.features[4].training
            raise KeyError

    with pytest.raises(KeyError):
        stop()
    assert [module.training for module in (*model.modules(), *chain.atoms)] == before


def test_a_module_that_sets_its_flag_in_its_own_way_keeps_that_way():
    heard = []

    class Layer(nn.Linear):
        def __setattr__(self, name, value):
            if name == "training":
                heard.append(value)
            super().__setattr__(name, value)

    chain = explicit_chain([("layer", Layer(2, 2)), ("rest", nn.Dropout())])
    heard.clear()
    with chain.mode(0, 2, training=False):
        assert heard == [False]
        assert not chain.atoms[1].calls[0].training
    assert heard == [False, True]


def test_the_copy_of_a_chain_has_modes_of_its_own():
    chain = chain_of(build("vgg-small", (1, 8, 8), 3))
    with chain.mode(0, 2, training=False):
        pass
    other = copy.deepcopy(chain)
    with other.mode(0, 2, training=False):
        assert not other.model.features[0].training
        assert chain.model.features[0].training
    with chain.mode(0, 2, training=False):
        assert other.model.features[0].training
        assert not chain.model.features[0].training


def test_cutting_leaves_mixed_flags_and_random_state_alone():
    model = Reused().eval()
    model.drop.train()
    state = torch.get_rng_state()
    chain_of(model)
    assert [module.training for module in model.modules()] == [False, False, False, False, True]
    assert torch.equal(torch.get_rng_state(), state)


def test_modules_are_the_layers_that_are_called():
    model = build("vgg-small", (1, 8, 8), 3)
    assert chain_of(model).modules(1, 3) == tuple(model.features[3:10])
    reused = Reused()
    assert chain_of(reused).modules() == (reused.a, reused.act, reused.drop, reused.b)


def test_load_takes_all_or_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    chain = chain_of(model)
    kept = model[0].weight.clone()
    with pytest.raises(ModelError, match=r"'0.wieght'.*Did you mean '0.weight'"):
        chain.load({"0.weight": torch.zeros(2, 2), "0.wieght": torch.zeros(2, 2)})
    with pytest.raises(ModelError, match=r"'1.bias' has shape \(3,\), the model's has \(2,\)"):
        chain.load({"0.weight": torch.zeros(2, 2), "1.bias": torch.zeros(3)})
    assert torch.equal(model[0].weight, kept)
    chain.load({"0.weight": torch.full((2, 2), 5.0)})
    assert model[0].weight.tolist() == [[5.0, 5.0], [5.0, 5.0]]
    assert model[0].weight.requires_grad


@pytest.mark.parametrize(("first", "last"), [(-1, 1), (0, 3), (2, 1)])
def test_a_range_outside_the_chain_is_an_error(first, last):
    chain = chain_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(ModelError, match="2 atoms"):
        chain.run(torch.zeros(1, 2), first, last)
    assert chain.run(torch.ones(1, 2), 1, 1).tolist() == [[1.0, 1.0]]


def test_normalisation_is_the_first_free_atom():
    torch.manual_seed(0)
    model = build("cnn3", (3, 8, 8), 4).eval()
    normalize = Normalize([0.5, 0.4, 0.3], [0.2, 0.1, 0.5])
    chain = chain_of(model, normalize)
    assert (chain.atoms[0].name, chain.atoms[0].layers) == ("normalize", ())
    assert (chain.shared(0, 1), chain.local(0, 1)) == ((), ())
    assert len(chain) == 3
    assert_names(chain)
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(chain.run(x), model(normalize(x)))
    assert chain.run(torch.full((1, 3, 1, 1), 0.5), 0, 1).flatten().tolist() == pytest.approx([0.0, 1.0, 0.4])
    explicit = explicit_chain([("all", model)], normalize)
    assert [atom.name for atom in explicit.atoms] == ["normalize", "all"]


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        if x.sum() > 0:
            return self.inner(x)
        return x


def test_a_model_that_cannot_be_traced_says_where():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), Gate()))
    with pytest.raises(ModelError) as error:
        chain_of(model)
    text = str(error.value)
    assert "submodule '1.1'" in text
    assert "test_atoms.py, line" in text
    assert "if x.sum() > 0:" in text
    assert "explicit_chain" in text


class Two(nn.Module):
    def forward(self, images, masks, scale=1.0):
        return images * masks * scale


class Keyword(nn.Module):
    def forward(self, x, *, mask):
        return x * mask


class Pair(nn.Module):
    def forward(self, x):
        return x, 2 * x


class Halves(nn.Module):
    def forward(self, x):
        return x.chunk(2)


class Dice(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.inner, self.draw = nn.Linear(2, 2), draw

    def forward(self, x):
        return self.inner(x) if self.draw() < 0.5 else x


class OnlyInTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        x = self.one(x)
        return self.two(x) if self.training else x


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Two(), "takes images, masks; a chain needs a model with exactly one input"),
        (Keyword(), "takes x, mask"),
        (Pair(), "Pair gives a tuple, not one tensor"),
        (Halves(), "does not give one tensor"),
        (nn.Identity(), None),
        (Dice(lambda: float(torch.rand(()))), "random numbers"),
        (Dice(random.random), "random numbers"),
        (OnlyInTraining(), "2 atoms in training and 1 in evaluation"),
        (nn.LazyLinear(3), "run it once"),
    ],
)
def test_models_that_are_no_chain(model, text):
    if text is None:
        assert len(chain_of(model)) == 1
        return
    with pytest.raises(ModelError, match=text):
        chain_of(model)


def test_modes_that_use_other_layers_are_no_chain():
    class Swap(OnlyInTraining):
        def forward(self, x):
            return self.one(x) if self.training else self.two(x)

    with pytest.raises(ModelError, match=r"'one' \(Linear 1\), the other has 'two' \(Linear 1\)"):
        chain_of(Swap())


def test_explicit_chain_of_named_parts():
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    head = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    chain = explicit_chain([("body.stem", stem), ("head", head)])
    assert [(atom.name, atom.layers) for atom in chain.atoms] == [
        ("body.stem", ("Conv 1",)),
        ("head", ("Linear 1", "Linear 2")),
    ]
    assert chain.shared(0, 1) == ("body.stem.0.weight", "body.stem.0.bias")
    assert chain.shared(1) == ("head.1.weight", "head.1.bias", "head.3.weight", "head.3.bias")
    assert chain.atoms[0].bounds == (0.0, INF)
    assert_names(chain)
    assert_same(chain, chain.model, torch.rand(4, 1, 4, 4))
    assert chain.modules(0, 1) == tuple(stem)
    x = torch.rand(2, 1, 4, 4)
    assert torch.equal(chain.model(x), head(stem(x)))


def test_explicit_chain_of_a_sequential_keeps_its_names_and_its_reused_layers():
    torch.manual_seed(0)
    relu, drop = nn.ReLU(inplace=True), nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(3, 3), relu, drop, ResidualBlock(3), relu, drop, nn.Linear(3, 2))
    chain = explicit_chain(model)
    assert chain.model is model
    assert [atom.name for atom in chain.atoms] == [str(n) for n in range(7)]
    labels = [("Linear 1",), (), (), ("ResidualBlock 1",), (), (), ("Linear 2",)]
    assert [atom.layers for atom in chain.atoms] == labels
    # A part without layers of its own passes on the range of the part before it.
    assert [atom.bounds for atom in chain.atoms[:3]] == [(-INF, INF), (0.0, INF), (0.0, INF)]
    assert_names(chain)
    assert_same(chain, model, torch.rand(4, 3))


def test_explicit_parts_that_cannot_be_traced():
    class Careless(Gate):
        def forward(self, x):
            return super().forward(x.mul_(2.0))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Hardtanh(), Careless(), nn.Linear(2, 2))
    chain = explicit_chain(model)
    assert chain.atoms[1].bounds == (-INF, INF)
    assert chain.atoms[1].layers == ("Linear 1",)
    assert chain.modules(1, 2) == (model[1].inner,)
    assert_same(chain, model, torch.rand(3, 2))


def test_an_explicit_part_with_several_outputs_is_named():
    chain = explicit_chain([("one", nn.Linear(2, 2)), ("two", Pair())])
    with pytest.raises(ModelError, match=r"'two' must return one tensor, not tuple"):
        chain.run(torch.zeros(1, 2))


def test_explicit_chains_that_do_not_fit():
    linear = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="at least one part"):
        explicit_chain([])
    with pytest.raises(ModelError, match="at least one part"):
        explicit_chain(nn.Sequential())
    for names in (("a", "a"), ("a", "a.b"), ("a.b", "a"), ("", "b"), ("forward", "b"), ("a..b", "c")):
        with pytest.raises(ModelError, match="part name"):
            explicit_chain([(names[0], nn.Linear(2, 2)), (names[1], nn.Linear(2, 2))])
    for parts, wrong in (
        ([nn.Flatten(), linear], r"part 1 of .* is a Flatten, not a pair: pass \(\"name\", module\) pairs"),
        ([("one", linear), "two"], "part 2 of .* is a str, not a pair"),
        ([("one", nn.Linear)], r"part 'one' is the class Linear\. Pass a module of it: Linear\(…\)"),
        (linear, "made of parts, not of one Linear"),
    ):
        with pytest.raises(ModelError, match=wrong):
            explicit_chain(parts)
    with pytest.raises(ModelError, match=r"'one.weight' is used by atoms 'one' and 'two'"):
        explicit_chain([("one", linear), ("two", linear)])


def test_a_chain_is_where_it_computes_even_if_tensors_are_put_aside():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    chain = explicit_chain(model)
    assert chain.device.type == "cpu"
    model[1].to("meta")
    assert chain.device.type == "meta"
    assert chain.take(torch.rand(5, 4)).device.type == "meta"
