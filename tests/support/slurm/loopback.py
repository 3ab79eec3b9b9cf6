"""A real Slurm of several nodes on the loopback of one machine, for tests and benchmarks, without systemd or root.

::

    with LoopbackSlurm(nodes=4) as cluster:
        job = cluster.submit("--nodes=2", "--time=5")
        cluster.wait_for_state(job, "RUNNING")

The daemons are Slurm's own (Debian: ``slurmctld slurmd slurm-client munge``); nothing is installed here, and
`LoopbackSlurm.missing` returns what is missing. Nodes have the hardware given in the settings; their jobs are real
processes of this machine. Everything ends with the context, and also if this process is killed: see `sweeper`.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.errors import BatchSystemError, CommandNotFound, InvalidSettings
from tests.support.daemons import PERIOD, Daemons, wait_until
from tests.support.slurm import sweeper
from tests.support.slurm.slurm_config import (
    PARTITIONS,
    ClusterPlan,
    LoopbackPartition,
    node_names,
    slurm_conf,
    slurmdbd_conf,
)
from tests.support.slurm.slurm_machine import (
    PATH,
    character_devices,
    choose_ports,
    is_loopback_only,
    listens,
    slurm_version,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["PARTITIONS", "LoopbackPartition", "LoopbackSlurm"]

_PROGRAMS = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
}
_TRACED = ("strace", "-D", "-f", "--seccomp-bpf", "-qq", "-y", "-e", "trace=%file", "-e", "signal=none", "-o")
_ACCOUNTING_PROGRAMS = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server"}
_LONGEST_PATH = 80  # a socket's path may have 107 bytes
_NODE_MARK = "FREETRAIN_LOOPBACK_NODE"  # environment variable of a node's daemon and of its job steps
_JOB_NODE = "SLURMD_NODENAME"  # the same for its jobs, set by Slurm
_READ_ALL = ["setpriv", "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
_FOREIGN = ("SLURM", "SBATCH", "SQUEUE", "SINFO", "SALLOC", "SRUN")  # another cluster's settings


class LoopbackSlurm:
    """A cluster that exists as long as its context.

    Parameters
    ----------
    directory
        Directory of all its files; must be empty, and is removed at the end. Default: a temporary one.
    nodes, cpus, memory, gpus
        Number of nodes, and resources of each; `memory` in MiB.
    features
        Node -> its features, comma-separated.
    partitions
        Default: `PARTITIONS`.
    bf_interval, bf_resolution
        Seconds between passes of the backfill scheduler, and the resolution of its plan.
    kill_wait
        Seconds between SIGTERM and SIGKILL at the end of a job's time.
    slurmd_timeout
        Seconds after which an unresponsive node is down.
    start_timeout
        Seconds for all nodes to be idle; a thousand take a minute on two cores.
    accounting
        Whether to run slurmdbd, for ``sacct`` and QOS; takes some seconds.
    warn_preempted
        Whether preempted jobs get the signal requested with ``--signal``.
    jobs_read_all
        Jobs of users other than root may read every file: a test's interpreter and code are often below a private
        home directory. Needs root; `as_user` gives clients the same.
    trace
        Directory for a record of the file system calls of each node's processes, by ``strace``.
    scheduler_parameters, extra
        Additional SchedulerParameters, and lines of ``slurm.conf``.

    Attributes
    ----------
    environment
        Complete environment for clients of this cluster: ``subprocess.run(…, env=cluster.environment)``.
    node_names
        The nodes, in order.
    work
        Working directory of clients, writable for all users.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        nodes: int = 8,
        cpus: int = 4,
        memory: int = 16000,
        gpus: int = 0,
        features: Mapping[str, str] | None = None,
        partitions: Sequence[LoopbackPartition] = PARTITIONS,
        bf_interval: int = 2,
        bf_resolution: int = 1,
        kill_wait: int = 5,
        slurmd_timeout: int = 10,
        start_timeout: float = 60.0,
        accounting: bool = False,
        warn_preempted: bool = True,
        jobs_read_all: bool = False,
        trace: Path | None = None,
        scheduler_parameters: Sequence[str] = (),
        extra: Sequence[str] = (),
    ) -> None:
        missing = self.missing(accounting=accounting)
        if missing is not None:
            raise CommandNotFound(missing)
        name = f"loop{secrets.token_hex(4)}"
        self.directory = (directory or Path(tempfile.gettempdir(), f"ft-slurm-{name}")).absolute()
        if len(str(self.directory)) > _LONGEST_PATH:
            raise InvalidSettings(f"{self.directory}: the path is too long for its sockets; give a shorter one")
        self.node_names = node_names(nodes)
        self.work = self.directory / "work"
        self._plan = ClusterPlan(
            name=name,
            directory=self.directory,
            user=pwd.getpwuid(os.geteuid()).pw_name,
            version=slurm_version(),
            ports=choose_ports(nodes),
            loopback_only=is_loopback_only(),
            nodes=nodes,
            cpus=cpus,
            memory=memory,
            gpus=gpus,
            features=features or {},
            partitions=partitions,
            bf_interval=bf_interval,
            bf_resolution=bf_resolution,
            kill_wait=kill_wait,
            slurmd_timeout=slurmd_timeout,
            accounting=accounting,
            warn_preempted=warn_preempted,
            scheduler_parameters=scheduler_parameters,
            extra=extra,
        )
        own = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        self.environment = own | {"PATH": PATH, "SLURM_CONF": str(self._conf), sweeper.MARK: self._plan.name}
        self._jobs_read_all = jobs_read_all
        self._trace = trace
        self._start_timeout = start_timeout
        self._daemons = Daemons(self.directory / "run", self.directory / "log", self.environment, self._on_its_host)
        self._lost: set[str] = set()
        self._sweeper: subprocess.Popen[bytes] | None = None

    @staticmethod
    def missing(*, accounting: bool = False) -> str | None:
        """Return the requirements not met on this machine, in one line; ``None`` if all are met."""
        if not Path("/proc/self/environ").exists():
            return f"a loopback Slurm needs Linux (it reads /proc), this is {sys.platform}"
        programs = _PROGRAMS | (_ACCOUNTING_PROGRAMS if accounting else {})
        absent = [name for name in programs if shutil.which(name, path=PATH) is None]
        if not absent:
            return None
        packages = " ".join(dict.fromkeys(programs[name] for name in absent))
        return f"no {', '.join(absent)} here (Debian: apt-get install {packages})"

    @property
    def version(self) -> tuple[int, int]:
        """Version of the installed Slurm: ``(22, 5)``."""
        return self._plan.version

    def __enter__(self) -> Self:
        """Write the configuration, start the daemons, wait until every node is idle.

        Raises
        ------
        BatchSystemError
            A daemon did not start; the message contains the end of its log.
        InvalidSettings
            A setting is out of range, or the directory is not empty.
        """
        files = self._files()  # rejects invalid settings before anything is written
        self.directory.mkdir(exist_ok=True)
        if any(self.directory.iterdir()):
            raise InvalidSettings(f"{self.directory}: not empty; a cluster needs its own directory")
        self._start_sweeper()
        try:
            self._write(files)
            self._start_daemons()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill every process of the cluster and remove its directory."""
        if self._sweeper is None:
            return
        assert self._sweeper.stdin is not None
        self._sweeper.stdin.close()
        while self._sweeper.poll() is None:
            self._daemons.reap()
            time.sleep(PERIOD)
        self._daemons.forget()
        failed, self._sweeper = self._sweeper.returncode, None
        if failed:
            raise BatchSystemError(f"processes of cluster {self._plan.name} did not die")

    # For users of the cluster.

    def run(self, *arguments: str, user: str | None = None, timeout: float = 60.0) -> str:
        """Run a client command and return its output.

        Parameters
        ----------
        *arguments
            The command and its arguments.
        user
            User that runs it; needs root.
        timeout
            Seconds.

        Raises
        ------
        BatchSystemError
            It failed; the message contains its error output.
        """
        done = subprocess.run(
            self._on_its_host("client", arguments, str(self.work)),
            env=self.environment,
            cwd=self.work,
            user=user,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise BatchSystemError(f"{shlex.join(arguments)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def submit(self, *options: str, command: str = "exec sleep 100000", user: str | None = None) -> str:
        """Submit a batch job that runs a shell command, with further options of ``sbatch``; return its id."""
        output = [] if any(option.startswith("--output") for option in options) else ["--output=/dev/null"]
        printed = self.run("sbatch", "--parsable", *output, *options, f"--wrap={command}", user=user)
        return printed.strip().partition(";")[0]

    @staticmethod
    def as_user(user: str, *command: str) -> list[str]:
        """Make a command line that runs a command as another user who may read every file; needs root."""
        entry = pwd.getpwnam(user)
        return [*_READ_ALL, f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups", *command]

    def describe(self, job: str) -> dict[str, str]:
        """Return the fields of ``scontrol show job`` for a job, or for the first task of an array."""
        text = self.run("scontrol", "--oneliner", "show", "job", job).partition("\n")[0]
        return {name: value for name, _, value in (word.partition("=") for word in text.split()) if value}

    def state_of(self, job: str) -> str:
        """Return the state of a job: ``PENDING``, ``RUNNING`` and so on."""
        return self.describe(job)["JobState"]

    def wait_for_state(self, job: str, *states: str, timeout: float = 30.0) -> str:
        """Wait until a job is in one of these states, and return it.

        Raises
        ------
        BatchSystemError
            It did not reach one of them within `timeout` seconds.
        """
        seen = ""

        def reached() -> bool:
            nonlocal seen
            seen = self.state_of(job)
            return seen in states

        wait_until(reached, timeout, lambda: f"job {job} to be {' or '.join(states)}, it is {seen}")
        return seen

    def clear(self, timeout: float = 30.0) -> None:
        """End all jobs, remove reservations, and wait until every node is idle: the initial state."""
        self.start_controller()
        for name in self.node_names:
            self.start_node(name)
        for line in self.run("scontrol", "--oneliner", "show", "reservation").splitlines():
            if found := re.match(r"ReservationName=(\S+)", line):
                self.run("scontrol", "delete", f"ReservationName={found[1]}")

        def empty() -> bool:
            jobs = self.run("squeue", "--noheader", "--format=%A").split()
            if jobs:
                self.run("scancel", "--quiet", *jobs)
            return not jobs

        wait_until(empty, timeout, lambda: "the queue to be empty")
        for line in self.run(
            "sinfo", "--noheader", "--Node", f"--partition={self._plan.partitions[0].name}", "--format=%N %T"
        ).splitlines():
            name, state = line.split()
            if "drain" in state:
                self.run("scontrol", "update", f"NodeName={name}", "State=UNDRAIN")
        self._await_nodes()

    # Administration and failures.

    def stop_node(self, name: str) -> None:
        """Stop a node's daemon cleanly; its jobs continue."""
        self._daemons.end(name, signal.SIGTERM)

    def kill_node(self, name: str) -> None:
        """Kill a node and all its processes, as a power failure does."""
        self._lost.add(name)
        self._daemons.end(name, signal.SIGKILL)  # first, so that it starts nothing more

        def dead() -> bool:
            pids = [pid for pid in sweeper.marked(self._plan.name) if _runs_on(pid, name)]
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        wait_until(dead, 60.0, lambda: f"the processes of {name} to die")

    def start_node(self, name: str) -> None:
        """Start a node's daemon, unless it is running."""
        if not self._daemons.runs(name):
            boot = ["-b"] if name in self._lost else []  # informs the controller that its jobs are gone
            self._lost.discard(name)
            command = ["slurmd", "-D", "-N", name, "-f", str(self._conf), *boot]
            if self._jobs_read_all:
                command = [*_READ_ALL, "--securebits=+no_setuid_fixup", *command]
            if self._trace is not None:
                command = [*_TRACED, str(self._trace / name), *command]
            self._daemons.start(name, *command, extra={_NODE_MARK: name})

    def stop_controller(self) -> None:
        """Stop slurmctld; jobs continue, clients get no response."""
        self._daemons.end("slurmctld", signal.SIGTERM)

    def start_controller(self) -> None:
        """Start slurmctld from its saved state, unless it is running, and wait until it responds."""
        if not self._daemons.runs("slurmctld"):
            self._daemons.start("slurmctld", "slurmctld", "-D", "-f", str(self._conf))
        self._daemons.wait_until_ready("slurmctld", lambda: self._answers("sinfo", "--noheader"))

    def restart_controller(self) -> None:
        """Stop slurmctld and start it again."""
        self.stop_controller()
        self.start_controller()

    def log(self, daemon: str) -> str:
        """Return the log of a daemon: ``slurmctld``, ``munged``, or a node's name."""
        return self._daemons.log(daemon)

    # Start-up.

    @property
    def _conf(self) -> Path:
        return self.directory / "etc" / "slurm.conf"

    def _files(self) -> dict[str, str]:
        """Make the configuration: name -> text."""
        files = {"slurm.conf": slurm_conf(self._plan)}
        # slurmd requires a cgroup plugin even if it is unused; this one works without mounted cgroups.
        plugin = "disabled" if self.version >= (24, 5) else "cgroup/v1"
        files["cgroup.conf"] = f"CgroupPlugin={plugin}\n"
        if self._plan.gpus:
            # Jobs get CUDA_VISIBLE_DEVICES only for character devices; these are never opened.
            lines = [f"Name=gpu File={device}" for device in character_devices(self._plan.gpus)]
            files["gres.conf"] = "\n".join(["AutoDetect=off", *lines, ""])
        if self._plan.accounting:
            files["slurmdbd.conf"] = slurmdbd_conf(self._plan)
        return files

    def _write(self, files: Mapping[str, str]) -> None:
        self.directory.chmod(0o755)  # clients of other users traverse it
        for name in ("etc", "state", "spool", "log", "run", "work"):
            (self.directory / name).mkdir()
        self.work.chmod(0o1777)
        for name, text in files.items():
            (self.directory / "etc" / name).write_text(text, encoding="utf-8")
        key = self.directory / "etc" / "munge.key"
        key.write_bytes(os.urandom(128))
        for secret in (key, self.directory / "etc" / "slurmdbd.conf"):
            if secret.exists():
                secret.chmod(0o600)

    def _start_sweeper(self) -> None:
        command = [sys.executable, "-I", "-S", sweeper.__file__, self._plan.name, str(self.directory)]
        self._sweeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def _start_daemons(self) -> None:
        run, log = self.directory / "run", self.directory / "log"
        munge = [f"--key-file={self.directory}/etc/munge.key", f"--socket={run}/munge.sock", "--force"]
        places = [f"--pid-file={run}/munged.pid", f"--log-file={log}/munged.log", f"--seed-file={run}/munge.seed"]
        self._daemons.start(
            "munged", "munged", "--foreground", "--num-threads=4", "--group-update-time=-1", *munge, *places
        )
        self._daemons.wait_until_ready("munged", lambda: listens(run / "munge.sock"))
        if self._plan.accounting:
            self._start_accounting()
        self._daemons.start("slurmctld", "slurmctld", "-D", "-f", str(self._conf))
        for name in self.node_names:
            self.start_node(name)
        self.start_controller()
        self._await_nodes()

    def _start_accounting(self) -> None:
        data, sock = self.directory / "database", self.directory / "run" / "database.sock"
        as_root = ["--user=root"] if os.geteuid() == 0 else []
        common = ["--no-defaults", f"--datadir={data}", *as_root]
        data.mkdir()
        self.run("mariadb-install-db", *common, "--auth-root-authentication-method=normal", "--skip-test-db")
        words = [f"--socket={sock}", f"--port={self._plan.ports['database']}", "--bind-address=127.0.0.1"]
        words += ["--skip-log-bin", "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900"]
        self._daemons.start("mariadbd", "mariadbd", *common, *words)
        self._daemons.wait_until_ready("mariadbd", lambda: listens(sock))
        grants = "create database slurm_acct;" + "".join(
            f"create user slurm@'{host}' identified by 'slurm'; grant all on slurm_acct.* to slurm@'{host}';"
            for host in ("127.0.0.1", "localhost")
        )
        self.run("mariadb", "--no-defaults", f"--socket={sock}", "-uroot", "-e", grants)
        self._daemons.start("slurmdbd", "slurmdbd", "-D")
        self._daemons.wait_until_ready("slurmdbd", lambda: self._answers("sacctmgr", "--noheader", "show", "cluster"))
        for words in (
            ["cluster", self._plan.name],
            ["account", "test", f"Cluster={self._plan.name}"],
            ["user", self._plan.user, "Account=test"],
        ):
            self.run("sacctmgr", "--immediate", "add", *words)

    def _await_nodes(self) -> None:
        def idle() -> bool:
            states = self.run("sinfo", "--noheader", "--format=%T").split()
            return bool(states) and set(states) == {"idle"}

        wait_until(
            idle,
            self._start_timeout,
            lambda: f"all nodes to be idle:\n{self.run('sinfo')}{self._daemons.last_words('slurmctld')}",
        )

    def _on_its_host(self, daemon: str, command: tuple[str, ...], directory: str) -> list[str]:
        """Return the command that runs a daemon's or a client's command on its host; see `hosts.SlurmOnHosts`."""
        return list(command)

    def _answers(self, *command: str) -> bool:
        try:
            self.run(*command)
        except BatchSystemError:
            return False
        return True


def _runs_on(pid: int, node: str) -> bool:
    """Return whether a process is a daemon, a step or a job of this node."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return not {f"{name}={node}".encode() for name in (_NODE_MARK, _JOB_NODE)}.isdisjoint(entries)
