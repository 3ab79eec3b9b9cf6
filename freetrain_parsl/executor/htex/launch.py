"""The command that a block runs on each of its nodes: the pilot and HTEX's worker pool, in the Python of that site."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parsl.executors.high_throughput.executor import DEFAULT_LAUNCH_CMD

from freetrain_parsl.errors import InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["Container", "check_node_python", "node_command"]

# What shlex.quote leaves as it is. Launchers put the command into here-documents and `bash -c` strings of their own,
# where quotes do not protect: a word that would need them is refused.
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


@dataclass(frozen=True)
class Container:
    """The container that a node's worker pool runs in, started with Apptainer's ``exec``.

    The run directory and the checkpoint directory are bound by the executor itself.

    Parameters
    ----------
    image
        A file that the nodes see (``/images/torch.sif``), or what else `command` takes (``docker://…``).
    binds
        Further directories, ``SOURCE[:TARGET[:OPTIONS]]``, one each.
    options
        Further options of ``exec``, one word each: ``--nv``.
    command
        Name or path of the program: ``apptainer`` or ``singularity``.

    Raises
    ------
    InvalidSettings
        A word holds a blank or something that is special to a shell.
    """

    image: str
    binds: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    command: str = "apptainer"

    def __post_init__(self) -> None:
        _check("container image", self.image)
        _check("container command", self.command)
        for bind in self.binds:
            _check("container bind", bind)
            if "," in bind:
                raise InvalidSettings(f"container bind {bind!r}: give each directory as an item of its own")
        for option in self.options:
            _check("container option", option)
            if not option.startswith("-"):
                raise InvalidSettings(f"container option {option!r}: write an option with its value as --name=value")

    def words(self, directories: Iterable[str] = ()) -> list[str]:
        """Make the command's words up to the image; `directories` are bound under their own names."""
        binds = dict.fromkeys((*directories, *self.binds))
        return [self.command, "exec", *self.options, *(f"--bind={bind}" for bind in binds), self.image]


def check_node_python(python: str) -> None:
    """Refuse a name of the nodes' Python that cannot be put into a launch command.

    Raises
    ------
    InvalidSettings
        It holds a blank or something that is special to a shell.
    """
    _check("node_python", python)


def node_command(python: str | None, container: Container | None, directories: Iterable[Path]) -> str:
    """Make the launch command: HTEX's own, with its placeholders, started by the pilot.

    Parameters
    ----------
    python
        The nodes' Python: a path, or a name that is looked up on PATH after the block's ``worker_init``. ``None``: the
        driver's own interpreter, or ``python3`` of a container.
    container
        ``None`` for none.
    directories
        What a container must see: run directory and checkpoints.

    Raises
    ------
    InvalidSettings
        A directory's name cannot be given to the container.
    """
    interpreter = python or (sys.executable if container is None else "python3")
    words = [interpreter, "-m", "freetrain_parsl.executor.slot.pilot"]
    words += [interpreter, "-m", "freetrain_parsl.executor.htex.worker_pool"]
    if container is not None:
        bound = [str(directory) for directory in directories]
        for name in bound:
            _check("directory to bind into the container", name)
        words = container.words(bound) + words
    # HTEX formats the command; and it starts its programs by name from PATH, which fails in an environment that is not
    # activated. The shell makes way for the pilot, since a shell would die of the batch system's signal.
    command = shlex.join(words).replace("{", "{{").replace("}", "}}")
    return DEFAULT_LAUNCH_CMD.replace("process_worker_pool.py", f"exec {command}", 1)


def _check(what: str, word: str) -> None:
    if not _PLAIN.fullmatch(word):
        raise InvalidSettings(f"{what} {word!r} may hold letters, digits and @%+=:,./_- only")
