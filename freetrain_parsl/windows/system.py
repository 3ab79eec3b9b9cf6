"""Interface to a kind of batch system: how it is found, submitted to, and described in a site file.

Implementations import Parsl and their own parsers inside of methods: commands that only name a system start fast.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import timedelta
    from pathlib import Path

    from parsl.providers.base import ExecutionProvider

    from freetrain_parsl.windows.base import WindowSource
    from freetrain_parsl.windows.commands import Runner
    from freetrain_parsl.windows.machine import DraftHints, Machine

__all__ = ["BatchSystem", "BlockSpec", "Keys", "NodeResources", "given_values"]


@dataclass(frozen=True)
class BlockSpec:
    """The batch job of one block.

    Parameters
    ----------
    block
        Parsl's block id.
    nodes
        Names of the nodes that it is meant for; empty for any one node.
    seconds
        Its walltime.
    least_seconds
        Shortest useful walltime, if the batch system may shorten it to fit.
    pinned
        Whether it must run on exactly these nodes, because others of the partition close too early.
    node_kind
        Kind of the nodes; empty where there is one kind only.
    avoided
        Nodes that are free but must not be used: slots could not start there. PBS cannot exclude nodes.
    """

    block: str
    nodes: tuple[str, ...]
    seconds: float
    least_seconds: float
    pinned: bool = True
    node_kind: str = ""
    avoided: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Its number of nodes."""
        return len(self.nodes) or 1


@dataclass(frozen=True)
class NodeResources:
    """Resources that a block requests on each node; ``None`` if not set.

    Parameters
    ----------
    cores, gpus
        Counts.
    memory
        Bytes.
    exclusive
        Whether blocks take whole nodes.
    """

    cores: int | None = None
    gpus: int | None = None
    memory: int | None = None
    exclusive: bool = True


class Keys(Protocol):
    """A section of a site file. Getters return ``None`` for a key that is absent; one that none has read is refused."""

    def has(self, key: str) -> bool:
        """Return whether the key is present and not empty."""

    def text(self, key: str) -> str | None:
        """Return a text."""

    def required(self, key: str, example: str) -> str:
        """Return a required text."""

    def choice(self, key: str, choices: Iterable[str]) -> str | None:
        """Return one of the allowed words."""

    def count(self, key: str, least: int = ..., most: int = ...) -> int | None:
        """Return a whole number of at least `least` (default 1) and at most `most`."""

    def duration(self, key: str, *, positive: bool = ...) -> timedelta | None:
        """Return a duration."""

    def flag(self, key: str) -> bool | None:
        """Return true or false."""

    def refusal(self, message: str, key: str | None = None) -> Exception:
        """Make an error with file, line and key."""


def given_values(**values: Any) -> dict[str, Any]:
    """Keep only the keys set in the file: the others have the package's own defaults."""
    return {key: value for key, value in values.items() if value is not None}


class BatchSystem(ABC):
    """One kind of batch system.

    Attributes
    ----------
    name
        ``system:`` in a site file, and ``--system``.
    title
        Its name in texts.
    command
        Name of a command that is on PATH where it is; empty if there is none.
    shared
        Whether it is a site's own, which others use: it is queried seldom, and chosen before one that is not.
    queue
        Its word for a set of nodes with limits, and the key of ``block:`` that names one; empty if there is none.
    options
        Command-line options that it has, without dashes.
    launcher
        Launcher that starts a program on every node, as in site files; empty if it does so by itself.
    requests_resources
        Whether its jobs request resources of each node, so that the keys of ``node:`` about them have a meaning.
    hints
        For a drafted site file; ``None`` if `describe` returns nothing.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    command: ClassVar[str] = ""
    shared: ClassVar[bool] = True
    queue: ClassVar[str] = ""
    options: ClassVar[tuple[str, ...]] = ()
    launcher: ClassVar[str] = ""
    requests_resources: ClassVar[bool] = True
    hints: ClassVar[DraftHints | None] = None

    def is_here(self) -> bool:
        """Return whether this host can use it."""
        return bool(self.command) and shutil.which(self.command) is not None

    # -- Parsl's provider

    @abstractmethod
    def handles(self, provider: ExecutionProvider) -> bool:
        """Return whether it is the batch system of a Parsl provider."""

    def shape(self, provider: Any, spec: BlockSpec) -> None:
        """Change a copy of a provider, whose size and walltime are set, so that it submits this block."""
        provider.nodelist = spec.nodes if spec.pinned or spec.avoided else None

    def source_for(self, provider: Any) -> WindowSource:
        """Return the source of the windows of a provider; default: its own."""
        source: WindowSource = provider.window_source()
        return source

    # -- site files

    @abstractmethod
    def read_block(self, keys: Keys) -> dict[str, Any]:
        """Read the section ``block``: the resource request of a job; ``worker_init`` is read for all systems."""

    @abstractmethod
    def read_kinds(self, kinds: Mapping[str, Keys], block: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Read of each kind of node, by name, the keys that differ from those of ``block``."""

    @abstractmethod
    def source(self, block: Mapping[str, Any], node: NodeResources) -> WindowSource:
        """Return the source of the windows for a resource request, without Parsl; command-line options are one, too.

        Raises
        ------
        ClusterGone
            The batch system has ended.
        """

    @abstractmethod
    def provider(self, block: Mapping[str, Any], node: NodeResources, run_dir: Path | None = None) -> ExecutionProvider:
        """Make Parsl's provider for a resource request; `run_dir` is for the files of a system that it starts."""

    def providers(
        self,
        block: Mapping[str, Any],  # noqa: ARG002 - for a system that all kinds share
        kinds: Mapping[str, tuple[Mapping[str, Any], NodeResources]],
        run_dir: Path | None = None,
    ) -> dict[str, ExecutionProvider]:
        """Make the providers of kinds of nodes, by name; the request of each includes `block`, which they share."""
        return {name: self.provider(own, node, run_dir) for name, (own, node) in kinds.items()}

    def outlives_driver(self, block: Mapping[str, Any]) -> bool:  # noqa: ARG002 - most do
        """Return whether the batch system that is used outlives the driver."""
        return True

    def await_end(self, run_dir: Path, report: Callable[[str], None]) -> None:  # noqa: B027 - most end nothing
        """Wait until what an earlier driver of this run has started here has ended; `report` takes a line of output."""

    # -- `freetrain init`

    def describe(self, *, user: str | None = None, run: Runner | None = None) -> Machine | None:  # noqa: ARG002
        """Query what it offers, each command once; ``None`` if there is nothing to choose from.

        Parameters
        ----------
        user
            Owner of the jobs; ``None`` for the calling user.
        run
            Runs commands; ``None`` for this machine's.

        Raises
        ------
        CommandNotFound, BatchSystemError
            It is not available.
        """
        return None

    def draft(self, cores: int) -> str:  # noqa: ARG002 - most are described by their queues
        """Write the beginning of a site file for this host, with `cores` cores, where `describe` returns nothing."""
        return ""
