"""The root of all checkpoints: whether it can be written to, and whether it is the same one everywhere."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import tempfile
from typing import TYPE_CHECKING

from freetrain_parsl.errors import ForeignCheckpoint, InvalidSettings, StorageUnavailable
from freetrain_parsl.storage.ownership import check_root, make_private
from freetrain_parsl.storage.problems import condition_of, is_unavailable, storage_error
from freetrain_parsl.storage.staging import TEMPORARY, write_text

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

__all__ = ["check_same_root", "check_writable", "identify_root", "prepare_root", "probe_root"]

_MARKER = ".freetrain-root"
_PERMANENT_AT_FIRST = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS)  # nobody has used it before
_PROBE_BYTES = 1 << 16


def prepare_root(root: Path) -> str:
    """Make sure that checkpoints can be written, now or later, and return what `identify_root` does, if it can be had.

    Raises
    ------
    InvalidSettings
        They cannot, or other users could write there too; the message says why.
    """
    try:
        check_writable(root)
        return identify_root(root)
    except StorageUnavailable as error:
        logger.warning("%s; trainings wait for it, or go on without saving", error)
    except OSError as error:
        logger.warning("cannot mark %s: %s", root, error.strerror or error)
    return ""


def check_writable(root: Path) -> None:
    """Make sure that checkpoints can be written under `root`, creating it (private) if it is missing.

    Raises
    ------
    InvalidSettings
        They cannot, or other users could write there too; the message says why.
    StorageUnavailable
        They cannot for now: it is full, or its file system does not work.
    """
    refusal = f"cannot write checkpoints in {root}"
    try:
        make_private(root)
        check_root(root)
        with tempfile.NamedTemporaryFile(dir=root, prefix=TEMPORARY) as probe:
            probe.write(b"probe")
            probe.flush()
            os.fsync(probe.fileno())
    except ForeignCheckpoint as error:
        raise InvalidSettings(f"{refusal}: {error}") from error
    except OSError as error:
        if is_unavailable(error) and error.errno not in _PERMANENT_AT_FIRST:
            raise StorageUnavailable(f"{refusal}: {error.strerror}", condition_of(root, error)) from error
        raise InvalidSettings(f"{refusal} ({error.strerror or error}); give a writable directory") from error


def identify_root(root: Path) -> str:
    """Return what tells this root from any other directory of the same name, such as a mount point without its mount.

    Raises
    ------
    OSError
        The file system refuses.
    """
    marker = root / _MARKER
    if not marker.exists():
        aside = root / f"{TEMPORARY}root-{secrets.token_hex(4)}"
        write_text(aside, secrets.token_hex(16) + "\n")
        try:
            os.link(aside, marker)  # of several who do this at a time, one comes first
            aside.unlink()
        except FileExistsError:
            aside.unlink()
        except OSError:  # a file system without hard links
            aside.replace(marker)
    return marker.read_text(encoding="ascii").strip()


def check_same_root(root: Path, identity: str) -> None:
    """Make sure that `root` is, on this host, the directory that `identify_root` was asked about.

    Raises
    ------
    StorageUnavailable
        It is missing, or another one.
    """
    try:
        found = (root / _MARKER).read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise storage_error(f"cannot use the checkpoint directory {root} here", root, error) from error
    if found != identity:
        raise StorageUnavailable(
            f"the checkpoint directory {root} is another one on host {socket.gethostname()}; is it mounted there?"
        )


def probe_root(root: Path, identity: str) -> None:
    """Make sure that the root of all checkpoints, which has been used before, can be written to.

    Parameters
    ----------
    root
        The directory.
    identity
        From `identify_root`; empty: not known.

    Raises
    ------
    StorageUnavailable
        It cannot for now.
    CheckpointError
        It cannot.
    """
    if identity:
        check_same_root(root, identity)
    try:
        with tempfile.NamedTemporaryFile(dir=root, prefix=TEMPORARY) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise storage_error(f"cannot write checkpoints in {root}", root, error) from error
