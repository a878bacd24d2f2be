"""What the command line says to mistakes of every kind, read as a user would."""

import errno
import json

import pytest

from fedprophet import __version__
from fedprophet import cli as package
from fedprophet.config.choices import methods
from fedprophet.config.load import PRESETS
from fedprophet.data import DATASETS
from fedprophet.errors import ConfigError
from fedprophet.models import MODELS
from fedprophet.runs.run import RunStoppedError
from fedprophet.runs.session import assemble
from fedprophet.server.rules import RULES


def test_version(cli):
    assert cli("--version").out == f"fedprophet {__version__}\n"


@pytest.mark.parametrize(
    ("command", "table"),
    [("methods", methods()), ("models", MODELS), ("datasets", sorted(DATASETS)), ("rules", sorted(RULES))],
)
def test_listings(cli, command, table):
    said = cli(command)
    assert said.code == 0
    known = cli(command, "--json").json
    assert list(known) == list(table)
    # One line each, where no terminal has an edge to wrap at.
    assert [line.split(maxsplit=1) for line in said.out.splitlines()] == [[name, text] for name, text in known.items()]


def test_help_says_what_the_rules_are_for(cli):
    assert "List the rules of aggregation. Example: fedprophet rules" in cli("rules", "--help").out


def test_without_arguments_it_says_how_to_start(cli):
    said = cli()
    assert "Start with: fedprophet train" in said.out + said.err


MISTAKES = {
    "a model that is not there": ("model.name=vgg61", 'model.name: given "vgg61" (--set), allowed: "cnn3", '),
    "a method that is not there": (
        "method=fedprofet",
        f"allowed: {', '.join(map(json.dumps, methods()))}. Did you mean 'fedprophet'?\n",
    ),
    "a dataset that is not there": ("data.name=digit", "\"custom\". Did you mean 'digits'?"),
    "a pool that is not there": (
        "fleet.pool=smal",
        "fleet.pool: unknown device pool 'smal'. Did you mean 'small'? Known: caltech256, cifar10, small, or the path",
    ),
    "a pool's file that is not there": (
        "fleet.pool=mine.toml",
        "fleet.pool: cannot read the device pool mine.toml: No such file or directory",
    ),
    "no data in the data root": (
        "data.name=cifar10",
        "cifar10: there is no data in data. Put cifar-10-binary.tar.gz or the folder cifar-10-batches-bin there",
    ),
    "no photographs in the data root": (
        "data.name=caltech256",
        "caltech256: there is no data in data. Put the folder 256_ObjectCategories there",
    ),
    "no data root": ("data.name=folder", "folder needs the folder of your images: give it as data.root (--root)"),
    "a key that is not there": (
        "train.learing_rate=1",
        "unknown key 'train.learing_rate' (--set). Did you mean 'train.learning_rate'? Known: batch, ",
    ),
    "a section that is not there": ("trian.batch=3", "unknown key 'trian' (--set). Did you mean 'train'?"),
    "an option of a model that is not there": (
        "model.options.widht=4",
        "unknown option of model vgg-small 'widht'. Did you mean 'width'?",
    ),
    "no value": ("train.batch", "--set 'train.batch' is not KEY=VALUE. An example: --set train.batch=32"),
    "a negative number": ("train.batch=-3", "train.batch: given -3 (--set), allowed: a whole number of at least 1"),
    "no rounds": ("rounds=0", "rounds: given 0 (--set), allowed: a whole number of at least 1"),
    "a negative radius": ("attack.radius=-0.1", "attack.radius: given -0.1 (--set), allowed: a number of at least 0"),
    "a rate that is no number": (
        "train.learning_rate=nan",
        "train.learning_rate: given nan (--set), allowed: a number",
    ),
    "no memory": ("memory.budget=0", 'memory.budget: given 0 (--set), allowed: a size such as "60MB"'),
    "negative memory": ("memory.budget=-5MB", 'memory.budget: given "-5MB" (--set), allowed: a size such as "60MB"'),
    "more classes than there are": (
        "shards.classes_per_client=11",
        "classes_per_client is 11, but the dataset has only 10 classes: choose at most 10",
    ),
    "a cohort larger than the population": (
        "population.cohort=21",
        "population.cohort: given 21, allowed: at most population.clients = 20",
    ),
    "a model too deep for the images": (
        "model.name=vgg16",
        "vgg16 needs images of at least 32×32 pixels (it halves them five times), not 8×8",
    ),
    "data of one's own": (
        "data.name=custom",
        "use fedprophet.train(data=…), or, with a run that is there, fedprophet.res",
    ),
    "a model of one's own": ("model.name=custom", "fedprophet.export(RUN, FILE, model=…)"),
}


@pytest.mark.parametrize(("setting", "text"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_in_a_setting(cli, tmp_path, setting, text):
    said = cli("train", "--set", setting)
    assert said.error.startswith("error: ")
    assert text in said.error
    assert said.out == ""
    assert list(tmp_path.iterdir()) == [], "nothing is written before everything is checked"


def test_a_budget_below_the_largest_atom_names_it_and_both_sizes(cli, tiny, tiny_flags):
    cost = assemble(tiny()).world.cost
    needs = {cost.memory(number, number + 1): atom for number, atom in enumerate(cost.atoms)}
    need = max(needs)
    error = cli("train", *tiny_flags({"memory.budget": "10kB"})).error
    assert error.startswith("error: memory.budget = 10kB: a budget of 10000 bytes (10.0 kB) is too small: atom Conv ")
    assert f"({needs[need].name}) needs {need} bytes ({need / 1000:.1f} kB) for a batch of 16" in error
    assert f"The smallest budget that works is {need} bytes" in error
    assert cli("train", *tiny_flags({"memory.budget": need - 1})).code == 2
    assert assemble(tiny({"memory.budget": need})).budget == need


LATENCY = ("latency", "vgg16", "--performance", "1.3e12", "--bandwidth", "1.5e9")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["train", "digit"],
            f"error: unknown preset 'digit'. Did you mean 'digits'? Known: {', '.join(PRESETS)}. A TOML file's path",
        ),
        (["train", "cifar10-balanced-small"], "error: cifar10: there is no data in data. Put cifar-10-binary.tar.gz "),
        (["train", "caltech256-balanced"], "error: caltech256: there is no data in data. Put the folder 256_Object"),
        (["fleet", "show", "smal"], "error: unknown device pool 'smal'. Did you mean 'small'?"),
        ([*LATENCY, "--memory", "-1"], "error: --memory: must be positive, not -1"),
        ([*LATENCY, "--memory", "-60MB"], "error: --memory: '-60MB' is not a size. Allowed: 60MB, "),
        (["latency", "vgg16", "--memory", "60MB", "--performance", "1e12"], "Missing option '--bandwidth'"),
        (["train", "nowhere.toml"], "error: cannot read the config file nowhere.toml: No such file or directory"),
        (["train", "--budget", "0"], "No such option"),  # what follows is worded by the version of click or typer
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["partition", "vgg16", "--budget", "0"], "error: '0' is not a memory budget. Allowed: a size (60MB, "),
        (["evaluate"], "Missing argument"),
        (["export", "somewhere"], "Missing option '--out'"),
        (["evaluate", "somewhere", "--attack", "pdg20"], "error: unknown attack 'pdg20'. Allowed: clean, pgdN"),
        (["evaluate", "somewhere", "--attack", "pgd0,clean,x"], "error: unknown attack 'pgd0', 'x'. Allowed: clean"),
        (["evaluate", "somewhere", "--attack", " , "], "error: no attack is given. Allowed: clean, pgdN with"),
        (["evaluate", "."], "error: there is no run in .: it has no config.toml. Start one with: fedprophet train"),
        (["export", "nowhere", "--out", "x"], "error: there is no run in nowhere: it has no config.toml"),
        (["export", "nowhere", "--out", "."], "error: . is a folder. Give the file to write, such as model.safet"),
        (["train", "--resume", "nowhere"], "error: there is no run in nowhere: it has no config.toml"),
        (["train", "--resume", "x", "--set", "seed=1"], "error: --resume continues a run exactly as it was started"),
        (["train", "digits", "--resume", "x"], "error: --resume continues a run exactly as it was started"),
        (["train", "--resume", "x", "--out", "y"], "error: --resume continues a run exactly as it was started"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_in_a_command(cli, tmp_path, arguments, text):
    said = cli(*arguments)
    assert text in said.error
    assert list(tmp_path.iterdir()) == []


DEVICE = {"name": '"a"', "performance": '"1 TFLOPS"', "memory": '"4GB"', "bandwidth": '"1GB/s"'}


@pytest.mark.parametrize("command", [("train", "--set", "fleet.pool=mine.toml"), ("fleet", "show", "mine.toml")])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"memory": "-5"}, "device pool mine.toml, device 'a', memory: must be positive, not -5\n"),
        ({"memory": '"-5MB"'}, "device pool mine.toml, device 'a', memory: '-5MB' is not a size. Allowed: 60MB, "),
        (
            {"bandwidth": None},
            "device pool mine.toml, device 'a': bandwidth is missing. A device has name, performance, memory, band",
        ),
        ({"bandwidth": "0"}, "device pool mine.toml, device 'a', bandwidth: must be positive, not 0\n"),
    ],
)
def test_a_mistake_in_a_pool(cli, tmp_path, command, change, text):
    values = {**DEVICE, **change}
    file = tmp_path / "mine.toml"
    file.write_text("[[device]]\n" + "".join(f"{key} = {value}\n" for key, value in values.items() if value))
    said = cli(*command)
    assert said.error.startswith("error: ")
    assert text in said.error
    assert said.out == ""
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("cifar10", "error: cifar10: there is no data in "),
        ("caltech256", "error: caltech256: there is no data in "),
        ("folder", "here holds 0 class folders, at least 2 are needed. Images belong into class folders: "),
    ],
)
def test_a_data_root_without_data(cli, tmp_path, data, text):
    (tmp_path / "here").mkdir()
    said = cli("train", "--set", f"data.name={data}", "--set", f"data.root={tmp_path / 'here'}")
    assert text in said.error
    assert said.out == ""
    assert list(tmp_path.rglob("*")) == [tmp_path / "here"]


@pytest.mark.parametrize(
    ("out", "text"),
    [
        ("/dev/null/run", "error: cannot write /dev/null/run/config.toml: "),
        ("/proc/run", "error: cannot write /proc/run/config.toml: "),
        ("/dev/null", "error: /dev/null is a file. Give a folder with --out"),
        ("n" * 300, "File name too long. Give another path"),
    ],
)
def test_a_folder_that_cannot_be_written(cli, tiny_flags, out, text):
    assert text in cli("train", *tiny_flags(), "--out", out).error


def test_a_loss_that_turns_nan_stops_the_run_with_its_checkpoint(cli, tiny_flags, tmp_path):
    said = cli("train", *tiny_flags({"train.learning_rate": 1e30, "evaluate.clients": 1}), "--out", "run")
    assert "error: 3 rounds in a row had no usable update (client " in said.error
    assert "its loss is nan" in said.error
    assert "A new run with a lower train.learning_rate usually helps" in said.error
    assert "round 1: client" in said.out
    assert "was dropped: its loss is nan" in said.out
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert [len(line["dropped"]) for line in lines] == [2, 2, 2]
    assert (tmp_path / "run" / "checkpoints" / "round-000003").is_dir()
    assert cli("evaluate", "run", "--attack", "clean", "--samples", "10").code == 0


def test_a_config_that_is_no_toml(cli, copied):
    config = copied() / "config.toml"
    text = config.read_text()
    config.write_text(text[:200] + "\x00[")
    for command in (("train", "--resume"), ("evaluate",)):
        assert "error: the config file run/config.toml is not valid TOML" in cli(*command, "run").error
    config.write_text(text.replace("seed = 0", "seed = 3"))
    error = cli("train", "--resume", "run").error
    assert "no checkpoint in run/checkpoints can be used" in error
    assert "another configuration: seed: here 3, there 0" in error
    assert error.count("put them back into its config.toml") == 1
    config.write_text(text)
    assert cli("train", "--resume", "run").code == 0


@pytest.mark.parametrize(("number", "advice"), [(errno.ENOSPC, "Free some space"), (errno.EACCES, "permissions")])
def test_an_error_of_the_system_is_said_in_a_sentence(cli, monkeypatch, number, advice):
    def fail(*_, **__):
        raise OSError(number, "the system's words", "/some/file")

    monkeypatch.setattr("fedprophet.cli.train.start", fail)
    error = cli("train").error
    assert error.startswith("error: /some/file: the system's words. ")
    assert advice in error


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr("fedprophet.cli.train.start", fail)
    monkeypatch.setattr("sys.argv", ["fedprophet", "train"])
    with pytest.raises(OSError, match="Bad file descriptor"):
        package.main()


def test_every_error_of_ours_has_code_2_and_ctrl_c_130(cli, monkeypatch):
    def fail(error):
        def raise_it(*_, **__):
            raise error

        monkeypatch.setattr("fedprophet.cli.train.start", raise_it)
        return cli("train")

    assert fail(ConfigError("wrong")).error == "error: wrong\n"
    stopped = fail(RunStoppedError("stopped after round 2"))
    assert (stopped.code, stopped.err) == (130, "stopped after round 2\n")
    at_once = fail(KeyboardInterrupt())
    assert (at_once.code, at_once.err) == (130, "stopped\n"), "before a run has begun, and in commands that have none"


def test_in_a_terminal_errors_are_broken_between_words_and_a_command_is_a_line(cli, in_terminal, monkeypatch):
    command = "fedprophet train --resume runs/a"

    def stop(*_, **__):
        raise RunStoppedError(f"stopped after round 2; nothing is lost. Resume it with: {command}")

    monkeypatch.setattr("fedprophet.cli.train.start", stop)
    in_terminal(40)
    assert cli("train").err.splitlines() == ["stopped after round 2; nothing is lost.", "Resume it with:", command]


def test_forced_colours_make_no_terminal_of_a_pipe(cli, copied, monkeypatch):
    """Lines are whole, tables are Markdown, and nothing is drawn in place."""
    run = copied()
    commands = (["methods"], ["config", "show"], ["compare", run], ["watch", run], ["train", "--resume", run])
    commands += (["evaluate", run, "--attack", "pgd1", "--samples", 8], ["train", "--set", f"{'a' * 99}=1"])
    for command in commands:
        found = []
        for forced in (False, True):
            if forced:
                monkeypatch.setenv("FORCE_COLOR", "1")
            else:
                monkeypatch.delenv("FORCE_COLOR", raising=False)
            found.append(cli(*command))
        assert found[0] == found[1]
        assert found[0].out or found[0].err
