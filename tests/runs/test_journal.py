import errno
import json
import math
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprophet.errors import CheckpointError
from fedprophet.runs.journal import Journal, JournalTail, journal_line


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal.jsonl"


def test_exact_bytes(path: Path) -> None:
    journal = Journal(path)
    journal.append({"round": 1, "stage": 0, "clean": 0.1 + 0.2, "clients": (3, 1), "best": None, "on": True})
    journal.append({"round": 2, "eps": math.inf, "loss": [math.nan, -math.inf], "a": {"é": 1e-05}})
    assert path.read_bytes() == (
        b'{"round":1,"stage":0,"clean":0.30000000000000004,"clients":[3,1],"best":null,"on":true}\n'
        b'{"round":2,"eps":"inf","loss":["nan","-inf"],"a":{"\\u00e9":1e-05}}\n'
    )


def test_read(path: Path) -> None:
    journal = Journal(path)
    assert journal.read() == []
    journal.append({"round": 1, "x": (1, 2)})
    journal.append({"round": 2, "x": math.inf})
    assert journal.read() == [{"round": 1, "x": [1, 2]}, {"round": 2, "x": "inf"}]
    assert float(journal.read()[1]["x"]) == math.inf


@given(st.dictionaries(st.text(max_size=3), st.floats() | st.text(max_size=5) | st.integers(), max_size=4))
def test_every_line_is_one_line_of_strict_json(record: dict[str, object]) -> None:
    line = journal_line({**record, "round": 1})
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    values = json.loads(line, parse_constant=refuse)
    for key, value in record.items():
        if key != "round" and isinstance(value, float) and math.isfinite(value):
            assert repr(values[key]) == repr(value)


@pytest.mark.parametrize("record", [{}, {"round": "1"}, {"round": 1.0}, {"round": True}])
def test_a_record_needs_its_round(path: Path, record: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        Journal(path).append(record)
    assert not path.exists()


def test_what_json_cannot_hold_writes_nothing(path: Path) -> None:
    with pytest.raises(TypeError):
        Journal(path).append({"round": 1, "x": object()})
    assert not path.exists()


def test_every_line_is_synced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, synced = os.fsync, []

    def watched(number: int) -> None:
        synced.append(Path(f"/proc/self/fd/{number}").readlink().name)
        real(number)

    monkeypatch.setattr(os, "fsync", watched)
    journal = Journal(path)
    path.parent.mkdir()
    journal.append({"round": 1})
    assert synced == ["journal.jsonl", "run"]
    journal.append({"round": 2})
    assert synced[2:] == ["journal.jsonl"]


def filled(path: Path, rounds: int) -> Journal:
    journal = Journal(path)
    for number in range(1, rounds + 1):
        journal.append({"round": number, "x": number / 3})
    return journal


@pytest.mark.parametrize("keep", [0, 1, 3, 4, 9])
def test_truncate_keeps_the_rounds_before(path: Path, tmp_path: Path, keep: int) -> None:
    journal = filled(path, 4)
    journal.truncate(keep)
    wanted = tmp_path / "wanted.jsonl"
    wanted.touch()
    filled(wanted, min(keep, 4))
    assert path.read_bytes() == wanted.read_bytes()


def test_truncating_and_appending_again_gives_the_same_bytes(path: Path) -> None:
    journal = filled(path, 5)
    whole = path.read_bytes()
    journal.truncate(3)
    for number in (4, 5):
        journal.append({"round": number, "x": number / 3})
    assert path.read_bytes() == whole


def test_truncating_a_journal_that_is_not_there(path: Path) -> None:
    Journal(path).truncate(3)
    assert not path.exists()


def test_a_torn_last_line_at_any_byte(path: Path) -> None:
    journal = filled(path, 3)
    whole = path.read_bytes()
    start = len(b"".join(whole.splitlines(keepends=True)[:2]))
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        assert [record["round"] for record in journal.read()] == [1, 2], end
        journal.truncate(3)
        assert path.read_bytes() == whole[:start], end
    path.write_bytes(whole)
    assert len(journal.read()) == 3


@pytest.mark.parametrize("tail", [b"\0\0\0\0", b"\0\0\n", b'{"round":', b"\xff\xfe\n", b"[]\n"])
def test_rubbish_behind_the_last_line(path: Path, tail: bytes) -> None:
    journal = filled(path, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert len(journal.read()) == 2
    journal.truncate(2)
    assert path.read_bytes() == whole


def test_a_damaged_line_in_the_middle_is_an_error(path: Path) -> None:
    journal = filled(path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{oops\n" + lines[2])
    for action in (journal.read, lambda: journal.truncate(1)):
        with pytest.raises(CheckpointError, match=f"line 2 of the journal {path} is damaged"):
            action()


def test_a_full_disk_takes_back_the_torn_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(path, 1)
    whole = path.read_bytes()
    real = os.write

    def nearly_full(number: int, data: bytes) -> int:
        if len(data) > 5:
            return real(number, data[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", nearly_full)
    with pytest.raises(CheckpointError) as caught:
        journal.append({"round": 2, "x": 123456})
    assert f"cannot write {path}: No space left on device" in str(caught.value)
    assert f"fedprophet train --resume {path.parent}" in str(caught.value)
    assert path.read_bytes() == whole


def test_a_real_limit_on_the_size_of_files(path: Path) -> None:
    journal, before = Journal(path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        for number in range(1, 5):
            journal.append({"round": number})
        with pytest.raises(CheckpointError, match=f"cannot write {path}: File too large"):
            journal.append({"round": 5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"".join(b'{"round":%d}\n' % number for number in (1, 2, 3, 4))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot write"):
        Journal(tmp_path / "run" / "journal.jsonl").append({"round": 1})


def test_a_journal_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read the journal .*Is a directory"):
        Journal(tmp_path).read()


def rounds(tail: JournalTail) -> list[int]:
    return [record["round"] for record in tail.records]


def test_a_tail_reads_only_what_is_new(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, tail = Journal(path), JournalTail(path)
    assert not tail.look(), "there is no journal yet"
    for number in range(1, 50):
        journal.append({"round": number, "text": "x" * 100})
    assert tail.look()
    assert rounds(tail) == list(range(1, 50))
    assert not tail.look()
    read = []
    content = JournalTail._content
    monkeypatch.setattr(JournalTail, "_content", lambda self, first=0: read.append(first) or content(self, first))
    journal.append({"round": 50})
    assert tail.look()
    assert rounds(tail)[-1] == 50
    assert read == [
        path.stat().st_size - len(journal_line({"round": 50})) - len(journal_line({"round": 49, "text": "x" * 100}))
    ]


def test_a_tail_waits_for_the_rest_of_a_line(path: Path) -> None:
    """At any byte; and rubbish in the place of the newest line is no error as long as nothing follows."""
    path.parent.mkdir()
    first, second = journal_line({"round": 1}), journal_line({"round": 2, "text": "é"})
    for cut in range(len(second)):
        path.write_bytes(first + second[:cut])
        tail = JournalTail(path)
        tail.look()
        assert rounds(tail) == [1]
        with path.open("ab") as file:
            file.write(second[cut:])
        tail.look()
        assert rounds(tail) == [1, 2]
    path.write_bytes(first + b"{rubbish\n")
    tail = JournalTail(path)
    tail.look()
    assert rounds(tail) == [1]
    with path.open("ab") as file:
        file.write(second)
    with pytest.raises(CheckpointError, match="line 2 of the journal"):
        tail.look()


def test_a_tail_follows_a_run_that_goes_back(path: Path) -> None:
    """Its journal is cut, and it plays on: with other rounds, or with the very same ones."""
    for again in ("other", "same"):
        path.unlink(missing_ok=True)
        journal, tail = Journal(path), JournalTail(path)
        for number in range(1, 9):
            journal.append({"round": number, "text": "same"})
        tail.look()
        journal.truncate(5)
        tail.look()
        assert rounds(tail) == [1, 2, 3, 4, 5]
        journal.append({"round": 6, "text": again})
        tail.look()
        journal.truncate(3)
        for number in range(4, 9):
            journal.append({"round": number, "text": again})
        tail.look()
        assert rounds(tail) == list(range(1, 9))
        assert {record["text"] for record in tail.records[3:]} == {again}


def test_a_forgiving_tail_leaves_damaged_lines_out(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"rubbish\n" + journal_line({"round": 1}) + b"rubbish\n")
    tail = JournalTail(path, forgiving=True)
    tail.look()
    with path.open("ab") as file:
        file.write(journal_line({"round": 2}))
    tail.look()
    assert rounds(tail) == [1, 2]
