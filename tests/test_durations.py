"""Time spans for people."""

import pytest

from fedprophet.durations import clock, format_duration, unit_of


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.0432, "0.043 s"),
        (0.1, "0.1 s"),
        (4.32, "4.3 s"),
        (119.9, "119.9 s"),
        (120, "2.0 min"),
        (7_199, "120.0 min"),
        (7_200, "2.0 h"),
        (863_999, "240.0 h"),
        (950_400, "11.0 days"),
    ],
)
def test_a_time_span_has_the_unit_that_suits_it(seconds, text):
    assert format_duration(seconds) == text
    assert text.endswith(f" {unit_of(seconds).name}")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (65, "1:05"), (7420, "2:03:40"), (10862, "3:01:02")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text
    assert clock(seconds, with_hours=True) == (text if seconds > 3600 else f"0:{text:0>5}")
