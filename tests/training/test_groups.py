"""Fragments of several processes: the result does not depend on how many there are."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed import PrefixStore
from training_crew import (
    SAMPLES,
    Dictionary,
    Normed,
    Outcome,
    classify,
    evaluate_on_first,
    fail,
    name_interface,
    run_member,
)

from freetrain_parsl.errors import PeerFailed
from freetrain_parsl.training.fragment import Finished, Membership, Paused
from freetrain_parsl.training.group import failures, joining
from freetrain_parsl.training.group.admission import Admission
from freetrain_parsl.training.group.process_group import Group, join
from freetrain_parsl.training.group.reachability import check_reachable
from freetrain_parsl.training.group.rendezvous import RendezvousStore

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

pytestmark = pytest.mark.slow


def first(outcomes: list[Outcome | None]) -> Outcome:
    assert outcomes[0] is not None
    return outcomes[0]


def parameters(end: Finished | Paused | None) -> torch.Tensor:
    """Return all parameters of a checkpoint in one vector."""
    assert end is not None
    assert end.checkpoint is not None
    model = torch.load(end.checkpoint / "state.pt", weights_only=True)["objects"]["model"]
    return torch.cat([tensor.flatten() for tensor in model.values()])


def undisturbed(root: Path, **kwargs: int) -> Finished:
    outcome = run_member(classify, kwargs, root=root, membership=Membership("net"))
    assert isinstance(outcome.end, Finished), outcome.error
    return outcome.end


@pytest.mark.smoke
def test_a_training_through_1_4_2_3_processes_ends_as_an_undisturbed_one(crew: Crew, tmp_path: Path) -> None:
    """Same counts, same history, parameters within 1e-4; every pause is requested by another member."""
    whole = undisturbed(tmp_path / "whole")
    pids = set()
    for world_size, pause_after in ((1, 5), (4, 11), (2, 14)):
        outcomes = crew.run(world_size, tmp_path / "cut", classify, pause_after=pause_after, pause_rank=world_size - 1)
        pids |= {outcome.pid for outcome in outcomes if outcome}
        ends = [outcome.end for outcome in outcomes if outcome]
        assert [type(end) for end in ends] == [Paused] * world_size
        assert {end.progress.step for end in ends if end} == {pause_after}
        assert ends[0].checkpoint is not None
    outcomes = crew.run(3, tmp_path / "cut", classify)
    end = first(outcomes).end
    assert isinstance(end, Finished)
    assert {outcome.pid for outcome in outcomes if outcome} <= pids  # warm: the processes are the same
    assert (end.progress.samples, end.progress.step) == (whole.progress.samples, whole.progress.step)
    assert end.progress.samples == 3 * SAMPLES
    assert (end.progress.samples_lost, end.progress.duplicate_samples) == (0, 0)
    for row, expected in zip(end.value["history"], whole.value["history"], strict=True):
        assert row == pytest.approx(expected, abs=1e-5)
    assert torch.allclose(parameters(end), parameters(whole), atol=1e-4)


def test_a_batch_smaller_than_the_group_gives_the_same_gradients(crew: Crew, tmp_path: Path) -> None:
    """Batches of 3 samples, the last of 2, on 4 processes."""
    whole = undisturbed(tmp_path / "whole", batch_size=3, epochs=1)
    end = first(crew.run(4, tmp_path / "cut", classify, batch_size=3, epochs=1)).end
    assert isinstance(end, Finished)
    assert (end.progress.samples, end.progress.samples_lost, end.progress.duplicate_samples) == (
        SAMPLES,
        0,
        0,
    )
    assert end.value["loss"] == pytest.approx(whole.value["loss"], abs=1e-5)
    assert torch.allclose(parameters(end), parameters(whole), atol=1e-4)


def test_survivors_of_a_killed_peer_say_so_and_can_go_on(crew: Crew, tmp_path: Path) -> None:
    """SIGKILL in the middle of a step; the survivors form a group of two in the same processes, from a checkpoint."""
    first(crew.run(3, tmp_path, classify, pause_after=4))
    outcomes = crew.run(3, tmp_path, classify, kill_rank=1, kill_after=9)
    assert outcomes[1] is None
    survivors = [outcome for outcome in outcomes if outcome]
    assert [outcome.error.split(":")[0] for outcome in survivors] == ["PeerFailed"] * 2
    assert max(outcome.seconds for outcome in survivors) < 10
    after = crew.run(2, tmp_path, classify)
    assert {outcome.pid for outcome in after if outcome} == {outcome.pid for outcome in survivors}
    end = first(after).end
    assert isinstance(end, Finished)
    assert end.progress.resumed_from == 4
    assert (end.progress.samples_lost, end.progress.duplicate_samples) == (0, 0)


def test_an_error_on_one_member_is_its_own_there_and_a_lost_peer_elsewhere(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.run(2, tmp_path, fail, rank=1)
    assert [outcome.error.split(":")[0] for outcome in outcomes if outcome] == [
        "PeerFailed",
        "ZeroDivisionError",
    ]


def test_user_code_is_the_same_with_and_without_a_group(crew: Crew, tmp_path: Path) -> None:
    """Validation on the first member alone does not hang; the methods and the state are those of the user's model."""
    outcome = first(crew.run(2, tmp_path, evaluate_on_first))
    assert isinstance(outcome.end, Finished), outcome.error
    assert outcome.end.value == list(Normed().state_dict())


def test_the_interface_is_set_as_long_as_the_group_lasts(crew: Crew, tmp_path: Path) -> None:
    """NCCL reads the variable when it first connects, for the first gradients."""
    alone = run_member(name_interface, {}, root=tmp_path / "alone", membership=Membership("net"))
    ends = [outcome.end for outcome in crew.run(2, tmp_path, name_interface) if outcome]
    assert [end.value for end in [alone.end, *ends]] == [None, "lo", "lo"]


def test_all_members_refuse_a_training_whose_checkpoints_are_all_damaged(crew: Crew, tmp_path: Path) -> None:
    paused = first(crew.run(2, tmp_path, classify, pause_after=4)).end
    assert isinstance(paused, Paused)
    assert paused.checkpoint is not None
    (paused.checkpoint / "state.pt").write_bytes(b"")
    outcomes = crew.run(2, tmp_path, classify)
    assert [outcome.error.split(":")[0] for outcome in outcomes if outcome] == ["DamagedCheckpoint"] * 2


class _Operation:
    """Of a group: ends after some looks, or never, as when gloo has lost its message."""

    def __init__(self, looks: int | None) -> None:
        self.looks = looks

    def is_completed(self) -> bool:
        return self.looks == 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.looks is not None and timeout is not None:
            self.looks -= 1
        if self.looks != 0:
            raise RuntimeError("Operation timed out!")
        return True


def test_an_operation_whose_message_is_lost_ends_once_the_group_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_LOST", 0.0)
    group = Group(0, 2)
    slow, lost = _Operation(looks=3), _Operation(looks=None)
    group._await(slow)  # type: ignore[arg-type]
    assert slow.looks == 0
    group.abort()
    with pytest.raises(PeerFailed, match="gloo has lost a message"):
        group._await(lost)  # type: ignore[arg-type]
    with pytest.raises(PeerFailed, match="gloo has lost a message"):
        group.end_transfers([_Transfer()])  # type: ignore[list-item]


class _Transfer:
    """Never ends."""

    def wait(self) -> None:
        threading.Event().wait()


def test_a_failed_transfer_is_a_failed_peer() -> None:
    class Failed:
        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(PeerFailed, match="Connection closed by peer"):
        Group(0, 2).end_transfers([Failed()])  # type: ignore[list-item]


def test_members_that_do_not_come_are_lost_peers() -> None:
    store = RendezvousStore(Dictionary(), timedelta(seconds=0.2))
    membership = Membership("net", rank=0, world_size=2, meeting=timedelta(seconds=0.2), interface="lo")
    with pytest.raises(PeerFailed, match="did not all connect"):
        join(membership, store)
    assert not torch.distributed.is_initialized()


def test_a_member_that_arrives_and_does_not_connect_is_a_failed_peer_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process was stopped, or killed, between the meeting and the connection."""
    monkeypatch.setattr(joining, "CONNECT_TIMEOUT", timedelta(seconds=1))
    backend = Dictionary()
    here = Membership("net", world_size=2, interface="lo", address="127.0.0.1")
    other = threading.Thread(target=_arrive_and_vanish, args=(RendezvousStore(backend),))
    other.start()
    begun = time.monotonic()
    with pytest.raises(PeerFailed, match="did not all connect"):
        join(here, RendezvousStore(backend))
    other.join()
    assert time.monotonic() - begun < here.meeting.total_seconds() / 2
    assert not torch.distributed.is_initialized()


def _arrive_and_vanish(store: RendezvousStore) -> None:
    group = PrefixStore("net/0", store)
    check_reachable(group, 1, 2, "127.0.0.1")
    Admission.share(group, 1, 2, timedelta(seconds=10))
