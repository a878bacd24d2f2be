"""The report in a real browser: what it draws, its switches, its tooltips, its looks, and what is new in live mode."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fedprophet.report.document import report_of
from fedprophet.report.page import write_page
from fedprophet.report.serve import serve
from fedprophet.runs.play import play
from fedprophet.runs.run import start
from fedprophet.storage.locks import folder_lock

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser is driven by playwright, which is missing")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium was found to open the report in"),
]
QUIET = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
QUICK = {"rounds": 2, "train.warmup": 1, "train.iterations": 1, "evaluate.clients": 2, "evaluate.test_samples": 20}
NASTY = "</script><img src=x onerror=alert(1)> \"ü' & run"
CHARTS = "figure[data-chart]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=[*QUIET, "--disable-component-update"])
        yield found
        found.close()


@dataclass
class Opened:
    """A page, and all that it said and asked for since it was opened."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Opened]]:
    """Return a function that opens a page; at the end none may have complained."""
    pages: list[Opened] = []

    def visit(url: str, size: dict[str, int] = DESKTOP, scheme: str = "light") -> Opened:
        page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
        pages.append(found := Opened(page))
        page.on("console", lambda message: found.said.append(message.text))
        page.on("pageerror", lambda error: found.said.append(str(error)))
        page.on("dialog", lambda dialog: found.said.append(dialog.message))
        page.on("request", lambda request: found.asked.append(request.url))
        page.goto(url)
        page.wait_for_selector("footer")
        return found

    yield visit
    for each in pages:
        complaints = [text for text in each.said if not any(usual in text for usual in ("ERR_CONNECTION", "503"))]
        each.page.context.close()
        assert complaints == []


@pytest.fixture(scope="module")
def runs(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """Three finished runs: a cascade in a folder with a nasty name, a baseline, and sub-networks."""
    folder = tmp_path_factory.mktemp("runs")
    names = {"fedprophet": NASTY.replace("/", "∕"), "jfat": "joint", "heterofl": "narrow"}
    for method, name in names.items():
        play(start(tiny({**QUICK, "method": method}), folder / name))
    return [folder / name for name in names.values()]


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., str]:
    """Return a function that makes the page of some runs and returns its address."""

    def make(*paths: Path) -> str:
        file = tmp_path / "a report #1.html"
        write_page(report_of(paths), file)
        return file.as_uri()

    return make


def drawn_points(page: Any, chart: str) -> list[int]:
    """How many points each line of a chart goes through."""
    paths = page.locator(f'figure[data-chart="{chart}"] path.line').evaluate_all(
        "all => all.map(e => e.getAttribute('d'))"
    )
    return [len(path.replace("M", "L").split("L")) - 1 for path in paths]


def test_the_charts_are_there_and_nothing_is_asked_for(opened, report, runs):
    found = opened(report(*runs))
    document = report_of(runs)
    assert [url for url in found.asked if not url.startswith(("file:", "data:"))] == []
    assert len(found.asked) == 1 + sum(url.startswith("data:") for url in found.asked)
    for part in ("clean", "adversarial"):
        assert drawn_points(found.page, f"curve {part}") == [len(run.curve.round) for run in document.runs]
    cascade, *_ = document.runs
    assert found.count('figure[data-chart="cascade 0"] g.bar') == 1 + len(cascade.cascade.modules)
    cells = sum(map(len, cascade.assignment.rounds))
    assert found.count('figure[data-chart^="heat"] g.cells rect') == cells
    assert found.count('figure[data-chart="end"] g.dots') == sum(len(run.accuracies) for run in document.runs)
    assert found.count('figure[data-chart="time"] g.bar') == 3
    assert found.count("#attack tbody tr") == len(cascade.stages)
    boxes = found.page.locator(f"{CHARTS} svg").evaluate_all("all => all.map(e => e.getBoundingClientRect().height)")
    assert min(boxes) > 20
    numbers = found.page.locator("#figures tbody tr").first.inner_text()
    personalised = {each.attack: each.accuracy for each in cascade.accuracies if each.kind == "personalised"}
    assert f"{100 * personalised['clean']:.1f}\u00a0%" in numbers


def test_names_are_text(opened, report, runs):
    found = opened(report(runs[0]))
    assert found.page.locator("main > div > .lead").first.inner_text().startswith(runs[0].name)
    assert found.count("img") == 0


@pytest.mark.parametrize("how", ["mouse", "keyboard"])
def test_a_run_is_switched_off_and_on(opened, report, runs, how):
    page = opened(report(*runs)).page
    lines, toggle = page.locator('figure[data-chart="curve clean"] path.line'), page.locator(".toggle").nth(1)
    colour = page.locator(".toggle").nth(2).get_attribute("class")

    def switch() -> None:
        if how == "mouse":
            toggle.click()
        else:
            toggle.focus()
            page.keyboard.press("Space")

    switch()
    assert (toggle.get_attribute("aria-pressed"), lines.count()) == ("false", 2)
    assert "jFAT" not in page.locator("#figures").inner_text()
    assert page.locator(".toggle").nth(2).get_attribute("class") == colour, "the others keep their colours"
    assert page.evaluate("document.activeElement.textContent") == "jFAT", "and the switch its focus"
    switch()
    assert (toggle.get_attribute("aria-pressed"), lines.count()) == ("true", 3)
    for number in range(3):
        page.locator(".toggle").nth(number).click()
    assert "3 runs hidden" in page.locator("main").inner_text()


def test_everything_can_be_reached_with_the_tab_key(opened, report, runs):
    page = opened(report(*runs)).page
    reached = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.dataset.key ?? document.activeElement.id"))
    keys = set(
        page.locator("button[data-key], svg[data-key], summary[data-key]").evaluate_all(
            "all => all.map(e => e.dataset.key)"
        )
    )
    assert keys | {"theme"} <= reached
    page.locator('svg[data-key="curve clean"]').focus()
    page.keyboard.press("ArrowRight")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus is seen"


def test_tooltips_for_the_mouse_and_the_keyboard(opened, report, runs):
    page = opened(report(*runs)).page
    tooltip, chart = page.locator("#tooltip"), page.locator('svg[data-key="curve adversarial"]')
    run = report_of(runs[:1]).runs[0]
    value = f"{100 * run.curve.adversarial[0]:.1f}\u00a0%"
    assert tooltip.is_hidden()
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 100)
    assert tooltip.is_visible()
    assert "Round 1" in tooltip.inner_text()
    assert value in tooltip.inner_text()
    page.mouse.move(2, 2)
    assert tooltip.is_hidden()
    chart.focus()
    for key in ("End", "Home"):
        page.keyboard.press(key)
    assert value in tooltip.inner_text()
    assert "Round 1" in page.locator("#spoken").inner_text()
    page.keyboard.press("Escape")
    assert tooltip.is_hidden()
    for chart in page.locator(f"{CHARTS} > svg").all():
        chart.focus()
        page.keyboard.press("End")
        assert tooltip.is_visible(), chart.get_attribute("data-key")
        assert chart.get_attribute("aria-label")


def test_over_simulated_time_too(opened, report, runs):
    page = opened(report(*runs)).page
    page.get_by_role("button", name="Simulated time").click()
    assert drawn_points(page, "curve clean") == [len(run.curve.round) for run in report_of(runs).runs]
    assert "simulated time" in page.locator('figure[data-chart="curve clean"] svg').text_content()


def test_light_and_dark(opened, report, runs):
    background = "getComputedStyle(document.body).backgroundColor"
    address = report(*runs)
    light, dark = (opened(address, scheme=scheme).page for scheme in ("light", "dark"))
    colours = light.evaluate(background), dark.evaluate(background)
    assert colours[0] != colours[1]
    light.locator("#theme").click()
    assert light.evaluate(background) == colours[1]
    assert light.locator("#theme").inner_text() == "Light"
    dark.locator("#theme").click()
    assert dark.evaluate(background) == colours[0]


def test_on_paper(opened, report, runs):
    page = opened(report(*runs), scheme="dark").page
    page.locator(".toggle").first.click()
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("#theme").is_hidden()
    assert page.locator(".toggle").first.is_hidden()
    assert page.pdf(format="A4").startswith(b"%PDF")


@pytest.mark.parametrize("width", [320, 390, 600, 768, 1280, 1920])
def test_no_width_scrolls_sideways(opened, report, runs, width):
    page = opened(report(*runs), {"width": width, "height": 800}).page
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Texts of charts stay inside the page.
    right = page.locator("figure svg text").evaluate_all(
        "all => Math.max(...all.map(e => e.getBoundingClientRect().right))"
    )
    assert right <= width


def test_long_names_fit_a_phone(opened, report, runs, tmp_path):
    names = [tmp_path / f"a-run-whose-folder-has-a-very-long-name-of-which-the-end-differs-{end}" for end in "ab"]
    for name in names:
        shutil.copytree(runs[0], name)
    page = opened(report(*names), PHONE).page
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


CROSSED = """figure => {
  const box = (e) => e.getBoundingClientRect();
  const lines = [...figure.querySelectorAll("line.budget")].map(box);
  const crosses = (line, text) => line.left > text.left && line.left < text.right
    && Math.min(line.bottom, text.bottom) - Math.max(line.top, text.top) > 1;
  const crossed = (text) => lines.some((line) => crosses(line, box(text)));
  return [...figure.querySelectorAll("text")].filter(crossed).map((text) => text.textContent);
}"""
"""The texts of a chart that a line for the budget goes through."""


@pytest.mark.parametrize("size", [PHONE, {"width": 420, "height": 844}, DESKTOP])
def test_the_line_of_the_budget_goes_through_no_text(opened, report, runs, size):
    chart = opened(report(runs[0]), size).page.locator('figure[data-chart="cascade 0"]')
    assert chart.locator("line.budget").count() >= 1
    assert chart.evaluate(CROSSED) == []


def test_a_page_is_drawn_anew_when_its_width_changes(opened, report, runs):
    page = opened(report(runs[0])).page
    wide = page.locator('svg[data-key="end"]').get_attribute("viewBox")
    page.set_viewport_size(PHONE)
    page.wait_for_function(
        "wide => document.querySelector('svg[data-key=\"end\"]').getAttribute('viewBox') !== wide", arg=wide
    )


def without_results(source: Path, target: Path, rounds: int) -> Path:
    """Copy a run as it was after so many rounds."""
    target.mkdir()
    for name in ("config.toml", "setup.json"):
        shutil.copy(source / name, target / name)
    lines = (source / "journal.jsonl").read_text().splitlines(keepends=True)
    (target / "journal.jsonl").write_text("".join(lines[:rounds]))
    return target


@pytest.mark.parametrize("kind", ["begun", "unfinished", "deployed", "altered", "old"])
def test_runs_that_are_not_whole_give_a_page(opened, report, runs, tmp_path, kind):
    path = without_results(runs[0], tmp_path / "run", 0 if kind == "begun" else 3)
    if kind == "deployed":
        (path / "flower.json").write_text('{"run": "0123", "deployed": true}')
    if kind in ("altered", "old"):
        shutil.copy(runs[0] / "results.json", path / "results.json")
    if kind == "old":
        (path / "setup.json").unlink()
        (path / "journal.jsonl").write_text('{"round":1}\n')
    found = opened(report(path), PHONE)
    assert found.count("section") >= 8
    assert ("not finished" in found.page.locator("main").inner_text()) == (kind in ("begun", "unfinished", "deployed"))


# Live ----------------------------------------------------------------------------------------------------------------


def test_live_mode_follows_a_run(opened, runs, tmp_path):
    """Two runs; one goes on. Switches, open tables and the place on the page stay as they are."""
    path = without_results(runs[0], tmp_path / "run", 3)
    lines = (runs[0] / "journal.jsonl").read_text().splitlines(keepends=True)
    with serve([path, runs[1]]) as server, ExitStack() as process:
        process.enter_context(folder_lock(path))
        found = opened(server.url)
        page, status = found.page, found.page.locator("#status")
        sync_api.expect(status).to_have_text("Live, round 3")
        before = drawn_points(page, "curve clean")
        page.locator(".toggle").nth(1).click()
        page.locator("#accuracy summary").first.click()
        page.locator('svg[data-key="time"]').scroll_into_view_if_needed()
        place = page.evaluate("scrollY")
        assert place > 0
        with (path / "journal.jsonl").open("a") as journal:
            journal.write(lines[3])
        sync_api.expect(status).to_have_text("Live, round 4")
        assert drawn_points(page, "curve clean") == [before[0] + 1]
        assert page.locator(".toggle").nth(1).get_attribute("aria-pressed") == "false"
        assert page.locator("#accuracy details").first.get_attribute("open") is not None
        assert abs(page.evaluate("scrollY") - place) < 60
        process.close()
        sync_api.expect(status).to_have_text("Stopped after round 4")
        (path / "journal.jsonl").write_text("".join(lines))
        shutil.copy(runs[0] / "results.json", path / "results.json")
        sync_api.expect(status).to_have_text("Finished")
        assert found.count('figure[data-chart="end"] g.dots') > 0
    sync_api.expect(status).to_have_text("Connection lost: what is shown was the last")
    assert {url.split("?")[0] for url in found.asked if url.startswith("http")} <= {
        server.url,
        f"{server.url}document.json",
    }


def test_live_mode_waits_for_a_run_to_begin(opened, runs, tmp_path):
    path = tmp_path / "run"
    with serve([path]) as server:
        page = opened(server.url).page
        sync_api.expect(page.locator("h1")).to_have_text("No run to show yet")
        without_results(runs[0], path, 1)
        sync_api.expect(page.locator("#status")).to_have_text("Stopped after round 1")
        assert page.locator("h1").inner_text() == "FedProphet on digits"


def test_the_document_in_the_page_is_the_one_that_is_printed(report, runs, tmp_path):
    address = report(*runs)
    text = next(tmp_path.glob("*.html")).read_text()
    held = text.split('id="document">')[1].split("</script>")[0]
    assert address.endswith(".html")
    assert json.loads(held) == json.loads(json.dumps(report_of(runs).to_json()))
