"""`FreeTrainExecutor`: a Parsl executor that runs its workers on the idle nodes of a busy cluster."""

from __future__ import annotations

import gc
import logging
import re
import secrets
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typeguard
from parsl.dataflow.memoization import id_for_memo
from parsl.executors.errors import InvalidResourceSpecification
from parsl.providers.base import ExecutionProvider

from freetrain_parsl.errors import InvalidSettings, TrainingCancelled, TrainingInterrupted
from freetrain_parsl.executor.addresses import check_interface, resolved
from freetrain_parsl.executor.batch.exit_cleanup import OrderlyExit
from freetrain_parsl.executor.batch.providers import refuse_provider
from freetrain_parsl.executor.batch.submitter import JobSubmitter, SubmitterMessage
from freetrain_parsl.executor.check_suggestion import check_suggestion
from freetrain_parsl.executor.driver.driver_fence import DriverFence
from freetrain_parsl.executor.driver.loop import CancelTraining, ControlLoop
from freetrain_parsl.executor.driver.settler import unshared
from freetrain_parsl.executor.driver.slot_cycle import SlotTaskEnded
from freetrain_parsl.executor.driver.slot_server import SlotServer
from freetrain_parsl.executor.htex.executor import PlannedHtex
from freetrain_parsl.executor.htex.interchange_watch import HtexInterchange, InterchangeWatch
from freetrain_parsl.executor.htex.launch import Container, check_node_python, node_command
from freetrain_parsl.executor.htex.node_start import IMAGE_CHOICES, START_FILES, node_start_for
from freetrain_parsl.executor.jobs.likeness import recall_rates
from freetrain_parsl.executor.jobs.request import (
    SPECIFICATION_KEY,
    Limits,
    SharedSettings,
    TrainingRequest,
    cache_identity,
)
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.executor.node_kinds import NodeKind, kinds_of, sized_for, units_per_node
from freetrain_parsl.executor.payloads.app_modules import NodeModules
from freetrain_parsl.executor.payloads.payloads import pack_or_refuse, pack_task
from freetrain_parsl.executor.payloads.value_files import ValueFiles
from freetrain_parsl.executor.run_directory import check_run_directory, keep_private, log_to
from freetrain_parsl.executor.slot.slot import SlotSettings, run_slot
from freetrain_parsl.executor.submissions import Submissions
from freetrain_parsl.executor.training_logs import LogWriter
from freetrain_parsl.executor.values.tracker import parse_trackers
from freetrain_parsl.executor.values.writer import ValueWriter
from freetrain_parsl.planning.blocks import least_walltime
from freetrain_parsl.planning.policies import resolve_policy
from freetrain_parsl.planning.policies.base import Policy
from freetrain_parsl.planning.settings import PlannerSettings
from freetrain_parsl.protocol.options import SessionOptions
from freetrain_parsl.settings import CheckpointSettings, RateLimits, TrainingSettings
from freetrain_parsl.settings_checks import check_duration
from freetrain_parsl.storage.posix import directory_name
from freetrain_parsl.storage.root import prepare_root
from freetrain_parsl.typed_arguments import wrong_types_refused
from freetrain_parsl.windows.base import WindowSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from freetrain_parsl.protocol.journal import Record

logger = logging.getLogger(__name__)

__all__ = ["FreeTrainExecutor"]

id_for_memo.register(TrainingRequest, cache_identity)  # for apps with `cache=True`

_PORTS = (55000, 56000)  # of the control channel; the same range as HTEX's


class FreeTrainExecutor(PlannedHtex):
    """A Parsl executor that runs training apps in the windows of a batch system, and ordinary apps in one slot each.

    Blocks are requested and released by a planner, not by Parsl's scaling strategy. Blocks that end, are preempted or
    are refused are expected and never cause an app to fail. On exit, all jobs and processes of the executor are ended.

    Parameters
    ----------
    label
        Parsl's name for this executor.
    provider
        Submits blocks; its ``nodes_per_block`` and ``walltime`` are replaced for each block. Default: the embedded
        cluster, a small batch system on this machine.
    windows
        Finds the windows. Default: the provider's own (``provider.window_source()``).
    node_kinds
        The kinds of nodes, where there are several: each has its own provider, windows, slots and accelerators, which
        are not given otherwise.
    policy
        Decides which training job gets how many nodes: a `Policy`, or the name of one with its defaults.

        ``milp``
            the optimal number of nodes of each training job, rescaling costs included;
        ``window``
            like ``milp``, but also considers when nodes close;
        ``equal-share``
            the same number of nodes for each: a simple baseline;
        ``fcfs``
            first come, first served, without backfilling;
        ``ones``
            ``milp``, followed by an evolutionary search if that has proven nothing in its time.

        Policies that spread jobs over parts of nodes, as published ones do, are for simulation and replay only.
    planner
        Assumptions about the site: start-up time, shortest useful block, …
    trainings
        Settings of training jobs: timeouts, restarts, threads.
    rate_limits
        Limits on the load on the batch system.
    checkpoint_dir
        Directory of the checkpoints; must be reachable from the nodes. A training job resumes from the checkpoints of
        its name that it finds there. Default: ``checkpoints`` in Parsl's run directory.
    checkpoints
        When checkpoints are written, and how many are kept.
    slots_per_node
        Number of slots per node: its number of accelerators, or 1.
    share_nodes
        Whether the planner assigns slots rather than whole nodes, if nodes of all kinds have equally many.
    grace
        Time between the batch system's signal and its kill.
    address
        IPv4 or IPv6 address at which nodes reach this host, or a host name, which is resolved here. Default: all
        addresses of its network interfaces; each node uses the first that answers.
    interface
        Network interface for the traffic between the members of a training job: its name, or, if names differ between
        nodes, its network (``10.1.0.0/16``). Default: the one that reaches the driver.
    node_python
        Python interpreter on the nodes: a path, or a command name such as ``python``, which is looked up on PATH after
        the provider's ``worker_init``. Its versions of Python, Parsl and FreeTrain must match the driver's. Default:
        the path of the driver's interpreter.
    container
        Container in which the nodes' worker pools run. Default: none.
    node_image
        Whether nodes start from an image of the Python environment on their own storage: ``"auto"``, if they would
        otherwise read it from a shared file system or wait long for it; ``"always"``; ``"full"``, with large libraries;
        or ``"off"``. Nodes that run their worker pool in a container start without an image.
    log_dir
        Directory of the training jobs' logs, one for each; see ``freetrain logs``. Default: ``logs`` in Parsl's run
        directory.
    tracker
        Tracker of the values of `session.log`, for training jobs that name none: ``"csv"``,
        ``"tensorboard"``, ``"mlflow"``, ``"wandb"``, ``"module:Class"``, a mapping from these to options, or a list.
    job_tag
        Part of this run's job names; identifies the jobs of a driver that was killed. Default: random.
    available_accelerators, worker_port_range, worker_debug, encrypted
        As in Parsl's HighThroughputExecutor; `encrypted` also applies to the slots' control channel.

    Raises
    ------
    InvalidSettings, CheckpointError
        A setting is out of range, or the checkpoint directory cannot be written.
    """

    @wrong_types_refused
    @typeguard.typechecked
    def __init__(
        self,
        label: str = "freetrain",
        provider: ExecutionProvider | None = None,
        windows: WindowSource | None = None,
        *,
        node_kinds: Sequence[NodeKind] = (),
        policy: str | Policy = "milp",
        planner: PlannerSettings | None = None,
        trainings: TrainingSettings | None = None,
        rate_limits: RateLimits | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoints: CheckpointSettings | None = None,
        slots_per_node: int = 1,
        share_nodes: bool = True,
        grace: timedelta = timedelta(seconds=5),
        address: str | None = None,
        interface: str | None = None,
        node_python: str | None = None,
        container: Container | None = None,
        node_image: str = "auto",
        log_dir: str | Path | None = None,
        tracker: Any = None,
        job_tag: str | None = None,
        available_accelerators: int | list[str] = 0,
        worker_port_range: tuple[int, int] = (54000, 55000),
        worker_debug: bool = False,
        encrypted: bool = True,
    ) -> None:
        planner = planner or PlannerSettings()
        kinds = kinds_of(node_kinds, provider, windows, slots_per_node, available_accelerators)
        for kind in kinds.values():
            refuse_provider(kind.provider, kind.windows, planner.max_nodes_per_block)
        if not re.fullmatch(r"[A-Za-z0-9._-]+", label):
            raise InvalidSettings(f"FreeTrainExecutor: label {label!r} may hold letters, digits, '.', '_' and '-' only")
        check_duration("FreeTrainExecutor: grace", grace)
        if checkpoint_dir is not None:
            prepare_root(Path(checkpoint_dir))
        if interface is not None:
            check_interface(interface)
        own_address = getattr(next(iter(kinds.values())).provider, "driver_address", None)
        if node_python is not None:
            check_node_python(node_python)
        if node_image not in IMAGE_CHOICES:
            raise InvalidSettings(
                f"FreeTrainExecutor: node_image must be one of {', '.join(IMAGE_CHOICES)}, got {node_image!r}"
            )
        self.policy = policy
        self._policy = resolve_policy(policy)
        self.windows = windows
        self.node_kinds = tuple(node_kinds)
        self.planner = planner
        self.trainings = trainings or TrainingSettings()
        self.rate_limits = rate_limits or RateLimits()
        self.checkpoint_dir = checkpoint_dir
        self.checkpoints = checkpoints or CheckpointSettings()
        self.slots_per_node, self.share_nodes = slots_per_node, share_nodes
        self.grace, self.interface = grace, interface
        self.node_python, self.container = node_python, container
        self.node_image = node_image
        self.log_dir = log_dir
        self.tracker = tracker
        self._default_trackers = parse_trackers(tracker)
        super().__init__(
            kinds,
            own_address if address is None else resolved(address),
            job_tag or secrets.token_hex(4),
            node_start_for("off" if container is not None else node_image, node_python or sys.executable),
            label=label,
            launch_cmd=node_command(node_python, container, ()),
            worker_port_range=worker_port_range,
            worker_debug=worker_debug,
            max_workers_per_node=slots_per_node,
            available_accelerators=available_accelerators,
            encrypted=encrypted,
        )
        inits = [getattr(kind.provider, "worker_init", "") or "" for kind in self._kinds.values()]
        # The packages of another Python, or of a container, are not known here.
        self._node_modules = NodeModules(inits, known=node_python is None and container is None)
        self._driver: ControlLoop | None = None
        self._log_handler: logging.Handler | None = None
        self._logs: LogWriter | None = None
        self._values: ValueWriter | None = None
        self._checkpoint_root = Path()
        self._files: ValueFiles | None = None
        self._observers: dict[str, Callable[[Sequence[str]], None]] = {}
        self._submitter: JobSubmitter | None = None
        self._watch: InterchangeWatch | None = None
        self._refusal: Exception | None = None  # why nothing more is accepted, though training jobs may still run
        self._exit = OrderlyExit(self._end_blocks)
        self._slot_settings: SlotSettings | None = None
        self._submissions = Submissions()
        self._fence = DriverFence()

    def obey(self, fence: DriverFence) -> None:
        """Let a fence end this executor without changing its run; call it before `start`."""
        self._fence = fence

    # Parsl's executor interface.

    @property
    def journal_path(self) -> Path:
        """Path of this run's journal; it exists once the executor has started."""
        return Path(self.logdir) / "journal.sqlite"

    def start(self) -> None:
        """Start HTEX's interchange, the job submitter and the control loop."""
        run_dir = Path(self.run_dir).absolute()
        check_run_directory(run_dir)
        if run_dir != Path.cwd():  # equal only without a DataFlowKernel, and then it is not Parsl's directory
            run_dir.chmod(0o700)  # Parsl makes it world-readable, but it holds the user's data
        Path(self.logdir).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._checkpoint_root = root = Path(self.checkpoint_dir or Path(self.run_dir) / "checkpoints").absolute()
        root_identity = prepare_root(root)
        run = directory_name(f"{self.label}.{self.job_tag}")
        self._files = ValueFiles(root, root_identity, run, secrets.token_hex(8))
        self._files.clear()
        self._log_handler = log_to(Path(self.logdir) / "freetrain.log")
        log_dir = Path(self.log_dir or Path(self.run_dir) / "logs").absolute()
        self._logs = logs = LogWriter(log_dir, allowed=self._fence.allows)
        self._values = values = ValueWriter(root, Path(self.logdir).absolute(), allowed=self._fence.allows)

        def note(entry: Record) -> None:
            logs.note(entry)
            values.note(entry)

        def take_values(training: str, rows: Sequence[str]) -> None:
            values.take(training, rows)
            if (observer := self._observers.get(training)) is not None:
                observer(rows)

        starter = getattr(self.provider, "node_starter", "")
        self.launch_cmd = node_command(self.node_python, self.container, (run_dir, root, log_dir), starter)
        super().start()
        tell_files = self.node_start is not None and self.node_start.begin(Path(self.logdir).absolute() / START_FILES)
        source = self.window_source()
        planner_settings = self.planner.in_seconds()
        source.check(least_walltime(planner_settings))
        server = SlotServer(self.cert_dir, _PORTS, addresses := tuple(sorted(self.all_addresses)))
        heartbeat_timeout = self.trainings.heartbeat_timeout.total_seconds()
        poll_interval = self.rate_limits.poll_interval.total_seconds()
        self._slot_settings = SlotSettings(
            addresses=addresses,
            port=server.port,
            cert_dir=self.cert_dir,
            beat=min(1.0, heartbeat_timeout / 5),
            heartbeat_timeout=heartbeat_timeout,
            grace=self.grace.total_seconds(),
            interface=self.interface,
            log_dir=str(log_dir),
            files=self._files,
            bind_cores=self.trainings.bind_cores,
            tell_files=tell_files,
        )
        self._submitter = JobSubmitter(
            source,
            launch=self._launch,
            post=self._post,
            interval=poll_interval,
            submissions_per_minute=self.rate_limits.submissions_per_minute,
            max_refusals=self.rate_limits.max_refusals,
            max_failed_blocks=self.rate_limits.max_failed_blocks,
            last_words=self._last_words,
            job_prefix=self.job_prefix,
            require=self._fence.require,
        )
        self._watch = InterchangeWatch(HtexInterchange(self, self._submit_slot), self._post, self._interchange_is_lost)
        self._driver = ControlLoop(
            policy=self._policy,
            planner_settings=planner_settings,
            server=server,
            submitter=self._submitter,
            journal=Journal(self.journal_path, observe=note),
            shared_settings=SharedSettings(
                SessionOptions(
                    self.label,
                    checkpoint_root=root,
                    checkpoint_interval=self.checkpoints.interval,
                    save_margin=self.checkpoints.save_margin,
                    keep=self.checkpoints.keep,
                    threads=self.trainings.threads_per_slot,
                    root_identity=root_identity,
                ),
                costs=self.trainings.rescale_costs.in_seconds(),
                limits=Limits(self.trainings.peer_timeout.total_seconds(), max_restarts=self.trainings.max_restarts),
                values=self._files,
            ),
            slots_per_node=self.slots_per_node,
            share_nodes=self.share_nodes,
            node_kinds={name: kind.slots for name, kind in self._kinds.items() if name},
            outdated=3 * poll_interval,
            heartbeat_timeout=heartbeat_timeout,
            submit_slot=self._watch.submit,
            fail_all=self._fail_all,
            refuse_new=self._refuse_new,
            take_output=logs.take,
            take_values=take_values,
            check_driver=self._fence.check,
            clock=time.time,
            node_start=self.node_start,
        )
        logs.start()
        values.start()
        self._driver.start()
        self._submitter.start()
        self._watch.start()
        self._exit.arm()
        # A full collection stops the control loop, for 0.1 s or more if it looks at all that has been imported.
        gc.collect(1)
        gc.freeze()

    def submit(  # type: ignore[override]  # a training job's future is not HTEX's
        self, func: Callable[..., Any], resource_specification: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Submit a training job, or queue an ordinary task, whose `resource_specification` is empty; never blocks.

        Raises
        ------
        InvalidResourceSpecification
            It has keys that this executor does not support.
        InvalidApp
            A training job of that name is running, or something that its function uses cannot be pickled.
        TrainingCancelled
            It was cancelled before Parsl launched it, or this is one of Parsl's retries.
        """
        request: TrainingRequest | None = resource_specification.get(SPECIFICATION_KEY)
        if request is not None and self._submissions.was_cancelled(request):
            raise TrainingCancelled(f"training job {request.name!r} was cancelled")
        if (error := self._refusal or (self.executor_exception if self.bad_state_is_set else None)) is not None:
            raise unshared(error)
        if unknown := set(resource_specification) - {SPECIFICATION_KEY}:
            raise InvalidResourceSpecification(
                unknown, f"{self.label} takes no resource specification; its planner assigns the slots"
            )
        kwargs.pop("parsl_resource_specification", None)
        assert self._driver is not None, "Parsl starts an executor before it submits to it"
        assert self._values is not None, "likewise"
        if request is None:
            payload = pack_task(func, args, kwargs)
            self._node_modules.check(func, {type(value).__module__ for value in (*args, *kwargs.values())})
            task = self._submissions.add_task(payload)
            self._driver.post(task)
            self._fail_if_over()
            return task.future
        units = units_per_node([kind.slots for kind in self._kinds.values()], share_nodes=self.share_nodes)
        sized = sized_for(request, self._kinds, units)
        self._values.track(request.name, self._default_trackers if request.trackers is None else request.trackers)
        imported: set[str] = set()
        training = self._submissions.add_training(request, pack_or_refuse(func, args, kwargs, imported))
        training.request = sized  # the user's own identifies the call
        self._node_modules.check(func, imported)
        if line := check_suggestion([(func, request.options.code)]):
            logger.info("training job %s: %s", request.name, line)
        recall_rates(training, self._checkpoint_root, self.slots_per_node, units, self.trainings.threads_per_slot)
        self._driver.post(training)
        if self._submissions.was_cancelled(request):  # perhaps before it was posted
            self._driver.post(CancelTraining(training.future))
        self._fail_if_over()
        return training.future

    def cancel(self, future: Future[Any]) -> bool:
        """Cancel one training job, waiting or running, and keep its checkpoint; can be called from any thread.

        Its processes first save its state. Then `future` fails with `TrainingCancelled`, unless the training job has
        finished or failed by then, and its nodes become available to other training jobs. A training job that has not
        started, or that Parsl has not launched yet, also because it waits for the results of other apps, does not
        start. Parsl's retries do not run it again, but a new call of the app does, also with ``cache=True``.

        Parameters
        ----------
        future
            The future that the training app returned.

        Returns
        -------
        bool
            Whether it is being cancelled; false if it is done, not a training job of this executor, or waits for the
            results of other apps although Parsl was cleaned up: then it never ends.
        """
        if self._driver is None or future.done():
            return False
        driver = self._driver
        return self._submissions.cancel(future, self, lambda own: driver.post(CancelTraining(own)))

    def observe_values(self, training: str, observer: Callable[[Sequence[str]], None]) -> None:
        """Also pass the values that a job logs to a function as they arrive; call it before the job begins.

        `observer` gets rows as in `Logged`, in the control loop's thread, and must neither block nor raise. A training
        job that resumes passes again what it has logged before.
        """
        self._observers[training] = observer

    def stop_observing(self, training: str) -> None:
        """Undo `observe_values`."""
        self._observers.pop(training, None)

    def outstanding(self) -> int:
        """Return the number of training jobs and tasks that are not done."""
        return len(self._submissions)

    def shutdown(self, timeout: float = 10.0) -> None:
        """End slots, cancel all blocks, stop the threads and the interchange; futures that are not done fail."""
        if self._watch is not None:
            self._watch.stop(timeout)
        self._end_blocks(timeout)
        self._exit.disarm()
        if not self.bad_state_is_set:
            reason = f"executor {self.label!r} was shut down before this was done; checkpoints are kept"
            self._end_futures(TrainingInterrupted(reason))
        for files in (self._logs, self._values, self._files, self.node_start):
            if files is not None:
                files.close()
        super().shutdown(timeout)
        gc.unfreeze()
        keep_private(Path(self.run_dir))
        if self._log_handler is not None:
            logging.getLogger("freetrain_parsl").removeHandler(self._log_handler)
            self._log_handler.close()
            self._log_handler = None

    def _end_blocks(self, timeout: float = 10.0) -> None:
        if self._submitter is not None and self._driver is not None:
            self._driver.stop(timeout)
            self._submitter.close(timeout)

    # For the threads of the job submitter and the interchange watch.

    def _post(self, item: SubmitterMessage | Record | SlotTaskEnded) -> None:
        assert self._driver is not None, "the job submitter is started after the control loop"
        self._follow(item)
        self._driver.post(item)

    def _submit_slot(self, token: str) -> None:
        future: Future[Any] = super().submit(run_slot, {}, self._slot_settings, token)
        future.add_done_callback(lambda done: self._post(SlotTaskEnded(token, done.exception())))

    def _interchange_is_lost(self, reason: str) -> None:
        self._fail_all(TrainingInterrupted(f"{reason}; see {self.logdir}/interchange.log; checkpoints are kept"))

    # Futures.

    def set_bad_state_and_fail_all(self, exception: Exception) -> None:
        """Fail all futures that are not done; called by Parsl when the interchange fails permanently."""
        super().set_bad_state_and_fail_all(exception)
        self._fail_all(exception)

    def _refuse_new(self, error: Exception) -> None:
        logger.error("%s", error)
        self._refusal = error  # HTEX's bad state would end its result thread, and refuse slots of running blocks

    def _fail_all(self, error: Exception) -> None:
        if error not in (self._refusal, self._executor_exception):
            logger.error("%s", error)
        self._end_futures(error)

    def _fail_if_over(self) -> None:
        """Fail what was submitted while the executor ended: the control loop takes nothing more."""
        if self.bad_state_is_set and self.executor_exception is not None:
            self._submissions.fail_all(self.executor_exception)

    def _end_futures(self, error: Exception) -> None:
        """Fail all futures that are not done, and all later submissions."""
        self._executor_exception = error
        self._executor_bad_state.set()
        self._submissions.fail_all(error)
