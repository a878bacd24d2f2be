"""The comparison as a picture: accuracies on the left, simulated time on the right, one group of bars for each row."""

import importlib.util
import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedprophet.display.numbers import factor
from fedprophet.durations import Unit
from fedprophet.errors import ConfigError
from fedprophet.report.compare import COLUMN_ATTACKS, Comparison, Row, Setting, Statistic
from fedprophet.report.notes import FAST_MARK
from fedprophet.report.tables import time_text, time_unit
from fedprophet.runs.evaluator import Kind

if TYPE_CHECKING:  # Matplotlib is an extra and slow to import: it is loaded only to draw.
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# Okabe and Ito's colours, which people with any kind of colour blindness can tell apart.
ATTACK_COLOURS: Mapping[str, str] = {"clean": "#56B4E9", "pgd": "#E69F00", "aa": "#009E73"}
TIME_COLOURS: Mapping[str, str] = {"computation": "#0072B2", "access": "#CC79A7"}
ATTACK_NAMES: Mapping[str, str] = {"clean": "Clean", "pgd": "PGD", "aa": "AA"}
TIME_NAMES: Mapping[str, str] = {"computation": "Computation", "access": "Storage access"}
INK, PALE = "#222222", "#666666"
WIDTH, ROW_HEIGHT, FRAME_HEIGHT, DPI = 11.0, 0.62, 1.55, 150
LABEL_WIDTH, LINE_HEIGHT = 30, 0.16
UNIT_NAMES: Mapping[str, str] = {"s": "seconds", "min": "minutes", "h": "hours", "days": "days"}


def check_plots() -> None:
    """Raise ConfigError if Matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "the figure needs Matplotlib, which is not installed: pip install 'fedprophet[plots]'. "
            "Or leave the figure out: --no-plot"
        )


def comparison_png(comparison: Comparison) -> bytes:
    """Return the picture of a comparison; the same runs and the same Matplotlib give the same bytes."""
    data = io.BytesIO()
    comparison_figure(comparison).savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def comparison_figure(comparison: Comparison) -> "Figure":
    """Return the picture as a figure that pyplot does not know of."""
    check_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [FRAME_HEIGHT + _row_height(setting) * len(setting.rows) for setting in comparison.settings]
    figure = Figure(figsize=(WIDTH, sum(heights)), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    for part, setting in zip(parts.flat, comparison.settings, strict=True):
        _draw(part, setting)
    return figure


def _wrapped(row: Row) -> str:
    return textwrap.fill(row.name, LABEL_WIDTH, break_long_words=False)


def _row_height(setting: Setting) -> float:
    """Return the height of a row in inches: that of its bars, or of the longest name's lines."""
    lines = max(_wrapped(row).count("\n") + 1 for row in setting.rows)
    return max(ROW_HEIGHT, LINE_HEIGHT * lines + 0.1)


def _draw(part: "SubFigure", setting: Setting) -> None:
    part.suptitle(setting.title, fontsize=11, color=INK, fontweight="bold")
    accuracy, time = part.subplots(1, 2, sharey=True, width_ratios=(1, 1.05))
    _draw_accuracies(accuracy, setting.rows)
    _draw_times(time, setting.rows)
    for axes in (accuracy, time):
        _tidy(axes)
    accuracy.set_yticks(range(len(setting.rows)), [_wrapped(row) for row in setting.rows])
    accuracy.set_ylim(len(setting.rows) - 0.5, -0.5)  # the first row on top, as in the table


def _draw_accuracies(axes: "Axes", rows: Sequence[Row]) -> None:
    """Draw personalised accuracies as bars, and the global ones as diamonds on them."""
    shown = [column for column in COLUMN_ATTACKS if any(row.accuracy("personalised", column) for row in rows)]
    thickness = 0.84 / max(len(shown), 1)
    for place, column in enumerate(shown):
        heights = [number + (place - (len(shown) - 1) / 2) * thickness for number in range(len(rows))]
        bars = _points(rows, heights, "personalised", column)
        colour, name = ATTACK_COLOURS[column], ATTACK_NAMES[column]
        axes.barh([y for y, *_ in bars], [v.mean for _, v, _ in bars], 0.9 * thickness, color=colour, label=name)
        for y, value, attack in bars:
            if value.deviation is not None:
                axes.errorbar(value.mean, y, xerr=value.deviation, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
            if attack == "aa-fast":  # marked as in the tables: it is not the whole AutoAttack
                end = value.mean + (value.deviation or 0.0)
                axes.text(end + 1, y, f"{FAST_MARK} aa-fast", va="center", fontsize=8, color=INK)
        diamonds = _points(rows, heights, "global", column)
        means = [value.mean for _, value, _ in diamonds]
        axes.plot(means, [y for y, *_ in diamonds], "D", ms=4.5, mfc="white", mec=INK, mew=0.9)
    axes.set_xlim(0, 100)
    axes.set_xlabel("Accuracy in %: personalised (bars) and global (diamonds)", fontsize=9, color=INK)
    for number, row in enumerate(rows):
        if not any(row.accuracy("personalised", column) for column in shown):
            axes.text(1, number, "not measured", va="center", fontsize=8, color=PALE)


def _points(
    rows: Sequence[Row], heights: Sequence[float], kind: Kind, column: str
) -> list[tuple[float, Statistic, str]]:
    """Return where each row that has the accuracy is drawn, the accuracy in %, and the attack."""
    found = ((y, row.accuracy(kind, column)) for y, row in zip(heights, rows, strict=True))
    return [(y, accuracy.value.scaled(100.0), accuracy.attack) for y, accuracy in found if accuracy]


def _draw_times(axes: "Axes", rows: Sequence[Row]) -> None:
    """Stack computation and access, with the total and the speed-up over jFAT beside each bar."""
    unit = time_unit(rows)
    starts = [0.0] * len(rows)
    for part, colour in TIME_COLOURS.items():
        widths = [value.mean / unit.seconds if (value := row.time(part)) else 0.0 for row in rows]
        hatch = "////" if part == "access" else None
        axes.barh(range(len(rows)), widths, 0.55, starts, color=colour, ec="white", hatch=hatch, label=TIME_NAMES[part])
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    longest = max(starts) or 1.0
    behind = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
    for number, (row, end) in enumerate(zip(rows, starts, strict=True)):
        place, text = (end + 0.02 * longest, number), _time_label(row, unit)
        axes.text(*place, text, va="center", fontsize=9, color=INK, bbox=behind)
    axes.set_xlim(0, 1.45 * longest)  # room for the text beside the longest bar
    axes.set_xlabel(f"Simulated time in {UNIT_NAMES[unit.name]} (and speed-up over jFAT)", fontsize=9, color=INK)


def _time_label(row: Row, unit: Unit) -> str:
    total = row.time("total")
    if total is None:
        return "not simulated" if row.runs[0].deployed else "not known"
    text = time_text(unit, Statistic(total.mean, None, total.count)) + ("" if row.finished else " so far")
    return f"{text}  ({factor(row.speedup.factor)})" if row.speedup else text


def _tidy(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, labelcolor=INK, color=PALE)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9, borderaxespad=0.2)
