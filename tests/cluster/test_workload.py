"""Main queues: generated, and from job logs."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.cluster.workload import (
    MainJob,
    generate_workload,
    load_workload,
    read_workload,
    save_workload,
)
from freetrain_parsl.errors import InvalidInput, InvalidSettings

HOUR = timedelta(hours=1)


@given(st.integers(0, 2**32), st.integers(1, 64), st.floats(0.0, 1.5))
@settings(deadline=None, max_examples=30)
def test_every_job_fits_the_cluster_and_ends_within_its_walltime(seed, nodes, load):
    jobs = generate_workload(seed=seed, nodes=nodes, load=load)
    assert all(1 <= job.nodes <= nodes and 0 < job.run <= job.walltime for job in jobs)
    assert [job.submit for job in jobs] == sorted(job.submit for job in jobs)
    assert all(job.submit <= 120 for job in jobs)


def test_the_seed_repeats_the_queue_and_another_one_changes_it():
    assert generate_workload(seed=3) == generate_workload(seed=3) != generate_workload(seed=4)


def test_the_load_and_the_mean_run_time_are_those_asked_for():
    jobs = generate_workload(duration=10 * HOUR, seed=1)
    work = sum(job.nodes * job.run for job in jobs)
    assert work == pytest.approx(0.75 * 8 * 36000, rel=0.01)
    assert sum(job.run for job in jobs) / len(jobs) == pytest.approx(20, rel=0.1)


def test_its_shape_is_that_of_the_published_models():
    jobs = generate_workload(nodes=64, duration=100 * HOUR, seed=1)
    sizes = [job.nodes for job in jobs]
    assert sum(size == 1 for size in sizes) / len(sizes) == pytest.approx(0.26, abs=0.03)
    assert sum(size & (size - 1) == 0 for size in sizes) / len(sizes) > 0.7
    used = [job.run / job.walltime for job in jobs]
    assert sum(share == 1 for share in used) / len(used) == pytest.approx(1 / 7, abs=0.02)
    assert 0.4 < sum(used) / len(used) < 0.6
    assert len({job.walltime for job in jobs if job.run < job.walltime}) <= 16


def test_the_cluster_is_full_from_the_beginning():
    jobs = generate_workload(seed=5)
    assert sum(job.nodes for job in jobs if job.submit == 0) >= 8


@pytest.mark.parametrize(
    "arguments", [{"nodes": 0}, {"load": -1.0}, {"duration": timedelta(0)}, {"mean_run": timedelta(0)}]
)
def test_a_queue_that_cannot_be_is_refused(arguments):
    with pytest.raises(InvalidSettings):
        generate_workload(**arguments)


@pytest.mark.parametrize("values", [(-1, 1, 1, 1), (0, 0, 1, 1), (0, 1, -1, 1), (0, 1, 1, 0), (0, 1, float("nan"), 1)])
def test_a_main_job_that_cannot_be_is_refused(values):
    with pytest.raises(InvalidSettings, match="a main job needs"):
        MainJob(*values)


def test_a_saved_queue_is_read_back_the_same(tmp_path):
    jobs = generate_workload(seed=9)
    save_workload(jobs, tmp_path / "queue.json")
    assert load_workload(tmp_path / "queue.json") == jobs


@pytest.mark.parametrize("text", ["", "{", "[[1]]", "[[0, 0, 1, 1]]", "3"])
def test_another_file_is_no_saved_queue(tmp_path, text):
    path = tmp_path / "queue.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=r"queue\.json is not a saved workload"):
        load_workload(path)


def write_log(path, jobs, nodes=100):
    """Write (submit, wait, run, nodes, requested) rows as a log."""
    lines = [f"; MaxNodes: {nodes}"]
    for number, (submit, wait, run, size, requested) in enumerate(jobs, start=1):
        lines.append(f"{number} {submit} {wait} {run} {size} -1 -1 {size} {requested} -1 1 " + "-1 " * 7)
    path.write_text("\n".join(lines))
    return path


class TestFromALog:
    def test_times_count_from_the_first_job_and_are_compressed(self, tmp_path):
        log = write_log(tmp_path / "a.swf", [(1000, 0, 60, 2, 120), (1100, 0, 30, 1, -1)])
        assert read_workload(log, nodes=100, compression=10) == [MainJob(0, 2, 6, 12), MainJob(10, 1, 3, 3)]

    def test_a_part_begins_with_what_ran_and_waited_then(self, tmp_path):
        ran, runs, waits = (0, 0, 50, 1, 60), (10, 20, 200, 2, 300), (20, 100, 40, 3, 50)
        log = write_log(tmp_path / "a.swf", [ran, runs, waits, (150, 0, 5, 4, 6), (200, 0, 5, 5, 6)])
        length = timedelta(seconds=100)
        part = read_workload(log, nodes=100, start=length, duration=length)
        assert part == [MainJob(0, 2, 130, 230), MainJob(0, 3, 40, 50), MainJob(50, 4, 5, 6)]

    def test_scaling_keeps_the_load_and_the_seed_repeats_it(self, tmp_path):
        log = write_log(tmp_path / "a.swf", [(i, 0, 10, 1 + i % 40, 20) for i in range(4000)])
        jobs = read_workload(log, nodes=8, seed=2)
        original = sum(job.nodes for job in read_workload(log, nodes=100)) / 100
        assert sum(job.nodes for job in jobs) / 8 == pytest.approx(original, rel=0.05)
        assert max(job.nodes for job in jobs) <= 4
        assert jobs == read_workload(log, nodes=8, seed=2) != read_workload(log, nodes=8, seed=3)

    def test_clipping_cuts_sizes_off(self, tmp_path):
        log = write_log(tmp_path / "a.swf", [(0, 0, 10, 3, 20), (1, 0, 10, 90, 20)])
        assert [job.nodes for job in read_workload(log, nodes=8, fit="clip")] == [3, 8]

    def test_a_job_that_overran_its_walltime_is_given_the_time_that_it_had(self, tmp_path):
        log = write_log(tmp_path / "a.swf", [(0, 0, 100, 1, 60)])
        assert read_workload(log, nodes=100) == [MainJob(0, 1, 100, 100)]

    @pytest.mark.parametrize("arguments", [{"nodes": 0}, {"compression": 0.0}, {"compression": float("nan")}])
    def test_a_bad_setting_is_refused(self, tmp_path, arguments):
        with pytest.raises(InvalidSettings, match="must be positive"):
            read_workload(write_log(tmp_path / "a.swf", []), **arguments)
