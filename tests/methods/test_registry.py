"""The table of methods: every file has entered its own, with all that listings and tables show."""

import pytest

from fedprophet.config.choices import methods
from fedprophet.methods import METHODS


def test_the_methods_are_listed_in_the_order_of_the_papers_table():
    names = ["jFAT", "FedDF-AT", "FedET-AT", "HeteroFL-AT", "FedDrop-AT", "FedRolex-AT", "FedRBN", "FedProphet"]
    assert [METHODS[name].paper for name in methods()] == names
    assert [name for name, entry in METHODS.items() if entry.cascade] == ["fedprophet"]
    assert [name for name, entry in METHODS.items() if entry.distills] == ["feddf", "fedet"]
    assert all(entry.help for entry in METHODS.values())


@pytest.mark.parametrize(
    ("method", "record", "label", "text"),
    [
        ("heterofl", {"widths": {"1": 0.5, "4": 0.25, "7": 1.0}}, "width", "0.25–1.00"),
        ("feddrop", {"widths": {"1": 0.5, "4": 0.5}}, "width", "0.50"),
        ("fedet", {"architectures": {"1": "cnn3", "2": "vgg11", "3": "cnn3"}}, "models", "2 cnn3, 1 vgg11"),
        ("fedrbn", {"attacked": [1], "times": {"1": {}, "2": {}}}, "under attack", "1/2 clients"),
    ],
)
def test_what_the_display_shows_of_a_round(method, record, label, text):
    shown = METHODS[method].method.shown
    assert (shown.label, shown.text(record)) == (label, text)
