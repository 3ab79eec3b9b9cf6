"""A real Slurm whose controller and nodes are separate hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidSettings
from tests.support.slurm.loopback import LoopbackSlurm

if TYPE_CHECKING:
    from tests.support.hosts.hosts import Hosts

__all__ = ["SlurmOnHosts"]


class SlurmOnHosts(LoopbackSlurm):
    """A `LoopbackSlurm` without the loopback: each daemon runs on its own host, connected by the hosts' network.

    The hosts must exist before the cluster and outlive it.

    Parameters
    ----------
    hosts
        One named ``login``, for the controller and the client commands, and one per node: ``node01``, ``node02``, …
    **settings
        Settings of `LoopbackSlurm`, except ``nodes``.

    Raises
    ------
    InvalidSettings
        The hosts have the wrong names.
    """

    _CONTROLLER = "login"

    def __init__(self, hosts: Hosts, **settings: Any) -> None:
        self._hosts = hosts
        names = [host.name for host in hosts if host.name != self._CONTROLLER]
        super().__init__(nodes=len(names), **settings)
        if sorted(names) != self.node_names or len(names) == len(list(hosts)):
            raise InvalidSettings(
                f"hosts for a Slurm of {len(names)} nodes are {self._CONTROLLER}, {', '.join(self.node_names)}; "
                f"these are {', '.join(host.name for host in hosts)}"
            )
        self._plan = replace(
            self._plan,
            controller=f"{self._CONTROLLER}({hosts[self._CONTROLLER].address})",
            addresses={name: hosts[name].address for name in names},
            loopback_only=False,
        )

    def _on_its_host(self, daemon: str, command: tuple[str, ...], directory: str) -> list[str]:
        host = daemon if daemon in self._plan.addresses else self._CONTROLLER
        return self._hosts[host].command(*command, cwd=directory)
