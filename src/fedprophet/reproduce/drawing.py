"""Figures: one picture for each experiment, a panel for each of its parts. The paper's numbers are diamonds."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedprophet.report.compare import Statistic
from fedprophet.report.figures import DPI, INK, PALE, check_plots
from fedprophet.reproduce.findings import Part, Quantity
from fedprophet.reproduce.paper import Numbers

if TYPE_CHECKING:  # Matplotlib is an extra and slow to import: it is loaded only to draw.
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people with any kind of colour blindness can tell apart.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2")
WIDTH, PANEL_HEIGHT, TITLE_HEIGHT = 10.0, 3.6, 0.9
MARKS = ("o-", "s--", "^:")
DIAMOND: Mapping[str, Any] = {"marker": "D", "ms": 5, "mfc": "white", "mec": INK, "mew": 1.0, "ls": "none"}
BREADTH = 0.8
"""Of a group of bars; groups are one apart."""

Draw = Callable[["Axes", Part, Numbers, Sequence[Quantity]], None]
"""Draws a part, with the paper's numbers beside it."""


def picture(title: str, parts: Sequence[tuple[Part, Numbers]], quantities: Sequence[Quantity], draw: Draw) -> bytes:
    """Return the picture of an experiment as PNG; the same numbers and the same Matplotlib give the same bytes."""
    check_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(parts))
    lines = math.ceil(len(parts) / columns)
    size = (WIDTH if columns > 1 else 0.75 * WIDTH, PANEL_HEIGHT * lines + TITLE_HEIGHT)
    figure: Figure = Figure(figsize=size, dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, color=INK, fontweight="bold")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for panel, (part, numbers) in zip(panels, parts, strict=False):
        panel.set_title(part.label, fontsize=10, color=INK, loc="left")
        draw(panel, part, numbers, quantities)
        _tidy(panel)
    for panel in list(panels):
        panel.set_visible(False)
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def _tidy(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, labelcolor=INK, color=PALE)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)


def _chosen(quantities: Sequence[Quantity], names: Sequence[str]) -> list[Quantity]:
    return [quantity for name in names for quantity in quantities if quantity.name == name]


def _name_rows(axes: "Axes", part: Part) -> None:
    """Name the rows below the axis, turned where there are many."""
    many = len(part.values) > 4
    axes.set_xticks(
        range(len(part.values)), list(part.values), rotation=30 if many else 0, ha="right" if many else "center"
    )


def _ours(part: Part, name: str) -> list[tuple[int, Statistic]]:
    """Return the place of each row that has a quantity, and its value."""
    return [(place, cells[name]) for place, cells in enumerate(part.values.values()) if name in cells]


def _theirs(part: Part, numbers: Numbers, name: str) -> list[tuple[float, float]]:
    """Return the same of the paper's numbers."""
    cells = (numbers.get(row, {}) for row in part.values)
    return [(float(place), found[name].value) for place, found in enumerate(cells) if name in found]


def bars(*names: str) -> Draw:
    """Return what draws some quantities as bars beside each other, a group for each row."""

    def draw(axes: "Axes", part: Part, numbers: Numbers, quantities: Sequence[Quantity]) -> None:
        shown = [q for q in _chosen(quantities, names) if _ours(part, q.name) or _theirs(part, numbers, q.name)]
        thickness = BREADTH / max(len(shown), 1)
        for number, quantity in enumerate(shown):
            shift = (number + 0.5) * thickness - BREADTH / 2
            values = _ours(part, quantity.name) or [(0, Statistic(math.nan, None, 0))]  # for the legend
            spread = [value.deviation or 0.0 for _, value in values]
            axes.bar(
                [place + shift for place, _ in values],
                [value.mean for _, value in values],
                0.9 * thickness,
                yerr=spread if any(spread) else None,
                color=COLOURS[number],
                ecolor=INK,
                capsize=2,
                label=quantity.heading,
            )
            theirs = [(place + shift, value) for place, value in _theirs(part, numbers, quantity.name)]
            _diamonds(axes, part, theirs)
        _name_rows(axes, part)

    return draw


def stacked(*names: str) -> Draw:
    """Return what draws some quantities on top of each other, a bar for each row; a diamond is the paper's time."""

    def draw(axes: "Axes", part: Part, numbers: Numbers, quantities: Sequence[Quantity]) -> None:
        starts = [0.0] * len(part.values)
        for number, quantity in enumerate(_chosen(quantities, names)):
            found = dict(_ours(part, quantity.name))
            heights = [found[place].mean if place in found else 0.0 for place in range(len(starts))]
            style: dict[str, Any] = {"color": COLOURS[number], "hatch": "////" if number else None, "ec": "white"}
            axes.bar(range(len(starts)), heights, 0.6, starts, label=quantity.heading, **style)
            starts = [start + height for start, height in zip(starts, heights, strict=True)]
        _diamonds(axes, part, _theirs(part, numbers, "time"))
        _name_rows(axes, part)

    return draw


def lines(x: str, *names: str) -> Draw:
    """Return what draws quantities over the rows: those in % on the left axis, another one on the right axis."""

    def draw(axes: "Axes", part: Part, numbers: Numbers, quantities: Sequence[Quantity]) -> None:
        right = axes.twinx()
        right.spines["top"].set_visible(False)
        right.tick_params(labelsize=8, labelcolor=INK, color=PALE)
        for number, quantity in enumerate(_chosen(quantities, names)):
            side = axes if quantity.unit == "%" else right
            points = [(place, value.mean) for place, value in _ours(part, quantity.name)]
            style: dict[str, Any] = {"color": COLOURS[number], "label": quantity.heading}
            side.plot([place for place, _ in points], [y for _, y in points], MARKS[number], **style)
            if side is right:
                right.set_ylabel(quantity.heading, fontsize=9, color=INK)
                axes.plot([], [], MARKS[number], **style)  # one legend for both axes
            else:
                _diamonds(axes, part, _theirs(part, numbers, quantity.name))
        _name_axes(axes, x, "%")
        axes.set_xticks(range(len(part.values)), list(part.values))

    return draw


def points_or(x: str, y: str, otherwise: Draw) -> Draw:
    """Return what draws the curves of a part as clouds of points, and a part without any in another way."""

    def draw(axes: "Axes", part: Part, numbers: Numbers, quantities: Sequence[Quantity]) -> None:
        if not part.curves:
            otherwise(axes, part, numbers, quantities)
            return
        for colour, mark, curve in zip((COLOURS[4], COLOURS[2]), "o^", part.curves, strict=True):
            axes.plot(curve.x, curve.y, mark, ms=4, alpha=0.7, color=colour, label=curve.label)
        _name_axes(axes, x, y)
        axes.set_yscale("log")

    return draw


def curves(x: str, y: str) -> Draw:
    """Return what draws the curves of a part over an axis, with their borders."""

    def draw(axes: "Axes", part: Part, numbers: Numbers, quantities: Sequence[Quantity]) -> None:
        for curve in part.curves:
            axes.step(curve.x, curve.y, where="mid", color=COLOURS[4], lw=1.5)
            for border in curve.borders:
                axes.axvline(border + 0.5, color=COLOURS[1], ls="--", lw=1)
        _name_axes(axes, x, y)
        axes.set_ylim(bottom=0)

    return draw


def _name_axes(axes: "Axes", x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)


def _diamonds(axes: "Axes", part: Part, points: Sequence[tuple[float, float]]) -> None:
    """Mark the paper's numbers; the legend says once of which setting they are, where that is not the panel's."""
    label = "the paper" if part.label.startswith(part.paper) else f"the paper, {part.paper}"
    known = axes.get_legend_handles_labels()[1]
    if points:
        axes.plot([x for x, _ in points], [y for _, y in points], label=None if label in known else label, **DIAMOND)
