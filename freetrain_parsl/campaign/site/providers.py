"""Make Parsl's provider, the window source and the executor of a site, and check that it has enough nodes."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.logs import LOGS
from freetrain_parsl.errors import InvalidApp, InvalidInput
from freetrain_parsl.executor.addresses import own_addresses
from freetrain_parsl.executor.batch.systems import SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from parsl.providers.base import ExecutionProvider

    from freetrain_parsl.campaign.files.campaign import Campaign, CampaignTraining
    from freetrain_parsl.campaign.site.site import Site
    from freetrain_parsl.campaign.site.site_nodes import NodeShape
    from freetrain_parsl.executor.driver.driver_fence import DriverFence
    from freetrain_parsl.executor.executor import FreeTrainExecutor
    from freetrain_parsl.executor.jobs.request import TrainingRequest
    from freetrain_parsl.executor.node_kinds import NodeKind
    from freetrain_parsl.windows.base import WindowSource

__all__ = [
    "ask_slots",
    "describe_unused",
    "make_executor",
    "make_provider",
    "make_window_source",
    "refuse_impossible",
    "refuse_too_large",
]


def make_provider(site: Site, import_paths: Sequence[Path] = (), run_dir: Path | None = None) -> ExecutionProvider:
    """Make the Parsl provider that submits a site's blocks; the parameters are those of `make_executor`.

    Raises
    ------
    UsageError
        Parsl rejects the keys.
    """
    return SYSTEMS[site.system].provider(_block(site, import_paths), site.node, run_dir)


def make_window_source(site: Site) -> WindowSource:
    """Make the window source of a site's batch system.

    Raises
    ------
    ClusterGone
        It is an embedded cluster that is not running.
    """
    if site.kinds:
        from freetrain_parsl.windows.node_kinds import WindowsByKind

        return WindowsByKind({kind.name: make_window_source(site.of_kind(kind)) for kind in site.kinds})
    return SYSTEMS[site.system].source(site.block, site.node)


def ask_slots(site: Site) -> Site:
    """Return the site with the slots that its batch system tells, where its file has ``slots: auto``.

    Raises
    ------
    InvalidInput
        The nodes have different numbers of GPUs.
    BatchSystemError
        The batch system did not answer.
    """
    if not site.kinds:
        return replace(site, node=_told(site)) if site.node.asks_slots else site
    kinds = (replace(kind, node=_told(site.of_kind(kind))) for kind in site.kinds)
    return replace(site, kinds=tuple(kinds))


def _told(site: Site) -> NodeShape:
    node = site.node
    if not node.asks_slots:
        return node
    counts = sorted(make_window_source(site).gpus_on_nodes())
    if len(counts) > 1:
        raise InvalidInput(
            f"{site.file}: node.slots: the nodes have different numbers of GPUs ({', '.join(map(str, counts))}); state "
            "node.gpus, which takes nodes with at least as many, or narrow the request"
        )
    gpus = counts[0] if counts else 0
    return replace(node, gpus=gpus or node.gpus, accelerators=gpus, slots=gpus or 1, asks_slots=False)


def describe_unused(site: Site, source: WindowSource) -> str:
    """Return which GPUs of the nodes no block of this site uses, although it takes whole nodes; empty: none.

    Raises
    ------
    BatchSystemError
        The batch system did not answer.
    """
    asked, has = site.node.gpus or 0, max(source.gpus_on_nodes(), default=0)
    if site.kinds or not site.node.exclusive or has <= max(asked, site.node.slots):
        return ""
    return (
        f"nodes have {has} GPUs, but {site.node.slots} slots by {site.file}: with node.gpus: {has}, each GPU is a slot"
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
    if not site.node.share:
        settings["share_nodes"] = False
    if site.kinds:
        settings["node_kinds"] = _node_kinds(site, import_paths, run_dir)
    else:
        accelerators = site.node.accelerators
        settings |= {
            "provider": make_provider(site, import_paths, run_dir),
            "windows": _own_windows(site),
            "slots_per_node": site.node.slots,
            "available_accelerators": accelerators if isinstance(accelerators, int) else list(accelerators),
        }
    executor = FreeTrainExecutor(
        planner=site.planner_settings,
        checkpoint_dir=checkpoints,
        log_dir=None if run_dir is None else run_dir / LOGS,
        node_python=site.node.python,
        container=container,
        node_image=site.node.image,
        job_tag=run_id,
        **settings,
    )
    if fence is not None:
        executor.obey(fence)
    return executor


def _own_windows(site: Site) -> WindowSource | None:
    """Return the window source, or ``None`` for the provider's own: that of a batch system that is not running yet."""
    return make_window_source(site) if SYSTEMS[site.system].shared else None


def _node_kinds(site: Site, import_paths: Sequence[Path], run_dir: Path | None) -> list[NodeKind]:
    from freetrain_parsl.executor.node_kinds import NodeKind

    sites = {kind.name: site.of_kind(kind) for kind in site.kinds}
    providers = SYSTEMS[site.system].providers(
        _block(site, import_paths),
        {name: (_block(own, import_paths), own.node) for name, own in sites.items()},
        run_dir,
    )
    return [
        NodeKind(
            kind.name,
            providers[kind.name],
            _own_windows(sites[kind.name]),
            kind.node.slots,
            kind.node.accelerators,
            kind.speed,
        )
        for kind in site.kinds
    ]


def _block(site: Site, import_paths: Sequence[Path]) -> dict[str, Any]:
    """Return the resource request; before its other commands, a job exports the import paths."""
    inits = (_export_paths(import_paths), site.block.get("worker_init"))
    return {**site.block, "worker_init": "\n".join(filter(None, inits))}


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


def _export_paths(paths: Sequence[Path]) -> str:
    """Let Python on the nodes import modules from the same directories as the driver."""
    if not paths:
        return ""
    joined = shlex.quote(os.pathsep.join(map(str, paths)))
    return f'export PYTHONPATH={joined}"${{PYTHONPATH:+:$PYTHONPATH}}"'


def refuse_impossible(campaign: Campaign, site: Site) -> None:
    """Reject training jobs that require kinds, sizes or numbers of nodes that the site file does not have.

    Raises
    ------
    InvalidInput
        There is such a training job; the message has its place in the campaign file.
    """
    known = {kind.name for kind in site.kinds}
    for training in campaign.trainings:
        for kind in training.app.node_kinds:
            if kind not in known:
                choices = (
                    f"the kinds of {site.file} are {', '.join(sorted(known))}" if known else f"{site.file} has none"
                )
                raise InvalidInput(
                    f"{training.kinds_at}: training job {training.name!r} needs nodes of kind {kind!r}; {choices}"
                )
        try:
            _sized(training, site)
        except InvalidApp as error:
            raise InvalidInput(f"{training.size_at}: {error}") from None
    _refuse_larger(campaign, site, site.node_counts, site.file)


def refuse_too_large(campaign: Campaign, site: Site) -> None:
    """Reject training jobs that require more nodes than the batch system has for the site's blocks; query it if needed.

    Raises
    ------
    InvalidInput
        There is such a training job; the message has its place in the campaign file.
    BatchSystemError
        The batch system did not answer.
    """
    if all(_min_nodes(training, site) == 1 for training in campaign.trainings):
        return
    survey = make_window_source(site).survey()
    counts = survey.nodes_by_kind or ({} if survey.nodes is None else {"": survey.nodes})
    _refuse_larger(campaign, site, counts, "the batch system")


def _refuse_larger(campaign: Campaign, site: Site, counts: Mapping[str, int], owner: str) -> None:
    """Reject training jobs that require more nodes than there are of each kind that they may use, as far as known."""
    for training in campaign.trainings:
        kinds = training.app.node_kinds or tuple(counts)
        needed = _min_nodes(training, site)
        if not counts or any(kind not in counts or needed <= counts[kind] for kind in kinds):
            continue
        sizes = " and ".join(f"{counts[kind]} of kind {kind!r}" if kind else str(counts[kind]) for kind in kinds)
        size = training.app.size
        stated = f"{size.least} nodes" if size.min_nodes else f"{size.least}, which are {needed} nodes,"
        raise InvalidInput(
            f"{training.size_at}: training job {training.name!r} needs {stated} at the same time"
            f"{', all of one kind' if any(kinds) else ''}, but {owner} has only {sizes}; "
            f"lower {size.least.partition('=')[0]}"
        )


def _min_nodes(training: CampaignTraining, site: Site) -> int:
    return -(-_sized(training, site).min_nodes // site.units_per_node)


def _sized(training: CampaignTraining, site: Site) -> TrainingRequest:
    """Return the request with its size in units of the site."""
    return training.app.request(training.name).on_nodes(site.slots_per_node, site.units_per_node)
