"""Hosts on one machine: connected as specified, with injected faults, and removed with their creating process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from freetrain_parsl.errors import BatchSystemError, InvalidSettings
from tests.support.hosts import Hosts, keeper

pytestmark = pytest.mark.hosts

SITE = {
    "login": {"eth0": "10.77.0.1/24", "ext0": "10.99.0.1/24"},
    "n00": {"eth0": "10.77.0.10/24", "ib0": "fd78::10/64"},
    "n01": {"eth0": "10.77.0.11/24", "ib1": "fd78::11/64"},
}

# Prints how a connection to a closed port fails: `refused` if the host was reached.
_CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=float(sys.argv[2]))
except OSError as error:
    print(type(error).__name__)
"""


def reaches(hosts: Hosts, host: str, address: str, timeout: float = 0.5) -> str:
    """Try to reach an address from a host; ``ConnectionRefusedError`` means success."""
    return hosts[host].run(sys.executable, "-c", _CONNECT, address, str(timeout)).strip()


_RECEIVE = """
import socket
server = socket.create_server(("", 7000))
print(flush=True)
connection, _ = server.accept()
while connection.recv(1 << 16):
    pass
"""

_SEND = """
import socket, sys, time
begin = time.monotonic()
connection = socket.create_connection((sys.argv[1], 7000))
connection.sendall(bytes(1 << 20))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.monotonic() - begin)
"""

REACHED, SILENCE, NO_ROUTE = "ConnectionRefusedError", "TimeoutError", "OSError"


@pytest.fixture(scope="module")
def hosts():
    with Hosts(SITE, unresolved=["login"]) as hosts:
        yield hosts


def test_a_host_has_its_own_name_addresses_and_interfaces(hosts):
    assert hosts["n00"].run("hostname").strip() == "n00"
    addresses = json.loads(hosts["n00"].run("ip", "-json", "addr"))
    assert {link["ifname"] for link in addresses} == {"lo", "eth0", "ib0"}
    assert {told["local"] for link in addresses for told in link["addr_info"] if told["scope"] == "global"} == {
        "10.77.0.10",
        "fd78::10",
    }
    assert set(hosts["n00"].run("ls", "/sys/class/net").split()) == {"lo", "eth0", "ib0"}


@pytest.mark.smoke
def test_hosts_of_one_network_reach_each_other_and_no_others(hosts):
    assert reaches(hosts, "n00", "10.77.0.11") == REACHED
    assert reaches(hosts, "n01", "fd78::10") == REACHED
    assert reaches(hosts, "n00", "10.99.0.1") == NO_ROUTE


def test_names_are_resolved_but_for_those_that_shall_not_be(hosts):
    assert reaches(hosts, "n00", "n01") == REACHED
    assert reaches(hosts, "login", "login") == REACHED
    assert reaches(hosts, "n00", "login") == "gaierror"


def test_a_cut_link_is_silent_until_it_is_up_again(hosts):
    with hosts.cut("n01"):
        assert reaches(hosts, "n00", "10.77.0.11") == SILENCE
        assert reaches(hosts, "n01", "10.77.0.1") == SILENCE
        assert reaches(hosts, "n01", "fd78::10") == REACHED, "its other interface"
    assert reaches(hosts, "n00", "10.77.0.11", 5) == REACHED


def test_isolated_hosts_reach_all_others_but_not_each_other(hosts):
    with hosts.isolated("n00", "n01"):
        assert reaches(hosts, "n00", "10.77.0.11") == SILENCE
        assert reaches(hosts, "n01", "10.77.0.10") == SILENCE
        assert reaches(hosts, "n00", "10.77.0.1") == REACHED
        assert reaches(hosts, "login", "10.77.0.11") == REACHED
    assert reaches(hosts, "n00", "10.77.0.11", 5) == REACHED


def test_a_route_that_leads_nowhere_is_silent():
    with Hosts(SITE) as own:
        own.lead_nowhere("n00", "10.77.0.254")
        assert reaches(own, "n00", "10.99.0.1") == SILENCE
        assert reaches(own, "n00", "10.77.0.11") == REACHED


def test_a_slow_link_carries_as_much_as_it_is_given(hosts):
    """A megabyte over 8 Mbit/s takes a second in each direction; the interface counter shows which side sent."""
    with hosts.slow("n01", "8mbit"):
        for source, target in (("n00", "n01"), ("n01", "n00")):
            before = hosts[source].bytes_sent("eth0")
            with hosts[target].popen(sys.executable, "-c", _RECEIVE, stdout=subprocess.PIPE) as server:
                server.stdout.readline()
                assert float(hosts[source].run(sys.executable, "-c", _SEND, hosts[target].address)) > 0.8
            assert hosts[source].bytes_sent("eth0") - before > 1 << 20


def test_a_signal_reaches_the_process_on_the_host(hosts):
    with hosts["n00"].popen("sleep", "1000") as process:
        end = time.monotonic() + 30
        while not hosts["n00"].is_inside(process.pid) and time.monotonic() < end:
            time.sleep(0.01)
        assert hosts["n00"].is_inside(process.pid)
        assert not hosts["n01"].is_inside(process.pid)
        process.terminate()
    assert process.returncode == -15


def test_a_batch_script_continues_on_the_host_of_its_node(hosts, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(f"{hosts.entering('NODE')}\nhostname; pwd\n")
    done = subprocess.run(
        ["bash", script], env={**os.environ, "NODE": "n01"}, capture_output=True, cwd=tmp_path, text=True
    )
    assert done.stdout.split() == ["n01", str(tmp_path)]
    done = subprocess.run(["bash", script], env={**os.environ, "NODE": "n07"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (1, "there is no host 'n07'")


def test_the_machine_itself_is_left_alone_and_two_sets_of_hosts_with_the_same_addresses_coexist(hosts):
    links = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True).stdout
    with Hosts(SITE) as others:
        assert subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True).stdout == links
        assert not any(Path("/run/netns").glob("*")) or not Path("/run/netns").exists()
        with others.cut("n01"):
            assert reaches(others, "n00", "10.77.0.11") == SILENCE
            assert reaches(hosts, "n00", "10.77.0.11") == REACHED
    assert reaches(hosts, "n00", "10.77.0.11") == REACHED


_MAKER = """
import json, subprocess, sys
from tests.support.hosts import Hosts, keeper
with Hosts(json.loads(sys.argv[2])) as hosts:
    forever = ("setsid", "sh", "-c", "trap '' TERM; echo inside; sleep 1000")
    children = [host.popen(*forever, stdout=subprocess.PIPE) for host in hosts]
    for child in children:
        child.stdout.readline()
    print(hosts._directory, *{keeper.namespace_of(host.pid) for host in hosts}, flush=True)
    sys.stdin.readline() if sys.argv[1] == "killed" else sys.exit("an exception")
"""


@pytest.mark.smoke
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_nothing_outlives_its_maker(how):
    """Killed or with an exception: all processes on the hosts end, even in their own session; files are removed."""
    mounts = Path("/proc/mounts").read_text()
    with subprocess.Popen(
        [sys.executable, "-c", _MAKER, how, json.dumps(SITE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as maker:
        directory, *numbers = maker.stdout.readline().split()
        namespaces = set(map(int, numbers))
        assert len(namespaces) == len(SITE)
        if how == "killed":
            assert len(keeper.inside(namespaces)) >= 2 * len(SITE)
            maker.kill()
        maker.wait(30)
    deadline = time.monotonic() + 30
    while (keeper.inside(namespaces) or Path(directory).exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert keeper.inside(namespaces) == []
    assert not Path(directory).exists()
    assert Path("/proc/mounts").read_text() == mounts


@pytest.mark.parametrize(
    ("interfaces", "complaint"),
    [
        ({"a": {"eth0": "10.0.0.1"}}, "10.0.0.1 needs a prefix length, such as 10.0.0.1/24"),
        ({"a": {"eth0": "10.0.0.1/24", "ib0": "10.0.0.1/16"}}, "address 10.0.0.1 is also that of host 'a'"),
        ({"a": {"eth0": "ten"}}, "host 'a', interface 'eth0': 'ten' does not appear to be"),
        ({"a": {"eth 0": "10.0.0.1/24"}}, "at most 15 letters and digits"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(interfaces, complaint):
    with pytest.raises(InvalidSettings, match=complaint):
        Hosts(interfaces)


def test_a_failing_command_says_what_it_complained_about(hosts):
    with pytest.raises(BatchSystemError, match='Device "eth7" does not exist'):
        hosts["n00"].bytes_sent("eth7")
    with pytest.raises(InvalidSettings, match="there is no host 'n0' \\(did you mean 'n0"):
        hosts["n0"]
    with pytest.raises(InvalidSettings, match="host 'n00' has no interface 'ib9': eth0, ib0"), hosts.cut("n00", "ib9"):
        pass
