"""Checks that each connection of a new process group leads to a member, and not to somebody who took its place.

gloo's listeners take anybody: the first eight bytes of a connection say for which member it is. So the members share
a secret of their group over the rendezvous store, whose channel is encrypted and authenticated, and send each other a
proof over every connection before anything else. A proof is good for one sender, one receiver and one group. It
does not encrypt what follows.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from freetrain_parsl.errors import PeerFailed

if TYPE_CHECKING:
    from datetime import timedelta

    from torch._C._distributed_c10d import Store

_KEY = "secret"
_PROOF_BYTES = 32


class Admission:
    """The secret of one group.

    Parameters
    ----------
    rank, size
        This member's number, and how many there are.
    timeout
        How long to wait for the others' proofs.
    secret
        See `share`.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta, secret: bytes) -> None:
        self._rank, self._size = rank, size
        self._timeout = timeout
        self._secret = secret

    @classmethod
    def share(cls, store: Store, rank: int, size: int, timeout: timedelta) -> Admission:
        """Make a secret, or get it from the first member.

        Parameters
        ----------
        store
            Of this group only, over an encrypted channel.
        rank, size, timeout
            See the class.

        Raises
        ------
        TimeoutError
            The first member did not come in time.
        """
        if rank:
            return cls(rank, size, timeout, store.get(_KEY))
        secret = secrets.token_hex()
        store.set(_KEY, secret)
        return cls(rank, size, timeout, secret.encode())

    def check(self, group: dist.ProcessGroup | None = None) -> None:
        """Exchange proofs with every other member.

        Parameters
        ----------
        group
            The process group whose connections are checked; ``None``: the default one.

        Raises
        ------
        PeerFailed
            A connection does not lead to a member, or gives no proof in time.
        RuntimeError
            A member is gone.
        """
        others = range(self._size)
        sent = torch.cat([self._proof(self._rank, other) for other in others])
        received = torch.empty_like(sent)
        dist.distributed_c10d._set_pg_timeout(self._timeout, group)  # noqa: SLF001 - torch has no public way
        try:
            dist.all_to_all_single(received, sent, group=group)
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            raise PeerFailed(
                f"a connection in a group of {self._size} gave no proof of membership within "
                f"{self._timeout.total_seconds():g} s: a process hangs, or another one on the network took its place"
            ) from error
        for other, proof in zip(others, torch.split(received, _PROOF_BYTES), strict=True):
            if not hmac.compare_digest(bytes(proof.tolist()), bytes(self._proof(other, self._rank).tolist())):
                raise PeerFailed(
                    f"what connected as rank {other} of {self._size} gave a wrong proof of membership: another process "
                    "on the network may have taken its place"
                )

    def _proof(self, sender: int, receiver: int) -> torch.Tensor:
        digest = hmac.digest(self._secret, f"{sender} to {receiver} of {self._size}".encode(), "sha256")
        return torch.frombuffer(bytearray(digest), dtype=torch.uint8)
