"""Several hosts on one machine, each with its own network, hostname and faults; see `Hosts`."""

from freetrain_parsl.testing.hosts.hosts import Host, Hosts

__all__ = ["Host", "Hosts"]
