"""How the clients of a round kept within their memory, as they say."""

from collections.abc import Mapping, Sequence

from fedprophet.messages.answers import Trained
from fedprophet.server.coordinator import Record
from fedprophet.server.rejections import plain_reason, sound_answers

LONGEST_PLAN = 200
"""Characters of a plan in the journal, whatever a client sends."""


def note_plans(updates: Sequence[Trained], limits: Mapping[int, int], record: Record) -> list[Trained]:
    """Note each client's plan and the bytes that it took; return the updates of those that took no more than they may.

    A client of ours fails rather than take more; what another one claims cannot be right.
    """

    def fault(update: Trained) -> str | None:
        limit = limits[update.client]
        return None if 0 <= update.peak <= limit else f"it took {update.peak} bytes of the {limit} that it may"

    sound = sound_answers(updates, fault, record)
    record["plans"] = {
        str(update.client): {
            "plan": plain_reason(update.plan[:LONGEST_PLAN]),
            "peak_bytes": update.peak,
            "limit_bytes": limits[update.client],
        }
        for update in sound
    }
    return sound
