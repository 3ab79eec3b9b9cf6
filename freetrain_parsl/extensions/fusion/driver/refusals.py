"""Training jobs that cannot be fused, as earlier ones that are alike have found out: no array is started for them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from freetrain_parsl import __version__
from freetrain_parsl.protocol.options import digest_of
from freetrain_parsl.storage.measurements import measurement_path, read_measurement, write_measurement

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from freetrain_parsl.executor.jobs.request import TrainingRequest
    from freetrain_parsl.extensions.fusion.driver.gathering import CohortKey

__all__ = ["Refusals"]

_LONGEST = 1000  # characters of a reason


class Refusals:
    """Why training jobs cannot be fused, by what makes them alike: code, whole numbers and texts among the arguments.

    That an operator cannot be fused holds for later runs, too, and is kept beside the checkpoints, for this version of
    this package and of PyTorch. That fusing is not faster holds for these nodes, and is kept for this run.

    Parameters
    ----------
    root
        The checkpoint root.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._reasons: dict[tuple[CohortKey, str], str] = {}
        self._earlier: dict[str, str] = {}  # likeness -> what an earlier run has found; empty: nothing

    def reason(self, key: CohortKey, request: TrainingRequest) -> str:
        """Return why a training job cannot be fused; empty if nothing is known against it."""
        known = self._reasons.get((key, request.likeness))
        if known is not None or not request.likeness:
            return known or ""
        if request.likeness not in self._earlier:
            told = read_measurement(self._path(request.likeness), _checked, "its training jobs are tried in an array")
            self._earlier[request.likeness] = "" if told is None else f"{told} (found by an earlier run)"
        return self._earlier[request.likeness]

    def add(self, key: CohortKey, likenesses: Iterable[str], reason: str, *, lasting: bool) -> None:
        """Note why training jobs cannot be fused; `lasting`: this does not depend on the nodes."""
        for likeness in likenesses:
            self._reasons[key, likeness] = reason
            if lasting and likeness:
                write_measurement(self._path(likeness), {"reason": reason[:_LONGEST]})

    def _path(self, likeness: str) -> Path:
        return measurement_path(self._root, "not-fused", digest_of([likeness, __version__, _version_of_torch()]))


def _version_of_torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:  # only the nodes have it
        return ""


def _checked(content: Any) -> str:
    reason = content["reason"]
    if not isinstance(reason, str) or not reason:
        raise ValueError(f"its reason is {reason!r}")
    return reason[:_LONGEST]
