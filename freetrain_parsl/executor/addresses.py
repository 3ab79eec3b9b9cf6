"""The driver's addresses for the nodes, and the network interface for the traffic between members of a training job."""

from __future__ import annotations

import ipaddress
import platform
import socket
from typing import NamedTuple, TypeAlias

import psutil

from freetrain_parsl.errors import BatchSystemError, InvalidSettings

__all__ = [
    "Interface",
    "check_interface",
    "driver_addresses",
    "endpoint",
    "interface_for",
    "own_addresses",
    "resolved",
]

_IPAddress: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"


def own_addresses() -> dict[str, list[_IPAddress]]:
    """List the network interfaces of this host with their IPv4 and IPv6 addresses, without link-local ones."""
    found: dict[str, list[_IPAddress]] = {}
    for name, entries in psutil.net_if_addrs().items():
        texts = [one.address for one in entries if one.family in (socket.AF_INET, socket.AF_INET6)]
        addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in texts]
        if usable := [address for address in addresses if not address.is_link_local]:
            found[name] = usable
    return found


def driver_addresses() -> set[str]:
    """Return the addresses at which nodes may reach this host; the loopback address if there is no other.

    Parsl's own function ignores IPv6 and queries a public web service, which blocks on a host without internet access.
    """
    every = [address for addresses in own_addresses().values() for address in addresses]
    return {str(address) for address in every if not address.is_loopback} or {"127.0.0.1"}


def resolved(address: str) -> str:
    """Return the IP address of `address`, an IP address or a host name: nodes may be unable to resolve the name.

    Raises
    ------
    InvalidSettings
        The name cannot be resolved, or resolves to the loopback, as a host's own name does by Debian's ``/etc/hosts``.
    """
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        pass  # a name
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise InvalidSettings(
            f"FreeTrainExecutor: address {address!r} is not an IP address and cannot be resolved on this host: {error}"
        ) from None
    outward = [one for one in found if not ipaddress.ip_address(one).is_loopback]
    if not outward and address != "localhost":
        raise InvalidSettings(
            f"FreeTrainExecutor: address {address!r} resolves to {found[0]} on this host, which nodes cannot reach; "
            f"give an IP address: {', '.join(sorted(driver_addresses()))}"
        )
    return (outward or found)[0]


def check_interface(interface: str) -> None:
    """Check that an interface setting is a name or a network.

    Raises
    ------
    InvalidSettings
        It is empty, or has a slash but is not a network in CIDR notation.
    """
    if not interface:
        raise InvalidSettings("FreeTrainExecutor: interface is empty; omit it to use the one that reaches the driver")
    if "/" in interface:
        try:
            ipaddress.ip_network(interface)
        except ValueError as error:
            raise InvalidSettings(
                f"FreeTrainExecutor: interface {interface!r} is neither the name of an interface nor a network "
                f"such as 10.1.0.0/16: {error}"
            ) from None


class Interface(NamedTuple):
    """A network interface of this host: its name, ``None`` if it is unknown, and one of its IP addresses."""

    name: str | None
    address: str


def interface_for(setting: str | None, driver: str) -> Interface:
    """Find the interface through which this host reaches the other members of a training job.

    Parameters
    ----------
    setting
        The name of an interface, or a network in CIDR notation, for hosts whose interfaces have different names.
        ``None``: the interface through which this host reaches the driver.
    driver
        URL of the driver: ``tcp://HOST:PORT``.

    Raises
    ------
    BatchSystemError
        This host has no such interface.
    """
    if setting is None:
        return _interface_to(driver)
    every = own_addresses()
    if "/" not in setting:
        if setting in every:
            return Interface(setting, str(every[setting][0]))
    else:
        network = ipaddress.ip_network(setting)
        for name, addresses in every.items():
            if found := [address for address in addresses if address in network]:
                return Interface(name, str(found[0]))
    has = ", ".join(f"{name} ({', '.join(map(str, addresses))})" for name, addresses in every.items())
    raise BatchSystemError(
        f"host {platform.node()} has no network interface {setting} with an address, it has {has}; change "
        f"interface=… of the executor (a network such as 10.1.0.0/16 where the names differ)"
    )


def _interface_to(url: str) -> Interface:
    """Find the interface through which this host reaches `url`."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing: it only makes the kernel choose the route
        local = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    name = next((name for name, addresses in own_addresses().items() if local in addresses), None)
    return Interface(name, str(local))


def endpoint(host: str, port: int) -> str:
    """Return the ZeroMQ endpoint of a host; an IPv6 address is put in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
