"""Addresses of the driver for the nodes, and the network interface for the traffic between members."""

from __future__ import annotations

import re
import socket
from types import SimpleNamespace

import pytest

from freetrain_parsl import FreeTrainExecutor
from freetrain_parsl.errors import BatchSystemError, InvalidSettings
from freetrain_parsl.executor import addresses

V4, V6 = socket.AF_INET, socket.AF_INET6


def interfaces(monkeypatch, **told):
    """Simulate these network interfaces of this host."""
    fakes = {
        name: [SimpleNamespace(family=V6 if ":" in text else V4, address=text) for text in texts]
        for name, texts in told.items()
    }
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: fakes)


def test_all_addresses_are_offered_of_both_families_but_none_that_lead_nowhere(monkeypatch):
    interfaces(monkeypatch, lo=["127.0.0.1", "::1"], eth0=["10.1.0.1", "fd00::1", "fe80::1%eth0"], ib0=["10.2.0.1"])
    assert addresses.driver_addresses() == {"10.1.0.1", "fd00::1", "10.2.0.1"}


@pytest.mark.parametrize("told", [{"lo": ["127.0.0.1", "::1"]}, {}])
def test_a_host_without_a_network_offers_the_loopback(told, monkeypatch):
    interfaces(monkeypatch, **told)
    assert addresses.driver_addresses() == {"127.0.0.1"}


def test_the_executor_asks_nobody_else_for_its_addresses(monkeypatch):
    """Parsl's own function queries a web service, which takes half a minute without internet access."""
    interfaces(monkeypatch, eth0=["fd00::1"])
    monkeypatch.setattr("parsl.executors.high_throughput.executor.get_all_addresses", lambda: pytest.fail("asked"))
    monkeypatch.setattr("freetrain_parsl.EmbeddedClusterProvider.driver_address", None)
    executor = FreeTrainExecutor()
    assert executor.all_addresses == {"fd00::1"}
    assert executor.address is None
    assert FreeTrainExecutor(address="fd00:0::1").all_addresses == {"fd00::1"}


def test_a_name_becomes_the_address_that_it_has_here(monkeypatch):
    """Nodes may be unable to resolve the name, and the interchange accepts only IP addresses."""
    known = {"login01": ["10.1.0.1"], "debian": ["127.0.1.1"], "both": ["127.0.1.1", "10.1.0.1"], "localhost": ["::1"]}

    def resolve(name, *_, **__):
        if name not in known:
            raise socket.gaierror("Name or service not known")
        return [(V4, 1, 6, "", (address, 0)) for address in known[name]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    interfaces(monkeypatch, eth0=["10.1.0.1"])
    assert addresses.resolved("login01") == "10.1.0.1"
    assert addresses.resolved("both") == "10.1.0.1"
    assert addresses.resolved("localhost") == "::1"
    with pytest.raises(InvalidSettings, match=r"'login07' is not an IP address and cannot be resolved on this host"):
        addresses.resolved("login07")
    with pytest.raises(InvalidSettings, match=r"'debian' resolves to 127.0.1.1 .*give an IP address: 10.1.0.1"):
        FreeTrainExecutor(address="debian")


@pytest.mark.parametrize(
    ("setting", "found"),
    [("ib1", "ib1"), ("10.2.0.0/16", "ib1"), ("fd02::/64", "ib2"), ("10.1.0.0/24", "eth0")],
)
def test_an_interface_is_named_or_found_by_its_network(setting, found, monkeypatch):
    interfaces(monkeypatch, eth0=["10.1.0.7"], ib1=["10.2.3.7"], ib2=["fd02::7"])
    addresses.check_interface(setting)
    assert addresses.interface_for(setting, "tcp://10.1.0.1:5")[0] == found


@pytest.mark.parametrize("setting", ["ib0", "10.9.0.0/16"])
def test_a_host_without_the_interface_says_what_it_has(setting, monkeypatch):
    interfaces(monkeypatch, eth0=["10.1.0.7"], ib1=["10.2.3.7"])
    with pytest.raises(BatchSystemError, match=rf"no network interface {re.escape(setting)} .* eth0 \(10.1.0.7\), ib1"):
        addresses.interface_for(setting, "tcp://10.1.0.1:5")


@pytest.mark.parametrize(
    ("setting", "complaint"), [("", "is empty"), ("10.1.0.1/16", "has host bits"), ("ib0/1", "ib0")]
)
def test_a_setting_that_is_no_interface_is_refused_at_once(setting, complaint):
    with pytest.raises(InvalidSettings, match=complaint):
        FreeTrainExecutor(interface=setting)


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:55000", "tcp://[::1]:55000"])
def test_by_default_it_is_the_one_that_reaches_the_driver(url: str) -> None:
    if "[" in url and not any(str(one) == "::1" for one in addresses.own_addresses().get("lo", ())):
        pytest.skip("this machine has no IPv6 loopback")
    assert addresses.interface_for(None, url) == ("lo", url[6:].rpartition(":")[0].strip("[]"))
