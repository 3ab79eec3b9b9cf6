"""``freetrain init``: looks at the machine and writes a commented site file for it. Submits nothing."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freetrain_parsl.campaign.site.site import SITE_FILE
from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.sources import SystemOption, errors_in_one_line, known_systems, system_named, unshared_system
from freetrain_parsl.errors import BatchSystemError, UsageError, did_you_mean
from freetrain_parsl.executor.batch.systems import SYSTEMS
from freetrain_parsl.screen import say, say_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from freetrain_parsl.campaign.site.site_draft import LoginHost
    from freetrain_parsl.windows.machine import Machine, Queue
    from freetrain_parsl.windows.system import BatchSystem

_SCRATCH_VARIABLES = ("SCRATCH", "PSCRATCH", "WORK", "MEMBERWORK")
_STANDARD_OUTPUT = Path("-")


def init(
    output: Annotated[
        Path,
        typer.Argument(metavar="[FILE]", help="Site file to write; - for standard output."),
    ] = SITE_FILE,
    system: SystemOption = None,
    partition: Annotated[
        str | None,
        typer.Option("--partition", metavar="NAME", help="Partition, or PBS queue. Default: the most suitable one."),
    ] = None,
    account: Annotated[str | None, typer.Option("--account", metavar="NAME", help="Account of the jobs.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Look at the batch system of this machine and write a commented site file for it. Submits nothing."""
    from freetrain_parsl.campaign.site.site_draft import draft_checkpoints, draft_site

    with errors_in_one_line("init"):
        _refuse_existing(output, force=force)
        chosen = _system(system)
        if not chosen.queue and (partition is not None or account is not None):
            titles = " and ".join(known.title for known in known_systems() if known.queue)
            raise UsageError(f"--partition and --account are for {titles}, not for {chosen.title}")
        try:
            machine = _describe(chosen)
        except BatchSystemError as error:
            if system is not None:
                raise
            # The commands may be installed on a machine that belongs to no cluster.
            other = unshared_system()
            title = other.title.replace("the ", "an ", 1)
            raise BatchSystemError(f"{error}; for {title} on this host: --system {other.name}") from None
        if machine is None:
            text = chosen.draft(len(os.sched_getaffinity(0))) + draft_checkpoints(_host())
            _write(text, output, "run CAMPAIGN.yaml", force=force)
            return
        queue = _choose(machine, partition)
        if account is not None and machine.accounts and account not in machine.accounts:
            raise UsageError(
                f"--account {account}: you may charge {', '.join(machine.accounts)}"
                f"{did_you_mean(account, machine.accounts)}"
            )
        _show(machine, queue)
        text = draft_site(machine, queue, _host(), account)
        _write(text, output, "windows", force=force)


def _system(named: str | None) -> BatchSystem:
    if named is not None:
        return system_named(named)
    return next(system for system in known_systems() if system.is_here() or not system.shared)


def _describe(system: BatchSystem) -> Machine | None:
    return system.describe()


def _choose(machine: Machine, name: str | None) -> Queue:
    word = SYSTEMS[machine.system].queue
    if name is not None:
        names = [queue.name for queue in machine.queues]
        queue = next((queue for queue in machine.queues if queue.name == name), None)
        if queue is None:
            raise UsageError(f"--partition {name}: there is no such {word}{did_you_mean(name, names)}")
    elif machine.queues:
        queue = machine.queues[0]
    else:
        raise UsageError(f"this batch system reports no {word}")
    if queue.refusal:
        raise UsageError(f"{word} {queue.name}: {queue.refusal}")
    return queue


def _host() -> LoginHost:
    from freetrain_parsl.campaign.site.site_draft import LoginHost
    from freetrain_parsl.executor.addresses import own_addresses

    python = Path(sys.executable)
    environment = python.parent.parent
    interfaces = {
        name: [str(address) for address in addresses]
        for name, addresses in own_addresses().items()
        if not all(address.is_loopback for address in addresses)
    }
    return LoginHost(
        python,
        environment if (environment / "bin" / "activate").is_file() else None,
        _scratch(),
        interfaces,
    )


def _scratch() -> Path | None:
    """Find a directory for large files: sites name theirs in an environment variable."""
    candidates = [Path(os.environ[name]) for name in _SCRATCH_VARIABLES if os.environ.get(name)]
    return next((path for path in candidates if path.is_dir() and os.access(path, os.W_OK)), None)


def _refuse_existing(output: Path, *, force: bool) -> None:
    if output != _STANDARD_OUTPUT and output.exists() and not force:
        raise UsageError(f"{output} exists; give another name, or --force to overwrite it")


def _write(text: str, output: Path, command: str, *, force: bool) -> None:
    """Check the text as any site file is checked, write it, and name the next command."""
    from freetrain_parsl.campaign.files.yaml_file import Variables
    from freetrain_parsl.campaign.site.site import Site
    from freetrain_parsl.report.output import write_output

    Site.parse(text, str(output), Variables(environment={}))
    if output == _STANDARD_OUTPUT:
        say_text(text)
        return
    _refuse_existing(output, force=force)
    try:
        write_output(output, text)
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror or error}") from None
    say(f"wrote {output}", err=True)
    # Commands use SITE_FILE by themselves in the directory where it is.
    named = "" if output == SITE_FILE else f" --config {shlex.quote(str(output))}"
    say(f"next:  freetrain {command}{named}", err=True)


def _show(machine: Machine, chosen: Queue) -> None:
    """Show what was found on standard error: standard output may be the file."""
    console = Screen(stderr=True)
    console.print(_queue_table(machine, chosen))
    for queue in machine.queues:
        if queue.refusal:
            console.say(f"{queue.name}: {queue.refusal}", style="dim")


def _queue_table(machine: Machine, chosen: Queue) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from freetrain_parsl.cli.windows import format_duration

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column(SYSTEMS[machine.system].queue, no_wrap=True)
    for column in ("nodes", "cores", "GPUs", "time limit"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("preemptible", no_wrap=True)
    table.add_column("usable", no_wrap=True)
    for queue in machine.queues:
        kinds = [kind for kind, _ in queue.node_types]
        walltime = queue.partition.max_walltime
        preemptible = f"by QOS {queue.qos}" if queue.qos else "yes" if queue.partition.preemptible else "no"
        table.add_row(
            "→" if queue is chosen else "",
            Text(queue.name),
            str(len(queue.partition.nodes)),
            _range(kind.cpus for kind in kinds),
            _range(kind.gpus for kind in kinds),
            "none" if walltime == float("inf") else format_duration(walltime),
            preemptible,
            "no" if queue.refusal else "yes",
        )
    return table


def _range(counts: Iterable[int]) -> str:
    found = sorted(set(counts))
    return "" if not found else str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"
