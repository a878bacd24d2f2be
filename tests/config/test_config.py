"""What a configuration is: the paper's defaults, its tables, and whether they fit together."""

import pickle
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import Field, ValidationError, create_model

from fedprophet.config.config import Config, _composed, machine_keys
from fedprophet.config.load import PRESETS, load_config, parse_config
from fedprophet.config.reference import reference_markdown, to_toml
from fedprophet.config.sections import TrainSettings
from fedprophet.errors import ConfigError
from fedprophet.server.perturbation import PerturbationSettings
from fedprophet.settings import section as sections
from fedprophet.settings.describe import misfit
from fedprophet.settings.section import Section, section


def test_defaults_are_the_papers() -> None:
    config = Config()
    assert (config.rounds, config.warmup_rounds, config.gate_rounds, config.patience_rounds) == (500, 100, 25, 50)
    train = config.train
    assert (train.batch, train.iterations, train.learning_rate, train.decay) == (64, 30, 0.005, 0.994)
    assert (train.momentum, train.weight_decay, train.strong_convexity) == (0.9, 0.0001, 0.00001)
    assert config.attack.radius == 8 / 255
    assert config.attack.step_size == 2 / 255
    assert (config.attack.steps, config.evaluate.steps) == (10, 20)
    perturbation = config.of(PerturbationSettings)
    assert (perturbation.start, perturbation.change, perturbation.threshold) == (0.3, 0.1, 0.05)
    assert (config.shards.kind, config.shards.classes_per_client, config.shards.iid_fraction) == ("skewed", 2, 0.2)
    assert config.data.validation == 0.2


def test_a_ctrl_c_waits_until_the_model_of_a_configuration_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pydantic would make an error of its own of an exception that comes while it builds."""
    built = []

    def interrupted(*names: Any, **fields: Any) -> type[Config]:
        signal.raise_signal(signal.SIGINT)
        built.append(create_model(*names, **fields))
        return built[-1]

    monkeypatch.setattr("fedprophet.config.config.create_model", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where tests run in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            _composed.__wrapped__(())
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(built) == 1


def test_momentum_decides_the_copies_that_training_holds() -> None:
    assert TrainSettings().copies == 3
    assert TrainSettings(momentum=0.0).copies == 2


@pytest.mark.parametrize(
    ("rounds", "value", "expected"),
    [(500, "20%", 100), (30, "20%", 6), (2, "20%", 0), (7, "50%", 3), (30, 4, 4), (1000, "0.1%", 1), (10, "0%", 0)],
)
def test_rounds_may_be_a_share(rounds: int, value: int | str, expected: int) -> None:
    config = parse_config({"rounds": rounds, "train": {"warmup": value}, "convergence": {"gate": 0}})
    assert config.warmup_rounds == expected


def test_patience_is_at_least_one_round() -> None:
    assert parse_config({"rounds": 2}).patience_rounds == 1


@pytest.mark.parametrize("rounds", [1, 2, 500])
def test_every_preset_works_with_any_number_of_rounds(rounds: int) -> None:
    for name in PRESETS:
        assert load_config(name, [f"rounds={rounds}"]).rounds == rounds


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Config().seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Config().train.batch = 3  # type: ignore[misc]


def test_what_may_change_when_a_run_goes_on() -> None:
    assert machine_keys() == {"threads", "engine", "flower.deadline", "flower.cache", "flower.cpus"}


def test_a_configuration_can_be_copied_and_sent() -> None:
    config = parse_config({"seed": 3, "perturbation": {"start": 0.7}})
    assert pickle.loads(pickle.dumps(config)) == config
    other = config.model_copy(update={"perturbation": PerturbationSettings(start=0.1)})
    assert other.of(PerturbationSettings).start == 0.1
    assert config.of(PerturbationSettings).start == 0.7


@pytest.mark.parametrize(
    "config",
    [
        Config.model_validate({}),
        Config.model_validate({"flower": {"deadline": 30.0}}),
        Config.model_validate_json(Config(seed=3).model_dump_json()),
    ],
)
def test_pydantics_own_readers_know_the_registered_tables(config: Config) -> None:
    assert config.of(PerturbationSettings) == PerturbationSettings()
    assert config == parse_config(config.model_dump())
    assert Config.model_validate_json(config.model_dump_json()) == config
    assert Config.model_validate(config) is config


# Registered tables ---------------------------------------------------------------------------------------------------


@pytest.fixture
def coffee(monkeypatch: pytest.MonkeyPatch) -> type[Section]:
    """A table that somebody adds."""
    monkeypatch.setattr(sections, "_REGISTERED", dict(sections._REGISTERED))

    @section("coffee")
    class CoffeeSettings(Section):
        """The coffee."""

        cups: int = Field(default=1, ge=0, description="Cups a round.")

        def conflicts(self, config: Config) -> Iterator[str]:
            if self.cups > config.rounds:
                yield misfit("coffee.cups", self.cups, f"at most rounds = {config.rounds}")

    return CoffeeSettings


def test_a_registered_table_is_like_any_other(coffee: Any) -> None:
    config = load_config(None, ["coffee.cups=3"])
    assert config.of(coffee) == coffee(cups=3)
    assert Config().of(coffee).cups == 1
    assert config.model_dump()["coffee"] == {"cups": 3}
    limits = "a whole number of at least 0 and at most 1000000000"
    text = f"[coffee]\n# The coffee.\n\n# Cups a round. Allowed: {limits}.\ncups = 3\n"
    assert text in to_toml(config, comments=True)
    assert f"| `coffee.cups` | integer | `1` | {limits} | Cups a round. |" in reference_markdown()


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("coffee.cups=-1", "coffee.cups: given -1 (--set), allowed: a whole number of at least 0"),
        ("coffee.cup=1", "unknown key 'coffee.cup' (--set). Did you mean 'coffee.cups'? Known: cups"),
        ("coffe.cups=1", "unknown key 'coffe' (--set). Did you mean 'coffee'?"),
        ("coffee.cups=99", "coffee.cups: given 99, allowed: at most rounds = 42"),
        ("coffee=1", "--set 'coffee=1': 'coffee' is a table."),
    ],
)
def test_mistakes_in_a_registered_table(coffee: Any, override: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert str(caught.value).startswith(text)


def test_a_table_has_one_owner(coffee: Any) -> None:
    with pytest.raises(TypeError, match=r"the table \[coffee\] is defined by .*CoffeeSettings already"):
        section("coffee")(TrainSettings)


def test_a_table_that_nobody_registered() -> None:
    with pytest.raises(TypeError, match="Section is not a table of the configuration: register it with @section"):
        Config().of(Section)
