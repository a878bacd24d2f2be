"""Starting weights that say how their input is normalised: the run, the model it exports and its report follow them."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fedprophet.errors import ModelError
from fedprophet.models import build
from fedprophet.runs.export import write_model
from fedprophet.runs.run import start
from fedprophet.runs.session import assemble


@pytest.fixture
def weights(tmp_path):
    def write(**metadata):
        torch.manual_seed(3)
        state = build("vgg-small", (1, 8, 8), 10, width=4).state_dict()
        save_file(dict(state), tmp_path / "start.safetensors", metadata)
        return {"model.weights": str(tmp_path / "start.safetensors")}

    return write


def test_images_are_normalised_as_the_weights_expect(tiny, weights, tmp_path):
    run = start(tiny(weights(normalisation="mean .5 std .25")), tmp_path / "run")
    session = run.session
    images = torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1, 1).expand(3, 1, 8, 8)
    assert session.world.chain.run(images, 0, 1)[:, 0, 0, 0].tolist() == [-2.0, 0.0, 2.0]
    assert session.notes[0].endswith("inputs are normalised as the file says")
    write_model(run, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert (json.loads(metadata["normalize_mean"]), json.loads(metadata["normalize_std"])) == ([0.5], [0.25])


@pytest.mark.parametrize("metadata", [{}, {"normalisation": "by feel"}, {"normalisation": "mean std"}])
def test_without_a_word_about_it_the_dataset_decides(tiny, weights, metadata):
    session = assemble(tiny(weights(**metadata)))
    assert session.normalize.numbers == (session.dataset.mean, session.dataset.std)
    assert "normalised" not in session.notes[0]


def test_another_number_of_channels_is_refused(tiny, weights):
    with pytest.raises(ModelError, match=r"model\.weights: .* expects images of 3 channels, and digits has 1"):
        assemble(tiny(weights(normalisation="mean .485 .456 .406 std .229 .224 .225")))
