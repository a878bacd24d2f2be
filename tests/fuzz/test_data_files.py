"""Datasets of tensors and of items, image folders with damaged files, starting weights with damage."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedprophet import models
from fedprophet.data import load
from fedprophet.data.dataset import Dataset, from_datasets, from_tensors
from fedprophet.models.weights import load_weights
from fedprophet.storage.files import tensors_to_bytes

from .conftest import NUMBERS, Input, anything, damaged

pytestmark = pytest.mark.slow

KINDS = (torch.uint8, torch.float32, torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64)


def _images(rng: random.Random, count: int) -> Any:
    if rng.random() < 0.1:
        return anything(rng)
    shape = rng.choice(((1, 8, 8), (3, 4, 4), (8, 8), (8,), (), (0,), (1, 0, 8), (1, 1, 1)))
    images = torch.rand((count, *shape)).to(rng.choice(KINDS if rng.random() < 0.3 else KINDS[:3]))
    if images.numel() and images.is_floating_point() and rng.random() < 0.2:
        images.flatten()[-1] = rng.choice((float("nan"), float("inf"), -0.1, 1.1))
    return images.numpy() if rng.random() < 0.2 else images


def _labels(rng: random.Random, count: int) -> Any:
    labels: list[Any] = [rng.randrange(3) for _ in range(count)]
    if labels and rng.random() < 0.3:
        labels[0] = anything(rng)
    if rng.random() < 0.5:
        return labels
    try:
        return torch.tensor(labels).to(rng.choice(KINDS if rng.random() < 0.2 else KINDS[4:5]))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return labels


class Items:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def _read(dataset: Dataset) -> None:
    dataset.digest()


def test_tensors(fuzz: Any) -> None:
    def make(rng: random.Random) -> Input:
        torch.manual_seed(rng.randrange(2**31))
        counts = [rng.choice((0, 1, 6, 6, 6, 6)) for _ in range(2)]
        parts = [part for count in counts for part in (_images(rng, count), _labels(rng, count))]
        return parts, lambda: _read(from_tensors(*parts))

    fuzz("tensors", 800, make)


def test_items(fuzz: Any) -> None:
    def item(rng: random.Random, at: int) -> Any:
        good = torch.rand(1, 8, 8) if rng.random() < 0.9 else _images(rng, 1)
        return (good, at % 3) if rng.random() < 0.93 else anything(rng) if rng.random() < 0.5 else (good, anything(rng))

    def make(rng: random.Random) -> Input:
        torch.manual_seed(rng.randrange(2**31))
        train, test = ([item(rng, at) for at in range(rng.choice((0, 6, 6)))] for _ in range(2))
        return (train, test), lambda: _read(from_datasets(Items(train), Items(test)))

    tried = fuzz("items", 400, make)
    assert tried.accepted > 10


def test_image_folders(fuzz: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for label in "ab":
        for number in range(4):
            place = tmp_path / "images" / label / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(number).integers(0, 256, (9, 9, 3), dtype=np.uint8)
            image.fromarray(pixels).save(place)
    pictures = sorted((tmp_path / "images").rglob("*.png"))

    def read(file: Path, data: bytes, options: dict[str, Any]) -> None:
        before = file.read_bytes()
        file.write_bytes(data)
        try:
            _read(load("folder", tmp_path / "images", **options))
        finally:
            if file in pictures:  # of the cache, what was damaged has been made anew
                file.write_bytes(before)

    def make(rng: random.Random) -> Input:
        kept = sorted(path for path in (tmp_path / "images" / ".fedprophet-cache").rglob("*") if path.is_file())
        file = rng.choice(pictures if rng.random() < 0.5 or not kept else kept)
        options: dict[str, Any] = {"size": 8}
        if rng.random() < 0.3:
            options[rng.choice(("size", "test_per_class", "cache", "nope"))] = anything(rng)
        if isinstance(options.get("cache"), str):  # a text is a place to write to: none but in the test's own folder
            options["cache"] = f"{tmp_path}/cache{options['cache'].replace('/', '')}"
        data = damaged(rng, file.read_bytes()) if rng.random() < 0.7 else file.read_bytes()
        return (file, options), lambda: read(file, data, options)

    tried = fuzz("images", 300, make)
    assert tried.accepted > 50


def test_starting_weights(fuzz: Any, tmp_path: Path) -> None:
    model = models.build("vgg-small-3", (1, 8, 8), 3, width=2)
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    whole, file = tensors_to_bytes(tensors), tmp_path / "weights.safetensors"

    def other(rng: random.Random) -> dict[str, Tensor]:
        name = rng.choice(list(tensors))
        value = rng.choice((tensors[name].flatten()[:1], tensors[name].double(), torch.zeros(()), tensors[name][None]))
        return {**tensors, rng.choice((name, name, "more")): value}

    def make(rng: random.Random) -> Input:
        data = damaged(rng, whole) if rng.random() < 0.6 else tensors_to_bytes(other(rng))
        name = rng.choice(("vgg-small-3", "vgg16", "nope"))

        def read() -> None:
            file.write_bytes(data)
            load_weights(model, str(file), name)

        return data, read

    fuzz("weights", 300, make)


def test_options_of_models(fuzz: Any) -> None:
    def make(rng: random.Random) -> Input:
        name = rng.choice(list(models.MODELS))
        known = (*models.MODELS[name].options, "nope")
        options = {rng.choice(known): rng.choice((anything(rng), rng.choice(NUMBERS), rng.randint(0, 9)))}
        shape = rng.choice((*3 * ((1, 8, 8), (3, 32, 32), (3, 64, 64)), (3, 1, 1), (0, 8, 8), (3, 8), (1, "8", 8)))
        classes = rng.choice((*6 * (10,), 2, 1, 0, "3"))

        def build() -> None:
            with torch.device("meta"):  # no weights: only whether they are refused
                models.build(name, shape, classes, **options)

        return (name, shape, classes, options), build

    tried = fuzz("models", 400, make)
    assert tried.accepted > 10
