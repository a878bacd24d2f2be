"""Curves of blocks."""

from fedprophet.display.curves import area, axis, spread


def test_one_row_has_eight_steps():
    shares = [0, 1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8, 1]
    assert area(shares, [], columns=9, rows=1) == [" ▁▂▃▄▅▆▇█"]


def test_rows_stand_on_each_other():
    assert area([0.25, 0.5, 0.75, 1.0], [], columns=4, rows=2) == ["  ▄█", "▄███"]


def test_many_rounds_share_a_column_by_their_mean():
    """What is not known is as it was before: 0, then the mean of 0.5 and 1."""
    shares = [None, None, 0.5, 1.0, None, None, 0.25, 0.25]
    assert area(shares, [], columns=4, rows=1) == [" ▆▆▂"]


def test_few_rounds_are_wider():
    assert spread(2, 100) == [range(1)] * 4 + [range(1, 2)] * 4
    assert area([1.0, 0.5], [], columns=5, rows=1) == ["██▄▄"]


def test_a_line_where_a_stage_begins():
    """The third and the fifth round begin one; where rounds are wide, the line is no wider."""
    shares = [1.0] * 6
    assert area(shares, [2, 4], columns=6, rows=2) == ["██│█│█"] * 2
    assert area(shares, [2, 4], columns=12, rows=1) == ["████│███│███"]
    assert axis(["1", "2", "3"], [2, 4], 6, 12) == "1   │2  │3  "


def test_a_name_that_has_no_room_is_left_out():
    assert axis(["1", "22", "3"], [2, 4], 6, 6) == "1 │ │3"


def test_nothing_to_show():
    assert area([], [], columns=10, rows=2) == ["", ""]
