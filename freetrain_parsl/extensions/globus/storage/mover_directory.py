"""What the mover has on disk: its directory in the checkpoint directory, and its state in the run directory.

In the checkpoint directory are what leaves for home, and what has arrived from there.

::

    <root>/.freetrain-mover/out/<training>/<generation>/step-…/        files of a checkpoint (hard links), no manifest
                            out/<training>/<generation>/step-….json    its manifest
                            in/<training>/<generation>/step-…/         a checkpoint as it arrives
                            generations/<training>                     generation of the checkpoints of this site

Hard links keep the files of a checkpoint until they are copied, although the training job removes old checkpoints.
Files of checkpoints are never changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from freetrain_parsl.errors import DamagedCheckpoint, InvalidInput
from freetrain_parsl.extensions.globus.storage.carrier import CopyJob, CopyKind, Parcel, step_of
from freetrain_parsl.extensions.globus.storage.collections import CopyItem
from freetrain_parsl.extensions.globus.storage.names import CHECKPOINTS, generation_name
from freetrain_parsl.storage.atomic_files import replace_text, sync_directory
from freetrain_parsl.storage.entry import MANIFEST, Entry
from freetrain_parsl.storage.owned_files import check_tree, make_private, read_small_file
from freetrain_parsl.storage.posix import CheckpointDirectory
from freetrain_parsl.storage.problems import storage_error
from freetrain_parsl.storage.stored_json import parse_stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from freetrain_parsl.extensions.globus.storage.collections import GlobusSettings

__all__ = [
    "EXCHANGE",
    "MOST_MEASURED",
    "STATE_FILE",
    "CopyTask",
    "MeasuredCopy",
    "MoverDirectory",
    "MoverPace",
    "MoverState",
    "copy_task",
]

EXCHANGE = ".freetrain-mover"

_LARGEST_MANIFEST = 256 * 2**20  # bytes; it is read whole
_DEEPEST = 20  # directories in one another

_NUMBER = re.compile(r"[0-9]{1,10}")


class MoverDirectory:
    """The mover's directory of one checkpoint directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root / EXCHANGE

    def probe(self) -> str:
        """Create a directory with a new name, which must appear on the collection; return its name.

        Raises
        ------
        CheckpointError
            The file system operation failed.
        """
        name = f"probe-{secrets.token_hex(8)}"
        try:
            make_private(self._path / name)
        except OSError as error:
            raise storage_error(f"cannot write in {self._path}", self._root, error) from error
        return name

    def end_probe(self, name: str) -> None:
        """Remove it."""
        with contextlib.suppress(OSError):
            (self._path / name).rmdir()

    # Checkpoints of this site.

    def newest(self, training: str) -> Entry | None:
        """Return the newest checkpoint of a training job here whose files are there with their sizes."""
        for entry in CheckpointDirectory(self._root, unquote(training)).entries():
            with contextlib.suppress(DamagedCheckpoint):
                entry.check_sizes()
                return entry
        return None

    def generation(self, training: str) -> int:
        """Return the generation of the checkpoints here; 0 if none has been claimed."""
        try:
            text = (self._path / "generations" / training).read_text(encoding="ascii").strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return 0
        except OSError as error:
            raise storage_error(f"cannot read {self._path}", self._root, error) from error
        return int(text) if _NUMBER.fullmatch(text) else 0

    def set_generation(self, training: str, generation: int) -> None:
        """Record the generation of the checkpoints here."""
        directory = self._path / "generations"
        try:
            make_private(directory)
            replace_text(directory / training, f"{generation}\n")
        except OSError as error:
            raise storage_error(f"cannot write in {directory}", self._root, error) from error

    # What leaves.

    def pack(self, training: str, generation: int, entry: Entry) -> Parcel:
        """Put the files of a checkpoint aside for copying.

        Raises
        ------
        CheckpointError
            It has been removed or is damaged, or the file system operation failed.
        """
        manifest = entry.check_sizes()
        target = self.outgoing(Parcel(training, generation, entry.path.name))
        try:
            shutil.rmtree(target, ignore_errors=True)
            make_private(target)
            for name in manifest["files"]:
                make_private((target / name).parent)
                _link(entry.path / name, target / name)
            _link(entry.path / MANIFEST, target.with_name(f"{target.name}.json"))
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{entry.path} was removed before it could be copied") from error
        except OSError as error:
            raise storage_error(f"cannot write in {target}", self._root, error) from error
        return Parcel(training, generation, entry.path.name, int(manifest["bytes"]))

    def sizes(self, parcel: Parcel) -> dict[str, int]:
        """Return the files of a packed checkpoint, its manifest among them, and their bytes; empty if there is none."""
        packed = self.outgoing(parcel)
        try:
            found = {
                path.relative_to(packed).as_posix(): path.stat().st_size for path in packed.rglob("*") if path.is_file()
            }
            return found | {MANIFEST: packed.with_name(f"{packed.name}.json").stat().st_size}
        except FileNotFoundError:  # removed by the user
            return {}
        except OSError as error:
            raise storage_error(f"cannot read {packed}", self._root, error) from error

    def outgoing(self, parcel: Parcel) -> Path:
        """Return the directory of a packed checkpoint."""
        return self._path / "out" / parcel.training / generation_name(parcel.generation) / parcel.name

    def keep_only(self, parcels: Iterable[Parcel]) -> None:
        """Remove all packed checkpoints but these."""
        kept = {self.outgoing(parcel) for parcel in parcels}
        for path in (self._path / "out").glob("*/*/*"):
            if path not in kept and path.with_name(path.name.removesuffix(".json")) not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def forget_arrivals(self) -> None:
        """Remove what an earlier driver was fetching."""
        shutil.rmtree(self._path / "in", ignore_errors=True)

    # What arrives.

    def arriving(self, parcel: Parcel) -> Path:
        """Return the directory to which a checkpoint is copied."""
        return self._path / "in" / parcel.training / generation_name(parcel.generation) / parcel.name

    def expect(self, parcel: Parcel) -> None:
        """Prepare for a checkpoint that will be copied here."""
        path = self.arriving(parcel)
        shutil.rmtree(path, ignore_errors=True)
        try:
            make_private(path.parent)
        except OSError as error:
            raise storage_error(f"cannot write in {path.parent}", self._root, error) from error

    def accept(self, parcel: Parcel) -> None:
        """Verify a checkpoint that has arrived, byte by byte, and make it the newest of its training job.

        Raises
        ------
        CheckpointError
            It is damaged, of another version, or the file system operation failed.
        """
        path = self.arriving(parcel)
        try:
            _check_kinds(path)
            _make_private_tree(path)
            check_tree(path)
            if (path / MANIFEST).stat().st_size > _LARGEST_MANIFEST:
                raise DamagedCheckpoint(f"{path} has not arrived: {MANIFEST} is larger than any manifest")
        except OSError as error:
            raise DamagedCheckpoint(f"{path} has not arrived: {error.strerror}") from error
        directory = CheckpointDirectory(self._root, unquote(parcel.training))
        step, revision = step_of(parcel.name)
        Entry(step, revision, path).verify()
        directory.open()
        try:
            directory.adopt(path, directory.entry(step, revision))
        finally:
            directory.close()


def _check_kinds(path: Path, depth: int = 0) -> None:
    """Refuse what is neither a directory nor a regular file: opening a FIFO blocks, a link leads elsewhere."""
    kind = path.lstat().st_mode
    if stat.S_ISDIR(kind) and depth < _DEEPEST:
        for child in path.iterdir():
            _check_kinds(child, depth + 1)
    elif not stat.S_ISREG(kind):
        raise DamagedCheckpoint(f"{path} has arrived, which is no file of a checkpoint; it is not used")


def _make_private_tree(path: Path) -> None:
    """Take away the permissions that the collection's umask gave to others, and make the files durable."""
    for folder, _, files in os.walk(path):
        Path(folder).chmod(0o700)
        for name in files:
            file = Path(folder, name)
            file.chmod(0o600)
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        sync_directory(Path(folder))
    if not path.is_dir():
        raise FileNotFoundError(2, "no such directory")


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except PermissionError:  # a file system without hard links
        shutil.copy2(source, target)


@dataclass(frozen=True)
class CopyTask:
    """A copy from one collection to another as a task of Globus Transfer, or a removal of paths at home.

    Both collections are home's for a removal.
    """

    source: str
    target: str
    items: tuple[CopyItem, ...] = ()
    paths: tuple[str, ...] = ()


def copy_task(job: CopyJob, settings: GlobusSettings) -> CopyTask:
    """Return the task of a job: data to home, then its manifests, fetches from home, or removals there."""
    local, home = settings.local, settings.home
    there = [home.join(CHECKPOINTS, *parcel.path) for parcel in job.parcels]
    side = "in" if job.kind is CopyKind.FETCH else "out"
    here = [local.join(EXCHANGE, side, *parcel.path) for parcel in job.parcels]
    pairs = list(zip(here, there, strict=True))
    match job.kind:
        case CopyKind.REMOVE:
            return CopyTask(home.collection, home.collection, paths=tuple(there))
        case CopyKind.FETCH:
            items = [CopyItem(remote, one, recursive=True) for one, remote in pairs]
            return CopyTask(home.collection, local.collection, tuple(items))
        case CopyKind.DATA:
            items = [CopyItem(one, remote, recursive=True) for one, remote in pairs]
        case CopyKind.MANIFEST:
            items = [CopyItem(f"{one}.json", f"{remote}/manifest.json", recursive=False) for one, remote in pairs]
    return CopyTask(local.collection, home.collection, tuple(items))


STATE_FILE = "globus.json"

MOST_MEASURED = 50
"""Copies whose duration is kept."""

_VERSION = 1


@dataclass(frozen=True)
class MeasuredCopy:
    """A copy from home, or to it, that has succeeded: its bytes, and the seconds until its end was noticed."""

    from_home: bool
    size: int
    seconds: float


@dataclass(frozen=True)
class MoverState:
    """The state of a run's mover.

    Parameters
    ----------
    jobs
        Active ones.
    lines
        What it is doing, for the user.
    measured
        The last copies that have succeeded, the newest last.
    whole
        The newest checkpoint of each training job that home has listed as whole: a later listing may leave it out.
    """

    jobs: Sequence[CopyJob] = ()
    lines: Sequence[str] = field(default_factory=tuple)
    measured: Sequence[MeasuredCopy] = ()
    whole: Sequence[Parcel] = ()

    def document(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "version": _VERSION,
            "jobs": [job.as_json() for job in self.jobs],
            "lines": list(self.lines),
            "measured": [[copy.from_home, copy.size, copy.seconds] for copy in self.measured],
            "whole": [vars(parcel) for parcel in self.whole],
        }

    def write(self, run_dir: Path) -> None:
        """Replace the file durably.

        Raises
        ------
        OSError
            The file system operation failed.
        """
        replace_text(run_dir / STATE_FILE, json.dumps(self.document(), indent=1) + "\n")

    @classmethod
    def read(cls, run_dir: Path) -> MoverState:
        """Read the file; an empty state if there is none.

        Raises
        ------
        InvalidInput
            It is damaged.
        """
        path = run_dir / STATE_FILE
        try:
            document: Any = parse_stored(read_small_file(path))
            if document["version"] != _VERSION:
                raise InvalidInput(f"{path} is of another version of FreeTrain")
            measured = (
                MeasuredCopy(bool(fetched), int(size), float(seconds))
                for fetched, size, seconds in document["measured"]
            )
            jobs = (CopyJob.from_json(job) for job in document["jobs"])
            whole = tuple(map(Parcel.from_json, document["whole"]))
            return cls(tuple(jobs), tuple(map(str, document["lines"])), tuple(measured), whole)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"{path} cannot be read ({error}); remove it to copy all checkpoints again") from error


@dataclass(frozen=True)
class MoverPace:
    """Seconds between the mover's actions.

    Parameters
    ----------
    turn
        Between passes of its loop.
    scan
        Between looks for new checkpoints of training jobs that have ended or leave.
    copies
        Between copies of running training jobs, at least; those of all training jobs are made together. A site that
        stops answering loses its training jobs at the end of the lease, so what is trained between copies is little
        beside that.
    request
        Between two requests to Globus, at least.
    poll_least, poll_most
        Between questions for the state of a task: short at first, then a tenth of its age.
    retry, longest
        Until something that failed is tried again: first, and at most.
    """

    turn: float
    scan: float
    copies: float
    request: float
    poll_least: float
    poll_most: float
    retry: float
    longest: float

    @classmethod
    def of(cls, lease: float) -> MoverPace:
        """Return the pace that suits a lease."""
        return cls(
            turn=min(0.25, lease / 100),
            scan=min(2.0, lease / 20),
            copies=min(120.0, lease / 5),
            request=min(0.1, lease / 500),
            poll_least=min(2.0, lease / 20),
            poll_most=min(30.0, lease / 10),
            retry=min(5.0, lease / 20),
            longest=min(120.0, lease / 5),
        )
