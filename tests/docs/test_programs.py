"""The Python in the README and the docs runs: the blocks of a page are one program, in their order.

A block that says which file of the repository it is (`# src/…`, `# tests/…`) is run like the others, and so are the
tests in it. Some pages begin in the middle of something: `GIVEN` has the names that they take for granted.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
from documented import PAGES, blocks

IMAGES = "torch.rand({count}, 1, 8, 8), torch.arange({count}) % 10"
GIVEN = {
    "README.md": f"""
import torch
from torch import nn
train_images, train_labels = {IMAGES.format(count=200)}
test_images, test_labels = {IMAGES.format(count=40)}
def MyNet():
    layers = [layer for _ in range(12) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *layers, nn.Flatten(), nn.Linear(512, 10))
""",
    "docs/getting-started.md": """
from fedprophet.models import build
from safetensors.torch import save_file
save_file(build("vgg-small", (1, 8, 8), 10).state_dict(), "model.safetensors", {"norm_layers": "shared"})
""",
    "docs/how-to/compare.md": """
import fedprophet
for name in ("jfat", "fedprophet"):
    tiny = {"method": name, "rounds": 1, "train": {"iterations": 1, "warmup": 0}, "attack": {"steps": 1}}
    tiny |= {"memory": {"budget": "50%"}, "evaluate": {"clients": 2, "steps": 1, "test_samples": 20}}
    tiny |= {"measure": {"clients": 2, "steps": 1}}
    fedprophet.train(tiny, out=f"runs/{name}-0")
""",
    "docs/how-to/one-model.md": """
import torch
from fedprophet.models import build
from safetensors.torch import save_file
save_file({}, "model.safetensors", {"smoothing": "1.0"})
model, images, labels = build("vgg-small", (1, 8, 8), 10).eval(), torch.rand(4, 1, 8, 8), torch.tensor([3, 3, 3, 7])
""",
    "docs/how-to/report.md": """
import fedprophet
tiny = {"rounds": 1, "train": {"iterations": 1, "warmup": 0}, "attack": {"steps": 1}, "memory": {"budget": "50%"}}
tiny |= {"evaluate": {"clients": 2, "steps": 1, "test_samples": 20}, "measure": {"clients": 2, "steps": 1}}
fedprophet.train(tiny, out="runs/digits-fedprophet-1")
""",
    "docs/how-to/fleet.md": """
from fedprophet.cascade import atoms, cost as costs, partition as parts
from fedprophet.messages.values import Resources
from fedprophet.models import build
cost = costs.cost_of(atoms.chain_of(build("vgg-small", (1, 8, 8), 10)), (1, 8, 8), 64, 10)
module = parts.partition(cost, cost.total_memory // 4)[0]
resources = Resources(memory=10**6, performance=1e9, bandwidth=1e7)
seed, round, client, download_bytes, upload_bytes = 0, 1, 2, 1000, 1000
""",
}
"""What a page takes for granted, as a program that runs before its own."""

TINY = '{"rounds": 1, "train": {"iterations": 1, "warmup": 0}, "evaluate": {"clients": 2, "test_samples": 20}}'
LARGE = {
    "docs/how-to/report.md": ("server.wait()", ""),
    "docs/how-to/watch.md": ('train("digits"', f"train({TINY}"),
    "README.md": ('"rounds": 40', '"rounds": 1, "train": {"iterations": 1, "warmup": 0}'),
}
"""What is written for a reader's patience, and what takes its place here."""

PROGRAMS = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
START = """
import os, runpy
os.chdir({folder!r})
said = os.open("said.txt", os.O_WRONLY | os.O_CREAT)
os.dup2(said, 1)
os.dup2(said, 2)
runpy.run_path("program.py", run_name="__main__")
"""
RUN_TESTS = """
for _name, _test in list(globals().items()):
    if _name.startswith("test_") and callable(_test):
        _test()
"""


def program(page: str) -> str:
    parts = [GIVEN.get(page, ""), *(block.text for block in blocks(page) if block.language == "python"), RUN_TESTS]
    text = "\n".join(parts)
    if page in LARGE:
        assert LARGE[page][0] in text
        text = text.replace(*LARGE[page])
    return text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, Path], Any]]:
    """Return a function that runs a program in a process of its own, forked from one that has loaded torch."""
    with processes.forking() as context:

        def started(text: str, folder: Path) -> Any:
            (folder / "program.py").write_text(text, encoding="utf-8")
            process = context.Process(target=exec, args=(START.format(folder=str(folder)),))
            process.start()
            process.join(processes.PATIENCE)
            return process.exitcode

        yield started


@pytest.mark.slow
@pytest.mark.parametrize("page", PROGRAMS)
def test_it_runs(page: str, run: Callable[[str, Path], Any], tmp_path: Path) -> None:
    for block in blocks(page):
        if block.file and block.language == "toml":
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    assert run(program(page), tmp_path) == 0, (tmp_path / "said.txt").read_text("utf-8")


def test_the_pages_for_beginners_have_programs() -> None:
    extend = {f"docs/extend/{name}.md" for name in ("method", "model", "device")}
    assert {"README.md", "docs/getting-started.md", "docs/how-to/own-model.md", *extend} <= set(PROGRAMS)
    assert set(GIVEN) <= set(PROGRAMS)
