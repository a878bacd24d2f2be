import numpy as np
import pytest
import torch

from fedprophet.data import DATASETS, dataset, load
from fedprophet.data.dataset import (
    ClientData,
    LocalExamples,
    MapExamples,
    MirroredExamples,
    ShiftedExamples,
    TensorExamples,
    from_datasets,
    from_tensors,
    shifted,
)
from fedprophet.errors import DataError

IMAGES = torch.tensor([0, 51, 102, 255], dtype=torch.uint8).reshape(4, 1, 1, 1)
LABELS = torch.tensor([0, 1, 1, 0])


def indices(*values):
    return torch.tensor(values, dtype=torch.int64)


class Pairs:
    """A map-style dataset that counts what is read from it."""

    def __init__(self, images, labels):
        self.images, self.answers, self.reads = images, labels, 0

    def __len__(self):
        return len(self.answers)

    def __getitem__(self, index):
        self.reads += 1
        return self.images[index], self.answers[index]


class Picture:
    """Stands for a PIL image: all that NumPy knows of it is its array."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


# ---------------------------------------------------------------- examples


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


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.tensor([[0.5], [1.1]]), [0, 1], r"must lie in \[0, 1\], not in \[0.5, 1.1\]"),
        (torch.tensor([[-0.1], [1.0]]), [0, 1], r"not in \[-0.1, 1\]"),
        (torch.tensor([[0.5], [float("nan")]]), [0, 1], r"must lie in \[0, 1\]"),
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


# ---------------------------------------------------------------- mirror images


def pictures():
    """Return two pictures of one row, two channels and three columns, of labels 1 and 0."""
    first, second = [[[0, 51, 102]], [[153, 204, 255]]], [[[255, 0, 0]], [[51, 51, 0]]]
    return TensorExamples(torch.tensor([first, second], dtype=torch.uint8), [1, 0])


def test_mirror_images_follow_the_examples_in_their_order():
    mirrored = MirroredExamples(pictures())
    assert len(mirrored) == 4
    assert mirrored.labels.tolist() == [1, 0, 1, 0]
    fetched = (mirrored.fetch(indices(3, 0, 2, 1, 2)) * 5).round().int().tolist()
    first, second = [[[0, 1, 2]], [[3, 4, 5]]], [[[5, 0, 0]], [[1, 1, 0]]]
    turned, other = [[[2, 1, 0]], [[5, 4, 3]]], [[[0, 0, 5]], [[0, 1, 1]]]
    assert fetched == [other, first, turned, second, turned]


def test_rows_stay_where_they_are():
    """Left and right change places, top and bottom do not."""
    image = torch.tensor([[[[0.0, 0.1], [0.2, 0.3]]]])
    fetched = MirroredExamples(TensorExamples(image, [0])).fetch(indices(1))
    assert torch.equal(fetched, torch.tensor([[[[0.1, 0.0], [0.3, 0.2]]]]))


@pytest.mark.parametrize("images", [torch.rand(2, 1, 2, 3), torch.randint(256, (2, 1, 2, 3), dtype=torch.uint8)])
def test_mirror_images_leave_what_is_stored_alone(images):
    stored = images.clone()
    MirroredExamples(TensorExamples(images, [0, 1])).fetch(indices(0, 1, 2, 3)).fill_(0.5)
    assert torch.equal(images, stored)


def test_no_position_behind_the_last_mirror_image():
    local = LocalExamples(pictures(), np.array([1]))
    assert MirroredExamples(local).fetch(indices(0, 1)).shape == (2, 2, 1, 3)
    with pytest.raises(IndexError):
        MirroredExamples(local).fetch(indices(2))


def test_mirror_images_of_nothing():
    nothing = MirroredExamples(LocalExamples(pictures(), np.arange(0)))
    assert len(nothing) == 0
    assert nothing.fetch(indices()).shape == (0, 2, 1, 3)


def test_only_training_is_mirrored():
    own, held_out = (LocalExamples(pictures(), np.array([k])) for k in (0, 1))
    plain, mirrored = (ClientData(own, held_out, mirrored=value) for value in (False, True))
    assert plain.train is own
    assert (len(mirrored.train), len(mirrored.own), len(mirrored.validation)) == (2, 1, 1)
    assert (plain.size, mirrored.size) == (2, 2)
    assert mirrored.validation is held_out


# ---------------------------------------------------------------- moved images


def test_images_are_moved_down_and_right():
    """Each by its own offset: one down, two left, not at all; what comes in is black, what goes out is gone."""
    image = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]])
    moved = shifted(torch.stack([image, image, image]), torch.tensor([[1, 0], [0, -2], [0, 0]]))
    down = [[[0, 0, 0], [1, 2, 3]]]
    left = [[[3, 0, 0], [6, 0, 0]]]
    assert moved.int().tolist() == [down, left, image.int().tolist()]


def test_all_channels_move_together_and_nothing_stored_changes():
    images = torch.rand(5, 3, 6, 4)
    stored, offsets = images.clone(), torch.tensor([[0, 3], [-5, 1], [2, -2], [5, -3], [-1, -1]])
    moved = shifted(images, offsets)
    assert torch.equal(images, stored)
    for before, after, (down, right) in zip(images, moved, offsets.tolist(), strict=True):
        wide = torch.nn.functional.pad(before, (5, 5, 5, 5))
        assert torch.equal(after, wide[:, 5 - down : 11 - down, 5 - right : 9 - right])


def test_an_example_moves_by_its_own_offset_wherever_it_is_asked_for():
    offsets = torch.tensor([[0, 1], [0, 0], [0, -1], [0, 0]])
    moved = ShiftedExamples(MirroredExamples(pictures()), offsets)
    assert (len(moved), moved.labels.tolist()) == (4, [1, 0, 1, 0])
    fetched = (moved.fetch(indices(2, 0, 3)) * 5).round().int().tolist()
    right, turned_left = [[[0, 0, 1]], [[0, 3, 4]]], [[[1, 0, 0]], [[4, 3, 0]]]
    assert fetched == [turned_left, right, [[[0, 0, 5]], [[0, 1, 1]]]]


# ---------------------------------------------------------------- whole datasets


def test_statistics_by_hand():
    # Channel 0 holds 0, 1, 0, 1: mean 1/2, standard deviation 1/2. Channel 1 never changes.
    images = torch.tensor([[[0.0, 1.0], [0.25, 0.25]], [[0.0, 1.0], [0.25, 0.25]]]).reshape(2, 2, 1, 2)
    made = from_tensors(images, [0, 1], images, [0, 1])
    assert made.mean == pytest.approx((0.5, 0.25))
    assert made.std == pytest.approx((0.5, 1.0))
    assert (made.name, made.classes, made.shape) == ("tensors", 2, (2, 1, 2))


def test_statistics_over_several_chunks():
    images = torch.rand(150, 3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    made = from_tensors(images, [k % 2 for k in range(150)], images[:2], [0, 1])
    assert made.mean == pytest.approx(images.mean((0, 2, 3)).tolist(), abs=1e-6)
    assert made.std == pytest.approx(images.std((0, 2, 3), correction=0).tolist(), abs=1e-6)


def test_statistics_read_a_bounded_sample(monkeypatch):
    monkeypatch.setattr(dataset, "STATISTICS_SAMPLE", 4)
    source = Pairs(torch.linspace(0, 1, 9).reshape(9, 1, 1, 1), [0, 1] * 4 + [0])
    source.targets = source.answers
    made = from_datasets(source, source)
    # Positions 0, 2, 4, 6 of 9: values 0, 1/4, 1/2, 3/4.
    assert made.mean == pytest.approx((0.375,))


def test_from_datasets_equals_from_tensors():
    images, labels = torch.rand(6, 1, 2, 2), [0, 1, 2, 0, 1, 2]
    a = from_tensors(images, labels, images[:3], labels[:3])
    b = from_datasets(Pairs(images, labels), Pairs(images[:3], labels[:3]))
    assert (a.mean, a.std, a.classes, a.shape, a.digest()) == (b.mean, b.std, b.classes, b.shape, b.digest())


def test_torch_datasets_fit():
    tensors = torch.utils.data.TensorDataset(torch.rand(6, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2]))
    made = from_datasets(tensors, torch.utils.data.Subset(tensors, [5, 0]))
    assert made.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert made.test.labels.tolist() == [2, 0]


GOOD = (torch.zeros(4, 1, 2, 2), [0, 1, 1, 0])


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ((torch.zeros(0, 1, 2, 2), []), GOOD, "'tensors': the training set is empty"),
        (GOOD, (torch.zeros(0, 1, 2, 2), []), "'tensors': the test set is empty"),
        ((torch.zeros(2, 1, 2, 2), [3, 3]), GOOD, "the training set has only class 3; two are needed"),
        (GOOD, (torch.zeros(1, 1, 2, 2), [2]), "test set has label 2, the training set only labels up to 1"),
        (GOOD, (torch.zeros(1, 1, 3, 2), [0]), r"training images have shape \(1, 2, 2\), test images \(1, 3, 2\)"),
        ((torch.zeros(2, 1, 2, 2), [0, 10**9]), GOOD, "label 1000000000 means .* more than the 2 training images"),
        ((torch.zeros(2, 1, 2, 2), [0, -1]), GOOD, "'tensors', training set: .*got -1"),
        (GOOD, (torch.zeros(2, 1, 2, 2), [0.5, 1]), "'tensors', test set: labels must be integers"),
    ],
)
def test_parts_that_do_not_fit(train, test, message):
    with pytest.raises(DataError, match=message):
        from_tensors(*train, *test)


def test_bad_map_dataset_names_its_part():
    good = Pairs(*GOOD)
    with pytest.raises(DataError, match="'mine', test set: the dataset Pairs is empty"):
        from_datasets(good, Pairs([], []), name="mine")


def build(images, labels, test_images=None, test_labels=None):
    return from_tensors(
        images,
        labels,
        images if test_images is None else test_images,
        labels if test_labels is None else test_labels,
        name="x",
    )


def test_digest_notices_other_data():
    images, labels = torch.zeros(6, 1, 2, 2), [0, 1, 2, 0, 1, 2]
    other = images.clone()
    other[3, 0, 1, 1] = 0.5
    digests = [
        made.digest()
        for made in (
            build(images, labels),
            build(images, [0, 1, 2, 0, 2, 1]),
            build(other, labels),
            build(images, labels, other),
            build(images, labels, None, [0, 1, 2, 0, 1, 1]),
            build(images.reshape(6, 1, 4, 1), labels),
            build(images[:5], labels[:5]),
        )
    ]
    assert len(set(digests)) == len(digests)
    assert build(images.clone(), list(labels)).digest() == digests[0]


def test_unknown_dataset_names_the_nearest():
    with pytest.raises(DataError, match=r"unknown dataset 'digit'. Did you mean 'digits'\?"):
        load("digit")
    assert "digits" in DATASETS


def test_images_without_pixels_are_refused():
    with pytest.raises(DataError, match=r"images of shape \(1, 0, 8\) have no pixels"):
        from_tensors(torch.zeros(2, 1, 0, 8), [0, 1], torch.zeros(2, 1, 0, 8), [0, 1])
