"""The shape of the simulated cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.planning.model import PoolNode

__all__ = ["ClusterShape"]


@dataclass(frozen=True)
class ClusterShape:
    """The cluster: its nodes, and the GPUs of each."""

    nodes: int
    gpus_per_node: int

    @classmethod
    def parse(cls, text: str) -> ClusterShape:
        """Read ``NODESxGPUS``, as in ``16x4``.

        Raises
        ------
        InvalidSettings
            It is not of this form.
        """
        nodes, cross, gpus = text.partition("x")
        if not (cross and nodes.isdecimal() and gpus.isdecimal() and int(nodes) and int(gpus)):
            raise InvalidSettings(f"a cluster is NODESxGPUS, as in 16x4, got {text!r}")
        return cls(int(nodes), int(gpus))

    @property
    def gpus(self) -> int:
        """GPUs in total."""
        return self.nodes * self.gpus_per_node

    def slots(self) -> tuple[PoolNode, ...]:
        """Return the GPUs as the planner sees them: they never close, and machines are their hosts."""
        width = len(str(self.nodes - 1))
        hosts = [f"n{node:0{width}d}" for node in range(self.nodes)]
        return tuple(
            PoolNode(f"{host}/{gpu}", closes=math.inf, host=host) for host in hosts for gpu in range(self.gpus_per_node)
        )
