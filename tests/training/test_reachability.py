"""Before a group forms, all its members get the same list of pairs that do not reach each other."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from freetrain_parsl.errors import PeerFailed
from freetrain_parsl.training.group import reachability
from freetrain_parsl.training.group.reachability import check_reachable

NOWHERE = "203.0.113.1"  # not the address of any interface: listening there fails


def answers(addresses: list[str], timeout: float = 20.0) -> list[BaseException | None]:
    """Run the check on all members at the same time; return each member's error."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=timeout))

    def one(rank: int) -> BaseException | None:
        try:
            check_reachable(store, rank, len(addresses), addresses[rank])
        except PeerFailed as error:
            return error
        return None

    with ThreadPoolExecutor(len(addresses)) as members:
        return list(members.map(one, range(len(addresses))))


@pytest.mark.parametrize("size", [2, 5])
def test_nothing_is_said_of_members_that_reach_each_other(size):
    assert answers(["127.0.0.1"] * size) == [None] * size


def test_all_learn_of_a_member_that_nobody_reaches():
    told = answers(["127.0.0.1", NOWHERE, "127.0.0.1"])
    assert [error.unreachable for error in told] == [((2, 1),)] * 3
    assert "in a group of 3, rank 2 does not reach 1" in str(told[0])


def test_a_member_that_answers_nothing_is_unreachable_within_seconds(monkeypatch):
    """Its connection queue is full: no packet is answered, as behind a link that is down."""
    monkeypatch.setattr(reachability, "_PATIENCE", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as first, socket.socket() as second:
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        assert reachability._unreached({3: full.getsockname(), 4: None}) == {3, 4}


def test_a_member_that_has_left_is_not_taken_for_unreachable():
    """Its host answers; the missing process is detected elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        place = gone.getsockname()
    assert reachability._unreached({0: place}) == set()


def test_a_member_that_does_not_come_is_waited_for_as_long_as_the_store_says():
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    threading.Thread(target=store.set, args=("reachable/0", json.dumps(None))).start()
    with pytest.raises(RuntimeError, match="imeout"):
        check_reachable(store, 1, 3, "127.0.0.1")
