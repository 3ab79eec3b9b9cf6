"""The contracts of a window source and of a batch system, as pytest classes to subclass.

::

    from freetrain_parsl.testing.window_suite import BatchSystemConformance, WindowSourceConformance

    class TestMySource(WindowSourceConformance):
        def make_source(self):
            return MyWindowSource()

The source may be of a real batch system: nothing is submitted. Provide one of your jobs to query with `own_job`.
A batch system itself is not queried::

    class TestMySystem(BatchSystemConformance):
        system = MySystem()
        block = "{queue: main}"
        kinds = "{gpu: {queue: gpu}, cpu: {queue: main}}"
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import suppress
from copy import copy
from typing import Any, ClassVar

import pytest

from freetrain_parsl.campaign.files.yaml_file import Section, Variables
from freetrain_parsl.errors import ClusterGone, InvalidInput
from freetrain_parsl.executor.batch.systems import LAUNCHERS, SYSTEMS
from freetrain_parsl.windows.base import BlockState, BlockStatus, WindowSource
from freetrain_parsl.windows.system import BatchSystem, BlockSpec, NodeResources

__all__ = ["BatchSystemConformance", "WindowSourceConformance"]


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


class BatchSystemConformance(ABC):
    """Properties of every batch system; it is not queried, and nothing is submitted."""

    system: ClassVar[BatchSystem]
    """The batch system."""

    block: ClassVar[str] = "{}"
    """A section ``block`` that it accepts."""

    kinds: ClassVar[str]
    """A section ``kinds`` of two kinds of node."""

    def read(self) -> dict[str, Any]:
        """Read the section ``block``."""
        return self.system.read_block(_section(self.block))

    def test_description_is_complete(self) -> None:
        """Either it has queues to choose from, and hints for a site file, or it writes one by itself."""
        assert self.system.name
        assert self.system.title
        assert (self.system.hints is not None) == bool(self.system.queue)
        assert bool(self.system.draft(4)) != bool(self.system.queue)
        assert self.system.is_here() in (True, False)

    def test_options_are_those_of_the_command_line(self) -> None:
        """It takes no other options than the commands have."""
        assert set(self.system.options) <= {"partition", "account", "qos", "constraint", "cluster"}

    def test_launcher_is_known(self) -> None:
        """A launcher has a name in site files."""
        assert self.system.launcher in ("", *LAUNCHERS)

    @pytest.mark.parametrize("given", ["{}", None])
    def test_request_is_read_completely(self, given: str | None) -> None:
        """A request without keys is valid, and no key is ignored."""
        section = _section(given or self.block)
        assert self.system.read_block(section).keys() == set(section.keys())
        section.done()

    def test_unknown_key_is_refused(self) -> None:
        """A key that it does not know is an error with its place."""
        section = _section("\nunheard_of: 1")
        self.system.read_block(section)
        with pytest.raises(InvalidInput, match=r"site\.yaml:2: unknown key 'unheard_of'"):
            section.done()

    def test_provider_is_its_own(self) -> None:
        """It recognizes the provider that it makes, and no other system does."""
        provider = self.system.provider(self.read(), NodeResources())
        assert self.system.handles(provider)
        others = [system for name, system in SYSTEMS.items() if name != self.system.name]
        assert not any(system.handles(provider) for system in others)

    def test_copy_submits_the_block_and_the_provider_stays(self) -> None:
        """A block changes the copy of a provider only."""
        provider: Any = self.system.provider(self.read(), NodeResources())
        before, changed = dict(vars(provider)), copy(provider)
        self.system.shape(changed, BlockSpec("1", ("n1", "n2"), 540.0, 120.0))
        assert vars(provider) == before
        assert vars(changed) != before

    def test_window_source_is_made_without_a_query(self) -> None:
        """It costs nothing to make the source for a request, or to learn that there is nothing to query."""
        with suppress(ClusterGone):
            assert isinstance(self.system.source(self.read(), NodeResources()), WindowSource)

    def test_each_kind_of_node_has_a_provider(self) -> None:
        """The keys of kinds are read completely, and each kind has a provider of its own."""
        section = _section(self.kinds)
        names = section.keys()
        sections = {name: section.section(name) for name in names}
        block = self.read()
        read = self.system.read_kinds(sections, block)
        for keys in sections.values():
            keys.done()
        assert tuple(read) == names
        kinds = {name: ({**block, **own}, NodeResources()) for name, own in read.items()}
        providers = self.system.providers(block, kinds)
        assert tuple(providers) == names
        assert len({id(provider) for provider in providers.values()}) == len(names)
        assert all(self.system.handles(provider) for provider in providers.values())


def _section(text: str) -> Section:
    return Section.parse(text, "site.yaml", Variables(environment={}))
