"""The embedded cluster as a batch system."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from freetrain_parsl.cluster.nodesets import NodeNames
from freetrain_parsl.windows.hostlist import expand_hosts
from freetrain_parsl.windows.system import BatchSystem, given_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from parsl.providers.base import ExecutionProvider

    from freetrain_parsl.windows.base import WindowSource
    from freetrain_parsl.windows.system import Keys, NodeResources

__all__ = ["EmbeddedSystem"]

_DIRECTORY = "cluster"  # in the run directory, with the files of the driver's own cluster
_MOST_NODES = 10_000  # they are processes on one host

_DRAFT = """\
# Site file for a machine without a batch system, written by `freetrain init`: each run starts an embedded
# cluster on this host and ends it.
# Commands use it by themselves where it is called site.yaml; otherwise:
#   freetrain run CAMPAIGN.yaml --config THIS_FILE
site: local
system: local

block:
{nodes:44} # virtual nodes; this host has {cores} cores

planner:                                     # for blocks that start within seconds
  startup: 6 s
  min_useful: 5 s
  closing_margin: 2 s
  idle_timeout: 5 s
  settle: 1.5 s

rate_limits:
  poll_interval: 1 s
  submissions_per_minute: 120

trainings:
  threads_per_slot: 1                        # the virtual nodes share the cores of this host
  rescale_costs: {{up: 1 s, down: 1 s, start: 1 s}}

"""


class EmbeddedSystem(BatchSystem):
    """An embedded cluster: a running one by its name, or the driver's own."""

    name: ClassVar = "local"
    title: ClassVar = "the embedded cluster"
    shared: ClassVar = False
    options: ClassVar = ("cluster",)
    requests_resources: ClassVar = False

    def is_here(self) -> bool:
        """Return whether one runs."""
        from freetrain_parsl.cluster.registry import running_clusters

        return bool(running_clusters())

    def handles(self, provider: ExecutionProvider) -> bool:
        """Return whether it is a provider of embedded clusters."""
        from freetrain_parsl.cluster.provider import EmbeddedClusterProvider

        return isinstance(provider, EmbeddedClusterProvider)

    def read_block(self, keys: Keys) -> dict[str, Any]:
        """Read the name of a cluster, or what the driver's own is like."""
        block = given_values(
            cluster=keys.text("cluster"), nodes=keys.count("nodes", most=_MOST_NODES), grace=keys.duration("grace")
        )
        if "cluster" in block and len(block.keys() & {"nodes", "grace"}):
            raise keys.refusal("a named cluster has its own nodes and grace; remove these", "cluster")
        return block

    def read_kinds(self, kinds: Mapping[str, Keys], block: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Read the nodes of each kind: their names in a named cluster, else their number."""
        if "cluster" in block:
            return {name: {"only": _read_names(keys)} for name, keys in kinds.items()}
        counts = {name: _read_count(keys) for name, keys in kinds.items()}
        names = iter(NodeNames(sum(counts.values())).names)
        return {name: {"only": tuple(next(names) for _ in range(count))} for name, count in counts.items()}

    def source(self, block: Mapping[str, Any], node: NodeResources) -> WindowSource:  # noqa: ARG002 - whole nodes
        """Return the source of the windows of a running cluster."""
        from freetrain_parsl.cluster.client import ClusterClient
        from freetrain_parsl.cluster.window_source import LocalWindowSource

        return LocalWindowSource(ClusterClient(block.get("cluster")), block.get("only"))

    def provider(
        self,
        block: Mapping[str, Any],
        node: NodeResources,  # noqa: ARG002 - whole nodes
        run_dir: Path | None = None,
    ) -> ExecutionProvider:
        """Make the provider; the driver's own cluster has its files in `run_dir`."""
        from freetrain_parsl.cluster.provider import EmbeddedClusterProvider

        own = {key: block[key] for key in ("nodes", "cluster", "grace") if key in block}
        if run_dir is not None:
            own["cluster_dir"] = str(run_dir / _DIRECTORY)
        return EmbeddedClusterProvider(worker_init=block.get("worker_init", ""), **own)

    def providers(
        self,
        block: Mapping[str, Any],
        kinds: Mapping[str, tuple[Mapping[str, Any], NodeResources]],
        run_dir: Path | None = None,
    ) -> dict[str, ExecutionProvider]:
        """Make the providers of one cluster, which all kinds share."""
        from freetrain_parsl.cluster.provider import EmbeddedClusterProvider

        first = next(node for _, node in kinds.values())
        size = {} if "cluster" in block else {"nodes": sum(len(own["only"]) for own, _ in kinds.values())}
        shared = self.provider({**block, "worker_init": "", **size}, first, run_dir)
        assert isinstance(shared, EmbeddedClusterProvider)
        return {name: shared.limited_to(own["only"], own.get("worker_init", "")) for name, (own, _) in kinds.items()}

    def outlives_driver(self, block: Mapping[str, Any]) -> bool:
        """Return whether it is a named cluster: the driver's own ends with it."""
        return "cluster" in block

    def await_end(self, run_dir: Path, report: Callable[[str], None]) -> None:
        """Wait until the cluster of an earlier driver, which was killed, has ended."""
        from freetrain_parsl.cluster.registry import wait_for_ending

        wait_for_ending((run_dir / _DIRECTORY).resolve(), report)

    def draft(self, cores: int) -> str:
        """Write a site file for the driver's own cluster on this host."""
        return _DRAFT.format(nodes=f"  nodes: {max(1, cores)}", cores=cores)


def _read_names(keys: Keys) -> tuple[str, ...]:
    text = keys.required("nodes", "'n[00-03]'")
    try:
        return tuple(expand_hosts(text))
    except ValueError as error:
        raise keys.refusal(f"{error}, such as n[00-03]", "nodes") from None


def _read_count(keys: Keys) -> int:
    if not keys.has("nodes"):
        raise keys.refusal("is missing; give the number of nodes of this kind", "nodes")
    return keys.count("nodes", most=_MOST_NODES) or 0
