"""Downloading files and unpacking archives; interrupted work resumes, files are whole or absent."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import urllib.error
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from hoconv.files import replaced
from training import disk

CHUNK = 2**20  # bytes
TIMEOUT = 60  # seconds without a byte
ATTEMPTS = 3  # in a row without a byte
SPARE_BYTES = 2**28  # left free on the disk


class DownloadError(OSError):
    """A file cannot be downloaded; says which, why, and what to do."""


def download(urls: Sequence[str], path: Path, md5: str) -> None:
    """Downloads a file from the first address that has it, to `path`.

    Continues an interrupted download, which is in ``<path>.part``. Downloads nothing if `path` has
    the right md5 already.

    Raises:
        DownloadError: no address answers, the file's md5 is wrong, or the disk is too small.
    """
    if path.exists():
        if _md5(path) == md5:
            return
        path.unlink()  # damaged since it was checked
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    problems = []
    for url in urls:
        try:
            _fetch(url, part)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, DownloadError):
                raise
            problems.append(f"{url}: {error}")
            continue
        if (found := _md5(part)) == md5:
            os.replace(part, path)
            return
        part.unlink()
        problems.append(f"{url}: its md5 is {found}, expected {md5}")
    raise DownloadError(
        f"{path.name} could not be downloaded ({'; '.join(problems)}). Run the same command again "
        f"to continue, or put the file into {path.parent}"
    )


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a zip archive into `folder`; keeps files that exist there in their full size.

    Raises:
        DownloadError: the disk is too small.
        DiskError: a file cannot be written; the next call keeps the files before it.
    """
    with zipfile.ZipFile(archive) as source, _progress() as progress:
        members = [
            member
            for member in source.infolist()
            if not member.is_dir() and _size(folder / member.filename) != member.file_size
        ]
        size = sum(member.file_size for member in members)
        _require_space(folder, size)
        task = progress.add_task(f"Unpacking {archive.name}", total=size)
        for member in members:
            path = folder / member.filename
            # Waiting for the disk would take minutes over 118,000 pictures.
            with disk.named(path), replaced(path, flush=False) as file, source.open(member) as data:
                shutil.copyfileobj(data, file)
            progress.advance(task, member.file_size)


def _fetch(url: str, part: Path) -> None:
    """Downloads the rest of `part`; tries again until `ATTEMPTS` in a row bring nothing."""
    failures = 0
    while True:
        before = _size(part)
        try:
            if _fetch_once(url, part):
                return
            reason = OSError("the connection was closed early")
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, DownloadError):
                raise
            reason = error
        failures = failures + 1 if _size(part) == before else 0
        if failures == ATTEMPTS:
            raise reason


def _fetch_once(url: str, part: Path) -> bool:
    """Downloads the rest of `part` in one request; returns whether the file is whole now."""
    have = max(0, _size(part))
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return True  # nothing is missing, or the file is another: the md5 will tell
        raise
    with response:
        if response.status != http.client.PARTIAL_CONTENT:
            have = 0  # the server sends the whole file
        length = response.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        _require_space(part.parent, 0 if total is None else total - have)
        with part.open("ab" if have else "wb") as file, _progress() as progress:
            name = part.name.removesuffix(".part")
            task = progress.add_task(f"Downloading {name}", total=total, completed=have)
            while chunk := response.read(CHUNK):
                file.write(chunk)
                progress.advance(task, len(chunk))
    return total is None or _size(part) == total


def _require_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size + SPARE_BYTES > free:
        raise DownloadError(
            f"{folder} needs {size / 2**30:.1f} GiB and its disk has {free / 2**30:.1f} GiB free; "
            "make room, or name a folder on a larger disk with --data-dir"
        )


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )


def _size(path: Path) -> int:
    """Returns the bytes of a file, or -1 without one: an empty file is not a missing one."""
    return path.stat().st_size if path.exists() else -1


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
