"""The picture: it shows the table's numbers, nothing in it overlaps, and nobody else's Matplotlib is touched."""

import importlib.util
import subprocess
import sys

import matplotlib as mpl
import pytest

from fedprophet.errors import ConfigError
from fedprophet.methods import METHODS
from fedprophet.report.compare import compare
from fedprophet.report.figures import ATTACK_NAMES, TIME_NAMES, comparison_figure, comparison_png


@pytest.fixture
def eight(write_run):
    """All eight methods, one with a letter for its keys, one not finished, one measured with aa-fast alone."""
    paths = [
        write_run(method, method, rounds=[[(1000 * number, 500, 1, 1e7)]], clean=0.1 * number, autoattack=0.05)
        for number, method in enumerate(METHODS, start=1)
    ]
    fast = {"aa-fast": {"accuracy": 0.3, "samples": 9}}
    extra = [
        write_run("x", "jfat", "evaluate.every=1", "norm.layers=local", "train.proximal=0.75"),
        write_run("y", "fedrbn", "seed=1", finished=False),
        write_run("z", "fedet", "train.batch=3", evaluation={"round": 2, "personalised": fast, "global": fast}),
    ]
    return compare([*paths, *extra])


def test_bars_have_the_tables_numbers(write_run):
    runs = [
        write_run("a", "jfat", rounds=[[(7200, 28_800, 1, 1)]], clean=0.8, pgd=0.5),
        write_run("b", "fedprophet", rounds=[[(10_800, 3600, 1, 1)]], clean=0.7, pgd=0.6),
    ]
    figure = comparison_figure(compare(runs))
    accuracy, time = figure.axes
    bars = {bar.get_label(): [round(patch.get_width(), 6) for patch in bar] for bar in accuracy.containers}
    assert bars == {ATTACK_NAMES["clean"]: [80, 70], ATTACK_NAMES["pgd"]: [50, 60]}
    assert [list(line.get_xdata()) for line in accuracy.lines] == [[40, 35], [25, 30]], "the global ones are diamonds"
    widths = {bar.get_label(): [patch.get_width() for patch in bar] for bar in time.containers}
    assert widths == {TIME_NAMES["computation"]: [2, 3], TIME_NAMES["access"]: [8, 1]}
    assert [patch.get_x() for patch in time.containers[1]] == [2, 3], "access is stacked on computation"
    assert [text.get_text() for text in time.texts] == ["10.0 h  (1.00×)", "4.0 h  (2.50×)"]
    assert "hours" in time.get_xlabel()


def test_seeds_have_error_bars_and_other_rows_none(write_run):
    runs = [write_run(str(seed), "jfat", f"seed={seed}", clean=0.6 + 0.2 * seed) for seed in (0, 1)]
    axes = comparison_figure(compare([*runs, write_run("c", "fedprophet")])).axes[0]
    spans = [segment[:, 0].tolist() for collection in axes.collections for segment in collection.get_segments()]
    deviation = 100 * 0.2 / 2**0.5
    assert spans[0] == pytest.approx([70 - deviation, 70 + deviation])
    assert len(spans) == 2, "clean and PGD of the row with two seeds"


def overlaps(boxes):
    return [(a, b) for number, (a, box) in enumerate(boxes) for b, other in boxes[number + 1 :] if box.overlaps(other)]


def test_nothing_overlaps_and_nothing_is_cut_off(eight):
    figure = comparison_figure(eight)
    figure.canvas.draw()
    assert len(eight.settings[0].rows) == 11
    accuracy, time = figure.axes
    labels = [(text.get_text(), text.get_window_extent()) for text in accuracy.get_yticklabels()]
    assert not overlaps(labels)
    assert "jFAT a" in [name for name, _ in labels], "as in the tables"
    texts = [(text.get_text(), text.get_window_extent()) for text in (*time.texts, *accuracy.texts)]
    assert not overlaps(texts)
    for name, box in (*labels, *texts):
        assert box.x0 >= 0, name
        assert box.x1 <= figure.bbox.x1, name
    for _, box in [(text.get_text(), text.get_window_extent()) for text in time.texts]:
        assert box.x1 <= time.get_window_extent().x1, "a time stands inside its panel"


def test_stand_ins_and_missing_numbers_are_marked(eight):
    texts = [text.get_text() for axes in comparison_figure(eight).axes for text in axes.texts]
    assert texts.count("† aa-fast") == 1
    assert texts.count("not measured") == 1
    assert sum("so far" in text for text in texts) == 1


def test_a_panel_for_each_setting(write_run):
    runs = [write_run("a", "jfat"), write_run("b", "jfat", "fleet.exponent=-1")]
    figure = comparison_figure(compare(runs))
    assert len(figure.axes) == 4
    assert [part.get_suptitle() for part in figure.subfigs] == [setting.title for setting in compare(runs).settings]


def test_a_run_that_has_nothing_yet_is_drawn_too(write_run):
    assert comparison_png(compare([write_run("a", finished=False, rounds=[])])).startswith(b"\x89PNG")


def test_the_same_runs_give_the_same_bytes_without_a_date(write_run):
    runs = [write_run("a", "jfat"), write_run("b", "fedprophet")]
    picture = comparison_png(compare(runs))
    assert picture == comparison_png(compare(runs))
    assert b"tEXt" not in picture


def test_matplotlibs_settings_are_left_alone(write_run):
    before = dict(mpl.rcParams)
    comparison_png(compare([write_run("a")]))
    assert dict(mpl.rcParams) == before


@pytest.mark.slow
def test_pyplot_is_never_imported_and_matplotlib_only_to_draw(write_run):
    path = write_run("a")
    program = (
        "import sys; from pathlib import Path; from fedprophet.report.compare import compare; "
        "import fedprophet.cli; from fedprophet.report.figures import comparison_png; "
        "assert 'matplotlib' not in sys.modules; "
        f"comparison_png(compare([Path({str(path)!r})])); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_matplotlib_the_extra_is_named(write_run, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    with pytest.raises(ConfigError, match=r"pip install 'fedprophet\[plots\]'"):
        comparison_png(compare([write_run("a")]))
