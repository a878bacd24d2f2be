"""A run put together from its configuration: starting weights, families of models, the public set."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedprophet.cascade.atoms import chain_of
from fedprophet.cascade.cost import ChainCost
from fedprophet.client.planned_cost import MeasuredCost
from fedprophet.data.dataset import from_tensors
from fedprophet.errors import ConfigError, DataError, ModelError
from fedprophet.messages.values import BACKBONE, SERVER
from fedprophet.models import build
from fedprophet.runs.session import assemble


def test_a_run_starts_from_the_weights_it_names_and_says_so(tiny, tmp_path) -> None:
    torch.manual_seed(3)
    given = build("vgg-small", (1, 8, 8), 10, width=4)
    features = {name: value for name, value in given.state_dict().items() if name.startswith("features.")}
    save_file(features, tmp_path / "start.safetensors")
    session = assemble(tiny({"model.weights": str(tmp_path / "start.safetensors")}))
    start = session.world.initial_model()
    assert torch.equal(start["features.0.weight"], given.state_dict()["features.0.weight"])
    assert not torch.equal(start["classifier.0.weight"], given.state_dict()["classifier.0.weight"])
    assert len(session.notes) == 1
    assert "start.safetensors" in session.notes[0]
    assert "classifier" in session.notes[0]


def test_weights_that_do_not_fit_are_refused_with_the_key(tiny, tmp_path) -> None:
    save_file({"something.else": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match=r"^model\.weights: "):
        assemble(tiny({"model.weights": str(tmp_path / "other.safetensors")}))


# What is passed in from Python.


class Small(nn.Module):
    def __init__(self, channels=1):
        super().__init__()
        self.stem = nn.Conv2d(channels, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.stem(x).mean((2, 3)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Small, r"^model is the class Small\. Pass a model of it: model=Small\(\)$"),
        (
            "vgg-smal",
            r"^model is the text 'vgg-smal': unknown model 'vgg-smal'\. Did you mean 'vgg-small'\?.* settings",
        ),
        ("vgg16", r"^model is the text 'vgg16'\. A model that ships is named in the settings, as in \{\"model\": "),
        (Small().state_dict(), "^model is of type OrderedDict, and must be an nn.Module or an explicit chain"),
        (Small().double(), r"^stem\.weight is float64; FedProphet trains float32: call model\.float\(\)$"),
        (chain_of(Small().half()), r"^stem\.weight is float16; FedProphet trains float32"),
    ],
)
def test_what_is_no_model_to_train_is_refused(tiny, given, message) -> None:
    with pytest.raises(ModelError, match=message):
        assemble(tiny(), model=given, dataset=_images())


@pytest.mark.parametrize("given", [(torch.rand(2, 1, 8, 8), torch.arange(2)), torch.utils.data.DataLoader([1])])
def test_what_is_no_dataset_is_refused(tiny, given) -> None:
    message = (
        rf"^data is a {type(given).__name__}, and must be a dataset .*from_tensors\(.*from_datasets\(train, test\)$"
    )
    with pytest.raises(DataError, match=message):
        assemble(tiny(), model=Small(), dataset=given)


def test_a_model_that_the_data_do_not_fit_is_told_of_which_they_are(tiny) -> None:
    digits = r"The dataset 'digits' has images of 1x8x8 and 10 classes: pass one of your own with data=…$"
    for model, what in ((Small(), "has shape .*x2; 10 classes need"), (Small(3), "does not run on an input of shape")):
        with pytest.raises(ModelError, match=f"{what}.*{digits}"):
            assemble(tiny(), model=model)
    own = tiny({"data.name": "custom"})
    with pytest.raises(ModelError, match=r"The dataset 'tensors' has images of 1x32x32 and 2 classes$"):
        assemble(own, model=Small(3), dataset=_images())


@pytest.mark.parametrize(
    ("shape", "hinted"),
    [((8, 8, 3), True), ((8, 8, 1), True), ((3, 8, 3), False), ((2, 8, 8), False), ((12, 3), False)],
)
def test_channels_that_seem_to_be_last_are_pointed_out(tiny, shape, hinted) -> None:
    images, labels = torch.rand(8, *shape), torch.arange(8) % 2
    data = from_tensors(images, labels, images, labels)
    with pytest.raises(ModelError, match="does not run on") as raised:
        assemble(tiny(), model=Small(5), dataset=data)
    assert str(raised.value).endswith("pass images.permute(0, 3, 1, 2)") == hinted


# Families of models, which feddf and fedet train.

DISTIL = {"method": "feddf", "population.clients": 2, "population.cohort": 1}


def _images():
    """Return a dataset that a VGG can halve five times."""
    torch.manual_seed(0)
    images, labels = torch.rand(8, 1, 32, 32), torch.arange(8) % 2
    return from_tensors(images, labels, images, labels)


@pytest.fixture(scope="module")
def vggs(tiny, tmp_path_factory):
    """A session with cnn3, vgg11 and vgg13, whose weights file has the features of a vgg13."""
    torch.manual_seed(3)
    given = build("vgg13", (1, 32, 32), 2, width=2).state_dict()
    path = tmp_path_factory.mktemp("weights") / "vgg13.safetensors"
    features = {name: value for name, value in given.items() if name.startswith("features.")}
    save_file(features, path, {"normalisation": "mean .25 std .5"})
    model = {"model.name": "vgg13", "model.options": {"width": 2, "dropout": 0.125}, "model.weights": str(path)}
    return assemble(tiny({**DISTIL, **model}), dataset=_images()), given


def test_a_family_is_built_with_the_options_that_each_member_takes(vggs) -> None:
    session, _ = vggs
    family = session.world.family
    assert list(family) == ["cnn3", "vgg11", BACKBONE]
    assert family[BACKBONE].chain is session.world.chain
    for name, member in family.items():
        tensors = member.chain.tensors
        assert tensors["features.0.weight"].shape == (2, 1, 3, 3), "width = 2"
        drops = [layer.p for layer in member.chain.model.modules() if isinstance(layer, nn.Dropout)]
        assert drops == ([] if name == "cnn3" else [0.125, 0.125])
        convolutions = [n for n, value in tensors.items() if value.ndim == 4]
        assert len(convolutions) == {"cnn3": 2, "vgg11": 8, BACKBONE: 10}[name]
    costs = [member.cost.total_memory for member in family.values()]
    assert len(set(costs)) == 3
    assert family[BACKBONE].cost is session.world.cost


def test_members_of_the_same_kind_start_from_the_weights_and_the_notes_say_so(vggs) -> None:
    session, given = vggs
    tensors = session.world.family["vgg11"].chain.tensors
    # The first block of vgg11 has one convolution and that of vgg13 two: the second begins with layer 4, and with 7.
    assert torch.equal(tensors["features.0.weight"], given["features.0.weight"])
    assert torch.equal(tensors["features.4.weight"], given["features.7.weight"])
    assert not torch.equal(session.world.family["cnn3"].chain.tensors["features.0.weight"], given["features.0.weight"])
    own, other = session.notes
    assert own.startswith("weights from ")
    assert other.startswith("vgg11: weights from ")
    assert "by block and position" in other


@pytest.mark.parametrize("wrap", [lambda net: net, chain_of], ids=["model", "chain"])
def test_weights_for_a_model_that_is_handed_over_are_refused(tiny, tmp_path, wrap) -> None:
    """It has weights of its own; those of the file would be ignored, or overwrite them."""
    net = build("vgg-small", (1, 8, 8), 10, width=4)
    save_file(net.state_dict(), tmp_path / "vgg.safetensors")
    text = r"^model\.weights: given '.*vgg\.safetensors', but a model that you pass keeps its own weights"
    for name in ("custom", "vgg-small"):
        with pytest.raises(ConfigError, match=text):
            assemble(tiny({"model.name": name, "model.weights": str(tmp_path / "vgg.safetensors")}), model=wrap(net))


def test_all_members_normalise_their_input_alike(vggs) -> None:
    session, _ = vggs
    image = torch.rand(2, 1, 32, 32)
    for member in session.world.family.values():
        assert torch.allclose(member.chain.run(image, 0, 1), (image - 0.25) / 0.5)


def test_members_have_initial_weights_of_their_own_that_the_seed_decides(tiny) -> None:
    first, again, other = (assemble(tiny({**DISTIL, "seed": seed})).world.family for seed in (0, 0, 1))
    name = "classifier.0.weight"
    values = {member: architecture.chain.tensors[name] for member, architecture in first.items()}
    assert all(torch.equal(value, again[member].chain.tensors[name]) for member, value in values.items())
    assert not any(torch.equal(value, other[member].chain.tensors[name]) for member, value in values.items())
    assert len({float(value.detach().sum()) for value in values.values()}) == 3


def test_other_methods_have_neither_family_nor_public_set(tiny) -> None:
    session = assemble(tiny({"method": "jfat", "distillation.public": 10**6, "distillation.family": ["nonsense"]}))
    assert session.world.family == {}
    data = session.population.client_data(SERVER)
    assert (len(data.train), len(data.validation)) == (0, len(session.dataset.test))


def test_a_family_must_end_with_the_runs_model(tiny) -> None:
    text = r"^distillation\.family: it must end with model\.name = 'vgg-small', and ends with 'vgg-small-5'$"
    with pytest.raises(ConfigError, match=text):
        assemble(tiny({**DISTIL, "distillation.family": ["vgg-small", "vgg-small-5"]}))


def test_an_unknown_member_of_a_family_is_named_with_the_nearest(tiny) -> None:
    text = r"^distillation\.family: unknown model 'vgg-smal'\. Did you mean 'vgg-small'\?"
    with pytest.raises(ModelError, match=text):
        assemble(tiny({**DISTIL, "distillation.family": ["vgg-smal", "vgg-small"]}))


def test_a_member_that_images_are_too_small_for_is_refused_with_the_key(tiny) -> None:
    with pytest.raises(ModelError, match=r"^distillation\.family: .*vgg11"):
        assemble(tiny({**DISTIL, "distillation.family": ["vgg11", "vgg-small"]}))


def test_a_family_names_each_model_once(tiny) -> None:
    family = ["vgg-small", "vgg-small-3", "vgg-small"]
    with pytest.raises(ConfigError, match=r"^distillation\.family: it names 'vgg-small' twice\. "):
        assemble(tiny({**DISTIL, "distillation.family": family}))


def test_a_model_of_ones_own_needs_a_family(tiny) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    text = r"^distillation\.family: model custom belongs to no family .* Set distillation\.family to a list of models"
    with pytest.raises(ModelError, match=text):
        assemble(tiny({**DISTIL, "model.name": "custom"}), model=net)
    session = assemble(tiny({**DISTIL, "model.name": "custom", "distillation.family": ["custom"]}), model=net)
    assert list(session.world.family) == [BACKBONE]


# The public set.


@pytest.mark.parametrize(("public", "expected"), [(1, 1), (7, 7), ("50%", 4), ("95%", 7)])
def test_the_public_set_is_a_number_of_samples_or_a_share_of_the_test_set(tiny, public, expected) -> None:
    settings = {**DISTIL, "distillation.public": public, "distillation.family": ["vgg-small"]}
    data = assemble(tiny(settings), dataset=_images()).population.client_data(SERVER)
    assert (len(data.train), len(data.validation)) == (expected, 8 - expected)


@pytest.mark.parametrize("public", [8, 9, 5000])
def test_a_public_set_larger_than_what_is_held_out_is_refused(tiny, public) -> None:
    text = (
        rf"^distillation\.public: {public} samples are larger than what is held out: the test set has 8 samples, .*"
        r"Set it to at most 7$"
    )
    with pytest.raises(ConfigError, match=text):
        assemble(tiny({**DISTIL, "distillation.public": public}), dataset=_images())


def test_a_share_that_is_less_than_a_sample_is_refused(tiny) -> None:
    with pytest.raises(ConfigError, match=r"^distillation\.public: 10% of 8 test samples is less than one sample\. "):
        assemble(tiny({**DISTIL, "distillation.public": "10%"}), dataset=_images())


@pytest.mark.parametrize("public", [0, -5, "0%", "100%", "-5%", "half", 2.5, True])
def test_what_is_no_number_of_samples_is_refused_when_it_is_read(tiny, public) -> None:
    with pytest.raises(
        ConfigError, match=r"^distillation\.public: given .*, allowed: a whole number of at least 1, or "
    ):
        tiny({**DISTIL, "distillation.public": public})


# How much clients may count for.


def test_the_server_of_a_simulation_knows_the_shards_and_that_of_real_devices_does_not(tiny) -> None:
    class Devices:
        remote = True

    here, away = assemble(tiny()), assemble(tiny(), engine=lambda parts: Devices())
    assert [here.world.aggregator.sizes(k) for k in range(6)] == [here.population.samples(k) for k in range(6)]
    assert away.world.aggregator.sizes(0) is None
    registered = assemble(tiny({"aggregate.sizes": [9, 8, 7, 6, 5, 4]}), engine=lambda parts: Devices())
    assert [registered.world.aggregator.sizes(k) for k in range(6)] == [9, 8, 7, 6, 5, 4]


@pytest.mark.slow
def test_modules_are_counted_by_the_paper_or_by_what_they_take(tiny) -> None:
    """On the tiny run by either; the whole model's share is then one of the same model of memory."""
    paper = assemble(tiny({"memory.budget": "50%"}))
    measured = assemble(tiny({"memory.model": "measured", "memory.budget": "50%"}))
    assert type(paper.world.cost) is ChainCost
    cost = measured.world.cost
    assert isinstance(cost, MeasuredCost)
    assert cost.training == measured.world.local_training(1)
    assert measured.world.needs is cost, "modules are assigned by it as well"
    assert measured.budget == int(0.5 * cost.total_memory) != paper.budget
    for module in measured.world.modules:
        assert module.memory == cost.memory(module.first, module.last) <= measured.budget
    names = [name for name, tensor in paper.world.chain.tensors.items()]
    for name in names:  # counting has drawn nothing, and left everything in its place
        assert torch.equal(paper.world.chain.tensors[name], measured.world.chain.tensors[name])


def test_methods_without_modules_are_counted_by_the_paper(tiny) -> None:
    session = assemble(tiny({"memory.model": "measured", "method": "jfat"}))
    assert type(session.world.cost) is ChainCost


# Mirror images.


def test_mirror_images_and_moved_ones_are_refused_where_there_is_no_picture(tiny) -> None:
    rows, labels = torch.rand(8, 6), torch.arange(8) % 2
    vectors = from_tensors(rows, labels, rows, labels)
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    settings = {"method": "jfat", "model.name": "custom", "population.clients": 2, "shards.kind": "iid"}
    with pytest.raises(
        ConfigError, match=r"^data\.mirror: the data are of shape \(6,\), and only images.* Leave it false$"
    ):
        assemble(tiny({**settings, "data.mirror": True}), model=net, dataset=vectors)
    with pytest.raises(ConfigError, match=r"^data\.shift: the data are of shape \(6,\).* can be moved\. Leave it 0$"):
        assemble(tiny({**settings, "data.shift": 1}), model=net, dataset=vectors)


def test_images_are_not_moved_out_of_sight(tiny) -> None:
    assemble(tiny({"method": "jfat", "data.shift": 7}))
    with pytest.raises(
        ConfigError, match=r"^data\.shift: 8 pixels move images of 1x8x8 out of sight\. Take at most 7$"
    ):
        assemble(tiny({"method": "jfat", "data.shift": 8}))


def test_mirror_images_are_a_clients_training_samples(tiny) -> None:
    plain, mirrored = (assemble(tiny({"method": "jfat", "data.mirror": value})).population for value in (False, True))
    for client in range(6):
        usual, data = plain.client_data(client), mirrored.client_data(client)
        images = usual.train.fetch(torch.arange(len(usual.train)))
        assert torch.equal(data.train.fetch(torch.arange(len(data.train))), torch.cat([images, images.flip(3)]))
        assert len(data.validation) == len(usual.validation)
