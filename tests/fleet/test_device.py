from pathlib import Path

import pytest

from fedprophet.errors import ConfigError
from fedprophet.fleet.device import POOLS, Device, load_pool, parse_bandwidth, parse_memory, parse_performance

GOOD = 'name = "a"\nperformance = "1 GFLOPS"\nmemory = "1MB"\nbandwidth = "1MB/s"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_small_pool_is_mixed():
    pool = load_pool("small")
    assert pool.name == "small"
    assert pool.description
    assert len(pool.devices) in (5, 6)
    performances = [device.performance for device in pool.devices]
    assert max(performances) / min(performances) == pytest.approx(20)
    # A fifth of the memory is the most that is ever free.
    free = [0.2 * device.memory for device in pool.devices]
    assert (min(free), max(free)) == pytest.approx((200_000, 6_000_000))


@pytest.mark.parametrize("name", POOLS)
def test_every_pool_that_ships_loads(name):
    assert load_pool(name).devices


@pytest.mark.parametrize("kind", [Path, str])
def test_own_pool(tmp_path, kind):
    path = write(
        tmp_path,
        """
        description = "two"
        [[device]]
        name = "board"
        performance = 472e9
        memory = "4GB"
        bandwidth = "1.5GB/s"
        [[device]]
        name = "phone"
        performance = "1.3 TFLOPS"
        memory = 64
        bandwidth = 1.5e6
        """,
    )
    pool = load_pool(kind(path))
    assert (pool.name, pool.description) == ("mine", "two")
    assert pool.devices == (
        Device("board", 472e9, 4_000_000_000, 1.5e9),
        Device("phone", 1.3e12, 64, 1.5e6),
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.3 TFLOPS", 1.3e12),
        ("200GFLOPS", 2e11),
        ("5 mflop/s", 5e6),
        (".5 PFLOPS", 5e14),
        ("7 FLOPS", 7.0),
        ("1e3 kFLOPS", 1e6),
        (12, 12.0),
    ],
)
def test_performances(text, value):
    assert parse_performance(text) == pytest.approx(value)


@pytest.mark.parametrize("bad", ["fast", "1.3", "1.3 TB", "-1 TFLOPS", True, None, float("inf"), float("nan"), "", [1]])
def test_bad_performances(bad):
    with pytest.raises(ConfigError, match="is not a performance"):
        parse_performance(bad)


@pytest.mark.parametrize("parse", [parse_performance, parse_memory, parse_bandwidth])
@pytest.mark.parametrize("bad", [0, -1, -0.5])
def test_not_positive(parse, bad):
    with pytest.raises(ConfigError, match=f"must be positive, not {bad}"):
        parse(bad)


def test_sizes():
    assert parse_memory("64MiB") == 2**26
    assert parse_memory(4e9) == 4_000_000_000
    assert parse_bandwidth("50MB/s") == parse_bandwidth("50MB") == 5e7
    with pytest.raises(ConfigError, match="whole number of bytes"):
        parse_memory(0.5)


def test_unknown_pool_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown device pool 'smal'. Did you mean 'small'\?.*path of a .toml file"):
        load_pool("smal")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace('memory = "1MB"\n', ""), "device 'a': memory is missing"),
        (GOOD.replace('performance = "1 GFLOPS"\n', ""), "device 'a': performance is missing"),
        (GOOD.replace('bandwidth = "1MB/s"\n', ""), "device 'a': bandwidth is missing"),
        (GOOD.replace('name = "a"\n', ""), "device 1: name is missing"),
        (GOOD.replace('"a"', "3"), "device 3, name: 3 is not a name"),
        (GOOD.replace('"1MB"', "0"), "device 'a', memory: must be positive, not 0"),
        (GOOD.replace('"1MB"', '"0MB"'), "device 'a', memory: a size must be positive"),
        (GOOD.replace('"1MB"', "-5"), "device 'a', memory: must be positive, not -5"),
        (GOOD.replace('"1MB"', '"lots"'), "device 'a', memory: 'lots' is not a size"),
        (GOOD.replace('"1MB"', "true"), "device 'a', memory: True is not a memory"),
        (GOOD.replace('"1MB/s"', "0.0"), "device 'a', bandwidth: must be positive, not 0.0"),
        (GOOD.replace('"1MB/s"', '"-1MB/s"'), "device 'a', bandwidth: '-1MB' is not a size"),
        (GOOD.replace('"1 GFLOPS"', "-2"), "device 'a', performance: must be positive, not -2"),
        (GOOD.replace('"1 GFLOPS"', "inf"), "device 'a', performance: inf is not a performance"),
        (GOOD + "memroy = 5", "device 'a': unknown key 'memroy'. Did you mean 'memory'"),
        (f"{GOOD}[[device]]\n{GOOD}", "more than one device 'a'"),
    ],
)
def test_bad_devices(tmp_path, text, message):
    path = write(tmp_path, f"[[device]]\n{text}")
    with pytest.raises(ConfigError, match=message) as caught:
        load_pool(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no devices"),
        ("device = 3", "has no devices"),
        ("device = [3]", "has no devices"),
        (f"descripton = 'x'\n[[device]]\n{GOOD}", "unknown key 'descripton'. Did you mean 'description'"),
        (f"description = 4\n[[device]]\n{GOOD}", "description must be a text, not 4"),
        ("device = = 1", "is not a TOML file.*line 1"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_pool(path)
    assert str(path) in str(caught.value)


def test_missing_or_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the device pool .*none\.toml: No such file"):
        load_pool(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"cannot read the device pool .*: Is a directory"):
        load_pool(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not a TOML file"):
        load_pool(tmp_path / "bytes.toml")
