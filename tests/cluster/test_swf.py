"""The reader of Standard Workload Format."""

from __future__ import annotations

import gzip

import pytest

from freetrain_parsl.cluster.swf import SwfJob, SwfLog
from freetrain_parsl.errors import InvalidInput

HEAD = "; Version: 2\n;   MaxNodes: 10 nodes\n; MaxProcs: 40\n; a remark\n"
TAIL = " -1 -1 -1 -1 -1 -1 -1"


def row(number=1, submit=0, wait=5, run=60, processors=8, requested=8, time=120, status=1):
    return f"{number} {submit} {wait} {run} {processors} -1 -1 {requested} {time} -1 {status}{TAIL}"


@pytest.fixture
def write(tmp_path):
    def write(*lines, head=HEAD, name="log.swf"):
        path = tmp_path / name
        data = (head + "\n".join(lines) + "\n").encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


@pytest.mark.parametrize("name", ["log.swf", "log.swf.gz"])
def test_jobs_are_read_in_nodes_from_plain_and_compressed_logs(write, name):
    log = SwfLog(write(row(), "", "; in between", row(2, 30, -1, 1.5, 9, time=-1, status=0), name=name))
    assert (log.nodes, log.processors_per_node, log.header["Version"]) == (10, 4, "2")
    assert list(log) == [SwfJob(1, 0, 5, 60, 2, 120, 1), SwfJob(2, 30, 0, 1.5, 3, None, 0)]
    assert (log.unusable, log.malformed) == (0, 0)


def test_the_requested_size_stands_in_for_an_unknown_one(write):
    assert [job.nodes for job in SwfLog(write(row(processors=-1, requested=16)))] == [4]


def test_jobs_that_never_ran_or_have_no_size_are_counted(write):
    log = SwfLog(write(row(run=-1), row(processors=-1, requested=-1), row(submit=-1), row()))
    assert len(list(log)) == 1
    assert log.unusable == 3


def test_a_job_that_had_processors_for_less_than_a_second_ran(write):
    """Unless it was cancelled: then it is unknown whether it started."""
    log = SwfLog(write(row(run=0), row(run=0, processors=-1), row(run=0, status=5)))
    assert [job.run for job in log] == [0]
    assert log.unusable == 2


def test_processors_per_node_may_be_given(write):
    """If the header lacks one of the numbers, or counts something else."""
    log = SwfLog(write(row(processors=9), head="; MaxProcs: 40\n"), processors_per_node=4)
    assert (log.nodes, [job.nodes for job in log]) == (10, [3])
    assert [job.nodes for job in SwfLog(write(row(processors=9)), processors_per_node=8)] == [2]


def in_partition(partition, **fields):
    return row(**fields).removesuffix(TAIL) + f" -1 -1 -1 -1 {partition} -1 -1"


def test_the_jobs_of_one_partition_are_read(write):
    head = HEAD + "; Partition: 1 batch\n; Partition:  2  debug\n"
    path = write(in_partition(1), in_partition(2, number=7), in_partition(1), head=head)
    assert [job.number for job in SwfLog(path, partition="2")] == [7]
    assert [job.number for job in SwfLog(path, partition="debug")] == [7]
    assert len(list(SwfLog(path))) == 3
    with pytest.raises(InvalidInput, match=r"no partition 'gpu'; its header lists 1 \(batch\), 2 \(debug\)"):
        SwfLog(path, partition="gpu")
    with pytest.raises(InvalidInput, match=r"no partition '3'"):
        SwfLog(path, partition="3")
    with pytest.raises(InvalidInput, match="its header lists none; give a partition's number"):
        SwfLog(write(row()), partition="batch")


@pytest.mark.parametrize("line", ["1 2 3", row() + " 7", row().replace("60", "sixty"), row(run="nan")])
def test_a_malformed_line_is_refused_by_file_and_number_or_skipped_and_counted(write, line):
    path = write(row(), line, row(3))
    with pytest.raises(InvalidInput, match=r"log\.swf, line 6: expected 18 numbers"):
        list(SwfLog(path))
    log = SwfLog(path, lenient=True)
    assert [job.number for job in log] == [1, 3]
    assert log.malformed == 1
    assert len(list(log)) == 2
    assert log.malformed == 1


def test_a_log_without_the_size_of_its_cluster_is_refused_where_that_is_needed(write):
    log = SwfLog(write(row(), head=""))
    assert len(list(log)) == 1
    with pytest.raises(InvalidInput, match="neither MaxNodes nor MaxProcs"):
        _ = log.nodes


def test_a_damaged_or_missing_file_is_refused_by_name(tmp_path, write):
    path = write(row(), name="log.swf.gz")
    path.write_bytes(path.read_bytes()[:-12])
    for bad in (path, tmp_path / "none.swf"):
        with pytest.raises(InvalidInput, match=f"{bad.name}: cannot be read as a job log"):
            list(SwfLog(bad))
