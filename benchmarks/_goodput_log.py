"""Convert an idle log to the main queue of an embedded cluster with the same idle nodes, compressed in time.

The embedded cluster itself chooses which of our nodes a main job takes: with blocks of one node, the youngest. So only
the number of idle nodes is taken from the log, and openings and closings are paired last in, first out. Windows that
are then shorter than the minimum are filled.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from freetrain_parsl.cluster.workload import MainJob
from freetrain_parsl.extensions.replay.holes import HoleTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Window = tuple[float, float]
"""Opening and closing, seconds."""

# Modelled on 1024 Summit nodes in a week of 2021 (the BFTrainer authors' log): median, and standard deviation of the
# logarithm, of the idle intervals; share of the time for which a node is idle.
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
    """Extract a period of a log, choose some of the nodes with windows in it, and compress its time.

    Parameters
    ----------
    table
        The log.
    nodes
        Number of nodes, drawn by `seed` from those that are idle for long enough within the period.
    start
        Start of the period, seconds of the log.
    compression
        Seconds of the log per replayed second.
    seconds, least
        Length of the period, and of the shortest window, both in replayed seconds.

    Returns
    -------
    windows
        In replayed seconds after the start, by opening; never more at a time than there are nodes.

    Raises
    ------
    ValueError
        Too few nodes have such windows there, or no window remains after pairing.
    """
    stretch = table.within(start, start + seconds * compression)
    opens, closes = (stretch.starts - start) / compression, (stretch.ends - start) / compression
    long_enough = closes - opens >= least
    candidates = sorted(set(stretch.nodes[long_enough].tolist()))
    if len(candidates) < nodes:
        raise ValueError(
            f"only {len(candidates)} of {nodes} nodes have a window of {least:g} s or more there: choose another start "
            "or less compression"
        )
    chosen = np.isin(stretch.nodes, random.Random(seed).sample(candidates, nodes)) & long_enough
    windows = _last_in_first_out(zip(opens[chosen].tolist(), closes[chosen].tolist(), strict=True), least)
    if not windows:
        raise ValueError("no window is long enough after pairing: choose another start")
    return windows


def _last_in_first_out(windows: Iterable[Window], least: float) -> list[Window]:
    """Pair openings and closings, and drop windows that are too short."""
    events = sorted((time, kind) for window in windows for kind, time in ((1, window[0]), (0, window[1])))
    paired, stack = [], []
    for time, opens in events:
        if opens:
            stack.append(time)
        else:
            paired.append((stack.pop(), time))
    return sorted((opened, closed) for opened, closed in paired if closed - opened >= least)


def main_queue(windows: Sequence[Window], *, nodes: int, seconds: float, lead: float) -> list[MainJob]:
    """Make main jobs that leave exactly these windows, and keep all nodes busy for `lead` seconds before them.

    Each is submitted when it needs its node: closings are not known in advance.
    """
    begins = [0.0] * nodes + sorted(lead + closes for _, closes in windows if closes < seconds)
    ends = sorted(lead + opens for opens, _ in windows)
    ends += [lead + seconds + 60.0] * (len(begins) - len(ends))  # after the end of the measurement
    return [
        MainJob(begin, 1, end - begin, (end - begin) / _BUSY_SHARE_OF_A_WALLTIME)
        for begin, end in zip(begins, ends, strict=True)
        if end > begin
    ]
