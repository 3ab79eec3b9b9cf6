"""Query Slurm, as an ordinary user, for windows and the states of our jobs."""

from __future__ import annotations

import os
import pwd
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from freetrain_parsl.errors import BatchSystemError, CommandNotFound, InvalidSettings, did_you_mean
from freetrain_parsl.planning.model import BlockTerms
from freetrain_parsl.windows.availability_profile import NodeNeeds, find_windows, gpus_of
from freetrain_parsl.windows.base import BlockState, BlockStatus, Survey, WindowSource
from freetrain_parsl.windows.commands import Commands
from freetrain_parsl.windows.hidden_queue import hides_jobs
from freetrain_parsl.windows.slurm.jobs import block_status, plain_features, sort_jobs
from freetrain_parsl.windows.slurm.known_nodes import KnownNodes
from freetrain_parsl.windows.slurm.queries import SlurmQueries
from freetrain_parsl.windows.slurm.vocabulary import HOLDS_NODES, block_state, explain_complaint
from freetrain_parsl.windows.state import BatchState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from freetrain_parsl.windows.availability_profile import Staircase
    from freetrain_parsl.windows.base import Refusal
    from freetrain_parsl.windows.commands import Runner
    from freetrain_parsl.windows.slurm.jobs import SlurmJob
    from freetrain_parsl.windows.state import Node, Partition, PendingJob, RunningJob

__all__ = ["SlurmWindowSource", "user_name"]

_MINUTE = 60.0
_MARKS_PLANNED = (21, 8)
"""The first version that marks idle nodes as planned."""

_EFFORT_WITH_NODES, _EFFORT_WITH_STATISTICS = 1.5, 2.0
"""Cost of a round with a query for nodes, or for statistics too, relative to one for the queue only; keeps the rate
below 12 requests a minute."""

_PLAIN_ENDS = frozenset(("CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"))
"""States of a job that has ended and left its nodes healthy."""


class SlurmWindowSource(WindowSource):
    """Finds the windows of one partition of a Slurm cluster.

    Parameters
    ----------
    partition
        Partition to which blocks are submitted; ``None`` for the cluster's default.
    account, qos
        Account and QOS of blocks; ``None`` for the user's default.
    constraint
        Features that the nodes must have, ``a`` or ``a&b``.
    exclusive
        Blocks take whole nodes.
    cpus_per_node, gpus_per_node, memory_per_node
        Resources that a block requests on each node; memory in MiB.
    user
        Owner of our jobs; ``None`` for the calling user.
    run
        Runs commands; ``None`` for this machine's.
    clock
        Returns the time, seconds since the epoch.

    Raises
    ------
    InvalidSettings
        The constraint is more than a plain "and" of features.
    """

    def __init__(
        self,
        *,
        partition: str | None = None,
        account: str | None = None,
        qos: str | None = None,
        constraint: str | None = None,
        exclusive: bool = True,
        cpus_per_node: int | None = None,
        gpus_per_node: int | None = None,
        memory_per_node: int | None = None,
        user: str | None = None,
        run: Runner | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        features = plain_features(constraint or "")
        if features is None:
            raise InvalidSettings(
                f"constraint {constraint!r}: only features joined by '&' are supported, e.g. 'a100&nvme'"
            )
        self.partition = partition
        self.account = account
        self.qos = qos
        self.user = user or user_name()
        self._needs = NodeNeeds(
            partition or "", exclusive, cpus_per_node or 1, gpus_per_node or 0, memory_per_node or 0, features
        )
        self._clock = clock
        self._queries = SlurmQueries(run or Commands(), clock)
        self._cancelled: set[str] = set()
        self._known = KnownNodes()
        self._described: Mapping[str, Node] | None = None

    def survey(self, job_ids: Sequence[str] = ()) -> Survey:
        """Query jobs and nodes, and rarely more."""
        state, records = self._ask()
        partition = self._own_partition(state.partitions)
        staircase = self._staircase(state, partition, job_ids)
        return Survey(
            time=state.time,
            windows=staircase.windows,
            blocks=self._statuses(job_ids, records),
            terms=BlockTerms(
                start_delay=state.scheduling.cycle,
                walltime_step=_MINUTE,
                max_walltime=partition.max_walltime,
                min_nodes=partition.min_nodes,
                max_nodes=partition.max_nodes,
                hides_waiting=state.hides_jobs and not partition.preemptible,
                may_wait=partition.preemptible and partition.min_nodes == 1,
            ),
            wanted=staircase.wanted,
            notes=(*self._notes(), *staircase.notes),
            unused=staircase.unused,
            effort=self._effort(partition) if state.hides_jobs else 1.0,
            nodes=staircase.suitable or None,
        )

    def state(self) -> BatchState:
        """Return the state of the whole cluster."""
        return self._ask()[0]

    def staircase(self, job_ids: Sequence[str] = ()) -> Staircase:
        """Find the windows, and why the other nodes of the partition are in none."""
        state = self.state()
        return self._staircase(state, self._own_partition(state.partitions), job_ids)

    def _ask(self) -> tuple[BatchState, list[SlurmJob]]:
        partitions = self._with_qos(self._queries.partitions())
        scheduling = self._queries.scheduling()
        reservations = self._queries.reservations()
        now = self._clock()
        records = self._queries.jobs()
        try:
            running, pending = sort_jobs(records, partitions)
        except ValueError as error:
            raise BatchSystemError(f"squeue returned output that cannot be parsed: {error}") from None
        hidden = self._hides_jobs()
        nodes = self._current_nodes(records, running, now, hidden=hidden)
        yields = self._own_partition(partitions).preemptible if hidden else True
        waiting = 0 if yields else self._others_waiting(records, pending, now)
        state = BatchState(now, scheduling, nodes, running, pending, reservations, partitions, hidden, waiting)
        return state, records

    def _others_waiting(self, records: Sequence[SlurmJob], pending: Sequence[PendingJob], now: float) -> int:
        """Count other users' pending jobs, from the scheduler's statistics and our own jobs.

        The statistics are from the main scheduler's last pass, so they still include our jobs that have left the queue
        since.
        """
        since = now - self._queries.scheduling_interval
        ours = sum(job.eligible for job in pending)
        for record in records:
            if record.state in _PLAIN_ENDS:
                ours += record.ends is not None and record.ends >= since
            elif record.state in HOLDS_NODES:
                ours += record.start is not None and record.start >= since
        return max(0, self._queries.queue_length() - ours)

    @staticmethod
    def _effort(partition: Partition) -> float:
        return _EFFORT_WITH_NODES if partition.preemptible else _EFFORT_WITH_STATISTICS

    def _current_nodes(
        self, records: Sequence[SlurmJob], running: Sequence[RunningJob], now: float, *, hidden: bool
    ) -> Mapping[str, Node]:
        """Describe the nodes: from the queue, or by a query if the queue is not sufficient."""
        plain = {record.job for record in records if record.state in _PLAIN_ENDS}
        nodes = self._queries.nodes(afresh=hidden or not plain.issuperset(self._known.ended(running)))
        if nodes is not self._described:
            self._described = nodes
            self._known.describe(nodes, running)
        if hidden and self._queries.version() < _MARKS_PLANNED:
            return {name: replace(node, planned=node.idle) for name, node in nodes.items()}
        return self._known.with_jobs(running, now)

    def _hides_jobs(self) -> bool:
        config = self._queries.config()
        return hides_jobs(config.get("PrivateData", ""), self.user, config.get("SlurmUser", ""))

    def _with_qos(self, partitions: dict[str, Partition]) -> dict[str, Partition]:
        """Mark our partition as preemptible if our QOS is."""
        if self.qos is None or self._queries.config().get("PreemptType") != "preempt/qos":
            return partitions
        preemption = self._queries.preemption_of(self.qos)
        if preemption is None or not preemption[0]:
            return partitions
        own = self._own_partition(partitions)
        return {**partitions, own.name: replace(own, preemptible=True, grace=preemption[1])}

    def _notes(self) -> list[str]:
        """List what Slurm does not report here."""
        notes = []
        config = self._queries.config()
        if config.get("SchedulerType") == "sched/builtin":
            notes.append("Slurm runs without backfill here (sched/builtin): a block waits for every job before it")
        if config.get("PreemptType") == "preempt/qos":
            if self.qos is None:
                notes.append("preemption is by QOS here and `qos` is not set: blocks are assumed not to be preemptible")
            elif self._queries.preemption_of(self.qos) is None:
                notes.append(f"no database shows whether QOS {self.qos} is preemptible: it is assumed not to be")
        return notes

    def _own_partition(self, partitions: Mapping[str, Partition]) -> Partition:
        if self.partition is None:
            for partition in partitions.values():
                if partition.default:
                    return partition
            raise InvalidSettings("this Slurm has no default partition: set `partition`")
        if self.partition not in partitions:
            raise InvalidSettings(
                f"partition {self.partition!r} does not exist on this cluster{did_you_mean(self.partition, partitions)}"
            )
        return partitions[self.partition]

    def _staircase(self, state: BatchState, partition: Partition, ours: Collection[str]) -> Staircase:
        exclusive = self._needs.exclusive or not partition.shared
        return find_windows(state, replace(self._needs, partition=partition.name, exclusive=exclusive), ours)

    def _statuses(self, job_ids: Sequence[str], records: list[SlurmJob]) -> dict[str, BlockStatus]:
        asked = set(job_ids)
        statuses = {record.job: block_status(record) for record in records if record.job in asked}
        unclear = [job for job in job_ids if job not in statuses or self._was_cancelled_by_others(job, statuses[job])]
        for job, words in self._queries.ended_jobs(unclear).items():
            if job in asked:
                statuses[job] = self._accounted(words)
        return {job: statuses.get(job, BlockStatus(BlockState.UNKNOWN)) for job in job_ids}

    def _was_cancelled_by_others(self, job: str, status: BlockStatus) -> bool:
        return status.state is BlockState.CANCELLED and job not in self._cancelled

    def _accounted(self, words: str) -> BlockStatus:
        """Parse the state of a job as printed by sacct: ``CANCELLED by 1000``."""
        word, _, by = words.partition(" by ")
        state, sentence = block_state(word)
        if state is BlockState.CANCELLED and by:
            name = user_name(by)
            sentence = "was cancelled by its own user" if name == self.user else f"was cancelled by {name}"
        return BlockStatus(state, reason=sentence)

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs with one scancel."""
        if not job_ids:
            return
        self._cancelled.update(job_ids)
        try:
            self._queries.run("scancel", *job_ids)
        except BatchSystemError as error:
            if "invalid job id" not in str(error).lower():
                raise

    def find_jobs(self, prefix: str) -> dict[str, str]:
        """Query the jobs of this user only."""
        return {job: name for job, name in self._queries.own_jobs(self.user).items() if name.startswith(prefix)}

    def check(self, least_walltime: float) -> None:
        """Reject a partition, account, QOS or requirement with which no block can run."""
        for command in ("squeue", "sbatch", "scancel"):
            self._queries.run(command, "--version")
        partition = self._own_partition(self._queries.partitions())
        who = f"partition {partition.name!r}"
        if not partition.up:
            raise InvalidSettings(f"{who} is down: jobs in it do not start")
        if partition.max_walltime < least_walltime:
            raise InvalidSettings(
                f"{who} allows jobs of at most {partition.max_walltime:g} s, "
                f"a useful block needs {least_walltime:g} s: use another partition"
            )
        for what, mine, allowed in (
            ("account", self.account, partition.allow_accounts),
            ("QOS", self.qos, partition.allow_qos),
        ):
            if mine is not None and allowed and mine not in allowed:
                raise InvalidSettings(f"{what} {mine!r} may not use {who}; it is for {', '.join(sorted(allowed))}")
        if self._hides_jobs() and not partition.preemptible:
            self._check_signs(who)
        self._check_association()
        self._check_needs(partition)

    def gpus_on_nodes(self) -> frozenset[int]:
        """Return the numbers of GPUs of the partition's nodes, from their GRES."""
        nodes = self._queries.nodes(afresh=False)
        names = self._own_partition(self._queries.partitions()).nodes
        return gpus_of((nodes[name] for name in names if name in nodes), self._needs)

    def _check_signs(self, who: str) -> None:
        """Reject a site that hides other users' jobs so completely that free nodes cannot be determined."""
        why = "does not mark planned nodes" if self._queries.version() < _MARKS_PLANNED else ""
        try:
            self._queries.queue_length()
        except (BatchSystemError, CommandNotFound) as error:
            why = f"does not report how many are pending ({error})"
        if why:
            raise InvalidSettings(
                f"this Slurm hides other users' jobs and {why}, so it is unknown which idle nodes of {who} are "
                f"free: use a partition whose jobs may be preempted"
            )

    def _check_association(self) -> None:
        """Check with the database, if there is one, that the user may use the account and the QOS."""
        if "associations" not in self._queries.config().get("AccountingStorageEnforce", ""):
            return
        rows = self._queries.associations_of(self.user)
        if not rows:
            return
        accounts = {row[0] for row in rows}
        if self.account is not None and self.account not in accounts:
            raise InvalidSettings(
                f"account {self.account!r} may not be charged by user {self.user}"
                f"{did_you_mean(self.account, accounts)}; yours: {', '.join(sorted(accounts))}"
            )
        qos = {name for row in rows if self.account in (None, row[0]) for name in row[1:] if name}
        if self.qos is not None and qos and self.qos not in qos:
            raise InvalidSettings(
                f"QOS {self.qos!r} may not be used by user {self.user}{did_you_mean(self.qos, qos)}; "
                f"yours: {', '.join(sorted(qos))}"
            )

    def _check_needs(self, partition: Partition) -> None:
        nodes = self._queries.nodes(afresh=False)
        needs = self._needs
        known = [nodes[name] for name in partition.nodes if name in nodes]
        for feature in sorted(needs.features):
            if not any(feature in node.features for node in known):
                features = sorted({word for node in known for word in node.features})
                raise InvalidSettings(
                    f"constraint {feature!r}: no node of partition {partition.name!r} has that feature"
                    f"{did_you_mean(feature, features)}"
                )
        for what, asked, most in (
            ("CPUs", needs.cpus, max((node.cpus for node in known), default=0)),
            ("GPUs", needs.gpus, max((node.gpus for node in known), default=0)),
            ("MiB of memory", needs.memory, max((node.memory for node in known), default=0)),
        ):
            if asked > most:
                raise InvalidSettings(
                    f"no node of partition {partition.name!r} has {asked} {what}: the largest has {most}"
                )

    def explain_refusal(self, complaint: str) -> Refusal:
        """Explain in plain English why sbatch rejected a job."""
        return explain_complaint(complaint)


def user_name(uid: str = "") -> str:
    """Return the name of a user, by default the calling one."""
    number = int(uid) if uid.isdecimal() else os.getuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # a container, or a directory service that does not respond: Slurm accepts the number as well
        return str(number)
