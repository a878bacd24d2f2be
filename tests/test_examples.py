"""Every program in examples/ runs, is short, and prints what it promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = {path.stem: path for path in (Path(__file__).parents[1] / "examples").glob("*.py")}


def run(name: str, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES[name])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_there_are_the_two_that_are_promised():
    assert set(EXAMPLES) == {"own_model", "partition_only"}, "give a new example a test below"


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_is_at_most_forty_lines(name):
    assert len(EXAMPLES[name].read_text().splitlines()) <= 40


@pytest.mark.slow
def test_the_partitioner_alone(tmp_path):
    out = run("partition_only", tmp_path)
    whole = float(re.search(r"whole model: ([\d.]+) MB", out)[1])
    modules = [float(size) for size in re.findall(r"^module \d+: ([\d.]+) MB", out, re.MULTILINE)]
    assert len(modules) > 1
    assert max(modules) <= whole / 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_model_and_data_of_ones_own(tmp_path):
    out = run("own_model", tmp_path)
    assert len(re.findall(r"^module \d+: ", out, re.MULTILINE)) > 1
    for kind in ("personalised", "global"):
        assert re.search(rf"^{kind} {{'clean': [\d.]+, 'pgd20': [\d.]+}}$", out, re.MULTILINE)
    folder = re.search(r"^files: (.*)$", out, re.MULTILINE)[1]
    assert (tmp_path / folder / "model.safetensors").is_file()
