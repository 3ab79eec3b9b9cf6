"""Which process may write to a training job's checkpoint directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.storage.root import check_same_root

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.storage.posix import CheckpointDirectory
    from freetrain_parsl.training.group.process_group import Group


class WriterClaim:
    """Makes this process the only writer of a directory, once in each generation of the group.

    Parameters
    ----------
    options
        Contains the directory's root, and its identity if known.
    directory
        The training job's directory.
    group_of
        Returns the current group.
    """

    def __init__(self, options: SessionOptions, directory: CheckpointDirectory, group_of: Callable[[], Group]) -> None:
        self._options = options
        self._directory = directory
        self._group_of = group_of
        self._generation: int | None = None  # for which this process became the writer

    def take(self) -> None:
        """Become the writer, unless this process did in this generation: one that was fenced off must not do it again.

        Raises
        ------
        CheckpointError
            The directory cannot be used.
        """
        generation = self._group_of().generation
        if self._generation != generation:
            if self._options.root_identity:
                check_same_root(self._options.checkpoint_root, self._options.root_identity)
            self._directory.open(generation)
            self._generation = generation

    def lose(self) -> None:
        """Note that the directory is missing, and with it the staging directory: `take` opens it again."""
        self._generation = None

    def release(self) -> None:
        """Stop being the writer."""
        self._directory.close()
        self._generation = None
