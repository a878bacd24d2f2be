"""Tables: a name has one owner."""

import pytest

from fedprophet.settings import section as sections
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
