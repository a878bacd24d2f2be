"""What the programs under benchmarks/ share."""

import json
import sys
from pathlib import Path

import pytest
from machine import measured, played, spread, written


def test_the_spread_of_some_values() -> None:
    """The standard deviation of 96 and 98 is √2."""
    assert spread([97.0]) == "97.0"
    assert spread([96.0, 98.0]) == "97.0 ± 1.4"


def test_the_head_says_how_a_program_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/digits.py", "--only", "APA off"])
    assert measured("digits").startswith("`python benchmarks/digits.py --only 'APA off'` on ")


def row(name: str, seed: int) -> dict[str, object]:
    return {"name": name, "seed": seed}


def test_rows_come_in_the_order_of_their_jobs_and_are_written_with_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = played(row, [("a", 0), ("b", 1)], workers=1)
    assert rows == [{"name": "a", "seed": 0}, {"name": "b", "seed": 1}]
    written("digits", "# Digits\n", rows, None)
    assert list(tmp_path.iterdir()) == []
    written("digits", "# Digits\n", rows, tmp_path / "out")
    assert (tmp_path / "out" / "digits.md").read_text() == "# Digits\n"
    assert json.loads((tmp_path / "out" / "digits.json").read_text()) == rows
    assert capsys.readouterr().out.splitlines()[:2] == [json.dumps(each) for each in rows]
