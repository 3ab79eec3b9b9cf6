"""Checks that each connection of a new process group leads to a member, not to an impostor.

gloo's listeners accept any connection: its first eight bytes state for which member it is. Therefore the members share
a secret of their group over the rendezvous store, whose channel is encrypted and authenticated, and first exchange
proofs over every connection. A proof is valid for one sender, one receiver and one group. Later traffic is not
encrypted.
"""

from __future__ import annotations

import hmac
import secrets
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from freetrain_parsl.errors import PeerFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._C._distributed_c10d import Store

CONNECT_TIMEOUT = timedelta(seconds=10)
"""For connections between members that have all arrived and reached each other a moment before."""
_KEY = "secret"
_PROOF_BYTES = 32


class Admission:
    """The secret of one group.

    Parameters
    ----------
    rank, size
        This member's number, and how many there are.
    timeout
        Maximum wait for the others' proofs.
    secret
        See `share`.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta, secret: bytes) -> None:
        self._rank, self._size = rank, size
        self.timeout = timeout
        """Maximum wait for the others' proofs."""
        self._secret = secret

    @classmethod
    def share(cls, store: Store, rank: int, size: int, timeout: timedelta) -> Admission:
        """Create a secret, or get it from the first member.

        Parameters
        ----------
        store
            The store of this group only, over an encrypted channel.
        rank, size, timeout
            See the class.

        Raises
        ------
        TimeoutError
            The first member did not connect in time.
        """
        if rank:
            return cls(rank, size, timeout, store.get(_KEY))
        secret = secrets.token_hex()
        store.set(_KEY, secret)
        return cls(rank, size, timeout, secret.encode())

    def of(self, ranks: Sequence[int]) -> Admission:
        """Return the admission to a further group of some of the members, of which this one is one."""
        digest = hmac.digest(self._secret, f"group of {list(ranks)}".encode(), "sha256")
        return Admission(ranks.index(self._rank), len(ranks), self.timeout, digest)

    def check(self, group: dist.ProcessGroup | None = None) -> None:
        """Exchange proofs with every other member.

        Parameters
        ----------
        group
            The process group whose connections are checked; ``None``: the default one.

        Raises
        ------
        PeerFailed
            A connection does not lead to a member, or no proof arrived in time.
        RuntimeError
            A member has failed.
        """
        others = range(self._size)
        sent = torch.cat([self._proof(self._rank, other) for other in others])
        received = torch.empty_like(sent)
        dist.distributed_c10d._set_pg_timeout(self.timeout, group)  # noqa: SLF001 - no public API
        try:
            dist.all_to_all_single(received, sent, group=group)
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            raise PeerFailed(
                f"no proof of membership arrived on a connection in a group of {self._size} within "
                f"{self.timeout.total_seconds():g} s: a process hangs, or an impostor on the network took its place"
            ) from error
        for other, proof in zip(others, torch.split(received, _PROOF_BYTES), strict=True):
            if not hmac.compare_digest(bytes(proof.tolist()), bytes(self._proof(other, self._rank).tolist())):
                raise PeerFailed(
                    f"the process connected as rank {other} of {self._size} sent a wrong proof of membership: "
                    "it may be an impostor on the network"
                )

    def _proof(self, sender: int, receiver: int) -> torch.Tensor:
        digest = hmac.digest(self._secret, f"{sender} to {receiver} of {self._size}".encode(), "sha256")
        return torch.frombuffer(bytearray(digest), dtype=torch.uint8)
