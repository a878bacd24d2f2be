"""Reading configurations: overrides, files, tables for single methods, and errors that say what to change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedprophet.config.choices import methods
from fedprophet.config.load import PRESETS, load_config, parse_config
from fedprophet.config.reference import to_toml
from fedprophet.errors import ConfigError


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


def test_presets_have_a_description() -> None:
    assert "digits" in PRESETS
    assert all(text and "\n" not in text for text in PRESETS.values())


def test_the_default_is_the_digits_preset() -> None:
    assert load_config() == load_config("digits")
    assert load_config().attack.radius == 0.15


def test_a_key_is_not_what_was_meant_by_itself() -> None:
    with pytest.raises(ConfigError, match=r"train: given 3, allowed: a table") as caught:
        parse_config({"train": 3, "train.batch": 4})
    assert "mean 'train.batch'" not in str(caught.value)


def test_a_mapping_may_have_keys_with_dots_as_overrides_have() -> None:
    nested = parse_config({"rounds": 3, "train": {"iterations": 1, "batch": 8}, "model": {"options": {"width": 8}}})
    assert parse_config({"rounds": 3, "train.iterations": 1, "train.batch": 8, "model.options.width": 8}) == nested
    settings = {"rounds": 3, "train": {"iterations": 5, "batch": 8}, "model.options": {"width": 8}}
    assert parse_config({**settings, "train.iterations": 1}) == nested, "as with --set, the whole key counts"
    assert settings["train"] == {"iterations": 5, "batch": 8}
    assert parse_config({"method": "jfat", "methods": {"jfat": {"train.batch": 4}}}).train.batch == 4
    for key, text in (
        ("train.iteration", "'train.iterations'"),
        ("rounds.", "unknown key"),
        ("trian.batch", "'train'"),
    ):
        with pytest.raises(ConfigError, match=text):
            parse_config({key: 1})


# Overrides -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ("seed=7", ("seed",), 7),
        ("model.name=vgg16", ("model", "name"), "vgg16"),
        ('model.name="vgg16"', ("model", "name"), "vgg16"),
        (" train.batch = 8 ", ("train", "batch"), 8),
        ("train.momentum=0", ("train", "momentum"), 0.0),
        ("train.learning_rate=1e-3", ("train", "learning_rate"), 0.001),
        ("attack.radius=8/255", ("attack", "radius"), 8 / 255),
        ("attack.radius=0", ("attack", "radius"), 0.0),
        ("attack.step=2/255", ("attack", "step"), 2 / 255),
        ("attack.step=auto", ("attack", "step"), "auto"),
        ("perturbation.enabled=false", ("perturbation", "enabled"), False),
        ("evaluate.clients=3", ("evaluate", "clients"), 3),
        ("evaluate.clients=all", ("evaluate", "clients"), "all"),
        ("memory.budget=60MB", ("memory", "budget"), "60MB"),
        ("memory.budget=60000000", ("memory", "budget"), 60000000),
        ("memory.budget=12.5%", ("memory", "budget"), "12.5%"),
        ("data.root=/a b/c=d#e", ("data", "root"), "/a b/c=d#e"),
        ("data.root=", ("data", "root"), ""),
        ("data.root=1\nseed = 5", ("data", "root"), "1\nseed = 5"),
        ("distillation.family=['cnn3', 'vgg11']", ("distillation", "family"), ["cnn3", "vgg11"]),
        ("distillation.public=50%", ("distillation", "public"), "50%"),
        ("distillation.public=5000", ("distillation", "public"), 5000),
        ("model.options.width=32", ("model", "options"), {"width": 32}),
        ("data.options={cache = 'a', size = 8}", ("data", "options"), {"cache": "a", "size": 8}),
    ],
)
def test_overrides(override: str, path: tuple[str, ...], expected: object) -> None:
    named = ["data.name=folder"] if override.startswith("data.options") else []
    value: object = load_config(None, [*named, override]).model_dump()
    for name in path:
        value = value[name]  # type: ignore[index]
    assert value == expected
    assert type(value) is type(expected)


def test_the_last_override_wins_and_the_others_stay() -> None:
    config = load_config("digits", ["seed=1", "train.batch=9", "seed=2"])
    assert (config.seed, config.train.batch) == (2, 9)
    assert config.train.iterations == load_config("digits").train.iterations


@pytest.mark.parametrize("override", ["seed", "=3", ".batch=3", "train.=3", ""])
def test_an_override_must_be_key_and_value(override: str) -> None:
    text = message(override)
    assert repr(override) in text
    assert "KEY=VALUE" in text


def test_a_section_is_not_overridden_as_a_whole() -> None:
    assert "'train' is a table" in message("train={batch = 3}")


def test_an_override_that_is_not_text_is_refused() -> None:
    assert "not UTF-8" in message("data.root=\udcff")


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "given_text", "allowed"),
    [
        ("train.batch=0", "0", "a whole number of at least 1"),
        ("train.batch=2.5", "2.5", "a whole number of at least 1"),
        ("train.batch=many", '"many"', "a whole number of at least 1"),
        ("train.batch=true", "true", "a whole number of at least 1"),
        ("train.momentum=1", "1", "a number of at least 0 and below 1"),
        ("train.learning_rate=0", "0", "a number above 0"),
        ("train.learning_rate=nan", "nan", "a number above 0"),
        ("train.learning_rate=inf", "inf", "a number above 0"),
        ("train.weighting=near", '"near"', '"none", "boundary"'),
        ("train.weighting=true", "true", '"none", "boundary"'),
        ("train.consistency=-1", "-1", "a number of at least 0"),
        ("train.consistency=nan", "nan", "a number of at least 0"),
        ("perturbation.enabled=yes", '"yes"', "true or false"),
        ("perturbation.enabled=1", "1", "true or false"),
        ("attack.radius=8/0", '"8/0"', "a number of at least 0 and at most 1"),
        ("attack.radius=300/255", '"300/255"', "a number of at least 0 and at most 1"),
        ("attack.step=0", "0", '"auto" or a number above 0'),
        ("evaluate.clients=0", "0", '"all" or a whole number of at least 1'),
        ("evaluate.clients=some", '"some"', '"all" or a whole number of at least 1'),
        ("memory.budget=0%", '"0%"', '"60MB"'),
        ("memory.budget=60XB", '"60XB"', '"60MB"'),
        ("memory.budget=-5", "-5", '"60MB"'),
        ("train.warmup=100%", '"100%"', "a whole number of at least 0, or a share"),
        ("train.warmup=-1", "-1", "a whole number of at least 0, or a share"),
        ("data.root=2024", "2024", "a text in quotes"),
        ("model.options=3", "3", "a table"),
        ("model.options.when=1979-05-27", "1979", "a table"),
        ("model.options.scale=inf", "inf", "a table"),
        ("distillation.public=0", "0", "a whole number of at least 1, or a share above 0"),
        ("distillation.public=0%", '"0%"', "a whole number of at least 1, or a share above 0"),
        ("distillation.public=100%", '"100%"', "below 100 %"),
        ("distillation.public=half", '"half"', "a whole number of at least 1, or a share"),
        ("distillation.public=true", "true", "a whole number of at least 1, or a share"),
        ("distillation.family=vgg16", '"vgg16"', "a list of names"),
        ("distillation.family=[3]", "[3]", "a list of names"),
        ("propagation.temperature=0", "0", "a number above 0"),
        ("flower.deadline=0", "0", "a number above 0"),
        ("aggregate.minimum=0", "0", "a whole number of at least 1"),
        ("aggregate.sizes=[-1]", "[-1]", "a list of counts"),
        ("flower.updates=float16", '"float16"', '"float32", "bfloat16"'),
        ("flower.cache=big", '"big"', 'a size such as "2GB"'),
        ("flower.cache=25%", '"25%"', 'a size such as "2GB"'),
        ("flower.cache=0", "0", 'a size such as "2GB"'),
        ("flower.cpus=0", "0", "a whole number of at least 1"),
        ("aggregate.rule=krum", '"krum"', '"mean", "clip", "median", "trimmed-mean"'),
        ("clip.norm=-1", "-1", "a number of at least 0"),
        ("trimmed_mean.trim=0.5", "0.5", "a number of at least 0 and below 0.5"),
        ("seed=-1", "-1", "at least 0"),
        ("train.batch.size=3", "{size = 3}", "a whole number of at least 1"),
        (f"seed={'7' * 5000}", "7777", "at most 9223372036854775807"),
        (f"seed={'[' * 3000}", "[[[[", "at most 9223372036854775807"),
        ("fleet.exponent=1.7e308", "1.7e+308", "a number of at least -100 and at most 100"),
        ("population.clients=1000000000000", "1000000000000", "at least 1 and at most 10000000"),
        ("rounds=1000000000000", "1000000000000", "a whole number of at least 1 and at most 1000000000"),
        ("train.warmup=1000000000000", "1000000000000", "a whole number of at least 0, or a share"),
        ("train.learning_rate=1e308", "1e+308", "a number above 0 and at most 1e+30"),
        (f"memory.budget={'9' * 5000}", '"9999', '"60MB"'),
        (f"memory.budget={'9' * 5000}%", '"9999', '"60MB"'),
        ('data.root="a\\u0000"', '"a\\u0000"', "a text in quotes"),
        (f"model.options.deep={'[' * 9}1{']' * 9}", "[[[[[[[[[1", "a table"),
    ],
)
def test_errors_name_key_given_and_allowed(override: str, given_text: str, allowed: str) -> None:
    key = "model.options" if override.startswith("model.options") else override.partition("=")[0].removesuffix(".size")
    text = message(override)
    assert "\n" not in text
    assert text.startswith(f"{key}: given ")
    assert given_text in text
    assert "(--set)" in text
    assert allowed in text.partition("allowed: ")[2]


@pytest.mark.parametrize(
    ("override", "known", "nearest"),
    [
        ("shards.kind=skew", '"skewed", "iid", "dirichlet"', "skewed"),
        ("fleet.performance=app", '"uniform", "apps"', "apps"),
        ("aggregate.rule=medium", '"mean", "clip", "median", "trimmed-mean"', "median"),
        ("method=jfatt", '"jfat", "feddf", "fedet"', "jfat"),
        ("engine=worker", '"auto", "cuda", "flower-sim", "plain", "workers"', "workers"),
        ("model.name=vgg-smal", '"vgg11", "vgg13", "vgg16"', "vgg-small"),
        ("data.name=digit", '"digits", "folder", "custom"', "digits"),
        ("precision=float23", '"bfloat16", "float32"', "float32"),
    ],
)
def test_a_wrong_choice_lists_the_registry_and_the_nearest(override: str, known: str, nearest: str) -> None:
    key, _, given_text = override.partition("=")
    text = message(override)
    assert text.startswith(f'{key}: given "{given_text}" (--set), allowed: "')
    assert known in text
    assert text.endswith(f". Did you mean {nearest!r}?")
    assert "Did you mean" not in message(f"{key}=0000")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["data.name=cifar10", "data.options.size=8"], "data.options: unknown option of cifar10 'size'. Known: none"),
        (
            ["data.name=folder", "data.options.sise=8"],
            "data.options: unknown option of folder 'sise'. Did you mean 'size'? Known: cache, size, test_per_class",
        ),
        (
            ["model.options.depth=3"],
            "model.options: unknown option of model vgg-small 'depth'. Did you mean 'width'? Known: width",
        ),
    ],
)
def test_options_are_those_of_the_loader_and_the_builder(overrides: list[str], line: str) -> None:
    assert message(*overrides) == line


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("train.bach=3", "train.bach", "train.batch"),
        ("train.lr=3", "train.lr", "train.learning_rate"),
        ("train.batch_size=3", "train.batch_size", "train.batch"),
        ("sead=3", "sead", "seed"),
        ("trian.batch=3", "trian", "train"),
        ("learning_rate=3", "learning_rate", "train.learning_rate"),
        ("deadline=3", "deadline", "flower.deadline"),
        ("trimmed_mean.trimm=3", "trimmed_mean.trimm", "trimmed_mean.trim"),
        ("trim=3", "trim", "trimmed_mean.trim"),
    ],
)
def test_an_unknown_key_shows_the_nearest(override: str, key: str, nearest: str) -> None:
    text = message(override)
    assert text.startswith(f"unknown key {key!r}")
    assert f"Did you mean {nearest!r}?" in text


def test_an_unknown_key_lists_its_own_level() -> None:
    text = message("assignment.zzz=3")
    assert text == "unknown key 'assignment.zzz' (--set). Known: enabled, heads"


def test_all_errors_are_listed_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('seed = "x"\n[train]\nbatch = 0\nlr = 1\n[population]\nclients = 2.5\n')
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["shards.kind=none"])
    lines = str(caught.value).splitlines()
    assert sorted(line.split(":")[0] for line in lines if "given" in line) == [
        "population.clients",
        "seed",
        "shards.kind",
        "train.batch",
    ]
    assert sum(line.startswith("unknown key 'train.lr'") for line in lines) == 1
    assert len(lines) == 5
    assert all((f"(in {path})" in line) != ("(--set)" in line) for line in lines)
    assert "(--set)" in next(line for line in lines if line.startswith("shards.kind"))


@pytest.mark.parametrize(
    ("overrides", "key", "limit"),
    [
        (["population.cohort=21"], "population.cohort: given 21", "population.clients = 20"),
        (["evaluate.clients=21"], "evaluate.clients: given 21", "population.clients = 20"),
        (["measure.clients=21"], "measure.clients: given 21", "population.clients = 20"),
        (["rounds=9", "train.warmup=9"], "train.warmup: given 9", "rounds = 9"),
        (["rounds=9", "train.warmup=4", "convergence.gate=5"], "convergence.gate: given 5", "train.warmup = 5"),
        (["rounds=9", "train.warmup=4", "attack.ramp=5"], "attack.ramp: given 5", "train.warmup = 5"),
        (["rounds=9", "train.warmup=4", "aggregate.horizon=6"], "aggregate.horizon: given 6", "at most 5, as many"),
        (["rounds=9", "train.warmup=4", "attack.ramp=3", "aggregate.horizon=4"], "aggregate.horizon", "at most 3, as"),
        (["perturbation.floor=0.8"], "perturbation.floor: given 0.8", "perturbation.start = 0.7"),
        (
            ["norm.refresh=clean", "norm.refresh_clients=2", "aggregate.minimum=3"],
            "norm.refresh_clients: given 2",
            "= 3",
        ),
        (["population.cohort=4", "aggregate.minimum=5"], "aggregate.minimum: given 5", "population.cohort = 4"),
        (["population.clients=5", "aggregate.sizes=[3, 4]"], "aggregate.sizes: given [3, 4]", "population.clients = 5"),
        (["aggregate.rule=trimmed-mean", "trimmed_mean.trim=0"], "trimmed_mean.trim: given 0.0", "above 0"),
    ],
)
def test_keys_that_exclude_each_other(overrides: list[str], key: str, limit: str) -> None:
    text = message(*overrides)
    assert "\n" not in text
    assert text.startswith(key)
    assert limit in text


def test_limits_themselves_are_allowed() -> None:
    sets = ["population.cohort=20", "evaluate.clients=20", "rounds=9", "train.warmup=4", "convergence.gate=4"]
    sets += ["aggregate.minimum=20", "aggregate.rule=trimmed-mean"]
    assert load_config(None, [*sets, "perturbation.floor=0.3"]).gate_rounds == 4
    sets = ["rounds=9", "train.warmup=4", "attack.ramp=3", "aggregate.horizon=3", "convergence.gate=0"]
    assert load_config(None, sets).horizon_rounds == 3


def test_several_conflicts_are_all_listed() -> None:
    lines = message("population.cohort=99", "rounds=3", "train.warmup=3").splitlines()
    assert [line.split(":")[0] for line in lines] == ["population.cohort", "train.warmup"]


def test_a_section_that_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("train = 3\n")
    with pytest.raises(ConfigError, match=r"^train: given 3 \(in .*c.toml\), allowed: a table$"):
        load_config(path)


def test_long_values_are_cut() -> None:
    assert len(message("train.batch=" + "x" * 5000)) < 300


# Files ---------------------------------------------------------------------------------------------------------------


def file_message(source: str | Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_an_unknown_preset() -> None:
    text = file_message("digit")
    assert text.startswith("unknown preset 'digit'. Did you mean 'digits'?")
    assert "TOML" in text


def test_a_missing_file(tmp_path: Path) -> None:
    assert str(tmp_path / "no.toml") in file_message(str(tmp_path / "no.toml"))
    assert "No such file" in file_message("no.toml")
    assert "No such file" in file_message(Path("digits"))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """A run's folder is not meant to be repeated without a word: it may be meant to go on."""
    folder = tmp_path / "a run"
    folder.mkdir()
    assert file_message(folder) == file_message(str(folder)) == f"{folder} is a folder. Give a preset or a TOML file"
    (folder / "config.toml").touch()
    assert file_message(str(folder)) == (
        f"{folder} is a folder. Go on with the run in it: fedprophet train --resume '{folder}'. "
        f"Or repeat it: give {folder / 'config.toml'}"
    )


def test_a_name_alone_may_be_a_folder_unless_it_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "digits").mkdir()
    assert file_message("runs").startswith("runs is a folder")
    assert file_message("").startswith("unknown preset ''")
    assert load_config("digits").data.name == "digits"


def test_broken_toml_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("seed = 1\nrounds = = 3\n")
    text = file_message(path)
    assert str(path) in text
    assert "line 2" in text


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes('method = "é"'.encode("latin-1"))
    text = file_message(path)
    assert str(path) in text
    assert "byte 10" in text


def test_a_byte_order_mark_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "bom.toml"
    path.write_text("seed = 4", encoding="utf-8-sig")
    assert load_config(path).seed == 4


def test_a_file_starts_from_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[attack]\nradius = "4/255"\n')
    assert load_config(str(path)) == parse_config({"attack": {"radius": 4 / 255}})


def test_a_file_without_suffix_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text("seed = 4")
    assert load_config("mine").seed == 4


# Settings of a method ------------------------------------------------------------------------------------------------

OF_A_METHOD = """\
rounds = 500

[train]
batch = 8
momentum = 0.5

[methods.jfat]
rounds = 1000
model = {options = {width = 2}}

[methods.jfat.train]
batch = 4

[methods.fedprophet]
seed = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    return write


def test_a_methods_table_is_laid_over_the_rest(mine: Callable[[str], Path]) -> None:
    path = mine(OF_A_METHOD)
    plain = load_config(path)
    assert (plain.method, plain.rounds, plain.seed, plain.train.batch) == ("fedprophet", 500, 3, 8)
    jfat = load_config(path, ["method=jfat"])
    assert (jfat.method, jfat.rounds, jfat.seed) == ("jfat", 1000, 0)
    assert (jfat.train.batch, jfat.train.momentum, jfat.model.options) == (4, 0.5, {"width": 2})


def test_the_files_own_method_and_the_last_override_choose_the_table(mine: Callable[[str], Path]) -> None:
    path = mine('method = "jfat"\n' + OF_A_METHOD)
    assert load_config(path).rounds == 1000
    assert load_config(path, ["method=jfat", "method=fedprophet"]).rounds == 500


def test_overrides_win_over_both(mine: Callable[[str], Path]) -> None:
    config = load_config(mine(OF_A_METHOD), ["rounds=7", "train.batch=2", "method=jfat"])
    assert (config.rounds, config.train.batch, config.train.momentum) == (7, 2, 0.5)


def test_a_resolved_configuration_holds_no_methods(mine: Callable[[str], Path], tmp_path: Path) -> None:
    config = load_config(mine(OF_A_METHOD), ["method=jfat"])
    assert "methods" not in config.model_dump()
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(to_toml(config, comments=True))
    assert load_config(resolved) == config


def test_a_mapping_may_hold_settings_of_a_method_too() -> None:
    given = {"method": "jfat", "train": {"batch": 8}, "methods": {"jfat": {"train": {"momentum": 0.1}}}}
    train = parse_config(given).train
    assert (train.batch, train.momentum) == (8, 0.1)
    assert given["train"] == {"batch": 8}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("methods = 3", ["methods: given 3 (in FILE), allowed: a table for each method, such as [methods.jfat]"]),
        ("[methods]\njfat = 3", ["methods.jfat: given 3 (in FILE), allowed: a table"]),
        (
            "[methods.jfat]\nmethod = 'fedprophet'",
            ['methods.jfat.method: given "fedprophet" (in FILE), allowed: any other key'],
        ),
        ("[methods.jfat]\nround = 3", ["unknown key 'round' (in FILE, [methods.jfat]). Did you mean 'rounds'?"]),
        (
            "[methods.jfat.train]\nlr = 3",
            ["unknown key 'train.lr' (in FILE, [methods.jfat]). Did you mean 'train.learning_"],
        ),
        ("[methods.jfat.methods.jfat]\nseed = 3", ["unknown key 'methods' (in FILE, [methods.jfat])."]),
        (
            "[methods.jfat.train]\nbatch = 0\n[methods.fedprophet]\nseed = -1",
            [
                "train.batch: given 0 (in FILE, [methods.jfat]), allowed: a whole number of at least 1",
                "seed: given -1 (in FILE, [methods.fedprophet]), allowed: a whole number of at least 0",
            ],
        ),
    ],
)
@pytest.mark.parametrize("method", ["jfat", "fedprophet"])
def test_mistakes_in_a_methods_table_show_whichever_is_run(
    mine: Callable[[str], Path], text: str, lines: list[str], method: str
) -> None:
    path = mine(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"method={method}"])
    found = str(caught.value).replace(str(path), "FILE").splitlines()
    assert len(found) == len(lines)
    assert all(given.startswith(expected) for given, expected in zip(found, lines, strict=True))


def test_settings_of_an_unknown_method_list_the_known_ones(mine: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(mine("[methods.jfatt]\nrounds = 3"))
    assert "mine.toml): unknown method 'jfatt'. Did you mean 'jfat'? Known: " in str(caught.value)
    assert str(caught.value).endswith(", ".join(sorted(methods())))


def test_keys_that_exclude_each_other_are_those_of_the_run(mine: Callable[[str], Path]) -> None:
    path = mine("[population]\nclients = 50\n[methods.jfat.population]\ncohort = 40\n[methods.fedrbn]\nrounds = 2\n")
    assert load_config(path, ["method=jfat"]).population.cohort == 40
    path = mine("[train]\nwarmup = 9\n[methods.jfat]\nrounds = 5\n")
    assert load_config(path).warmup_rounds == 9
    with pytest.raises(ConfigError, match=r"train.warmup: given 9, allowed: fewer than rounds = 5"):
        load_config(path, ["method=jfat"])


def test_methods_are_not_set_by_hand() -> None:
    assert message("methods.jfat.rounds=3").startswith("unknown key 'methods' (--set)")


@pytest.mark.parametrize(
    "text",
    [
        f"seed = {'7' * 5000}",
        f"seed = {'[' * 3000}",
        f"[{'.'.join('a' * 3000)}]",
        f"model.options = {'{a = ' * 3000}1{'}' * 3000}",
        f"train{'.a' * 3000} = 1",
    ],
)
def test_numbers_and_depths_that_python_cannot_read(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        load_config(file)


def test_tables_from_python_are_refused_alike() -> None:
    deep: Any = 1
    for _ in range(3000):
        deep = {"a": deep}
    for table in ({"seed": 10**5000}, {"model": {"options": deep}}, {"methods": {"jfat": deep}}, {"\ud800": 1}, deep):
        with pytest.raises(ConfigError):
            parse_config(table)
