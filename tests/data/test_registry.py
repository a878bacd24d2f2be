"""A dataset is one module: what its decorator registers can be loaded, checked and fetched by name."""

from pathlib import Path

import pytest
import torch

from fedprophet import data
from fedprophet.config.load import load_config
from fedprophet.config.reference import to_toml
from fedprophet.data import registry
from fedprophet.data.dataset import Dataset, from_tensors
from fedprophet.errors import DataError


@pytest.fixture
def stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "DATASETS", {})

    @registry.dataset("stripes", "striped images")
    def load(root: Path | None, *, wide: int = 2) -> Dataset:
        images = torch.zeros(5, 1, wide, wide)
        return from_tensors(images, [0, 1, 1, 0, 1], images[:2], [0, 1], name=str(root))


@pytest.mark.usefixtures("stripes")
def test_a_registered_dataset() -> None:
    loaded = data.load("stripes", "~/x", wide=3)
    assert (loaded.name, loaded.shape) == (str(Path("~/x").expanduser()), (1, 3, 3))
    findings = data.check("stripes")
    assert (findings.train, findings.test, findings.images, findings.complete) == (5, 2, {"0": 3, "1": 4}, True)
    entry = data.find_dataset("stripes")
    assert entry.line == "striped images (options: wide)"
    with pytest.raises(DataError, match="stripes: there is nothing to fetch"):
        entry.get(Path())


@pytest.mark.usefixtures("stripes")
def test_an_option_that_its_loader_does_not_have() -> None:
    text = r"^data\.options: unknown option of stripes 'wife'\. Did you mean 'wide'\? Known: wide$"
    for function in (data.load, data.check):
        with pytest.raises(DataError, match=text):
            function("stripes", wife=3)


def test_mirror_images_are_a_choice_that_a_file_keeps(tmp_path: Path) -> None:
    assert not load_config("digits").data.mirror
    config = load_config("digits", ["data.mirror=true"])
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "run.toml") == config
    assert config.data.mirror
