"""A federated pass over the trained model in which clients measure its norm statistics anew.

Client k sends mean and variance of what each norm layer reads on its samples; the server pools them (`server.pooling`),
by the run's rule of aggregation, into the statistics of the exported model. The pass is a round of its own at the end
of a run. Where clients trained sub-networks, the statistics of the whole model that they keep were gathered at other
widths, or never: they measure those as well, and keep them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from fedprophet.cascade.norms import norm_modules, norm_names, statistics_names
from fedprophet.messages.answers import Refreshed, Reported
from fedprophet.messages.tasks import Refresh
from fedprophet.methods.world import World, named
from fedprophet.server.aggregate import layers_fault
from fedprophet.server.coordinator import Conversation, Record, ask
from fedprophet.server.plausibility import implausible_statistics
from fedprophet.server.rejections import reject, sound_answers
from fedprophet.server.rules.registry import Parameters

if TYPE_CHECKING:
    from fedprophet.methods.base import Method, MethodState

S = TypeVar("S", bound="MethodState")


@dataclass(frozen=True)
class Renewal:
    """What the closing refresh came to: the norm layers that were measured, and those that too few clients measured.

    `own` is how many clients measured, and kept, statistics of their own, where they were asked to. While the round is
    played, all are empty.
    """

    measured: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    own: int = 0

    def pooled_text(self, images: str) -> str:
        """Say what became of the exported model's statistics."""
        if not self.measured:
            return "; at the end, statistics were not measured anew: too few usable answers"
        but = f", but not those of {', '.join(self.missed)} (too few usable answers)" if self.missed else ""
        return f"; at the end, statistics measured anew on {images} images{but}"

    def own_text(self, images: str, clients: int) -> str:
        """Say what became of the clients' own statistics, given how many clients there are."""
        if not self.own:
            return "; at the end, no client measured its statistics anew"
        by = "" if self.own >= clients else f" by {self.own} of {clients} clients"
        return f"; at the end, statistics measured anew on {images} images{by}"


def measured_text(record: Record) -> str:
    """Return what became of the statistics in a record of a refresh, in a few words.

    That of the closing one names the images.
    """
    measured, missed = _layers(record["refreshed"]), record.get("not_refreshed", {}).get("layers", ())
    if not measured:
        return "not measured: as they were"
    some = f" ({len(measured)} of {len(measured) + len(missed)} layers)" if missed else ""
    images = f" on {record['refresh']} images" if "refresh" in record else ""
    return f"measured anew{images}{some}"


def refresh_round(method: "Method[S]", state: S) -> Conversation[tuple[S, Record]]:
    """Play the round in which the statistics of the trained model are measured; nothing is trained in it."""
    world = method.world
    state = replace(state, round=state.round + 1, renewal=Renewal())
    record: Record = {"round": state.round, "refresh": world.config.refresh_images, "times": {}, "dropped": {}}
    whole = {**(yield from _averaged_layers(method, state, record)), **state.model}
    template = refresh_task(method, state, method.exported(state, whole))
    if method.refreshes_own and world.chain.local():
        own = replace(template, parameters=state.model, starting=state.starting, keeps=True)
        asked = [replace(own, client=client) for client in _clients(world, state.round)]
        record["renewed"] = sum(answer.samples > 0 for answer in (yield from ask(asked, Refreshed)))
    fresh = yield from renewed(world, template, record)
    missed = tuple(record.get("not_refreshed", {}).get("layers", ()))
    state = replace(state, renewal=Renewal(_layers(fresh), missed, record.get("renewed", 0)))
    whole, norms = {**template.parameters, **fresh}, norm_names(world.chain)
    if state.model.keys() >= set(norms):
        return method.with_layers(state, named(whole, norms)), record
    return replace(state, norm_layers=named(whole, (*norms, *world.chain.local()))), record


def refresh_task(method: "Method[S]", state: S, model: Parameters) -> Refresh:
    """Return the measuring of a whole model's statistics, for any client."""
    world, last = method.world, len(method.world.chain)
    return Refresh(
        **method.task_fields(state, client=0),
        last=last,
        parameters=model,
        batch=world.evaluation_batch(last),
        threat=world.refresh_threat,
        calibration=world.calibration(client=0),
    )


def renewed(world: World, template: Refresh, record: Record) -> Conversation[Parameters]:
    """Return the statistics of the template's own atoms as clients find them, all at once or layer after layer.

    A layer that too few measure keeps its statistics, which the record says.
    """
    layers = norm_modules(world.chain, template.first, template.last)
    passes = list(layers) if world.config.norm.refresh_layers == "in-turn" or not layers else [""]
    fresh: Parameters = {}
    missed: dict[str, int] = {}
    for layer in passes:
        task = replace(template, layer=layer, parameters={**template.parameters, **fresh})
        of = {layer} if layer else layers.keys()
        before = named(task.parameters, [n for n in statistics_names(world.chain) if n.rpartition(".")[0] in of])
        tasks = [replace(task, client=client) for client in _clients(world, task.round)]
        answers = yield from ask(tasks, Refreshed)
        sent = list(_sound(world, answers, before, record))
        if len(sent) >= world.aggregator.minimum:
            fresh = {**fresh, **world.aggregator.pooled(before, sent)}
        else:
            missed |= dict.fromkeys(of, len(sent))
    record["refreshed"] = sorted(fresh)
    if missed:
        usable = max(missed.values())
        record["not_refreshed"] = {"layers": list(missed), "usable": usable, "minimum": world.aggregator.minimum}
    return fresh


def _layers(statistics: Iterable[str]) -> tuple[str, ...]:
    """Return the norm layers that statistics are of."""
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name in statistics))


def _clients(world: World, round: int) -> Sequence[int]:
    return world.clients.sample(world.config.norm.refresh_clients, round, "refresh")


def _sound(
    world: World, answers: Sequence[Refreshed], asked: Parameters, record: Record
) -> Iterator[tuple[float, Parameters]]:
    """Yield the statistics that can be used, with weights that can be believed."""
    some = [answer for answer in answers if answer.samples > 0]
    sound = sound_answers(some, lambda answer: layers_fault(asked, answer.weight, answer.statistics, True), record)
    far = implausible_statistics({answer.client: answer.statistics for answer in sound})
    if far:
        reject(record, far)
    for answer in world.aggregator.believed([each for each in sound if each.client not in far], record):
        yield answer.weight, answer.statistics


def _averaged_layers(method: "Method[S]", state: S, record: Record) -> Conversation[Parameters]:
    """Return one set of the layers that live with the clients, where the server has none of its own."""
    if not method.world.initial_layers.keys() - state.model.keys():
        return {}
    # As of the round before: this one may be a repetition, in which clients have renewed theirs already.
    reports = method.layer_reports(replace(state, round=state.round - 1))
    return method.joined_layers((yield from ask(reports, Reported)), record)
