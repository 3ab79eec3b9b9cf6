"""The home of a site's checkpoints, as the section ``checkpoints`` of its site file describes it.

Kinds of homes are entry points of the group ``freetrain.storage``; a kind's name is that of its section.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, ClassVar, Final

from freetrain_parsl.entry_points import EntryPoints, subclass_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from typing_extensions import Self

    from freetrain_parsl.campaign.files.yaml_file import Section
    from freetrain_parsl.campaign.store import RunStore
    from freetrain_parsl.storage.home import Home

__all__ = ["HOME_KINDS", "HomeKind", "open_home", "read_home"]


class HomeKind(ABC):
    """The home of one site's checkpoints, of one kind."""

    secrets: ClassVar[Sequence[str]] = ()
    """Environment variables that `check` and `open` need, and that jobs must not inherit."""

    @classmethod
    @abstractmethod
    def read(cls, keys: Section, directory: Path | None) -> Self:
        """Read its section of a site file.

        Parameters
        ----------
        keys
            The section; keys that are not read are refused afterwards.
        directory
            The site's checkpoint directory, absolute; ``None``: each run has its own.

        Raises
        ------
        InvalidInput
            A value is missing or invalid; the message gives file and line.
        """

    @classmethod
    @abstractmethod
    def lines(cls, run_dir: Path) -> Sequence[str]:
        """Return what the home of a run is doing, as its driver has recorded last; empty for runs with no such home."""

    @abstractmethod
    def check(self) -> None:
        """Check that it can be used, before anything is submitted.

        Raises
        ------
        UsageError
            It cannot; the message gives the reason and the remedy.
        CollectionUnavailable
            It does not answer at present.
        """

    @abstractmethod
    def open(self, run: RunStore, allowed: Callable[[], bool]) -> AbstractContextManager[Home]:
        """Work for the driver of a run; at the end, the last checkpoints are brought home.

        Parameters
        ----------
        run
            The run.
        allowed
            Whether this driver may still act. One that was replaced leaves everything as it is: training jobs and
            copies belong to the other one.
        """

    @abstractmethod
    def clean(self, run: RunStore, report: Callable[[str], None]) -> None:
        """Withdraw what the dead driver of a run has left, and release its training jobs."""

    @abstractmethod
    def prune(
        self, run: RunStore, keep: int, training: str | None, report: Callable[[str], None], *, dry_run: bool
    ) -> None:
        """Remove checkpoints at home that are older than the `keep` newest of their training job.

        Only training jobs that this run owns are touched, or only `training`.
        """


HOME_KINDS: Final = EntryPoints[type[HomeKind]]("freetrain.storage", "kind of home", subclass_of(HomeKind))
"""Section below ``checkpoints`` of a site file -> the kind of home that it describes."""


def read_home(checkpoints: Section, directory: Path | None) -> HomeKind | None:
    """Read the home of a site's checkpoints, if its file describes one."""
    for name in HOME_KINDS:
        if checkpoints.has(name):
            keys = checkpoints.section(name)
            home = keys.checked(HOME_KINDS.find, name).read(keys, directory)
            keys.done()
            return home
    return None


@contextmanager
def open_home(home: HomeKind | None, run: RunStore, allowed: Callable[[], bool]) -> Iterator[Home | None]:
    """Open the home of a run, if its site has one.

    No secret of a home is in the environment afterwards, also without a home: jobs would inherit it.
    """
    with nullcontext() if home is None else home.open(run, allowed) as opened:
        for kind in HOME_KINDS.usable():
            for name in kind.secrets:
                os.environ.pop(name, None)
        yield opened
