"""Which blocks failed to start: they ended, or ran in vain, before a slot of them could work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.planning.blocks.rules import format_span
from freetrain_parsl.windows.base import BlockState

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.executor.batch.submitter import JobSubmitter
    from freetrain_parsl.executor.control.slot_registry import Block, SlotRegistry

__all__ = ["StartWatch"]

_SETTLED = 10.0  # seconds; slots that crash sooner have not shown that blocks can start


class StartWatch:
    """Tells the batch desk of blocks that failed to start, and of those that work. Owned by the driver's thread.

    Blocks that were preempted, cancelled or given back for another reason say nothing about starts.

    Parameters
    ----------
    registry, submitter
        The driver's.
    startup
        Seconds that a start may take.
    clock
        Seconds.
    """

    def __init__(
        self, registry: SlotRegistry, submitter: JobSubmitter, *, startup: float, clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._submitter = submitter
        self._startup = startup
        self._clock = clock

    def look(self) -> None:
        """Note the blocks whose slots have stayed."""
        now = self._clock()
        for block in self._registry.blocks.values():
            if not block.works and block.joined is not None and now - block.joined >= _SETTLED:
                block.works = bool(self._registry.of_block(block.name))
                if block.works:
                    self._submitter.works()

    def ended(self, block: Block, state: BlockState, said: str) -> None:
        """Take the end of a block that the batch system tells; `said` describes it."""
        if block.works or (block.releasing and block.started is not None):
            return  # one that was withdrawn before we saw it start may have failed all the same
        # One that started shortly before its window closed reached its walltime without having had a chance.
        in_vain = state is BlockState.TIMED_OUT and self._ran_in_vain(block, self._startup)
        if in_vain or state in (BlockState.COMPLETED, BlockState.FAILED):
            self._submitter.failed_to_start(block.name, block.job, said)

    def given_back(self, block: Block, least: float) -> None:
        """Take a block that is about to be given back; it failed if it ran for `least` seconds without any slot."""
        if not block.releasing and block.started is not None and self._ran_in_vain(block, max(least, self._startup)):
            ran = format_span(self._clock() - block.started)
            self._submitter.failed_to_start(block.name, block.job, f"ran for {ran} and no worker connected")

    def _ran_in_vain(self, block: Block, seconds: float) -> bool:
        return block.joined is None and block.started is not None and self._clock() - block.started >= seconds
