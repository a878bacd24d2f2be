"""Starting weights: what a file gives, what it lacks, and what it must not do."""

import hashlib
import os
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from fedprophet.errors import DataError, ModelError
from fedprophet.models import build, weights
from fedprophet.models.resnet import BLOCKS as BLOCKS_OF_RESNETS
from fedprophet.models.vgg import VGG, WIDTHS, convolutions
from fedprophet.models.weights import PUBLISHED, load_weights

SMALL = (3, 32, 32)
TINY_VIT = {"patch": 2, "dim": 12, "depth": 6, "heads": 3, "mlp_dim": 5}


def narrow_vgg(name, channels, classes):
    """A VGG with a sixteenth of the channels: the same names and layers, a hundredth of the numbers."""
    widths = [width // 16 for width in WIDTHS[name]]
    linear = [nn.Linear(32, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 8), nn.ReLU(), nn.Dropout()]
    return VGG(convolutions(channels, widths), nn.AdaptiveAvgPool2d(1), nn.Sequential(*linear, nn.Linear(8, classes)))


def drawn(name, seed, shape=SMALL, classes=10):
    """A model whose every tensor is drawn, norm statistics included."""
    torch.manual_seed(seed)
    options = TINY_VIT if name == "vit" else {"width": 8} if name in BLOCKS_OF_RESNETS else {}
    model = narrow_vgg(name, shape[0], classes) if name in WIDTHS else build(name, shape, classes, **options)
    for key, value in model.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.randn(value.shape) * 0.1 + (1 if key.endswith("running_var") else 0))
    return model


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def saved(path, tensors, **metadata):
    save_file({name: value.clone() for name, value in tensors.items()}, path, metadata)
    return path


@pytest.fixture
def source(tmp_path):
    return tmp_path / "start.safetensors"


def test_a_whole_file_gives_the_same_model(source):
    theirs, ours = drawn("cnn3", 0), drawn("cnn3", 1)
    saved(source, theirs.state_dict(), made="here")
    report = load_weights(ours, source)
    assert all(torch.equal(a, b) for a, b in zip(state(ours).values(), state(theirs).values(), strict=True))
    assert report.loaded == tuple(theirs.state_dict())
    assert (report.missing, report.unused, report.moved) == ((), (), {})
    assert report.metadata == {"made": "here"}
    assert report.digest == hashlib.sha256(source.read_bytes()).hexdigest()
    assert report.source == str(source)


def test_what_the_file_lacks_keeps_its_start(source):
    theirs, ours = drawn("vgg16", 0), drawn("vgg16", 1)
    before = state(ours)
    kept = {n: v for n, v in theirs.state_dict().items() if n.startswith("features") and "num_batches" not in n}
    saved(source, {name: value.to(torch.bfloat16) for name, value in kept.items()} | {"extra.weight": torch.ones(2)})
    report = load_weights(ours, str(source))
    after = state(ours)
    for name, value in kept.items():
        assert after[name].dtype == torch.float32
        assert torch.equal(after[name], value.to(torch.bfloat16).to(torch.float32)), name
    assert report.missing == tuple(f"classifier.{n}.{t}" for n in (0, 3, 6) for t in ("weight", "bias"))
    assert all(torch.equal(after[name], before[name]) for name in report.missing)
    assert report.unused == ("extra.weight",)
    assert report.summary() == (
        f"weights from {source}: 78 tensors loaded (features 78); initialised: classifier 6; not used: extra 1"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_precisions_become_the_models(source, dtype):
    theirs, ours = drawn("cnn3", 0), drawn("cnn3", 1).to(torch.float32)
    floats = {n: v.to(dtype) for n, v in theirs.state_dict().items() if v.is_floating_point()}
    load_weights(ours, saved(source, floats))
    assert all(torch.equal(state(ours)[n], v.to(torch.float32)) for n, v in floats.items())
    half = drawn("cnn3", 1).to(torch.float16)
    load_weights(half, source)
    assert half.features[0].weight.dtype == torch.float16


def test_parameters_stay_parameters(source):
    ours = drawn("cnn3", 1)
    parameters = list(ours.parameters())
    load_weights(ours, saved(source, drawn("cnn3", 0).state_dict()))
    assert all(a is b for a, b in zip(ours.parameters(), parameters, strict=True))
    assert all(p.requires_grad and p.grad_fn is None for p in ours.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "missing"),
    [
        ("resnet10", SMALL, ("fc.weight", "fc.bias")),
        ("vit", (3, 8, 8), ("heads.head.weight", "heads.head.bias")),
        ("vgg11", SMALL, ("classifier.6.weight", "classifier.6.bias")),
    ],
)
def test_a_classifier_for_other_classes_is_drawn_anew(source, name, shape, missing):
    theirs, ours = drawn(name, 0, shape, classes=7), drawn(name, 1, shape, classes=10)
    before = state(ours)
    report = load_weights(ours, saved(source, theirs.state_dict()))
    assert report.missing == missing
    assert report.unused == missing or set(report.unused) == set(missing)
    assert all(torch.equal(state(ours)[n], before[n]) for n in missing)
    assert len(report.loaded) == len(before) - len(missing)


def test_a_layer_is_loaded_as_a_whole(source):
    theirs, ours = drawn("cnn3", 0), drawn("cnn3", 1)
    before = state(ours)
    tensors = dict(theirs.state_dict()) | {"classifier.0.weight": torch.ones(10, 99)}
    report = load_weights(ours, saved(source, tensors))  # the bias would fit, but it belongs to other weights
    assert report.missing == ("classifier.0.weight", "classifier.0.bias")
    assert torch.equal(state(ours)["classifier.0.bias"], before["classifier.0.bias"])


# ---------------------------------------------------------------- a smaller VGG from a larger one

# Convolutions of each block by their index in `features`, written down from torchvision's layouts.
BLOCKS = {
    "vgg11": [[0], [4], [8, 11], [15, 18], [22, 25]],
    "vgg13": [[0, 3], [7, 10], [14, 17], [21, 24], [28, 31]],
    "vgg16": [[0, 3], [7, 10], [14, 17, 20], [24, 27, 30], [34, 37, 40]],
}


@pytest.mark.parametrize(("name", "there"), [("vgg11", "vgg16"), ("vgg13", "vgg16"), ("vgg11", "vgg13")])
def test_by_block_and_position(source, name, there):
    theirs, ours = drawn(there, 0, classes=7), drawn(name, 1)
    report = load_weights(ours, saved(source, theirs.state_dict()))
    for here, other in zip(BLOCKS[name], BLOCKS[there], strict=True):
        for mine, its in zip(here, other, strict=False):
            for layer in (0, 1):
                a, b = ours.features[mine + layer], theirs.features[its + layer]
                assert all(
                    torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
                )
    last = BLOCKS[name][4][1], BLOCKS[there][4][1]
    assert report.moved[f"features.{last[0]}.weight"] == f"features.{last[1]}.weight"
    assert "by block and position, since the file is of another VGG" in report.summary()
    assert report.missing == ("classifier.6.weight", "classifier.6.bias")


def test_only_where_shapes_agree(source):
    theirs, ours = drawn("vgg16", 0), drawn("vgg11", 1)
    before = state(ours)
    tensors = dict(theirs.state_dict())
    tensors["features.37.weight"] = torch.ones(32, 31, 3, 3)  # block 5, position 2: vgg11's features.25
    report = load_weights(ours, saved(source, tensors))
    assert [name for name in report.missing if name.startswith("features")] == [
        "features.25.weight",
        "features.25.bias",
    ]
    assert torch.equal(state(ours)["features.25.weight"], before["features.25.weight"])
    assert torch.equal(state(ours)["features.22.weight"], tensors["features.34.weight"])


def test_a_larger_vgg_from_a_smaller_one_lacks_the_rest(source):
    theirs, ours = drawn("vgg13", 0), drawn("vgg16", 1)
    report = load_weights(ours, saved(source, theirs.state_dict()))
    lacking = {name.split(".")[1] for name in report.missing}
    assert lacking == {"20", "21", "30", "31", "40", "41"}
    assert torch.equal(ours.features[37].weight, theirs.features[31].weight)


def flat_vgg(seed, *widths):
    torch.manual_seed(seed)
    return VGG(convolutions(3, widths), nn.AdaptiveAvgPool2d(1), nn.Sequential(nn.Linear(4, 10)))


def test_the_same_name_at_another_place_is_not_the_same_layer(source):
    # Convolutions 0 | 4, 7 here and 0, 3 | 7 there: the second block's first is our 4 and their 7.
    ours, theirs = flat_vgg(0, 4, 0, 4, 4), flat_vgg(1, 4, 4, 0, 4)
    before = state(ours)
    report = load_weights(ours, saved(source, theirs.state_dict()))
    assert torch.equal(ours.features[4].weight, theirs.features[7].weight)
    assert torch.equal(ours.features[7].weight, before["features.7.weight"])
    assert {name.split(".")[1] for name in report.missing} == {"7", "8"}
    assert {name.split(".")[1] for name in report.unused} == {"3", "4"}


def test_a_vgg_without_batch_norm_gives_its_convolutions(source):
    ours, theirs = flat_vgg(0, 4, 4, 0, 4), flat_vgg(1, 4, 4, 0, 4)
    plain = {"features.0": "features.0", "features.3": "features.2", "features.7": "features.5"}
    tensors = {
        f"{there}.{kind}": theirs.state_dict()[f"{here}.{kind}"]
        for here, there in plain.items()
        for kind in ("weight", "bias")
    }
    report = load_weights(ours, saved(source, tensors))
    assert report.loaded == tuple(f"{here}.{kind}" for here in plain for kind in ("weight", "bias"))
    assert all(torch.equal(ours.features[n].weight, theirs.features[n].weight) for n in (0, 3, 7))
    assert {name.split(".")[1] for name in report.missing if name.startswith("features")} == {"1", "4", "8"}


# ---------------------------------------------------------------- what does not fit


def refused(model, source, text):
    before = state(model)
    with pytest.raises(ModelError, match=text) as caught:
        load_weights(model, source)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("name", "file"), [("vgg16", "vgg16"), ("vgg11", "vgg16"), ("resnet10", "resnet18")])
def test_weights_of_another_width_are_refused(name, file, source):
    saved(source, build(file, SMALL, 10, width=8).state_dict())
    model = build(name, SMALL, 10, width=4)
    with pytest.raises(ModelError, match=r"has shape 8 in .* but 4 in the model: .* of another architecture or width"):
        load_weights(model, source)


def test_another_shape_is_named(source):
    saved(source, drawn("resnet10", 0, (3, 96, 96)).state_dict())
    refused(drawn("resnet10", 1), source, "tensor conv1.weight has shape 8×3×7×7 in .* but 8×3×3×3 in the model")


def test_the_same_vgg_for_other_channels(source):
    saved(source, drawn("vgg11", 0).state_dict())
    refused(drawn("vgg11", 1, (1, 32, 32)), source, "tensor features.0.weight has shape 4×3×3×3 .* 4×1×3×3")


@pytest.mark.parametrize("tensors", [{}, {"features.1.num_batches_tracked": torch.tensor(3)}])
def test_nothing_in_common(source, tensors):
    saved(source, {"layer.weight": torch.ones(3)} | tensors)
    refused(
        drawn("cnn3", 0), source, "has nothing in common with the model: it holds .*layer.weight.* features.0.weight"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.full((64,), float("nan")), "features.0.bias .* holds values that are not finite"),
        (torch.full((64,), float("inf")), "features.0.bias .* holds values that are not finite"),
        (torch.ones(64, dtype=torch.int8), "features.0.bias .* holds int8, which cannot be a starting weight"),
    ],
)
def test_values_that_are_no_weights(source, value, text):
    saved(source, dict(drawn("cnn3", 0).state_dict()) | {"features.0.bias": value})
    refused(drawn("cnn3", 1), source, text)


def test_files_that_are_none(tmp_path):
    model = drawn("cnn3", 0)
    refused(
        model, tmp_path / "none.safetensors", "there is no weights file .*none.safetensors. Give a safetensors file"
    )
    torch.save(model.state_dict(), tmp_path / "model.pth")
    refused(model, tmp_path / "model.pth", "model.pth is not a whole safetensors file")
    refused(model, tmp_path, "is not a whole safetensors file")
    whole = saved(tmp_path / "cut.safetensors", model.state_dict()).read_bytes()
    for cut in (5, 100, len(whole) - 1):
        (tmp_path / "cut.safetensors").write_bytes(whole[:cut])
        refused(model, tmp_path / "cut.safetensors", "is not a whole safetensors file")


# ---------------------------------------------------------------- published weights


def test_the_published_files():
    assert PUBLISHED == {
        "vgg11": "vgg11_bn-6002323d.pth",
        "vgg13": "vgg13_bn-abd245e5.pth",
        "vgg16": "vgg16_bn-6c64b313.pth",
        "resnet18": "resnet18-f37072fd.pth",
        "resnet34": "resnet34-b627a593.pth",
        "vit": "vit_b_16-c867db91.pth",
    }


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """Publish an object as the weights of an architecture, at an address of our own."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setenv("FEDPROPHET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "ADDRESS", f"{site.as_uri()}/")

    def put(architecture, content, save=torch.save):
        save(content, site / "file")
        digest = hashlib.sha256((site / "file").read_bytes()).hexdigest()
        name = f"net_bn-{digest[:8]}.pth"
        (site / "file").rename(site / name)
        monkeypatch.setattr(weights, "PUBLISHED", {architecture: name})
        return site / name

    return put


def legacy(content, path):
    torch.save(content, path, _use_new_zipfile_serialization=False)  # as the oldest of the published files are


@pytest.mark.parametrize("save", [torch.save, legacy])
def test_published_weights_are_fetched_verified_and_converted_once(publish, tmp_path, save):
    theirs = drawn("cnn3", 0, classes=7)
    file = publish("cnn3", theirs.state_dict(), save)
    ours = drawn("cnn3", 1)
    report = load_weights(ours, "imagenet", "cnn3")
    assert report.missing == ("classifier.0.weight", "classifier.0.bias")
    assert torch.equal(ours.features[3].weight, theirs.features[3].weight)
    (converted,) = (tmp_path / "cache" / "weights").glob("[!.]*")
    assert converted.name == file.with_suffix(".safetensors").name
    assert load_file(converted).keys() == theirs.state_dict().keys()
    with safe_open(converted, framework="pt") as opened:
        assert opened.metadata()["sha256"] == file.stem[-8:]
    file.unlink()
    again = drawn("cnn3", 2)
    assert load_weights(again, "imagenet", "cnn3").loaded == report.loaded
    assert torch.equal(again.features[3].weight, theirs.features[3].weight)


def test_the_published_transformer_has_older_names(publish):
    theirs, ours = drawn("vit", 0, (3, 8, 8)), drawn("vit", 1, (3, 8, 8))
    old = {
        name.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2."): value
        for name, value in theirs.state_dict().items()
    }
    assert "encoder.layers.encoder_layer_5.mlp.linear_2.bias" in old
    publish("vit", old)
    report = load_weights(ours, "imagenet", "vit")
    assert (report.missing, report.unused, report.moved) == ((), (), {})
    assert all(torch.equal(a, b) for a, b in zip(state(ours).values(), state(theirs).values(), strict=True))


def test_a_file_with_another_hash_is_refused(publish, tmp_path):
    file = publish("cnn3", drawn("cnn3", 0).state_dict())
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(DataError, match="is not the published file: its sha256 is another one"):
        load_weights(drawn("cnn3", 1), "imagenet", "cnn3")
    assert list((tmp_path / "cache" / "weights").glob("[!.]*")) == []


class Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_that_does_more_than_hold_tensors_does_nothing(publish, tmp_path):
    def plain(content, path):
        path.write_bytes(pickle.dumps(content, protocol=2))

    for save in (torch.save, plain):
        publish("cnn3", {"conv1.weight": Evil(tmp_path / "harm")}, save)
        with pytest.raises(ModelError, match="is not a file of tensors alone"):
            load_weights(drawn("cnn3", 1), "imagenet", "cnn3")
        assert not (tmp_path / "harm").exists()


def test_without_a_network_one_line_says_what_to_put_where(publish, tmp_path):
    file = publish("cnn3", drawn("cnn3", 0).state_dict())
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(DataError) as caught:
        load_weights(drawn("cnn3", 1), "imagenet", "cnn3")
    folder = tmp_path / "cache" / "weights"
    assert f"Without a network: put {file.name} in {folder}, or give a safetensors file" in str(caught.value)
    assert "\n" not in str(caught.value)
    (folder / file.name).write_bytes(content)
    assert load_weights(drawn("cnn3", 1), "imagenet", "cnn3").missing == ()


@pytest.mark.parametrize("architecture", ["cnn3", "vgg-small", None])
def test_models_without_published_weights(architecture):
    with pytest.raises(
        ModelError, match=r"no imagenet weights are published for .*only for vgg11, vgg13, vgg16, resnet18"
    ):
        load_weights(drawn("cnn3", 0), "imagenet", architecture)
