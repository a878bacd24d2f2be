"""One table for a terminal, for Markdown and for CSV."""

import io

import pytest
from rich.console import Console

from fedprophet.display.numbers import counted, digits, factor, percent
from fedprophet.display.tables import Column, Page, Table, csv_text, markdown, markdown_table, show

TABLE = Table(
    "Costs",
    (
        Column("Method"),
        Column("least", "Memory", "{:.1f} MB".format),
        Column("peak", "Memory", "{:.1f} MB".format),
        Column("Layers", form=", ".join, words=True),
    ),
    (("jFAT", 1.25, None, ["a", "b|c"]), ("FedProphet", 0.5, 2.0, [])),
)


def test_markdown_is_aligned_and_keeps_bars_in_cells():
    assert markdown_table(TABLE).splitlines() == [
        "| Method     | Memory least | Memory peak | Layers  |",
        "| ---------- | -----------: | ----------: | ------- |",
        "| jFAT       |       1.2 MB |           – | a, b\\|c |",
        "| FedProphet |       0.5 MB |      2.0 MB |         |",
    ]


def test_csv_has_empty_cells_for_what_is_not_known():
    table = Table("", (Column("a"), Column("b", form="{:.2f}".format)), ((1, None), ("x,y", 2)))
    assert csv_text(table) == 'a,b\n1,\n"x,y",2.00\n'


def test_a_page_of_pages():
    inner = Page("One", (Table("", (Column("a"),), ((1,),)),), notes=("n",))
    outer = Page("All", lines=("read this",), figure="![x](y.png)", parts=(inner,))
    assert markdown(outer) == ("# All\n\n- read this\n\n![x](y.png)\n\n## One\n\n| a   |\n| --- |\n| 1   |\n\n- n\n")


def printed(page, width, terminal=True):
    file = io.StringIO()
    show(page, Console(file=file, width=width, force_terminal=terminal, color_system=None))
    return file.getvalue()


def test_piped_it_is_markdown_whatever_the_width():
    page = Page("All [bold]:x:", (TABLE,))
    assert printed(page, 20, terminal=False) == markdown(page)


def test_a_group_is_named_once_above_its_columns():
    lines = [line.rstrip() for line in printed(Page("Title", (TABLE,)), 80).splitlines()]
    assert lines[0] == "Title"
    assert [line.split() for line in lines[2:5]] == [["Costs"], ["Memory"], ["Method", "least", "peak", "Layers"]]
    assert lines[-1].split() == ["FedProphet", "0.5", "MB", "2.0", "MB"]


@pytest.mark.parametrize(("width", "pieces"), [(200, 1), (60, 5)])
def test_a_wide_table_is_printed_in_pieces_that_repeat_the_labels(width, pieces):
    columns = (Column("case"), Column("engine"), *(Column(f"number {n}") for n in range(10)))
    rows = (("stage 1", "cuda", *range(10_000_000, 10_000_010)), ("a label of " + "very " * 9, "cpu", *range(10)))
    text = printed(Page("Wide", (Table("", columns, rows, labels=2),)), width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("stage 1") == text.count("cuda") == pieces
    assert all(str(number) in text for number in range(10_000_000, 10_000_010)), "no number is wrapped or cut"


@pytest.mark.parametrize(
    ("value", "text"), [(0.00123, "0.001"), (0.1234, "0.123"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1234")]
)
def test_three_significant_digits(value, text):
    assert digits(value) == text
    assert factor(value) == f"{text}×"


def test_shares_and_counts():
    assert (percent(0.79749), percent(None)) == ("79.7 %", "–")
    assert (counted(1, "node"), counted(0, "node"), counted(3, "node")) == ("1 node", "0 nodes", "3 nodes")


def test_notes_and_lines_of_a_page_are_broken_between_words():
    long = "the exported model on the test set"
    text = printed(Page("A title", lines=(long,), notes=(long,)), 20)
    assert [line.rstrip() for line in text.splitlines()] == [
        "A title",
        *("the exported model", "on the test set", ""),
        *("· the exported model", "on the test set"),
    ]


def test_a_label_of_one_long_word_is_not_broken():
    table = Table("", (Column("Method"), Column("n")), (("FedProphet (assignment.enabled=false)", 1),))
    assert "(assignment.enabled=false)" in printed(Page("", (table,)), 40)
