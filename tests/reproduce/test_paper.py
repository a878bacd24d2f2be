"""The paper's numbers: read from their file, checked by hand against the paper, and each the cell of an experiment."""

import pytest

from fedprophet.reproduce.experiment import Trained
from fedprophet.reproduce.findings import Part, printed, verdict_text
from fedprophet.reproduce.paper import numbers_of, paper_numbers, parse_numbers
from fedprophet.reproduce.registry import EXPERIMENTS
from fedprophet.reproduce.runs import Setup
from fedprophet.reproduce.scales import PAPER

GRID = """
[[grid]]
experiment = "table2"
part = "here"
where = "Table 2"
columns = ["clean", "PGD"]
unit = "%"
rows.jFAT = [1, 2]
"""


@pytest.mark.parametrize(
    ("experiment", "part", "row", "column", "value", "unit"),
    [
        ("table1", "Caltech-256 balanced", "large, partial training", "PGD", 11.78, "%"),
        ("table2", "CIFAR-10 balanced", "FedDF-AT", "AA", 18.72, "%"),
        ("table2", "CIFAR-10 unbalanced", "FedProphet", "PGD", 59.51, "%"),
        ("table2", "Caltech-256 balanced", "FedProphet", "clean", 47.07, "%"),
        ("table2", "Caltech-256 unbalanced", "FedRolex-AT", "clean", 12.51, "%"),
        ("table3", "Caltech-256 balanced", "APA and DMA", "clean", 45.04, "%"),
        ("table3", "CIFAR-10 unbalanced", "no APA", "PGD", 58.01, "%"),
        ("table4", "Caltech-256 balanced", "without DMA", "time", 42_000, "s"),
        ("table5", "CIFAR-10", "Radeon RX 6300m", "performance", 3.7, "TFLOPS"),
        ("table6", "Caltech-256", "Quadro P5000", "bandwidth", 1.5, "GB/s"),
        ("table7", "VGG16, R_min = 60 MB", "module 6", "memory", 59.3, "MB"),
        ("table8", "ResNet34, R_min = 224 MB", "module 6", "FLOPs", 37.1, "G"),
        ("figure6", "Caltech-256", "resnet34", "R_max", 1130, "MB"),
        ("figure7", "Caltech-256 unbalanced", "FedProphet", "speed-up", 7.7, "×"),
    ],
)
def test_numbers_are_those_of_the_paper(
    experiment: str, part: str, row: str, column: str, value: float, unit: str
) -> None:
    number = numbers_of(experiment, part)[row][column]
    assert (number.value, number.unit) == (value, unit)
    assert row in number.where


def test_tables_are_whole() -> None:
    counted = {
        name: sum(len(cells) for numbers in parts.values() for cells in numbers.values())
        for name, parts in paper_numbers().items()
    }
    # Eight methods, three accuracies, four settings; ten devices with three peaks; seven modules with three costs.
    assert counted["table2"] == 8 * 3 * 4
    assert counted["table3"] == 4 * 2 * 4
    assert counted["table4"] == 2 * 4
    assert counted["table5"] == counted["table6"] == 10 * 3
    assert counted["table7"] == counted["table8"] == 7 * 3


def test_a_derived_time_is_the_printed_one_times_the_speed_up() -> None:
    for part, numbers in paper_numbers()["figure7"].items():
        cascade = numbers["FedProphet"]
        assert numbers["jFAT"]["time"].value == pytest.approx(cascade["time"].value * cascade["speed-up"].value)
        assert numbers["jFAT"]["time"].derived
        assert cascade["time"].value == numbers_of("table4", part)["with DMA"]["time"].value


def test_every_number_is_the_cell_of_an_experiment() -> None:
    setup = Setup(PAPER, "nowhere")  # type: ignore[arg-type]
    assert set(paper_numbers()) == set(EXPERIMENTS) - {"figure2"}  # of which the paper prints nothing
    for name, parts in paper_numbers().items():
        experiment = EXPERIMENTS[name]
        quantities = {quantity.name: quantity.unit for quantity in experiment.quantities}
        source = experiment.source
        trained = isinstance(source, Trained)
        if isinstance(source, Trained):
            assert set(parts) <= {w.paper for w in setup.settings if source.unbalanced or w.on_balanced_fleet}
        for numbers in parts.values():
            assert not trained or name == "figure10" or set(numbers) <= set(source.rows), name
            units = {column: number.unit for cells in numbers.values() for column, number in cells.items()}
            assert units == {column: quantities[column] for column in units}, name


TABLES = ("table1", "table2", "table3", "table4", "table5", "table6", "table7", "table8")


@pytest.mark.parametrize("name", TABLES)
def test_claims_hold_for_the_paper_itself(name: str) -> None:
    for part in paper_numbers()[name]:
        assert EXPERIMENTS[name].claims
        for claim in EXPERIMENTS[name].claims:
            assert claim.verdict(printed(name, part)) is True, (part, claim.text)


def test_a_claim_that_fails_is_said_and_one_without_numbers_is_no_claim() -> None:
    (claim,) = EXPERIMENTS["table4"].claims
    part = printed("table4", "CIFAR-10 balanced")
    slow = {**part.values, "with DMA": {"time": part.values["with DMA"]["time"].scaled(2)}}
    assert claim.verdict(Part("", "", slow)) is False
    assert claim.verdict(Part("", "", {})) is None
    assert [verdict_text(v) for v in (True, False)] == ["holds", "does not hold here"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (GRID.replace("[1, 2]", "[1]"), "1 numbers for 2 columns"),
        (GRID.replace('"%"', '["%"]'), "1 units for 2 columns"),
        (GRID.replace("[1, 2]", "[1, nan]"), "finite"),
        (GRID.replace('where = "Table 2"\n', ""), "where"),
        (GRID + "page = 3", "page"),
        (GRID + GRID, "twice"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(wrong: str, message: str) -> None:
    assert parse_numbers(GRID)["table2"]["here"]["jFAT"]["PGD"].value == 2
    with pytest.raises(ValueError, match=message):
        parse_numbers(wrong)
