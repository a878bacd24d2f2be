"""Downloads from a server of our own that can misbehave, and archives that are not safe."""

import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from fedprophet.data import fetch as module
from fedprophet.data.fetch import Remote, alone, cache_home, fetch, members, unpack
from fedprophet.errors import DataError

CONTENT = bytes(range(256)) * 4000
OTHERWISE = "Without a network: put it there"


class Server:
    """Serves CONTENT; `ranges` says whether it can go on in the middle, `cut` after how many bytes it hangs up."""

    def __init__(self):
        self.ranges, self.cut, self.status = True, None, 200
        self.asked = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *arguments):
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_port}/models/file.bin"

    def answer(self, request):
        wanted = request.headers.get("Range")
        self.asked.append(wanted)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        status = 416 if start >= len(CONTENT) else 206 if start else self.status
        body = CONTENT[start:] if status in (200, 206) else b"no"
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[: self.cut])

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    yield server
    server.close()


@pytest.fixture
def remote(server):
    return Remote(server.url, "md5", hashlib.md5(CONTENT).hexdigest())


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_a_file_is_fetched_once(server, remote, tmp_path):
    folder = tmp_path / "new" / "folder"
    path = fetch(remote, folder, OTHERWISE)
    assert path == folder / "file.bin"
    assert path.read_bytes() == CONTENT
    assert fetch(remote, folder, OTHERWISE) == path
    assert server.asked == [None]
    assert names(folder) == ["file.bin"]


def test_the_beginning_of_a_hash_is_enough(server, tmp_path):
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert fetch(Remote(server.url, "sha256", digest[:8]), tmp_path, OTHERWISE).read_bytes() == CONTENT
    other = f"{int(digest[0], 16) ^ 1:x}{digest[1:8]}"
    with pytest.raises(DataError, match="is not the published file"):
        fetch(Remote(server.url, "sha256", other), tmp_path, OTHERWISE)


def test_what_is_there_is_verified_and_never_overwritten(server, remote, tmp_path):
    (tmp_path / "file.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"file\.bin is not the published file: its md5 is .* Delete it and try again"):
        fetch(remote, tmp_path, OTHERWISE)
    assert (tmp_path / "file.bin").read_bytes() == b"mine"
    assert server.asked == []


def test_a_download_that_breaks_off_is_continued(server, remote, tmp_path):
    server.cut = 300_000
    with pytest.raises(DataError, match=r"broke off after 300000 of 1024000 bytes\. Run the command again"):
        fetch(remote, tmp_path, OTHERWISE)
    assert names(tmp_path) == [".file.bin.part"]
    server.cut = 400_000
    with pytest.raises(DataError, match="broke off after 700000 of 1024000 bytes"):
        fetch(remote, tmp_path, OTHERWISE)
    server.cut = None
    assert fetch(remote, tmp_path, OTHERWISE).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-", "bytes=700000-"]
    assert names(tmp_path) == ["file.bin"]


def test_a_server_that_cannot_continue_starts_again(server, remote, tmp_path):
    (tmp_path / ".file.bin.part").write_bytes(b"something else")
    server.ranges = False
    assert fetch(remote, tmp_path, OTHERWISE).read_bytes() == CONTENT


@pytest.mark.parametrize("extra", [b"", b"more"])
def test_a_part_that_is_whole_or_longer(server, remote, tmp_path, extra):
    (tmp_path / ".file.bin.part").write_bytes(CONTENT + extra)
    assert fetch(remote, tmp_path, OTHERWISE).read_bytes() == CONTENT
    assert server.asked == [f"bytes={len(CONTENT) + len(extra)}-", None]


def test_a_wrong_part_is_thrown_away(server, remote, tmp_path):
    (tmp_path / ".file.bin.part").write_bytes(b"something else")
    with pytest.raises(DataError, match=f"is not the published file: its md5 is another one.*{OTHERWISE}"):
        fetch(remote, tmp_path, OTHERWISE)
    assert names(tmp_path) == []
    assert fetch(remote, tmp_path, OTHERWISE).read_bytes() == CONTENT


def test_without_a_network_one_line_says_what_to_do(server, remote, tmp_path):
    server.close()
    with pytest.raises(DataError) as caught:
        fetch(remote, tmp_path, OTHERWISE)
    assert str(caught.value) == f"cannot fetch {remote.url}: Connection refused. {OTHERWISE}"


def test_an_address_that_is_gone(server, remote, tmp_path):
    server.status = 404
    with pytest.raises(DataError, match=rf"cannot fetch .*: Not Found\. {OTHERWISE}"):
        fetch(remote, tmp_path, OTHERWISE)
    assert names(tmp_path) == []


def test_a_connection_that_goes_silent(server, remote, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    given_up = threading.Event()
    monkeypatch.setattr(server, "answer", lambda request: given_up.wait())
    with pytest.raises(DataError, match=r"cannot fetch .*timed out"):
        fetch(remote, tmp_path, OTHERWISE)
    given_up.set()


def test_a_full_disk(server, remote, tmp_path):
    (tmp_path / ".file.bin.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"cannot write .*\.file\.bin\.part: No space left on device\. Make room"):
        fetch(remote, tmp_path, OTHERWISE)
    assert not (tmp_path / "file.bin").exists()


def test_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDPROPHET_CACHE", str(tmp_path / "own"))
    assert cache_home() == tmp_path / "own"
    monkeypatch.delenv("FEDPROPHET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_home() == tmp_path / "xdg" / "fedprophet"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_home() == tmp_path / ".cache" / "fedprophet"


def test_one_at_a_time(tmp_path, caplog, wait_until):
    order = []

    def second():
        with alone(tmp_path):
            order.append("second")

    thread = threading.Thread(target=second)
    with alone(tmp_path):
        thread.start()
        wait_until(lambda: caplog.messages)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert caplog.messages == [f"another process is working in {tmp_path}: waiting for it"]


# ---------------------------------------------------------------- archives


def archive_of(path, entries, mode="w"):
    """Write an archive of names and contents; a content may be a TarInfo's type and target instead."""
    with tarfile.open(path, mode) as tar:
        for name, content in entries:
            entry = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
            else:
                entry.type, entry.linkname = content
                tar.addfile(entry)
    return path


def test_only_the_folder_asked_for_is_unpacked(tmp_path):
    entries = [("top", (tarfile.DIRTYPE, "")), ("top/a/1.jpg", b"one"), ("top/2.jpg", b"two"), ("README", b"no")]
    archive = archive_of(tmp_path / "a.tar", entries)
    folder = tmp_path / "out"
    folder.mkdir()
    assert unpack(archive, folder, "top") == folder / "top"
    found = {str(path.relative_to(folder)): path.read_bytes() for path in (folder / "top").rglob("*") if path.is_file()}
    assert found == {"top/a/1.jpg": b"one", "top/2.jpg": b"two"}


def test_what_is_unpacked_is_not_unpacked_again(tmp_path):
    archive = archive_of(tmp_path / "a.tar", [("top/1.jpg", b"one")])
    unpack(archive, tmp_path, "top")
    (tmp_path / "top" / "1.jpg").write_bytes(b"changed")
    archive.unlink()
    unpack(archive, tmp_path, "top")
    assert (tmp_path / "top" / "1.jpg").read_bytes() == b"changed"


@pytest.mark.parametrize("name", ["../evil", "top/../../evil", "/tmp/evil", "top\\..\\evil"])
def test_a_name_that_leads_out_is_refused(tmp_path, name):
    folder = tmp_path / "out"
    folder.mkdir()
    archive = archive_of(tmp_path / "a.tar", [("top/1.jpg", b"one"), (name, b"evil")])
    with pytest.raises(DataError, match="is not safe to unpack"):
        unpack(archive, folder, "top")
    assert names(folder) == []
    assert names(tmp_path) == ["a.tar", "out"]


def test_a_link_cannot_lead_out(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    folder.mkdir()
    entries = [
        ("top/link", (tarfile.SYMTYPE, str(outside))),
        ("top/hard", (tarfile.LNKTYPE, "top/link")),
        ("top/pipe", (tarfile.FIFOTYPE, "")),
        ("top/link/evil", b"evil"),
    ]
    unpack(archive_of(tmp_path / "a.tar", entries), folder, "top")
    assert names(outside) == []
    assert names(folder / "top") == ["link"]
    assert not (folder / "top" / "link").is_symlink()
    assert (folder / "top" / "link" / "evil").read_bytes() == b"evil"


def test_a_broken_or_foreign_archive_leaves_nothing(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    archive = archive_of(tmp_path / "a.tar", [("top/1.jpg", b"1" * 50_000), ("top/2.jpg", b"2" * 50_000)])
    archive.write_bytes(archive.read_bytes()[:70_000])
    with pytest.raises(DataError, match="is damaged or not whole"):
        unpack(archive, folder, "top")
    assert names(folder) == []
    other = archive_of(tmp_path / "b.tar", [("else/1.jpg", b"1")])
    with pytest.raises(DataError, match="holds no folder top"):
        unpack(other, folder, "top")
    assert names(folder) == []


def test_members_are_read_in_place(tmp_path):
    archive = archive_of(tmp_path / "a.tgz", [("a/1", b"abcdef"), ("a/2", (tarfile.SYMTYPE, "1"))], mode="w:gz")
    found = [(member.name, member.size, member.read(2), member.read()) for member in members(archive)]
    assert found == [("a/1", 6, b"ab", b"cdef")]
    assert names(tmp_path) == ["a.tgz"]
