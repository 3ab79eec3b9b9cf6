"""Windows on PBS Professional and OpenPBS, from queries available to an ordinary user.

A round is two commands, ``qstat -f`` and ``pbsnodes -av``; queues, server and reservations are queried only every few
minutes, and the history only when one of our jobs has left the queue.
"""

from __future__ import annotations

import getpass
import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from freetrain_parsl.errors import BatchSystemError, CommandNotFound, InvalidSettings, did_you_mean
from freetrain_parsl.extensions.pbs.jobs import block_status, constraints, jobs_of
from freetrain_parsl.extensions.pbs.parsers import (
    EXPRESS_PRIORITY,
    express_priority,
    parse_queues,
    parse_reservations,
    parse_server,
    parse_state,
    partitions_of,
    preempting_queue,
)
from freetrain_parsl.extensions.pbs.values import as_mebibytes, as_number, as_text, read_answer, write_duration
from freetrain_parsl.extensions.pbs.vocabulary import explain_complaint
from freetrain_parsl.planning.model import BlockTerms
from freetrain_parsl.windows.availability_profile import NodeNeeds, find_windows, gpus_of
from freetrain_parsl.windows.base import BlockState, BlockStatus, Survey, WindowSource
from freetrain_parsl.windows.commands import Commands

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from freetrain_parsl.extensions.pbs.parsers import PbsServer
    from freetrain_parsl.windows.availability_profile import Staircase
    from freetrain_parsl.windows.base import Refusal
    from freetrain_parsl.windows.commands import Runner
    from freetrain_parsl.windows.state import BatchState, Reservation

__all__ = ["PbsWindowSource", "pbs_walltime_request"]

_SITE_SECONDS = 300.0  # queues and server change only when an administrator changes them
_RESERVATION_SECONDS = 60.0
_PREEMPTIBLE_NAME = re.compile(r"preempt", re.IGNORECASE)
_GONE = re.compile(r"Unknown Job Id|Job has finished|already|in progress|invalid for state", re.IGNORECASE)
_JOB_ID = re.compile(r"\d+(?:\[\d*\])?(?:\.[\w.-]+)?")


def pbs_walltime_request(least: float, most: float) -> str:
    """Format a shrink-to-fit walltime request for ``qsub -l``; seconds.

    PBS starts such a job as soon as `least` fits and gives it as much of `most` as fits, to the second.

    Raises
    ------
    InvalidSettings
        `least` is less than a second or more than `most`.
    """
    if not 1 <= least <= most:
        raise InvalidSettings(f"a shrink-to-fit walltime needs 1 s <= least <= most, got {least} and {most}")
    return f"min_walltime={write_duration(least)},max_walltime={write_duration(most)}"


class _Site(NamedTuple):
    """Data that rarely changes."""

    queues: Mapping[str, Mapping[str, Any]]
    server: PbsServer
    preemptible: tuple[str, ...]
    notes: tuple[str, ...]


class PbsWindowSource(WindowSource):
    """Finds windows on PBS.

    Parameters
    ----------
    queue
        Queue to which blocks are submitted; ``None`` for the server's default.
    account
        Account to charge; PBS does not list the valid ones, so it is not checked.
    select_options
        Resources of each node besides CPUs, as in ``PBSProProvider``: ``ngpus=4:system=polaris``.
    cpus_per_node, gpus_per_node
        Resources that a block requests on each node.
    user
        Owner of our jobs; ``None`` for the calling user.
    preemptible
        Whether jobs of `queue` may be preempted. ``None`` to determine it from the queues' priorities or a name such
        as ``preemptable``; `Survey.notes` contains the result.
    run
        Runs a command; ``None`` for the real commands.
    clock
        Seconds; determines when data is queried again.
    """

    def __init__(
        self,
        *,
        queue: str | None = None,
        account: str | None = None,
        select_options: str = "",
        cpus_per_node: int | None = None,
        gpus_per_node: int | None = None,
        user: str | None = None,
        preemptible: bool | None = None,
        run: Runner | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.queue = queue
        self.account = account
        self.select_options = select_options
        self.cpus_per_node = cpus_per_node
        self.gpus_per_node = gpus_per_node
        self.user = user or getpass.getuser()
        self.preemptible = preemptible
        self._run = run or Commands()
        self._clock = clock
        self._site: tuple[float, _Site] | None = None
        self._reservations: tuple[float, tuple[Reservation, ...]] | None = None
        self._ended: dict[str, BlockStatus] = {}

    def survey(self, job_ids: Sequence[str] = ()) -> Survey:
        """Query the windows and our jobs."""
        site, state, jobs, notes = self._ask()
        listed = _match(job_ids, jobs)
        blocks = {job: block_status(jobs[name]) for job, name in listed.items()}
        self._ended = {job: status for job, status in self._ended.items() if job in job_ids}
        blocks.update(self._ended)
        vanished = [job for job in job_ids if job not in blocks]
        if vanished:
            self._ended.update(self._history(vanished))
            blocks.update(self._ended)
        stairs = self._stairs(site, state, list(listed.values()))
        partition = state.partitions[self._queue(site)]
        return Survey(
            time=state.time,
            windows=stairs.windows,
            blocks={job: blocks[job] for job in job_ids},
            terms=BlockTerms(
                start_delay=state.scheduling.cycle,
                walltime_step=1.0,
                max_walltime=partition.max_walltime,
                min_nodes=partition.min_nodes,
                max_nodes=partition.max_nodes,
            ),
            wanted=stairs.wanted,
            notes=(*notes, *stairs.notes),
            unused=stairs.unused,
            nodes=stairs.suitable or None,
        )

    def state(self) -> BatchState:
        """Query all data needed for windows."""
        return self._ask()[1]

    def staircase(self, job_ids: Sequence[str] = ()) -> Staircase:
        """Query the windows, and why each other node is in none; `job_ids` are ours."""
        site, state, jobs, _ = self._ask()
        return self._stairs(site, state, list(_match(job_ids, jobs).values()))

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Delete jobs in one command."""
        if not job_ids:
            return
        try:
            self._run("qdel", *job_ids)
        except BatchSystemError as error:
            # qdel processes the whole list and reports errors for jobs that had ended.
            if not _GONE.search(str(error)):
                raise

    def find_jobs(self, prefix: str) -> dict[str, str]:
        """Find our live jobs whose names begin with `prefix`."""
        jobs = jobs_of(read_answer(self._run("qstat", "-f", "-F", "json"), "qstat -f").content, "qstat -f")
        names = {
            job: as_text(attributes.get("Job_Name")) for job, attributes in jobs.items() if self._is_ours(attributes)
        }
        return {job: name for job, name in names.items() if name.startswith(prefix)}

    def check(self, least_walltime: float) -> None:
        """Reject a queue that is unknown, closed, not permitted, or too short."""
        site = self._site_now()
        name = self._queue(site)
        attributes = site.queues[name]
        if as_text(attributes.get("enabled")).lower() != "true":
            raise InvalidSettings(f"queue {name} accepts no jobs (it is not enabled); use another one or ask the site")
        self._check_access(name, attributes)
        limit = partitions_of(site.queues, (), site.server)[name].max_walltime
        if limit < least_walltime:
            raise InvalidSettings(
                f"queue {name} allows jobs of at most {limit:g} s, a useful block needs {least_walltime:g} s; "
                f"use another queue"
            )
        if not site.server.shows_others and name not in site.preemptible:
            raise InvalidSettings(
                f"PBS hides other users' jobs here, so it is unknown when the idle nodes of queue {name} are needed; "
                f"use a queue whose jobs may be preempted (preemptible=True)"
            )

    def explain_refusal(self, complaint: str) -> Refusal:
        """Explain the output of ``qsub``."""
        return explain_complaint(complaint)

    # -- queries ---------------------------------------------------------------------------------------------

    def _ask(self) -> tuple[_Site, BatchState, dict[str, Mapping[str, Any]], tuple[str, ...]]:
        try:
            site = self._site_now()
            state, jobs, notes = parse_state(
                self._run("qstat", "-f", "-F", "json"),
                self._run("pbsnodes", "-av", "-F", "json"),
                site.queues,
                site.server,
                self._reservations_now(),
                preemptible=site.preemptible,
            )
        except BatchSystemError:
            self._site = self._reservations = None  # a restarted server may have changed
            raise
        if not site.server.shows_others:
            notes = (*notes, "PBS hides other users' jobs here: it is unknown when they need the idle nodes")
        return site, state, jobs, (*site.notes, *notes)

    def _site_now(self) -> _Site:
        now = self._clock()
        if self._site is None or not 0 <= now - self._site[0] < _SITE_SECONDS:
            queues_answer = read_answer(self._run("qstat", "-Qf", "-F", "json"), "qstat -Qf")
            server_answer = read_answer(self._run("qstat", "-Bf", "-F", "json"), "qstat -Bf")
            queues, server = parse_queues(queues_answer), parse_server(server_answer)
            preemptible, notes = self._preemptible(queues, server)
            notes = (*queues_answer.notes, *server_answer.notes, *notes)
            self._site = now, _Site(queues, server, preemptible, notes)
        return self._site[1]

    def _preemptible(
        self, queues: Mapping[str, Mapping[str, Any]], server: PbsServer
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Determine whether jobs of our queue may be preempted, and on which evidence."""
        queue = self.queue or server.default_queue
        if self.preemptible is not None or queue not in queues:
            return ((queue,), ()) if self.preemptible else ((), ())
        if _PREEMPTIBLE_NAME.search(queue):
            return (queue,), (f"jobs of queue {queue} are assumed to be preemptible, because of its name",)
        priorities = [as_number(attributes.get("Priority")) for attributes in queues.values()]
        if len(set(priorities)) == 1:
            return (), ()
        notes: tuple[str, ...] = ()
        try:
            express = express_priority(self._run("qmgr", "-c", "list sched"))
        except (BatchSystemError, CommandNotFound):
            express = EXPRESS_PRIORITY
            notes = (f"qmgr does not show preempt_queue_prio here: assumed to be PBS's default, {EXPRESS_PRIORITY:g}",)
        rival = preempting_queue(queue, queues, express)
        if rival is None:
            return (), notes
        found = (
            f"jobs of queue {queue} are assumed to be preemptible by those of {rival}, because of the queues' "
            f"priorities; set preemptible=False if this site does not preempt"
        )
        return (queue,), (*notes, found)

    def _reservations_now(self) -> tuple[Reservation, ...]:
        now = self._clock()
        if self._reservations is None or not 0 <= now - self._reservations[0] < _RESERVATION_SECONDS:
            self._reservations = now, parse_reservations(self._run("pbs_rstat", "-f"))
        return self._reservations[1]

    def _history(self, job_ids: Sequence[str]) -> dict[str, BlockStatus]:
        """Query the states of jobs that have left the queue."""
        found: dict[str, BlockStatus] = {}
        left = list(job_ids)
        while left:
            try:
                answer = self._run("qstat", "-x", "-f", "-F", "json", *left)
            except BatchSystemError as error:
                unknown = _named(str(error), left)
                if "Unknown Job Id" in str(error) and unknown is not None:
                    found[unknown] = BlockStatus(BlockState.UNKNOWN)
                    left.remove(unknown)
                    continue
                if "job history" not in str(error):
                    raise
                reason = "PBS keeps no history here"
                return {**found, **dict.fromkeys(left, BlockStatus(BlockState.UNKNOWN, reason=reason))}
            jobs = jobs_of(read_answer(answer, "qstat -x").content, "qstat -x")
            listed = _match(left, jobs)
            for job in left:
                found[job] = block_status(jobs[listed[job]]) if job in listed else BlockStatus(BlockState.UNKNOWN)
            break
        return found

    # -- our queue -------------------------------------------------------------------------------------------

    def _stairs(self, site: _Site, state: BatchState, ours: Sequence[str]) -> Staircase:
        return find_windows(state, self._needs(self._queue(site)), ours)

    def gpus_on_nodes(self) -> frozenset[int]:
        """Return the numbers of GPUs of the queue's nodes, from their ``resources_available.ngpus``."""
        site, state, _, _ = self._ask()
        needs = self._needs(self._queue(site))
        names = state.partitions[needs.partition].nodes
        return gpus_of((state.nodes[name] for name in names if name in state.nodes), needs)

    def _queue(self, site: _Site) -> str:
        name = self.queue or site.server.default_queue
        if not name:
            raise InvalidSettings("PBS has no default queue here; specify one (`qstat -Q` lists them)")
        if name not in site.queues:
            hint = did_you_mean(name, site.queues)
            raise InvalidSettings(f"PBS has no queue {name!r}{hint}; `qstat -Q` lists them")
        return name

    def _needs(self, queue: str) -> NodeNeeds:
        pairs = (part.partition("=") for part in self.select_options.strip(":").split(":") if part)
        options = {name: value for name, _, value in pairs}
        return NodeNeeds(
            queue,
            cpus=self.cpus_per_node or 1,
            gpus=self.gpus_per_node or int(as_number(options.get("ngpus"))),
            memory=as_mebibytes(options.get("mem")),
            features=constraints(options),
        )

    def _is_ours(self, attributes: Mapping[str, Any]) -> bool:
        return self.user in (as_text(attributes.get("euser")), as_text(attributes.get("Job_Owner")).partition("@")[0])

    def _check_access(self, name: str, attributes: Mapping[str, Any]) -> None:
        if as_text(attributes.get("acl_user_enable")).lower() != "true":
            return
        users = [entry.partition("@")[0] for entry in as_text(attributes.get("acl_users")).split(",")]
        # An entry with a sign (+bob, -bob, +*@host) follows its own rules: left to qsub.
        if self.user not in users and not any(entry[:1] in ("+", "-", "*") for entry in users):
            raise InvalidSettings(f"user {self.user} may not use queue {name}; use another one or ask the site")


def _match(job_ids: Sequence[str], jobs: Mapping[str, Any]) -> dict[str, str]:
    """Find jobs by id: ``qsub`` may name the server in full where ``qstat`` does not."""
    by_number = {job.partition(".")[0]: job for job in jobs}
    found = ((job, job if job in jobs else by_number.get(job.partition(".")[0])) for job in job_ids)
    return {job: name for job, name in found if name is not None}


def _named(complaint: str, job_ids: Sequence[str]) -> str | None:
    """Find which of our jobs an error message is about."""
    numbers = {match.partition(".")[0] for match in _JOB_ID.findall(complaint)}
    return next((job for job in job_ids if job.partition(".")[0] in numbers), None)
