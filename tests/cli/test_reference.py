"""The reference page of every command."""

import re
from pathlib import Path

from fedprophet.cli.reference import commands_markdown

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "commands.md"


def section(name):
    return commands_markdown().partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_the_committed_page_is_current():
    assert REFERENCE.read_text("utf-8") == commands_markdown(), (
        "run: python -m fedprophet.cli.reference > docs/reference/commands.md"
    )


def test_commands_of_groups_are_there_with_arguments_options_defaults_and_limits():
    text = section("fedprophet deploy init")
    assert "```text\nfedprophet deploy init [OPTIONS] DIR\n```" in text
    assert "| `DIR` | A folder that is empty or does not exist yet. | required |" in text
    assert "| `--port INTEGER RANGE` | The server's port. | default: 9092; 1<=x<=65535 |" in text
    assert "| `--config PRESET\\|FILE` | What to train. Default: the preset digits. |  |" in text
    assert "`--help`" not in text


def test_examples_are_one_command_a_line_however_they_are_written():
    assert "    fedprophet train\n    fedprophet train digits --set seed=1" in section("fedprophet train")
    assert "    fedprophet deploy server pilot\n    fedprophet deploy server pilot --print\n" in section(
        "fedprophet deploy server"
    )
    assert "\nList the presets.\n" in section("fedprophet config presets")
    assert "\n    fedprophet config presets\n" in section("fedprophet config presets")
    assert not re.search(r"Examples?:", commands_markdown())


def test_every_line_of_the_list_leads_to_a_section():
    text = commands_markdown()
    anchors = re.findall(r"^\| \[`(.*)`\]\(#(.*)\) \|", text, re.MULTILINE)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert [name for name, _ in anchors] == headings
    assert [anchor for _, anchor in anchors] == [heading.replace(" ", "-") for heading in headings]
