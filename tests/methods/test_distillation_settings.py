"""How many samples of the test set become the public set, and how models are distilled on it."""

import pytest

from fedprophet.errors import ConfigError
from fedprophet.messages.values import LocalTraining
from fedprophet.methods.distillation import DistillationSettings


@pytest.mark.parametrize(("value", "samples"), [("50%", 180), ("0.5%", 1), (359, 359), (1, 1), ("99.9%", 359)])
def test_the_public_set_is_a_number_or_a_share_of_the_test_set(value: int | str, samples: int) -> None:
    assert DistillationSettings(public=value).public_samples(360) == samples


@pytest.mark.parametrize("value", [360, 5000])
def test_a_public_set_larger_than_what_is_held_out(value: int) -> None:
    with pytest.raises(ConfigError) as caught:
        DistillationSettings(public=value).public_samples(360)
    text = str(caught.value)
    assert text.startswith(f"distillation.public: {value} samples are larger than what is held out")
    assert "360 samples" in text
    assert "at most 359" in text


def test_a_public_set_of_less_than_a_sample() -> None:
    with pytest.raises(ConfigError, match=r"^distillation.public: 0.2% of 360 test samples is less than one sample"):
        DistillationSettings(public="0.2%").public_samples(360)


def test_distillation_trains_like_a_client_or_as_it_is_set() -> None:
    usual = LocalTraining(30, 64, learning_rate=0.02, momentum=0.9, weight_decay=1e-4, strong_convexity=0.1)
    like = DistillationSettings().training(usual)
    assert (like.iterations, like.learning_rate, like.weight_decay, like.momentum) == (128, 0.02, 1e-4, 0.9)
    own = DistillationSettings(learning_rate=0.005, weight_decay=0.0).training(usual)
    assert (own.iterations, own.learning_rate, own.weight_decay, own.momentum) == (128, 0.005, 0.0, 0.9)
