"""Queries to Slurm: as few commands as possible, with each result cached as long as it is valid.

A round costs the controller two requests, jobs and partitions, for one ``squeue``. Nodes are queried once a minute,
which costs two more, nodes and partitions, for one ``scontrol show nodes`` (counted with ``sdiag`` on 22.05).
Partitions, reservations and the configuration are queried every few minutes; all of it again after any error.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, TypeVar, cast

from freetrain_parsl.errors import BatchSystemError, CommandNotFound, UnreadableAnswer
from freetrain_parsl.windows.slurm.json_parser import parse_json_jobs, parse_json_nodes
from freetrain_parsl.windows.slurm.text_parser import (
    JOB_FORMAT,
    parse_config,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_reservations,
    parse_seconds,
)
from freetrain_parsl.windows.state import Scheduling

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from freetrain_parsl.windows.commands import Runner
    from freetrain_parsl.windows.slurm.jobs import SlurmJob
    from freetrain_parsl.windows.state import Node, Partition, Reservation

__all__ = ["SlurmQueries"]

T = TypeVar("T")

_JSON_SINCE = (24, 11)
"""The first version whose ``--json`` is known to report where jobs are planned."""

_NO_JSON = re.compile(r"json|serializer|unrecognized option|invalid option", re.IGNORECASE)

_KEEP_CONFIG, _KEEP_PARTITIONS, _KEEP_RESERVATIONS, _KEEP_NODES = 600.0, 300.0, 120.0, 60.0
_REST_AFTER_FAILURE = 600.0

# Slurm's defaults for SchedulerParameters.
_BF_INTERVAL, _BF_MAX_JOB_TEST, _SCHED_INTERVAL = 30, 500, 60


class SlurmQueries:
    """Queries Slurm; every method may raise `BatchSystemError`, and `CommandNotFound` from the runner.

    The clock returns seconds since the epoch.
    """

    def __init__(self, run: Runner, clock: Callable[[], float]) -> None:
        self._run = run
        self._clock = clock
        self._kept: dict[str, tuple[float, object]] = {}
        self._json: bool | None = None
        self._accounting_failed = -math.inf

    def _ask(self, parse: Callable[[str], T], *arguments: str) -> T:
        label = " ".join(filter(str.isalpha, arguments))
        try:
            answer = self._run(*arguments)
        except BatchSystemError:
            self._kept.clear()
            raise
        try:
            return parse(answer)
        except ValueError as error:
            self._kept.clear()
            raise UnreadableAnswer(f"{label} returned output that cannot be parsed: {error}") from None

    def _keep(self, key: str, seconds: float, ask: Callable[[], T]) -> T:
        now = self._clock()
        if key not in self._kept or not 0 <= now - self._kept[key][0] < seconds:
            self._kept[key] = (now, ask())
        return cast("T", self._kept[key][1])

    def jobs(self) -> list[SlurmJob]:
        """Query all jobs, including those that ended in the last minutes: the controller sends them anyway."""
        if self._prefers_json():
            try:
                return self._ask(parse_json_jobs, "squeue", "--json", "--all", "--states=all")
            except BatchSystemError as error:
                self._give_up_json(error)
        return self._ask(parse_jobs, "squeue", "--noheader", "--all", "--states=all", "--Format", JOB_FORMAT)

    def nodes(self, *, afresh: bool) -> dict[str, Node]:
        """Query all nodes; unless `afresh`, return the same object as last time within a minute."""
        if afresh:
            self._kept.pop("nodes", None)
        return self._keep("nodes", _KEEP_NODES, self._nodes)

    def _nodes(self) -> dict[str, Node]:
        if self._prefers_json():
            try:
                return self._ask(parse_json_nodes, "scontrol", "--all", "--json", "show", "nodes")
            except BatchSystemError as error:
                self._give_up_json(error)
        return self._ask(parse_nodes, "scontrol", "--all", "--details", "show", "nodes")

    def _prefers_json(self) -> bool:
        if self._json is None:
            self._json = self.version() >= _JSON_SINCE
        return self._json

    def _give_up_json(self, error: BatchSystemError) -> None:
        """Stop using JSON if this Slurm was built without it; re-raise any other error."""
        if not _NO_JSON.search(str(error)):
            raise error
        self._json = False

    def version(self) -> tuple[int, int]:
        """Return the version of the commands, at no cost to the controller."""
        return self._keep("version", _KEEP_CONFIG, lambda: self._ask(_version, "scontrol", "--version"))

    def config(self) -> dict[str, str]:
        """Query the configuration."""
        return self._keep("config", _KEEP_CONFIG, lambda: self._ask(_config, "scontrol", "show", "config"))

    def partitions(self) -> dict[str, Partition]:
        """Query the partitions, including hidden ones."""
        preempt_type = self.config().get("PreemptType", "")
        return self._keep(
            "partitions",
            _KEEP_PARTITIONS,
            lambda: self._ask(
                lambda text: parse_partitions(text, preempt_type), "scontrol", "--all", "show", "partition"
            ),
        )

    def reservations(self) -> tuple[Reservation, ...]:
        """Query the reservations."""
        return self._keep(
            "reservations",
            _KEEP_RESERVATIONS,
            lambda: self._ask(parse_reservations, "scontrol", "--all", "show", "reservation"),
        )

    def queue_length(self) -> int:
        """Return how many pending jobs, of all users, the main scheduler found in its last pass."""
        return self._ask(_queue_length, "sdiag")

    @property
    def scheduling_interval(self) -> float:
        """Return the longest time between two passes of the main scheduler, seconds."""
        return float(_whole(self._scheduler_words(), "sched_interval", _SCHED_INTERVAL))

    def _scheduler_words(self) -> dict[str, str]:
        pairs = (item.partition("=") for item in self.config().get("SchedulerParameters", "").split(","))
        return {key.strip(): value for key, _, value in pairs}

    def scheduling(self) -> Scheduling:
        """Return the parameters of the scheduler, from the configuration."""
        config = self.config()
        words = self._scheduler_words()
        major, minor = self.version()
        version = f"{major}.{minor:02}"
        if config.get("SchedulerType") == "sched/builtin":
            return Scheduling("slurm", version, _whole(words, "sched_interval", _SCHED_INTERVAL))
        return Scheduling(
            "slurm",
            version,
            _whole(words, "bf_interval", _BF_INTERVAL),
            _whole(words, "bf_max_job_test", _BF_MAX_JOB_TEST),
        )

    def has_accounting(self) -> bool:
        """Return whether there is an accounting database that has not failed recently."""
        config = self.config()
        has = config.get("AccountingStorageType", "").endswith("slurmdbd")
        # A clock that was set back must not disable the database for hours.
        return has and not 0 <= self._clock() - self._accounting_failed < _REST_AFTER_FAILURE

    def accounting(self, parse: Callable[[str], T], *arguments: str) -> T | None:
        """Query the database; ``None`` if there is no database or command, or no answer: on some sites it hangs.

        After a failure it is not queried for ten minutes.
        """
        if not self.has_accounting():
            return None
        try:
            return parse(self._run(*arguments))
        except (BatchSystemError, CommandNotFound, ValueError):
            self._accounting_failed = self._clock()
            return None

    def ended_jobs(self, job_ids: Collection[str]) -> dict[str, str]:
        """Query the database for jobs that the controller has purged: id -> state in Slurm's terms."""
        if not job_ids:
            return {}
        rows = self.accounting(_rows, "sacct", "-n", "-P", "-X", "-j", ",".join(job_ids), "--format", "JobIDRaw,State")
        return {row[0]: row[1] for row in rows or () if len(row) == 2}

    def preemption_of(self, qos: str) -> tuple[bool, float] | None:
        """Return whether jobs of a QOS may be preempted, and their grace in seconds; ``None`` if unknown."""
        return self._keep(f"qos {qos}", _KEEP_CONFIG, lambda: self._preemption_of(qos))

    def _preemption_of(self, qos: str) -> tuple[bool, float] | None:
        rows = self.accounting(_rows, "sacctmgr", "-n", "-P", "show", "qos", "format=Name,Preempt,GraceTime")
        if rows is None:
            return None
        full = [row for row in rows if len(row) == 3]
        grace = next((parse_seconds(row[2]) for row in full if row[0] == qos), None)
        return any(qos in row[1].split(",") for row in full), grace or 0.0

    def associations_of(self, user: str) -> Sequence[Sequence[str]] | None:
        """Query which accounts and QOS a user may use: rows (account, QOS, QOS, …); ``None`` if unknown."""
        rows = self.accounting(
            _rows, "sacctmgr", "-n", "-P", "show", "associations", f"user={user}", "format=Account,QOS"
        )
        return None if rows is None else [(row[0], *row[-1].split(",")) for row in rows if len(row) == 2]

    def own_jobs(self, user: str) -> dict[str, str]:
        """Query the names of a user's live jobs: id -> name."""
        return self._ask(_names, "squeue", "--noheader", f"--user={user}", "--Format", "JobID:\t,Name:\t")

    def run(self, *arguments: str) -> str:
        """Run a command that changes something, or whose output is not used."""
        return self._run(*arguments)


def _version(text: str) -> tuple[int, int]:
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text[:80]!r} is not a version")
    return int(match[1]), int(match[2])


def _config(text: str) -> dict[str, str]:
    config = parse_config(text)
    if "SchedulerType" not in config:
        raise ValueError("SchedulerType is missing")
    return config


def _whole(words: dict[str, str], key: str, default: int) -> int:
    value = words.get(key, "")
    return int(value) if value.isdecimal() and int(value) > 0 else default


def _queue_length(text: str) -> int:
    match = re.search(r"Main schedule.*?Last queue length:\s*(\d+)", text, re.DOTALL)
    if match is None:
        raise ValueError("the main scheduler's last queue length is missing")
    return int(match[1])


def _rows(text: str) -> list[list[str]]:
    return [line.split("|") for line in text.splitlines() if line]


def _names(text: str) -> dict[str, str]:
    names = {}
    for line in text.splitlines():
        job, tab, name = line.partition("\t")
        if not tab or not job.isdecimal():
            raise ValueError(f"line {line[:80]!r} is not a job id and a name")
        names[job] = name.removesuffix("\t")
    return names
