"""What the README and the pages of docs/ hold: code blocks, shell commands, and commands within sentences."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
PROGRAMS = ("fedprophet", "make", "pip", "python", "flwr")
SHELL, NO_CODE = "sh", "text"
_FENCE = re.compile(r"\s*(`{3,})\s*(\w*)")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_FILE = re.compile(r"# (\S+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    """Code on a page. Indented lines are commands; anything else is fenced, with its language."""

    page: str
    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The path in its first line, if it is a file that the page's commands use."""
        match = _FILE.match(self.text)
        return match[1] if match else None


@dataclass(frozen=True)
class Command:
    """One command of a page, as a shell takes it: continued lines are one, and so is a loop."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.text}"


def blocks(page: str) -> list[Block]:
    return list(_blocks(page, (ROOT / page).read_text("utf-8").split("\n")))


def _blocks(page: str, lines: list[str]) -> Iterator[Block]:
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        after_text = number > 0 and lines[number - 1].strip() != ""
        start = number
        if fence:
            number += 1
            while not lines[number].lstrip().startswith(fence[1]):
                number += 1
            yield Block(page, start + 2, fence[2] or NO_CODE, _joined(lines[start + 1 : number]))
        elif lines[number].startswith("    ") and lines[number].strip() and not after_text:
            while number < len(lines) and lines[number].startswith("    "):
                number += 1
            yield Block(page, start + 1, SHELL, _joined([line[4:] for line in lines[start:number]]))
            continue  # the line that ended it may begin another
        number += 1


def _joined(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def commands(page: str) -> list[Command]:
    return [command for block in blocks(page) if block.language == SHELL for command in _commands(block)]


def _commands(block: Block) -> Iterator[Command]:
    waiting, start = "", 0
    for number, line in enumerate(block.text.splitlines(), block.line):
        start = start if waiting else number
        waiting += line + "\n"
        if line.endswith("\\") or (waiting.startswith("for ") and line.strip() != "done"):
            continue
        text = _plain(waiting)
        if text:
            yield Command(block.page, start, text)
        waiting = ""
    assert not waiting, f"{block.page}:{start}: the command has no end"


def _plain(text: str) -> str:
    """Return a command without its comment."""
    return re.sub(r"(^|\s+)# .*$", "", text.replace("\\\n", " "), flags=re.MULTILINE).strip()


def mentions(page: str) -> list[Command]:
    """Return what sentences name in code style that begins with one of our programs."""
    text = (ROOT / page).read_text("utf-8")
    for block in blocks(page):
        text = text.replace(block.text, "\n" * block.text.count("\n"))
    found = ((text.count("\n", 0, match.start()) + 1, " ".join(match[1].split())) for match in _SPAN.finditer(text))
    return [Command(page, line, span) for line, span in found if span.split(" ")[0] in PROGRAMS and " " in span]
