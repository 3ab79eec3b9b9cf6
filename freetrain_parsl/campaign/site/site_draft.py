"""Write a commented site file for a machine that has been queried: the output of ``freetrain init``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import yaml

from freetrain_parsl.campaign.site.site import SITE_FILE
from freetrain_parsl.executor.batch.systems import SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from freetrain_parsl.windows.machine import Machine, NodeType, Queue
    from freetrain_parsl.windows.state import Partition

__all__ = ["LoginHost", "draft_checkpoints", "draft_site"]

_MOST_NAMED = 6  # alternatives listed in a comment
_LONGEST_BLOCK = 2 * 3600.0  # s
_COMMENT_COLUMN = 44
_SPECIAL = frozenset(":#'\"{}[]&*!|>%@`=, ")  # characters with a meaning in YAML


@dataclass(frozen=True)
class LoginHost:
    """The host on which the driver will run, normally a login node.

    Parameters
    ----------
    python
        The driver's interpreter.
    environment
        Directory of its virtual or conda environment; ``None`` if it is in neither.
    scratch
        Directory for large files, on a file system that is probably shared with the nodes; ``None`` if none was found.
    interfaces
        Network interface -> addresses, without the loopback.
    """

    python: Path
    environment: Path | None = None
    scratch: Path | None = None
    interfaces: Mapping[str, Sequence[str]] = field(default_factory=dict)


def draft_site(machine: Machine, queue: Queue, host: LoginHost, account: str | None = None) -> str:
    """Write a site file for one partition or queue.

    Parameters
    ----------
    machine, queue
        The batch system, and one of its queues.
    host
        The host on which the driver will run.
    account
        Account to charge; ``None`` for the user's only one, or the first of several.
    """
    system = SYSTEMS[machine.system]
    hints = system.hints
    assert hints is not None, "as it describes its queues"
    title = f"{system.title} {machine.name}".rstrip()
    lines = [
        f"# Site file for {title}, written by `freetrain init`. What it could not determine is in comments:",
        f"# check them with {hints.manual} and your site's documentation.",
        f"# Commands use it by themselves where it is called {SITE_FILE}; otherwise:",
        "#   freetrain windows --config THIS_FILE",
        f"site: {_scalar(machine.name or machine.system)}",
        f"system: {machine.system}",
        "",
        "block:",
        *_queue_lines(system.queue, machine, queue),
        *_account_lines(machine, account),
    ]
    if "qos" in system.options and machine.has_accounts:
        lines.append(
            _line("  qos", queue.qos, "with it, jobs may be preempted, so idle nodes can be used at any time")
            if queue.qos
            else "  # qos: preempt"
        )
    types = [kind for kind, _ in queue.node_types]
    if len(types) > 1:
        lines.append(f"  # The nodes differ: {_described(queue.node_types)}.")
        lines.append(f"  # {hints.narrowing}")
    key, value, comment = hints.launcher_overrides
    lines += [
        f"  # launcher: {system.launcher}",
        _line(f"  {key}", value.format(cpus=types[0].cpus if types else 32), comment),
        *_environment_lines(host),
        "",
        "node:",
        *_node_lines(types[0] if types else None, host, exclusive=hints.exclusive),
        "",
        *_network_lines(host),
        *_planner_lines(queue),
        "rate_limits:",
        _line("  poll_interval", "30 s", "interval of queries; it increases automatically if the scheduler is slow"),
        _line("  submissions_per_minute", "12", "ask your site what is acceptable"),
        _line("  max_pending_blocks", "4"),
        "",
    ]
    return "\n".join(lines) + "\n" + draft_checkpoints(host)


def _queue_lines(key: str, machine: Machine, queue: Queue) -> list[str]:
    partition = queue.partition
    preemptible = "preemptible" if partition.preemptible else "not preemptible"
    remark = f"{len(partition.nodes)} nodes, {_limit(partition)}, {preemptible}"
    lines = [_line(f"  {key}", _scalar(queue.name), remark)]
    others = [other.name for other in machine.queues if other is not queue and not other.refusal]
    if others:
        lines.append(f"  # also open to you: {_some(others)}")
    return lines


def _limit(partition: Partition) -> str:
    seconds = partition.max_walltime
    if math.isinf(seconds):
        return "no time limit"
    return f"jobs of at most {f'{seconds / 3600:.3g} h' if seconds >= 3600 else f'{seconds / 60:.3g} min'}"


def _account_lines(machine: Machine, account: str | None) -> list[str]:
    if account is None and not machine.has_accounts:
        return ["  # This Slurm has no accounting database: jobs have no account and no QOS."]
    if account is None and not machine.accounts:
        return [_line("  # account", "PROJECT", "to which jobs are charged, if your site requires one")]
    chosen = account or machine.accounts[0]
    others = [name for name in machine.accounts if name != chosen]
    return [_line("  account", _scalar(chosen), f"you may also charge {_some(others)}" if others else "")]


def _environment_lines(host: LoginHost) -> list[str]:
    example = "module load python" if host.environment is None else f"source {host.environment / 'bin' / 'activate'}"
    return [_line("  # worker_init", "|", "in a job's script, before the workers start"), f"  #   {example}"]


def _node_lines(kind: NodeType | None, host: LoginHost, *, exclusive: bool) -> list[str]:
    lines = [_line("  # python", "python", f"from worker_init's environment; default: the driver's, {host.python}")]
    if exclusive:
        lines.append(_line("  exclusive", "true", "whole nodes; if false, set cores, gpus and memory"))
    if kind is None:
        return [*lines, "  # cores: 32"]
    lines.append(_line("  # cores" if exclusive else "  cores", str(kind.cpus)))
    if kind.gpus:
        lines.append(_line("  gpus", str(kind.gpus), "requested on every node; each is a slot"))
        if kind.gpus > 1:
            lines.append(_line("  # share: false", "", "training jobs share nodes, unless each should have whole ones"))
    else:
        lines.append(_line("  # slots: 2", "", "shares of a node, for training jobs that do not use all of its cores"))
    if kind.memory:
        lines.append(_line("  # memory", f"{kind.memory // 1024} GiB"))
    return lines


def _network_lines(host: LoginHost) -> list[str]:
    if len(host.interfaces) < 2:
        return []
    shown = ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in host.interfaces.items())
    return [
        f"# This host has several networks: {shown}.",
        "# network:",
        f"#   driver_interface: {next(iter(host.interfaces))}",
        "",
    ]


def _planner_lines(queue: Queue) -> list[str]:
    longest = min(_LONGEST_BLOCK, queue.partition.max_walltime)
    margin = max(30.0, queue.partition.grace)
    return [
        _line("planner:", "", "costs of a block here: see the journal of a first run"),
        _line("  startup", "60 s"),
        _line("  min_useful", "5 min"),
        _line("  closing_margin", f"{margin:.0f} s"),
        _line("  max_walltime", f"{longest / 60:.0f} min"),
        "",
    ]


def draft_checkpoints(host: LoginHost) -> str:
    """Write the end of a site file: the directory of the checkpoints."""
    if host.scratch is None:
        comment = "accessible from all nodes; default: in the run directory"
        return f"# checkpoints:\n{_line('#   directory', '/scratch/me/freetrain', comment)}\n"
    directory = _scalar(str(host.scratch / "freetrain"))
    return f"checkpoints:\n{_line('  directory', directory, 'must be accessible from all nodes')}\n"


def _described(types: Iterable[tuple[NodeType, int]]) -> str:
    words = []
    for kind, count in types:
        gpus = f", {kind.gpus} GPUs" if kind.gpus else ""
        words.append(f"{count} with {kind.cpus} cores{gpus}, {kind.memory // 1024} GiB")
    return _some(words, "; ")


def _some(names: Sequence[str], separator: str = ", ") -> str:
    shown = separator.join(names[:_MOST_NAMED])
    return f"{shown} and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else shown


def _line(key: str, value: str, comment: str = "") -> str:
    text = f"{key}: {value}" if value else key
    return f"{text:{_COMMENT_COLUMN}} # {comment}" if comment else text


def _scalar(text: str) -> str:
    """Write a YAML scalar that is read as this text, in a file where ``${NAME}`` is replaced."""
    escaped = text.replace("${", "$${")
    plain = escaped.isprintable() and not _SPECIAL & set(escaped) and not escaped.startswith(("-", "?"))
    return escaped if plain and yaml.safe_load(escaped) == escaped else json.dumps(escaped, ensure_ascii=False)
