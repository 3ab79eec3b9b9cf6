"""The contract of a window source, as a pytest class to subclass.

::

    from freetrain_parsl.testing.window_suite import WindowSourceConformance

    class TestMySource(WindowSourceConformance):
        def make_source(self):
            return MyWindowSource()

The source may be of a real batch system: nothing is submitted. Provide one of your jobs to query with `own_job`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.windows.base import BlockState, BlockStatus

if TYPE_CHECKING:
    from freetrain_parsl.windows.base import WindowSource

__all__ = ["WindowSourceConformance"]


class WindowSourceConformance(ABC):
    """Properties of every window source, for any batch system."""

    unknown_job: str = "999999999"
    """A well-formed id of a job that does not exist."""

    @abstractmethod
    def make_source(self) -> WindowSource:
        """Make a source that is ready for queries."""

    def own_job(self) -> tuple[str, str] | None:
        """Return id and name of a live job of this user, if there is one to query."""
        return None

    def test_no_node_is_in_two_windows(self) -> None:
        """Each node is in at most one window."""
        nodes = [name for window in self.make_source().survey().windows for name in window.nodes]
        assert len(nodes) == len(set(nodes))

    def test_windows_are_open(self) -> None:
        """All windows are open: they have opened, and have not closed yet."""
        survey = self.make_source().survey()
        for window in survey.windows:
            assert window.opens <= survey.time
            assert window.remaining(survey.time) > 0

    def test_largest_window_comes_first(self) -> None:
        """The most important windows come first."""
        sizes = [len(window.nodes) for window in self.make_source().survey().windows]
        assert sizes == sorted(sizes, reverse=True)

    def test_terms_can_be_kept(self) -> None:
        """Some block satisfies the limits."""
        terms = self.make_source().survey().terms
        assert 0 <= terms.start_delay < math.inf
        assert 0 < terms.walltime_step <= terms.max_walltime
        assert 1 <= terms.min_nodes <= (math.inf if terms.max_nodes is None else terms.max_nodes)

    def test_exactly_the_jobs_asked_for_are_told_of(self) -> None:
        """A job that does not exist is unknown, not missing."""
        source = self.make_source()
        assert dict(source.survey().blocks) == {}
        blocks = source.survey([self.unknown_job]).blocks
        assert list(blocks) == [self.unknown_job]
        assert blocks[self.unknown_job].state is BlockState.UNKNOWN

    def test_nothing_is_wanted_of_who_has_nothing(self) -> None:
        """Yield requests are only for nodes held by our jobs."""
        assert dict(self.make_source().survey([self.unknown_job]).wanted) == {}

    def test_notes_are_lines(self) -> None:
        """Each note is one nonempty line."""
        for note in self.make_source().survey().notes:
            assert note.strip()
            assert "\n" not in note

    def test_ending_what_has_ended_is_no_error(self) -> None:
        """Ending no jobs is not an error."""
        source = self.make_source()
        source.cancel([])
        source.cancel([self.unknown_job])

    def test_jobs_are_found_by_the_beginning_of_their_names(self) -> None:
        """An unused prefix matches no jobs."""
        assert self.make_source().find_jobs("no job has this name ") == {}

    def test_own_job_is_found_and_told_of(self) -> None:
        """It is found by name, and is live; a running one holds nodes, which are in no window."""
        own = self.own_job()
        if own is None:
            pytest.skip("there is no job to query: override own_job")
        job, name = own
        source = self.make_source()
        assert source.find_jobs(name)[job] == name
        survey = source.survey([job])
        status = survey.blocks[job]
        assert isinstance(status, BlockStatus)
        assert not status.state.ended
        if status.state is BlockState.RUNNING:
            assert status.nodes
            assert set(status.nodes).isdisjoint(node for window in survey.windows for node in window.nodes)

    @pytest.mark.parametrize("complaint", ["", "it said no", "one line\nand another"])
    def test_refusal_is_explained_in_one_line(self, complaint: str) -> None:
        """Any complaint is classified, even an unknown one, which counts as permanent."""
        refusal = self.make_source().explain_refusal(complaint)
        assert "\n" not in refusal.reason.strip()
        assert refusal.passing is False

    def test_healthy_source_is_not_refused(self) -> None:
        """A one-minute block can run somewhere."""
        self.make_source().check(60.0)
