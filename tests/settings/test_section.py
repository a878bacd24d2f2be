"""Tables: a name has one owner; every number has limits, and every text can be written."""

import pytest
from pydantic import Field, ValidationError

from fedprophet.config.config import config_model
from fedprophet.settings import section as sections
from fedprophet.settings.describe import tables
from fedprophet.settings.section import Section, registered_sections, section


def test_a_table_has_one_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "_REGISTERED", {})
    first, again, other = (
        type("TeaSettings", (Section,), {"__module__": module}) for module in ("mine", "mine", "theirs")
    )
    section("tea")(first)
    section("tea")(again)
    assert registered_sections()["tea"] is again, "a module that is loaded again"
    with pytest.raises(TypeError, match=r"^the table \[tea\] is defined by mine\.TeaSettings already$"):
        section("tea")(other)
    assert registered_sections()["tea"] is again


class Numbers(Section):
    count: int = Field(default=1, ge=0)
    large: int = Field(default=1, le=2**63 - 1)
    share: float = 0.5
    text: str = ""


@pytest.mark.parametrize(
    ("key", "most", "more"),
    [("count", 10**9, 10**9 + 1), ("large", 2**63 - 1, 2**63), ("share", 1e30, 1.1e30), ("text", "é", "a\0b")],
)
def test_what_has_no_limit_of_its_own_gets_one(key: str, most: object, more: object) -> None:
    assert getattr(Numbers(**{key: most}), key) == most
    with pytest.raises(ValidationError):
        Numbers(**{key: more})


def test_every_number_of_the_configuration_has_an_upper_limit() -> None:
    for table, _, fields in tables(config_model()):
        for key, field in fields.items():
            if field.annotation in (int, float):
                assert any(hasattr(mark, "le") or hasattr(mark, "lt") for mark in field.metadata), (table, key)
