"""Profiles and workloads are read as written, and what is wrong is refused with file and line."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.simulate.jobs.profiles import read_profiles
from freetrain_parsl.extensions.simulate.jobs.workload import read_workload
from tests.extensions.simulate.small_profiles import LIMITS, small_applications, write_profiles

HEADER = "name,time,application,num_replicas,batch_size"


@pytest.fixture
def directory(tmp_path):
    return write_profiles(tmp_path)


def test_applications_are_as_written(directory):
    applications = read_profiles(directory)
    net = applications["net"]
    assert (net.epochs, *astuple(net.limits)) == LIMITS["net"][:5]
    assert list(net.milestones) == [0, 500, 1000, 1500, 2000]
    assert net.step_times((1,), 36) == pytest.approx((0.36, 0.0))
    assert net.step_times((2, 1), 8) == pytest.approx((0.18, 0.1))


def _edit(directory, file, old, new):
    path = directory / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("applications.csv", "net,4,32", "net,4,1024", r"applications.csv:2: 'init_batch' \(1024\) is more than"),
        ("applications.csv", "net,4,", "net,0,", "applications.csv:2: 'epochs' must be a positive number"),
        ("applications.csv", "table,", "net,", "applications.csv:3: application 'net' is listed already"),
        ("applications.csv", "epochs", "epoch", "applications.csv:1: the header lacks epochs"),
        ("throughput.csv", "0.080000", "-1", "throughput.csv:2: 'step_time' must be a positive number, got '-1'"),
        ("throughput.csv", "0.080000,0.000000", "0.08,0.08", "throughput.csv:2: 'sync_time' is part of 'step_time'"),
        ("throughput.csv", "net,1,1,1,8", "net,1,1,2,8", "throughput.csv:2: placement 2: nodes must be 1 and gpus 2"),
        ("throughput.csv", "net,1,1,1,8", "net,1,1,x,8", "throughput.csv:2: 'placement' is a digit"),
        ("throughput.csv", "net,1,1,1,8", "net,1,1,1,16", "throughput.csv:2: .* begin at 16 samples"),
        ("throughput.csv", "net,1,1,1,8", "nets,1,1,1,8", r"throughput.csv:2: unknown application 'nets' \(did you"),
        ("efficiency.csv", "net,32,2,1000", "net,32,3,1000", "efficiency.csv:4: epoch 3 of batch 32 is listed already"),
        ("efficiency.csv", "net,32,4,2000", "net,32,5,2000", "efficiency.csv:4: .* epoch 4 of 4 is missing"),
        ("efficiency.csv", "net,32,2,1000", "net,32,2,400", "efficiency.csv:3: .* 'progress' must increase, got 400"),
        ("efficiency.csv", "net,32,2,", "net,32,", "efficiency.csv:3: expected 8 values, got 7"),
    ],
)
def test_wrong_profiles_are_refused_with_file_and_line(directory, file, old, new, message):
    _edit(directory, file, old, new)
    with pytest.raises(InvalidInput, match=message) as refusal:
        read_profiles(directory)
    assert "\n" not in str(refusal.value)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"applications\.csv: cannot be read"):
        read_profiles(tmp_path)


def test_application_without_times_is_refused(directory):
    path = directory / "throughput.csv"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith("table")) + "\n")
    with pytest.raises(InvalidInput, match=r"throughput\.csv: application 'table' has no times on one GPU"):
        read_profiles(directory)


def test_workload_is_ordered_by_submission(tmp_path):
    applications = small_applications(tmp_path)
    file = tmp_path / "jobs.csv"
    file.write_text(f"{HEADER}\nlate,30,net,2,64\nearly,10.5,table,1,256\n")
    jobs = read_workload(file, applications, gpus=4)
    assert [(job.name, job.time, job.gpus, job.batch) for job in jobs] == [("early", 10.5, 1, 256), ("late", 30, 2, 64)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a,-1,net,1,64", "'time' must be zero or more, got '-1'"),
        ("a,nan,net,1,64", "'time' must be zero or more, got 'nan'"),
        ("a,0,nett,1,64", r"unknown application 'nett' \(did you mean 'net'\?\); available: net"),
        ("a,0,net,5,64", "job 'a' asks for 5 GPUs, the cluster has 4"),
        ("a,0,net,1.5,64", "'num_replicas' must be an integer"),
        ("a,0,net,1,1024", "job 'a': batch 1024 is more than the 512 of 'net'"),
        (",0,net,1,64", "'name' is empty"),
        ("first,0,net,1,64", "a job 'first' already exists"),
    ],
)
def test_wrong_jobs_are_refused_with_the_line(tmp_path, line, message):
    file = tmp_path / "jobs.csv"
    file.write_text(f"{HEADER}\nfirst,0,net,1,64\n{line}\n")
    with pytest.raises(InvalidInput, match=rf"jobs\.csv:3: {message}"):
        read_workload(file, small_applications(tmp_path), gpus=4)


def test_empty_workload_is_refused(tmp_path):
    file = tmp_path / "jobs.csv"
    file.write_text(f"{HEADER}\n")
    with pytest.raises(InvalidInput, match="contains no jobs"):
        read_workload(file, small_applications(tmp_path), gpus=4)
