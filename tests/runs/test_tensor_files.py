"""Which of a state's tensors are written with a checkpoint, and which are in files that it shares with the last one."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from fedprophet.config.config import Config
from fedprophet.errors import CheckpointError
from fedprophet.runs.checkpoint import Checkpoints

from .conftest import NOTHING_KNOWN


@dataclass(frozen=True)
class State:
    model: Mapping[str, Tensor]
    best_model: Mapping[str, Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(folder, Config())


def tensors(**values: float) -> dict[str, Tensor]:
    """Return tensors of 40 bytes."""
    return {name: torch.full((10,), value) for name, value in values.items()}


def files(folder: Path, round: int) -> dict[int, set[str]]:
    """Return the names of the tensors in each file of a checkpoint, by the file's identity on the disk."""
    paths = (folder / f"round-{round:06d}").glob("tensors-*")
    return {path.stat().st_ino: set(load(path.read_bytes())) for path in paths}


def assert_loads(checkpoints: Checkpoints, state: State, round: int | None = None) -> None:
    loaded = checkpoints.load(State, round).state
    for part in ("model", "best_model"):
        want, got = getattr(state, part), getattr(loaded, part)
        assert want.keys() == got.keys()
        assert all(want[name].equal(got[name]) for name in want)


def test_a_cascade_writes_fixed_modules_once_and_its_best_model_when_it_changes(
    checkpoints: Checkpoints, folder: Path
) -> None:
    """Module a is fixed, b and c are in training; the best model is that of round 1, then that of round 3."""
    fixed = tensors(a=0)
    first = State({**fixed, **tensors(b=1, c=1)}, {})
    first = State(first.model, first.model)
    checkpoints.save(first, 1, NOTHING_KNOWN)
    ((one, names),) = files(folder, 1).items()
    assert names == {"model/a", "model/b", "model/c"}, "the best model is the model: it is there once"

    second = State({**fixed, **tensors(b=2, c=2)}, first.best_model)
    checkpoints.save(second, 2, NOTHING_KNOWN)
    new = files(folder, 2)
    assert new.pop(one) == {"model/a", "model/b", "model/c"}, "the fixed module and the best model, not written again"
    assert list(new.values()) == [{"model/b", "model/c"}]
    (two,) = new
    assert_loads(checkpoints, first, 1)
    assert_loads(checkpoints, second, 2)

    third = {**fixed, **tensors(b=3, c=3)}
    checkpoints.save(State(third, third), 3, NOTHING_KNOWN)
    assert sorted(map(sorted, files(folder, 3).values())) == [["model/a"], ["model/b", "model/c"]]
    assert one not in files(folder, 3), "only a third of it was still needed: that was written again, apart"
    assert two not in files(folder, 3)
    (lasting,) = (number for number, inside in files(folder, 3).items() if inside == {"model/a"})

    fourth = State({**fixed, **tensors(b=4, c=4)}, third)
    checkpoints.save(fourth, 4, NOTHING_KNOWN)
    assert files(folder, 4)[lasting] == {"model/a"}
    assert len(files(folder, 4)) == 3
    assert_loads(checkpoints, State(third, third), 3)
    assert_loads(checkpoints, fourth)


def test_equal_tensors_that_are_other_objects_never_touch_a_file_that_is_shared(
    checkpoints: Checkpoints, folder: Path
) -> None:
    """The new tensors have the name and the content of an old file, which the best model needs."""
    first = tensors(a=1)
    checkpoints.save(State(first, {}), 1, NOTHING_KNOWN)
    ((one, _),) = files(folder, 1).items()
    state = State(tensors(a=1), first)
    checkpoints.save(state, 2, NOTHING_KNOWN)
    assert files(folder, 2) == {one: {"model/a"}}
    assert_loads(checkpoints, state, 2)
    checkpoints.save(State(state.model, tensors(a=5)), 3, NOTHING_KNOWN)
    assert one in files(folder, 3)
    assert_loads(checkpoints, State(state.model, tensors(a=5)))


def test_a_round_saved_again_with_what_has_not_changed(checkpoints: Checkpoints, folder: Path) -> None:
    kept = tensors(a=1, b=1)
    checkpoints.save(State(kept, {}), 1, NOTHING_KNOWN)
    state = State({**kept, **tensors(b=2)}, {})
    checkpoints.save(state, 1, NOTHING_KNOWN)
    assert_loads(checkpoints, state)
    assert [path.name for path in folder.iterdir()] == ["round-000001"]


def test_a_file_system_without_links_gets_copies(
    checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    first = tensors(a=1, b=1)
    checkpoints.save(State(first, {}), 1, NOTHING_KNOWN)
    state = State(tensors(a=2), first)
    checkpoints.save(state, 2, NOTHING_KNOWN)
    assert files(folder, 1).keys().isdisjoint(files(folder, 2))
    shutil.rmtree(folder / "round-000001")
    assert_loads(checkpoints, state)


def test_what_somebody_deleted_is_written_again(checkpoints: Checkpoints, folder: Path) -> None:
    first = tensors(a=1)
    checkpoints.save(State(first, {}), 1, NOTHING_KNOWN)
    shutil.rmtree(folder)
    state = State(tensors(a=2), first)
    checkpoints.save(state, 2, NOTHING_KNOWN)
    assert_loads(checkpoints, state)


def test_another_process_relies_on_nothing_that_it_has_not_written(checkpoints: Checkpoints, folder: Path) -> None:
    first = tensors(a=1)
    checkpoints.save(State(first, {}), 1, NOTHING_KNOWN)
    loaded = checkpoints.load(State).state
    Checkpoints(folder, Config()).save(loaded, 2, NOTHING_KNOWN)
    assert files(folder, 1).keys().isdisjoint(files(folder, 2))


def test_damage_of_a_shared_file_is_found_in_every_checkpoint_that_has_it(
    checkpoints: Checkpoints, folder: Path
) -> None:
    first = tensors(a=1)
    checkpoints.save(State(first, {}), 1, NOTHING_KNOWN)
    checkpoints.save(State(tensors(a=2), first), 2, NOTHING_KNOWN)
    (path,) = (folder / "round-000001").glob("tensors-*")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(State)
    assert str(caught.value).count(f"{path.name} is damaged") == 2


def test_a_snapshot_is_what_the_state_was_when_it_was_prepared(checkpoints: Checkpoints) -> None:
    """The table of tensors may be another when the writing begins; tensors themselves are never changed."""
    model = tensors(a=1)
    write = checkpoints.prepare(State(model, {}), 1, NOTHING_KNOWN)
    model |= tensors(a=7, b=7)
    write()
    assert_loads(checkpoints, State(tensors(a=1), {}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_are_copied_before_training_goes_on(checkpoints: Checkpoints) -> None:
    model = {"a": torch.full((10,), 1.0, device="cuda")}
    write = checkpoints.prepare(State(model, {}), 1, NOTHING_KNOWN)
    model["a"].fill_(7)
    write()
    assert_loads(checkpoints, State(tensors(a=1), {}))
