"""Several hosts on one machine: Linux network namespaces joined by bridges.

::

    with Hosts({"login": {"eth0": "10.77.0.1/24"}, "node01": {"eth0": "10.77.0.11/24"}}) as hosts:
        print(hosts["node01"].run("hostname"))
        with hosts.cut("node01"):
            ...  # nothing that login sends arrives

A host has its own interfaces, routes, hostname and ``/etc/hosts``; files and processes are the machine's, so the file
system is shared. Interfaces whose addresses belong to the same network are joined by a bridge in a separate namespace:
the machine's own network is not touched. Requires Linux, root and iproute2.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import BatchSystemError, CommandNotFound, InvalidSettings, did_you_mean
from tests.support.hosts import keeper

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Host", "Hosts"]

_PACKAGES = {"iproute2": ("ip", "bridge", "tc"), "util-linux": ("nsenter", "unshare", "setpriv", "mount")}
_SBIN = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_LONGEST_INTERFACE = 15  # characters, the kernel's limit


@dataclass(frozen=True)
class Host:
    """One host; made by `Hosts`.

    Parameters
    ----------
    name
        Hostname.
    pid
        The process that holds its namespaces: ``nsenter --target PID --net`` enters its network.
    interfaces
        Interface -> address with prefix length: ``{"eth0": "10.77.0.11/24"}``.
    """

    name: str
    pid: int
    interfaces: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The address of the first interface, without prefix length."""
        return next(iter(self.interfaces.values())).partition("/")[0]

    def command(self, *arguments: str, cwd: str | Path | None = None) -> list[str]:
        """Return the command that runs `arguments` on this host, in the same process, so that signals reach it.

        Parameters
        ----------
        *arguments
            The command and its arguments.
        cwd
            Working directory; default: the caller's.
        """
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--ipc", "--mount", "--"]
        return [*enter, "env", f"--chdir={cwd or Path.cwd()}", *arguments]

    def popen(self, *arguments: str, cwd: str | Path | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host; `options` are those of `subprocess.Popen`."""
        return subprocess.Popen(self.command(*arguments, cwd=cwd), **options)

    def run(self, *arguments: str, timeout: float = 60.0) -> str:
        """Run a command on this host and return its output.

        Raises
        ------
        BatchSystemError
            It failed; the message contains its error output.
        """
        return _run(self.command(*arguments), timeout=timeout)

    def bytes_sent(self, interface: str) -> int:
        """Return the bytes sent through an interface since the creation of the host."""
        (link,) = json.loads(self.run("ip", "-json", "-stats", "link", "show", "dev", interface))
        return int(link["stats64"]["tx"]["bytes"])

    def is_inside(self, pid: int) -> bool:
        """Return whether a process is on this host."""
        return keeper.namespace_of(pid) == keeper.namespace_of(self.pid)


class Hosts:
    """Hosts that exist as long as the context, or the process that made them, however it ends.

    Parameters
    ----------
    interfaces
        Host -> interface -> address with prefix length, IPv4 or IPv6. Interfaces in the same network are connected.
    unresolved
        Hosts whose names the others do not resolve. Each host resolves its own name to its first address.

    Raises
    ------
    CommandNotFound
        A requirement is not met on this machine; see `missing`.
    InvalidSettings
        An address has no prefix length or is used twice, or a name is invalid.
    """

    def __init__(self, interfaces: Mapping[str, Mapping[str, str]], *, unresolved: Collection[str] = ()) -> None:
        if (missing := self.missing()) is not None:
            raise CommandNotFound(missing)
        self._interfaces = {name: dict(own) for name, own in interfaces.items()}
        self._unresolved = frozenset(unresolved)
        self._ports = _ports(self._interfaces)
        if unknown := self._unresolved - self._interfaces.keys():
            raise InvalidSettings(f"unresolved: no such host: {', '.join(sorted(unknown))}")
        self._hosts: dict[str, Host] = {}
        self._switch: Host | None = None
        self._directory = Path(tempfile.gettempdir(), f"ft-hosts-{secrets.token_hex(4)}")
        self._keeper: subprocess.Popen[str] | None = None

    @staticmethod
    def missing() -> str | None:
        """Return the requirements not met on this machine, in one line; ``None`` if all are met."""
        if sys.platform != "linux":
            return f"hosts need Linux (network namespaces), this is {sys.platform}"
        absent = {
            name: package
            for package, names in _PACKAGES.items()
            for name in names
            if shutil.which(name, path=_SBIN) is None
        }
        if absent:
            packages = " ".join(dict.fromkeys(absent.values()))
            return f"no {', '.join(absent)} here (Debian: apt-get install {packages})"
        if os.geteuid() != 0:
            return "hosts need root (network namespaces)"
        trial = "ip link add br0 type bridge && ip link add v0 type veth peer name v1 && ip link set v0 master br0"
        tried = subprocess.run(
            ["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", trial],
            env=_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else None

    def __getitem__(self, name: str) -> Host:
        if name not in self._hosts:
            raise InvalidSettings(f"there is no host {name!r}{did_you_mean(name, self._interfaces)}")
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def __enter__(self) -> Self:
        """Make the hosts and connect them.

        Raises
        ------
        BatchSystemError
            The kernel refused; the message contains its error.
        """
        self._directory.mkdir(mode=0o755)
        command = [sys.executable, "-I", "-S", keeper.__file__, str(self._directory), str(len(self._interfaces) + 1)]
        self._keeper = subprocess.Popen(
            command,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self._hosts, self._switch = self._started_hosts()
            self._connect()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill every process on the hosts, and remove them."""
        if self._keeper is None:
            return
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.stdout.close()
        failed = self._keeper.wait()
        self._keeper = None
        self._hosts, self._switch = {}, None
        if failed:
            raise BatchSystemError("processes on the hosts did not end when they were killed")

    # Network faults; each is undone at the end of its block.

    @contextmanager
    def cut(self, name: str, interface: str | None = None) -> Iterator[None]:
        """Take a host's link down at the switch inside the block: packets are lost, connections stay open."""
        port = self._port(name, interface)
        self._on_switch("ip", "link", "set", port, "down")
        try:
            yield
        finally:
            self._on_switch("ip", "link", "set", port, "up")

    @contextmanager
    def isolated(self, *names: str, interface: str | None = None) -> Iterator[None]:
        """Separate these hosts from each other inside the block; traffic with all other hosts is not affected."""
        ports = [self._port(name, interface) for name in names]
        for port in ports:
            self._on_switch("bridge", "link", "set", "dev", port, "isolated", "on")
        try:
            yield
        finally:
            for port in ports:
                self._on_switch("bridge", "link", "set", "dev", port, "isolated", "off")

    @contextmanager
    def slow(self, name: str, rate: str, interface: str | None = None) -> Iterator[None]:
        """Limit a host's link inside the block, in each direction.

        Parameters
        ----------
        name, interface
            The host, and its interface; default: its first.
        rate
            In the syntax of tc: ``2mbit``.
        """
        port = self._port(name, interface)
        inner = self._ports[port].interface
        limit = ["root", "tbf", "rate", rate, "burst", "32kb", "latency", "200ms"]
        self._on_switch("tc", "qdisc", "add", "dev", port, *limit)
        self[name].run("tc", "qdisc", "add", "dev", inner, *limit)
        try:
            yield
        finally:
            self._on_switch("tc", "qdisc", "del", "dev", port, "root")
            self[name].run("tc", "qdisc", "del", "dev", inner, "root")

    def lead_nowhere(self, name: str, gateway: str, interface: str | None = None) -> None:
        """Give a host a default route over a gateway that silently drops everything, as many firewalls do."""
        port = self._ports[self._port(name, interface)]
        family = f"-{ipaddress.ip_address(gateway).version}"
        nobody = "02:00:00:00:00:01"
        self[name].run("ip", "neigh", "replace", gateway, "lladdr", nobody, "nud", "permanent", "dev", port.interface)
        self[name].run("ip", family, "route", "replace", "default", "via", gateway, "dev", port.interface)

    def entering(self, variable: str) -> str:
        """Return shell code that continues the script on the host whose name an environment variable holds.

        For the head of a batch script, as ``worker_init`` of a Parsl provider whose nodes are processes of
        this machine: ``EmbeddedClusterProvider(worker_init=hosts.entering("FREETRAIN_CLUSTER_NODE"))``.
        """
        cases = [
            f'{shlex.quote(host.name)}) export FREETRAIN_HOST={shlex.quote(host.name)}; exec {enter} bash "$0" ;;'
            for host in self
            for enter in [shlex.join(host.command("--", cwd="/")[:-1]).replace("--chdir=/", '--chdir="$PWD"')]
        ]
        unknown = f"*) echo \"there is no host '${variable}'\" >&2; exit 1 ;;"
        return "\n".join(
            ['if [ -z "${FREETRAIN_HOST:-}" ]; then', f'case "${variable}" in', *cases, unknown, "esac", "fi"]
        )

    # Start-up.

    def _started_hosts(self) -> tuple[dict[str, Host], Host]:
        """Wait until the keeper has made the namespaces: one per host, and one for the bridges."""
        assert self._keeper is not None
        assert self._keeper.stdout is not None
        pids = json.loads(self._keeper.stdout.readline() or "[]")
        if len(pids) != len(self._interfaces) + 1:
            raise BatchSystemError("the kernel made no network namespaces; its error is on stderr")
        switch = Host("switch", pids.pop())
        return {
            name: Host(name, pid, own) for (name, own), pid in zip(self._interfaces.items(), pids, strict=True)
        }, switch

    def _connect(self) -> None:
        assert self._switch is not None
        lines = [f"link add {bridge} type bridge mcast_snooping 0" for bridge in self._bridges()]
        lines += [f"link set {bridge} up" for bridge in self._bridges()]
        for name, port in self._ports.items():
            peer = self[port.host].pid
            lines.append(f"link add {name} type veth peer name {port.interface} netns {peer}")
            lines.append(f"link set {name} master {port.bridge}")
            lines.append(f"link set {name} up")
        self._on_switch("ip", "-batch", "-", text="\n".join(lines))
        for host in self:
            self._set_up(host)

    def _bridges(self) -> list[str]:
        return list(dict.fromkeys(port.bridge for port in self._ports.values()))

    def _set_up(self, host: Host) -> None:
        """Give a host its name, the others' names and its addresses."""
        files = {"hosts": self._names_known_to(host), "resolv.conf": ""}
        binds = []
        for file, text in files.items():
            ours = self._directory / f"{host.name}.{file}"
            ours.write_text(text, encoding="utf-8")
            if Path("/etc", file).exists():
                binds.append(f"mount --bind {shlex.quote(str(ours))} /etc/{file}")
        lines = ["link set lo up"]
        for interface, address in host.interfaces.items():
            flags = " nodad" if ipaddress.ip_interface(address).version == 6 else ""
            lines += [f"addr add {address} dev {interface}{flags}", f"link set {interface} up"]
        # As `ip netns exec` does: /sys/class/net shows the interfaces of the namespace that mounted it.
        script = [f"hostname {shlex.quote(host.name)}", "mount -t sysfs none /sys", *binds, "ip -batch -"]
        _run(host.command("sh", "-c", " && ".join(script), cwd="/"), text="\n".join(lines))

    def _names_known_to(self, host: Host) -> str:
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        known = [other for other in self if other is host or other.name not in self._unresolved]
        lines += [f"{other.address} {other.name}" for other in known if other.interfaces]
        return "\n".join([*lines, ""])

    def _port(self, name: str, interface: str | None) -> str:
        interface = interface or next(iter(self[name].interfaces))
        for port, forward in self._ports.items():
            if (forward.host, forward.interface) == (name, interface):
                return port
        raise InvalidSettings(f"host {name!r} has no interface {interface!r}: {', '.join(self[name].interfaces)}")

    def _on_switch(self, *arguments: str, text: str | None = None) -> None:
        assert self._switch is not None, "only inside the context"
        _run(self._switch.command(*arguments, cwd="/"), text=text)


@dataclass(frozen=True)
class _Port:
    """A port of the switch, and its destination."""

    host: str
    interface: str
    bridge: str


def _ports(interfaces: Mapping[str, Mapping[str, str]]) -> dict[str, _Port]:
    """Name a port of the switch for every interface, and a bridge for every network."""
    bridges: dict[object, str] = {}
    used: dict[object, str] = {}
    ports: dict[str, _Port] = {}
    for host, own in interfaces.items():
        for interface, text in own.items():
            where = f"host {host!r}, interface {interface!r}"
            try:
                address = ipaddress.ip_interface(text)
            except ValueError as error:
                raise InvalidSettings(f"{where}: {error}") from None
            if "/" not in text:
                raise InvalidSettings(f"{where}: address {text} needs a prefix length, such as {text}/24")
            if address.ip in used:
                raise InvalidSettings(f"{where}: address {address.ip} is also that of {used[address.ip]}")
            if not 0 < len(interface) <= _LONGEST_INTERFACE or not interface.isalnum():
                raise InvalidSettings(f"{where}: a name of at most {_LONGEST_INTERFACE} letters and digits is needed")
            used[address.ip] = where
            bridge = bridges.setdefault(address.network, f"net{len(bridges)}")
            ports[f"port{len(ports)}"] = _Port(host, interface, bridge)
    return ports


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _SBIN}


def _run(command: Sequence[str], *, text: str | None = None, timeout: float = 60.0) -> str:
    done = subprocess.run(
        command,
        env=_environment(),
        input=text or "",
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise BatchSystemError(f"{shlex.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
