"""Fake Slurm and PBS commands in front of an embedded cluster.

::

    with EmbeddedCluster(directory / "cluster", nodes=8) as cluster:
        bin_directory = install_fake_slurm(directory / "slurm", cluster.name)
        os.environ["PATH"] = f"{bin_directory}:{os.environ['PATH']}"

Jobs run in real processes: the batch script on the first node of the job, and what its ``srun`` or ``mpiexec`` starts
on every node. Jobs of the queue ``main`` are main jobs of the cluster; those of other queues yield to them. The
commands print the output of real ones as far as `freetrain_parsl.windows` uses it, and reject all unknown options, so
that a change of the queries is noticed.

`set_mishap` makes them slow, hung, garbled, unreachable or failing; `calls` lists their calls.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidSettings
from tests.support import bed_command
from tests.support.fake_commands.mishaps import MISHAP_VARIABLE, clear_mishaps, set_mishap
from tests.support.fake_commands.store import Store, StoreSettings, calls

if TYPE_CHECKING:
    import os
    from pathlib import Path

__all__ = [
    "MISHAP_VARIABLE",
    "PBS_COMMANDS",
    "SLURM_COMMANDS",
    "calls",
    "clear_mishaps",
    "install_fake_pbs",
    "install_fake_slurm",
    "set_mishap",
]

SLURM_COMMANDS = ("sacct", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
PBS_COMMANDS = ("mpiexec", "pbs_rstat", "pbsnodes", "qdel", "qmgr", "qstat", "qsub")


def install_fake_slurm(
    directory: Path, cluster: str | os.PathLike[str], *, version: str = "24.11.5", cpus: int = 4
) -> Path:
    """Write fake Slurm commands.

    Parameters
    ----------
    directory
        Directory of the commands and their state; created if missing. Nothing is written elsewhere.
    cluster
        Name or directory of a running embedded cluster.
    version
        Version to emulate: from 24.11 on with JSON output, before that text only.
    cpus
        CPUs of each node.

    Returns
    -------
    Path
        The directory to put first on ``PATH``.
    """
    return _install(directory, StoreSettings("slurm", str(cluster), version, cpus), SLURM_COMMANDS)


def install_fake_pbs(
    directory: Path, cluster: str | os.PathLike[str], *, version: str = "23.06.06", cpus: int = 4
) -> Path:
    """Write fake PBS commands, and an ``mpiexec``; see `install_fake_slurm`."""
    return _install(directory, StoreSettings("pbs", str(cluster), version, cpus), PBS_COMMANDS)


def _install(directory: Path, settings: StoreSettings, commands: tuple[str, ...]) -> Path:
    directory = directory.resolve()
    if (directory / "bin").exists():
        raise InvalidSettings(f"{directory} already has commands; choose another directory")
    Store.create(directory, settings)
    (directory / "bin").mkdir()
    module = f"tests.support.fake_commands.{settings.kind}"
    for name in commands:
        script = directory / "bin" / name
        words = [*bed_command(module), str(directory), name]
        script.write_text(f'#!/bin/sh\n# A fake: no real {name}.\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    return directory / "bin"
