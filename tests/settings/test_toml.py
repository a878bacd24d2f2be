"""TOML that cannot be read, and values that cannot be shown."""

import pytest

from fedprophet.settings.toml import parse_toml, shown


@pytest.mark.parametrize("text", ["a =", f"a = {'7' * 5000}", f"a = {'[' * 3000}"])
def test_what_is_no_toml_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_toml(text)


def test_values_are_shown_as_they_would_be_written() -> None:
    endless: list[object] = []
    endless.append(endless)
    assert shown({"b": [1, True], "a": "x"}) == '{a = "x", b = [1, true]}'
    assert shown(None) == "None"
    assert shown(endless) == "[[...]]"
    assert shown(10**5000) == "something endless of the type int"
