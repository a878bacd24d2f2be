"""The figure of the page: accuracies over rounds, a panel for each table and measure."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cifar10_table.bringing import Kept
from cifar10_table.cells import GROUPS, Row
from fedprophet.errors import ConfigError
from fedprophet.methods import METHODS
from fedprophet.report.figures import INK, PALE, check_plots
from fedprophet.report.runs import ReadFolder

if TYPE_CHECKING:  # Matplotlib is an extra and slow to import: it is loaded only to draw.
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people with any kind of colour blindness can tell apart; yellow is too light for lines.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B", "#7F7F7F")
STYLES = [(colour, dashes) for dashes in ("-", "--", ":") for colour in COLOURS]
MEASURES = {"clean": "clean accuracy", "adversarial": "accuracy under PGD-20"}
CIRCLES = "circles: the round that a module was kept at"
WIDTH, HEIGHT, LABEL_GAP = 11.0, 3.5, 0.062
PANELS = {"left": 0.06, "right": 0.72, "bottom": 0.14, "top": 0.87, "wspace": 0.2}
"""Where the two panels of a table are, the same for all tables: the rest is for the names of the lines."""
ROOM = (0.025, 0.06)
"""How far apart numbers of modules are, across or along, as shares of the panel."""


@dataclass(frozen=True)
class Curve:
    """A measure of one run over its rounds, in %, and where a stage's kept round is, by module."""

    rounds: Sequence[int]
    values: Sequence[float]
    stages: Mapping[int, tuple[int, float]]


def curve_of(run: ReadFolder, measure: str) -> Curve:
    """Return a run's curve; rounds without an evaluation are left out."""
    measured = [record for record in run.records if record.get("samples")]
    fixed = [record["fixed"] for record in run.records if "fixed" in record]
    return Curve(
        [record["round"] for record in measured],
        [100 * record[measure] for record in measured],
        {stage["module"]: (stage["round"], 100 * stage[measure]) for stage in fixed},
    )


def figure(kept: Kept) -> bytes:
    """Return the curves of all finished runs as SVG; the same runs and the same Matplotlib give the same bytes."""
    check_plots()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    groups = [group for group in GROUPS if any(cell.name in kept for cell in group.cells)]
    if not groups:
        raise ConfigError("no finished run is kept: there is nothing to draw")
    with rc_context({"svg.hashsalt": "cifar10"}):
        drawn = Figure(figsize=(WIDTH, HEIGHT * len(groups)), facecolor="white")
        parts = drawn.subfigures(len(groups), 1, squeeze=False).flat
        for part, group in zip(parts, groups, strict=True):
            part.suptitle(group.title, x=0.01, ha="left", fontsize=11, color=INK, fontweight="bold")
            panels = part.subplots(1, len(MEASURES), gridspec_kw=PANELS)
            ends = [draw_rows(axes, group.rows, kept, measure) for axes, measure in zip(panels, MEASURES, strict=True)]
            label_ends(panels[-1], ends[-1])
        data = io.BytesIO()
        drawn.savefig(data, format="svg", metadata={"Date": None, "Creator": None})
    return data.getvalue()


def draw_rows(axes: "Axes", rows: Sequence[Row], kept: Kept, measure: str) -> dict[str, tuple[float, float, str]]:
    """Draw the runs of some rows: a colour for each row, a thin line for each seed.

    Return by title where each row's lines end, and its colour.
    """
    ends: dict[str, tuple[float, float, str]] = {}
    stages: list[tuple[Curve, str]] = []
    played = [row for row in rows if any(cell.name in kept for cell in row.cells)]
    for (colour, dashes), row in zip(STYLES[: len(played)], played, strict=True):
        curves = [curve_of(kept[cell.name], measure) for cell in row.cells if cell.name in kept]
        for number, curve in enumerate(curves):
            width = 0.9 if len(curves) == 1 else 0.6
            axes.plot(curve.rounds, curve.values, color=colour, ls=dashes, lw=width, alpha=0.85)
            draw_stages(axes, curve, colour)
            stages += [(curve, colour)] if number == 0 else []
        title = row.title if len(curves) == 1 else f"{row.title}, {len(curves)} seeds"
        last = [value for curve in curves for value in curve.values[-max(1, len(curve.values) // 20) :]]
        ends[title] = (max(curve.rounds[-1] for curve in curves), sum(last) / len(last), colour)
    if any(METHODS[row.method].cascade and row.title in title for row in rows for title in ends):
        axes.text(0.99, 0.03, CIRCLES, transform=axes.transAxes, ha="right", fontsize=7.5, color=PALE)
    axes.set_ylim(0, 100 if measure == "clean" else 70)
    axes.set_xlim(0, 1.01 * max(x for x, _, _ in ends.values()))
    axes.set_xlabel("round", fontsize=9, color=INK)
    axes.set_ylabel(f"personalised {MEASURES[measure]}, %", fontsize=9, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, labelcolor=INK, color=PALE)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    number_stages(axes, stages)
    return ends


def draw_stages(axes: "Axes", curve: Curve, colour: str) -> None:
    """Mark the round that each stage of a cascade was kept at."""
    for x, y in curve.stages.values():
        axes.plot([x], [y], "o", ms=4.5, mfc="white", mec=colour, mew=1.2, zorder=3)


def number_stages(axes: "Axes", stages: Sequence[tuple[Curve, str]]) -> None:
    """Write the numbers of modules over their marks, where there is room beside the numbers that are there already."""
    from matplotlib.patheffects import withStroke

    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    across, along = ROOM[0] * (right - left), ROOM[1] * (high - low)
    placed: list[tuple[float, float]] = []
    for curve, colour in stages:
        for module, (x, y) in curve.stages.items():
            if any(abs(x - other_x) < across and abs(y - other_y) < along for other_x, other_y in placed):
                continue
            placed.append((x, y))
            halo = [withStroke(linewidth=2.5, foreground="white")]
            style: dict[str, Any] = {"ha": "center", "fontsize": 7.5, "color": colour, "path_effects": halo}
            axes.annotate(str(module), (x, y), (0, 7), textcoords="offset points", **style)


def label_ends(axes: "Axes", ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Write each line's name beside the panel, at the height of the line's end, apart from each other."""
    low, high = axes.get_ylim()
    heights = apart([y for _, y, _ in ends.values()], LABEL_GAP * (high - low))
    for (title, (x, y, colour)), height in zip(ends.items(), heights, strict=True):
        axes.annotate(
            title,
            (x, y),
            (1.03, height),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=8.5,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.8, "ls": (0, (1, 3)), "relpos": (0, 0.5)},
            annotation_clip=False,
        )


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Return places moved as little as needed for a gap between neighbours: those too near are spread about their mean.

    Places that collide form a group; groups that then collide are joined.
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    groups: list[list[int]] = []
    for index in order:
        groups.append([index])
        while len(groups) > 1 and _span(groups[-2], places, gap)[1] + gap > _span(groups[-1], places, gap)[0]:
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = list(places)
    for group in groups:
        for place, index in enumerate(group):
            moved[index] = _span(group, places, gap)[0] + place * gap
    return moved


def _span(group: Sequence[int], places: Sequence[float], gap: float) -> tuple[float, float]:
    """Return from where to where a group reaches when its members are a gap apart, about their mean."""
    middle, reach = sum(places[index] for index in group) / len(group), gap * (len(group) - 1) / 2
    return middle - reach, middle + reach
