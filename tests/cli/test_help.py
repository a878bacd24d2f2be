"""What `--help` shows of every command."""

import pytest

from fedprophet.cli import app


def commands(group, *path):
    for command in group.registered_commands:
        yield (*path, command.name or command.callback.__name__)
    for inner in group.registered_groups:
        yield (*path, inner.name)
        yield from commands(inner.typer_instance, *path, inner.name)


@pytest.mark.parametrize("path", [(), *commands(app)], ids=" ".join)
def test_help_is_plain_text(cli, path):
    said = cli(*path, "--help")
    assert said.code == 0
    assert "\\[" not in said.out
    assert said.out.lower().count("arguments:") <= 1


def test_the_first_help_has_examples(cli):
    examples = cli("--help").out.partition("Examples:")[2].partition("Options:")[0]
    assert examples.split("fedprophet ")[1].strip() == "train digits --set seed=1 --out runs/first"
    assert [each.split()[0] for each in examples.split("fedprophet ")[1:]] == ["train", "train", "evaluate", "compare"]


def test_arguments_are_explained(cli):
    assert "A folder that is empty or does not exist yet." in cli("deploy", "init", "--help").out
    assert "The run's folder." in cli("evaluate", "--help").out
    assert "[default: 9092; 1<=x<=65535]" in cli("deploy", "init", "--help").out


def test_a_list_of_commands_shows_their_summaries_whole(cli):
    listed = " ".join(cli("--help").out.partition("Commands:")[2].split())
    assert "compare Compare runs: accuracy, memory, simulated time and the speed-up over jFAT. report" in listed
    assert "on other machines, with Flower, TLS and registered keys. config" in listed
    assert "..." not in listed
