"""Delays and usage."""

from __future__ import annotations

import pytest

from freetrain_parsl.cluster.accounting import MainRecord, Usage, delays


def record(job_id, submit, start, end, nodes=2, planned_run=5.0):
    return MainRecord(job_id, nodes, 10.0, submit, start, end, planned_run)


def test_jobs_that_went_as_simulated_have_no_delay_to_the_last_bit():
    begin = 0.1 + 0.2  # not exact in floating point
    records = [record("1", begin, begin, 3.7), record("2", 1.1, 3.7, 7.3), record("3", 1.2, 7.3, None)]
    assert [item.delay for item in delays(records, 2, 8.0)] == [0, 0, 0]


def test_a_late_job_is_late_and_so_is_what_it_held_up():
    records = [record("1", 0.0, 0.5, 3.5), record("2", 1.0, 3.5, 5.0)]
    assert [item.delay for item in delays(records, 2, 9.0)] == [0.5, 0.5]


def test_a_job_that_still_waits_is_late_from_its_expected_start_on():
    found = delays([record("1", 0.0, None, None)], 2, 3.0)
    assert (found[0].start, found[0].delay) == (None, 3.0)


def test_a_job_that_is_not_due_is_left_out():
    records = [record("1", 0.0, 0.0, None), record("2", 1.0, None, None)]
    assert [item.job_id for item in delays(records, 2, 3.0)] == ["1"]


def test_a_job_that_runs_longer_than_planned_counts_as_it_runs():
    records = [record("1", 0.0, 0.0, None, planned_run=2.0), record("2", 1.0, None, None)]
    assert [item.job_id for item in delays(records, 2, 4.0)] == ["1"]


def test_usage_sums_node_seconds():
    usage = Usage()
    usage.advance(2.0, 4, 1)
    usage.advance(3.0, 2, 2)
    assert (usage.offered, usage.preemptible) == (pytest.approx(10.0), pytest.approx(4.0))
