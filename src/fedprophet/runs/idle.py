"""Settings that were asked for and change nothing, under the run's method, its model or its other settings.

Others work against each other. They are noted and not refused: a command that is repeated with one method after the
other has settings for all of them.
"""

from collections.abc import Iterable, Iterator

from fedprophet.cascade.atoms import statistics_layers
from fedprophet.cascade.norms import statistics_names
from fedprophet.data.shards import held_out
from fedprophet.methods import METHODS, reads
from fedprophet.methods.world import World
from fedprophet.settings.toml import shown

LAYER_KEYS = ("layers", "frozen_after")
REFRESH_KEYS = ("refresh", "refresh_after", "refresh_layers", "refresh_clients")
MANY = 0.1
"""It is noted where a larger share of the clients than this cannot be judged."""
LATER_MODULES = (
    "perturbation.",
    "assignment.",
    "measure.",
    "convergence.patience_after",
    "train.head_gradients",
    "train.warmup_stages",
    "train.strong_convexity",
    "attack.feature_steps",
)
"""Keys that say something to a cascade of several modules, by how they begin."""


def idle_notes(world: World) -> Iterator[str]:
    """Yield a sentence for the keys that one thing makes idle, of those that were chosen for the run."""
    config = world.config
    chosen = config.chosen_keys()
    why = {key: f"the method {config.method}" for key in chosen if not reads(config.method, key)}
    why = {**config.idle_keys(), **dict(_by_model(world, chosen)), **why}
    for reason in dict.fromkeys(why[key] for key in chosen if key in why):
        keys = [f"{key} = {shown(value)}" for key, value in chosen.items() if why.get(key) == reason]
        yield f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect with {reason}"


def doubtful_notes(world: World) -> Iterator[str]:
    """Yield a sentence for settings that do not go together."""
    config = world.config
    yield from _unjudged(world)
    if config.horizon_rounds and statistics_names(world.chain) and world.chain.local():
        asked = f"aggregate.horizon = {shown(config.aggregate.horizon)} with norm.layers = {shown(config.norm.layers)}"
        yield (
            f"{asked}: clients' own norm layers have seen the last round's model and not the mean that is judged. "
            'norm.layers = "shared" goes with it'
        )


def _unjudged(world: World) -> Iterator[str]:
    """Say if many clients would hold no sample that they can be judged on, where the server knows their shards."""
    sizes = [size for client in world.pool.eligible.tolist() if (size := world.sizes(client)) is not None]
    clients, validation = world.config.population.clients, world.config.data.validation
    without = clients - sum(held_out(size, validation) > 0 for size in sizes)
    if sizes and without > MANY * clients:
        yield (
            f"{sum(sizes):,} training samples for {clients:,} clients: {without:,} of them hold no held-out sample, so "
            "that they have no accuracy of their own. Fewer population.clients or a larger data.validation change that"
        )


def _by_model(world: World, keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys that this model, cut as it is, makes idle, and how."""
    config = world.config
    yield from _by_norm_layers(world)
    cascade = METHODS[config.method].cascade
    if cascade and len(world.modules) == 1:
        reason = f"memory.budget = {shown(config.memory.budget)}, by which the model is one module"
        yield from ((key, reason) for key in keys if key.startswith(LATER_MODULES))
    if world.image_threat(config.attack.steps).harmless and not cascade:  # a cascade's scores wait for the ramp
        which = "radius" if config.attack.radius == 0 else "steps"
        yield "attack.ramp", f"attack.{which} = 0"
    if reason := _unattacked(world):
        yield "train.weighting", reason


def _by_norm_layers(world: World) -> Iterator[tuple[str, str]]:
    """Yield the keys on norm layers that say nothing to models that have none with statistics.

    The smaller models of a family may have them where the run's own has none. Other buffers stay with the clients in
    any case, but with `layers = "statistics-local"` newcomers begin with their average, unless `newcomers` says more.
    """
    norm, buffers = world.config.norm, world.chain.local()
    reason = f"the model {world.config.model.name}, which has no norm layers that keep statistics"
    chains = (world.chain, *(member.chain for member in world.family.values()))
    if not any(statistics_layers(chain.model) for chain in chains):
        decides = buffers and norm.newcomers == "auto" and norm.averages_for_newcomers
        yield from ((f"norm.{key}", reason) for key in LAYER_KEYS if not (key == "layers" and decides))
    if not statistics_names(world.chain):
        yield from ((f"norm.{key}", reason) for key in REFRESH_KEYS)
    if not buffers:
        shared = f"norm.layers = {shown(norm.layers)}"
        yield "norm.newcomers", shared if statistics_layers(world.chain.model) else reason


def _unattacked(world: World) -> str:
    """Return why training meets no attack at all, so that nothing it counts matters; nothing where it does."""
    attack = world.config.attack
    if world.config.memory.enforce:  # what clients need is predicted with an attack, and with its counts
        return ""
    if attack.radius == 0:  # features are then not attacked either: it moves none
        return "attack.radius = 0"
    if attack.steps:
        return ""
    if not METHODS[world.config.method].cascade or len(world.modules) == 1:
        return "attack.steps = 0"
    return "" if attack.feature_steps else "attack.steps = 0 and attack.feature_steps = 0"
