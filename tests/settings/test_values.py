"""Values of settings: ratios, and shares of a whole."""

import pytest

from fedprophet.config.sections import AttackSettings
from fedprophet.settings.values import share_of


def test_ratios_are_exact() -> None:
    for numerator in range(1, 256):
        assert AttackSettings.model_validate({"radius": f"{numerator}/255"}).radius == numerator / 255


@pytest.mark.parametrize(
    ("value", "whole", "part"), [(7, 100, 7), ("20%", 500, 100), ("50%", 7, 3), ("0.07%", 10_000, 7), ("12.5 %", 16, 2)]
)
def test_a_number_or_a_share_rounded_down(value: int | str, whole: int, part: int) -> None:
    assert share_of(value, whole) == part
