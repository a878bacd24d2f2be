"""Hooks of the documentation site (mkdocs.yml): files from outside docs/, and drawings that follow its colours.

Pages link to the repository's other files (`../examples/own_model.py`), which works wherever the repository is browsed.
For the site, each such file is brought in under `repository/`: Markdown as a page, programs as a page that shows them,
anything else as it is. What those pages link to comes along.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs"
BROUGHT = "repository"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
DRAWING = re.compile(r'<img alt="([^"]*)" src="[^"]*drawings/([a-z-]+\.svg)" ?/?>')
STYLE = re.compile(r"<style>.*?</style>\s*", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to, and those that they link to in turn."""
    waiting = [f"{DOCS}/{page.src_uri}" for page in files.documentation_pages()]
    while waiting:
        origin = waiting.pop()
        for link in LINK.findall(_markdown(origin)):
            target = _target(origin, link)
            place = _place(target)
            if target.startswith(f"{DOCS}/") or files.get_file_from_path(place) or not (ROOT / target).is_file():
                continue
            files.append(_brought(config, target, place))
            waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where files are in the site."""
    origin = _origin(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = _target(origin, match[1])
        if not (ROOT / target).is_file():
            return match[1]  # a mistake, which the strict build names
        return os.path.relpath(_place(target), PurePosixPath(page.file.src_uri).parent)

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put drawings into the page, where the site's own colours apply (assets/site.css), not the system's."""

    def drawn(match: re.Match[str]) -> str:
        svg = STYLE.sub("", (ROOT / DOCS / "drawings" / match[2]).read_text("utf-8"))
        return svg.replace("<svg ", f'<svg role="img" aria-label="{match[1]}" ', 1)

    return DRAWING.sub(drawn, html)


def _markdown(path: str) -> str:
    """Return a file's text if links in it are links."""
    return (ROOT / path).read_text("utf-8") if path.endswith(".md") else ""


def _target(origin: str, link: str) -> str:
    """Return the file that a link leads to, seen from the repository's root."""
    return os.path.normpath(PurePosixPath(origin).parent / link)


def _place(target: str) -> str:
    """Return where a file of the repository is in the site."""
    if target.startswith(f"{DOCS}/"):
        return target.removeprefix(f"{DOCS}/")
    return f"{BROUGHT}/{target}{'.md' if target.endswith('.py') else ''}"


def _origin(place: str) -> str:
    """Return the file of the repository that a page is made of; a shown program has no links."""
    inside = place.startswith(f"{BROUGHT}/")
    return place.removeprefix(f"{BROUGHT}/") if inside else f"{DOCS}/{place}"


def _brought(config: MkDocsConfig, target: str, place: str) -> File:
    if not target.endswith(".py"):
        return File.generated(config, place, abs_src_path=str(ROOT / target), inclusion=InclusionLevel.NOT_IN_NAV)
    text = f"# {target}\n\n```python\n{(ROOT / target).read_text('utf-8')}```\n"
    return File.generated(config, place, content=text, inclusion=InclusionLevel.NOT_IN_NAV)
