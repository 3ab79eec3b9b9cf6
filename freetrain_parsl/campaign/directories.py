"""Run directories of ``freetrain run``: how they are found and made, and what kinds of runs they are of."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from freetrain_parsl.campaign.stored_run import DATABASE, StoredRun
from freetrain_parsl.entry_points import EntryPoints, subclass_of
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.executor.run_directory import check_new_run_directory, check_run_directory
from freetrain_parsl.storage.owned_files import open_directory
from freetrain_parsl.texts import text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

__all__ = [
    "BEFORE_THE_RUN",
    "CELLS",
    "CONTROL",
    "DRIVER",
    "RUN_KINDS",
    "RunKind",
    "find_run",
    "kind_of",
    "make_run_directory",
    "run_directories",
]

CELLS: Final = "notebook"
"""Directory in the run directory with training apps of a notebook, which may exist before the run."""

DRIVER: Final = "driver"
"""Directory in the run directory with the files of a detached driver, which may exist before the run."""

CONTROL: Final = "notebook.lock"
"""File in the run directory that the notebook which controls the run has locked; it may exist before the run."""

BEFORE_THE_RUN: Final = frozenset({CELLS, DRIVER, CONTROL})
"""What may be in a run directory before the run is created."""

_RUN_NAME = "freetrain-run-"
_MOST_LOOKED_AT = 1000  # entries of the current directory, for a message


class RunKind(ABC):
    """A kind of run that is not a campaign at one site: an entry point of the group ``freetrain.runs``."""

    name: ClassVar[str]
    """That of the entry point, of the option of ``freetrain run``, and of the fact that only its runs have."""
    described: ClassVar[str]
    """What a run of this kind is, such as "a run at several sites"."""

    @abstractmethod
    def create(
        self,
        campaign: Path,
        file: Path,
        run_dir: Path | None,
        *,
        settings: Sequence[str],
        include: Sequence[Path],
        any_versions: bool,
        as_json: bool,
    ) -> None:
        """Create a run and drive it; raise `typer.Exit` with the exit code, as `resume` and `stop` do.

        Parameters
        ----------
        campaign, run_dir, settings, include, any_versions, as_json
            Arguments of ``freetrain run``.
        file
            The value of the kind's option.
        """

    @abstractmethod
    def resume(self, run_dir: Path, *, retry: Sequence[str], retry_failed: bool, as_json: bool) -> None:
        """Continue a run; the arguments are those of ``freetrain resume``."""

    @abstractmethod
    def stop(self, run_dir: Path) -> None:
        """Stop a run that has no driver."""

    @abstractmethod
    def lines(self, store: StoredRun) -> list[str]:
        """Describe the state of a run, beside its training jobs."""

    @abstractmethod
    def explain(self, store: StoredRun) -> dict[str, Any]:
        """Describe why the jobs of a run are where they are: ``trainings`` is a list, each with its ``name``."""

    @abstractmethod
    def sentences(self, figures: dict[str, Any]) -> Iterable[str]:
        """Return in lines what `explain` has found."""


RUN_KINDS: Final = EntryPoints[type[RunKind]]("freetrain.runs", "kind of run", subclass_of(RunKind))


def kind_of(store: StoredRun) -> RunKind | None:
    """Return the kind of a run; ``None``: a campaign at one site."""
    return next((RUN_KINDS[name]() for name in RUN_KINDS if store.fact(name, None) is not None), None)


def find_run(directory: Path | None) -> Path:
    """Return the given run directory, or the newest one of this user's in the current directory.

    Raises
    ------
    InvalidInput
        No run directory was found.
    """
    if directory is not None:
        return directory
    found, left_out = _runs_here()
    if not found:
        others = f" of yours here ({left_out[0]})" if left_out else f" in {Path().absolute()}"
        raise InvalidInput(f"there is no {_RUN_NAME}…{others}; give the run directory, {_hint()}")
    return max(found, key=lambda run: (found[run], run.name))


def _hint() -> str:
    """Return which directory to give: one here with another name, or of a Parsl script, if there is one."""
    found: list[str] = []
    with suppress(OSError):
        names = [".", *(entry.name for entry in islice(os.scandir(), _MOST_LOOKED_AT) if entry.is_dir())]
        found = [name for name in sorted(names) if os.path.lexists(Path(name) / DATABASE)]
        found += map(str, sorted(Path("runinfo").glob("[0-9][0-9][0-9]"), reverse=True))
    return f"such as {found[0]}" if found else "as it was given to --run-dir"


def make_run_directory(directory: Path | None, now: datetime) -> tuple[Path, bool]:
    """Make the directory of a new run, private to the user.

    Parameters
    ----------
    directory
        ``None``: one in the current directory, named after the time.
    now
        The time.

    Returns
    -------
    run_dir, made
        Its absolute path, and whether it is new.

    Raises
    ------
    InvalidInput
        It is in use, cannot be created, or cannot be passed to batch systems.
    """
    run_dir = (directory or Path(f"{_RUN_NAME}{now:%Y%m%d-%H%M%S}")).absolute()
    check_run_directory(run_dir)
    made = not run_dir.exists()
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_new_run_directory(run_dir, made=made)
        if any(path.name not in BEFORE_THE_RUN for path in run_dir.iterdir()):
            raise InvalidInput(
                f"--run-dir {run_dir} is not empty; give a new one, or continue that one with 'freetrain resume'"
            )
        run_dir.chmod(0o700)
    except OSError as error:
        raise InvalidInput(f"--run-dir {run_dir}: {error.strerror}; choose another directory") from None
    return run_dir, made


def run_directories() -> list[Path]:
    """List the run directories here that have default names, are this user's, and can be read."""
    return list(_runs_here()[0])


def _runs_here() -> tuple[dict[Path, float], list[str]]:
    """Return the runs of this user here with the times of their creation, and why others are left out."""
    found: dict[Path, float] = {}
    left_out: list[str] = []
    for directory in sorted(Path().glob(f"{_RUN_NAME}*")):
        try:
            with open_directory(directory) as opened:
                why = opened.distrust(DATABASE)
                if not opened.state_of(DATABASE)[0]:
                    continue
            if why:
                left_out.append(f"{directory} {why}")
                continue
            found[directory] = float(StoredRun(directory).fact("created"))
        except (InvalidInput, OSError, ValueError, TypeError) as error:  # it does not stand in the way of other runs
            left_out.append(text_of(error))
    return found, left_out
