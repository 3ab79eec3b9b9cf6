"""Outages are removed from a log with their time: all figures equal those of a log without them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.replay.comparison import Contestant, compare
from freetrain_parsl.extensions.replay.logs.logs import LogWithoutOutages, open_log
from freetrain_parsl.extensions.replay.simulation import Knowledge
from freetrain_parsl.extensions.replay.trainers import TrainerSet
from tests.extensions.replay.small_logs import SmallLog, random_logs, random_trainers

KEYS = ("efficiency", "oracle", "jct", "node_hours", "trainers", "events", "series")


def with_outages(log: SmallLog, outages: list[tuple[float, float]]) -> tuple[SmallLog, LogWithoutOutages]:
    """Insert spans (at, seconds) into a log and remove them again; also return the log with its holes cut there."""
    pieces, longer, spans, added = [], [], [], 0.0
    for at, seconds in outages:
        spans.append((at + added, at + added + seconds))
        added += seconds

    def moved(time: float, *, opening: bool) -> float:
        return time + sum(s for at, s in outages if at < time or (opening and at == time))

    for hole in log.holes:
        cuts = [hole.start, *(at for at, _ in outages if hole.start < at < hole.end), hole.end]
        for start, end in pairwise(cuts):
            pieces.append((hole.node, start, end))
            longer.append((hole.node, moved(start, opening=True), moved(end, opening=False)))
    cut = SmallLog(pieces, log.start, log.end, log.forecasts)
    forecasts = None
    if log.forecasts is not None:
        forecasts = {
            moved(time, opening=True): {
                node: None if closes is None else moved(closes, opening=False) for node, closes in expected.items()
            }
            for time, expected in log.forecasts.items()
        }
    end = log.end + sum(seconds for _, seconds in outages)
    return cut, LogWithoutOutages(SmallLog(longer, log.start, end, forecasts), spans)


@st.composite
def spans(draw: st.DrawFn, end: float) -> list[tuple[float, float]]:
    times = draw(st.sets(st.integers(0, int(end)), max_size=3))
    return [(float(at), float(draw(st.integers(1, 1000)))) for at in sorted(times)]


@settings(max_examples=60, deadline=None)
@given(log=random_logs(), outages=spans(60), forecasts=st.booleans())
def test_the_same_changes_are_seen_at_the_same_times(log, outages, forecasts):
    """Also with estimates, which must be in the future; the log is as long as before."""
    cut, masked = with_outages(log, outages)
    assert (masked.start, masked.end) == (cut.start, cut.end)
    assert masked.masked == tuple((at - cut.start, seconds) for at, seconds in outages)
    assert masked.mean_idle() == pytest.approx(cut.mean_idle())

    def told(changes):
        return [replace(change, opened=frozenset(change.opened), closed=frozenset(change.closed)) for change in changes]

    ours, theirs = told(masked.changes(forecasts=forecasts)), told(cut.changes(forecasts=forecasts))
    assert [change.time for change in ours] == sorted({change.time for change in ours})
    changed = [change for change in ours if change.opened or change.closed or change.expected]
    expected = [change for change in theirs if change.opened or change.closed or change.expected]
    assert [replace(change, expected=None) for change in changed] == [
        replace(change, expected=None) for change in expected
    ]
    for change in ours:
        assert all(closes is None or closes > change.time for closes in (change.expected or {}).values())


@settings(max_examples=25, deadline=None)
@given(
    log=random_logs(),
    trainers=random_trainers(),
    outages=spans(60),
    knowledge=st.sampled_from([Knowledge.NONE, Knowledge.PERFECT]),
)
def test_no_figure_differs(log, trainers, outages, knowledge):
    cut, masked = with_outages(log, outages)
    told = [Contestant("milp", knowledge, "throughput")]
    ours, theirs = (compare(item, TrainerSet("t", trainers, "throughput"), told) for item in (masked, cut))
    for key in KEYS:
        assert ours["policies"][0][key] == theirs["policies"][0][key]
    for key in ("seconds", "mean_idle", "median_idle", "events"):
        assert ours["log"][key] == theirs["log"][key]
    assert ours["dedicated_nodes"] == theirs["dedicated_nodes"]


def test_an_outage_of_a_log_takes_its_time_out_of_the_mean(tmp_path):
    """Ten hours, of which five look like an outage: one node of four idle in the others."""
    file = tmp_path / "idle.csv"
    rows = [f"n{node},10000,28000" for node in range(4)] + ["n0,0,9000", "n0,28000,37000"]
    file.write_text("\n".join(rows))
    log = open_log(file, mask_idle_above=0.9)
    assert log.end - log.start == 19000
    assert log.mean_idle() == pytest.approx(18000 / 19000)
    assert log.masked == ((10000.0, 18000.0),)
    assert open_log(file, mask_idle_above=0.9, mask_longer_than=18001).masked == ()


def test_a_log_of_nothing_but_outages_is_refused(tmp_path):
    (tmp_path / "idle.csv").write_text("a,0,20000\n")
    with pytest.raises(InvalidInput, match="the whole log looks like an outage"):
        open_log(tmp_path / "idle.csv", mask_idle_above=0.9)
