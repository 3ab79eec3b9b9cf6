"""The options of one training, from the decorator to the session."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_args

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.protocol.fields import Count, Limit, Name, Text

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Code", "OnCodeChange", "SessionOptions", "check_on_code_change", "digest_of"]

OnCodeChange: TypeAlias = Literal["refuse", "resume", "restart"]
"""What becomes of a training whose newest checkpoint was written by other code: it ends with `CodeChanged`, goes on
from it, or begins anew with the old checkpoints set aside."""

Seed: TypeAlias = Annotated[int, Limit(lambda value: isinstance(value, int) and not isinstance(value, bool))]
"""Any integer."""

_DIGITS = 16
_PYTHON = ".".join(platform.python_version_tuple()[:2])


def check_on_code_change(value: object) -> None:
    """Refuse what is no `OnCodeChange`.

    Raises
    ------
    InvalidSettings
        It names the choices.
    """
    if value not in get_args(OnCodeChange):
        choices = ", ".join(repr(choice) for choice in get_args(OnCodeChange))
        raise InvalidSettings(f"on_code_change is {value!r}; it is one of {choices}")


def digest_of(tokens: Iterable[str]) -> str:
    """Return a short digest of a sequence of texts."""
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(token.encode("utf-8", errors="surrogatepass") + b"\0")
    return digest.hexdigest()[:_DIGITS]


@dataclass(frozen=True)
class Code:
    """The code of a training.

    Parameters
    ----------
    name
        ``module:qualname`` of its function.
    parts
        What counts as its code: ``module.qualname`` -> digest.
    python
        Version of Python (major and minor) that compiled it: digests of different versions cannot be compared.
    """

    name: Text
    parts: dict[Text, Text] = field(default_factory=dict)
    python: Text = _PYTHON

    @property
    def digest(self) -> str:
        """Of all parts together."""
        return digest_of(f"{name}={digest}" for name, digest in sorted(self.parts.items()))

    @property
    def identity(self) -> str:
        """``module:qualname#digest``."""
        return f"{self.name}#{self.digest}"

    def changes_since(self, other: Code) -> list[str]:
        """Name the parts that are not those of `other`; empty: none, or they cannot be compared."""
        if self.python != other.python or not self.parts or not other.parts:
            return []
        names = sorted(self.parts.keys() | other.parts.keys())
        return [name for name in names if self.parts.get(name) != other.parts.get(name)]


@dataclass(frozen=True)
class SessionOptions:
    """How one training keeps its state.

    Parameters
    ----------
    name
        The training's name; its checkpoints are in a directory of that name.
    checkpoint_root
        Where the directories of all trainings are. Every node must see it.
    seed
        Start of every random number of the training.
    checkpoint_interval
        Time between periodic checkpoints; ``None``: from their cost and the rate of failures (Young/Daly).
    mean_time_between_failures
        Observed, of the training as a whole; for that.
    keep
        How many checkpoints stay; two leave one to fall back on.
    save_margin
        How long before a node's closing the last checkpoint must be complete.
    threads
        CPU threads of torch in each process; ``None`` leaves torch's own choice.
    epochs
        Default of ``session.epochs()``.
    root_identity
        Tells the checkpoint root from another directory of its name, see `identify_root`; empty: not known.
    code
        The training's code; ``None``: not known, and not compared with that of checkpoints.
    on_code_change
        What becomes of the training if its newest checkpoint was written by other code, see `OnCodeChange`.
    call
        How names begin that were derived from this function and these arguments; empty: the name was given.

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
    call: Text = ""

    def __post_init__(self) -> None:
        who = f"training {self.name!r}"
        object.__setattr__(self, "checkpoint_root", Path(self.checkpoint_root))
        if self.seed < 0:
            raise InvalidSettings(f"{who}: seed must be zero or more, got {self.seed}")
        if self.checkpoint_interval is not None and self.checkpoint_interval <= timedelta(0):
            raise InvalidSettings(f"{who}: checkpoint_interval must be positive, got {self.checkpoint_interval}")
        if self.keep < 1:
            raise InvalidSettings(f"{who}: keep must be at least 1 checkpoint, got {self.keep}")
        if self.save_margin < timedelta(0):
            raise InvalidSettings(f"{who}: save_margin must not be negative, got {self.save_margin}")
        check_on_code_change(self.on_code_change)
        if self.threads is not None and self.threads < 1:
            raise InvalidSettings(f"{who}: threads must be at least 1, got {self.threads}")
