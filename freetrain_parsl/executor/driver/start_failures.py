"""Detection of blocks that failed to start: they ended, or ran for nothing, before any of their slots could work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.planning.blocks.rules import format_span
from freetrain_parsl.windows.base import BlockState

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.executor.batch.submitter import JobSubmitter
    from freetrain_parsl.executor.driver.slot_registry import Block, SlotRegistry

__all__ = ["StartWatch"]

_SETTLED = 10.0  # seconds; slots that crash earlier do not prove that blocks can start


class StartWatch:
    """Reports blocks that failed to start, and blocks that work, to the job submitter. Owned by the control loop.

    Blocks that were preempted, cancelled or released for another reason are no evidence about starts.

    Parameters
    ----------
    registry, submitter
        The driver's.
    startup
        Maximum duration of a start, in seconds.
    clock
        Clock, in seconds.
    """

    def __init__(
        self, registry: SlotRegistry, submitter: JobSubmitter, *, startup: float, clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._submitter = submitter
        self._startup = startup
        self._clock = clock

    def look(self) -> None:
        """Mark the blocks whose slots have stayed alive as working."""
        now = self._clock()
        for block in self._registry.blocks.values():
            if not block.works and block.joined is not None and now - block.joined >= _SETTLED:
                block.works = bool(self._registry.of_block(block.name))
                if block.works:
                    self._submitter.works()

    def ended(self, block: Block, state: BlockState, said: str) -> None:
        """Handle the end of a block as reported by the batch system; `said` describes it."""
        if block.works or (block.releasing and block.started is not None):
            return  # a block that was withdrawn before we saw it start may still have failed
        # A block that started shortly before its window closed had no chance: its timeout is no evidence.
        in_vain = state is BlockState.TIMED_OUT and self._ran_in_vain(block, self._startup)
        if in_vain or state in (BlockState.COMPLETED, BlockState.FAILED):
            self._submitter.failed_to_start(block.name, block.job, said + self._why(block))

    def given_back(self, block: Block, least: float) -> None:
        """Handle a block that is about to be released; it failed if it ran for `least` seconds without any slot."""
        if not block.releasing and block.started is not None and self._ran_in_vain(block, max(least, self._startup)):
            ran = format_span(self._clock() - block.started)
            self._submitter.failed_to_start(
                block.name, block.job, f"ran for {ran} and no worker connected{self._why(block)}"
            )

    def _why(self, block: Block) -> str:
        """Return why slots could not start on its nodes, as an addition to a sentence; empty if unknown."""
        errors = self._registry.start_errors
        return next(
            (f"; a slot could not start on {node}: {errors[node]}" for node in block.nodes if node in errors), ""
        )

    def _ran_in_vain(self, block: Block, seconds: float) -> bool:
        return block.joined is None and block.started is not None and self._clock() - block.started >= seconds
