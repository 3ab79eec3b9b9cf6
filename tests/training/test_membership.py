"""Forming groups, and distinguishing a failed peer from an error in user code."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from training_crew import Dictionary

from freetrain_parsl.errors import PeerFailed
from freetrain_parsl.training.fragment import Membership
from freetrain_parsl.training.group.admission import Admission
from freetrain_parsl.training.group.failures import gist, is_lost_peer
from freetrain_parsl.training.group.joining import gloo_environment
from freetrain_parsl.training.group.process_group import join
from freetrain_parsl.training.group.reachability import check_reachable
from freetrain_parsl.training.group.rendezvous import RendezvousStore

if TYPE_CHECKING:
    from collections.abc import Sequence

GLOO = "[/a/gloo/transport/tcp/pair.cc:537] Read error [::1]:55: Connection reset by peer. Check the logs."


@pytest.fixture
def store() -> RendezvousStore:
    return RendezvousStore(Dictionary(), timedelta(seconds=0.2))


def test_the_store_keeps_torchs_contract(store: RendezvousStore) -> None:
    """Through torch's PrefixStore, as in a rendezvous."""
    prefixed = dist.PrefixStore("net/1", store)
    prefixed.set("key", "value")
    assert prefixed.get("key") == b"value"
    assert (prefixed.add("count", 2), prefixed.add("count", 3)) == (2, 5)
    assert prefixed.check(["key"])
    assert not prefixed.check(["key", "nothing"])
    prefixed.wait(["key", "count"], timedelta(seconds=1))
    assert prefixed.delete_key("key")
    assert not prefixed.check(["key"])


def test_waiting_for_what_does_not_come_ends(store: RendezvousStore) -> None:
    with pytest.raises(Exception, match="was not set"):
        store.wait(["nothing"], timedelta(seconds=0.05))


def test_a_get_waits_for_another_member(store: RendezvousStore) -> None:
    threading.Timer(0.05, store.set, ("late", "value")).start()
    assert store.get("late") == b"value"


def test_a_group_of_one_needs_neither_store_nor_network() -> None:
    group = join(Membership("net"), None)
    assert group.sum(torch.tensor([3])).tolist() == [3]
    assert group.gather(torch.tensor([3]))[0].tolist() == [3]
    assert not dist.is_initialized()
    group.leave()


def test_a_group_of_one_is_a_mesh_if_it_is_asked_for_one() -> None:
    group = join(Membership("net", generation=4), None)
    mesh = group.mesh(torch.device("cpu"))
    assert (mesh.size(), group.mesh(torch.device("cpu"))) == (1, mesh)
    group.leave()
    assert not dist.is_initialized()


def test_meshes_of_different_groups_differ_for_torch() -> None:
    """Torch's cached data of the mesh of one group would be wrong in another, where ranks differ."""
    meshes = []
    for generation in (1, 2):
        group = join(Membership("net", generation=generation), None)
        meshes.append(group.mesh(torch.device("cpu")))
        group.leave()
    assert meshes[0] != meshes[1]


def test_the_interface_is_set_for_the_group_only(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    before = dict(os.environ)
    membership = Membership("net", world_size=2, meeting=timedelta(seconds=0.1), interface="lo")
    with pytest.raises(PeerFailed):
        join(membership, store)
    assert dict(os.environ) == before


class _Counting(Dictionary):
    """Counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def set(self, key: str, value: bytes) -> None:
        self.calls += 1
        super().set(key, value)

    def get(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        self.calls += bool(keys)
        return super().get(keys, timeout)


@pytest.mark.parametrize("size", [3, 9])
def test_a_member_makes_as_many_store_calls_whatever_the_size_of_the_group(size: int) -> None:
    backend = _Counting()

    def form(rank: int) -> dist.ProcessGroupGloo:
        calls = RendezvousStore(backend, timedelta(seconds=20))
        store = dist.PrefixStore("net/1", calls)
        check_reachable(store, rank, size, "127.0.0.1")
        Admission.share(store, rank, size, timedelta(seconds=20))
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))

    with gloo_environment("lo"), ThreadPoolExecutor(size) as pool:
        groups = list(pool.map(form, range(size)))
    assert len(groups) == size
    assert backend.calls == 7 * size + 1  # the first member publishes what all have reported


def test_after_a_meeting_that_failed_the_next_is_at_the_same_keys_as_for_a_newcomer() -> None:
    """Otherwise members of the first group and newcomers would wait for each other at different keys."""
    membership = Membership("net", world_size=2, meeting=timedelta(seconds=0.1), interface="lo")
    met: list[list[str]] = []
    for _ in range(2):
        met.append([])
        backend = Dictionary()
        backend.set = lambda key, value, keys=met[-1]: keys.append(key)
        with pytest.raises(PeerFailed):
            join(membership, RendezvousStore(backend))
    assert met[0] == met[1] != []


@pytest.mark.parametrize(
    "error",
    [
        PeerFailed("gone"),
        RuntimeError(GLOO),
        RuntimeError("Timed out waiting 10000ms for recv operation to complete"),
        dist.DistBackendError("NCCL communicator was aborted on rank 1."),
        dist.DistNetworkError("socket"),
    ],
)
def test_failed_collectives_are_lost_peers(error: BaseException) -> None:
    assert is_lost_peer(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x6 and 5x3)"),
        RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one."),
        ConnectionResetError("Connection reset by peer"),  # of a database that the user code accesses
        ValueError("gloo"),
        MemoryError(),
    ],
)
def test_errors_of_the_user_are_not(error: BaseException) -> None:
    assert not is_lost_peer(error)


def test_torchs_long_messages_are_cut_to_what_they_say() -> None:
    assert gist(RuntimeError(GLOO)) == "Read error [::1]:55: Connection reset by peer"
    assert gist(RuntimeError()) == "RuntimeError"
