"""Real jobs on separate hosts: a login host with a second network, a network for the jobs, its faults.

The driver offers two addresses, one of which is a black hole. The nodes cannot resolve its name. The network of the
training jobs is not the driver's, and its interface has a different name on each node.
"""

from __future__ import annotations

import pytest

from tests.support.daemons import wait_until
from tests.support.hosts import Hosts

pytestmark = pytest.mark.hosts

SITE = {
    "login": {"eth0": "10.77.0.1/24", "ext0": "10.99.0.1/24"},
    "n00": {"eth0": "10.77.0.10/24", "ib0": "10.78.0.10/24"},
    "n01": {"eth0": "10.77.0.11/24", "ib1": "10.78.0.11/24"},
    "n02": {"eth0": "10.77.0.12/24", "ib2": "10.78.0.12/24"},
}
NODES = [name for name in SITE if name != "login"]


@pytest.fixture(scope="module")
def hosts():
    with Hosts(SITE, unresolved=["login"]) as hosts:
        for node in NODES:
            hosts.lead_nowhere(node, "10.77.0.254")
        yield hosts


@pytest.fixture(scope="module")
def login(hosts, start):
    return start(hosts, interface="10.78.0.0/24")


@pytest.fixture(scope="module")
def patient_login(hosts, start):
    """Start a driver whose timeouts are longer than what delays messages in its tests, on a busy machine too."""
    return start(hosts, interface="10.78.0.0/24", timeout=60.0)


def set_aside(login) -> list[str]:
    """List the nodes set aside so far."""
    return [entry.subject for entry in login.journal() if entry.kind == "node_set_aside"]


def sent_to_peers(hosts) -> dict[str, int]:
    """Return the bytes that each node has sent through the network of the training jobs."""
    return {node: hosts[node].bytes_sent(f"ib{node[-1]}") for node in NODES}


@pytest.mark.smoke
def test_nodes_find_the_driver_and_each_other(hosts, login):
    assert login.started["addresses"] == ["10.77.0.1", "10.99.0.1"]
    training = login.train("whole", 3)
    training.until(3)
    before = sent_to_peers(hosts)
    training.until_steps(steps=5)
    after = sent_to_peers(hosts)
    assert all(after[node] - before[node] > 10_000 for node in NODES)
    training.finish()


def test_a_node_without_its_link_to_the_driver_is_given_up_and_comes_back_with_it(hosts, login):
    training = login.train("cut", 3)
    training.until(3)
    with hosts.cut("n01"):
        training.until(2)
        assert training.run.nodes == ("n00", "n02")
    training.until(3)
    training.finish()
    # Driver and node have the same timeout. If the node times out first, all pause, and resume at once.
    assert training.run.resumes <= 1


def test_a_short_interruption_costs_nothing_but_its_time(hosts, patient_login):
    training = patient_login.train("short", 3)
    training.until(3)
    fragments = training.run.fragments
    with hosts.cut("n01"):
        # The training job's progress is not seen if n01 is the node that reports it; its traffic is.
        before = sent_to_peers(hosts)["n02"]
        wait_until(lambda: sent_to_peers(hosts)["n02"] > before + 10_000, 25, lambda: "steps during the interruption")
    training.until_steps()
    training.finish()
    assert training.run.fragments == fragments


def test_a_node_that_reaches_the_driver_but_not_the_others_is_set_aside_for_a_while(hosts, login):
    """Regression: the training job failed after three minutes with "4 crashes without a step"."""
    training = login.train("asymmetric", 3)
    training.until(3)
    with hosts.cut("n01", "ib1"):
        training.until(2)
        assert set_aside(login) == ["n01"]
        assert "node n01 is set aside for 10 s: other nodes of training job asymmetric cannot reach it" in login.log
    training.until(3)
    training.finish()


def test_of_two_nodes_that_do_not_reach_each_other_one_goes_on_with_the_others(hosts, login):
    training = login.train("pair", 3)
    training.until(3)
    with hosts.isolated("n00", interface="ib0"), hosts.isolated("n01", interface="ib1"):
        training.until(2)
    training.finish()


def test_a_slow_network_makes_a_training_slow_but_nothing_is_lost(hosts, patient_login):
    training = patient_login.train("slow", 3)
    training.until(3)
    fragments = training.run.fragments
    with hosts.slow("n01", "1mbit", "ib1"):
        training.until_steps(steps=5)
    training.finish()
    assert training.run.fragments == fragments
