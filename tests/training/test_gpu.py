"""The tests of `test_regroup` and `test_groups`, on a GPU that several processes share.

A session uses a GPU if available, so on such a machine all tests of this folder use it; these are the ones in which it
makes a difference. NCCL only supports processes that share a GPU if it is told to (see `test_over_nccl`): otherwise
their gradients use gloo.
"""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest
import torch
from crew import Crew
from gpu_trainings import classify_in_half_precision
from test_regroup import BITWISE, Event, assert_same, disturbed, undisturbed
from training_crew import Outcome, classify, net, run_member

from freetrain_parsl.training.fragment import Finished, Membership, Paused

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU (or no -m gpu)"),
]


def first(outcomes: list[Outcome | None]) -> Outcome:
    assert all(outcome and not outcome.error for outcome in outcomes), outcomes
    assert outcomes[0] is not None
    return outcomes[0]


@pytest.mark.parametrize("mode", [{}, BITWISE], ids=["default", "deterministic"])
def test_members_on_one_card_come_go_and_die_and_the_result_is_the_same(
    crew: Crew, tmp_path: Path, mode: dict[str, Any]
) -> None:
    """1 -> 2 -> 1 -> 2 -> one of them killed, in place; bitwise equal where this is guaranteed."""
    events = (
        Event(2, "regroup", 2),
        Event(6, "regroup", 1),
        Event(10, "regroup", 2),
        Event(14, "kill", 1),
    )
    end = disturbed(crew, tmp_path, 1, events, **mode)
    assert end.progress.resumed_from is None
    assert_same(end, undisturbed(tmp_path / "whole", **mode), bits=mode is BITWISE)


def test_half_precision_with_a_scaler_is_the_same_on_one_process_and_on_two(crew: Crew, tmp_path: Path) -> None:
    alone = run_member(classify_in_half_precision, {}, root=tmp_path / "whole", membership=Membership("net"))
    assert isinstance(alone.end, Finished), alone.error
    end = first(crew.run(2, tmp_path / "cut", classify_in_half_precision)).end
    assert isinstance(end, Finished)
    assert (end.value["device"], end.value["scale"]) == ("cuda", alone.end.value["scale"])
    assert torch.allclose(end.value["parameters"], alone.end.value["parameters"], atol=1e-2)


def test_a_checkpoint_of_a_gpu_goes_on_without_one(crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its tensors are in host memory."""
    paused = first(crew.run(2, tmp_path, classify, pause_after=4)).end
    assert isinstance(paused, Paused)
    assert paused.checkpoint is not None
    state = torch.load(paused.checkpoint / "state.pt", weights_only=True)
    net().load_state_dict(state["objects"]["model"])
    moments = [value for entry in state["objects"]["optimizer"]["state"].values() for value in entry.values()]
    assert {value.device.type for value in moments} == {"cpu"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    without = Crew(multiprocessing.get_context("spawn"))  # with the environment of now
    try:
        end = first(without.run(1, tmp_path, classify)).end
    finally:
        without.close()
    assert isinstance(end, Finished)
    assert end.progress.resumed_from == 4
