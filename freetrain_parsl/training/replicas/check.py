"""Comparing the members of a group: in the vector that they sum at each boundary, and in full when it matters.

Each member adds a hash h of 20 bits and its square to the vector. All n hashes are equal exactly if n Σh² = (Σh)², by
the Cauchy-Schwarz inequality, and the sums are exact in float64 for up to 8192 members. The hash covers the plain
values and, in turn, a part of the tensors: what stays different is found within 16 steps. After a change of the group,
before a save and after the last batch it covers everything.
"""

from __future__ import annotations

import hashlib
import platform
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from freetrain_parsl.training.data.random_streams import mix
from freetrain_parsl.training.replicas.accusation import Since, accuse
from freetrain_parsl.training.replicas.checksum import Checksum, Rotation
from freetrain_parsl.training.replicas.contents import Contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from freetrain_parsl.training.checkpoints.state import SessionState
    from freetrain_parsl.training.group.process_group import Group

__all__ = ["ReplicaCheck", "Standing", "all_equal"]

_HASH_BITS = 20
_FACTOR = 0x9E3779B97F4A7C15  # odd; the upper bits of a product depend on all bits
_WORD = (1 << 63) - 1


class Standing(NamedTuple):
    """What the members of a new group tell each other about their replicas.

    Parameters
    ----------
    turn
        How many boundaries this member has passed. Members at one position in the data may have different turns: the
        code between this boundary and the next step, which may change the model, has run in some of them only.
    at_boundary
        Whether it is at the next boundary already.
    piece
        Which piece of a batch user code has, from 1; zero: none.
    calls
        How many collective operations of user code have ended, and steps were made, since this member has passed a
        boundary.
    has_gradients
        Whether it is in such an operation between the gradients of a batch and their step.
    kind
        A hash of the kind of its processors.
    fingerprint
        A checksum of its tensors.
    """

    turn: int
    at_boundary: int
    piece: int
    calls: int
    has_gradients: int
    kind: int
    fingerprint: int


class _Covered(NamedTuple):
    """What the current hash covers: all tensors, or a part of them as it was after `step`; ``None``: no tensors."""

    whole: bool
    part: int | None
    step: int


class ReplicaCheck:
    """Compares this member with the others of its group.

    Parameters
    ----------
    job
        Name of the training job.
    state
        Its prepared objects, its position in the data and its number of steps.
    note
        Lets the user know of something that all members have found out.
    """

    def __init__(self, job: str, state: SessionState, note: Callable[[str], None]) -> None:
        self.loop: Callable[[], Iterable[tuple[str, object]]] = state.loop.shared
        """Returns the names and values of the loop's state."""
        self._job = job
        self._state = state
        self._note = note
        self._by_bits = True  # whether all members compute on processors of one kind
        self._whole_due = True  # whether the next hash covers everything
        self._covered = _Covered(whole=True, part=None, step=0)
        self._queued: tuple[Checksum, int, int] | None = None  # on a GPU: a checksum, its part, its step
        self._equal_plain: int | None = None  # the last step after which the plain values were known to be equal
        self._equal_parts: list[int | None] = [None]  # the same for each part of the tensors
        self._refresh()

    # ── at every boundary ─────────────────────────────────────────────────────────────────────────

    def votes(self, *, whole: bool = False) -> tuple[int, int]:
        """Return the hash of this replica, of the `whole` of it if all do so, and its square, to be summed."""
        step, place = self._state.training_metrics.step, self._state.cursor.place
        whole, self._whole_due = whole or self._whole_due, False
        if whole:
            self._refresh()
        sums: tuple[int, ...] = ()
        part, seen = None, step
        if self._by_bits and whole:
            self._queued = None
            sums = self._contents.checksum()
        elif self._by_bits:
            checksum, part, seen = self._turn_of_tensors(step)
            sums = () if checksum is None else checksum.read()
        self._covered = _Covered(whole, part, seen)
        text = repr((step, place, self._contents.plain(whole=whole), sums))
        value = zlib.crc32(text.encode()) * _FACTOR % (1 << 64) >> (64 - _HASH_BITS)
        return value, value * value

    def _turn_of_tensors(self, step: int) -> tuple[Checksum | None, int | None, int]:
        """Return the checksum of a part of the tensors, the number of the part, and the step after which it was made.

        On a GPU it is the one that was queued at the boundary before, since the GPU is still busy with this step.
        """
        part = self._rotation.part_at(step)
        current = None if part is None else (Checksum(self._slices(part)), part, step)
        if self._queued is None and (current is None or not current[0].is_pending):
            return current or (None, None, step)
        queued, self._queued = self._queued, current
        return queued or (None, None, step)

    def _slices(self, part: int) -> Iterator[torch.Tensor]:
        return (piece.of(self._contents.tensor(piece.number)) for piece in self._rotation.parts[part])

    def judge(self, group: Group, total: float, squares: float) -> None:
        """Note that all members are equal, from the sums of their `votes`.

        Raises
        ------
        ReplicasDiffer
            They are not; raised on all members.
        PeerFailed
            A member has failed while they found out what differs.
        """
        if not all_equal(group.size, total, squares):
            self._accuse(group, range(group.size))
        covered = self._covered
        self._equal_plain = self._state.training_metrics.step
        if covered.whole and self._by_bits:
            self._equal_parts = [covered.step] * len(self._rotation.parts)
        elif covered.part is not None:
            self._equal_parts[covered.part] = covered.step

    def compare_all(self, group: Group) -> None:
        """Compare everything now; all members call this, and it raises as `judge`."""
        if group.size > 1:
            votes = torch.tensor(self.votes(whole=True), dtype=torch.float64)
            self.judge(group, *group.sum(votes).tolist())

    # ── in a new group ────────────────────────────────────────────────────────────────────────────

    def standing(self, turn: int, *, at_boundary: bool, piece: int, calls: int, has_gradients: bool) -> Standing:
        """Return what the other members of a new group need to know."""
        self._refresh()
        fingerprint = mix(*self._contents.checksum()) & _WORD
        return Standing(turn, at_boundary, piece, calls, has_gradients, _kind_of_processors(), fingerprint)

    def meet(self, group: Group, standings: Sequence[Standing], peers: Sequence[int]) -> None:
        """Compare the members that have passed the same boundaries; all members of a new group call this.

        Parameters
        ----------
        group
            The new group.
        standings
            Those of all its members, by rank.
        peers
            Ranks of the members whose replicas have to be equal; the others receive a state.

        Raises
        ------
        ReplicasDiffer, PeerFailed
            See `judge`.
        """
        alike = len({each.kind for each in standings}) == 1
        if not alike and self._by_bits:
            self._note(
                "its processes run on processors of different kinds, which may round differently: their "
                "hyperparameters are compared, their parameters are not"
            )
        self._by_bits, self._whole_due, self._queued = alike, True, None
        if alike and len({standings[rank].fingerprint for rank in peers}) > 1:
            self._accuse(group, peers)

    def have_met(self) -> None:
        """Note, once members that were behind have received a state, that all have the same."""
        step = self._state.training_metrics.step
        self._equal_plain, self._equal_parts = step, [step]
        self._refresh()

    def _refresh(self) -> None:
        """Look up anew what is compared: parameters and buffers may have been added."""
        self._contents = Contents(self._state.objects, self.loop)
        self._rotation = Rotation(self._contents.tensors())
        self._equal_parts = [self._equal_tensors] * len(self._rotation.parts)

    @property
    def _equal_tensors(self) -> int | None:
        """The last step after which all tensors were known to be equal."""
        steps = [step for step in self._equal_parts if step is not None]
        return min(steps) if len(steps) == len(self._equal_parts) else None

    def _accuse(self, group: Group, among: Sequence[int]) -> None:
        since = Since(self._equal_plain, self._equal_tensors, self._state.training_metrics.step)
        self._refresh()
        facts = self._contents.facts(with_tensors=self._by_bits)
        accuse(self._job, group, among, facts, self._state.cursor.place, since)


def all_equal(count: int, total: float, squares: float) -> bool:
    """Return whether all of `count` numbers below 2²⁰ are equal, given their sum and the sum of their squares."""
    return count * int(squares) == int(total) ** 2


def _kind_of_processors() -> int:
    """Return a hash of everything that may decide how a result is rounded."""
    facts = [
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        _processor(),
        str(torch.get_num_threads()),
        torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    ]
    return int.from_bytes(hashlib.sha256("\n".join(facts).encode()).digest()[:7], "big")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.machine())
