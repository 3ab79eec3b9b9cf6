"""From an idle log to the main queue of an embedded cluster, on which the same is idle, compressed in time.

The embedded cluster chooses itself which of our nodes a main job takes: with blocks of one node, that of the youngest.
So only the number of idle nodes is the log's, and its windows are paired last in, first out. Those that are then
shorter than the least window are filled.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.cluster.workload import MainJob
from freetrain_parsl.replay.holes import HoleTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Window = tuple[float, float]
"""Seconds at which it opens and closes."""

# After the intervals of 1024 Summit nodes in a week of 2021 (the BFTrainer authors' log): median, and the logarithm's
# standard deviation, of an interval; share of its time for which a node is idle.
_MEDIAN, _SPREAD, _IDLE = 395.0, 1.2, 0.08
_BUSY_SHARE_OF_A_WALLTIME = 0.7


def synthetic_log(*, seconds: float, nodes: int, seed: int) -> HoleTable:
    """Draw an idle log: log-normal intervals at the end of exponential busy times."""
    rng = random.Random(seed)
    mean_idle = _MEDIAN * np.exp(_SPREAD**2 / 2)
    mean_busy = mean_idle * (1 / _IDLE - 1)
    rows: list[tuple[int, float, float]] = []
    for node in range(nodes):
        start = rng.expovariate(1 / mean_busy)
        while start < seconds:
            end = start + _MEDIAN * float(np.exp(rng.gauss(0.0, _SPREAD)))
            rows.append((node, start, min(end, seconds)))
            start = end + rng.expovariate(1 / mean_busy)
    columns = zip(*rows, strict=True)
    return HoleTable.sorted([f"node{node:04}" for node in range(nodes)], *columns)


def choose_windows(
    table: HoleTable, *, nodes: int, start: float, compression: float, seconds: float, least: float, seed: int
) -> list[Window]:
    """Cut a stretch out of a log, choose a few of the nodes that have windows in it, and compress its time.

    Parameters
    ----------
    table
        The log.
    nodes
        How many, drawn by `seed` from those that are idle for long enough within the stretch.
    start
        Where the stretch begins, seconds of the log.
    compression
        Seconds of the log in one of ours.
    seconds, least
        Length of the stretch, and of the shortest window, both in our time.

    Returns
    -------
    windows
        In our time after the stretch's beginning, by opening; at no time more than there are nodes.

    Raises
    ------
    ValueError
        Fewer nodes than asked for have such windows there, or nothing is left of them.
    """
    stretch = table.within(start, start + seconds * compression)
    opens, closes = (stretch.starts - start) / compression, (stretch.ends - start) / compression
    long_enough = closes - opens >= least
    candidates = sorted(set(stretch.nodes[long_enough].tolist()))
    if len(candidates) < nodes:
        raise ValueError(
            f"{len(candidates)} nodes have a window of {least:g} s or more there, not {nodes}: choose another start, "
            "or less compression"
        )
    chosen = np.isin(stretch.nodes, random.Random(seed).sample(candidates, nodes)) & long_enough
    windows = _last_in_first_out(zip(opens[chosen].tolist(), closes[chosen].tolist(), strict=True), least)
    if not windows:
        raise ValueError("the windows there overlap so that none is left that is long enough: choose another start")
    return windows


def _last_in_first_out(windows: Iterable[Window], least: float) -> list[Window]:
    """Pair openings and closings anew, and leave out what is then too short."""
    events = sorted((time, kind) for window in windows for kind, time in ((1, window[0]), (0, window[1])))
    paired, stack = [], []
    for time, opens in events:
        if opens:
            stack.append(time)
        else:
            paired.append((stack.pop(), time))
    return sorted((opened, closed) for opened, closed in paired if closed - opened >= least)


def main_queue(windows: Sequence[Window], *, nodes: int, seconds: float, lead: float) -> list[MainJob]:
    """Make the main jobs that leave exactly these windows, and before them keep all nodes busy for `lead` seconds.

    Each is submitted when it needs its node: nobody knows beforehand when a window closes.
    """
    begins = [0.0] * nodes + sorted(lead + closes for _, closes in windows if closes < seconds)
    ends = sorted(lead + opens for opens, _ in windows)
    ends += [lead + seconds + 60.0] * (len(begins) - len(ends))  # beyond the measurement's end
    return [
        MainJob(begin, 1, end - begin, (end - begin) / _BUSY_SHARE_OF_A_WALLTIME)
        for begin, end in zip(begins, ends, strict=True)
        if end > begin
    ]
