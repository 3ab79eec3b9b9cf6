"""Groups over NCCL: its rules on a CPU (`fake_nccl`), and NCCL itself with several processes on one GPU.

The second needs ``-m gpu``, ``NCCL_MULTI_RANK_GPU_ENABLE=1`` and NCCL 2.30.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from test_regroup import BITWISE, EPOCHS, Event, assert_same, disturbed, first, undisturbed
from training_crew import classify, pass_states

from freetrain_parsl.training.fragment import Finished

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

pytestmark = pytest.mark.parametrize(
    "nccl_crew",
    [pytest.param("fake", marks=pytest.mark.slow), pytest.param("nccl", marks=pytest.mark.gpu)],
    indirect=True,
)


@pytest.mark.parametrize("mode", [{}, BITWISE, {"micro_batch": 2}], ids=["default", "deterministic", "micro-batches"])
def test_members_come_go_and_die_and_the_result_is_the_same(
    nccl_crew: Crew, tmp_path: Path, mode: dict[str, Any]
) -> None:
    """2 -> 4 -> 3 -> one of them killed -> the first replaced; no checkpoint is read."""
    events = (Event(2, "regroup", 4), Event(7, "regroup", 3), Event(12, "kill", 0), Event(17, "replace first"))
    end = disturbed(nccl_crew, tmp_path, 2, events, **mode)
    assert end.progress.resumed_from is None
    assert_same(end, undisturbed(tmp_path / "whole", **mode), bits=mode is BITWISE)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_member_that_is_stopped_is_left_behind(nccl_crew: Crew, tmp_path: Path, rank: int) -> None:
    """The others wait for it in an operation on the device, until they are told to continue without it."""
    gate = tmp_path / "gate"
    run = nccl_crew.start(3, tmp_path / "cut", classify, epochs=EPOCHS, gates={5: gate})
    run.until(lambda: run.progress)
    stopped = run.members[rank]
    os.kill(stopped.process.pid, signal.SIGSTOP)
    try:
        gate.touch()
        others = [member for member in run.members if member is not stopped]
        stopped.lost = True
        run.order(others, [], abort=True)
        end = first(run)
    finally:
        os.kill(stopped.process.pid, signal.SIGKILL)
    assert_same(end, undisturbed(tmp_path / "whole"), bits=False)


def test_states_of_all_kinds_arrive(nccl_crew: Crew, tmp_path: Path) -> None:
    for outcome in nccl_crew.run(4, tmp_path, pass_states):
        assert outcome is not None
        assert isinstance(outcome.end, Finished), outcome.error
        assert outcome.end.value is True
