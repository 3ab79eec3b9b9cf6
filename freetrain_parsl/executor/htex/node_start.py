"""Another way to start a node's worker pool than by its command alone: a port for extensions.

A `NodeStart` puts words before the command that starts the pilot, such as a script that prepares the node's Python.
Whatever fails on a node, the command must run as it stands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from freetrain_parsl.entry_points import EntryPoints, subclass_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from freetrain_parsl.protocol.messages import Hello

__all__ = ["IMAGE_CHOICES", "STARTS", "START_FILES", "NodeStart", "node_start_for"]

IMAGE_CHOICES: Final = ("auto", "off", "always", "full")
"""Values of ``node_image``."""

START_FILES: Final = "start"
"""Name of the directory of `NodeStart.begin`, beside the journal."""

_IMAGE: Final = "image"


class NodeStart(ABC):
    """How the nodes of one executor start.

    Parameters
    ----------
    choice
        ``auto``, ``always`` or ``full``.
    python
        The nodes' Python: a path, or a name on their PATH.
    """

    @abstractmethod
    def __init__(self, choice: str, python: str) -> None: ...

    @abstractmethod
    def begin(self, directory: Path) -> bool:
        """Prepare, in the background.

        `directory` is for what nodes read when they start: private, and on the file system that they share. It is made
        if it is needed, and `close` removes it, or ``freetrain clean`` after a driver that was killed.

        Return whether slots are to tell which files training jobs load, see `learn`.
        """

    @abstractmethod
    def words(self, nodes: int) -> Sequence[str]:
        """Return the words before the command of a block with so many nodes; none: the command by itself.

        They may hold letters, digits and ``@%+=:,./_-``. Called in the job submitter's thread.
        """

    @abstractmethod
    def preparation(self, nodes: int, system: str) -> str:
        """Return shell commands for a block's script after ``worker_init``, where `words` returned some.

        `system` is the batch system's name.
        """

    @abstractmethod
    def started(self, hello: Hello) -> str:
        """Take note of how a slot's node started; return what is to be told of it, empty: nothing.

        Called in the control loop's thread, as is `learn`; neither may block.
        """

    @abstractmethod
    def learn(self, files: bytes) -> None:
        """Take note of the files that a training job's process has loaded, see `FilesLoaded`."""

    @abstractmethod
    def close(self) -> None:
        """End what runs in the background, and remove the directory."""


STARTS: Final = EntryPoints[type[NodeStart]]("freetrain.starts", "start of nodes", subclass_of(NodeStart))
"""Name -> kind of start."""


def node_start_for(choice: str, python: str) -> NodeStart | None:
    """Return how nodes start with this ``node_image``; ``None``: by the command alone."""
    return None if choice == "off" else STARTS[_IMAGE](choice, python)
