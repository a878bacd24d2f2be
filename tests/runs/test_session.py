"""Starting weights through a run's configuration."""

import pytest
import torch
from safetensors.torch import save_file

from fedprophet.errors import ModelError
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
