"""The life of a block, from its request to its end, and the detection of blocks that failed to start."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from freetrain_parsl.executor.driver.slot_registry import Block
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.blocks import format_span, least_walltime
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.windows.base import BlockState
from freetrain_parsl.windows.system import BlockSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.executor.batch.submitter import JobSubmitter
    from freetrain_parsl.executor.driver.slot_registry import Slot, SlotRegistry
    from freetrain_parsl.planning.settings import SettingsInSeconds
    from freetrain_parsl.windows.base import BlockStatus, Survey

logger = logging.getLogger(__name__)

__all__ = ["BlockCycle"]

_SETTLED = 10.0  # seconds; slots that crash earlier do not prove that blocks can start


class BlockCycle:
    """Requests blocks, follows their states, and releases them in time. Owned by the control loop's thread.

    It also reports to the job submitter which blocks failed to start, and which work; blocks that were preempted,
    cancelled or released for another reason are no evidence about starts.

    `emit` passes an event to the planner, `write` a record to the journal; `lose` drops a slot, for a reason; `clock`
    shows seconds since the epoch and is never stepped.
    """

    def __init__(
        self,
        registry: SlotRegistry,
        submitter: JobSubmitter,
        *,
        settings: SettingsInSeconds,
        emit: Callable[[ev.Event], None],
        write: Callable[[record.Record], None],
        lose: Callable[[Slot, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._submitter = submitter
        self._settings = settings
        self._emit = emit
        self._write = write
        self._lose = lose
        self._clock = clock

    def request(self, request: ev.RequestBlock) -> None:
        """Request a block in a window from the job submitter."""
        block = Block(request.block, request.nodes, request.seconds, request.window.closes, request.window.node_kind)
        self._submit(block, request.avoided, pinned=request.pinned)

    def queue(self, request: ev.QueueBlock) -> None:
        """Request a block that waits for any node from the job submitter."""
        self._submit(Block(request.block, (), request.seconds, None, request.node_kind), request.avoided, pinned=False)

    def _submit(self, block: Block, avoided: frozenset[str], *, pinned: bool) -> None:
        name, nodes, seconds, kind = block.name, block.nodes, block.seconds, block.node_kind
        self._registry.blocks[name] = block
        least = min(seconds, least_walltime(self._settings))
        others = tuple(sorted((self._registry.avoided | avoided).difference(nodes)))
        self._submitter.request(BlockSpec(name, nodes, seconds, least, pinned, kind, others))
        self._write(record.BlockRequested(name, list(nodes), seconds, block.closes, kind))

    def on_survey(self, survey: Survey) -> None:
        """Handle a survey: the states of our blocks, and other users' jobs that could start on their nodes."""
        for block in list(self._registry.blocks.values()):
            if (status := survey.blocks.get(block.name)) is None:
                continue
            self._follow(block, status, survey.time)
            if block.started and survey.wanted.keys() & set(block.nodes):
                wanted = min(survey.wanted[node] for node in block.nodes if node in survey.wanted)
                self.make_way(block, wanted, "yielded to another user's job")

    def make_way(self, block: Block, wanted: float, reason: str) -> None:
        """Release a block's nodes when they are wanted, but not before its training jobs can have saved their state."""
        yields = max(wanted, self._clock() + self._settings.closing_margin)
        if block.releasing or block.warned or yields >= block.loses_nodes_at(self._clock()):
            return
        block.yields, block.yields_because = yields, reason
        self._emit(ev.NodesClosing(self._clock(), block.nodes, yields))
        self._write(record.BlockYields(block.name, list(block.nodes), yields, reason))

    def leave_in_time(self) -> None:
        """Release a block once its training jobs have left it, shortly before it would lose its nodes.

        Batch systems end a job up to a minute after its walltime; this way the next job gets its nodes in time.
        """
        now = self._clock()
        for block in self._registry.blocks.values():
            left = block.loses_nodes_at(now) - now
            if not block.started or block.releasing or left > self._settings.closing_margin:
                continue
            if left <= 0 or all(slot.busy is None for slot in self._registry.of_block(block.name)):
                self._check_if_in_vain(block, 0.0)
                self._give_back(block, _why_it_leaves(block))

    def release(self, name: str) -> None:
        """Release a block that the planner no longer wants."""
        if (block := self._registry.blocks.get(name)) is not None:
            self._check_if_in_vain(block, self._settings.join_timeout)
            self._give_back(block, "was released" if block.started else "never started and was withdrawn")

    def end(self, name: str, reason: str, *, refused: bool = False) -> None:
        """Remove a block that has ended or will never start, and drop its slots."""
        block = self._registry.drop_block(name)
        if block is None:
            return
        logger.info("block %s (%s) %s", name, ", ".join(block.nodes), reason)
        self._write(record.BlockEnded(name, list(block.nodes), reason, block.held))
        self._submitter.forget(block.name)
        for slot in self._registry.of_block(name):
            self._lose(slot, f"its block {reason}")
        self._emit(ev.BlockEnded(self._clock(), name, refused))

    def _follow(self, block: Block, status: BlockStatus, seen: float) -> None:
        state = status.state
        if block.warned and state in (BlockState.COMPLETED, BlockState.FAILED):
            state = BlockState.PREEMPTED  # it ended in the grace period, so preemption is not reported
        said = state.value + (f" ({status.reason})" if status.reason and state is status.state else "")
        if status.state.ended:
            self._check_if_failed(block, state, said)
            self.end(block.name, block.releasing or said)
        elif status.state is BlockState.HELD and not block.releasing:
            block.releasing = said
            self._submitter.reject(block.name, said)
        elif status.nodes and not block.started:
            self._start(block, status.nodes, status.ends)
        elif status.nodes:
            block.held = seen
        elif not block.started:
            block.waited = seen

    def _start(self, block: Block, nodes: tuple[str, ...], ends: float | None) -> None:
        now = self._clock()
        block.start(now, nodes, ends)
        self._emit(ev.BlockStarted(now, block.name, block.nodes, block.ends))
        if block.ends is not None:
            self._emit(ev.NodesClosing(now, block.nodes, block.ends))
        # Its nodes are held since then, and not since the survey that shows it, up to a poll interval later. The end of
        # one that is being preempted is earlier than its walltime.
        since = None if ends is None else min(now, max(ends - block.seconds, block.waited))
        self._write(record.BlockStarted(block.name, list(block.nodes), block.ends, since))

    def look(self) -> None:
        """Mark the blocks whose slots have stayed alive as working."""
        now = self._clock()
        for block in self._registry.blocks.values():
            if not block.works and block.joined is not None and now - block.joined >= _SETTLED:
                block.works = bool(self._registry.of_block(block.name))
                if block.works:
                    self._submitter.works()

    def _check_if_failed(self, block: Block, state: BlockState, said: str) -> None:
        """Report a block that ended, as the batch system `said`, before it worked."""
        if block.works or (block.releasing and block.started is not None):
            return  # a block that was withdrawn before we saw it start may still have failed
        # A block that started shortly before its window closed had no chance: its timeout is no evidence.
        in_vain = state is BlockState.TIMED_OUT and self._ran_in_vain(block, 0.0)
        if in_vain or state in (BlockState.COMPLETED, BlockState.FAILED):
            self._submitter.failed_to_start(block.name, said + self._why(block))

    def _check_if_in_vain(self, block: Block, least: float) -> None:
        """Report a block that is about to be released if it ran for `least` seconds without any slot."""
        if not block.releasing and block.started is not None and self._ran_in_vain(block, least):
            ran = format_span(self._clock() - block.started)
            self._submitter.failed_to_start(block.name, f"ran for {ran} and no worker connected{self._why(block)}")

    def _ran_in_vain(self, block: Block, least: float) -> bool:
        if block.joined is not None or block.started is None:
            return False
        return self._clock() - block.started >= max(least, self._settings.startup)

    def _why(self, block: Block) -> str:
        """Return why slots could not start on its nodes, as an addition to a sentence; empty if unknown."""
        errors = self._registry.start_errors
        return next(
            (f"; a slot could not start on {node}: {errors[node]}" for node in block.nodes if node in errors), ""
        )

    def _give_back(self, block: Block, reason: str) -> None:
        if not block.releasing:
            block.releasing = reason
            self._submitter.withdraw(block.name)
            self._write(record.BlockReleased(block.name, reason))


def _why_it_leaves(block: Block) -> str:
    """Return why a block is released whose nodes we are about to lose; preemption takes precedence."""
    if block.warned:
        return BlockState.PREEMPTED.value
    return block.yields_because or "left its window in time"
