"""Make Parsl's provider, the window source and the executor of a site."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from freetrain_parsl.campaign.logs import LOGS
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.executor.addresses import own_addresses

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from parsl.launchers.base import Launcher
    from parsl.providers.base import ExecutionProvider

    from freetrain_parsl.campaign.site.site import Site
    from freetrain_parsl.executor.driver.driver_fence import DriverFence
    from freetrain_parsl.executor.executor import FreeTrainExecutor
    from freetrain_parsl.executor.node_kinds import NodeKind
    from freetrain_parsl.windows.base import WindowSource

__all__ = ["CLUSTER", "make_executor", "make_provider", "make_window_source"]

CLUSTER: Final = "cluster"
"""Directory in the run directory with the files of the driver's own embedded cluster."""

_COMMAND_TIMEOUT = timedelta(seconds=60)  # Parsl's own 10 s for Slurm is too short for a busy scheduler


def make_provider(site: Site, import_paths: Sequence[Path] = (), run_dir: Path | None = None) -> ExecutionProvider:
    """Make the Parsl provider that submits a site's blocks.

    Parameters
    ----------
    site
        Its batch system and its request for nodes.
    import_paths
        Directories from which the nodes import modules.
    run_dir
        Used by the driver's own embedded cluster.

    Raises
    ------
    UsageError
        Parsl rejects the keys.
    """
    worker_init = "\n".join(filter(None, [_export_paths(import_paths), site.block.get("worker_init")]))
    if site.system == "local":
        from freetrain_parsl.cluster.provider import EmbeddedClusterProvider

        own: dict[str, Any] = {key: site.block[key] for key in ("nodes", "cluster", "grace") if key in site.block}
        if site.kinds and "cluster" not in own:
            own["nodes"] = sum(len(kind.block["only"]) for kind in site.kinds)
        if run_dir is not None:
            own["cluster_dir"] = str(run_dir / CLUSTER)
        return EmbeddedClusterProvider(worker_init=worker_init, **own)
    common = {
        "launcher": _launcher(site),
        "worker_init": worker_init,
        "scheduler_options": site.block.get("scheduler_options", ""),
        "cmd_timeout": math.ceil(site.block.get("command_timeout", _COMMAND_TIMEOUT).total_seconds()),
        "init_blocks": 0,
    }
    if site.system == "slurm":
        from parsl.providers import SlurmProvider

        return SlurmProvider(
            **{
                key: site.block[key]
                for key in ("partition", "account", "qos", "constraint", "gres")
                if key in site.block
            },
            cores_per_node=site.node.cores,
            gpus_per_node=site.node.gpus or None,
            mem_per_node=None if site.node.memory is None else math.ceil(site.node.memory / 2**30),
            exclusive=site.node.exclusive,
            **common,
        )
    from parsl.providers import PBSProProvider

    return PBSProProvider(  # type: ignore[no-untyped-call]  # Parsl's
        **{key: site.block[key] for key in ("account", "queue") if key in site.block},
        select_options=_select_options(site),
        cpus_per_node=site.node.cores or 1,
        **common,
    )


def make_window_source(site: Site) -> WindowSource:
    """Make the window source of a site's batch system, without Parsl: its Slurm provider runs `sacct` when made.

    Raises
    ------
    ClusterGone
        It is an embedded cluster that is not running.
    """
    if site.kinds:
        from freetrain_parsl.windows.node_kinds import WindowsByKind

        return WindowsByKind({kind.name: make_window_source(site.of_kind(kind)) for kind in site.kinds})
    if site.system == "local":
        from freetrain_parsl.cluster.client import ClusterClient
        from freetrain_parsl.cluster.window_source import LocalWindowSource

        return LocalWindowSource(ClusterClient(site.block.get("cluster")), site.block.get("only"))
    if site.system == "slurm":
        from freetrain_parsl.windows.slurm.source import SlurmWindowSource

        return SlurmWindowSource(
            partition=site.block.get("windows_in", site.block.get("partition")),
            account=site.block.get("account"),
            qos=site.block.get("qos"),
            constraint=site.block.get("constraint"),
            exclusive=site.node.exclusive,
            cpus_per_node=site.node.cores,
            gpus_per_node=site.node.gpus or None,
            # As requested by the provider, in whole GiB; converted to MiB, Slurm's unit.
            memory_per_node=None if site.node.memory is None else math.ceil(site.node.memory / 2**30) * 1024,
        )
    from freetrain_parsl.extensions.pbs.source import PbsWindowSource

    return PbsWindowSource(
        queue=site.block.get("windows_in", site.block.get("queue")),
        account=site.block.get("account"),
        select_options=_select_options(site),
        cpus_per_node=site.node.cores,
        preemptible=site.block.get("preemptible"),
    )


def make_executor(
    site: Site,
    *,
    run_dir: Path | None = None,
    run_id: str | None = None,
    import_paths: Sequence[Path] = (),
    fence: DriverFence | None = None,
) -> FreeTrainExecutor:
    """Make the executor; Parsl starts it.

    Parameters
    ----------
    site
        Its settings.
    run_dir
        Default location of checkpoints.
    run_id
        Part of its job names.
    import_paths
        Directories from which the nodes import modules.
    fence
        Whether this driver may still act. Default: always.

    Raises
    ------
    UsageError, CheckpointError
        It rejects the settings.
    """
    from freetrain_parsl.executor.executor import FreeTrainExecutor

    settings = dict(site.executor_settings)
    if site.driver_interface is not None:
        settings["address"] = _driver_address(site.driver_interface, site.file)
    container = site.node.container
    if container is not None and import_paths:
        container = replace(container, binds=(*map(str, import_paths), *container.binds))
    checkpoints = site.checkpoint_dir or (None if run_dir is None else run_dir / "checkpoints")
    if site.kinds:
        settings["node_kinds"] = _node_kinds(site, import_paths, run_dir)
    else:
        accelerators = site.node.accelerators
        settings |= {
            "provider": make_provider(site, import_paths, run_dir),
            "windows": None if site.system == "local" else make_window_source(site),
            "slots_per_node": site.node.slots,
            "available_accelerators": accelerators if isinstance(accelerators, int) else list(accelerators),
        }
    executor = FreeTrainExecutor(
        planner=site.planner_settings,
        checkpoint_dir=checkpoints,
        log_dir=None if run_dir is None else run_dir / LOGS,
        node_python=site.node.python,
        container=container,
        job_tag=run_id,
        **settings,
    )
    if fence is not None:
        executor.obey(fence)
    return executor


def _node_kinds(site: Site, import_paths: Sequence[Path], run_dir: Path | None) -> list[NodeKind]:
    """Return the kinds of nodes; those of an embedded cluster share it."""
    from freetrain_parsl.cluster.provider import EmbeddedClusterProvider
    from freetrain_parsl.executor.node_kinds import NodeKind

    shared = make_provider(site, import_paths, run_dir) if site.system == "local" else None
    kinds = []
    for kind in site.kinds:
        if isinstance(shared, EmbeddedClusterProvider):
            provider: ExecutionProvider = shared.limited_to(kind.block["only"], kind.block.get("worker_init", ""))
            windows = None
        else:
            provider, windows = make_provider(site.of_kind(kind), import_paths), make_window_source(site.of_kind(kind))
        accelerators = kind.node.accelerators
        kinds.append(NodeKind(kind.name, provider, windows, kind.node.slots, accelerators, kind.speed))
    return kinds


def _driver_address(interface: str, file: str) -> str:
    """Return the address of a network interface of this host, preferably IPv4.

    Raises
    ------
    InvalidInput
        This host has no such interface.
    """
    interfaces = own_addresses()
    if addresses := sorted(interfaces.get(interface, ()), key=lambda address: address.version):
        return str(addresses[0])
    raise InvalidInput(
        f"{file}: network.driver_interface: this host has no interface {interface!r} with an address; "
        f"it has {', '.join(sorted(interfaces))}"
    )


def _launcher(site: Site) -> Launcher:
    from parsl.launchers import MpiExecLauncher, MpiRunLauncher, SingleNodeLauncher, SrunLauncher

    kind = site.block.get("launcher", "srun" if site.system == "slurm" else "mpiexec")
    if kind == "single":
        return SingleNodeLauncher()
    make: Any = {"srun": SrunLauncher, "mpiexec": MpiExecLauncher, "mpirun": MpiRunLauncher}[kind]
    bind = {"bind_cmd": site.block["launcher_bind"]} if "launcher_bind" in site.block else {}
    launcher: Launcher = make(overrides=site.block.get("launcher_overrides", ""), **bind)
    return launcher


def _select_options(site: Site) -> str:
    """Request the node's GPUs and memory, unless the file's own select options do."""
    options = [str(site.block.get("select_options", ""))]
    if site.node.gpus and "ngpus=" not in options[0]:
        options.append(f"ngpus={site.node.gpus}")
    if site.node.memory and "mem=" not in options[0]:
        options.append(f"mem={math.ceil(site.node.memory / 2**20)}mb")
    return ":".join(filter(None, options))


def _export_paths(paths: Sequence[Path]) -> str:
    """Let Python on the nodes import modules from the same directories as the driver."""
    if not paths:
        return ""
    joined = shlex.quote(os.pathsep.join(map(str, paths)))
    return f'export PYTHONPATH={joined}"${{PYTHONPATH:+:$PYTHONPATH}}"'
