"""The simulated clock of a round: how long each client's exchanges take, and the memory that its training needs."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fedprophet.cascade.cost import ChainCost
from fedprophet.fleet.latency import client_seconds, workload_of
from fedprophet.fleet.network import communication_time, draw_link, payload_bytes
from fedprophet.messages.answers import Adopted, Trained
from fedprophet.messages.tasks import Adopt, Train
from fedprophet.messages.values import Resources

Times = dict[str, dict[str, float]]
"""By client: seconds of computation, storage access and communication, and bytes of memory."""


def training_times(
    tasks: Sequence[Train],
    updates: Sequence[Trained],
    available: Mapping[int, Resources],
    cost: Callable[[Train], ChainCost],
) -> Times:
    """Return the times of the clients that trained; `cost` is that of the model which a task trains."""
    asked = {task.client: task for task in tasks}
    # An update that is rejected took its time too; one without samples took none.
    timed = [(asked[update.client], update) for update in updates if update.client in asked and update.samples >= 1]
    return {str(task.client): _demand(cost(task), task, update, available[task.client]) for task, update in timed}


def _demand(cost: ChainCost, task: Train, update: Trained, resources: Resources) -> dict[str, float]:
    # More samples than a round can use change nothing, however many a client claims to have.
    samples = min(update.samples, task.training.batch * task.training.iterations)
    if update.plan:  # by which it kept within what it has: nothing is swapped
        resources = replace(resources, memory=sys.maxsize)
    seconds = client_seconds(
        workload_of(cost, task.first, task.last),
        resources,
        task.training.batch_sizes(samples),
        task.threat.steps if task.threat else 0,
        draw_link(task.seed, task.round, task.client),
        download_bytes=payload_bytes(task.parameters) + payload_bytes(task.starting),
        upload_bytes=payload_bytes(update.parameters) + payload_bytes(update.local),
    )
    return {**seconds, "memory_bytes": cost.memory(task.first, task.last)}


def add_adoption(times: Times, tasks: Sequence[Adopt], answers: Sequence[Adopted]) -> None:
    """Add what sending layers to clients takes to the communication of those that adopted them."""
    asked = {task.client: task for task in tasks}
    for client in (answer.client for answer in answers):
        if client in asked and str(client) in times:
            link = draw_link(asked[client].seed, asked[client].round, client)
            seconds = communication_time(payload_bytes(asked[client].parameters), 0, link)
            times[str(client)]["communication_s"] += seconds
