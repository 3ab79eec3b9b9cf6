"""A driver that offers only an address that the nodes cannot reach."""

from __future__ import annotations

import pytest

from tests.support.hosts import Hosts

pytestmark = pytest.mark.hosts


def test_the_address_that_no_node_reaches_is_in_the_error(start):
    """Packets to it are dropped silently; a worker pool tries for half a minute."""
    site = {"login": {"eth0": "10.77.0.1/24", "ext0": "10.99.0.1/24"}, "n00": {"eth0": "10.77.0.10/24"}}
    with Hosts(site) as hosts:
        hosts.lead_nowhere("n00", "10.77.0.254")
        login = start(hosts, address="10.99.0.1", max_failed_blocks=1)
        error = login.train("t", 1).answer()["error"]
        login.close()
    assert "an attempt to start a block failed" in error
    assert "No viable ZMQ url from: tcp://10.99.0.1:" in error
    assert "\n" not in error


def test_nodes_without_the_interface_for_trainings_are_refused_in_one_line(start):
    site = {"login": {"eth0": "10.77.0.1/24"}, "n00": {"eth0": "10.77.0.10/24"}}
    with Hosts(site) as hosts:
        login = start(hosts, interface="10.78.0.0/24")
        error = login.train("t", 1).answer()["error"]
        login.close()
    assert "node n00 cannot run training jobs: host n00 has no network interface 10.78.0.0/24" in error
    assert "eth0 (10.77.0.10)" in error
    assert "\n" not in error
