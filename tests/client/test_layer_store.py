import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedprophet.client import layer_store
from fedprophet.client.layer_store import ClientStore, LayerDigests
from fedprophet.errors import CheckpointError
from fedprophet.messages.modules import digest
from fedprophet.messages.values import Timeline

ALL = Timeline()
MANY = 10**9


def layers(value: float) -> dict[str, Tensor]:
    """Layers of 4 · 4 + 8 = 24 bytes."""
    return {"bn.running_mean": torch.full((4,), float(value)), "bn.num_batches_tracked": torch.tensor(int(value))}


def value(found: object) -> float | None:
    if found is None:
        return None
    assert set(found) == {"bn.running_mean", "bn.num_batches_tracked"}
    assert found["bn.running_mean"].shape == (4,)
    assert found["bn.num_batches_tracked"].dtype == torch.int64
    assert found["bn.num_batches_tracked"].item() == found["bn.running_mean"][0].item()
    return found["bn.running_mean"][0].item()


@pytest.fixture(params=["memory", "disk", "disk without memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ClientStore:
    """The same store three ways; without memory, everything goes through the disk at once."""
    made = {
        "memory": lambda: ClientStore(None, 0),
        "disk": lambda: ClientStore(tmp_path / "clients", MANY),
        "disk without memory": lambda: ClientStore(tmp_path / "clients", 0),
    }
    return made[request.param]()


def put(
    store: ClientStore, client: int, *rounds: int, timeline: Timeline = ALL, architecture: str = "backbone"
) -> None:
    for number in rounds:
        store.put(architecture, client, number, layers(number), timeline)


def get(store: ClientStore, client: int, before: int, timeline: Timeline = ALL) -> float | None:
    return value(store.get("backbone", client, timeline, before))


def versions(store: ClientStore, client: int) -> list[int]:
    """Every version that is there, found by asking for each round alone."""
    return [n for n in range(100) if store.get("backbone", client, Timeline(((-1, n - 1),)), n + 1) is not None]


# What is returned ----------------------------------------------------------------------------------------------------


def test_nothing_is_known_of_a_client_that_never_trained(store: ClientStore) -> None:
    put(store, 1, 3)
    assert get(store, 2, 100) is None
    assert store.get("other", 1, ALL, 100) is None


def test_the_newest_version_before_the_round(store: ClientStore) -> None:
    put(store, 1, 3, 5, 9)
    assert [get(store, 1, before) for before in (3, 4, 5, 6, 9, 10, 100)] == [None, 3, 3, 5, 5, 9, 9]


def test_discarded_versions_do_not_count(store: ClientStore) -> None:
    put(store, 1, 3, 5, 9)
    assert get(store, 1, 100, Timeline(((4, 9),))) == 3
    assert get(store, 1, 100, Timeline(((4, 8),))) == 9
    assert get(store, 1, 100, Timeline(((5, 9),))) == 5
    assert get(store, 1, 100, Timeline(((2, 9),))) is None


def test_clients_and_architectures_are_kept_apart(store: ClientStore) -> None:
    store.put("backbone", 1, 1, layers(10), ALL)
    store.put("backbone", 2, 1, layers(20), ALL)
    store.put("vgg11", 1, 1, layers(30), ALL)
    assert value(store.get("backbone", 1, ALL, 2)) == 10
    assert value(store.get("backbone", 2, ALL, 2)) == 20
    assert value(store.get("vgg11", 1, ALL, 2)) == 30


def test_a_copy_is_stored(store: ClientStore) -> None:
    given = layers(4)
    store.put("backbone", 1, 1, given, ALL)
    given["bn.running_mean"].zero_()
    assert get(store, 1, 2) == 4


def test_tensors_come_back_bit_for_bit(store: ClientStore) -> None:
    base = torch.randn(5, 6)
    given = {"a": base.t(), "b": base[1], "c": torch.tensor([float("nan"), float("inf")]), "d": base.requires_grad_()}
    store.put("backbone", 1, 1, given, ALL)
    found = store.get("backbone", 1, ALL, 2)
    assert found is not None
    assert set(found) == set(given)
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert not found[name].requires_grad
        assert torch.equal(found[name].nan_to_num(7), tensor.nan_to_num(7))


def test_a_model_without_own_layers_still_counts_as_trained(store: ClientStore) -> None:
    store.put("backbone", 1, 4, {}, ALL)
    store.flush()
    found = store.get("backbone", 1, ALL, 5)
    assert found is not None
    assert len(found) == 0
    assert store.get("backbone", 1, ALL, 4) is None


# What is dropped -----------------------------------------------------------------------------------------------------


def test_versions_of_an_interrupted_run_are_dropped(store: ClientStore) -> None:
    put(store, 1, 3, 5, 7, 9)
    put(store, 1, 6)
    assert versions(store, 1) == [3, 5, 6]


def test_the_same_round_is_replaced(store: ClientStore) -> None:
    put(store, 1, 5)
    store.put("backbone", 1, 5, layers(50), ALL)
    assert get(store, 1, 6) == 50


def test_versions_older_than_the_newest_at_the_floor_are_dropped(store: ClientStore) -> None:
    put(store, 1, 1, 3, 5)
    put(store, 1, 8, timeline=Timeline(floor=4))
    assert versions(store, 1) == [3, 5, 8]
    put(store, 1, 9, timeline=Timeline(floor=5))
    assert versions(store, 1) == [5, 8, 9]
    put(store, 1, 10, timeline=Timeline(floor=7))
    assert versions(store, 1) == [5, 8, 9, 10]
    put(store, 1, 11, timeline=Timeline(floor=10))
    assert versions(store, 1) == [10, 11]


def test_the_newest_at_the_floor_is_one_that_counts(store: ClientStore) -> None:
    put(store, 1, 2, 4, 6)
    put(store, 1, 9, timeline=Timeline(((3, 7),), floor=8))
    assert versions(store, 1) == [2, 9]


def test_discarded_versions_are_dropped_once_no_resume_can_need_them(store: ClientStore) -> None:
    put(store, 1, 7, 9)
    # Round 11 ended a stage and went back to round 8; a checkpoint of round 10 does not know that and needs round 9.
    put(store, 1, 12, timeline=Timeline(((8, 11),), floor=10))
    assert versions(store, 1) == [7, 9, 12]
    assert get(store, 1, before=11) == 9
    put(store, 1, 13, timeline=Timeline(((8, 11),), floor=11))
    assert versions(store, 1) == [7, 12, 13]


def test_a_resume_from_an_older_checkpoint(tmp_path: Path) -> None:
    """Rounds 1 … 6 ran, the run was killed, and its checkpoint of round 3 is the newest whole one."""
    first = ClientStore(tmp_path, MANY)
    put(first, 1, 1, 3, 4, 6)
    put(first, 2, 2, 5)
    first.flush()
    again = ClientStore(tmp_path, MANY)
    assert (get(again, 1, before=4), get(again, 2, before=4)) == (3, 2)
    assert (get(again, 1, before=2), get(again, 2, before=2)) == (1, None)
    again.put("backbone", 1, 4, layers(40), ALL)
    assert get(again, 1, before=5) == 40
    again.put("backbone", 2, 5, layers(50), ALL)
    again.flush()
    assert versions(again, 1) == [1, 3, 4]
    assert get(ClientStore(tmp_path, MANY), 1, before=100) == 40
    assert get(ClientStore(tmp_path, MANY), 2, before=100) == 50


# Memory and disk -----------------------------------------------------------------------------------------------------


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_nothing_is_written_before_a_flush(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, MANY)
    put(store, 1, 1)
    assert files(tmp_path) == []
    assert get(ClientStore(tmp_path, MANY), 1, 2) is None
    store.flush()
    assert files(tmp_path) == ["backbone/0/1.safetensors"]
    assert get(ClientStore(tmp_path, MANY), 1, 2) == 1


def test_a_thousand_clients_share_a_folder(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, MANY)
    for client in (0, 999, 1000, 999_999):
        put(store, client, 1)
    store.flush()
    assert files(tmp_path) == [
        "backbone/0/0.safetensors",
        "backbone/0/999.safetensors",
        "backbone/1/1000.safetensors",
        "backbone/999/999999.safetensors",
    ]


def test_a_flush_writes_only_what_changed(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, MANY)
    put(store, 1, 1)
    put(store, 2, 1)
    store.flush()
    before = {name: (tmp_path / name).stat().st_ino for name in files(tmp_path)}
    put(store, 2, 2)
    get(store, 1, 2)
    store.flush()
    after = {name: (tmp_path / name).stat().st_ino for name in files(tmp_path)}
    assert [name for name in after if after[name] != before[name]] == ["backbone/0/2.safetensors"]


def held(store: ClientStore) -> list[int]:
    return [client for (_, client), _ in store._clients.items()]


def test_the_least_recently_used_leave_memory(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, 3 * 24)
    for client in (1, 2, 3):
        put(store, client, 1)
    assert files(tmp_path) == []
    store.flush()
    assert held(store) == [1, 2, 3]
    get(store, 1, 2)
    put(store, 4, 1)
    assert held(store) == [3, 1, 4]
    assert files(tmp_path) == [f"backbone/0/{client}.safetensors" for client in (1, 2, 3)]
    assert get(store, 2, 2) == 1
    assert held(store) == [1, 4, 2]


def test_a_changed_client_is_written_before_it_leaves_memory(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, 2 * 24)
    for client in (1, 2, 3):
        put(store, client, client)
    assert held(store) == [2, 3]
    assert files(tmp_path) == ["backbone/0/1.safetensors"]
    assert get(store, 1, 9) == 1


def test_the_size_in_memory_is_counted_right(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, 5 * 24)
    for number in range(1, 30):
        put(store, number % 4, number, timeline=Timeline(floor=number - 3))
        get(store, (number * 7) % 4, number)
        assert store._clients.size == sum(client.size for _, client in store._clients.items()) <= 5 * 24


def test_without_a_directory_nothing_leaves_memory() -> None:
    store = ClientStore(None, 1)
    for client in range(10):
        put(store, client, 1)
    store.flush()
    assert [get(store, client, 2) for client in range(10)] == [1] * 10


def test_files_are_the_same_for_the_same_layers(tmp_path: Path) -> None:
    for name in ("a", "b"):
        store = ClientStore(tmp_path / name, MANY)
        put(store, 1, 3, 5)
        store.flush()
    one, two = (tmp_path / name / "backbone/0/1.safetensors" for name in ("a", "b"))
    assert one.read_bytes() == two.read_bytes()


# Disks that fail -----------------------------------------------------------------------------------------------------


def test_a_full_disk_keeps_the_old_file_and_the_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run" / "clients"
    store = ClientStore(folder, MANY)
    put(store, 1, 1)
    store.flush()
    put(store, 1, 2)

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"1.safetensors: No space left.*--resume .*run"):
            store.flush()
    assert files(folder) == ["backbone/0/1.safetensors"]
    assert get(ClientStore(folder, MANY), 1, 9) == 1
    store.flush()
    assert get(ClientStore(folder, MANY), 1, 9) == 2


def test_changes_are_written_as_they_were_when_they_were_handed_out(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "clients", MANY)
    put(store, 1, 1)
    write = store.changes()
    put(store, 1, 2)
    write()
    assert get(ClientStore(tmp_path / "clients", MANY), 1, 9) == 1
    store.flush()
    assert get(ClientStore(tmp_path / "clients", MANY), 1, 9) == 2


def test_what_waits_to_be_written_is_found_though_it_has_left_memory(tmp_path: Path) -> None:
    """There is memory for one client; its file is not there yet, or has older layers."""
    store = ClientStore(tmp_path / "clients", 24)
    put(store, 1, 1)
    store.flush()
    put(store, 1, 2)
    write = store.changes()
    put(store, 2, 2)
    assert get(store, 1, 9) == 2
    write()
    assert get(ClientStore(tmp_path / "clients", MANY), 1, 9) == 2


def test_a_newer_version_that_leaves_memory_is_not_overwritten_by_older_changes(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "clients", 48)
    put(store, 1, 1)
    write = store.changes()
    put(store, 1, 2)
    put(store, 2, 2)
    put(store, 3, 2)
    assert versions(ClientStore(tmp_path / "clients", MANY), 1) == [1, 2], "it was written when it left"
    write()
    assert versions(ClientStore(tmp_path / "clients", MANY), 1) == [1, 2]


def test_changes_that_could_not_be_written_are_among_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ClientStore(tmp_path / "clients", MANY)
    put(store, 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(CheckpointError, match="full"):
            store.changes()()
    put(store, 2, 1)
    store.changes()()
    assert [get(ClientStore(tmp_path / "clients", MANY), client, 9) for client in (1, 2)] == [1, 1]


def test_a_half_written_file_of_a_kill_is_ignored(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, MANY)
    put(store, 1, 1)
    store.flush()
    (tmp_path / "backbone/0/.2.safetensors.tmp").write_bytes(b"half")
    again = ClientStore(tmp_path, MANY)
    assert (get(again, 1, 9), get(again, 2, 9)) == (1, None)
    put(again, 2, 1)
    again.flush()
    assert files(tmp_path) == ["backbone/0/1.safetensors", "backbone/0/2.safetensors"]


@pytest.mark.parametrize("size", [0, 4, 8, 40, -1])
def test_a_damaged_file_is_named(tmp_path: Path, size: int) -> None:
    store = ClientStore(tmp_path, MANY)
    put(store, 1, 1)
    store.flush()
    path = tmp_path / "backbone/0/1.safetensors"
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    again = ClientStore(tmp_path, MANY)
    with pytest.raises(CheckpointError, match=str(path)):
        again.get("backbone", 1, ALL, 9)


@pytest.mark.parametrize("about", [None, {"versions": "1"}, {"digests": "ab"}, {"versions": "1 2", "digests": "ab"}])
def test_a_file_of_somebody_else_is_named(tmp_path: Path, about: dict[str, str] | None) -> None:
    path = tmp_path / "backbone/0/1.safetensors"
    path.parent.mkdir(parents=True)
    save_file({"1/w": torch.zeros(1)}, path, about)
    store = ClientStore(tmp_path, MANY)
    for read in (lambda: store.get("backbone", 1, ALL, 9), lambda: store.digests(9)):
        with pytest.raises(CheckpointError, match=f"{path} cannot be read: it does not say which versions"):
            read()


# Held against a checkpoint -------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of two clients: 1 trained in rounds 3 and 5, 2 in round 4."""
    store = ClientStore(tmp_path / "clients", MANY)
    put(store, 1, 3, 5)
    put(store, 2, 4)
    store.flush()
    return tmp_path / "clients"


def file_of(folder: Path, client: int) -> Path:
    return folder / f"backbone/0/{client}.safetensors"


def known(folder: Path, round: int = 5) -> LayerDigests:
    return ClientStore(folder, MANY).digests(round)


def opened(folder: Path, digests: LayerDigests, memory: int = MANY) -> ClientStore:
    store = ClientStore(folder, memory)
    store.expect(digests)
    return store


def test_the_digests_are_those_of_the_layers_up_to_a_round(folder: Path) -> None:
    expected = {1: {3: digest(layers(3)), 5: digest(layers(5))}, 2: {4: digest(layers(4))}}
    assert known(folder) == {"backbone": expected}
    assert known(folder, 4) == {"backbone": {1: {3: digest(layers(3))}, 2: {4: digest(layers(4))}}}
    assert known(folder, 2) == {}
    assert digest(layers(3)) != digest(layers(5))


def test_the_digests_do_not_depend_on_the_order_of_work(tmp_path: Path) -> None:
    tables = []
    for clients in ((1, 2, 30), (30, 2, 1)):
        store = ClientStore(None, 0)
        for client in clients:
            put(store, client, 3)
        tables.append(json.dumps(store.digests(9)))
    assert tables[0] == tables[1]


def test_digests_follow_what_is_stored_and_dropped_without_reading(folder: Path) -> None:
    store = opened(folder, known(folder))
    put(store, 1, 9, timeline=Timeline(floor=8))
    put(store, 3, 9)
    store.flush()
    file_of(folder, 2).write_bytes(b"not looked at")
    digests = store.digests(9)["backbone"]
    assert {client: list(versions) for client, versions in digests.items()} == {1: [5, 9], 2: [4], 3: [9]}
    assert digests[3][9] == digest(layers(9))


def test_all_is_as_expected(folder: Path) -> None:
    store = opened(folder, known(folder))
    assert (get(store, 1, 9), get(store, 1, 5), get(store, 2, 9), get(store, 3, 9)) == (5, 3, 4, None)


def test_missing_files_are_named_at_once(folder: Path) -> None:
    digests = known(folder)
    file_of(folder, 2).unlink()
    with pytest.raises(CheckpointError, match=f"missing: {file_of(folder, 2)}. .*Put back {folder} from a copy"):
        opened(folder, digests)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=f"missing: {file_of(folder, 1)} and 1 other files"):
        opened(folder, digests)


def test_an_older_copy_is_refused(folder: Path, tmp_path: Path) -> None:
    older = ClientStore(tmp_path / "older", MANY)
    put(older, 1, 3)
    older.flush()
    digests = known(folder)
    shutil.copy(file_of(tmp_path / "older", 1), file_of(folder, 1))
    store = opened(folder, digests)
    with pytest.raises(CheckpointError, match=f"{file_of(folder, 1)} does not hold the layers .* client 1 .* round 5"):
        get(store, 1, 9)
    assert get(store, 1, 5) == 3, "what it does hold is right"


def test_other_layers_in_a_sound_file_are_refused(folder: Path) -> None:
    digests = known(folder)
    store = ClientStore(folder, MANY)
    store.put("backbone", 1, 5, layers(50), ALL)
    store.flush()
    with pytest.raises(CheckpointError, match=r"1\.safetensors does not hold the layers .* after round 5"):
        get(opened(folder, digests), 1, 9)


def test_a_flipped_bit_is_found_by_the_file_alone(folder: Path) -> None:
    """A Flower node has no checkpoint: its file tells."""
    path = file_of(folder, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=rf"{path} cannot be read: its layers of round \d are not those"):
        get(ClientStore(folder, MANY), 1, 9)


def test_what_an_interrupted_run_left_is_ignored(folder: Path) -> None:
    """A kill between a flush in round 5 and its checkpoint: that of round 3 is the newest."""
    store = opened(folder, known(folder, 3))
    assert (get(store, 1, 9), get(store, 2, 9)) == (3, None)
    put(store, 2, 6)
    store.flush()
    assert versions(ClientStore(folder, MANY), 2) == [6]


def test_a_version_that_was_dropped_is_missed_only_if_it_is_needed(folder: Path) -> None:
    digests = known(folder)
    later = ClientStore(folder, MANY)
    put(later, 1, 8, timeline=Timeline(floor=6))
    later.flush()
    store = opened(folder, digests)
    assert get(store, 1, 9) == 5
    with pytest.raises(CheckpointError, match="after round 3"):
        get(store, 1, 5)


def test_what_left_memory_is_held_against_what_was_stored(folder: Path) -> None:
    store = opened(folder, known(folder), memory=0)
    put(store, 3, 6)
    shutil.copy(file_of(folder, 2), file_of(folder, 3))
    with pytest.raises(CheckpointError, match=r"3\.safetensors does not hold"):
        get(store, 3, 9)


def test_a_stop_while_layers_are_stored_leaves_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C writes a checkpoint of the round before: what it comes in the middle of must not be in the way."""
    store = ClientStore(tmp_path, MANY)
    put(store, 1, 3)

    def stop(tensors: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(layer_store, "digest", stop)
        with pytest.raises(KeyboardInterrupt):
            put(store, 1, 4)
    store.flush()
    assert get(opened(tmp_path, store.digests(3)), 1, 9) == 3


def test_a_lent_file_is_checked_and_read_again(folder: Path) -> None:
    """Another process works on client 1 and writes round 6, as an actor of a simulation does."""
    store = opened(folder, known(folder))
    store.lend("backbone", 1, ALL, 6)
    other = ClientStore(folder, MANY)
    put(other, 1, 6)
    other.flush()
    assert list(store.digests(6)["backbone"][1]) == [3, 5, 6]
    assert get(store, 1, 9) == 6
    path = file_of(folder, 1)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match=str(path)):
        opened(folder, store.digests(6)).lend("backbone", 1, ALL, 9)
