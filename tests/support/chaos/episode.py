"""An episode: a seed, the faults derived from it, and the problems found."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["EpisodeReport", "StruckFault", "choose_menu", "seeds_of", "summary"]


@dataclass(frozen=True)
class StruckFault:
    """A fault that was injected.

    Parameters
    ----------
    at
        Seconds after the start of the episode.
    fault
        Name in the menu.
    detail
        What it hit.
    """

    at: float
    fault: str
    detail: str = ""


@dataclass(frozen=True)
class EpisodeReport:
    """The outcome of an episode.

    Parameters
    ----------
    kind
        ``bare`` or ``campaign``.
    seed
        Determines the faults.
    faults
        Injected faults, in order.
    trainings
        Number of finished training jobs.
    problems
        Problems found, one line each.
    seconds
        Duration of the episode.
    """

    kind: str
    seed: int
    faults: tuple[StruckFault, ...]
    trainings: int
    problems: tuple[str, ...]
    seconds: float

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> EpisodeReport:
        """Parse the output of `to_json`."""
        fields: dict[str, Any] = json.loads(line)
        faults = tuple(StruckFault(**fault) for fault in fields.pop("faults"))
        problems = tuple(fields.pop("problems"))
        return cls(faults=faults, problems=problems, **fields)


def choose_menu(text: str | None, default: Mapping[str, float]) -> dict[str, float]:
    """Parse a menu of faults, ``kill=3,stop=2``: name and relative frequency.

    Raises
    ------
    UsageError
        A name is not a fault of this kind of episode, or a weight is not a positive number.
    """
    if text is None:
        return dict(default)
    menu = {}
    for item in text.split(","):
        name, _, weight = item.partition("=")
        if name not in default:
            raise UsageError(f"--faults: there is no fault {name!r}{did_you_mean(name, default)}")
        try:
            menu[name] = float(weight or 1)
        except ValueError:
            raise UsageError(f"--faults: {name} needs a number, got {weight!r}") from None
        if not 0 < menu[name] < float("inf"):
            raise UsageError(f"--faults: {name} needs a positive number, got {weight!r}")
    return menu


def seeds_of(text: str) -> list[int]:
    """Parse seeds: ``7`` or ``1-20``.

    Raises
    ------
    UsageError
        It is neither, or an empty range.
    """
    first, dash, last = text.partition("-")
    try:
        seeds = list(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        raise UsageError(f"seeds are a number or a range such as 1-20, got {text!r}") from None
    if not seeds:
        raise UsageError(f"seeds {text!r}: the range is empty")
    return seeds


def summary(reports: Iterable[EpisodeReport]) -> dict[str, Any]:
    """Count episodes, training jobs, faults by name, and failures."""
    reports = list(reports)
    faults = Counter(fault.fault for report in reports for fault in report.faults)
    return {
        "episodes": len(reports),
        "trainings_finished": sum(report.trainings for report in reports),
        "faults": faults.total(),
        "faults_by_name": dict(sorted(faults.items())),
        "failed_episodes": sorted((report.kind, report.seed) for report in reports if report.problems),
        "seconds": round(sum(report.seconds for report in reports), 1),
    }
