"""The command that a block runs on each of its nodes: the pilot and HTEX's worker pool, in the nodes' Python."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.interpreters import module_command

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["EXEC", "Container", "check_node_python", "node_command"]

EXEC: Final = "exec"
"""First word of the launch command."""

# The words that shlex.quote leaves unchanged. Launchers put the command into here-documents and `bash -c` strings,
# where quotes do not protect, so a word that would need quoting is rejected.
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


@dataclass(frozen=True)
class Container:
    """The container that a node's worker pool runs in, started with Apptainer's ``exec``.

    The executor binds the run directory and the checkpoint directory itself.

    Parameters
    ----------
    image
        A file that is visible to the nodes (``/images/torch.sif``), or any other reference that `command` accepts
        (``docker://…``).
    binds
        Additional directories, each as ``SOURCE[:TARGET[:OPTIONS]]``.
    options
        Additional options of ``exec``, one word each: ``--nv``.
    command
        Name or path of the program: ``apptainer`` or ``singularity``.

    Raises
    ------
    InvalidSettings
        A word contains whitespace or a shell special character.
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
                raise InvalidSettings(f"container bind {bind!r}: give each directory as a separate item")
        for option in self.options:
            _check("container option", option)
            if not option.startswith("-"):
                raise InvalidSettings(f"container option {option!r}: write an option with its value as --name=value")

    def words(self, directories: Iterable[str] = ()) -> list[str]:
        """Return the words of the command up to the image; `directories` are bound under their own names."""
        binds = dict.fromkeys((*directories, *self.binds))
        return [self.command, "exec", *self.options, *(f"--bind={bind}" for bind in binds), self.image]


def check_node_python(python: str) -> None:
    """Check that the nodes' Python can be put into a launch command.

    Raises
    ------
    InvalidSettings
        It contains whitespace or a shell special character.
    """
    _check("node_python", python)


def node_command(
    python: str | None, container: Container | None, directories: Iterable[Path], starter: str = ""
) -> str:
    """Return the launch command: HTEX's own, with its placeholders, started by the pilot.

    Parameters
    ----------
    python
        The nodes' Python: a path, or a name that is looked up on PATH after the block's ``worker_init``. ``None``: the
        driver's interpreter, or ``python3`` of the container.
    container
        The container; ``None``: no container.
    directories
        Directories to bind into the container: run directory and checkpoints.
    starter
        Module that starts the pilot, whose command it gets as arguments; empty: none, the pilot starts by itself.

    Raises
    ------
    InvalidSettings
        A directory's name cannot be passed to the container.
    """
    # Imported here: checks of site files need this module, and Parsl takes a second.
    from parsl.executors.high_throughput.executor import DEFAULT_LAUNCH_CMD

    interpreter = python or (sys.executable if container is None else "python3")
    modules = (starter, "freetrain_parsl.executor.slot.pilot", "freetrain_parsl.executor.htex.worker_pool")
    words = [word for module in modules if module for word in module_command(module, interpreter)]
    if container is not None:
        bound = [str(directory) for directory in directories]
        for name in bound:
            _check("directory to bind into the container", name)
        words = container.words(bound) + words
    # HTEX formats the command, hence the doubled braces. It starts its programs by name from PATH, which fails in an
    # environment that is not activated. `exec` replaces the shell, which the batch system's signal would end.
    command = shlex.join(words).replace("{", "{{").replace("}", "}}")
    return DEFAULT_LAUNCH_CMD.replace("process_worker_pool.py", f"{EXEC} {command}", 1)


def _check(what: str, word: str) -> None:
    if not _PLAIN.fullmatch(word):
        raise InvalidSettings(f"{what} {word!r} may hold letters, digits and @%+=:,./_- only")
