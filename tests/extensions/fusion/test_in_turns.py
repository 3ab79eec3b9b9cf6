"""Members that are not fused but have one base in memory: they stay in one process, and step in turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from freetrain_parsl.extensions.fusion.messages import ArraySized, BaseShared
from freetrain_parsl.extensions.fusion.slot import array_run, sizing
from freetrain_parsl.extensions.fusion.slot.array_mailbox import ArrayMailbox
from freetrain_parsl.extensions.fusion.slot.sizing import ArraySizing
from freetrain_parsl.protocol.messages import RunEnded
from freetrain_parsl.protocol.reports import PauseReason, RunFinished, RunPaused
from freetrain_parsl.training.mailbox import Finished, Paused
from tests.extensions.fusion import test_shared_base
from tests.extensions.fusion.sweep_trainings import alone, distance, together
from tests.extensions.fusion.test_array_run import Slot
from tests.extensions.fusion.test_shared_base import PLACES, tune

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

WHY = "fused they are 0.91 times as fast as one by one"
POINTS = [{"me": me, "lr": 0.01 * (me + 1)} for me in range(3)]
LONG = 20
"""Epochs of 6 steps, of which the sizing of two members takes 108."""


@pytest.fixture(autouse=True)
def _nothing_built() -> Iterator[None]:
    test_shared_base.BUILT.clear()
    PLACES.clear()
    yield
    test_shared_base.BUILT.clear()


@pytest.fixture
def never_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """No array is fast enough, and any base is large."""
    monkeypatch.setattr(sizing, "_GAIN", 1e9)
    monkeypatch.setattr(sizing, "_LEAST_BASE", 0)
    monkeypatch.setattr(array_run, "_SMALLEST_BASE", 0)


def assert_as_alone(root: Path, name: str, value: Any, point: dict[str, Any], most: float = 1e-12) -> None:
    assert distance(value, alone(root / "alone", name, point, tune)) <= most


@pytest.mark.parametrize("act", ["", "merge", "in place"])
def test_each_has_the_base_and_the_result_that_it_has_alone(tmp_path: Path, act: str) -> None:
    points = [{**point, "act": act} for point in POINTS]
    outcome = together(tmp_path / "array", points, tune, sizing=ArraySizing(3, 3, turns=WHY))
    assert outcome.engine.fused_steps == 0
    for me, point in enumerate(points):
        assert_as_alone(tmp_path, str(me), outcome.value(str(me)), point, most=0.0)
    assert PLACES[:12] == [1] * 12


def test_they_step_one_after_another(tmp_path: Path) -> None:
    """So only one has the activations of a step in memory, and none is ahead of the others."""
    steps: list[int] = []

    def note(session: Any, *, me: int) -> None:
        model, _ = session.prepare(torch.nn.Linear(4, 4), torch.optim.SGD, lr=0.1)
        data = session.loader(torch.ones(12, 4), batch_size=4)
        for _ in session.epochs(2):
            for x in data:
                loss = model(x).square().mean()
                steps.append(me)  # before its step, in which the others have theirs
                session.step(loss)

    outcome = together(tmp_path, [{"me": me} for me in range(3)], note, sizing=ArraySizing(3, 3, turns=WHY))
    assert all(isinstance(end, Finished) for end in outcome.ends.values()), outcome.ends
    assert steps == [0, 1, 2] * 6


def test_members_whose_base_is_large_stay_together_where_fusing_does_not_pay(tmp_path: Path, never_pays: None) -> None:
    points = [{**point, "epochs": LONG} for point in POINTS[:2]]
    chosen = ArraySizing(2)
    outcome = together(tmp_path / "array", points, tune, sizing=chosen)
    assert chosen.turns == f"fused they are {chosen.gain:.2f} times as fast as one by one"
    assert (chosen.size, chosen.fused, outcome.engine.reason) == (2, False, "")
    assert outcome.engine.fused_steps == 3 * 18
    for me, point in enumerate(points):
        assert_as_alone(tmp_path, str(me), outcome.value(str(me)), point)


def test_members_whose_base_is_small_train_apart_with_what_they_have_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "_GAIN", 1e9)
    points = [{**point, "epochs": LONG} for point in POINTS[:2]]
    outcome = together(tmp_path / "array", points, tune, sizing=ArraySizing(2))
    assert outcome.engine.reason.startswith("fused they are ")
    for me, point in enumerate(points):
        assert_as_alone(tmp_path, str(me), outcome.value(str(me)), point)


def test_members_that_are_paused_resume_with_one_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox = ArrayMailbox()
    monkeypatch.setitem(test_shared_base.ACTS, "pause", lambda *_: mailbox.end())
    points = [{**point, "act": "pause"} for point in POINTS]
    first = together(tmp_path / "array", points, tune, sizing=ArraySizing(3, 3, turns=WHY), mailbox=mailbox)
    assert {type(end) for end in first.ends.values()} == {Paused}
    assert PLACES == [1] * 6
    PLACES.clear()
    test_shared_base.BUILT.clear()
    second = together(tmp_path / "array", POINTS, tune, sizing=ArraySizing(3, 3, turns=WHY))
    assert PLACES == [1] * 6
    for me, point in enumerate(POINTS):
        end = second.ends[str(me)]
        assert isinstance(end, Finished)
        assert end.progress.samples == 48
        whole = alone(tmp_path / "alone", str(me), point, tune)
        assert distance(end.value["model"], whole["model"]) == 0.0


def test_the_driver_learns_that_they_take_turns_and_what_they_share(tmp_path: Path, never_pays: None) -> None:
    slot = Slot(tmp_path, [{**point, "epochs": LONG} for point in POINTS[:2]], tune, limit=2)
    assert slot.perform() == RunEnded("cohort-1", 7, RunPaused(PauseReason.REQUESTED))
    last = slot.sizes()[-1]
    assert (last.size, last.fused, last.decided, last.reason) == (2, False, True, "")
    assert last.turns.startswith("fused they are ")
    (base,) = [message for message in slot.sent if isinstance(message, BaseShared)]
    frozen = list(test_shared_base.Adapted().double().body.parameters())
    assert base.size > sum(each.nbytes for each in frozen)
    assert all(isinstance(slot.end_of(name).end, RunFinished) for name in "01")
    assert [type(message) for message in slot.sent].index(BaseShared) < slot.sent.index(last)


def test_a_later_array_takes_turns_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_run, "_SMALLEST_BASE", 0)
    slot = Slot(tmp_path, POINTS, tune, size=3, turns=WHY)
    slot.perform()
    assert slot.run.fused_steps == 0
    assert not [message for message in slot.sent if isinstance(message, ArraySized)]
    assert [type(message) for message in slot.sent].count(BaseShared) >= 1
