"""A training's run in a slot: the driver's messages on one side, a training that is played on the other."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING, Any

import pytest
from parsl.serialize import deserialize

from freetrain_parsl.errors import PeerLost, StorageUnavailable
from freetrain_parsl.executor.headers import TO_DRIVER, fault_in
from freetrain_parsl.executor.protocol import Message, error_in
from freetrain_parsl.executor.slot.training_run import Run
from freetrain_parsl.training import fragment
from freetrain_parsl.training.terms import (
    Finished,
    Membership,
    Paused,
    PauseReason,
    Progress,
    Ready,
    Regrouped,
    Stranded,
)
from tests.executor.run_order import run_order

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from freetrain_parsl.training.terms import Notice, Report

    Play = Callable[..., Finished | Paused]


class _Slot:
    """A run whose training is a function of the test, performed in a thread."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[Message] = []
        self._directory = directory
        self._monkeypatch = monkeypatch
        self.run: Run

    def ordered(self, *, joining: bool = False, **changes: Any) -> Run:
        place = {} if joining else {"generation": 7, "rank": 0, "world_size": 2}
        fields = {"run": 3, **place, **changes}
        order = run_order(self._directory, joining=joining, **fields)
        self.run = Run(order, interface=None, send=self.sent.append)
        return self.run

    def plays(self, play: Play) -> Message:
        """Perform the run with `play` for the training; what is told at its end."""

        def run_fragment(_function: object, _args: object, _kwargs: object, **given: Any) -> Finished | Paused:
            return play(given)

        self._monkeypatch.setattr(fragment, "run_fragment", run_fragment)
        return self.run.perform()

    def told(self, kind: str, **header: Any) -> None:
        self.run.handle(Message(kind, {"trainer": "t", "run": 3, **header}))


@pytest.fixture
def slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Slot:
    return _Slot(tmp_path, monkeypatch)


def order(rank: int | None, *, abort: bool = False, generation: int = 9) -> dict[str, Any]:
    return {"next": generation, "rank": rank, "world_size": 3, "abort": abort}


def test_a_member_trains_at_the_place_that_it_was_given(slot: _Slot) -> None:
    slot.ordered()

    def play(given: dict[str, Any]) -> Finished:
        assert (given["membership"].generation, given["membership"].rank) == (7, 0)
        assert given["options"].checkpoint_interval is None
        return Finished("value", Progress(step=5))

    ended = slot.plays(play)
    assert (ended["run"], ended["outcome"], ended["progress"]["step"]) == (3, "finished", 5)
    assert deserialize(ended.payload) == "value"


def test_who_becomes_the_first_in_place_gives_the_value(slot: _Slot) -> None:
    slot.ordered(rank=1)

    def play(given: dict[str, Any]) -> Finished:
        slot.told("regroup", **order(0))
        regroup = given["notice"].take_order()
        assert regroup.membership == Membership("t", 9, 0, 3)
        given["report"](Regrouped(9, 0.5, 0.1))
        return Finished("value", Progress())

    assert deserialize(slot.plays(play).payload) == "value"
    assert slot.sent[-1].header == {"trainer": "t", "run": 3, "generation": 9, "paused": 0.5, "transferred": 0.1}


def test_a_newcomer_has_no_place_until_it_is_taken_in_and_waits_for_the_others_step(slot: _Slot) -> None:
    slot.ordered(joining=True)

    def play(given: dict[str, Any]) -> Finished:
        assert given["membership"] is None
        given["report"](Ready())
        slot.told("regroup", **order(2))
        membership = given["notice"].take_order().membership
        assert membership.rank == 2
        assert membership.meeting > Membership("t").meeting
        return Finished("value", Progress())

    assert slot.plays(play).payload == b""
    assert [message.type for message in slot.sent] == ["ready"]


def test_an_order_about_another_run_is_ignored(slot: _Slot) -> None:
    run = slot.ordered()
    run.handle(Message("regroup", {"trainer": "t", "run": 2, **order(0)}))
    run.handle(Message("pause", {"trainer": "t", "run": 2}))
    assert run.notice.pending is None
    assert not run.notice.pause_requested.is_set()


def test_a_pause_lets_a_member_reach_its_boundary_and_ends_a_newcomers_waiting(slot: _Slot) -> None:
    member = slot.ordered()
    slot.told("pause")
    assert member.notice.pause_requested.is_set()
    assert member.notice.take_order(0.01) is None
    newcomer = slot.ordered(joining=True)
    slot.told("pause")
    assert newcomer.notice.take_order(None) is None, "does not wait"


def test_an_abort_breaks_the_collectives_and_the_rendezvous_that_the_training_waits_in(slot: _Slot) -> None:
    run = slot.ordered()
    aborted = threading.Event()
    refused = threading.Event()

    def play(given: dict[str, Any]) -> Paused:
        given["notice"].on_abort = aborted.set
        store = given["meet"](given["membership"])
        assert slot.sent == []
        threading.Timer(0.05, slot.told, ["regroup"], order(None, abort=True)).start()
        with pytest.raises(TimeoutError):
            store.get("key")
        refused.set()
        assert given["notice"].take_order().membership is None
        return Paused(PauseReason.LEFT)

    ended = slot.plays(play)
    assert (ended["outcome"], ended["reason"]) == ("paused", PauseReason.LEFT.value)
    assert aborted.is_set()
    assert refused.is_set()
    assert not run.notice.pause_requested.is_set()


def test_answers_reach_the_store_of_their_group(slot: _Slot) -> None:
    run = slot.ordered()

    def answer(message: Message) -> None:
        header = {"group": message["group"], "request": message["request"], "ok": True, "number": 0}
        run.handle(Message("kv", {**header, "group": "t/8"}, b"another's"))
        run.handle(Message("kv", header, message["group"].encode()))

    run._send = answer

    def play(given: dict[str, Any]) -> Paused:
        first = given["meet"](Membership("t", 7, 0, 2))
        second = given["meet"](Membership("t", 9, 0, 2))
        assert (first.get("x"), second.get("x")) == (b"t/7", b"t/9")
        return Paused(PauseReason.CLOSING)

    assert slot.plays(play)["reason"] == PauseReason.CLOSING.value


def test_nothing_is_lost_with_who_has_not_joined_or_is_stranded_or_has_made_no_step(slot: _Slot) -> None:
    def report(*reports: Report) -> Callable[[dict[str, Any]], Paused]:
        def play(given: dict[str, Any]) -> Paused:
            notice: Notice = given["notice"]
            notice.underway.set()
            slot.told("regroup", **order(0))
            for one in reports:
                given["report"](one)
            return Paused(PauseReason.REQUESTED)

        return play

    assert slot.ordered().expendable
    slot.plays(report())
    assert not slot.run.expendable
    slot.plays(report(Stranded("connection closed")))
    assert slot.run.expendable
    told = {"trainer": "t", "run": 3, "generation": 7, "reason": "connection closed", "unreachable": ()}
    assert slot.sent[-1].header == told
    slot.plays(report(Regrouped(9, 0.0, 0.0)))
    assert not slot.run.expendable
    slot.ordered(joining=True)
    slot.plays(report(Ready()))
    assert slot.run.expendable


def test_a_lost_peer_and_an_error_of_the_user_are_told_apart(slot: _Slot) -> None:
    slot.ordered()

    def lose(given: dict[str, Any]) -> Finished:
        raise PeerLost("no order came")

    def fail(given: dict[str, Any]) -> Finished:
        raise KeyError("theirs")

    assert (slot.plays(lose)["outcome"], slot.plays(lose)["reason"]) == ("peer_lost", "no order came")
    failed = slot.plays(fail)
    assert failed["outcome"] == "failed"
    assert isinstance(error_in(failed.payload), KeyError)


def test_a_checkpoint_directory_that_cannot_be_used_is_told_as_such_in_a_message_that_the_driver_takes(
    slot: _Slot,
) -> None:
    slot.ordered()

    def play(_given: dict[str, Any]) -> Finished:
        raise StorageUnavailable("cannot prepare /ck/t: No space left", "the checkpoint directory /ck is full (ENOSPC)")

    ended = slot.plays(play)
    assert (ended["outcome"], ended["condition"]) == ("storage", "the checkpoint directory /ck is full (ENOSPC)")
    assert fault_in(ended.header, TO_DRIVER["ended"]) is None


def test_an_error_of_the_users_own_files_is_the_users(slot: _Slot) -> None:
    slot.ordered()

    def play(_given: dict[str, Any]) -> Finished:
        raise OSError(errno.ENOSPC, "No space left on device", "/home/me/results.csv")

    ended = slot.plays(play)
    assert ended["outcome"] == "failed"
    assert isinstance(error_in(ended.payload), OSError)
