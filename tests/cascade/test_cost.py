"""The cost model of the paper: hand-computed on small models, to the integer on the paper's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedprophet.cascade.atoms import chain_of, explicit_chain
from fedprophet.cascade.cost import COPIES, cost_of
from fedprophet.cascade.heads import build_head, head_cost
from fedprophet.cascade.partition import partition, smallest_budget
from fedprophet.errors import ConfigError, ModelError
from fedprophet.models import MODELS, build
from fedprophet.models.normalize import Normalize


class Residual(nn.Module):
    """Two branches that read the same tensor."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.shortcut = nn.Conv2d(2, 3, 1, bias=False)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)) + self.shortcut(x))


def tiny_parts():
    return [
        ("stem", nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2))),
        ("block", Residual()),
        ("classifier", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(3, 5))),
    ]


def tiny():
    return explicit_chain(tiny_parts())


def tiny_cost(copies=3):
    return cost_of(tiny(), (1, 4, 4), batch=2, classes=5, copies=copies)


def test_atoms_by_hand():
    stem, block, classifier = tiny_cost().atoms
    # The convolution reads 2·1·4·4 elements, the norm 2·2·4·4; 64 outputs of 9 products each, then 5 each in the norm.
    assert (stem.name, stem.parameters, stem.activations) == ("stem", 2 * 9 + 2 + 4, 32 + 64)
    assert (stem.flops, stem.output) == (64 * 9 + 5 * 64, (2, 2, 2, 2))
    # Both convolutions read the block's input of 16 elements: it counts once. The norm reads 2·3·2·2 = 24.
    assert (block.parameters, block.activations) == (54 + 6 + 6, 16 + 24)
    assert (block.flops, block.output) == (24 * 18 + 24 * 2 + 5 * 24, (2, 3, 2, 2))
    # The pool reads 24 elements and keeps none; the linear layer reads 2·3.
    assert (classifier.parameters, classifier.activations) == (20, 6)
    assert (classifier.flops, classifier.output) == (24 + 2 * 15, (2, 5))


@pytest.mark.parametrize(
    ("optimizer", "total", "stem", "last"),
    [
        # 110 parameters, 142 activations in all. The stem's head has 8 inputs: 45 parameters, 16 features, 10 logits.
        ("sgd", 4 * (220 + 142), 4 * (48 + 96) + 4 * (16 + 90 + 10), 4 * (40 + 6)),
        ("sgd-momentum", 4 * (330 + 142), 4 * (72 + 96) + 4 * (16 + 135 + 10), 4 * (60 + 6)),
        ("adam", 4 * (440 + 142), 4 * (96 + 96) + 4 * (16 + 180 + 10), 4 * (80 + 6)),
    ],
)
def test_memory_by_hand(optimizer, total, stem, last):
    cost = tiny_cost(COPIES[optimizer])
    assert (cost.total_memory, cost.memory(0, 1), cost.memory(2, 3)) == (total, stem, last)
    assert cost.memory(1, 3) == cost.total_memory - 4 * (COPIES[optimizer] * 24 + 96)


def test_ranges_by_hand():
    cost = tiny_cost()
    assert (cost.parameters(0, 2), cost.activations(0, 2), cost.total_parameters) == (90, 136, 110)
    assert cost.flops(0, 1) == 896 + 2 * 8 * 5  # the head is not pooled: 2 > ceil(sqrt(5 / 2)) does not hold
    assert (cost.flops(1, 3), cost.total_flops) == (600 + 54, 896 + 600 + 54)
    assert (cost.input, cost.batch, cost.classes) == ((2, 1, 4, 4), 2, 5)


def one(module, shape, batch=2):
    """Return the cost of one module alone, with a free end that makes five classes of whatever it returns."""

    class End(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :5]

    return cost_of(explicit_chain([("module", module), ("end", End())]), shape, batch, classes=5).atoms[0]


class Attention(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_by_hand(need_weights):
    cost = one(Attention(need_weights), (5, 8))
    # Both projections read 2·5·8 elements. Between them each of 2·2 heads makes 5·5·4 products for scores, then values.
    assert cost.parameters == 8 * 24 + 24 + 64 + 8
    assert cost.activations == 80 + 80
    assert cost.flops == 10 * 8 * 24 + 2 * (2 * 2 * 25 * 4) + 10 * 64


class Functional(nn.Module):
    """One parameter and the function that uses it."""

    def __init__(self, shape, function):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


def assigned(x, weight):
    padded = torch.zeros(2, 6, 6)
    padded[:, 1:] = x
    return F.linear(padded, weight)


@pytest.mark.parametrize(
    ("module", "activations", "flops"),
    [
        pytest.param(nn.LayerNorm(6), 60, 300, id="layer norm"),
        pytest.param(nn.GroupNorm(1, 5), 60, 300, id="group norm"),
        pytest.param(nn.BatchNorm1d(5), 60, 300, id="batch norm"),
        pytest.param(nn.BatchNorm1d(5, affine=False), 0, 300, id="norm without a weight"),
        pytest.param(nn.ReLU(), 0, 0, id="activation"),
        pytest.param(nn.PReLU(), 60, 0, id="activation with a weight"),
        pytest.param(nn.AdaptiveAvgPool1d(2), 0, 60, id="pool"),
        pytest.param(Functional((6, 7), torch.matmul), 60, 420, id="product with a parameter"),
        pytest.param(Functional((7, 6), lambda x, w: x @ w.t()), 60, 420, id="product with a transposed parameter"),
        pytest.param(Functional((6, 7), lambda x, w: torch.einsum("bld,de->ble", x, w)), 60, 420, id="einsum"),
        pytest.param(Functional((7, 6), lambda x, w: F.linear(input=x, weight=w)), 60, 420, id="keywords"),
        pytest.param(Functional((7, 6), lambda x, w: F.linear(x, w / w.norm())), 60, 420, id="normalised weight"),
        pytest.param(
            Functional((7, 6), lambda x, w: F.linear(torch.zeros(2, 5, 6).copy_(x), w)), 60, 420, id="copied input"
        ),
        pytest.param(Functional((7, 6), assigned), 72, 504, id="padded input"),
        pytest.param(Functional((1, 5, 6), torch.add), 0, 0, id="position embedding"),
        pytest.param(Functional((6,), torch.mul), 0, 0, id="scale"),
        pytest.param(
            Functional((1, 1, 6), lambda x, w: torch.cat((w.expand(x.shape[0], 1, 6), x), 1)), 0, 0, id="class token"
        ),
        pytest.param(Functional((5, 6), lambda x, w: x + F.embedding(torch.arange(5), w)), 0, 0, id="table of places"),
        pytest.param(
            Functional((6, 6), lambda x, w: F.scaled_dot_product_attention(x, x, x)), 0, 2 * 2 * 150, id="attention"
        ),
    ],
)
def test_what_is_a_layer_with_a_weight(module, activations, flops):
    cost = one(module, (5, 6))
    assert (cost.activations, cost.flops) == (activations, flops)
    assert cost.parameters == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("feature", [(3, 8, 8), (3, 2, 2), (64, 4, 4), (5, 6), (6,)])
def test_a_head_counted_as_a_layer_agrees_with_its_formula(feature):
    head = cost_of(explicit_chain([("head", build_head(feature, 10))]), feature, batch=2, classes=10)
    expected = head_cost((2, *feature), 10, copies=3)
    assert (head.total_flops, head.total_parameters) == (expected.flops, expected.parameters)


def test_nothing_is_allocated():
    """A batch of ten million images would take terabytes."""
    cost = cost_of(tiny(), (1, 4, 4), batch=10**7, classes=5)
    assert cost.activations(0, 3) == 142 * 10**7 // 2
    assert cost.total_flops == 1550 * 10**7 // 2


def test_the_model_is_not_touched():
    chain = tiny()
    modules = [module for atom in chain.atoms for module in atom.modules()]
    for position, module in enumerate(modules):
        module.training = position % 2 == 0
    before = {name: tensor.clone() for name, tensor in chain.tensors.items()}
    flags = [module.training for module in modules]
    state = torch.get_rng_state()
    cost_of(chain, (1, 4, 4), batch=2, classes=5)
    assert [module.training for module in modules] == flags
    assert all(torch.equal(tensor, before[name]) for name, tensor in chain.tensors.items())
    assert all(p.device.type == "cpu" and p.grad is None for p in chain.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


class PlainNormalize(Normalize):
    """One that does not follow its input to another device."""

    def forward(self, x):
        return (x - self.mean) / self.std


@pytest.mark.parametrize("kind", [Normalize, PlainNormalize])
def test_input_normalisation_is_a_free_atom_and_keeps_its_values(kind):
    """Its values are not saved with the model, so losing them here would go unnoticed."""
    normalize = kind([0.5], [0.25])
    free, *rest = cost_of(explicit_chain(tiny_parts(), normalize), (1, 4, 4), batch=2, classes=5).atoms
    assert (free.parameters, free.activations, free.flops, free.output) == (0, 0, 0, (2, 1, 4, 4))
    assert tuple(rest) == tiny_cost().atoms
    assert (normalize.mean.item(), normalize.std.item()) == (0.5, 0.25)


class Tied(nn.Module):
    """One parameter under two names, one that nothing uses, one layer that is called twice, a saved constant."""

    def __init__(self):
        super().__init__()
        self.once = nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.once.weight
        self.unused = nn.Parameter(torch.zeros(7))
        self.register_buffer("scale", torch.ones(4))
        self.alias = self.once
        self.classifier = nn.Linear(4, 5)

    def forward(self, x):
        return self.classifier(self.alias(self.again(self.once(x))) * self.scale)


@pytest.mark.parametrize("make", [chain_of, lambda model: explicit_chain([("all", model)])], ids=["traced", "explicit"])
def test_tied_and_unused_parameters_count_once(make):
    model = Tied()
    tied, buffer = model.once.weight, model.scale
    cost = cost_of(make(model), (4,), batch=2, classes=5)
    assert cost.total_parameters == 16 + 7 + 25 == sum(p.numel() for p in model.parameters())
    assert cost.activations(0, len(cost.atoms)) == 4 * 2 * 4
    assert cost.total_flops == 2 * (3 * 16 + 20)
    assert model.once.weight is model.again.weight is model.alias.weight is tied
    assert model.scale is buffer


def test_the_model_is_whole_again_after_an_error():
    chain = explicit_chain([("first", nn.Linear(4, 5)), ("second", LooksAtValues())])
    before = dict(chain.tensors)
    with pytest.raises(ModelError):
        cost_of(chain, (4,), 2, 5)
    assert all(chain.tensors[name] is tensor for name, tensor in before.items())
    assert chain.run(torch.ones(1, 4)).shape == (1, 5)


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, (3, 224, 224) if name == "cnn4" else (3, 32, 32)) for name in MODELS] + [("vit", (3, 224, 224))],
)
def test_every_model_of_the_registry_is_counted(name, shape):
    with torch.device("meta"):
        model = build(name, shape, 10)
        chain = chain_of(model)
    cost = cost_of(chain, shape, batch=8, classes=10)
    assert cost.total_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert all(atom.parameters and atom.activations and atom.flops for atom in cost.atoms)
    assert len(partition(cost, smallest_budget(cost)[0])) > 1


def test_cost_is_for_float32_whatever_the_model_is_kept_in():
    chain = explicit_chain([("linear", nn.Linear(4, 5).bfloat16())])
    assert cost_of(chain, (4,), 2, 5) == cost_of(explicit_chain([("linear", nn.Linear(4, 5))]), (4,), 2, 5)


class LooksAtValues(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


class KeepsATensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(4)

    def forward(self, x):
        return x * self.scale


class ReturnsTwo(nn.Module):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (LooksAtValues(), "item"),
        (KeepsATensor(), "meta"),
        (ReturnsTwo(), "(?=.*one tensor)(?=.*tuple)"),
        (nn.Linear(3, 4), r"input of shape 2x4 .*RuntimeError"),
    ],
)
def test_an_atom_that_cannot_be_counted_is_named(module, reason):
    chain = explicit_chain([("first", nn.Linear(4, 4)), ("second", module), ("third", nn.Linear(4, 5))])
    with pytest.raises(ModelError, match=reason) as error:
        cost_of(chain, (4,), 2, 5)
    assert "second" in str(error.value)


def test_classes_must_be_the_models():
    with pytest.raises(ModelError, match=r"has shape 2x5; 7 classes need 2x7"):
        cost_of(tiny(), (1, 4, 4), batch=2, classes=7)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"classes": 0}, {"copies": 0}, {"input_shape": (1, 0, 4)}])
def test_sizes_must_be_positive(wrong):
    with pytest.raises(ConfigError, match="positive"):
        cost_of(tiny(), **({"input_shape": (1, 4, 4), "batch": 2, "classes": 5} | wrong))


PAPER = {
    "vgg16": {
        "arguments": ((3, 32, 32), 64, 10),
        "totals": (15_253_578, 301_663_096, 20_166_967_296),
        "budget": 60_000_000,
        "bytes": [55_790_456, 46_090_872, 50_432_632, 34_685_560, 33_112_696, 59_345_528, 36_137_080],
        "giga_flops": [2.6, 4.9, 6.0, 2.4, 2.4, 1.2, 0.6],
        "layers": [2, 3, 3, 1, 1, 2, 4],
        # two convolutions of 64 · 256 · 8² outputs, one of 64 · 512 · 4², 9 · 256 products each, norms; the head
        "third_module_flops": 64 * (2 * 256 * 8**2 + 512 * 4**2) * (9 * 256 + 5) + 64 * (512 * 4**2 + 512 * 10),
        "smallest": (38_203_768, "Conv 2"),
    },
    "resnet34": {
        "arguments": ((3, 224, 224), 32, 256),
        "totals": (21_416_000, 1_130_521_344, 117_827_076_096),
        "budget": 224_000_000,
        "bytes": [148_654_848, 130_160_640, 130_160_640, 197_934_080, 221_584_384, 206_535_680, 203_971_584],
        "giga_flops": [3.9, 7.5, 7.5, 13.3, 28.1, 37.1, 20.6],
        "layers": [1, 1, 1, 2, 4, 5, 4],
        # two convolutions of 32 · 64 · 56² outputs, 9 · 64 products each, and their norms; the head, pooled to 64 · 2²
        "third_module_flops": 2 * 32 * 64 * 56**2 * (9 * 64 + 5) + 32 * (64 * 56**2 + 64 * 2**2 * 256),
        "smallest": (148_654_848, "Conv 1"),
    },
}


@pytest.fixture(scope="module", params=list(PAPER))
def paper(request):
    """The paper's facts about one of its models, and our cost of it."""
    facts = PAPER[request.param]
    shape, batch, classes = facts["arguments"]
    with torch.device("meta"):
        chain = chain_of(build(request.param, shape, classes))
    return facts, cost_of(chain, shape, batch, classes)


def test_paper_totals(paper):
    facts, cost = paper
    assert (cost.total_parameters, cost.total_memory, cost.total_flops) == facts["totals"]


def test_paper_partition(paper):
    """The tables of the appendix: bytes to the byte, FLOPs to the printed decimal (which prints 6.054 as 6.0)."""
    facts, cost = paper
    modules = partition(cost, facts["budget"])
    assert [module.memory for module in modules] == facts["bytes"]
    for module, printed in zip(modules, facts["giga_flops"], strict=True):
        assert abs(module.flops / 1e9 - printed) < 0.055
    layers = [[layer for atom in cost.atoms[m.first : m.last] for layer in atom.layers] for m in modules]
    assert list(map(len, layers)) == facts["layers"], layers
    assert sum(module.parameters for module in modules) == facts["totals"][0]


def test_paper_flops_include_the_heads(paper):
    facts, cost = paper
    modules = partition(cost, facts["budget"])
    assert modules[2].flops == facts["third_module_flops"]  # 6,053,756,928 for VGG16: the paper's 6.0 G
    heads = sum(head_cost(cost.atoms[m.last - 1].output, cost.classes, 3).flops for m in modules[:-1])
    assert sum(module.flops for module in modules) == cost.total_flops + heads


def test_paper_smallest_budget(paper):
    facts, cost = paper
    need, atom = smallest_budget(cost)
    assert (need, cost.atoms[atom].layers) == (facts["smallest"][0], (facts["smallest"][1],))
    assert partition(cost, need)
