"""The options of one training job, from the decorator to the session."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_args

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.protocol.codec import Count, Limit, Name, Text
from freetrain_parsl.settings_checks import check_count, check_duration

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "Code",
    "OnCodeChange",
    "SessionOptions",
    "SnapshotEvery",
    "StagedPath",
    "check_on_code_change",
    "digest_of",
    "snapshot_steps",
]

OnCodeChange: TypeAlias = Literal["refuse", "resume", "restart"]
"""What to do if a job's newest checkpoint was written by different code: raise `CodeChanged`, resume from it, or
set the old checkpoints aside and start over."""

SnapshotEvery: TypeAlias = Literal["auto"] | int | None
"""Steps between copies of a sharded state in the memory of other nodes; ``None`` or False: no copies."""

Seed: TypeAlias = Annotated[int, Limit(lambda value: isinstance(value, int) and not isinstance(value, bool))]
"""Any integer."""

_DIGITS = 16
_PYTHON = ".".join(platform.python_version_tuple()[:2])


def check_on_code_change(value: object) -> None:
    """Check that a value is an `OnCodeChange`.

    Raises
    ------
    InvalidSettings
        It is not; the message lists the choices.
    """
    if value not in get_args(OnCodeChange):
        choices = ", ".join(repr(choice) for choice in get_args(OnCodeChange))
        raise InvalidSettings(f"on_code_change is {value!r}; it is one of {choices}")


def snapshot_steps(value: object) -> int | None:
    """Return `SnapshotEvery` as a field of `SessionOptions`.

    Raises
    ------
    InvalidSettings
        It is something else.
    """
    if value == "auto":
        return 0
    if value is None or value is False:
        return None
    if not isinstance(value, int) or value is True or value < 1:
        raise InvalidSettings(f"snapshot_every is {value!r}; it is 'auto', a number of steps of at least 1, or None")
    return value


def digest_of(tokens: Iterable[str]) -> str:
    """Return a short digest of a sequence of strings."""
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(token.encode("utf-8", errors="surrogatepass") + b"\0")
    return digest.hexdigest()[:_DIGITS]


@dataclass(frozen=True)
class Code:
    """The code of a training job.

    Parameters
    ----------
    name
        ``module:qualname`` of its function.
    parts
        The parts of its code: ``module.qualname`` -> digest.
    python
        Version of Python (major and minor) that compiled it: digests of different versions cannot be compared.
    """

    name: Text
    parts: dict[Text, Text] = field(default_factory=dict)
    python: Text = _PYTHON

    @property
    def digest(self) -> str:
        """Digest of all parts."""
        return digest_of(f"{name}={digest}" for name, digest in sorted(self.parts.items()))

    @property
    def identity(self) -> str:
        """``module:qualname#digest``."""
        return f"{self.name}#{self.digest}"

    def changes_since(self, other: Code) -> list[str]:
        """Return the names of the parts that differ from those of `other`; empty if none, or if not comparable."""
        if self.python != other.python or not self.parts or not other.parts:
            return []
        names = sorted(self.parts.keys() | other.parts.keys())
        return [name for name in names if self.parts.get(name) != other.parts.get(name)]


@dataclass(frozen=True)
class StagedPath:
    """A file or directory of the user that nodes read from a copy on their own storage.

    Parameters
    ----------
    name
        Its name in the training function.
    path
        Its absolute path on the shared file system.
    key
        Identifies its content; empty: there are no copies.
    size
        Bytes.
    """

    name: Name
    path: Text
    key: Name = ""
    size: Count = 0


@dataclass(frozen=True)
class SessionOptions:
    """The options of one training job's session.

    Parameters
    ----------
    name
        The training job's name; its checkpoints are in a directory of that name.
    checkpoint_root
        Parent directory of all training jobs' checkpoints; must be visible to every node.
    seed
        Seed of all random numbers of the training job.
    checkpoint_interval
        Time between periodic checkpoints; ``None``: derived from their cost and the failure rate (Young/Daly).
    mean_time_between_failures
        Measured, for the training job as a whole; used for `checkpoint_interval`.
    keep
        Number of checkpoints to keep; with two, there is one to fall back on.
    save_margin
        Time between the completion of the last checkpoint and the closing of a node.
    threads
        CPU threads of torch in each process; ``None`` leaves torch's own choice.
    epochs
        Default number of epochs of ``session.epochs()``.
    root_identity
        Distinguishes the root from another directory of the same name, see `identify_root`; empty: unknown.
    code
        The training job's code; ``None``: unknown, and not compared with that of checkpoints.
    on_code_change
        What to do if the newest checkpoint was written by different code, see `OnCodeChange`.
    snapshot_every
        Steps from one copy of a sharded state in the memory of other nodes to the next; 0: derived from their cost and
        the failure rate; ``None``: there are no copies.
    replicas
        Number of replicas of a sharded state where there are nodes for them.
    call
        Prefix of the names that are derived from this function and these arguments; empty: the name was given.
    stage
        What nodes read from copies of their own; ``None``: unknown, since the function is called without its app.

    Raises
    ------
    InvalidSettings
        A value is out of range.
    """

    name: Name
    checkpoint_root: Path = Path()
    seed: Seed = 0
    checkpoint_interval: timedelta | None = None
    mean_time_between_failures: timedelta = timedelta(hours=1)
    keep: Count = 2
    save_margin: timedelta = timedelta(seconds=2)
    threads: Count | None = None
    epochs: Count | None = None
    root_identity: Text = ""
    code: Code | None = None
    on_code_change: OnCodeChange = "refuse"
    snapshot_every: Count | None = 0
    replicas: Count = 1
    call: Text = ""
    stage: tuple[StagedPath, ...] | None = None

    def __post_init__(self) -> None:
        who = f"training job {self.name!r}"
        object.__setattr__(self, "checkpoint_root", Path(self.checkpoint_root))
        check_count(f"{who}: seed", self.seed, least=0)
        if self.checkpoint_interval is not None:
            check_duration(f"{who}: checkpoint_interval", self.checkpoint_interval)
        if self.keep < 1:
            raise InvalidSettings(f"{who}: keep must be at least 1 checkpoint, got {self.keep}")
        if self.save_margin < timedelta(0):
            raise InvalidSettings(f"{who}: save_margin must not be negative, got {self.save_margin}")
        check_count(f"{who}: replicas", self.replicas)
        check_on_code_change(self.on_code_change)
        if self.threads is not None and self.threads < 1:
            raise InvalidSettings(f"{who}: threads must be at least 1, got {self.threads}")

    @property
    def makes_copies(self) -> bool:
        """Whether parts of a sharded state are copied to other nodes; with replicas, each of these is a copy."""
        return self.snapshot_every is not None and self.replicas == 1
