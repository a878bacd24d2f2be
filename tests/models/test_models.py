"""The registry: torchvision's names, published sizes, and errors that say what to change."""

import pytest
import torch
from torch import nn

from fedprophet.errors import ModelError
from fedprophet.models import FAMILIES, MODELS, build, family_of


@pytest.fixture(scope="module", autouse=True)
def meta():
    """The first tensors on the meta device load much of torch, which takes seconds."""
    with torch.device("meta"):
        build("cnn3", (3, 32, 32), 10)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def shapes(name, shape, classes, **options):
    with torch.device("meta"):
        model = build(name, shape, classes, **options)
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # What torchvision publishes for its vgg*_bn, resnet* and vit_b_16 with 1000 classes.
        ("vgg11", 132_868_840),
        ("vgg13", 133_053_736),
        ("vgg16", 138_365_992),
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("vit", 86_567_656),
    ],
)
def test_large_models_have_the_published_sizes(name, parameters):
    with torch.device("meta"):
        assert count(build(name, (3, 224, 224), 1000)) == parameters


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("vgg16", (3, 32, 32), 10, 15_253_578),
        # vgg16's, less its three convolutions of 256 and 512 channels that vgg13 has not.
        ("vgg13", (3, 32, 32), 10, 15_253_578 - (9 * 256 * 256 + 3 * 256) - 2 * (9 * 512 * 512 + 3 * 512)),
        ("resnet34", (3, 224, 224), 256, 21_797_672 - 513 * (1000 - 256)),
        ("cnn3", (3, 32, 32), 10, (27 * 64 + 3 * 64) + (576 * 128 + 3 * 128) + 513 * 10),
        ("cnn4", (3, 224, 224), 256, (147 * 64 + 192) + (49 * 64 * 128 + 384) + 6273 * 512 + 513 * 256),
        # Four blocks: 64 → 64 without, the others with a 1 × 1 convolution in the shortcut.
        (
            "resnet10",
            (3, 32, 32),
            10,
            (27 * 64 + 128)
            + (2 * 9 * 64 * 64 + 256)
            + sum(9 * w * w // 2 + 9 * w * w + w * w // 2 + 6 * w for w in (128, 256, 512))
            + 5130,
        ),
    ],
)
def test_sizes_by_hand(name, shape, classes, parameters):
    with torch.device("meta"):
        assert count(build(name, shape, classes)) == parameters


@pytest.mark.parametrize(
    ("name", "shape", "classes", "width", "parameters"),
    [
        # Convolutions with bias, then 2 numbers of batch norm for each channel, then the linear layers.
        (
            "vgg11",
            (3, 32, 32),
            10,
            4,
            (27 * 4 + 3 * 4)
            + (9 * 4 * 8 + 3 * 8)
            + (9 * 8 * 16 + 3 * 16)
            + (9 * 16 * 16 + 3 * 16)
            + (9 * 16 * 32 + 3 * 32)
            + 3 * (9 * 32 * 32 + 3 * 32)
            + 2 * 33 * 32
            + 33 * 10,
        ),
        (
            "resnet10",
            (1, 28, 28),
            7,
            6,
            (9 * 6 + 12)
            + (2 * 9 * 6 * 6 + 24)
            + sum(9 * w * w // 2 + 9 * w * w + w * w // 2 + 6 * w for w in (12, 24, 48))
            + 49 * 7,
        ),
        ("cnn3", (3, 32, 32), 10, 4, (27 * 4 + 3 * 4) + (36 * 8 + 3 * 8) + 33 * 10),
        ("cnn4", (3, 64, 64), 20, 2, (147 * 2 + 6) + (49 * 2 * 4 + 12) + 197 * 16 + 17 * 20),
        ("vgg-small-3", (1, 8, 8), 10, 4, (9 * 4 + 12) + (36 * 8 + 24) + (72 * 16 + 48) + 17 * 10),
        (
            "vgg-small-5",
            (1, 8, 8),
            10,
            3,
            (9 * 3 + 9) + (27 * 4 + 12) + (36 * 6 + 18) + (54 * 12 + 36) + (108 * 12 + 36) + 13 * 10,
        ),
    ],
)
def test_sizes_at_a_width_by_hand(name, shape, classes, width, parameters):
    assert count(build(name, shape, classes, width=width)) == parameters


@pytest.mark.parametrize(
    ("name", "shape"),
    [("vgg16", (3, 32, 32)), ("vgg13", (3, 80, 80)), ("resnet34", (3, 64, 64)), ("cnn4", (3, 64, 64))],
)
def test_half_the_width_halves_every_channel_but_the_images_and_the_classes(name, shape):
    whole, half = shapes(name, shape, 10), shapes(name, shape, 10, width=32)
    assert half.keys() == whole.keys()
    for key, sizes in whole.items():
        fixed = {3, 7, 1, 10}  # colours, kernels and classes
        assert half[key] == tuple(side if side in fixed else side // 2 for side in sizes), key


def test_families_grow_and_end_with_the_model_that_is_asked_for():
    assert family_of("resnet18") == ("cnn4", "resnet10", "resnet18")
    assert family_of("vgg16") == ("cnn3", "vgg11", "vgg13", "vgg16")
    assert family_of("vgg-small") == ("vgg-small-3", "vgg-small-5", "vgg-small")
    assert family_of("cnn3") == ("cnn3",)
    images = {"vgg16": (3, 32, 32), "resnet34": (3, 64, 64), "vgg-small": (1, 8, 8)}
    for family in FAMILIES:
        sizes = [count(build(name, images[family[-1]], 10, width=8)) for name in family]
        assert sizes == sorted(set(sizes))


def test_a_model_without_a_family_says_what_to_set():
    with pytest.raises(ModelError, match=r"model vit belongs to no family .* Set distillation.family .* ends with vit"):
        family_of("vit")


def test_vgg_names():
    found = shapes("vgg16", (3, 224, 224), 1000)
    assert found["features.0.weight"] == (64, 3, 3, 3)
    assert found["features.1.running_var"] == (64,)
    assert found["features.41.num_batches_tracked"] == ()
    assert found["features.40.weight"] == (512, 512, 3, 3)
    classifier = {key: value for key, value in found.items() if key.startswith("classifier") and "weight" in key}
    assert classifier == {
        "classifier.0.weight": (4096, 25088),
        "classifier.3.weight": (4096, 4096),
        "classifier.6.weight": (1000, 4096),
    }
    small = shapes("vgg11", (3, 32, 32), 10)
    assert [small[f"classifier.{n}.weight"] for n in (0, 3, 6)] == [(512, 512), (512, 512), (10, 512)]
    assert [key for key in small if small[key][1:] == (256, 3, 3)] == ["features.11.weight", "features.15.weight"]


def test_resnet_names():
    found = shapes("resnet34", (3, 224, 224), 1000)
    assert found["conv1.weight"] == (64, 3, 7, 7)
    assert "conv1.bias" not in found
    assert found["layer1.2.bn2.running_mean"] == (64,)
    assert "layer1.0.downsample.0.weight" not in found
    assert found["layer2.0.downsample.0.weight"] == (128, 64, 1, 1)
    assert found["layer2.0.downsample.1.bias"] == (128,)
    assert found["layer3.5.conv2.weight"] == (256, 256, 3, 3)
    assert found["fc.weight"] == (1000, 512)
    small = shapes("resnet18", (1, 28, 28), 10)
    assert small["conv1.weight"] == (64, 1, 3, 3)
    assert set(small) == set(shapes("resnet18", (3, 224, 224), 10))


def test_vit_names():
    found = shapes("vit", (3, 224, 224), 1000)
    layer = "encoder.layers.encoder_layer_11"
    inside = {key.removeprefix(f"{layer}."): value for key, value in found.items() if key.startswith(layer)}
    assert inside == {
        "ln_1.weight": (768,),
        "ln_1.bias": (768,),
        "self_attention.in_proj_weight": (2304, 768),
        "self_attention.in_proj_bias": (2304,),
        "self_attention.out_proj.weight": (768, 768),
        "self_attention.out_proj.bias": (768,),
        "ln_2.weight": (768,),
        "ln_2.bias": (768,),
        "mlp.0.weight": (3072, 768),
        "mlp.0.bias": (3072,),
        "mlp.3.weight": (768, 3072),
        "mlp.3.bias": (768,),
    }
    outside = {key: value for key, value in found.items() if not key.startswith("encoder.layers")}
    assert outside == {
        "class_token": (1, 1, 768),
        "conv_proj.weight": (768, 3, 16, 16),
        "conv_proj.bias": (768,),
        "encoder.pos_embedding": (1, 197, 768),
        "encoder.ln.weight": (768,),
        "encoder.ln.bias": (768,),
        "heads.head.weight": (1000, 768),
        "heads.head.bias": (1000,),
    }


def test_self_attention_is_torchs_own():
    torch.manual_seed(0)
    model = build("vit", (3, 8, 8), 4, patch=2, dim=12, depth=1, heads=3, mlp_dim=5).eval()
    ours = model.encoder.layers.encoder_layer_0.self_attention
    theirs = nn.MultiheadAttention(12, 3, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 17, 12)
    assert torch.allclose(ours(x), theirs(x, x, x, need_weights=False)[0], atol=1e-6)


def test_vit_reads_patches_in_rows_and_classifies_the_class_token():
    model = build("vit", (1, 4, 4), 2, patch=2, dim=4, depth=1, heads=1, mlp_dim=4).eval()
    seen = {}
    model.encoder.register_forward_pre_hook(lambda module, args: seen.update(tokens=args[0].detach()))
    model.heads.register_forward_pre_hook(lambda module, args: seen.update(vector=args[0].detach()))
    model.encoder.register_forward_hook(lambda module, args, output: seen.update(encoded=output.detach()))
    x = torch.rand(3, 1, 4, 4)
    model(x)
    corner = model.conv_proj(x[:, :, :2, 2:]).flatten(1)
    assert torch.allclose(seen["tokens"][:, 2], corner, atol=1e-6)
    assert torch.equal(seen["tokens"][:, 0], model.class_token.expand(3, 1, 4)[:, 0])
    assert torch.equal(seen["vector"], seen["encoded"][:, 0])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("vgg11", (3, 32, 48)),
        ("vgg-small", (1, 4, 4)),
        ("vgg-small", (3, 32, 32)),
        ("vgg-small-3", (1, 4, 4)),
        ("vgg-small-5", (1, 4, 4)),
        ("resnet10", (1, 8, 8)),
        ("cnn3", (1, 3, 3)),
        ("cnn4", (3, 49, 60)),
        ("vit", (1, 8, 8)),
    ],
)
def test_every_size_that_is_allowed_works(name, shape):
    torch.manual_seed(0)
    options = {"width": 8} if "width" in MODELS[name].options else {"depth": 1}
    assert build(name, shape, 7, **options).eval()(torch.rand(2, *shape)).shape == (2, 7)


def test_convolutions_start_by_fan_out_from_the_callers_generator():
    torch.manual_seed(3)
    first = build("vgg16", (3, 32, 32), 10, width=8)
    drawn = torch.rand(())
    torch.manual_seed(3)
    second = build("vgg16", (3, 32, 32), 10, width=8)
    assert torch.equal(torch.rand(()), drawn)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    # 32 → 64 channels: the variance is 2 / (64 · 9), by fan-in it would be twice that.
    assert float(first.features[24].weight.detach().var()) == pytest.approx(2 / (64 * 9), rel=0.05)
    assert float(first.features[24].bias.detach().abs().max()) == 0.0


def test_every_entry_has_a_line_of_description_and_knows_its_options():
    assert all(entry.help and "\n" not in entry.help for entry in MODELS.values())
    assert MODELS["vgg16"].options == ("dropout", "width")
    assert MODELS["vgg-small"].options == ("width",)
    assert MODELS["resnet34"].options == ("width",)
    assert set(MODELS["vit"].options) == {"patch", "dim", "depth", "heads", "mlp_dim", "dropout"}


def test_options_reach_the_model():
    assert build("vgg16", (3, 32, 32), 10, dropout=0.1).classifier[2].p == 0.1
    assert build("vgg-small", (1, 8, 8), 10, width=4).features[0].weight.shape == (4, 1, 3, 3)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "text"),
    [
        ("vgg61", (3, 32, 32), 10, {}, r"unknown model 'vgg61'. Did you mean 'vgg16'\?"),
        ("vgg16", (3, 32, 32), 10, {"drop": 0.1}, "unknown option of model vgg16 'drop'. Did you mean 'dropout'"),
        ("resnet18", (3, 32, 32), 10, {"dropout": 0.1}, "unknown option of model resnet18 'dropout'. Known: width"),
        ("vgg16", (3, 31, 64), 10, {}, "at least 32×32 pixels .* not 31×64"),
        ("vgg-small", (1, 3, 8), 10, {}, "at least 4×4"),
        ("cnn4", (3, 32, 32), 10, {}, "at least 49×49"),
        ("vgg16", (32, 32), 10, {}, "channels x height x width, not 32x32"),
        ("vgg16", (3, 0, 32), 10, {}, "channels x height x width"),
        ("vgg16", (3, 32, 32), 1, {}, "at least 2 classes, not 1"),
        ("vgg16", (3, 32, 32), 10, {"dropout": 1.0}, "option dropout of vgg16"),
        ("vgg-small", (1, 8, 8), 10, {"width": 0}, "option width of vgg-small"),
        ("vgg-small", (1, 8, 8), 10, {"width": 1.5}, "option width of vgg-small"),
        ("vgg-small-3", (1, 3, 8), 10, {}, "vgg-small-3 needs images of at least 4×4"),
        ("vgg-small", (8, 8, 1), 10, {}, r"vgg-small needs images of at least .* for small ones \(cnn3\)$"),
        ("vgg13", (3, 32, 32), 10, {"width": 0}, "option width of vgg13 must be a positive whole number, not 0"),
        ("resnet10", (3, 32, 32), 10, {"width": True}, "option width of resnet10"),
        ("cnn3", (3, 32, 32), 10, {"width": "8"}, "option width of cnn3"),
        ("cnn4", (3, 64, 64), 10, {"width": -1}, "option width of cnn4"),
        ("vit", (3, 30, 30), 10, {}, "30×30 pixels into patches of 4"),
        ("vit", (3, 32, 32), 10, {"heads": 5}, "multiple of option heads"),
        ("vit", (3, 32, 32), 10, {"dim": 0}, "option dim of vit"),
        ("vit", (3, 32, 32), 10, {"depth": True}, "option depth of vit"),
        ("vit", (3, 32, 32), 10, {"patch": "4"}, "option patch of vit"),
        ("vit", (3, 32, 32), 10, {"dim": "64"}, "option dim of vit"),
        ("vit", (3, 32, 32), 10, {"depth": 10**6}, "option depth of vit .* The most is 1000"),
        ("vgg-small", (1, 8, 8), 10, {"width": 10**8}, "option width of vgg-small .* The most is 1000000"),
        ("cnn3", (1, 8, 8), 10, {"width": 10**5000}, "option width of cnn3"),
    ],
)
def test_what_cannot_be_built_says_why(name, shape, classes, options, text):
    with pytest.raises(ModelError, match=text):
        build(name, shape, classes, **options)
