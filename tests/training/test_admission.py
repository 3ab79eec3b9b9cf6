"""No process can take a member's place in a process group without the group's secret."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from training_crew import Outcome, join_repeatedly

from freetrain_parsl.training.group.admission import Admission
from freetrain_parsl.training.mailbox import Finished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from crew import Crew

pytestmark = pytest.mark.slow

TRIES = 30
WAIT = timedelta(seconds=5)


class Impostor:
    """Connects to each new listener of a process before the members do, in the name of each member in turn.

    Parameters
    ----------
    victim
        Its process id.
    answer
        Returns the reply to received data.
    """

    def __init__(self, victim: int, answer: Callable[[bytes], bytes]) -> None:
        self.received = 0
        self._victim, self._answer = victim, answer
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._attack)

    @contextmanager
    def attacks(self) -> Iterator[None]:
        self._thread.start()
        yield
        self._stopped.set()
        self._thread.join()

    def _attack(self) -> None:
        known = self._listeners()
        held: list[socket.socket] = []
        while not self._stopped.wait(0.002):
            for port in self._listeners() - known:
                known.add(port)
                for sequence_number in range(8):
                    with suppress(OSError):
                        connection = socket.create_connection(("127.0.0.1", port), timeout=1)
                        connection.sendall(struct.pack("<Q", sequence_number))
                        connection.setblocking(False)
                        held.append(connection)
            for connection in held:
                with suppress(OSError):
                    if data := connection.recv(65536):
                        self.received += len(data)
                        connection.sendall(self._answer(data))
        for connection in held:
            connection.close()

    def _listeners(self) -> set[int]:
        """List the loopback ports on which the victim listens."""
        inodes = set()
        for entry in Path(f"/proc/{self._victim}/fd").iterdir():
            with suppress(OSError):
                inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
        rows = [line.split() for line in Path(f"/proc/{self._victim}/net/tcp").read_text().splitlines()[1:]]
        return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.parametrize("answer", [lambda _: b"", lambda data: data], ids=["silent", "echo"])
def test_a_group_with_an_impostor_is_not_used(crew: Crew, tmp_path: Path, answer: Callable[[bytes], bytes]) -> None:
    """Two members repeatedly form a group, the second one late, until the impostor has taken its place once.

    Which of the two listens depends on their ports, so the impostor succeeds in every other group.
    """
    ready, go = tmp_path / "ready", tmp_path / "go"
    run = crew.start(2, tmp_path, join_repeatedly, recover=False, tries=TRIES, seconds=2.0, ready=ready, go=go)
    run.until(lambda: ready.with_suffix(".0").exists() and ready.with_suffix(".1").exists(), 300)
    impostor = Impostor(run.members[0].process.pid, answer)
    with impostor.attacks():
        go.touch()
        outcomes = run.outcomes()
    ends = [outcome.end for outcome in outcomes if isinstance(outcome, Outcome)]
    assert all(isinstance(end, Finished) for end in ends), outcomes
    formed, refusal = ends[0].value
    assert refusal, f"the impostor received {impostor.received} bytes in {formed} groups"
    assert impostor.received
    assert "proof of membership" in refusal or "a member of a group of" in refusal, refusal


def test_a_proof_is_good_for_one_direction_and_one_secret_only() -> None:
    admission = Admission(0, 2, WAIT, b"a")
    proofs = {bytes(admission._proof(one, other).tolist()) for one in range(3) for other in range(3)}
    assert len(proofs) == 9
    assert bytes(Admission(0, 2, WAIT, b"b")._proof(0, 1).tolist()) not in proofs


def test_the_secret_is_the_first_members_and_new_for_each_group() -> None:
    store = dist.HashStore()
    store.set_timeout(WAIT)
    one = dist.PrefixStore("t/1", store)
    first, second = Admission.share(one, 0, 2, WAIT), Admission.share(one, 1, 2, WAIT)
    assert first._secret == second._secret
    assert Admission.share(dist.PrefixStore("t/2", store), 0, 2, WAIT)._secret != first._secret
