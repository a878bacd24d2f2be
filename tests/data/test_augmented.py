import numpy as np
import pytest
import torch
from small_examples import indices, pictures

from fedprophet.data.augmented import MirroredExamples, ShiftedExamples, shifted
from fedprophet.data.examples import LocalExamples, TensorExamples

# ---------------------------------------------------------------- mirror images


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
