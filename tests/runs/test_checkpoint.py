import errno
import hashlib
import json
import math
import os
import resource
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from fedprophet.config.config import Config
from fedprophet.config.load import parse_config
from fedprophet.errors import CheckpointError
from fedprophet.runs.checkpoint import Checkpoints
from fedprophet.runs.folder import FolderContents
from fedprophet.runs.journal import Mark

from .conftest import NOTHING_KNOWN

CONFIG = Config()


@dataclass(frozen=True)
class State:
    round: int
    model: Mapping[str, Tensor] = field(default_factory=dict)
    ratio: float = 1.0
    flag: bool = False


def state_of(round: int) -> State:
    model = {"conv.weight": torch.full((2, 3), float(round)), "bn.count": torch.tensor(round)}
    return State(round, model=model, ratio=round / 3)


def same(left: State, right: State) -> bool:
    """Exact equality, tensors bit for bit."""
    equal = left.model.keys() == right.model.keys() and all(left.model[n].equal(right.model[n]) for n in left.model)
    return equal and replace(left, model={}) == replace(right, model={})


# Saving and loading --------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "run" / "checkpoints", CONFIG)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def file_of(checkpoint: Path, name: str) -> Path:
    """Return the one file of that name, which may have stars."""
    (path,) = checkpoint.glob(name)
    return path


TENSORS = "tensors-*.safetensors"


def test_save_and_load(checkpoints: Checkpoints, folder: Path) -> None:
    assert not checkpoints.present()
    checkpoints.save(state_of(12), 12, NOTHING_KNOWN)
    assert checkpoints.present()
    assert names(folder) == ["round-000012"]
    checkpoint = folder / "round-000012"
    content = file_of(checkpoint, TENSORS).read_bytes()
    digest = hashlib.blake2b(content, digest_size=32).hexdigest()
    assert names(checkpoint) == ["state.json", f"tensors-{digest[:16]}.safetensors"]
    assert load(content).keys() == {"model/conv.weight", "model/bn.count"}
    state, number, notes, _ = checkpoints.load(State)
    assert same(state, state_of(12))
    assert (number, notes) == (12, [])


def test_what_state_json_says(checkpoints: Checkpoints, folder: Path) -> None:
    checkpoints.save(state_of(12), 12, NOTHING_KNOWN)
    document = json.loads((folder / "round-000012" / "state.json").read_text())
    assert document["format"] == 3
    assert document["round"] == 12
    assert document["config"] == CONFIG.model_dump()
    assert document["state"]["ratio"] == 4.0
    assert set(document) == {"format", "version", "round", "config", "tensors", "state", "folder", "digest"}


def test_what_is_known_of_the_folder(checkpoints: Checkpoints, folder: Path) -> None:
    known = FolderContents({"backbone": {7: {3: "ab"}}}, Mark(5, "cd"), Mark(0, "ef"), {"dataset": "12"}, flower="")
    checkpoints.save(state_of(3), 3, known)
    assert checkpoints.load(State).folder == known
    path = folder / "round-000003" / "state.json"
    rewrite(path, lambda document: document["folder"].pop("clients"))
    with pytest.raises(CheckpointError, match="what it says of its folder does not fit this version"):
        checkpoints.load(State)
    assert checkpoints.known_contents() is None
    rewrite(path, lambda document: document.pop("folder"))
    with pytest.raises(CheckpointError, match=r"its state\.json does not say what else the run's folder held"):
        checkpoints.load(State)
    assert checkpoints.known_contents() is None


def test_a_checkpoint_as_it_lies_on_the_disk(checkpoints: Checkpoints, folder: Path) -> None:
    """Format 3, put together without the code under test: where this fails, raise FORMAT."""
    tensors = save({"inside": torch.ones(2)})
    digest = hashlib.blake2b(tensors, digest_size=32).hexdigest()
    state = {"round": 4, "model": {"w": "model/w", "v": "model/w"}, "ratio": {"float": "inf"}, "flag": True}
    document = {"format": 3, "version": "0.1", "round": 4, "config": CONFIG.model_dump()}
    nothing = {"bytes": 0, "digest": ""}
    known = {"clients": {}, "journal": nothing, "timings": nothing, "inputs": {}, "flower": ""}
    document |= {"tensors": {digest: {"model/w": "inside"}}, "state": state, "folder": known, "digest": ""}
    path = folder / "round-000004" / "state.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document))
    (path.parent / f"tensors-{digest[:16]}.safetensors").write_bytes(tensors)
    rewrite(path, lambda document: None)
    found = checkpoints.load(State)
    assert same(found.state, State(4, dict.fromkeys("wv", torch.ones(2)), math.inf, True))
    assert found.folder == NOTHING_KNOWN


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Checkpoints(tmp_path / name, CONFIG).save(state_of(3), 3, NOTHING_KNOWN)
    a, b = (tmp_path / name / "round-000003" for name in ("a", "b"))
    assert names(a) == names(b)
    assert all((a / name).read_bytes() == (b / name).read_bytes() for name in names(a))


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (3, [3, 4, 5])])
def test_older_ones_are_removed(tmp_path: Path, keep: int, left: list[int]) -> None:
    checkpoints = Checkpoints(tmp_path, CONFIG, keep)
    for number in range(1, 6):
        checkpoints.save(state_of(number), number, NOTHING_KNOWN)
    assert names(tmp_path) == [f"round-{number:06d}" for number in left]


def test_the_one_that_training_has_gone_on_from_stays(tmp_path: Path) -> None:
    """Rounds 4 to 7 had no usable update: those of round 3 were trained from the state after round 2."""
    checkpoints = Checkpoints(tmp_path, CONFIG, 2)
    for number in range(1, 4):
        checkpoints.save(state_of(number), number, NOTHING_KNOWN, proven=number - 1)
    for number in range(4, 8):
        checkpoints.save(state_of(number), number, NOTHING_KNOWN, proven=2)
    assert names(tmp_path) == ["round-000002", "round-000006", "round-000007"]
    assert checkpoints.newest(2) == 2
    checkpoints.save(state_of(8), 8, NOTHING_KNOWN, proven=7)
    assert names(tmp_path) == ["round-000007", "round-000008"]


def test_the_checkpoint_of_a_round_can_be_asked_for(checkpoints: Checkpoints, folder: Path) -> None:
    checkpoints.save(state_of(4), 4, NOTHING_KNOWN)
    checkpoints.save(state_of(6), 6, NOTHING_KNOWN)
    assert same(checkpoints.load(State, 4).state, state_of(4))
    with pytest.raises(CheckpointError, match=r"no checkpoint of round 5 in .*; there are: 6, 4"):
        checkpoints.load(State, 5)
    checkpoints.drop_after(4)
    assert names(folder) == ["round-000004"]


def test_rounds_are_ordered_as_numbers(checkpoints: Checkpoints, folder: Path) -> None:
    checkpoints.save(state_of(999999), 999999, NOTHING_KNOWN)
    checkpoints.save(state_of(1000000), 1000000, NOTHING_KNOWN)
    assert checkpoints.load(State).round == 1000000
    assert names(folder) == ["round-1000000", "round-999999"]


def test_foreign_files_are_left_alone(checkpoints: Checkpoints, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "notes.tmp").write_text("mine")
    (folder / "round-1").mkdir()
    checkpoints.save(state_of(1), 1, NOTHING_KNOWN)
    assert names(folder) == ["notes.tmp", "round-000001", "round-1"]
    assert checkpoints.load(State).round == 1


def test_no_checkpoint(checkpoints: Checkpoints, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=f"there is no checkpoint in {folder}"):
        checkpoints.load(State)


def test_saving_a_round_again(checkpoints: Checkpoints, folder: Path) -> None:
    checkpoints.save(state_of(1), 1, NOTHING_KNOWN)
    checkpoints.save(state_of(8), 1, NOTHING_KNOWN)
    assert names(folder) == ["round-000001"]
    assert checkpoints.load(State).state.round == 8


def test_a_damaged_one_is_replaced_when_its_round_comes_again(checkpoints: Checkpoints, folder: Path) -> None:
    checkpoints.save(state_of(1), 1, NOTHING_KNOWN)
    checkpoints.save(state_of(2), 2, NOTHING_KNOWN)
    (folder / "round-000002" / "state.json").write_text("{")
    checkpoints.save(state_of(2), 2, NOTHING_KNOWN)
    assert checkpoints.load(State)[1:3] == (2, [])


# Damage --------------------------------------------------------------------------------------------------------------


def assert_falls_back(checkpoints: Checkpoints, reason: str) -> None:
    state, number, notes, _ = checkpoints.load(State)
    assert number == 1
    assert same(state, state_of(1))
    assert len(notes) == 2
    assert notes[0].startswith("the checkpoint of round 2 is not used: ")
    assert reason in notes[0]
    assert notes[1] == "went back to the checkpoint of round 1"


@pytest.fixture
def two(checkpoints: Checkpoints) -> Checkpoints:
    checkpoints.save(state_of(1), 1, NOTHING_KNOWN)
    checkpoints.save(state_of(2), 2, NOTHING_KNOWN)
    return checkpoints


@pytest.mark.parametrize("name", ["state.json", TENSORS])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.9, -1])
def test_a_truncated_file(two: Checkpoints, folder: Path, name: str, share: float) -> None:
    path = file_of(folder / "round-000002", name)
    size = path.stat().st_size
    os.truncate(path, size - 1 if share < 0 else int(size * share))
    assert_falls_back(two, f"its {path.name} is damaged")


@pytest.mark.parametrize("name", ["state.json", TENSORS])
def test_any_flipped_bit_is_found(two: Checkpoints, folder: Path, name: str) -> None:
    path = file_of(folder / "round-000002", name)
    whole = path.read_bytes()
    for turn, position in enumerate(range(0, len(whole), max(1, len(whole) // 80))):
        bit = (0, 3, 5)[turn % 3]
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :])
        assert two.load(State).round == 1, f"bit {bit} of byte {position}"
    path.write_bytes(whole)
    assert two.load(State).round == 2


def test_a_longer_tensor_file_is_found(two: Checkpoints, folder: Path) -> None:
    path = file_of(folder / "round-000002", TENSORS)
    with path.open("ab") as file:
        file.write(b"x")
    assert_falls_back(two, f"{path.name} is damaged")


def test_a_number_beyond_the_range_of_floats(two: Checkpoints, folder: Path) -> None:
    path = folder / "round-000002" / "state.json"
    path.write_text(path.read_text().replace('"round":2', '"round":1e999', 1))
    assert_falls_back(two, "state.json is damaged")


@pytest.mark.parametrize("name", ["state.json", TENSORS])
def test_a_missing_file(two: Checkpoints, folder: Path, name: str) -> None:
    path = file_of(folder / "round-000002", name)
    path.unlink()
    assert_falls_back(two, f"its {path.name} cannot be read: No such file")


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}", '{"a": 1}', '"x"'])
def test_json_that_is_not_ours(two: Checkpoints, folder: Path, text: str) -> None:
    (folder / "round-000002" / "state.json").write_text(text)
    assert_falls_back(two, "not one of FedProphet's")


def test_a_file_in_place_of_the_folder(two: Checkpoints, folder: Path) -> None:
    shutil.rmtree(folder / "round-000002")
    (folder / "round-000002").write_text("x")
    assert_falls_back(two, "cannot be read")


def test_a_checkpoint_of_another_round_of_the_same_run_is_found_out(two: Checkpoints, folder: Path) -> None:
    path = file_of(folder / "round-000002", TENSORS)
    shutil.copy(file_of(folder / "round-000001", TENSORS), path)
    assert_falls_back(two, f"{path.name} is damaged")


def test_none_usable_says_why_for_each(two: Checkpoints, folder: Path) -> None:
    (folder / "round-000002" / "state.json").write_text("{")
    file_of(folder / "round-000001", TENSORS).unlink()
    with pytest.raises(CheckpointError) as caught:
        two.load(State)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"no checkpoint in {folder} can be used:"
    assert "round 2" in lines[1]
    assert "state.json is damaged" in lines[1]
    assert "round 1" in lines[2]
    assert ".safetensors cannot be read" in lines[2]


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a document and give it a right digest again, computed without the code under test."""
    document = json.loads(path.read_text())
    del document["digest"]
    change(document)
    text = json.dumps(document, separators=(",", ":"))
    document["digest"] = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
    path.write_text(json.dumps(document, separators=(",", ":")))


@pytest.mark.parametrize("other", [2, 4])
def test_another_format_is_refused_with_a_sentence(two: Checkpoints, folder: Path, other: int) -> None:
    rewrite(folder / "round-000002" / "state.json", lambda d: d.update(format=other, version="9.9"))
    assert_falls_back(two, f"it has format {other}, written by FedProphet 9.9; this FedProphet")


def test_another_version_of_the_package_is_noted(two: Checkpoints, folder: Path) -> None:
    rewrite(folder / "round-000002" / "state.json", lambda d: d.update(version="0.0.1"))
    _, number, notes, _ = two.load(State)
    assert number == 2
    assert len(notes) == 1
    assert "0.0.1" in notes[0]


def test_a_state_of_another_shape(two: Checkpoints, folder: Path) -> None:
    rewrite(folder / "round-000002" / "state.json", lambda d: d["state"].pop("ratio"))
    assert_falls_back(two, "does not fit this version of FedProphet")


def test_a_checkpoint_of_another_configuration(two: Checkpoints, folder: Path) -> None:
    other = parse_config({"seed": 4, "train": {"batch": 8}})
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(folder, other).load(State)
    text = str(caught.value)
    assert text.count("another configuration: seed: here 4, there 0; train.batch: here 8, there 64") == 2
    Checkpoints(folder, other, keep=3).save(state_of(3), 3, NOTHING_KNOWN)
    assert Checkpoints(folder, other).load(State)[1:3] == (3, [])
    _, number, notes, _ = two.load(State)
    assert number == 2
    assert "seed: here 0, there 4" in notes[0]


# Interruptions -------------------------------------------------------------------------------------------------------


def test_leftovers_of_a_kill_are_ignored_and_removed(two: Checkpoints, folder: Path) -> None:
    half = folder / "round-000003.tmp"
    half.mkdir()
    (half / "tensors.safetensors").write_bytes(b"half")
    assert two.load(State)[1:3] == (2, [])
    two.save(state_of(3), 3, NOTHING_KNOWN)
    assert names(folder) == ["round-000002", "round-000003"]
    assert two.load(State).round == 3


def test_a_kill_between_moving_aside_and_renaming(two: Checkpoints, folder: Path) -> None:
    (folder / "round-000002").rename(folder / "round-000002.old")
    assert two.load(State)[1:3] == (2, [])
    two.save(state_of(3), 3, NOTHING_KNOWN)
    assert names(folder) == ["round-000002", "round-000003"]


def test_a_kill_before_what_was_moved_aside_is_removed(two: Checkpoints, folder: Path) -> None:
    shutil.copytree(folder / "round-000001", folder / "round-000002.old")
    state, number, *_ = two.load(State)
    assert (state.round, number) == (2, 2)
    two.save(state_of(3), 3, NOTHING_KNOWN)
    assert names(folder) == ["round-000002", "round-000003"]


class Killed(BaseException):
    """Ends a save wherever it is, like a kill would: no handler for errors runs."""


def save_until(checkpoints: Checkpoints, state: State, monkeypatch: pytest.MonkeyPatch, steps: int) -> bool:
    """Save, but be killed after so many steps; return whether it came to that."""
    seen = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **keywords: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen > steps:
                raise Killed
            return real(*arguments, **keywords)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", counted(os.fsync))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        for name in ("rename", "mkdir", "open"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        try:
            checkpoints.save(state, state.round, NOTHING_KNOWN)
        except Killed:
            return True
    return False


@pytest.mark.parametrize("again", [False, True], ids=["new round", "round that is there already"])
def test_a_kill_at_any_step_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    before = Checkpoints(tmp_path / "before", CONFIG)
    for number in (1, 2):
        before.save(state_of(number), number, NOTHING_KNOWN)
    if again:
        before.save(replace(state_of(3), flag=True), 3, NOTHING_KNOWN)
    steps = 0
    killed = True
    while killed:
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(steps))
        checkpoints = Checkpoints(folder, CONFIG)
        killed = save_until(checkpoints, state_of(3), monkeypatch, steps)
        state, number, notes, _ = checkpoints.load(State)
        assert notes == []
        assert number == 3 if again else number in (2, 3)
        assert same(replace(state, flag=False), state_of(number))
        checkpoints.save(state_of(3), 3, NOTHING_KNOWN)
        checkpoints.save(state_of(4), 4, NOTHING_KNOWN)
        assert names(folder) == ["round-000003", "round-000004"]
        steps += 1
    assert steps > 8


def test_files_and_folders_are_synced_before_the_rename(
    checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(parents=True)
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def watched_fsync(number: int) -> None:
        events.append(f"sync {Path(f'/proc/self/fd/{number}').readlink().name}")
        fsync(number)

    def watched_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    checkpoints.save(state_of(1), 1, NOTHING_KNOWN)
    assert events == [
        f"sync {file_of(folder / 'round-000001', TENSORS).name}",
        "sync state.json",
        "sync round-000001.tmp",
        "rename round-000001.tmp",
        "sync checkpoints",
    ]


# Disks that are full -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", range(4))
def test_a_full_disk(two: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    real, seen = os.fsync, 0

    def full(number: int) -> None:
        nonlocal seen
        seen += 1
        if seen > call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError) as caught:
            two.save(state_of(3), 3, NOTHING_KNOWN)
    text = str(caught.value)
    # The fourth sync is that of the folder above: by then the new checkpoint itself is whole.
    last = 2 if call < 3 else 3
    assert f"cannot write the checkpoint {folder}/round-000003: No space left on device" in text
    assert f"The last whole checkpoint is of round {last}." in text
    assert f"fedprophet train --resume {folder.parent}" in text
    assert [name for name in names(folder) if not name.startswith("round-00000") or "." in name] == []
    assert two.load(State)[1:3] == (last, [])


def test_a_full_disk_at_the_first_checkpoint(
    checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder.mkdir(parents=True)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="There is no whole checkpoint yet"):
        checkpoints.save(state_of(1), 1, NOTHING_KNOWN)
    assert names(folder) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*round-000001: "):
        Checkpoints(tmp_path / "run" / "checkpoints", CONFIG).save(state_of(1), 1, NOTHING_KNOWN)


def test_a_real_limit_on_the_size_of_files(checkpoints: Checkpoints, folder: Path) -> None:
    checkpoints.save(state_of(1), 1, NOTHING_KNOWN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"File too large\. The last whole checkpoint is of round 1\."):
            checkpoints.save(State(2, {"w": torch.ones(100_000)}), 2, NOTHING_KNOWN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoints.load(State).round == 1
    assert names(folder) == ["round-000001"]


def test_a_checkpoint_from_before_a_key_existed_has_its_default(two: Checkpoints, folder: Path) -> None:
    def older(document: dict[str, Any]) -> None:
        document["config"].pop("aggregate")
        document["config"]["train"].pop("decay")

    rewrite(folder / "round-000002" / "state.json", older)
    number = two.load(State).round
    assert number == 2
    changed = parse_config({"aggregate": {"rule": "median"}})
    with pytest.raises(CheckpointError, match=r'aggregate\.rule: here "median", there "mean"'):
        Checkpoints(folder, changed).load(State)
