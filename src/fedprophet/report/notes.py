"""What a reader must know beside the tables: where the numbers come from, and why some are missing."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from fedprophet.display.numbers import counted, percent
from fedprophet.going_on import how_to_evaluate, how_to_resume
from fedprophet.methods import METHODS, reads
from fedprophet.report.compare import (
    ARCHITECTURE,
    COLUMN_ATTACKS,
    NOT_SET,
    REFERENCE,
    Comparison,
    Row,
    Setting,
    candidates,
    changed_settings,
    numerics,
    of_setting,
    relevant_settings,
)
from fedprophet.report.runs import DEPLOYED
from fedprophet.runs.evaluator import KINDS, Kind
from fedprophet.runs.files import RunFiles

READING = (
    "Personalised: on each client's own held-out data, as in the paper. "
    "Global: the one exported model on the test set.",
    "Memory comes from the cost model, it is not measured; MB is 10^6 bytes. Least: enough for the smallest task of "
    "every round (methods that fit tasks to the client may need less). Peak: the largest task.",
    "Time is simulated on the devices of the fleet: a round takes as long as its slowest client. Network time (the "
    "slowest link of each round) is not included.",
)
WIRE = (
    "Wire: bytes of all tasks and answers between server and clients, evaluations included, as counted by the server. "
    "jFAT's: training only, the whole model sent to as many clients and back."
)
ENFORCED = (
    "Where memory was enforced, it is also measured: the most bytes that a client's training took at its peak, what "
    "that client might take, and the largest share of its limit that any client took. Counted is what the most "
    "economical plan needs; a client that has more takes a quicker one, which needs more."
)
SEVERAL_SEEDS = "Rows with several seeds show mean ± sample standard deviation; a speed-up is the ratio of mean times."
FAST_MARK = "†"
FAST = f"{FAST_MARK} aa-fast: only APGD-CE and APGD-T. Under the whole AutoAttack the accuracy can only be lower."


def reading(comparison: Comparison) -> list[str]:
    """Return how to read the tables."""
    rows = [row for setting in comparison.settings for row in setting.rows]
    wire = [WIRE] if any(run.wire for row in rows for run in row.runs) else []
    enforced = [ENFORCED] if any(row.enforced for row in rows) else []
    return [*READING, *enforced, *wire, *([SEVERAL_SEEDS] if any(len(row.runs) > 1 for row in rows) else [])]


def setting_notes(setting: Setting) -> list[str]:
    return [note for notes in _NOTES for note in notes(setting)]


def _legend(setting: Setting) -> Iterator[str]:
    """Tell what the letters in names stand for, each name once."""
    yield from dict.fromkeys(
        f"{METHODS[row.method].paper} {row.letter}: {', '.join(row.keys)}" for row in setting.rows if row.letter
    )


def _sources(setting: Setting) -> Iterator[str]:
    """Starting weights are always named: the accuracies depend on them."""
    weights = ((row.runs[0].config.model.weights or "drawn at random", row.name) for row in setting.rows)
    yield f"Starting weights: {_each(weights)}."
    versions = sorted({run.version for run in setting.runs if run.version})
    if versions:
        yield f"Made with fedprophet {', '.join(versions)}."


def _norm_layers(setting: Setting) -> Iterator[str]:
    finished = [(row.name, row.runs[0]) for row in setting.rows if row.finished]
    for kind in KINDS:
        if any(kind in run.norm_layers for run in setting.runs):
            used = [pair for row in setting.rows if row.finished for pair in _layers_of(row, kind)]
            yield f"Norm layers, {kind}: {_each(used)}."
    if any(run.public_samples for _, run in finished):
        left_out = ((str(run.public_samples), label) for label, run in finished)
        yield f"Test samples in the public set, not used for global accuracies: {_each(left_out)}."


def _layers_of(row: Row, kind: Kind) -> Iterator[tuple[str, str]]:
    """Yield the norm layers of a row's accuracies; seeds may differ, as where nobody measured statistics anew."""
    found = [run.norm_layers.get(kind, "not recorded") for run in row.runs]
    if len(set(found)) == 1:
        yield found[0], row.name
    else:
        yield from ((text, f"{row.name} seed {run.config.seed}") for text, run in zip(found, row.runs, strict=True))


def _samples(setting: Setting) -> Iterator[str]:
    texts = []
    for kind in KINDS:
        for columns, name in ((("clean", "pgd"), "clean and PGD"), (("aa",), "AA")):
            cells = [row.accuracy(kind, column) for row in setting.rows for column in columns]
            counts = {count for cell in cells if cell for count in cell.samples}
            if counts:
                several = f" to {max(counts)}" if len(counts) > 1 else ""
                texts.append(f"{kind} {name} {min(counts)}{several}")
    if texts:
        yield f"Samples per accuracy: {', '.join(texts)}."


def _precisions(setting: Setting) -> Iterator[str]:
    """Name the precision of each column, unless all are in float32."""
    columns = {
        column: {
            precision
            for row in setting.rows
            for kind in KINDS
            if (cell := row.accuracy(kind, column))
            for precision in cell.precisions
        }
        for column in COLUMN_ATTACKS
    }
    if set().union(*columns.values()) - {"float32"}:
        texts = [f"{column.upper()} {' and '.join(sorted(found))}" for column, found in columns.items() if found]
        yield f"Precision of the accuracies: {', '.join(texts)}."


def _rows_differ(setting: Setting) -> Iterator[str]:
    """Name the configuration keys in which rows differ, unless every label says so.

    `rounds` is the number asked for; the table shows the number played.
    """
    rows = [(row, relevant_settings(row.runs[0])) for row in setting.rows]
    for key in dict.fromkeys(key for _, keys in rows for key in keys):
        readers = [(row, keys.get(key, NOT_SET)) for row, keys in rows if reads(row.method, key)]
        in_labels = any(key in row.differs for row, _ in readers)
        others = {value for row, value in readers if key not in row.differs}
        if key != "model.weights" and (in_labels or len(others) > 1):
            values = _each((value, row.name) for row, value in readers)
            what = "models that were handed over" if key == ARCHITECTURE else f"the configuration key {key}"
            yield f"Rows differ in {what}: {values}."


def _rows_share(setting: Setting) -> Iterator[str]:
    """Name what all rows have that read it, where it is not the default: one line, whatever keys there are."""
    rows = [(row, changed_settings(row.runs[0])) for row in setting.rows]
    same = {}
    for key in dict.fromkeys(key for _, keys in rows for key in keys):
        values = {keys.get(key) for row, keys in rows if reads(row.method, key)}
        if len(values) == 1 and key != "model.weights" and not of_setting(key):
            same[key] = values.pop()
    if same:
        yield f"Not at the default, and alike in all rows: {', '.join(f'{k} = {v}' for k, v in same.items())}."


def _engines_differ(setting: Setting) -> Iterator[str]:
    """Runs on different engines share a row, though a GPU rounds differently. One run may have used several."""
    used = [(numerics(run), f"{row.name} seed {run.config.seed}") for row in setting.rows for run in row.runs]
    if len({how for how, _ in used}) > 1 or any(len(run.engines) > 1 for run in setting.runs):
        yield f"Runs used different engines: {_each(used)}."


def _deployed(setting: Setting) -> Iterator[str]:
    """A setting's runs are all deployed or none is: real devices are a fleet of their own."""
    if any(run.deployed for run in setting.runs):
        yield (
            f"Trained with {DEPLOYED}: the configuration's pool was not used, so there is no simulated time and no "
            "speed-up. Runs on simulated devices have their own tables."
        )


def _unfinished(setting: Setting) -> Iterator[str]:
    for run in (run for row in setting.rows if not row.finished for run in row.runs):
        reached = ""
        if last := run.last:
            reached = f", clean {percent(last.clean)} and PGD {percent(last.adversarial)} in round {last.round}"
        played, costs = counted(run.rounds, "round"), "memory is" if run.deployed else "time and memory are"
        yield (
            f"{run.path} is not finished: {played} so far{reached}; {costs} of these rounds only. "
            f"Resume it with: {how_to_resume(run.path)}"
        )


def _of_runs(setting: Setting) -> Iterator[str]:
    yield from (f"{run.path}: {note.rstrip('.')}." for run in setting.runs for note in run.notes)


def _faults(setting: Setting) -> Iterator[str]:
    """Name the rows in which clients failed: their models are averaged from fewer answers than were asked for."""
    found = [f"{row.faults} in {row.name}" for row in setting.rows if row.faults]
    if found:
        yield f"Answers of clients that were missing or unusable: {', '.join(found)}. The journals say why."


def _attacks(setting: Setting) -> Iterator[str]:
    yield from (
        f"{row.name}: {kind} {column.upper()} of {cell.value.count} of {len(row.runs)} seeds."
        for row in setting.rows
        for kind in KINDS
        for column in COLUMN_ATTACKS
        if (cell := row.accuracy(kind, column)) and cell.value.count < len(row.runs)
    )
    cells = [row.accuracy(kind, "aa") for row in setting.rows for kind in KINDS]
    if any(cell and cell.attack == "aa-fast" for cell in cells):
        yield FAST
    yield from _unattacked(setting)


def _unattacked(setting: Setting) -> Iterator[str]:
    """Say which accuracies of finished rows were not measured under AutoAttack, and how they can be.

    Real devices cannot be asked after their run: only the exported model can still be measured.
    """
    away = any(run.deployed for run in setting.runs)
    possible: tuple[Kind, ...] = ("global",) if away else ("personalised", "global")
    rows: dict[tuple[Kind, ...], list[Row]] = {}
    for row in (row for row in setting.rows if row.finished):
        missing = tuple(kind for kind in possible if not row.accuracy(kind, "aa"))
        rows.setdefault(missing, []).append(row)
    rows.pop((), None)
    for kinds, without in rows.items():
        are, them = ("are", "them") if len(kinds) > 1 else ("is", "it")
        said = f"{' and '.join(kinds).capitalize()} AA {are} not measured for {', '.join(row.name for row in without)}."
        # What is kept of a run whose model is elsewhere has none.
        whole = (run.path for row in without for run in row.runs if RunFiles(run.path).checkpoints.is_dir())
        path = next(whole, None)
        of = {} if kinds == possible else {"of": kinds[0]}
        yield said if path is None else f"{said} Measure {them}: {how_to_evaluate(path, 'autoattack', **of)}"


def _speedups(setting: Setting) -> Iterator[str]:
    references = [row for row in setting.rows if row.method == REFERENCE and row.finished]
    simulated = [row for row in setting.rows if row.finished and not row.runs[0].deployed]
    missing = [row for row in simulated if not candidates(row, references)]
    if missing:
        # A run's own config.toml would not do: it has the number of rounds of that run's method.
        yield (
            f"No speed-up for {', '.join(row.name for row in missing)}: there is no finished jFAT run with the same "
            "data, model and fleet. Start one from the same preset or file: "
            f"fedprophet train PRESET --method {REFERENCE}"
        )
    choices = [row for row in setting.rows if row.speedup and len(candidates(row, references)) > 1]
    if choices:
        names = {row.label: row.name for row in references}
        over = _each((names[row.speedup.over], row.name) for row in choices if row.speedup)
        yield f"Several jFAT rows fit. Speed-ups are over the one with the most similar settings: {over}."


def _each(pairs: Iterable[tuple[str, str]]) -> str:
    """Return `A for x, y; B for the others`: each value and its rows, the most frequent value last."""
    found: dict[str, list[str]] = {}
    for value, label in pairs:
        found.setdefault(value, []).append(label)
    *rare, usual = sorted(found, key=lambda value: len(found[value]))
    if not rare:
        return f"{usual} for all rows"
    return "; ".join([*(f"{value} for {', '.join(found[value])}" for value in rare), f"{usual} for the others"])


_NOTES: Sequence[Callable[[Setting], Iterable[str]]] = (
    _legend,
    _sources,
    _norm_layers,
    _samples,
    _precisions,
    _rows_differ,
    _rows_share,
    _engines_differ,
    _deployed,
    _unfinished,
    _of_runs,
    _faults,
    _attacks,
    _speedups,
)
