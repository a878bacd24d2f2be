"""What the clients of a round say about their devices."""

import math
from collections.abc import Sequence

from fedprophet.messages.answers import Reported
from fedprophet.messages.values import Resources
from fedprophet.server.coordinator import Record
from fedprophet.server.rejections import LARGEST_COUNT, reject


def available_resources(reports: Sequence[Reported], record: Record) -> dict[int, Resources]:
    """Return what each client that reported has available, and note the clients whose numbers are impossible."""
    found = {report.client: report.resources for report in reports if report.resources is not None}
    wrong = {client: f"it reported {resources}" for client, resources in found.items() if not _plausible(resources)}
    if wrong:
        reject(record, wrong)
    return {client: resources for client, resources in found.items() if client not in wrong}


def _plausible(resources: Resources) -> bool:
    # A device that does less than one operation a second would take a time that no float holds.
    rates = (resources.performance, resources.bandwidth)
    return 0 <= resources.memory <= LARGEST_COUNT and all(1 <= rate < math.inf for rate in rates)
