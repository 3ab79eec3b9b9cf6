"""Submission of blocks through the user's Parsl provider, and what their scripts have said at their end.

A provider submits blocks of one size. A shallow copy with other attributes submits a block of another size, which
the original's ``cancel`` and the batch system's commands can manage.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsl.launchers import SimpleLauncher, SingleNodeLauncher
from parsl.providers.errors import SubmitException

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.executor.batch.systems import LAUNCHERS, system_of
from freetrain_parsl.texts import printable
from freetrain_parsl.windows.commands import COMMAND_COUNTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from parsl.providers.base import ExecutionProvider

    from freetrain_parsl.windows.base import WindowSource
    from freetrain_parsl.windows.system import BlockSpec

__all__ = [
    "NODE_KIND",
    "TELL_EXIT_CODE",
    "complaint_of",
    "last_words",
    "provider_for",
    "refuse_provider",
    "window_source_for",
]

_MARK = "freetrain: the script of this block exited with code"

TELL_EXIT_CODE = f"trap 'echo \"{_MARK} $?\" >&2' EXIT"
"""Shell command at the start of a block's script: batch systems report exit codes late, or only in the accounting."""

_BYTES_READ = 8192
_TRACEBACK = "Traceback (most recent call last):"
_MOST_LINES = 4
_LONGEST = 400  # characters

NODE_KIND = "FREETRAIN_NODE_KIND"
"""Environment variable with the kind of the node, where there are several kinds."""


def last_words(resource: Mapping[str, Any] | None) -> str:
    """Describe in one line how a block's script ended.

    Parameters
    ----------
    resource
        The provider's entry for the job: ``job_stderr_path`` and ``job_stdout_path``, if it has files.

    Returns
    -------
    str
        ``exit code 1; its stderr ends with 'module: command not found'; see FILE``, or a part of it.
    """
    parts: list[str] = []
    paths = {word: (resource or {}).get(f"job_{word}_path") for word in ("stderr", "stdout")}
    for word, path in paths.items():
        if path is None:
            continue
        lines = _last_lines(Path(path))
        codes = [line.removeprefix(_MARK).strip() for line in lines if line.startswith(_MARK)]
        if codes:
            parts.append(f"exit code {codes[-1]}")
        script = str(Path(path).with_suffix(""))  # the shell puts it before its error messages
        said = [line.removeprefix(f"{script}: ") for line in lines if not line.startswith(_MARK)][-_MOST_LINES:]
        if said:
            parts += [f"its {word} ends with {' / '.join(said)[-_LONGEST:]!r}", f"see {path}"]
            break
    else:
        parts += [f"it printed nothing to {path}" for path in [paths["stderr"]] if path is not None]
    return "; ".join(parts)


def _last_lines(path: Path) -> list[str]:
    """Return the last non-empty lines of a file, without control characters and the frames of Python's tracebacks."""
    try:
        with path.open("rb") as file:
            file.seek(-min(_BYTES_READ, file.seek(0, os.SEEK_END)), os.SEEK_END)
            text = file.read(_BYTES_READ).decode(errors="replace")
    except (OSError, ValueError):  # not created yet, or removed with the script directory
        return []
    plain = (printable(line).strip() for line in _without_frames(text.splitlines()))
    return [line for line in plain if line]


def _without_frames(lines: Iterable[str]) -> Iterator[str]:
    """Leave out what is between the head of a traceback and its exception: it names files of Python and Parsl."""
    in_traceback = False
    for line in lines:
        if line == _TRACEBACK:
            in_traceback = True
        elif not (in_traceback and (line.startswith(" ") or not line)):
            in_traceback = False
            yield line


def provider_for(provider: Any, spec: BlockSpec) -> Any:
    """Copy a provider so that it submits this block."""
    changed: Any = copy.copy(provider)
    changed.nodes_per_block = spec.size
    changed.walltime = _hours_minutes_seconds(spec.seconds)
    if hasattr(provider, "worker_init"):
        named = f"export {NODE_KIND}={spec.node_kind}\n" if spec.node_kind else ""
        changed.worker_init = f"{TELL_EXIT_CODE}\n{named}{provider.worker_init}"
    if hasattr(provider, "execute_wait"):
        changed.execute_wait = partial(_run, provider.cmd_timeout)
    system = system_of(provider)
    if system is None:  # one that finds its own windows
        changed.nodelist = spec.nodes if spec.pinned or spec.avoided else None
    else:
        system.shape(changed, spec)
    return changed


def window_source_for(provider: Any) -> WindowSource:
    """Return the window source of the provider's batch system."""
    system = system_of(provider)
    source: WindowSource = provider.window_source() if system is None else system.source_for(provider)
    return source


def refuse_provider(provider: ExecutionProvider, windows: WindowSource | None, most_nodes: int | None) -> None:
    """Check that a provider can start slots on every node of a block, and that it can be queried for windows.

    Raises
    ------
    InvalidSettings
        It cannot; the message states the remedy.
    """
    system = system_of(provider)
    if windows is None and system is None and not hasattr(provider, "window_source"):
        raise InvalidSettings(
            f"FreeTrainExecutor cannot query {type(provider).__name__} for windows; pass windows=a WindowSource"
        )
    launcher = getattr(provider, "launcher", None)
    first_only = isinstance(launcher, (SimpleLauncher, SingleNodeLauncher))
    if system is not None and system.launcher and first_only and most_nodes != 1:
        raise InvalidSettings(
            f"{type(provider).__name__} with {type(launcher).__name__} starts workers on the first node of a block "
            f"only; pass launcher={LAUNCHERS[system.launcher]}(), or set max_nodes_per_block=1 in the planner settings"
        )


def complaint_of(error: BaseException) -> str:
    """Return the batch system's own error message for a failed submission."""
    said = (
        [getattr(error, "stderr", None), getattr(error, "stdout", None)] if isinstance(error, SubmitException) else []
    )
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{' '.join(error.cmd[:1])} did not end within {error.timeout:g} s{_last_words(error)}"
    lines = [line.strip() for text in said if text for line in str(text).splitlines() if line.strip()]
    return "; ".join(lines) if lines else f"{error}" or type(error).__name__


def _last_words(error: subprocess.TimeoutExpired) -> str:
    said = error.stderr or ""
    lines = (said.decode(errors="replace") if isinstance(said, bytes) else said).strip().splitlines()
    return f": {lines[-1].strip()}" if lines else ""


def _run(limit: float, command: str, timeout: float | None = None) -> tuple[int, str, str]:
    """Run a provider's submit command without the shell that the provider would use, and kill it on timeout.

    The provider's shell survives the timeout (``sbatch`` waits for minutes when the queue is full), and would later
    submit a block that the executor no longer expects.
    """
    arguments = shlex.split(command)
    COMMAND_COUNTS.add(arguments[0])
    done = subprocess.run(
        arguments,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout or limit,
        check=False,
        env=_environment(arguments),
    )
    return done.returncode, done.stdout, done.stderr


def _environment(arguments: Sequence[str]) -> dict[str, str] | None:
    """Return the environment without the user's ``SBATCH_…`` variables that would override lines of the script."""
    if Path(arguments[0]).name != "sbatch":
        return None
    stated = re.findall(r"^#SBATCH\s+--([a-z-]+)", Path(arguments[-1]).read_text(encoding="utf-8"), re.MULTILINE)
    dropped = {f"SBATCH_{option.upper().replace('-', '_')}" for option in (*stated, "timelimit", "requeue")}
    return {name: value for name, value in os.environ.items() if name not in dropped}


def _hours_minutes_seconds(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"
