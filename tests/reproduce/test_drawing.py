"""Every experiment can be drawn, whatever is known of it."""

import pytest

from fedprophet.reproduce.drawing import picture
from fedprophet.reproduce.findings import Curve, Part, printed
from fedprophet.reproduce.paper import numbers_of, paper_numbers
from fedprophet.reproduce.registry import EXPERIMENTS

PNG = b"\x89PNG\r\n"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_draws_what_is_known(name: str) -> None:
    experiment = EXPERIMENTS[name]
    label = next(iter(paper_numbers().get(name, {"": {}})))
    known, rows = printed(name, label), printed(name, label).values
    unknown = Part(label, label, {row: {} for row in rows}, (Curve("a", (1, 2), (3, 4), (1,)), Curve("b", (1,), (2,))))
    drawn = [(known, numbers_of(name, label)), (unknown, {}), (Part("nothing", "", {}), {})]
    first = picture(experiment.title, drawn, experiment.quantities, experiment.draw)
    assert first.startswith(PNG)
    without = picture(experiment.title, drawn[1:], experiment.quantities, experiment.draw)
    assert without.startswith(PNG)
    assert without != first
