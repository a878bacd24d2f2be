"""Which engine carried a run's rounds out. A configuration may say "auto", and that is another one on each machine."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedprophet.runs.session import Session
from fedprophet.storage.files import is_deployed

DEVICES = "flower"
"""Real devices on Flower; the engine of such a run's configuration is for what the server computes itself."""
CUDA = "cuda"


@dataclass(frozen=True)
class Carrier:
    """An engine, and the numbers of its activations and products."""

    engine: str
    precision: str

    @property
    def text(self) -> str:
        """The engine for people; only on a GPU there is a choice of precision."""
        return f"{self.engine}, {self.precision}" if self.engine == CUDA else self.engine


@dataclass(frozen=True)
class Span:
    """Rounds in a row, the last one included, that one carrier carried out."""

    carrier: Carrier
    first: int
    last: int

    def to_json(self) -> dict[str, Any]:
        """Return it for files."""
        return {"engine": self.carrier.engine, "precision": self.carrier.precision, "rounds": [self.first, self.last]}


def carrier_of(session: Session, run: Path) -> Carrier:
    """Return what carries the rounds of a run out in this process."""
    engine = DEVICES if is_deployed(run) else session.engine_name
    return Carrier(engine, session.config.precision if engine == CUDA else "float32")


def spans(timings: Iterable[Mapping[str, Any]]) -> tuple[Span, ...]:
    """Return who carried out which rounds, by what is noted of each; rounds of earlier versions have no such note."""
    found: list[Span] = []
    for line in timings:
        if not {"engine", "precision"} <= line.keys():
            continue
        carrier, number = Carrier(str(line["engine"]), str(line["precision"])), int(line["round"])
        first = found.pop().first if found and found[-1].carrier == carrier else number
        found.append(Span(carrier, first, number))
    return tuple(found)


def spans_of(document: Iterable[Mapping[str, Any]]) -> tuple[Span, ...]:
    """Return the spans that a closing summary lists."""
    return tuple(Span(Carrier(line["engine"], line["precision"]), *line["rounds"]) for line in document)


def told(found: Sequence[Span]) -> str:
    """Return `workers`, or `workers to round 20, then cuda, bfloat16` where a run has changed its engine."""
    *earlier, last = found
    before = [f"not recorded to round {found[0].first - 1}"] if found[0].first > 1 else []
    return ", then ".join(
        [*before, *(f"{span.carrier.text} to round {span.last}" for span in earlier), last.carrier.text]
    )


def change(found: Sequence[Span], now: Carrier) -> str | None:
    """Return what to say where a run goes on with another engine than that of its last round."""
    if not found or found[-1].carrier == now:
        return None
    return (
        f"round {found[-1].last} was carried out by engine {found[-1].carrier.text}, and the run goes on with engine "
        f"{now.text}: it rounds differently"
    )
