"""The replay of sweeps: the planner gets arrays as trainers, which are formed from the members that are not done."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from freetrain_parsl import __version__
from freetrain_parsl.errors import InvalidInput, InvalidSettings
from freetrain_parsl.extensions.fusion.curve import FusionCurve
from freetrain_parsl.extensions.replay.comparison import entry_of, progress_of, refuse_missing_forecasts, top_level
from freetrain_parsl.extensions.replay.ideal import BestRates
from freetrain_parsl.extensions.replay.metrics import log_figures, node_series, run_figures
from freetrain_parsl.extensions.replay.simulation import Curves, Replay, ReplaySettings
from freetrain_parsl.extensions.replay.sweeps.arrays import ArrayAccount, Sweep
from freetrain_parsl.planning import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from freetrain_parsl.extensions.replay.accounts import Account
    from freetrain_parsl.extensions.replay.comparison import Contestant, OnProgress
    from freetrain_parsl.extensions.replay.holes import HoleLog
    from freetrain_parsl.extensions.replay.ideal import Idle
    from freetrain_parsl.extensions.replay.simulation import Outcome
    from freetrain_parsl.extensions.replay.trainers import TrainerSet
    from freetrain_parsl.planning.policies.base import Policy

__all__ = ["compare_fusion", "replay_sweeps"]


def compare_fusion(
    log: HoleLog,
    trainers: TrainerSet,
    fusion: tuple[str, FusionCurve],
    contestants: Sequence[Contestant],
    settings: ReplaySettings | None = None,
    *,
    price_per_node_hour: float | None = None,
    on_progress: OnProgress = lambda _doing, _share: None,
) -> dict[str, Any]:
    """Replay sweeps fused and one by one, for each policy.

    Parameters
    ----------
    fusion
        Name and throughput of arrays. With a curve of one member, only one by one is replayed.

    Returns
    -------
    dict
        Plain values, as written by ``freetrain replay --json``.

    Raises
    ------
    InvalidSettings
        Forecasts are requested from a log that has none, or blocks, or learned curves.
    InvalidInput
        No node of the log is ever idle.
    """
    settings = settings or ReplaySettings()
    refuse_missing_forecasts(log, contestants)
    if settings.blocks is not None:
        raise InvalidSettings("--blocks: sweeps are replayed in nodes that are idle, not in blocks; leave it out")
    if settings.curves is Curves.LEARNED:
        raise InvalidSettings("--curves learned: the curves of arrays are given by --fusion; use known")
    if log.mean_idle() <= 0:
        raise InvalidInput(f"{log.name}: no node is ever idle, so there is nothing to train in")

    def run(one: Contestant, doing: str, curve: FusionCurve) -> dict[str, Any]:
        report = progress_of(replace(one, policy=f"{one.policy}, {doing}"), log, on_progress)
        chosen = replace(settings, knowledge=one.knowledge)
        outcome = replay_sweeps(log, trainers, curve, one.make(), chosen, report)
        report(log.end)
        return _figures(outcome, trainers, price_per_node_hour)

    name, curve = fusion
    entries = []
    for one in contestants:
        entry = entry_of(one, partial(run, one, name, curve))
        if curve.largest > 1:
            alone = entry_of(one, partial(run, one, "one by one", FusionCurve()))
            entry["one_by_one"] = {**alone["sweep"], "jct": alone["jct"]}
            entry["series"]["finished_one_by_one"] = alone["series"]["finished"]
        entries.append(entry)
    return {
        "version": __version__,
        "log": log_figures(log),
        "trainers": {"spec": trainers.name, "count": len(trainers.trainers), "objective": trainers.objective},
        "fusion": {"name": name, "points": [list(point) for point in curve.points]},
        "notes": [],
        "cost": settings.cost.value,
        "curves": settings.curves.value,
        "concurrent": settings.concurrent,
        "blocks_start_in": None,
        "nodes_per_block": None,
        **top_level(entries),
        "policies": entries,
    }


def replay_sweeps(
    log: HoleLog,
    trainers: TrainerSet,
    fusion: FusionCurve,
    policy: Policy,
    settings: ReplaySettings | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Replay sweeps with a policy; ``FusionCurve()`` trains one by one, and `concurrent` limits the number of arrays.

    Returns
    -------
    Outcome
        Its accounts are those of the members; it has no value of unused nodes.
    """
    return _SweepReplay(log, trainers, fusion, policy, settings or ReplaySettings(), on_progress).run()


class _SweepReplay(Replay):
    def __init__(
        self,
        log: HoleLog,
        trainers: TrainerSet,
        fusion: FusionCurve,
        policy: Policy,
        settings: ReplaySettings,
        on_progress: Callable[[float], None] | None,
    ) -> None:
        super().__init__(log, BestRates(trainers.trainers, trainers.worth), policy, settings, on_progress)
        sweeps = {name: Sweep(name, members[0], fusion) for name, members in trainers.sweeps.items()}
        self._sweeps = sorted(sweeps.values(), key=lambda sweep: sweep.trainer.submitted)
        self._sweep_of = {member.name: sweeps[name] for name, members in trainers.sweeps.items() for member in members}

    def _room(self) -> bool:
        return True  # `concurrent` limits the arrays, not the members that wait

    def _shown_as(self, name: str) -> str:
        return name.rpartition("[")[0]

    def _value_of_unused(self, used: Idle) -> float:  # noqa: ARG002 - there are no reference values
        return 0.0

    def _finish(self) -> list[ev.Event]:
        """End members that are done; an array ends with its last one."""
        events: list[ev.Event] = []
        for sweep in self._sweeps:
            for array in sweep.arrays:
                left = [member for member in array.members if not member.done(self._now)]
                if len(left) == array.size:
                    continue
                for member in array.members:
                    if member.done(self._now):
                        member.finished = self._now
                array.take(left)
                events.append(self._end(array) if not left else self._told(array))
            sweep.arrays = [array for array in sweep.arrays if array.members]
        return events

    def _submit(self) -> Iterable[ev.Event]:
        """Submit members that are due; then rearrange all members, first come, first served."""
        while self._waiting and self._waiting[0].submitted <= self._now:
            account = self._waiting.popleft()
            self._sweep_of[account.trainer.name].waiting.append(account)
        for sweep in self._sweeps:
            for array in [array for array in sweep.arrays if not array.nodes]:
                sweep.dissolve(array)
                yield self._end(array)
        slots = self._slots()
        for sweep in self._sweeps:
            own = len(sweep.arrays)
            start = self._start_seconds(sweep.trainer)
            formed, changed, cost = sweep.rearrange(slots + own, self._planner.outlook.horizon(start), start)
            slots += own - len(sweep.arrays)
            self._outcome.losses.rescale += cost
            self._spend(cost)
            for array in changed:
                yield self._told(array) if array.members else self._end(array)
            for array in formed:
                self._alive[array.trainer.name] = array
                yield ev.TrainerSubmitted(self._now, self._described(array.trainer))

    def _slots(self) -> int:
        """Return how many more arrays could be formed."""
        arrays = [array for sweep in self._sweeps for array in sweep.arrays]
        least = max(sweep.trainer.min_nodes for sweep in self._sweeps)
        free = self._idle // least - len(arrays)
        most = free if self._settings.concurrent is None else min(free, self._settings.concurrent - len(arrays))
        return max(0, most)

    def _told(self, array: ArrayAccount) -> ev.Event:
        return ev.TrainerLearned(self._now, self._described(array.trainer))


def _figures(outcome: Outcome, trainers: TrainerSet, price: float | None) -> dict[str, Any]:
    bins = outcome.bins
    accounts = outcome.accounts
    finished = [account.finished for account in accounts if account.finished is not None]
    edges = bins.start + bins.seconds * np.arange(1, bins.number + 1)
    hours = outcome.used_seconds / 3600
    return {
        **run_figures(outcome, price_per_node_hour=price),
        "sweep": {
            "members": len(accounts),
            "finished": len(finished),
            "work": sum(map(_share_done, accounts)),
            "node_hours": hours,
            "finished_per_node_hour": len(finished) / hours if hours else None,
        },
        "series": {
            **node_series(outcome, list(trainers.sweeps)),
            "finished": np.searchsorted(np.sort(finished), edges, side="right").tolist(),
        },
    }


def _share_done(account: Account) -> float:
    """Return the share of its work that a member has done."""
    return min(max(account.samples / account.trainer.work_left, 0.0), 1.0)
