import errno
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedprophet.errors import CheckpointError
from fedprophet.flower.cache import ModuleCache
from fedprophet.flower.protocol import ProtocolError
from fedprophet.messages.modules import digest
from fedprophet.storage.files import tensors_to_bytes

MANY = 10**9


def module(value: float) -> dict[str, Tensor]:
    return {"b.weight": torch.full((4, 4), float(value)), "a.bias": torch.tensor([-0.0, value]), "c": torch.empty(0, 2)}


A, B, C, D = (module(n) for n in range(4))
a, b, c, d = map(digest, (A, B, C, D))
SIZE = len(tensors_to_bytes(A))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "home" / "modules"


def path(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def held(folder: Path) -> set[str]:
    """The digests whose files are there."""
    return {file.name.removesuffix(".safetensors") for file in folder.glob("*.safetensors")}


def keep(cache: ModuleCache, *modules: Mapping[str, Tensor]) -> None:
    """Let each module come with a task that needs it alone."""
    for parameters in modules:
        name = digest(parameters)
        assert cache.collect([name], {name: parameters}) == ({name: parameters}, ())


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[n].dtype == wanted[n].dtype
        and found[n].shape == wanted[n].shape
        and found[n].numpy().tobytes() == wanted[n].numpy().tobytes()
        for n in wanted
    )


# What is returned -----------------------------------------------------------------------------------------------------


def test_what_was_never_sent_is_lacking(folder: Path) -> None:
    assert ModuleCache(folder, MANY).collect([b, a, b]) == ({}, (b, a))


def test_a_task_without_fixed_modules_needs_nothing(folder: Path) -> None:
    assert ModuleCache(folder, MANY).collect([]) == ({}, ())


def test_a_module_travels_once(folder: Path) -> None:
    cache = ModuleCache(folder, MANY)
    keep(cache, A)
    found, lacking = cache.collect([a, b])
    assert lacking == (b,)
    assert list(found) == [a]
    assert same(found[a], A)
    found, lacking = cache.collect([a, b], {b: B})
    assert lacking == ()
    assert list(found) == [a, b]
    assert same(found[a], A)
    assert same(found[b], B)


def test_modules_outlive_the_process(folder: Path) -> None:
    keep(ModuleCache(folder, MANY), A, B)
    found, lacking = ModuleCache(folder, MANY).collect([b, a])
    assert lacking == ()
    assert list(found) == [b, a]
    assert same(found[a], A)
    assert same(found[b], B)


def test_what_was_read_can_be_changed_without_changing_the_file(folder: Path) -> None:
    cache = ModuleCache(folder, MANY)
    keep(cache, A)
    cache.collect([a])[0][a]["b.weight"].fill_(9)
    assert same(cache.collect([a])[0][a], A)


def test_a_module_without_parameters(folder: Path) -> None:
    cache = ModuleCache(folder, MANY)
    keep(cache, {})
    assert cache.collect([digest({})]) == ({digest({}): {}}, ())


def test_an_attached_module_that_is_not_what_it_is_called_is_refused(folder: Path) -> None:
    cache = ModuleCache(folder, MANY)
    with pytest.raises(ProtocolError, match=f"the module {a} has arrived damaged: its parameters hash to {b}"):
        cache.collect([a], {a: B})
    with pytest.raises(ProtocolError, match="of a type that no module has"):
        cache.collect([a], {a: {"w": torch.ones(1, dtype=torch.bfloat16)}})
    assert held(folder) == set()


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "A" * 32, "a" * 31, "a" * 33, "a" * 32 + "\n", "\ud800"])
def test_a_digest_that_is_none_never_becomes_a_path(folder: Path, name: str) -> None:
    cache = ModuleCache(folder, MANY)
    for needed, attached in (([name], {}), ([], {name: A})):
        with pytest.raises(ProtocolError, match="no digest of a module: these are 32 hexadecimal digits") as caught:
            cache.collect(needed, attached)
        str(caught.value).encode()
    assert not folder.exists()


# Damage ---------------------------------------------------------------------------------------------------------------


def other_type(whole: bytes) -> bytes:
    return tensors_to_bytes({"w": torch.ones(2, dtype=torch.bfloat16)})


DAMAGE = {
    "empty": lambda whole: b"",
    "header alone": lambda whole: whole[:8],
    "torn": lambda whole: whole[: len(whole) // 2],
    "last byte gone": lambda whole: whole[:-1],
    "longer": lambda whole: whole + b"\0",
    "a bit": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    "a name": lambda whole: whole.replace(b"b.weight", b"b.weighs"),
    "a type": lambda whole: whole.replace(b'"F32"', b'"I32"'),
    "a shape": lambda whole: whole.replace(b"[4,4]", b"[2,8]"),
    "zeros": lambda whole: bytes(len(whole)),
    "a header without end": lambda whole: b"\xff" * 8 + whole[8:],
    "another module": lambda whole: tensors_to_bytes(B),
    "a type that modules do not have": other_type,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_deleted_and_asked_for_again(
    folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ModuleCache(folder, MANY)
    keep(cache, A, B)
    whole = path(folder, a).read_bytes()
    damaged = DAMAGE[kind](whole)
    assert damaged != whole
    path(folder, a).write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        found, lacking = cache.collect([a, b])
    assert lacking == (a,)
    assert same(found[b], B)
    assert held(folder) == {b}
    assert f"{path(folder, a)} is damaged and will be asked for again" in caplog.text
    keep(cache, A)
    assert path(folder, a).read_bytes() == whole
    assert same(cache.collect([a])[0][a], A)


def test_a_damaged_file_is_replaced_by_what_comes(folder: Path) -> None:
    cache = ModuleCache(folder, MANY)
    keep(cache, A)
    whole = path(folder, a).read_bytes()
    path(folder, a).write_bytes(whole[:-5])
    keep(cache, A)
    assert path(folder, a).read_bytes() == whole


# The limit ------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first(folder: Path) -> None:
    cache = ModuleCache(folder, 2 * SIZE)
    keep(cache, A, B)
    assert held(folder) == {a, b}
    keep(cache, C)
    assert held(folder) == {b, c}
    cache.collect([b])
    keep(cache, D)
    assert held(folder) == {b, d}
    assert cache.size == 2 * SIZE
    assert cache.collect([a, b, c, d])[1] == (a, c)


def test_the_order_of_use_survives_a_restart(folder: Path) -> None:
    keep(ModuleCache(folder, MANY), A, B, C)
    assert ModuleCache(folder, MANY).collect([a])[1] == ()
    keep(ModuleCache(folder, 2 * SIZE), D)
    assert held(folder) == {a, d}


def test_the_order_of_use_survives_a_clock_that_goes_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(10**18, 0, -(10**15)))
    monkeypatch.setattr(time, "time_ns", lambda: next(times))
    cache = ModuleCache(folder, 3 * SIZE)
    keep(cache, A, B, C)
    cache.collect([a])
    keep(cache, D)
    assert held(folder) == {a, c, d}


def test_the_order_of_use_survives_a_clock_that_stands_still(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    for last in (a, b, c):
        cache = ModuleCache(folder, 3 * SIZE)
        keep(cache, A, B, C)
        cache.collect({a, b, c} - {last})
        keep(cache, D)
        assert held(folder) == {a, b, c, d} - {last}
        path(folder, d).unlink()


def test_what_a_task_needs_stays_above_the_limit(folder: Path) -> None:
    """Otherwise a node would ask for one of them again with each answer that it gives."""
    cache = ModuleCache(folder, SIZE)
    keep(cache, D)
    found, lacking = cache.collect([a, b, c], {a: A, b: B, c: C})
    assert (list(found), lacking) == ([a, b, c], ())
    assert held(folder) == {a, b, c}
    assert cache.collect([a, b, c])[1] == ()
    assert cache.collect([b])[1] == ()
    assert held(folder) == {b}


def test_a_limit_of_nothing_still_carries_a_task(folder: Path) -> None:
    cache = ModuleCache(folder, 0)
    keep(cache, A)
    keep(cache, B)
    assert held(folder) == {b}


def test_what_came_but_is_not_needed_goes_first(folder: Path) -> None:
    cache = ModuleCache(folder, SIZE)
    cache.collect([a], {a: A, b: B})
    assert held(folder) == {a}


def test_a_smaller_limit_holds_from_the_next_use(folder: Path) -> None:
    keep(ModuleCache(folder, MANY), A, B, C)
    ModuleCache(folder, 2 * SIZE).collect([a])
    assert held(folder) == {a, c}


def test_files_of_others_are_neither_counted_nor_deleted(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("notes.txt", "model.safetensors", ".keep"):
        (folder / name).write_bytes(b"x" * 10 * SIZE)
    cache = ModuleCache(folder, SIZE)
    keep(cache, A)
    assert cache.size == SIZE
    keep(cache, B)
    assert held(folder) == {b, "model"}
    assert {file.name for file in folder.iterdir()} >= {"notes.txt", "model.safetensors", ".keep"}


def test_what_a_killed_process_left_half_written_goes(folder: Path) -> None:
    cache = ModuleCache(folder, 2 * SIZE)
    keep(cache, A)
    rest = folder / f".{c}.safetensors.tmp"
    rest.write_bytes(b"half")
    assert cache.size == SIZE + 4
    keep(cache, B)
    assert not rest.exists()
    assert held(folder) == {a, b}


# A disk that does not take it -----------------------------------------------------------------------------------------


def test_a_full_disk_costs_transfers_but_no_task(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ModuleCache(folder, MANY)
    keep(cache, A)

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with caplog.at_level(logging.WARNING):
            found, lacking = cache.collect([a, b], {b: B})
    assert lacking == ()
    assert same(found[a], A)
    assert same(found[b], B)
    assert "a module is not kept, and will have to be sent again" in caplog.text
    assert "No space left on device" in caplog.text
    assert [file.name for file in folder.iterdir() if file.name != ".lock"] == [f"{a}.safetensors"]
    keep(cache, B)
    assert held(folder) == {a, b}


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot write .*home.*Make room there or correct its permissions"):
        ModuleCache(tmp_path / "home" / "modules", MANY).collect([a])


# Several processes ----------------------------------------------------------------------------------------------------

PROGRAM = """
import json, random, sys
from pathlib import Path
import torch
from fedprophet.messages.modules import digest
from fedprophet.flower.cache import ModuleCache

folder, limit, seed, turns = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
modules = {digest(m): m for m in ({"w": torch.full((5000,), float(n))} for n in range(6))}
random.seed(seed)
cache, asked = ModuleCache(folder, limit), 0
print("ready", flush=True)
for turn in range(turns):
    needed = random.sample(sorted(modules), random.randint(1, 3))
    found, lacking = cache.collect(needed)
    if lacking:
        asked += len(lacking)
        again, still = cache.collect(needed, {name: modules[name] for name in lacking})
        # Another process may have needed the room in between, but what came with the task is there.
        assert not set(still) & set(lacking), (still, lacking)
        found = {**found, **again}
    assert set(found) == set(needed)
    for name, tensors in found.items():
        assert list(tensors) == ["w"] and torch.equal(tensors["w"], modules[name]["w"]), name
print(json.dumps({"asked": asked}), flush=True)
"""


def start(folder: Path, limit: int, seed: int, turns: int) -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder), str(limit), str(seed), str(turns)]
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(processes: Iterable["subprocess.Popen[str]"]) -> list[int]:
    """Return how many modules each process had to ask for."""
    asked = []
    for process in processes:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        assert "damaged" not in err
        assert "not kept" not in err
        asked.append(json.loads(out.splitlines()[-1])["asked"])
    return asked


@pytest.mark.slow
def test_several_processes_share_a_folder(folder: Path) -> None:
    """Nobody finds a damaged file, a missing one that was written, or more than the limit when all are done."""
    size = len(tensors_to_bytes({"w": torch.zeros(5000)}))
    crowded = 3 * size
    asked = finish([start(folder, crowded, seed, turns=60) for seed in range(3)])
    assert min(asked) > 0
    assert ModuleCache(folder, crowded).size <= crowded
    names = held(folder)
    found, lacking = ModuleCache(folder, crowded).collect(names)
    assert (set(found), lacking) == (names, ())
    assert len(names) == 3


@pytest.mark.slow
def test_a_process_killed_in_the_middle_leaves_a_sound_folder(folder: Path, wait_until) -> None:
    process = start(folder, 1, seed=0, turns=10**6)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    wait_until(lambda: list(folder.glob("*.safetensors")))
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    cache = ModuleCache(folder, MANY)
    keep(cache, A)  # the lock is free, and the writer cleans up
    assert not list(folder.glob(".*.tmp"))
    names = held(folder)
    found, lacking = cache.collect(names)
    assert (set(found), lacking) == (names, ())
    assert a in names
