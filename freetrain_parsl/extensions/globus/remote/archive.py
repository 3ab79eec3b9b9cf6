"""A campaign's files as one archive with hashes: packed here, verified and unpacked at the site.

A zip file with ``MANIFEST.json`` (format, campaign file, size and SHA-256 of every file) and the files below
``files/``. Equal files make equal archives. Unpacking writes new regular files only, with the names of the manifest,
after all of them have been verified in memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import re
import stat
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LARGEST_ARCHIVE", "Archive", "pack", "unpack"]

LARGEST_ARCHIVE = 7 * 10**6
"""Bytes: encoded for a message they are a third more, and a message may have 10 MB."""

_LARGEST_CONTENT = 64 * 10**6  # bytes, unpacked
_MOST_FILES = 5000
_FORMAT = 1
_MANIFEST, _FILES = "MANIFEST.json", "files/"
_EPOCH = (1980, 1, 1, 0, 0, 0)
_SHOWN = 3  # largest files in a refusal
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")
_LONGEST_NAME, _LONGEST_PART = 1000, 255  # bytes
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")


@dataclass(frozen=True)
class Archive:
    """A packed campaign.

    Parameters
    ----------
    data
        The zip file.
    campaign
        Name of the campaign file in it.
    files
        Number of files.
    """

    data: bytes = field(repr=False)
    campaign: str
    files: int

    @property
    def sha256(self) -> str:
        """Hash of the whole."""
        return hashlib.sha256(self.data).hexdigest()


def pack(files: Mapping[str, Path], campaign: str) -> Archive:
    """Pack files, by their names in the archive, relative with ``/``; `campaign` is that of the campaign file.

    Raises
    ------
    InvalidInput
        There are too many, they are too large, one cannot be read, or one contains a private key.
    """
    if len(files) > _MOST_FILES:
        raise InvalidInput(
            f"the campaign has {len(files)} files, more than {_MOST_FILES}; move it into a directory of its own"
        )
    for name, path in files.items():
        if not _is_inside(name):
            raise InvalidInput(f"{str(path)!r}: this name cannot travel with the campaign; rename the file")
    contents = {name: _read(path) for name, path in sorted(files.items())}
    total = sum(map(len, contents.values()))
    if total > _LARGEST_CONTENT:
        raise _too_large(f"{_megabytes(total)} MB of files", _LARGEST_CONTENT, contents)
    entries = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    manifest = {"format": _FORMAT, "campaign": campaign, "files": entries}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        members = {_MANIFEST: json.dumps(manifest, sort_keys=True).encode()}
        members |= {f"{_FILES}{name}": content for name, content in contents.items()}
        for name, content in members.items():
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (stat.S_IFREG | 0o600) << 16
            archive.writestr(info, content)
    data = buffer.getvalue()
    if len(data) > LARGEST_ARCHIVE:
        raise _too_large(f"{_megabytes(len(data))} MB, compressed", LARGEST_ARCHIVE, contents)
    return Archive(data, campaign, len(files))


def unpack(data: bytes, sha256: str, destination: Path) -> str:
    """Verify an archive of this hash, and write its files into a new directory, private to the user.

    Return the name of the campaign file, relative to it.

    Raises
    ------
    InvalidInput
        It is damaged, or it contains anything but regular files below the destination.
    """
    if hashlib.sha256(data).hexdigest() != sha256:
        raise InvalidInput("the campaign's archive is damaged: its hash is not that of what was sent")
    try:
        campaign, contents = _verified(data)
    except InvalidInput:
        raise
    except (
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        AttributeError,
        EOFError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise InvalidInput(f"the campaign's archive is damaged: {error}") from None
    destination.mkdir(mode=0o700)
    for name, content in contents.items():
        path = destination / name
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW
            with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                file.write(content)
        except OSError as error:
            raise InvalidInput(f"{path}: cannot be unpacked: {error.strerror}") from None
    return campaign


def _verified(data: bytes) -> tuple[str, dict[str, bytes]]:
    """Return the campaign's name and the contents of all files."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        names = [member.filename for member in members]
        if len(members) > _MOST_FILES + 1 or len(set(names)) != len(names):
            raise InvalidInput("the campaign's archive has too many files, or one twice")
        if sum(member.file_size for member in members) > 2 * _LARGEST_CONTENT:
            raise InvalidInput("the campaign's archive is too large when unpacked")
        for member in members:
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind != stat.S_IFREG:
                raise InvalidInput(f"the campaign's archive: {member.filename[:80]!r} is not a regular file")
        manifest: dict[str, Any] = json.loads(archive.read(_MANIFEST))
        entries: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["format"] != _FORMAT:
            raise InvalidInput(f"the campaign's archive has format {manifest['format']!r}, not {_FORMAT}")
        if set(names) != {_MANIFEST, *(f"{_FILES}{name}" for name in entries)}:
            raise InvalidInput("the campaign's archive: its files are not those of its manifest")
        contents = {}
        for name, entry in entries.items():
            if not _is_inside(name):
                raise InvalidInput(f"the campaign's archive: the name {name[:80]!r} leaves its directory")
            content = archive.read(f"{_FILES}{name}")
            if hashlib.sha256(content).hexdigest() != entry["sha256"]:
                raise InvalidInput(f"the campaign's archive: {name[:80]!r} is damaged")
            contents[name] = content
        if manifest["campaign"] not in contents:
            raise InvalidInput("the campaign's archive has no campaign file")
        return str(manifest["campaign"]), contents


def _is_inside(name: str) -> bool:
    """Return whether a name is a relative path without detours."""
    parts = name.split("/")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:  # a name that is not UTF-8
        return False
    return (
        not _CONTROL.search(name)
        and len(name.encode()) <= _LONGEST_NAME
        and not PurePosixPath(name).is_absolute()
        and all(part not in ("", ".", "..") for part in parts)
        and max(sizes) <= _LONGEST_PART
    )


def _read(path: Path) -> bytes:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidInput(f"{path} is not a regular file; it cannot travel with the campaign")
            content = file.read(_LARGEST_CONTENT + 1)
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}; links do not travel, copy the file") from None
    if _PRIVATE_KEY.search(content):
        raise InvalidInput(f"{path} contains a private key; take it out of the campaign's directory")
    return content


def _too_large(what: str, limit: int, contents: Mapping[str, bytes]) -> InvalidInput:
    largest = sorted(contents, key=lambda name: -len(contents[name]))[:_SHOWN]
    shown = ", ".join(f"{name} ({_megabytes(len(contents[name]))} MB)" for name in largest)
    return InvalidInput(
        f"the campaign has {what}, more than the {_megabytes(limit)} MB that can travel; largest: {shown}; "
        "put data at the site, and large files outside the campaign's directory"
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}"
