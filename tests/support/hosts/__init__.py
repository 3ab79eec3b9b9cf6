"""Several hosts on one machine, each with its own network, hostname and faults; see `Hosts`."""

from tests.support.hosts.hosts import Host, Hosts

__all__ = ["Host", "Hosts"]
