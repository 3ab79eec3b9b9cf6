"""Real slots of a node that jobs share: what a job takes, how one is ended alone, and what it leaves."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from parsl.serialize import deserialize

from freetrain_parsl.executor.payloads.payloads import pack_training
from freetrain_parsl.executor.slot.neighbours import Neighbour, neighbours_of, publish
from freetrain_parsl.executor.slot.node_watch import NodeWatch
from freetrain_parsl.executor.slot.slot import SlotSettings, run_slot
from freetrain_parsl.extensions.fusion.messages import AddMember, ArraySized, StartArray
from freetrain_parsl.protocol.messages import Hello, Output, Place, RunEnded, StartRun
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import PauseReason, RunFailed, RunFinished, RunPaused
from tests.executor.slot.test_place import _Driver, _train, running_slot

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

MIB = 1 << 20


def _run_in_pool(pool: Path, settings: SlotSettings, token: str) -> None:
    """Run the first of two slots of a small node, which is out of memory as soon as a file says so."""
    os.environ.update(PARSL_WORKER_RANK="0", PARSL_WORKER_COUNT="2")
    os.environ.pop("OMP_NUM_THREADS", None)
    multiprocessing.current_process()._config["tempdir"] = str(pool)  # type: ignore[attr-defined]
    low = pool / "low"
    NodeWatch.__init__.__kwdefaults__["memory"] = lambda: (1000 * MIB, 0 if low.exists() else 500 * MIB)  # type: ignore[index]
    run_slot(settings, token)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    path.mkdir()
    return path


@pytest.fixture
def driver(tmp_path: Path, pool: Path) -> Iterator[_Driver]:
    with running_slot(tmp_path, _run_in_pool, pool) as driver:
        yield driver


def _describes_itself(session: Any) -> tuple[str, int, int, str]:
    import torch

    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(b"left behind")
    return file.name, len(os.sched_getaffinity(0)), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def test_a_job_has_its_own_temporary_files_and_cores(driver: _Driver, tmp_path: Path, pool: Path) -> None:
    cores = max(1, len(os.sched_getaffinity(0)) // 2)
    for run in (1, 2):
        ended = _train(driver, tmp_path, run, _describes_itself)
        assert isinstance(ended.end, RunFinished)
        name, cpus, threads, variable = deserialize(ended.payload)
        assert Path(name).parent == pool / "t0"
        assert (threads, variable) == (cores, str(cores))
        assert cpus <= max(cores, 2)  # a core may have two hyperthreads
        driver.awaits(Hello)  # of the next process
        assert not Path(name).exists()
    assert neighbours_of(pool, 1) == []


def _needs_much(session: Any) -> None:
    block = b"x" * (900 * MIB)
    time.sleep(60)
    assert block


def test_a_job_over_its_share_is_told_then_ended_alone_and_its_slot_goes_on(
    driver: _Driver, tmp_path: Path, pool: Path
) -> None:
    publish(pool, 1, Neighbour("theirs", 1 << 30))
    begun = time.monotonic()
    options = SessionOptions("t", tmp_path / "1")
    driver.send(StartRun("t", 1, options, pack_training(_needs_much, (), {}), Place(1, 0, 1), 60.0))
    assert b"more than its share of 0.5 GiB (1 of 2 slots)" in driver.awaits(Output).payload
    assert [one.job for one in neighbours_of(pool, 1)] == ["training job 't'"]
    (pool / "low").touch()
    ended = driver.awaits(RunEnded)
    assert isinstance(ended.end, RunFailed)
    assert ended.end.reason.startswith("training job 't' was ended on node ")
    assert "its share was 0.5 GiB" in ended.end.reason
    with pytest.raises(Exception, match="of host memory"):
        deserialize(ended.payload).reraise()
    driver.awaits(Hello)  # the slot continues
    assert isinstance(_train(driver, tmp_path, 2, _describes_itself).end, RunFinished)
    assert time.monotonic() - begun < 50


def test_an_array_over_its_share_leaves_its_members_to_smaller_ones(
    driver: _Driver, tmp_path: Path, pool: Path
) -> None:
    publish(pool, 1, Neighbour("array-8 of cohort-1", 1 << 30))
    (pool / "low").touch()
    driver.send(StartArray("cohort-1", 7, ("a", "b")))
    for name in "ab":
        driver.send(AddMember("cohort-1", 7, SessionOptions(name, tmp_path), pack_training(_needs_much, (), {})))
    sized = driver.awaits(ArraySized)
    assert (sized.size, sized.fused, sized.decided) == (1, True, True)
    assert sized.reason.startswith("array-7 of cohort-1, with 2 members, was ended on node ")
    assert "its share was 0.5 GiB" in sized.reason
    assert driver.awaits(RunEnded).end == RunPaused(PauseReason.REQUESTED)
    driver.awaits(Hello)  # the slot continues
