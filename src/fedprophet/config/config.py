"""The configuration of a run: one typed, documented value made of tables.

A table's class is the only place where a key, its default, its allowed range and its meaning are written down: error
texts, `fedprophet config show` and the reference page are made from it. The tables that every run has are fields here.
Packages above this one register theirs with `fedprophet.settings.section`; `config.of(TheirSettings)` reads them.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, create_model, model_validator

from fedprophet.config.choices import AUTO, engines, methods
from fedprophet.config.renamed import with_new_names
from fedprophet.config.sections import (
    AggregateSettings,
    AttackSettings,
    CheckpointSettings,
    ConvergenceSettings,
    EvaluateSettings,
    MemorySettings,
    NormSettings,
    PopulationSettings,
    TrainSettings,
)
from fedprophet.data.registry import DataSettings
from fedprophet.data.shards import ShardSettings
from fedprophet.fleet.availability import FleetSettings
from fedprophet.interrupts import signals_wait
from fedprophet.models.registry import ModelSettings
from fedprophet.settings.describe import default_of, misfit
from fedprophet.settings.section import Section, registered_sections
from fedprophet.settings.values import OfClients, OneOf, share_of

S = TypeVar("S", bound=Section)


class Config(Section):
    """Everything that decides a run."""

    machine_keys = frozenset({"threads", "engine"})

    method: Annotated[str, OneOf(methods)] = Field(default="fedprophet", description="The training method.")
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="Seed of every random draw of the run.")
    rounds: int = Field(default=500, ge=1, description="Most rounds of a stage; a stage trains one module.")
    threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="CPU cores to use: workers of one thread each, or threads of the plain engine; 0 takes torch's own "
        "number, which the run then records.",
    )
    engine: Annotated[str, OneOf(engines)] = Field(default=AUTO, description="What computes the clients' work.")
    precision: Literal["bfloat16", "float32"] = Field(
        default="bfloat16",
        description='Engine "cuda": number type of activations and matrix products; parameters are always float32.',
    )
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    shards: ShardSettings = ShardSettings()
    population: PopulationSettings = PopulationSettings()
    fleet: FleetSettings = FleetSettings()
    memory: MemorySettings = MemorySettings()
    train: TrainSettings = TrainSettings()
    norm: NormSettings = NormSettings()
    attack: AttackSettings = AttackSettings()
    convergence: ConvergenceSettings = ConvergenceSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    aggregate: AggregateSettings = AggregateSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()

    def __new__(cls, **values: Any) -> Self:
        """Make a configuration that has the registered tables too."""
        return super().__new__(cls._complete())

    @classmethod
    def model_validate(cls, obj: Any, **how: Any) -> Self:
        """Read a nested table, which may have the registered tables too."""
        return super(Config, cls._complete()).model_validate(obj, **how)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **how: Any) -> Self:
        """Read a nested table from JSON, which may have the registered tables too."""
        return super(Config, cls._complete()).model_validate_json(json_data, **how)

    @classmethod
    def _complete(cls) -> type[Self]:
        """Return the class that has the registered tables too."""
        return config_model() if cls is Config else cls  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.model_dump(),)  # pickle cannot find the composed class by its name

    def of(self, kind: type[S]) -> S:
        """Return a registered table by its class."""
        table = next((value for _, value in self.tables() if type(value) is kind), None)
        if table is None:
            raise TypeError(f"{kind.__qualname__} is not a table of the configuration: register it with @section")
        return table

    def tables(self) -> Iterator[tuple[str, Section]]:
        """Yield the name and value of every table."""
        yield from ((name, value) for name, value in self if isinstance(value, Section))

    def idle_keys(self) -> dict[str, str]:
        """Return the keys that change nothing, each with the setting that makes it so."""
        return {f"{name}.{key}": why for name, table in self.tables() for key, why in table.idle(self)}

    def chosen_keys(self) -> dict[str, Any]:
        """Return the keys that were chosen for this run and are not at their defaults, with their values."""
        return {
            f"{name}.{key}": value
            for name, table in self.tables()
            for key, value in table
            if key in table.model_fields_set and value != default_of(type(table).model_fields[key])
        }

    def client_counts(self) -> dict[str, int]:
        """Return the keys that are numbers of clients, with the numbers."""
        return {
            f"{name}.{key}": value
            for name, table in self.tables()
            for key, field in type(table).model_fields.items()
            if OfClients() in field.metadata and isinstance(value := getattr(table, key), int)
        }

    @property
    def warmup_rounds(self) -> int:
        """Rounds of standard training that start a stage."""
        return share_of(self.train.warmup, self.rounds)

    @property
    def ramp_rounds(self) -> int:
        """Rounds after the warm-up in which the radius on images grows."""
        return share_of(self.attack.ramp, self.rounds)

    @property
    def attacked_rounds(self) -> int:
        """Rounds that train under the whole attack, where that on images has to grow first."""
        return self.rounds - self.warmup_rounds - max(self.ramp_rounds - 1, 0)

    @property
    def frozen_after_rounds(self) -> int:
        """Rounds of a stage after which norm statistics are fixed, where they are; a round at least gathers them."""
        return max(share_of(self.norm.frozen_after, self.rounds), 1)

    @property
    def refresh_images(self) -> Literal["none", "clean", "attacked"]:
        """On which images norm statistics are measured anew: clean ones where there is no attack."""
        harmless = not self.attack.radius or not self.attack.steps
        return "clean" if self.norm.refresh == "attacked" and harmless else self.norm.refresh

    @property
    def horizon_rounds(self) -> int:
        """Rounds that the model is averaged over which is judged; 0 where it is not: a single round is no mean."""
        rounds = share_of(self.aggregate.horizon, self.rounds)
        return rounds if rounds > 1 else 0

    @property
    def gate_rounds(self) -> int:
        """Rounds after the warm-up before score, patience and APA start."""
        return share_of(self.convergence.gate, self.rounds)

    @property
    def patience_rounds(self) -> int:
        """Age of the best score, in rounds, that ends a stage; at least until the next evaluation could beat it."""
        return max(self.evaluate.every, share_of(self.convergence.patience, self.rounds))

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, data: Any) -> Any:
        return with_new_names(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        clients = self.population.clients
        too_many = ((key, count) for key, count in self.client_counts().items() if count > clients)
        problems = [
            *(misfit(key, count, f"at most population.clients = {clients}") for key, count in too_many),
            *(line for _, table in self.tables() for line in table.conflicts(self)),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _restored(values: dict[str, Any]) -> Config:
    return config_model().model_validate(values)


def config_model() -> type[Config]:
    """Return the model of a configuration: the fields of `Config`, and a field for each registered table."""
    return _composed(tuple(sorted(registered_sections().items())))


@lru_cache
def _composed(sections: tuple[tuple[str, type[Section]], ...]) -> type[Config]:
    fields: dict[str, Any] = {name: (kind, kind()) for name, kind in sections}
    with signals_wait():  # pydantic would turn a Ctrl-C into an error of its own
        return create_model("Config", __base__=Config, __doc__=Config.__doc__, __module__=__name__, **fields)


def machine_keys() -> frozenset[str]:
    """Return the keys about the machines that carry a run out: a resumed run may have other values."""
    tables = registered_sections().items()
    return Config.machine_keys.union(f"{name}.{key}" for name, kind in tables for key in kind.machine_keys)
