"""Downloads from a server in this process: no network."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
import torchvision

CONTENT = bytes(range(256)) * 20
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `files` by path; `requests` are (path, first byte asked for).

    The first answers end after `cut[0]`, `cut[1]`, ... bytes, and with `ranges` off every answer
    begins at the first byte.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"/file": CONTENT}
        self.requests: list[tuple[str, int]] = []
        self.cut: list[int] = []
        self.ranges = True

    def url(self, path: str = "") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        asked = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        self.server.requests.append((self.path, first))
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        if not self.server.ranges:
            first = 0
        if first >= len(content) and first:
            self.send_error(416)
            return
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        end = first + self.server.cut.pop(0) if self.server.cut else None
        self.wfile.write(content[first:end])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def downloads(script) -> ModuleType:
    return script("downloads")


@pytest.fixture
def prepare_data(script) -> ModuleType:
    return script("prepare_data")


def test_a_file_is_fetched_once(server, downloads, tmp_path):
    path = tmp_path / "new" / "file"
    for _ in range(2):
        downloads.download([server.url("/file")], path, MD5)
        assert path.read_bytes() == CONTENT
    assert server.requests == [("/file", 0)]
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_a_file_that_was_damaged_is_fetched_again(server, downloads, tmp_path):
    (tmp_path / "file").write_bytes(CONTENT[:-1] + b"x")
    downloads.download([server.url("/file")], tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_broken_connection_is_resumed(server, downloads, tmp_path):
    server.cut = [1000, 0, 500]
    downloads.download([server.url("/file")], tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [first for _, first in server.requests] == [0, 1000, 1000, 1500]


def test_an_interrupted_download_is_continued(server, downloads, tmp_path):
    server.cut = [3000, 0, 0, 0, 0]
    with pytest.raises(downloads.DownloadError, match="Run the same command again"):
        downloads.download([server.url("/file")], tmp_path / "file", MD5)
    assert not (tmp_path / "file").exists()
    assert (tmp_path / "file.part").stat().st_size == 3000
    server.cut, server.requests = [], []
    downloads.download([server.url("/file")], tmp_path / "file", MD5)
    assert server.requests == [("/file", 3000)]
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert not (tmp_path / "file.part").exists()


def test_a_whole_part_is_only_checked(server, downloads, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT)
    downloads.download([server.url("/file")], tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_server_without_ranges_begins_again(server, downloads, tmp_path):
    server.ranges = False
    server.cut = [1000]
    downloads.download([server.url("/file")], tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_wrong_checksum_is_an_error_and_leaves_nothing(server, downloads, tmp_path):
    with pytest.raises(downloads.DownloadError, match=f"its md5 is {MD5}, expected 0123"):
        downloads.download([server.url("/file")], tmp_path / "file", "0123")
    assert not list(tmp_path.iterdir())


def test_the_next_mirror_is_asked(server, downloads, tmp_path):
    server.files["/wrong"] = b"<html>moved</html>"
    urls = [server.url(path) for path in ("/missing", "/wrong", "/file")]
    downloads.download(urls, tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    with pytest.raises(downloads.DownloadError, match=r"/missing: HTTP Error 404.*/wrong: its md5"):
        downloads.download(urls[:2], tmp_path / "other", MD5)


def test_a_disk_that_is_too_small_is_found_before_the_download(
    server, downloads, tmp_path, monkeypatch
):
    usage = type("usage", (), {"free": downloads.SPARE_BYTES + 100})
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(downloads.DownloadError, match=r"GiB free; make room, or .*--data-dir"):
        downloads.download([server.url("/file")], tmp_path / "file", MD5)
    assert not (tmp_path / "file").exists()


def archive(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in files.items():
            target.writestr(name, data)
    return content.getvalue()


def test_unpacking_continues(downloads, tmp_path):
    files = {"a/one": b"1", "a/b/two": b"22", "empty": b""}
    (tmp_path / "x.zip").write_bytes(archive(files))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"1")
    before = (tmp_path / "a" / "one").stat().st_mtime_ns
    (tmp_path / "a" / "b").mkdir()
    (tmp_path / "a" / "b" / "two").write_bytes(b"2")  # cut
    downloads.unpack(tmp_path / "x.zip", tmp_path)
    for name, content in files.items():
        assert (tmp_path / name).read_bytes() == content
    assert (tmp_path / "a" / "one").stat().st_mtime_ns == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "empty", "x.zip"]


def test_mnist_is_downloaded_to_where_it_is_read(server, prepare_data, tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [server.url("/mirror/")])
    md5 = {}
    for name in list(prepare_data.MNIST_MD5):
        content = gzip.compress(name.encode(), mtime=0)
        server.files[f"/mirror/{name}"] = content
        md5[name] = hashlib.md5(content).hexdigest()
    monkeypatch.setattr(prepare_data, "MNIST_MD5", md5)
    assert prepare_data.main(["mnist", "--data-dir", str(tmp_path)]) == 0
    assert {p.name for p in (tmp_path / "mnist").iterdir()} == set(md5)


@pytest.fixture
def published(server, prepare_data, tmp_path, monkeypatch) -> Path:
    """The generated data set, served as COCO's archives; where it is downloaded to."""
    tiny = prepare_data.COCOTiny(tmp_path / "tiny", task="captions", image_size=8, batch_size=1)
    tiny.prepare_data()
    md5 = {}
    for name, folder in (
        ("annotations/annotations_trainval2017.zip", "annotations"),
        ("zips/val2017.zip", "val2017"),
        ("zips/train2017.zip", "train2017"),
    ):
        paths = sorted((tiny.splits.files.root / folder).iterdir())
        content = archive({f"{folder}/{p.name}": p.read_bytes() for p in paths})
        server.files[f"/{name}"] = content
        md5[name] = hashlib.md5(content).hexdigest()
    monkeypatch.setattr(prepare_data, "COCO_MD5", {2017: md5})
    monkeypatch.setattr(prepare_data, "COCO_HOST", server.url())
    monkeypatch.setattr(prepare_data.COCO, "published_categories", tiny.published_categories)
    return tmp_path / "data"


def test_coco_is_downloaded_unpacked_checked_and_decoded(
    server, prepare_data, published, tmp_path, capsys
):
    command = ["coco", "--data-dir", str(published), "--cache-dir", str(tmp_path / "cache")]
    assert prepare_data.main([*command, "--image-size", "16"]) == 0
    assert len(list((published / "coco" / "train2017").iterdir())) == 512
    assert not list((published / "coco").glob("*.zip"))
    assert list((tmp_path / "cache").glob("images-*/images.npy"))
    assert len(server.requests) == 3
    assert prepare_data.main(command) == 0, "the second time nothing is left to do"
    assert len(server.requests) == 3
    assert "COCO 2017 is ready" in capsys.readouterr().out


def unpack(server, published, *names: str) -> Path:
    """Unpacks archives as somebody else would, without a trace."""
    folder = published / "coco"
    for name in names:
        with zipfile.ZipFile(io.BytesIO(server.files[name])) as file:
            file.extractall(folder)
    return folder


def test_what_is_unpacked_already_is_not_downloaded(server, prepare_data, published, tmp_path):
    unpack(server, published, *(name for name in server.files if name != "/file"))
    command = ["coco", "--data-dir", str(published), "--cache-dir", str(tmp_path / "cache")]
    assert prepare_data.main(command) == 0
    assert server.requests == []


def test_an_image_that_is_missing_is_downloaded(server, prepare_data, published, tmp_path, capsys):
    folder = unpack(server, published, *(name for name in server.files if name != "/file"))
    next((folder / "val2017").iterdir()).unlink()
    command = ["coco", "--data-dir", str(published), "--cache-dir", str(tmp_path / "cache")]
    assert prepare_data.main(command) == 0
    assert [path for path, _ in server.requests] == ["/zips/val2017.zip"]
    assert "val2017 lacks 1 of 128 images" in capsys.readouterr().out
    assert len(list((folder / "val2017").iterdir())) == 128


def test_a_download_that_fails_is_one_line(server, prepare_data, published, tmp_path, capsys):
    del server.files["/zips/val2017.zip"]
    command = ["coco", "--data-dir", str(published), "--cache-dir", str(tmp_path / "cache")]
    assert prepare_data.main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: val2017.zip could not be downloaded")


def test_an_archive_that_cannot_be_unpacked_is_one_line(
    server, prepare_data, published, tmp_path, capsys
):
    (published / "coco").mkdir(parents=True)
    (published / "coco" / "val2017").touch()  # where the folder of pictures goes
    command = ["coco", "--data-dir", str(published), "--cache-dir", str(tmp_path / "cache")]
    assert prepare_data.main(command) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"Error: .*val2017.* cannot be written", line)


def test_coco_tiny_is_made(prepare_data, tmp_path, capsys):
    assert prepare_data.main(["coco_tiny", "--cache-dir", str(tmp_path)]) == 0
    assert "coco_tiny is ready" in capsys.readouterr().out
    assert len(list(tmp_path.glob("coco_tiny-*/coco/val2017/*.jpg"))) == 128
