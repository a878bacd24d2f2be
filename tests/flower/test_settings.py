"""The table [flower] is known, with its limits, where Flower is not installed."""

import pytest
from pydantic import ValidationError

from fedprophet.flower.settings import FlowerSettings
from fedprophet.settings.section import registered_sections


def test_the_table_is_registered_with_its_defaults():
    assert registered_sections()["flower"] is FlowerSettings
    assert FlowerSettings().model_dump() == {"deadline": 600.0, "updates": "float32", "cache": "2GB", "cpus": 1}


@pytest.mark.parametrize("wrong", [{"deadline": 0.0}, {"updates": "int8"}, {"cache": "25%"}, {"cpus": 0}, {"more": 1}])
def test_values_that_do_not_fit(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        FlowerSettings.model_validate(wrong)
