"""The documentation site: it builds without a warning, and works in a browser, from a server and from disk."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from documented import PAGES, ROOT

pytestmark = pytest.mark.slow
WIDTHS = (390, 1280)


def build(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out), *options],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    out = tmp_path_factory.mktemp("site")
    done = build(out)
    assert done.returncode == 0, done.stderr
    return out


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api")
    quiet = ("no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking")
    more = ("disable-component-update", "disable-sync")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=program, args=[f"--{name}" for name in (*quiet, *more)])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Return a page that notes what goes wrong, and which files it asks for, in `page.faults` and `page.asked`."""
    context = browser.new_context()
    made = context.new_page()
    made.faults, made.asked = [], []
    made.on("console", lambda message: made.faults.append(message.text) if message.type == "error" else None)
    made.on("pageerror", lambda error: made.faults.append(str(error)))
    made.on("requestfailed", lambda request: made.faults.append(request.url))
    made.on("request", lambda request: made.asked.append(request.url))
    yield made
    context.close()


def address(file: str) -> str:
    return file.removeprefix("docs/").removesuffix(".md") + ".html"


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_loads_from_here_alone_and_fits_the_screen(site: Path, served: str, page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    for file in (name for name in PAGES if name.startswith("docs/")):
        # Leaving a page before all has arrived would count as requests that failed.
        page.goto(f"{served}/{address(file)}", wait_until="networkidle")
        assert page.locator("article h1").count() == 1, file
        assert page.evaluate("document.documentElement.scrollWidth") <= width, file
        assert page.faults == [], file
    assert [url for url in page.asked if not url.startswith((served, "data:"))] == []


def test_the_search_finds_a_word(served: str, page: Any) -> None:
    page.goto(f"{served}/index.html", wait_until="networkidle")
    search(page, "prophet")


def test_it_works_from_disk(site: Path, page: Any) -> None:
    page.goto(f"{(site / 'index.html').as_uri()}", wait_until="networkidle")
    search(page, "prophet")
    page.goto(f"{(site / 'index.html').as_uri()}", wait_until="networkidle")
    page.locator("article").get_by_role("link", name="Concepts").click()
    page.wait_for_url("**/concepts.html")
    assert page.faults == []
    assert [url for url in page.asked if not url.startswith(("file:", "data:", "about:"))] == []


def search(page: Any, word: str) -> None:
    page.get_by_role("textbox", name="Search").click()
    page.keyboard.type(word)
    page.locator(".md-search-result__link[href*='concepts.html']").first.wait_for()


def test_colours_can_be_switched_and_drawings_follow(served: str, page: Any) -> None:
    page.goto(f"{served}/concepts.html", wait_until="networkidle")
    ink = "getComputedStyle(document.querySelector('svg.drawing text')).fill"
    light = page.evaluate(ink)
    page.locator("label[for=__palette_1]").click()
    page.wait_for_function("document.body.dataset.mdColorScheme === 'slate'")
    assert page.evaluate(ink) != light


def test_files_outside_docs_are_brought_in(site: Path) -> None:
    own_model = (site / "how-to" / "own-model.html").read_text("utf-8")
    assert 'href="../repository/examples/own_model.py.html"' in own_model
    assert "load_digits" in (site / "repository/examples/own_model.py.html").read_text("utf-8")
    assert (site / "repository/benchmarks/results/methods.png").read_bytes()[:4] == b"\x89PNG"
    contributing = (site / "repository/CONTRIBUTING.html").read_text("utf-8")
    assert 'href="../extend/method.html"' in contributing


def test_links_that_lead_nowhere_fail_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    for name in ("docs", "examples", "tools", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("mkdocs.yml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    links = ("nowhere.md", "../examples/nowhere.py", "concepts.md#nowhere")
    with (tmp_path / "docs" / "index.md").open("a", encoding="utf-8") as index:
        index.writelines(f"\n[a mistake]({link})\n" for link in links)
    (tmp_path / "docs" / "forgotten.md").write_text("# A page that the navigation leaves out\n", encoding="utf-8")
    done = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert done.returncode != 0
    for mistake in (*links, "forgotten.md"):
        assert mistake in done.stderr
