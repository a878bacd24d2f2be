"""What a page says of the settings behind it."""

from pathlib import Path

import pytest

from fedprophet.display.tables import markdown
from fedprophet.reproduce.output import Outcome, document, page
from fedprophet.reproduce.registry import EXPERIMENTS
from fedprophet.reproduce.runs import Setup
from fedprophet.reproduce.scales import PAPER, SMALL, Scale


def outcome(name: str, *overrides: str, scale: Scale = SMALL) -> Outcome:
    return Outcome(EXPERIMENTS[name], Setup(scale, Path("nowhere"), overrides), ())


def test_a_page_says_what_was_changed() -> None:
    found = outcome("table3", "rounds=1", "train.batch=8")
    assert "\n- changed by --set: rounds=1, train.batch=8\n" in markdown(page(found))
    assert (document(found)["changed"], document(found)["unheeded"]) == (["rounds=1", "train.batch=8"], [])
    usual = outcome("table3")
    assert "--set" not in markdown(page(usual))
    assert document(usual)["changed"] == []


def test_a_page_says_what_was_set_in_vain() -> None:
    found = outcome("table3", "method=jfat", "rounds=1")
    lines = page(found).lines
    assert lines[1:] == (
        "changed by --set: rounds=1",
        "--set method=jfat changes nothing: every row sets method itself",
    )
    assert document(found)["unheeded"] == [lines[2]]
    assert outcome("figure10", "seed=5").changed == ()


def test_a_key_that_some_rows_set_changes_the_others() -> None:
    """Of the four rows, two are without DMA by their own key."""
    found = outcome("table3", "assignment.enabled=true")
    assert page(found).lines[1:] == (
        "changed by --set: assignment.enabled=true",
        "--set assignment.enabled=true does not change the rows that set assignment.enabled themselves: no DMA, "
        "neither",
    )


@pytest.mark.parametrize(("scale", "changed"), [(SMALL, ()), (PAPER, ("rounds=4",))])
def test_the_clock_is_changed_at_the_papers_scale_alone(scale: Scale, changed: tuple[str, ...]) -> None:
    found = outcome("figure7", "rounds=4", "method=jfat", scale=scale)
    assert found.changed == changed
    assert len(found.unheeded) == len(changed)


def test_what_is_computed_is_never_changed() -> None:
    found = outcome("table7", "rounds=4")
    assert (found.changed, found.unheeded) == ((), ())
