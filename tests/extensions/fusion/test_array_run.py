"""Arrays as slots run them: real training jobs, and the messages that their driver would see."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from parsl.serialize import deserialize

from freetrain_parsl.errors import UsageError
from freetrain_parsl.executor.jobs.port import TO_DRIVER, TO_SLOT
from freetrain_parsl.executor.payloads.payloads import error_in, pack_training
from freetrain_parsl.extensions.fusion.engine.engine import FusionEngine
from freetrain_parsl.extensions.fusion.messages import (
    AddMember,
    ArraySized,
    MemberEnded,
    MemberReport,
    ReleaseMember,
    StartArray,
)
from freetrain_parsl.extensions.fusion.slot.array_run import ArrayRun
from freetrain_parsl.extensions.fusion.slot.array_sizes import MeasuredSize, read_array_size, write_array_size
from freetrain_parsl.extensions.fusion.slot.sizing import ArraySizing
from freetrain_parsl.protocol.codec import Envelope, decode, encode
from freetrain_parsl.protocol.messages import PauseRun, RunEnded
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.protocol.reports import PauseReason, RunFailed, RunFinished, RunPaused
from tests.extensions.fusion.sweep_trainings import alone, classify, distance

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Slot:
    """Runs an array; `on_message` is called with each message to the driver."""

    def __init__(
        self,
        root: Path,
        points: list[dict[str, Any]],
        function: Callable[..., Any] = classify,
        *,
        size: int | None = None,
        announced: int | None = None,
        limit: int | None = None,
        turns: str = "",
    ) -> None:
        self.root = root
        self.function = function
        self.sent: list[Any] = []
        self.on_message: Callable[[Any], None] = lambda _message: None
        names = tuple(str(number) for number in range(announced or len(points)))
        command = StartArray("cohort-1", 7, names, limit, size, turns)
        self.run = ArrayRun(self._passed(command, TO_SLOT), send=self._send)
        for number, point in enumerate(points):
            self.add(str(number), point)

    def add(self, name: str, point: dict[str, Any]) -> None:
        payload = pack_training(self.function, (), point)
        message = AddMember("cohort-1", 7, SessionOptions(name, self.root), payload)
        assert self.run.handle(self._passed(message, TO_SLOT))

    def perform(self) -> RunEnded:
        return self._passed(self.run.perform(), TO_DRIVER)

    def _send(self, message: Any) -> None:
        self.sent.append(self._passed(message, TO_DRIVER))
        self.on_message(self.sent[-1])

    @staticmethod
    def _passed(message: Any, known: Any) -> Any:
        return decode(encode(Envelope(message)), known).message

    def end_of(self, name: str) -> MemberEnded:
        (end,) = [m for m in self.sent if isinstance(m, MemberEnded) and m.member == name]
        return end

    def sizes(self) -> list[ArraySized]:
        return [m for m in self.sent if isinstance(m, ArraySized)]


POINTS = [{"lr": 0.01 * (number + 1)} for number in range(4)]


def test_each_member_ends_with_the_result_that_it_has_alone(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "array", POINTS[:2])
    slot.on_message = lambda m: slot.add("2", POINTS[2]) if isinstance(m, MemberEnded) and m.member == "0" else None
    end = slot.perform()
    assert end == RunEnded("cohort-1", 7, RunPaused(PauseReason.REQUESTED))
    for number, point in enumerate(POINTS[:3]):
        ended = slot.end_of(str(number))
        assert isinstance(ended.end, RunFinished)
        value = alone(tmp_path / "alone", str(number), point)
        assert distance(deserialize(ended.payload)["losses"], value["losses"]) < 1e-10
        assert ended.end.progress.samples == value["metrics"]["samples"]
    assert {m.member for m in slot.sent if isinstance(m, MemberReport)} == {"0", "1", "2"}


def test_a_default_dtype_that_the_members_module_sets_is_that_of_each_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is imported with the first member; the second computed in single precision."""
    (tmp_path / "double_precision.py").write_text(
        "import torch\ntorch.set_default_dtype(torch.float64)\ndef dtype():\n    return torch.ones(1).dtype\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    namespace: dict[str, Any] = {"__name__": "another"}
    exec("from double_precision import dtype\ndef train(session):\n    return dtype()", namespace)
    slot = Slot(tmp_path, [{}, {}], namespace["train"])
    del sys.modules["double_precision"]  # as in a slot
    torch.set_default_dtype(torch.float32)
    slot.perform()
    assert [deserialize(slot.end_of(str(number)).payload) for number in range(2)] == [torch.float64] * 2
    assert torch.get_default_dtype() == torch.float32


def test_the_driver_learns_how_many_members_an_array_can_have(tmp_path: Path) -> None:
    slot = Slot(tmp_path, [{"lr": 0.01, "epochs": 40}, {"lr": 0.1, "epochs": 40}])
    slot.perform()
    sizes = slot.sizes()
    assert [(sized.size, sized.fused, sized.decided) for sized in sizes[:1]] == [(2, True, False)]
    assert sizes[1].gain_size == 2
    assert sizes[1].gain > 0


@pytest.mark.slow
def test_the_next_run_uses_the_size_that_an_earlier_one_has_measured(tmp_path: Path) -> None:
    first = Slot(tmp_path, POINTS[:1])
    write_array_size(tmp_path, first.run._key(), MeasuredSize(4, 2.5))
    slot = Slot(tmp_path, [{**point, "epochs": 8} for point in POINTS])
    slot.perform()
    assert slot.sizes() == [ArraySized("cohort-1", 7, 4, fused=True, gain=2.5, gain_size=4, decided=True)]


def test_a_decided_size_is_kept_for_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArraySizing, "count", lambda sizing, *_: _decide(sizing))
    slot = Slot(tmp_path, POINTS[:2])
    slot.perform()
    assert read_array_size(tmp_path, slot.run._key()) == MeasuredSize(2, 1.0)


def _decide(sizing: ArraySizing) -> bool:
    sizing.decided = sizing.fused = True
    return True


def test_an_array_whose_size_is_known_does_not_try_others(tmp_path: Path) -> None:
    slot = Slot(tmp_path, POINTS[:2], size=2)
    slot.perform()
    assert slot.sizes() == []


def test_trainings_that_differ_are_reported_with_the_reason(tmp_path: Path) -> None:
    slot = Slot(tmp_path, [{"kind": "mlp"}, {"kind": "cnn"}], size=2)
    slot.perform()
    (sized,) = slot.sizes()
    assert not sized.fused
    assert "modules differ" in sized.reason
    assert all(isinstance(slot.end_of(name).end, RunFinished) for name in "01")


def test_the_others_are_fused_once_the_one_that_differs_has_left(tmp_path: Path) -> None:
    points = [{"kind": kind, "epochs": 6} for kind in ("mlp", "cnn", "mlp")]
    slot = Slot(tmp_path, points, size=3)

    def release(message: Any) -> None:
        structures.update({message.member: message.report.structure} if type(message) is MemberReport else {})
        if structures.get("1") not in (None, structures.get("0")):
            slot.run.handle(ReleaseMember("cohort-1", 7, "1"))

    structures: dict[str, str] = {}
    slot.on_message = release
    slot.perform()
    assert structures["0"] == structures["2"] != structures["1"]
    assert isinstance(slot.end_of("1").end, RunPaused)
    for name in "02":
        value = deserialize(slot.end_of(name).payload)
        assert distance(value["losses"], alone(tmp_path / "alone", name, points[0])["losses"]) < 1e-10
    assert slot.run.fused_steps > 0


def test_a_released_member_pauses_and_the_others_end(tmp_path: Path) -> None:
    slot = Slot(tmp_path, POINTS[:2], size=2)
    slot.on_message = lambda m: slot.run.handle(ReleaseMember("cohort-1", 7, "1")) if type(m) is MemberReport else None
    slot.perform()
    assert isinstance(slot.end_of("0").end, RunFinished)
    paused = slot.end_of("1").end
    assert isinstance(paused, RunPaused)
    assert paused.reason is PauseReason.REQUESTED
    assert paused.progress.checkpoint_step is not None


def test_all_members_pause(tmp_path: Path) -> None:
    slot = Slot(tmp_path, POINTS, size=2)
    slot.on_message = lambda m: slot.run.handle(PauseRun("cohort-1", 7)) if type(m) is MemberReport else None
    slot.perform()
    paused = {m.member for m in slot.sent if isinstance(m, MemberEnded) and isinstance(m.end, RunPaused)}
    assert paused == {"0", "1"}, "the others have not begun"


def test_commands_for_other_runs_are_refused(tmp_path: Path) -> None:
    slot = Slot(tmp_path, POINTS[:1])
    assert not slot.run.handle(PauseRun("cohort-1", 6))
    assert not slot.run.mailbox.pausing


def test_an_array_waits_for_its_first_members(tmp_path: Path) -> None:
    slot = Slot(tmp_path, POINTS[:1], size=2, announced=2)
    late = threading.Timer(0.3, slot.add, ("1", POINTS[1]))
    late.start()
    slot.perform()
    late.join()
    assert {m.member for m in slot.sent if isinstance(m, MemberEnded)} == {"0", "1"}


def test_an_array_that_is_paused_before_its_members_arrive_ends(tmp_path: Path) -> None:
    slot = Slot(tmp_path, [], announced=1)
    slot.run.handle(PauseRun("cohort-1", 7))
    assert slot.perform().end == RunPaused(PauseReason.REQUESTED)
    assert slot.sent == []


def exits(session: Any, *, fails: bool) -> str:
    if fails:
        raise SystemExit(3)
    return "done"


def test_a_member_that_exits_fails_alone(tmp_path: Path) -> None:
    slot = Slot(tmp_path, [{"fails": True}, {"fails": False}], exits)
    slot.perform()
    failed = slot.end_of("0")
    assert isinstance(failed.end, RunFailed)
    assert isinstance(error_in(failed.payload), UsageError)
    assert deserialize(slot.end_of("1").payload) == "done"


def test_a_function_that_cannot_be_loaded_fails_alone(tmp_path: Path) -> None:
    slot = Slot(tmp_path, [{"fails": False}], exits)
    slot.run.handle(AddMember("cohort-1", 7, SessionOptions("bad", tmp_path), b"no pickle"))
    slot.perform()
    assert isinstance(slot.end_of("bad").end, RunFailed)
    assert isinstance(slot.end_of("0").end, RunFinished)


def test_an_array_that_is_too_large_for_the_memory_gives_its_members_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(_engine: FusionEngine, losses: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(FusionEngine, "_compute", no_memory)
    slot = Slot(tmp_path, POINTS, size=4)
    slot.perform()
    (sized,) = slot.sizes()
    assert (sized.size, sized.fused, sized.decided) == (2, True, True)
    assert "memory" in sized.reason
    assert {type(slot.end_of(str(number)).end) for number in range(4)} == {RunPaused}


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("[enforce fail] DefaultCPUAllocator: can't")]
)
def test_members_that_load_more_than_the_memory_holds_are_given_back(tmp_path: Path, error: Exception) -> None:
    """Before they are fused, all their models are in memory, too."""

    def greedy(session: Any, **_: Any) -> None:
        raise error

    slot = Slot(tmp_path, POINTS[:2], greedy)
    slot.perform()
    assert {type(slot.end_of(str(number)).end) for number in range(2)} == {RunPaused}
    assert [sized.size for sized in slot.sizes()] == [1]


def test_a_member_that_needs_too_much_memory_by_itself_fails(tmp_path: Path) -> None:
    def greedy(session: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    slot = Slot(tmp_path, [{}], greedy)
    slot.perform()
    assert isinstance(slot.end_of("0").end, RunFailed)
