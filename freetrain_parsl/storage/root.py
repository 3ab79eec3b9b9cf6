"""The checkpoint root: whether it is writable, and whether it is the same directory on all hosts."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import tempfile
from typing import TYPE_CHECKING

from freetrain_parsl.errors import ForeignCheckpoint, InvalidSettings, StorageUnavailable
from freetrain_parsl.storage.atomic_files import TEMPORARY, write_text
from freetrain_parsl.storage.owned_files import check_root, make_private
from freetrain_parsl.storage.problems import condition_of, is_unavailable, storage_error

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

__all__ = ["check_same_root", "check_writable", "identify_root", "prepare_root", "probe_root"]

_MARKER = ".freetrain-root"
_PERMANENT_AT_FIRST = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS)  # it has not been used before
_PROBE_BYTES = 1 << 16


def prepare_root(root: Path) -> str:
    """Check that checkpoints can be written, now or later; return the root's identity (`identify_root`) if available.

    Raises
    ------
    InvalidSettings
        They cannot, or other users could write there, too; the message gives the reason.
    """
    try:
        check_writable(root)
        return identify_root(root)
    except StorageUnavailable as error:
        logger.warning("%s; training jobs wait for it or continue without saving", error)
    except OSError as error:
        logger.warning("cannot mark %s: %s", root, error.strerror or error)
    return ""


def check_writable(root: Path) -> None:
    """Check that checkpoints can be written under `root`; create it (private) if it is missing.

    Raises
    ------
    InvalidSettings
        They cannot, or other users could write there, too; the message gives the reason.
    StorageUnavailable
        They cannot at present: it is full or its file system is unavailable.
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
    """Return an identity that distinguishes this root from other directories at its path, such as an empty mount point.

    Raises
    ------
    OSError
        The file system operation failed.
    """
    marker = root / _MARKER
    if not marker.exists():
        aside = root / f"{TEMPORARY}root-{secrets.token_hex(4)}"
        write_text(aside, secrets.token_hex(16) + "\n")
        try:
            os.link(aside, marker)  # if several processes do this at a time, one succeeds
            aside.unlink()
        except FileExistsError:
            aside.unlink()
        except OSError:  # a file system without hard links
            aside.replace(marker)
    return marker.read_text(encoding="ascii").strip()


def check_same_root(root: Path, identity: str) -> None:
    """Check that on this host `root` is the directory for which `identify_root` returned `identity`.

    Raises
    ------
    StorageUnavailable
        It is missing, or a different directory.
    """
    try:
        found = (root / _MARKER).read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise storage_error(f"cannot use the checkpoint directory {root} here", root, error) from error
    if found != identity:
        raise StorageUnavailable(
            f"the checkpoint directory {root} is a different one on host {socket.gethostname()}; is it mounted there?"
        )


def probe_root(root: Path, identity: str) -> None:
    """Check that a checkpoint root that has been used before is writable.

    Parameters
    ----------
    root
        The directory.
    identity
        From `identify_root`; empty if unknown.

    Raises
    ------
    StorageUnavailable
        It is temporarily not writable.
    CheckpointError
        It is not writable.
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
