"""Which checkpoints are copied, in which order, and which count."""

from __future__ import annotations

import pytest

from freetrain_parsl.extensions.globus.storage.carrier import (
    KEPT,
    MOST_ACTIVE,
    Carrier,
    CopyJob,
    CopyKind,
    Parcel,
)
from freetrain_parsl.extensions.globus.storage.collections import TaskState

DONE = TaskState("SUCCEEDED")


@pytest.fixture
def carrier() -> Carrier:
    return Carrier(retry=5.0, longest=60.0)


def send(carrier: Carrier, parcel: Parcel) -> None:
    """Copy a checkpoint to its end."""
    carrier.offer(parcel)
    job = carrier.next_job(0.0)
    assert job is not None
    carrier.on_state(job, DONE, 0.0)
    carrier.on_state(carrier.jobs[-1], DONE, 0.0)
    carrier.shown(parcel, "", 0.0)


def test_a_later_generation_counts_more_than_a_later_step() -> None:
    names = [(1, "step-0000000090"), (2, "step-0000000020"), (2, "step-0000000020-1"), (2, "step-0000000021")]
    parcels = [Parcel("net", generation, name) for generation, name in names]
    assert sorted(parcels, key=lambda parcel: parcel.order) == parcels


def test_the_manifest_follows_the_data_and_only_then_the_checkpoint_is_at_home(carrier: Carrier) -> None:
    carrier.offer(Parcel("net", 1, "step-0000000010"))
    job = carrier.next_job(0.0)
    assert job is not None
    assert job.kind is CopyKind.DATA
    carrier.on_state(job, DONE, 0.0)
    assert [item.kind for item in carrier.jobs] == [CopyKind.MANIFEST]
    assert not carrier.wants("net", "step-0000000010", 1)
    carrier.on_state(carrier.jobs[0], TaskState("FAILED", "quota"), 0.0)
    assert carrier.failures("net") == 1
    assert carrier.next_job(1.0) is None
    again = carrier.next_job(5.0)
    assert again is not None
    assert again.kind is CopyKind.DATA


def test_a_newer_checkpoint_replaces_one_that_waits_and_old_ones_are_removed(carrier: Carrier) -> None:
    for step in range(1, 5):
        carrier.offer(Parcel("net", 1, f"step-{step:010d}"))
    assert {parcel.name for parcel in carrier.leaving()} == {"step-0000000004"}
    for step in range(4, 8):
        send(carrier, Parcel("net", 1, f"step-{step:010d}"))
        for job in [job for job in carrier.jobs if job.kind is CopyKind.REMOVE]:
            carrier.on_state(job, DONE, 0.0)
    job = carrier.next_job(0.0)
    assert job is not None
    assert job.kind is CopyKind.REMOVE
    assert [parcel.name for parcel in job.parcels][-1] == f"step-{7 - KEPT:010d}"


def test_at_most_two_tasks_are_active(carrier: Carrier) -> None:
    for number in range(5):
        carrier.offer(Parcel(f"net-{number}", 1, "step-0000000010"))
        carrier.next_job(0.0)
    assert len(carrier.jobs) == MOST_ACTIVE


def test_checkpoints_of_another_course_of_training_do_not_stand_for_those_here(carrier: Carrier) -> None:
    carrier.found("net", [Parcel("net", 2, "step-0000000010")])
    assert not carrier.wants("net", "step-0000000010", 2)
    assert carrier.wants("net", "step-0000000010", 3)


def test_jobs_survive_the_driver_and_fetches_begin_anew(carrier: Carrier) -> None:
    jobs = [CopyJob(kind, (Parcel("net", 3, "step-0000000010", 7),), "s", "t") for kind in CopyKind]
    assert [CopyJob.from_json(job.as_json()) for job in jobs] == jobs
    assert [job.kind for job in carrier.restore(jobs)] == [CopyKind.FETCH, CopyKind.REMOVE]
    assert [job.kind for job in carrier.jobs] == [CopyKind.DATA, CopyKind.MANIFEST]
