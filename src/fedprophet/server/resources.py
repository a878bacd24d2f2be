"""What the clients of a round say about their devices."""

import math
from collections.abc import Sequence

from fedprophet.messages.answers import Reported
from fedprophet.messages.values import Resources
from fedprophet.server.coordinator import Record
from fedprophet.server.rejections import LARGEST_COUNT, sound_answers


def available_resources(reports: Sequence[Reported], record: Record) -> dict[int, Resources]:
    """Return what each client that reported has available, and note the clients whose numbers are impossible."""
    sound = sound_answers(reports, _fault, record)
    return {report.client: report.resources for report in sound if report.resources is not None}


def _fault(report: Reported) -> str | None:
    found = report.resources
    if found is None:
        return None
    # With nothing free, or less than one operation a second, training would take a time that no float holds.
    possible = all(1 <= number < math.inf for number in (found.performance, found.bandwidth))
    return None if possible and 1 <= found.memory <= LARGEST_COUNT else f"it reported {found}"
