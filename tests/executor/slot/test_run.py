"""A training job's run in a slot, between the driver's messages and a simulated training job."""

from __future__ import annotations

import asyncio
import errno
import io
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from parsl.serialize import deserialize

from freetrain_parsl.errors import PeerFailed, StorageUnavailable, TrainingError, UsageError
from freetrain_parsl.executor.payloads.payloads import error_in
from freetrain_parsl.executor.slot.run_end import end_by
from freetrain_parsl.executor.slot.training_run import TrainingRun
from freetrain_parsl.protocol.codec import Envelope, decode, encode
from freetrain_parsl.protocol.messages import (
    TO_DRIVER,
    ChangeBatch,
    ChangeGroup,
    PauseRun,
    Place,
    RunEnded,
    RunReport,
    StoreReply,
    StoreRequest,
)
from freetrain_parsl.protocol.reports import (
    GroupFailed,
    Joined,
    PauseReason,
    PeersFailed,
    Progress,
    Ready,
    RunFailed,
    RunFinished,
    RunPaused,
    StorageFailed,
)
from freetrain_parsl.training import fragment
from freetrain_parsl.training.mailbox import Finished, Membership, Paused
from tests.executor.slot.start_run import start_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from freetrain_parsl.protocol.messages import ToDriver
    from freetrain_parsl.protocol.reports import Report
    from freetrain_parsl.training.mailbox import ControlMailbox

    Play = Callable[..., Finished | Paused]


class _Slot:
    """A run whose training job is a function of the test, executed in a thread."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[ToDriver] = []
        self._directory = directory
        self._monkeypatch = monkeypatch
        self.run: TrainingRun

    def started(self, *, joining: bool = False, rank: int = 0) -> TrainingRun:
        command = start_run(self._directory, run=3, place=None if joining else Place(7, rank, 2))
        self.run = TrainingRun(command, interface=None, send=self.sent.append)
        return self.run

    def plays(self, play: Play) -> RunEnded:
        """Execute the run with `play` as the training job; return the report of its end."""

        def run_fragment(_function: object, _args: object, _kwargs: object, **given: Any) -> Finished | Paused:
            return play(given)

        self._monkeypatch.setattr(fragment, "run_fragment", run_fragment)
        return self.run.perform()

    def changes(self, rank: int | None, *, abort: bool = False, run: int = 3) -> None:
        place = None if rank is None else Place(9, rank, 3)
        self.run.handle(ChangeGroup("t", run, 9, place, abort=abort))

    def pauses(self, run: int = 3) -> None:
        self.run.handle(PauseRun("t", run))


@pytest.fixture
def slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Slot:
    return _Slot(tmp_path, monkeypatch)


def test_a_member_trains_at_the_place_that_it_was_given(slot: _Slot) -> None:
    slot.started()

    def play(given: dict[str, Any]) -> Finished:
        assert (given["membership"].generation, given["membership"].rank) == (7, 0)
        assert given["options"].checkpoint_interval is None
        return Finished("value", Progress(step=5))

    ended = slot.plays(play)
    assert (ended.run, ended.end) == (3, RunFinished(Progress(step=5)))
    assert deserialize(ended.payload) == "value"


def test_who_becomes_the_first_in_place_gives_the_value(slot: _Slot) -> None:
    slot.started(rank=1)

    def play(given: dict[str, Any]) -> Finished:
        slot.changes(0)
        regroup = given["mailbox"].take_command()
        assert regroup.membership == Membership("t", 9, 0, 3)
        given["report"](Joined(9, 0.5, 0.1))
        return Finished("value", Progress())

    assert deserialize(slot.plays(play).payload) == "value"
    assert slot.sent[-1] == RunReport("t", 3, Joined(9, 0.5, 0.1))


def test_a_newcomer_has_no_place_until_it_is_taken_in_and_waits_for_the_others_step(slot: _Slot) -> None:
    slot.started(joining=True)

    def play(given: dict[str, Any]) -> Finished:
        assert given["membership"] is None
        given["report"](Ready())
        slot.changes(2)
        membership = given["mailbox"].take_command().membership
        assert membership.rank == 2
        assert membership.meeting > Membership("t").meeting
        return Finished("value", Progress())

    assert slot.plays(play).payload == b""
    assert slot.sent == [RunReport("t", 3, Ready())]


def test_an_order_about_another_run_is_ignored(slot: _Slot) -> None:
    run = slot.started()
    slot.changes(0, run=2)
    slot.pauses(run=2)
    assert run.mailbox.pending is None
    assert not run.mailbox.pause_requested.is_set()


def test_a_batch_size_reaches_the_training_unless_it_is_for_another_run(slot: _Slot) -> None:
    run = slot.started()
    assert not run.handle(ChangeBatch("t", 2, 64))
    assert run.mailbox.take_batch() is None
    assert run.handle(ChangeBatch("t", 3, 128))
    assert (run.mailbox.take_batch(), run.mailbox.batch_pending) == (128, False)


def test_a_newcomer_that_was_taken_in_is_needed_before_its_first_step(slot: _Slot) -> None:
    """A part of a sharded state may only be there: a node that is reclaimed then must give it away first."""
    run = slot.started(joining=True)

    def play(given: dict[str, Any]) -> Finished:
        assert run.expendable
        slot.changes(2)
        given["mailbox"].take_command()
        given["report"](Joined(9, 0.5, 0.1))
        assert not run.expendable
        return Finished("value", Progress())

    slot.plays(play)


def test_a_pause_lets_a_member_reach_its_boundary_and_ends_a_newcomers_waiting(slot: _Slot) -> None:
    member = slot.started()
    slot.pauses()
    assert member.mailbox.pause_requested.is_set()
    assert member.mailbox.take_command(0.01) is None
    newcomer = slot.started(joining=True)
    slot.pauses()
    assert newcomer.mailbox.take_command(None) is None, "does not wait"


def test_an_abort_breaks_the_collectives_and_the_rendezvous_that_the_training_waits_in(slot: _Slot) -> None:
    run = slot.started()
    aborted = threading.Event()
    refused = threading.Event()

    def play(given: dict[str, Any]) -> Paused:
        given["mailbox"].on_abort = aborted.set
        store = given["meet"](given["membership"])
        assert slot.sent == []
        threading.Timer(0.05, lambda: slot.changes(None, abort=True)).start()
        with pytest.raises(TimeoutError):
            store.get("key")
        refused.set()
        assert given["mailbox"].take_command().membership is None
        return Paused(PauseReason.LEFT)

    ended = slot.plays(play)
    assert ended.end == RunPaused(PauseReason.LEFT)
    assert aborted.is_set()
    assert refused.is_set()
    assert not run.mailbox.pause_requested.is_set()


def test_a_group_that_was_abandoned_before_the_main_thread_enters_it_is_not_waited_for(slot: _Slot) -> None:
    slot.started()

    def play(given: dict[str, Any]) -> Finished:
        slot.changes(0, abort=True)
        store = given["meet"](given["membership"])
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            store.get("key")
        assert time.monotonic() - began < 30, "not the whole minute"
        later = given["meet"](given["mailbox"].take_command().membership)
        reply = StoreReply("t/9", 0, ok=True, sizes=(5,), payload=b"value")
        threading.Timer(0.05, slot.run.handle, [reply]).start()
        assert later.get("key") == b"value"
        return Finished("value", Progress(step=5))

    slot.plays(play)


def test_answers_reach_the_store_of_their_group(slot: _Slot) -> None:
    run = slot.started()

    def answer(message: ToDriver) -> None:
        assert isinstance(message, StoreRequest)
        run.handle(StoreReply("t/8", message.request, ok=True, sizes=(9,), payload=b"another's"))
        run.handle(StoreReply(message.group, message.request, ok=True, sizes=(3,), payload=message.group.encode()))

    run._send = answer

    def play(given: dict[str, Any]) -> Paused:
        first = given["meet"](Membership("t", 7, 0, 2))
        second = given["meet"](Membership("t", 9, 0, 2))
        assert (first.get("x"), second.get("x")) == (b"t/7", b"t/9")
        return Paused(PauseReason.CLOSING)

    assert slot.plays(play).end == RunPaused(PauseReason.CLOSING)


def test_nothing_is_lost_with_who_has_not_joined_or_is_stranded_or_has_made_no_step(slot: _Slot) -> None:
    def report(*reports: Report) -> Callable[[dict[str, Any]], Paused]:
        def play(given: dict[str, Any]) -> Paused:
            mailbox: ControlMailbox = given["mailbox"]
            mailbox.underway.set()
            slot.changes(0)
            for one in reports:
                given["report"](one)
            return Paused(PauseReason.REQUESTED)

        return play

    assert slot.started().expendable
    slot.plays(report())
    assert not slot.run.expendable
    slot.plays(report(GroupFailed(7, "connection closed")))
    assert not slot.run.expendable, "it may be the last that has the state"
    assert slot.sent[-1] == RunReport("t", 3, GroupFailed(7, "connection closed"))
    slot.plays(report(Joined(9, 0.0, 0.0)))
    assert not slot.run.expendable
    slot.started(joining=True)
    slot.plays(report(Ready()))
    assert slot.run.expendable


def test_a_lost_peer_and_an_error_of_the_user_are_told_apart(slot: _Slot) -> None:
    slot.started()

    def lose(given: dict[str, Any]) -> Finished:
        raise PeerFailed("no command arrived")

    def fail(given: dict[str, Any]) -> Finished:
        raise KeyError("theirs")

    assert slot.plays(lose).end == PeersFailed(7, "no command arrived")
    failed = slot.plays(fail)
    assert failed.end == RunFailed("KeyError: 'theirs'")
    assert isinstance(error_in(failed.payload), KeyError)


def test_sys_exit_is_an_error_of_the_user_that_does_not_end_the_driver(slot: _Slot) -> None:
    slot.started()

    def leave(_given: dict[str, Any]) -> Finished:
        sys.exit(3)

    ended = slot.plays(leave)
    assert isinstance(ended.end, RunFailed)
    error = error_in(ended.payload)
    assert isinstance(error, UsageError)
    assert str(error) == "the training function called sys.exit(3); return from it instead"


def test_an_exception_that_is_no_error_fails_the_training_and_does_not_end_the_driver(slot: _Slot) -> None:
    """It ended the slot: the training job was repeated as after a crash, and its future had another error."""
    slot.started()

    def leave(_given: dict[str, Any]) -> Finished:
        raise asyncio.CancelledError("timed out")

    ended = slot.plays(leave)
    error = error_in(ended.payload)
    assert type(error) is TrainingError
    assert str(error) == "the training function raised CancelledError: timed out"


def test_a_keyboard_interrupt_ends_the_process_and_is_in_the_log(
    slot: _Slot, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal of another's is not the function's failure: the driver counts it as a crash."""
    slot.started()

    def play(_given: dict[str, Any]) -> Finished:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        slot.plays(play)
    assert "KeyboardInterrupt" in capsys.readouterr().err


def test_a_keyboard_interrupt_in_a_member_of_an_array_never_reaches_the_driver_as_it_is() -> None:
    end, payload = end_by(KeyboardInterrupt())
    assert end == RunFailed("TrainingError: the training function raised KeyboardInterrupt:")
    assert type(error_in(payload)) is TrainingError


def test_a_module_that_only_the_driver_finds_is_explained() -> None:
    """A script's changes of sys.path are not on the nodes, which is not what the plain message says."""
    end, payload = end_by(ModuleNotFoundError("No module named 'helper'", name="helper"))
    error = error_in(payload)
    assert isinstance(error, ModuleNotFoundError)
    assert str(error).startswith("No module named 'helper'; a node finds modules in the directory of the function's")
    assert len(str(error).splitlines()) == 1
    assert isinstance(end, RunFailed)
    assert "sys.path" in end.reason

    class OwnError(ModuleNotFoundError):
        pass

    end, _ = end_by(OwnError("mine"))
    assert end == RunFailed("OwnError: mine"), "the user's own are passed on as they are"


@pytest.mark.parametrize("stream", ["closed", "removed"])
def test_an_error_arrives_although_the_training_cannot_print_it(
    slot: _Slot, stream: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A slot that failed instead would count as a crash, and the training job would be repeated."""
    stderr = io.StringIO() if stream == "closed" else None
    monkeypatch.setattr(sys, "stderr", stderr)
    if stderr is not None:
        stderr.close()
    slot.started()

    def play(_given: dict[str, Any]) -> Finished:
        raise ValueError("the user's own mistake")

    ended = slot.plays(play)
    assert ended.end == RunFailed("ValueError: the user's own mistake")
    assert "the user's own mistake" in capfd.readouterr().err


class _WithoutText(Exception):
    def __str__(self) -> str:
        return self.no_such_attribute  # type: ignore[attr-defined, no-any-return]


def test_an_exception_without_a_text_is_an_error_of_the_user(slot: _Slot) -> None:
    slot.started()

    def play(_given: dict[str, Any]) -> Finished:
        raise _WithoutText

    assert slot.plays(play).end == RunFailed("_WithoutText: (its text cannot be shown: AttributeError)")


def test_a_text_that_utf8_cannot_encode_arrives(slot: _Slot) -> None:
    """Python has the bytes of a file name like this."""
    slot.started()

    def play(_given: dict[str, Any]) -> Finished:
        raise ValueError("no file 'x\udcff.png'")

    ended = slot.plays(play)
    assert ended.end == RunFailed(r"ValueError: no file 'x\udcff.png'")
    assert decode(encode(Envelope(ended)), TO_DRIVER).message == ended


def test_a_checkpoint_directory_that_cannot_be_used_is_told_as_such_in_a_message_that_the_driver_takes(
    slot: _Slot,
) -> None:
    slot.started()

    def play(_given: dict[str, Any]) -> Finished:
        raise StorageUnavailable("cannot prepare /ck/t: No space left", "the checkpoint directory /ck is full (ENOSPC)")

    ended = slot.plays(play)
    assert isinstance(ended.end, StorageFailed)
    assert ended.end.condition == "the checkpoint directory /ck is full (ENOSPC)"
    assert decode(encode(Envelope(ended)), TO_DRIVER).message == ended


def test_an_error_of_the_users_own_files_is_the_users(slot: _Slot) -> None:
    slot.started()

    def play(_given: dict[str, Any]) -> Finished:
        raise OSError(errno.ENOSPC, "No space left on device", "/home/me/results.csv")

    ended = slot.plays(play)
    assert isinstance(ended.end, RunFailed)
    assert isinstance(error_in(ended.payload), OSError)
