"""Numbered messages between two ends, over a connection on which the test drops messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.protocol.codec import Envelope
from freetrain_parsl.protocol.delivery import Delivery
from freetrain_parsl.protocol.messages import DriverHeartbeat, PauseRun, Reconnected


def pause(number: int) -> PauseRun:
    return PauseRun("t", number)


def test_a_message_arrives_as_it_was_sent_and_only_once() -> None:
    near, far = Delivery(), Delivery()
    sent = near.outgoing(pause(7))
    assert far.incoming(sent) == pause(7)
    assert far.incoming(sent) is None


def test_a_message_after_a_gap_waits_until_the_gap_is_filled() -> None:
    near, far = Delivery(), Delivery()
    first, second = near.outgoing(pause(1)), near.outgoing(pause(2))
    assert far.incoming(second) is None
    assert [far.incoming(message) for message in (first, second)] == [pause(1), pause(2)]


def test_only_what_has_not_been_seen_is_kept() -> None:
    near, far = Delivery(), Delivery()
    first, second = near.outgoing(pause(1)), near.outgoing(pause(2))
    far.incoming(first)
    near.incoming(far.outgoing(DriverHeartbeat()))
    assert near.unseen() == [second]
    near.end()
    near.outgoing(pause(3))
    assert near.unseen() == []


def test_what_is_sent_to_a_peer_that_was_given_up_does_not_wait_for_what_it_lacks() -> None:
    """It was told to end while its connection was broken: it would have waited for that message for ever."""
    near, far = Delivery(), Delivery()
    near.outgoing(pause(1))
    near.end()
    assert far.incoming(near.outgoing(pause(2))) == pause(2)


def test_a_peer_that_does_not_number_is_heard() -> None:
    assert Delivery().incoming(Envelope(pause(1))) == pause(1)


@given(st.lists(st.lists(st.booleans(), max_size=5), max_size=6), st.data())
def test_however_often_the_connection_breaks_all_arrives_in_order(
    rounds: list[list[bool]], data: st.DataObject
) -> None:
    """Each round drops its last messages, then the far end reports the last number that it received."""
    near, far = Delivery(), Delivery()
    arrived: list[PauseRun] = []
    number = 0
    for messages in rounds:
        wire = near.unseen()
        for _ in messages:
            number += 1
            wire.append(near.outgoing(pause(number)))
        passed = wire[: data.draw(st.integers(0, len(wire)))]
        arrived += [taken for message in passed if (taken := far.incoming(message)) is not None]
        near.incoming(far.outgoing(Reconnected()))
    arrived += [taken for message in near.unseen() if (taken := far.incoming(message)) is not None]
    assert arrived == [pause(one) for one in range(1, number + 1)]
