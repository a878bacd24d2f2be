import numpy as np
import pytest
import torch
from small_examples import Pairs, indices

from fedprophet.data.examples import LocalExamples, MapExamples, TensorExamples
from fedprophet.errors import DataError

IMAGES = torch.tensor([0, 51, 102, 255], dtype=torch.uint8).reshape(4, 1, 1, 1)
LABELS = torch.tensor([0, 1, 1, 0])


class Picture:
    """Stands for a PIL image: all that NumPy knows of it is its array."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


def test_bytes_are_divided_by_255():
    examples = TensorExamples(IMAGES, LABELS)
    fetched = examples.fetch(indices(3, 1, 1))
    assert fetched.dtype == torch.float32
    assert fetched.flatten().tolist() == pytest.approx([1.0, 0.2, 0.2])
    assert examples.labels.dtype == torch.int64
    assert len(examples) == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_floats_are_kept(dtype):
    examples = TensorExamples(torch.tensor([[0.0], [0.25], [1.0]], dtype=dtype), [0, 1, 2])
    assert examples.fetch(indices(2, 1, 0)).tolist() == [[1.0], [0.25], [0.0]]


@pytest.mark.parametrize("images", [IMAGES, IMAGES / 255])
def test_fetched_images_are_fresh(images):
    examples = TensorExamples(images.clone(), LABELS)
    everything = torch.arange(4)
    before = examples.fetch(everything).clone()
    examples.fetch(everything).fill_(0.5)
    examples.fetch(indices(2)).fill_(0.5)
    assert torch.equal(examples.fetch(everything), before)


def test_labels_are_a_copy():
    labels = LABELS.clone()
    examples = TensorExamples(IMAGES, labels)
    labels.fill_(1)
    assert examples.labels.tolist() == [0, 1, 1, 0]


def test_images_without_channels_get_one():
    assert TensorExamples(torch.zeros(2, 5, 6), [0, 1]).fetch(indices(0)).shape == (1, 1, 5, 6)
    assert MapExamples(Pairs(torch.zeros(2, 5, 6), [0, 1])).fetch(indices(0)).shape == (1, 1, 5, 6)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.tensor([[0.5], [1.1]]), [0, 1], r"must lie in \[0, 1\], not in \[0.5, 1.1\]"),
        (torch.tensor([[-0.1], [1.0]]), [0, 1], r"not in \[-0.1, 1\]"),
        (
            torch.tensor([[0.5], [NAN], [2.0], [INF]]),
            [0] * 4,
            r"^image 1 has .* not numbers, or infinite \(2 of 4 images\)",
        ),
        (torch.tensor([[0.5], [-INF]]), [0, 1], r"^image 1 has .* \(1 of 2 images\)"),
        (torch.tensor([[5], [6]]), [0, 1], "uint8 or floating point, not int64"),
        (torch.zeros(2), [0, 1], r"batch first.*\(2,\)"),
        (torch.zeros(3, 1), [0, 1], "3 images but 2 labels"),
        (["cat", "dog"], [0, 1], "images must be a tensor or an array of numbers"),
        (torch.zeros(2, 1), [0, 10**30], "labels must be integers"),
        (torch.zeros(2, 1), [0.0, 1.0], "labels must be integers, not float32"),
        (torch.zeros(2, 1), torch.tensor([True, False]), "labels must be integers, not bool"),
        (torch.zeros(2, 1), ["cat", "dog"], "labels must be integers"),
        (torch.zeros(2, 1), [0, -1], "got -1"),
        (torch.zeros(2, 1), [[0], [1]], r"one integer for each image; got shape \(2, 1\)"),
    ],
)
def test_bad_tensors(images, labels, message):
    with pytest.raises(DataError, match=message):
        TensorExamples(images, labels)


# ---------------------------------------------------------------- map-style datasets


def test_a_picture_with_values_that_are_no_numbers_is_named():
    with pytest.raises(DataError, match=r"^image 0 has values that are not numbers, or infinite$"):
        MapExamples(Pairs(torch.full((2, 1, 2, 2), NAN), [0, 1]))


def test_labels_are_read_once_and_images_on_demand():
    source = Pairs(torch.rand(6, 1, 2, 2), [0, 1, 2, 0, 1, 2])
    examples = MapExamples(source)
    assert examples.labels.tolist() == [0, 1, 2, 0, 1, 2]
    before = source.reads
    assert examples.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert source.reads == before
    assert torch.equal(examples.fetch(indices(4, 0)), source.images[[4, 0]])
    assert source.reads == before + 2


@pytest.mark.parametrize("attribute", ["targets", "labels"])
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_declared_labels_spare_reading_the_images(attribute, kind):
    source = Pairs(torch.rand(500, 1, 2, 2), [k % 3 for k in range(500)])
    setattr(source, attribute, kind(source.answers))
    examples = MapExamples(source)
    assert examples.labels.tolist() == source.answers
    assert source.reads <= 10


@pytest.mark.parametrize(
    "declared",
    [
        pytest.param([0, 1], id="wrong length"),
        pytest.param([0.0, 1.0, 0.0, 1.0], id="not integers"),
        pytest.param([[0, 1]] * 4, id="two axes"),
        pytest.param([[0], [0, 1], [0], [1]], id="ragged"),
        pytest.param([1, 0, 1, 0], id="contradicted by the items"),
        pytest.param("abcd", id="a text"),
        pytest.param(lambda: [0, 1, 0, 1], id="a method"),
    ],
)
def test_useless_declared_labels_are_passed_over(declared):
    source = Pairs(torch.rand(4, 1, 2, 2), [0, 1, 0, 1])
    source.targets = declared
    assert MapExamples(source).labels.tolist() == [0, 1, 0, 1]


def test_a_target_transform_overrules_declared_labels():
    source = Pairs(torch.rand(100, 1, 2, 2), [0] * 100)
    source.answers[41] = 1  # a place that a spot check may well miss
    source.targets, source.target_transform = [0] * 100, lambda label: label
    assert MapExamples(source).labels.tolist() == source.answers


@pytest.mark.parametrize("label", [np.int64(1), torch.tensor(1), 1])
def test_kinds_of_integer_labels(label):
    assert MapExamples(Pairs(torch.rand(1, 1, 2, 2), [label])).labels.tolist() == [1]


@pytest.mark.parametrize(
    ("image", "shape"),
    [
        pytest.param(Picture(np.zeros((6, 5, 3), np.uint8)), (3, 6, 5), id="colour picture"),
        pytest.param(Picture(np.zeros((3, 5, 3), np.uint8)), (3, 3, 5), id="low colour picture"),
        pytest.param(Picture(np.zeros((6, 5), np.uint8)), (1, 6, 5), id="grey picture"),
        pytest.param(np.zeros((6, 5, 3), np.uint8), (3, 6, 5), id="array, channels last"),
        pytest.param(np.zeros((3, 6, 5), np.float64), (3, 6, 5), id="array, channels first"),
        pytest.param(np.zeros((6, 5), bool), (1, 6, 5), id="array of bits"),
        pytest.param(torch.zeros(3, 6, 5), (3, 6, 5), id="tensor"),
        pytest.param(torch.zeros(6, 5, 3), (6, 5, 3), id="tensor is taken as it is"),
    ],
)
def test_layouts(image, shape):
    assert MapExamples(Pairs([image], [0])).fetch(indices(0)).shape == (1, *shape)


def test_pixels_of_a_picture_go_where_they_belong():
    array = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    fetched = MapExamples(Pairs([Picture(array)], [0])).fetch(indices(0))[0]
    for row, column, channel in np.ndindex(2, 3, 3):
        assert fetched[channel, row, column].item() == pytest.approx(array[row, column, channel] / 255)


def test_fetching_nothing():
    assert MapExamples(Pairs(torch.rand(2, 3, 4, 5), [0, 1])).fetch(indices()).shape == (0, 3, 4, 5)


def test_map_fetch_does_not_alias():
    source = Pairs(torch.full((2, 1, 2, 2), 0.5), [0, 1])
    MapExamples(source).fetch(indices(0)).fill_(1.0)
    assert source.images[0].max() == 0.5


class Triples(Pairs):
    def __getitem__(self, index):
        return (*super().__getitem__(index), index)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Triples(torch.rand(2, 1, 2, 2), [0, 1]), r"item 0 of Triples is not a pair \(image, label\)"),
        (Pairs(torch.rand(2, 1, 2, 2), [0, "dog"]), "label 1 is 'dog', not an integer"),
        (Pairs(torch.rand(2, 1, 2, 2), [0, 1.5]), "label 1 is 1.5, not an integer"),
        (Pairs(torch.rand(2, 1, 2, 2), [0, -3]), "got -3"),
        (Pairs(["x"], [0]), "image 0 is a str"),
        (Pairs([torch.tensor(0.5)], [0]), "image 0 is a single number"),
        (Pairs([torch.full((1, 2, 2), 2.0)], [0]), r"image 0 must lie in \[0, 1\]"),
        (Pairs([], []), "the dataset Pairs is empty"),
        (iter([]), "is no map-style dataset"),
    ],
)
def test_bad_map_datasets(source, message):
    with pytest.raises(DataError, match=message):
        MapExamples(source)


def test_images_of_different_shapes_are_named():
    examples = MapExamples(Pairs([torch.zeros(1, 2, 2), torch.zeros(1, 2, 3)], [0, 1]))
    with pytest.raises(DataError, match=r"image 1 has shape \(1, 2, 3\), image 0 has \(1, 2, 2\)"):
        examples.fetch(indices(0, 1))


def test_local_examples_see_only_their_own():
    local = LocalExamples(TensorExamples(IMAGES, LABELS), np.array([3, 1]))
    assert len(local) == 2
    assert local.labels.tolist() == [0, 1]
    assert local.fetch(indices(1, 0)).flatten().tolist() == pytest.approx([0.2, 1.0])
    with pytest.raises(IndexError):
        local.fetch(indices(2))
