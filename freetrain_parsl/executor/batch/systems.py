"""The batch systems by name, and the base of those whose jobs are scripts, which a launcher starts on every node."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final

from freetrain_parsl.entry_points import EntryPoints, subclass_of
from freetrain_parsl.windows.system import BatchSystem, given_values

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from parsl.launchers.base import Launcher
    from parsl.providers.base import ExecutionProvider

    from freetrain_parsl.windows.system import Keys, NodeResources

__all__ = ["LAUNCHERS", "SYSTEMS", "ScriptSystem", "system_of"]

LAUNCHERS: Final = {
    "srun": "SrunLauncher",
    "mpiexec": "MpiExecLauncher",
    "mpirun": "MpiRunLauncher",
    "single": "SingleNodeLauncher",
}
"""Word in a site file -> Parsl's class."""

_COMMAND_TIMEOUT = timedelta(seconds=60)  # Parsl's own 10 s for Slurm is too short for a busy scheduler

SYSTEMS: Final = EntryPoints[BatchSystem](
    "freetrain.windows", "batch system", lambda found: subclass_of(BatchSystem)(found)()
)
"""Name -> batch system; of those that are `shared`, the first is chosen first."""


class ScriptSystem(BatchSystem):
    """A batch system with a Parsl provider that submits scripts.

    Attributes
    ----------
    words
        Keys of ``block:`` that choose the nodes of a job.
    directive
        Beginning of each line of ``scheduler_options``.
    """

    words: ClassVar[tuple[str, ...]]
    directive: ClassVar[str]

    def read_block(self, keys: Keys) -> dict[str, Any]:
        """Read the words of the request, and how programs are started on its nodes."""
        return self._read_words(keys) | given_values(
            launcher=keys.choice("launcher", LAUNCHERS),
            launcher_overrides=keys.text("launcher_overrides"),
            command_timeout=keys.duration("command_timeout"),
        )

    def read_kinds(self, kinds: Mapping[str, Keys], block: Mapping[str, Any]) -> dict[str, dict[str, Any]]:  # noqa: ARG002
        """Read the words of each kind."""
        return {name: self._read_words(keys) for name, keys in kinds.items()}

    def provider(
        self,
        block: Mapping[str, Any],
        node: NodeResources,
        run_dir: Path | None = None,  # noqa: ARG002 - no system is started
    ) -> ExecutionProvider:
        """Make the provider."""
        return self._provider(
            block,
            node,
            launcher=self._launcher(block),
            worker_init=block.get("worker_init", ""),
            scheduler_options=block.get("scheduler_options", ""),
            cmd_timeout=math.ceil(block.get("command_timeout", _COMMAND_TIMEOUT).total_seconds()),
            init_blocks=0,
        )

    @abstractmethod
    def _provider(self, block: Mapping[str, Any], node: NodeResources, **common: Any) -> ExecutionProvider:
        """Make the provider with these arguments, and those that only this system has."""

    def _launcher(self, block: Mapping[str, Any]) -> Launcher:
        import parsl.launchers

        kind = block.get("launcher", self.launcher)
        options = {} if kind == "single" else {"overrides": block.get("launcher_overrides", "")}
        if kind != "single" and "launcher_bind" in block:
            options["bind_cmd"] = block["launcher_bind"]
        launcher: Launcher = getattr(parsl.launchers, LAUNCHERS[kind])(**options)
        return launcher

    def _read_words(self, keys: Keys) -> dict[str, Any]:
        words = given_values(**{word: _word(keys, word) for word in self.words})
        for line in filter(None, map(str.strip, words.get("scheduler_options", "").splitlines())):
            if not line.startswith(f"{self.directive} "):
                raise keys.refusal(f"each line begins with '{self.directive} ', got {line!r}", "scheduler_options")
        return words


def _word(keys: Keys, key: str) -> str | None:
    """Read a value that Parsl inserts into a script or command line unquoted: it must not inject anything."""
    value = keys.text(key) or None  # empty: an optional ${NAME:-} without a value
    if key != "scheduler_options" and value is not None and not re.fullmatch(r"[^\s;$`\"'\\<>]+", value):
        raise keys.refusal(f"must not contain blanks or shell metacharacters, got {value!r}", key)
    return value


def system_of(provider: Any) -> BatchSystem | None:
    """Return the batch system of a Parsl provider; ``None`` if none handles it."""
    return next((system for system in SYSTEMS.usable() if system.handles(provider)), None)
