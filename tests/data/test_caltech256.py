"""Caltech-256: its clutter is dropped, 25 images of each class are for test, and what is missing is said."""

import pytest
import torch

from fedprophet.data import caltech256, load
from fedprophet.errors import DataError

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def caltech(tmp_path):
    for name in ("002.american-flag", "001.ak47", "257.clutter"):
        for number in range(1, 28):
            path = tmp_path / "256_ObjectCategories" / name / f"{name[:3]}_{number:04}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (8 * number, 0, 0)).save(path)
    return tmp_path


def test_caltech_drops_its_clutter_and_holds_out_25(caltech, caplog):
    dataset = load("caltech256", caltech, size=8)
    assert (dataset.name, dataset.classes) == ("caltech256", 2)
    assert dataset.test.labels.tolist() == [0] * 25 + [1] * 25
    reds = dataset.train.fetch(torch.arange(4))[:, 0, 0, 0].mul(255).round().int().tolist()
    assert reds == pytest.approx([208, 216] * 2, abs=2)
    assert load("caltech256", caltech / "256_ObjectCategories", size=8).digest() == dataset.digest()
    assert "holds 2 classes besides the clutter, not 256" in caplog.messages[0]
    assert "holds 54 images besides the clutter, not 29780" in caplog.messages[1]


def test_caltech_check(caltech):
    findings = caltech256.check(caltech, size=8)
    assert findings.found == caltech / "256_ObjectCategories"
    assert (findings.train, findings.test) == (4, 50)
    assert list(findings.images) == ["001.ak47", "002.american-flag"]
    assert not findings.complete
    assert len(findings.problems) == 2


def test_caltech_without_data(tmp_path):
    (tmp_path / "cifar-10-batches-bin").mkdir()  # roots are shared
    with pytest.raises(DataError) as caught:
        load("caltech256", tmp_path)
    text = str(caught.value)
    assert text.startswith(f"caltech256: there is no data in {tmp_path}. Put the folder 256_ObjectCategories there")
    assert "\n" not in text
    (tmp_path / "256_ObjectCategories.tar").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"256_ObjectCategories\.tar is there but not unpacked: run fedprophet data get"
    ):
        load("caltech256", tmp_path)


def test_get_caltech(caltech, tmp_path, monkeypatch):
    monkeypatch.setattr(caltech256, "fetch", None)
    assert "is there already" in caltech256.get(caltech)
    calls = []
    monkeypatch.setattr(caltech256, "fetch", lambda *arguments: calls.append(arguments) or tmp_path / "archive")
    monkeypatch.setattr(caltech256, "unpack", lambda *arguments: calls.append(arguments) or tmp_path / "there")
    new = tmp_path / "new"
    assert "unpacked into" in caltech256.get(new)
    assert calls[0][0].digest == "67b4f42ca05d46448c6bb8ecd2220f6d"
    assert calls[1] == (tmp_path / "archive", new, "256_ObjectCategories")
