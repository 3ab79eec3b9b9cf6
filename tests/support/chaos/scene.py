"""Code shared by all kinds of episodes: a scene under faults, and its run from set-up to verdict."""

from __future__ import annotations

import random
import shutil
import time
import traceback
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.testing.faults import fill_disk, resume, stop
from tests.support.chaos.episode import EpisodeReport, StruckFault
from tests.support.chaos.small_disk import small_disk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

__all__ = ["FILL", "EpisodeSettings", "Scene", "run_episode"]

FILL = "fill"
"""The fault that fills the checkpoint disk, or frees it again; drawn only with a small disk."""


@dataclass(frozen=True)
class EpisodeSettings:
    """Settings of an episode.

    Parameters
    ----------
    seed
        Determines the faults.
    menu
        Faults with relative frequencies.
    root
        Parent of the episode's directory, which is removed if there was no problem.
    strikes
        Minimum and maximum number of faults.
    limit
        Seconds after which the episode counts as hung.
    disk
        Bytes of a file system for the checkpoints (a ``tmpfs``; needs root); ``None``: that of `root`.
    """

    seed: int
    menu: Mapping[str, float]
    root: Path
    strikes: tuple[int, int]
    limit: float
    disk: int | None = None


class Scene(ABC):
    """Training jobs, the processes they run in, and the faults injected there.

    Parameters
    ----------
    settings
        Settings of the episode.
    checkpoints
        Root of the checkpoints.
    first, pause
        Maximum seconds until the first fault, and mean seconds between faults.
    """

    def __init__(self, settings: EpisodeSettings, checkpoints: Path, *, first: float, pause: float) -> None:
        self.settings = settings
        self.checkpoints = checkpoints
        self.rng = random.Random(settings.seed)
        self.faults: list[StruckFault] = []
        self.problems: list[str] = []
        self._first = first
        self._pause = pause
        self._menu = {name: weight for name, weight in settings.menu.items() if name != FILL or settings.disk}
        self._left = self.rng.randint(*settings.strikes)
        self._next: float | None = None
        self._begin = time.monotonic()
        self._stopped: dict[int, float] = {}  # process -> time when it continues
        self._full: AbstractContextManager[Path] | None = None

    @abstractmethod
    def live(self) -> None:
        """Run the training jobs to their ends under faults."""

    @abstractmethod
    def end(self) -> None:
        """End all processes; those that have to be killed are a problem."""

    @abstractmethod
    def verify(self) -> None:
        """Check the results of the training jobs."""

    @abstractmethod
    def finished(self) -> int:
        """Count the training jobs that ended without an error."""

    @abstractmethod
    def strike(self, fault: str) -> str | None:
        """Inject a fault; return what it hit, or None if there was no target."""

    @property
    def elapsed(self) -> float:
        """Return the seconds since the start of the episode."""
        return time.monotonic() - self._begin

    @property
    def hangs(self) -> bool:
        """Return whether the episode has exceeded its time limit."""
        return self.elapsed > self.settings.limit

    def strike_when_due(self, *, ready: bool) -> None:
        """Inject the next fault if it is due; the first one only when the scene is `ready`."""
        now = time.monotonic()
        if self._next is None:
            if ready:
                self._next = now + self.rng.uniform(0, self._first)
        elif self._left and now > self._next:
            [fault] = self.rng.choices(list(self._menu), list(self._menu.values()))
            with suppress(ProcessLookupError):  # the target has ended in the meantime
                if (detail := self.strike(fault)) is not None:
                    self._left -= 1
                    self.faults.append(StruckFault(round(self.elapsed, 1), fault, detail))
            self._next = time.monotonic() + self.rng.expovariate(1 / self._pause)

    def wait_until_ready(self) -> None:
        """Inject the next fault only when the scene is ready again."""
        self._next = None

    def stop_for(self, pid: int, seconds: float) -> None:
        """Stop a process until `resume_due` continues it."""
        stop(pid)
        self._stopped[pid] = time.monotonic() + seconds

    def is_stopped(self, pid: int) -> bool:
        """Return whether a process is stopped."""
        return pid in self._stopped

    def resume_due(self) -> None:
        """Continue stopped processes that are due."""
        self._resume(lambda until: time.monotonic() > until)

    def undo(self) -> None:
        """Undo lasting faults."""
        self._resume(lambda _: True)
        if self._full is not None:
            self._full.__exit__(None, None, None)
            self._full = None

    def fill(self) -> str:
        """Fill the small disk, or free it again."""
        if self._full is not None:
            self._full.__exit__(None, None, None)
            self._full = None
            return "space again"
        assert self.settings.disk is not None
        self._full = fill_disk(self.checkpoints, 2 * self.settings.disk)
        self._full.__enter__()
        return "full"

    def _resume(self, due: Callable[[float], bool]) -> None:
        for pid in [pid for pid, until in self._stopped.items() if due(until)]:
            del self._stopped[pid]
            with suppress(ProcessLookupError):  # killed in the meantime
                resume(pid)


def run_episode(
    kind: str, settings: EpisodeSettings, make_scene: Callable[[EpisodeSettings, Path, Path], Scene]
) -> EpisodeReport:
    """Run an episode to its end and report problems.

    Parameters
    ----------
    kind
        ``bare`` or ``campaign``.
    settings
        Settings of the episode.
    make_scene
        Makes the scene from the settings, the episode's directory and the root of its checkpoints.
    """
    directory = settings.root / f"{kind}-{settings.seed}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700, parents=True)
    begin = time.monotonic()
    with small_disk(directory / "disk", settings.disk) as checkpoints:
        scene = make_scene(settings, directory, checkpoints)
        try:
            scene.live()
        except Exception:  # noqa: BLE001 - an error of the episode itself is a problem too
            scene.problems.append(f"the episode failed: {traceback.format_exc()}")
        finally:
            scene.end()
        scene.verify()
    seconds = round(time.monotonic() - begin, 1)
    report = EpisodeReport(kind, settings.seed, tuple(scene.faults), scene.finished(), tuple(scene.problems), seconds)
    if not report.problems:
        shutil.rmtree(directory)
    return report
