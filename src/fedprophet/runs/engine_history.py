"""Which engine each of a run's rounds ran on. With engine = "auto" that differs from machine to machine."""

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
class EngineUse:
    """An engine, and the precision of its activations and products."""

    engine: str
    precision: str

    @property
    def text(self) -> str:
        """The engine for people, with its precision on a GPU, where there is a choice."""
        return f"{self.engine}, {self.precision}" if self.engine == CUDA else self.engine


@dataclass(frozen=True)
class EngineSpan:
    """Rounds in a row, the last one included, on one engine."""

    use: EngineUse
    first: int
    last: int

    def to_json(self) -> dict[str, Any]:
        """Return it for files."""
        return {"engine": self.use.engine, "precision": self.use.precision, "rounds": [self.first, self.last]}


def engine_in_use(session: Session, run: Path) -> EngineUse:
    """Return the engine that a run's rounds have in this process."""
    engine = DEVICES if is_deployed(run) else session.engine_name
    return EngineUse(engine, session.config.precision if engine == CUDA else "float32")


def spans(timings: Iterable[Mapping[str, Any]]) -> tuple[EngineSpan, ...]:
    """Return the engines of rounds, from the lines of timings.jsonl; one that was altered may name none."""
    found: list[EngineSpan] = []
    for line in timings:
        if not {"engine", "precision"} <= line.keys():
            continue
        use, number = EngineUse(str(line["engine"]), str(line["precision"])), int(line["round"])
        first = found.pop().first if found and found[-1].use == use else number
        found.append(EngineSpan(use, first, number))
    return tuple(found)


def spans_of(document: Iterable[Mapping[str, Any]]) -> tuple[EngineSpan, ...]:
    """Return the spans that a closing summary lists."""
    return tuple(EngineSpan(EngineUse(line["engine"], line["precision"]), *line["rounds"]) for line in document)


def engines_text(found: Sequence[EngineSpan]) -> str:
    """Return `workers`, or `workers to round 20, then cuda, bfloat16` if a run has changed its engine."""
    *earlier, last = found
    before = [f"not recorded to round {found[0].first - 1}"] if found[0].first > 1 else []
    return ", then ".join([*before, *(f"{span.use.text} to round {span.last}" for span in earlier), last.use.text])


def change(found: Sequence[EngineSpan], now: EngineUse) -> str | None:
    """Return what to say if a run continues on a different engine from its last round's."""
    if not found or found[-1].use == now:
        return None
    return (
        f"round {found[-1].last} ran on engine {found[-1].use.text}, and the run continues on engine {now.text}, whose "
        "floating-point rounding differs"
    )
