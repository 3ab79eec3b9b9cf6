"""Small logs in memory, and random logs and trainers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from freetrain_parsl.extensions.replay.holes import Change, Hole, HoleLog, HoleTable, refuse_forecasts
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Forecast = dict[str, float | None]


class SmallLog(HoleLog):
    """Holes given one by one.

    Parameters
    ----------
    holes
        (node, start, end), seconds.
    start, end
        Time covered by the log; by default the span of the holes.
    forecasts
        Instant -> forecast at that time.
    """

    name = "small"

    def __init__(
        self,
        holes: Sequence[tuple[str, float, float]],
        start: float | None = None,
        end: float | None = None,
        forecasts: Mapping[float, Forecast] | None = None,
    ) -> None:
        self.holes = [Hole(*hole) for hole in holes]
        names = sorted({hole.node for hole in self.holes})
        self.nodes = len(names)
        self.start = min(hole.start for hole in self.holes) if start is None else start
        self.end = max(hole.end for hole in self.holes) if end is None else end
        self.forecasts = forecasts
        self.has_forecasts = forecasts is not None
        self.table = HoleTable.sorted(
            names,
            [names.index(hole.node) for hole in self.holes],
            [hole.start for hole in self.holes],
            [hole.end for hole in self.holes],
        )

    def changes(self, *, forecasts: bool = False) -> Iterator[Change]:
        """Yield the changes; see `HoleLog.changes`."""
        changes = {change.time: change for change in self.table.changes(before=self.end)}
        if forecasts:
            if self.forecasts is None:
                raise refuse_forecasts(self.name)
            for time, expected in self.forecasts.items():
                changes[time] = replace(changes.get(time, Change(time, (), ())), expected=expected)
        yield from (change for _, change in sorted(changes.items()))


@st.composite
def random_logs(draw: st.DrawFn, *, nodes: int = 5, end: int = 60) -> SmallLog:
    """Draw holes at whole seconds; nodes often open and close together, and some close and open at the same instant.

    Forecasts are made at every change and at times between; some are correct, some late, wrong or in the past.
    """
    holes = []
    for node in range(draw(st.integers(2, nodes))):
        fifths = st.integers(0, end // 5).map(lambda number: 5 * number)
        times = sorted(draw(st.lists(fifths, min_size=2, max_size=8)))
        pairs = zip(times[::2], times[1::2], strict=False)
        holes += [(f"n{node}", float(first), float(last)) for first, last in pairs if first < last]
    log = SmallLog(holes or [("n0", 5.0, 25.0)], 0.0, float(end))
    ahead = st.sampled_from([None, 2.0, 5.0, 10.0, 40.0])
    instants = {change.time for change in log.changes()} | set(draw(st.lists(st.sampled_from([3.0, 20.0, 33.0]))))
    log.has_forecasts, log.forecasts = True, {}
    for now in sorted(instants):
        idle = sorted(hole.node for hole in log.holes if hole.start <= now < hole.end)
        log.forecasts[now] = {node: None if (wait := draw(ahead)) is None else now + wait for node in idle}
    return log


@st.composite
def random_trainers(draw: st.DrawFn, *, endless: bool = False, costs: bool = True) -> tuple[PlannedJob, ...]:
    """Draw trainers with irregular curves."""
    return tuple(_trainer(draw, f"t{index}", endless, costs) for index in range(draw(st.integers(1, 3))))


def _trainer(draw: st.DrawFn, name: str, endless: bool, costs: bool) -> PlannedJob:
    least = draw(st.integers(1, 2))
    rates = draw(st.lists(st.integers(0, 20), min_size=4, max_size=4))
    seconds = st.integers(0, 4).map(float) if costs else st.just(0.0)
    return PlannedJob(
        name,
        least,
        draw(st.integers(least, 5)),
        ScalingCurve({1: 1.0 + rates[0], 2: float(rates[1]), 3: float(rates[2]), 5: float(rates[3])}),
        CostsInSeconds(draw(seconds), draw(seconds), draw(seconds)),
        work_left=float("inf") if endless else draw(st.sampled_from([float("inf"), 40.0, 150.0, 500.0])),
        submitted=draw(st.sampled_from([0.0, 0.0, 5.0, 7.5, 22.0])),
    )
