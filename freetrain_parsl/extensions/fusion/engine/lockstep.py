"""Running several functions in lockstep: each runs until it needs work that is done for all of them at once.

Each function runs in a greenlet, so exactly one runs at a time, all in one thread: a switch takes less than a
microsecond, libraries that keep state per thread (cuBLAS handles, OpenMP pools) have one state, and user code runs in
the main thread as it would alone. What torch and the random generators keep per thread is exchanged at each switch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from greenlet import greenlet

from freetrain_parsl.extensions.fusion.engine.ambient import Ambient

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from freetrain_parsl.training.data.random_streams import HostDraws

__all__ = ["Lockstep", "Meeting", "Strand"]


class Meeting(NamedTuple):
    """What a strand waits for."""

    order: int
    """Strands with lower numbers are served first if the strands wait for different things: those that are behind."""
    kind: Hashable
    """Strands that wait for equal kinds are served together."""
    work: Callable[[Sequence[Strand]], None]
    """Called once with the strands that are served together; sets the `result` or the `error` of each."""
    item: Any = None
    """What this strand contributes."""


@dataclass(eq=False)
class Strand:
    """One of the functions.

    Parameters
    ----------
    name
        For messages.
    """

    name: str
    meeting: Meeting | None = None
    result: Any = None
    error: BaseException | None = None
    ambient: Ambient = field(default_factory=Ambient.at_start)
    _greenlet: greenlet | None = None

    @property
    def is_new(self) -> bool:
        """Whether it has not begun."""
        return self._greenlet is not None and not (self._greenlet or self._greenlet.dead)

    @property
    def item(self) -> Any:
        """What it contributes to its meeting."""
        assert self.meeting is not None, "it waits"
        return self.meeting.item


class Lockstep:
    """Runs strands until all have ended; new ones can be added at any time.

    Parameters
    ----------
    turn
        Called with the name of the strand that runs next.
    """

    def __init__(self, turn: Callable[[str], None] = lambda _name: None) -> None:
        self._announce = turn
        self._strands: list[Strand] = []
        self._hub = greenlet.getcurrent()
        self.current: Strand | None = None
        """The strand that runs; ``None`` while work is done for several."""

    @property
    def strands(self) -> Sequence[Strand]:
        """The strands that have not ended."""
        return self._strands

    @property
    def has_new(self) -> bool:
        """Whether a strand has not begun."""
        return any(strand.is_new for strand in self._strands)

    def add(self, name: str, function: Callable[[], None]) -> Strand:
        """Start a strand with the next turn; the function must not raise exceptions."""
        strand = Strand(name)
        strand._greenlet = greenlet(function, parent=self._hub)  # it may be added by another strand
        self._strands.append(strand)
        return strand

    def meet(self, meeting: Meeting) -> Any:
        """Wait, in a strand, for the work of a meeting, and return its result.

        Raises
        ------
        BaseException
            The `error` that the work has set.
        """
        strand = self.current
        assert strand is not None, "called in a strand"
        strand.meeting = meeting
        self._hub.switch()
        error, result = strand.error, strand.result
        strand.error = strand.result = None
        if error is not None:
            raise error
        return result

    def run(self) -> None:
        """Run all strands until they have ended."""
        base = Ambient.capture()
        self._hub = greenlet.getcurrent()
        try:
            while self._strands:
                host = None  # not known: the work of a meeting may have drawn random numbers
                for strand in [strand for strand in self._strands if strand.meeting is None]:
                    self._turn(strand, base, host)
                    host = strand.ambient.host
                if self._strands and all(strand.meeting is not None for strand in self._strands):
                    self._serve()
                    base.restore_modes()
        finally:
            self.current = None
            for strand in self._strands:  # an exception of the work itself: unwind the functions
                assert strand._greenlet is not None
                strand._greenlet.throw()
            base.restore(Ambient.capture())

    def _turn(self, strand: Strand, base: Ambient, host: HostDraws | None) -> None:
        assert strand._greenlet is not None
        self.current = strand
        self._announce(strand.name)
        strand.ambient.restore(base, host)
        strand._greenlet.switch()
        self.current = None
        strand.ambient = Ambient.capture()
        if not strand.ambient.has_modes_of(base):
            base.restore_modes()
        if strand._greenlet.dead:
            self._strands.remove(strand)

    def _serve(self) -> None:
        meetings = [(strand, strand.meeting) for strand in self._strands if strand.meeting is not None]
        first = min((meeting for _, meeting in meetings), key=lambda meeting: meeting.order)
        together = [strand for strand, meeting in meetings if meeting.kind == first.kind]
        try:
            first.work(together)
        except Exception as error:  # noqa: BLE001 - of torch or of user code: raised where the strands wait
            for strand in together:
                strand.error = error
        for strand in together:
            strand.meeting = None
