"""What a reader must know beside a table: where its numbers come from, and why some of them are missing."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence

from fedprophet.report.compare import (
    ATTACKS,
    NOT_SET,
    REFERENCE,
    Comparison,
    Setting,
    candidates,
    numerics,
    relevant_settings,
)
from fedprophet.report.runs import DEPLOYED, KINDS, Kind
from fedprophet.storage.files import how_to_resume

READING = (
    "Personalised: on each client's own held-out data, as in the paper. "
    "Global: the one exported model on the test set.",
    "Memory is that of the cost model, not measured; MB is 10^6 bytes. Least: with so much a device could have done "
    "the smallest task of every round (where tasks grow with what clients can spare, it may need less). Peak: the "
    "largest task.",
    "Time is simulated on the devices of the fleet: a round lasts as long as its slowest client. Network time (the "
    "slowest link of each round) is not part of it.",
)
WIRE = (
    "Wire: bytes of all messages of the rounds between server and clients, evaluations included, as the server counted "
    "them. jFAT's: those of its training alone, the whole model sent to as many clients and back."
)
SEVERAL_SEEDS = "Rows with several seeds show mean ± sample standard deviation; a speed-up is the ratio of mean times."
FAST_MARK = "†"
FAST = f"{FAST_MARK} aa-fast: APGD-CE and APGD-T alone. Under the whole AutoAttack the accuracy can only be lower."


def reading(comparison: Comparison) -> list[str]:
    """Return how to read the tables."""
    rows = [row for setting in comparison.settings for row in setting.rows]
    wire = [WIRE] if any(run.wire for row in rows for run in row.runs) else []
    return [*READING, *wire, *([SEVERAL_SEEDS] if any(len(row.runs) > 1 for row in rows) else [])]


def setting_notes(setting: Setting) -> list[str]:
    """Return the notes on a setting's tables."""
    return [note for kind in _KINDS_OF_NOTES for note in kind(setting)]


def _sources(setting: Setting) -> Iterator[str]:
    """Starting weights decide the accuracies, so that they are always named."""
    weights = ((row.runs[0].config.model.weights or "drawn at random", row.label) for row in setting.rows)
    yield f"Starting weights: {_each(weights)}."
    versions = sorted({run.version for run in setting.runs if run.version})
    if versions:
        yield f"Made with fedprophet {', '.join(versions)}."


def _norm_layers(setting: Setting) -> Iterator[str]:
    """Say what the accuracies were measured with, where a run says it."""
    finished = [(row.label, row.runs[0]) for row in setting.rows if row.finished]
    for kind in KINDS:
        if any(kind in run.norm_layers for _, run in finished):
            used = ((run.norm_layers.get(kind, "not recorded"), label) for label, run in finished)
            yield f"Norm layers, {kind}: {_each(used)}."
    if any(run.public_samples for _, run in finished):
        left_out = ((str(run.public_samples), label) for label, run in finished)
        yield f"Test samples that became the public set and are left out of global: {_each(left_out)}."


def _samples(setting: Setting) -> Iterator[str]:
    texts = []
    for kind in KINDS:
        for columns, name in ((("clean", "pgd"), "clean and PGD"), (("aa",), "AA")):
            cells = [row.accuracy(kind, column) for row in setting.rows for column in columns]
            counts = sorted({count for cell in cells if cell for count in cell.samples})
            if counts:
                texts.append(f"{kind} {name} {_range(counts)}")
    if texts:
        yield f"Samples behind an accuracy: {', '.join(texts)}."


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _rows_differ(setting: Setting) -> Iterator[str]:
    """Name the configuration keys in which rows differ and that no label, or not every one, tells.

    Some have the names of what is measured as well: `rounds` are those asked for here, and played ones in the table.
    """
    rows = [(row, relevant_settings(row.runs[0])) for row in setting.rows]
    for key in dict.fromkeys(key for _, keys in rows for key in keys):
        told = {keys.get(key, NOT_SET) for row, keys in rows if key in row.differs}
        untold = {keys.get(key, NOT_SET) for row, keys in rows if key not in row.differs}
        if key != "model.weights" and (told or len(untold) > 1):
            values = _each((keys.get(key, NOT_SET), row.label) for row, keys in rows)
            yield f"Rows differ in the configuration key {key}: {values}."


def _engines_differ(setting: Setting) -> Iterator[str]:
    """Runs on different engines share a row; on a GPU their numbers are rounded otherwise. One may have had several."""
    used = [(numerics(run), f"{row.label} seed {run.config.seed}") for row in setting.rows for run in row.runs]
    if len({how for how, _ in used}) > 1 or any(len(run.engines) > 1 for run in setting.runs):
        yield f"Runs were carried out by different engines: {_each(used)}."


def _deployed(setting: Setting) -> Iterator[str]:
    """A setting's runs are deployed all or none: real devices are a fleet of their own."""
    if any(run.deployed for run in setting.runs):
        yield (
            f"Carried out by {DEPLOYED}: the pool of the configuration played no part, so that no time is simulated "
            "and no speed-up known. Runs on simulated devices have tables of their own."
        )


def _unfinished(setting: Setting) -> Iterator[str]:
    for run in (run for row in setting.rows if not row.finished for run in row.runs):
        last = run.last
        reached = f", clean {last.clean:.1%} and PGD {last.adversarial:.1%} in round {last.round}" if last else ""
        costs = "memory is that" if run.deployed else "time and memory are those"
        yield (
            f"{run.path} is not finished: {run.rounds} rounds so far{reached}; {costs} so far. "
            f"Go on with: {how_to_resume(run.path)}"
        )


def _of_runs(setting: Setting) -> Iterator[str]:
    yield from (f"{run.path}: {note.rstrip('.')}." for run in setting.runs for note in run.notes)
    unknown = [str(run.path) for run in setting.runs if run.time is not None and run.memory is None and run.rounds]
    if unknown:
        yield f"Memory is not in the journal of {', '.join(unknown)}: an earlier version made it."


def _faults(setting: Setting) -> Iterator[str]:
    """Name the rows some of whose clients failed: their accuracies come of fewer answers than were asked for."""
    found = [f"{row.faults} times in {row.label}" for row in setting.rows if row.faults]
    if found:
        yield f"Answers of clients that were missing or could not be used: {', '.join(found)}; the journals say why."


def _attacks(setting: Setting) -> Iterator[str]:
    yield from (
        f"{row.label}: {kind} {column.upper()} of {cell.value.count} of {len(row.runs)} seeds."
        for row in setting.rows
        for kind in KINDS
        for column in ATTACKS
        if (cell := row.accuracy(kind, column)) and cell.value.count < len(row.runs)
    )
    cells = [row.accuracy(kind, "aa") for row in setting.rows for kind in KINDS]
    if any(cell and cell.attack == "aa-fast" for cell in cells):
        yield FAST
    # Real devices cannot be asked once their run is over: there, the exported model alone can be measured.
    kind: Kind = "global" if any(run.deployed for run in setting.runs) else "personalised"
    missing = [row for row in setting.rows if row.finished and not row.accuracy(kind, "aa")]
    if missing:
        run = shlex.quote(str(missing[0].runs[0].path))
        yield (
            f"AA is not measured for {', '.join(row.label for row in missing)}. "
            f"Measure it with: fedprophet evaluate {run} --attack autoattack"
        )


def _speedups(setting: Setting) -> Iterator[str]:
    references = [row for row in setting.rows if row.method == REFERENCE and row.finished]
    simulated = [row for row in setting.rows if row.finished and not row.runs[0].deployed]
    missing = [row for row in simulated if not candidates(row, references)]
    if missing:
        # Not from a run's own config.toml: it has the rounds of that run's method.
        yield (
            f"No speed-up for {', '.join(row.label for row in missing)}: no finished jFAT run with the same data, "
            f"model and fleet is given. Make one from the preset or file that they were started from: "
            f"fedprophet train PRESET --method {REFERENCE}"
        )
    choices = [row for row in setting.rows if row.speedup and len(candidates(row, references)) > 1]
    if choices:
        over = _each((row.speedup.over, row.label) for row in choices if row.speedup)
        yield f"Several jFAT rows fit. Speed-ups are over the one with the nearest settings: {over}."


def _each(pairs: Iterable[tuple[str, str]]) -> str:
    """Return `A for x, y; B for the others`: each value and whose it is; the most frequent one comes last."""
    found: dict[str, list[str]] = {}
    for value, label in pairs:
        found.setdefault(value, []).append(label)
    *rare, usual = sorted(found, key=lambda value: len(found[value]))
    if not rare:
        return f"{usual} for all rows"
    return "; ".join([*(f"{value} for {', '.join(found[value])}" for value in rare), f"{usual} for the others"])


_KINDS_OF_NOTES: Sequence[Callable[[Setting], Iterable[str]]] = (
    _sources,
    _norm_layers,
    _samples,
    _rows_differ,
    _engines_differ,
    _deployed,
    _unfinished,
    _of_runs,
    _faults,
    _attacks,
    _speedups,
)
