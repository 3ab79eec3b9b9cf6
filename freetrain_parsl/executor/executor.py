"""`FreeTrainExecutor`: a Parsl executor that runs its workers on the idle nodes of a busy cluster."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typeguard
from parsl.dataflow.futures import AppFuture
from parsl.dataflow.memoization import id_for_memo
from parsl.executors.errors import InvalidResourceSpecification
from parsl.executors.high_throughput.executor import HighThroughputExecutor
from parsl.jobs.error_handlers import noop_error_handler
from parsl.providers.base import ExecutionProvider

from freetrain_parsl.errors import InvalidSettings, TrainingCancelled, TrainingInterrupted
from freetrain_parsl.executor.addresses import check_interface, driver_addresses, resolved
from freetrain_parsl.executor.batch.exit_cleanup import OrderlyExit
from freetrain_parsl.executor.batch.providers import refuse_provider, window_source_for
from freetrain_parsl.executor.batch.submitter import JobSubmitter, SubmitterMessage
from freetrain_parsl.executor.check_suggestion import check_suggestion
from freetrain_parsl.executor.driver.driver_fence import DriverFence
from freetrain_parsl.executor.driver.loop import CancelTraining, ControlLoop
from freetrain_parsl.executor.driver.settler import unshared
from freetrain_parsl.executor.driver.slot_cycle import SlotTaskEnded
from freetrain_parsl.executor.driver.slot_server import SlotServer
from freetrain_parsl.executor.htex.blocks import HtexBlocks
from freetrain_parsl.executor.htex.interchange_watch import HtexInterchange, InterchangeWatch, guard_sockets
from freetrain_parsl.executor.htex.launch import Container, check_node_python, node_command
from freetrain_parsl.executor.jobs.request import (
    SPECIFICATION_KEY,
    Limits,
    SharedSettings,
    TrainingRequest,
    cache_identity,
)
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.executor.logs.writer import LogWriter
from freetrain_parsl.executor.node_kinds import NodeKind, named_kinds, refuse_unknown_kinds
from freetrain_parsl.executor.payloads.node_modules import NodeModules
from freetrain_parsl.executor.payloads.payloads import functions_of, pack_or_refuse, pack_task
from freetrain_parsl.executor.payloads.value_files import ValueFiles
from freetrain_parsl.executor.run_directory import check_run_directory, keep_private, log_to
from freetrain_parsl.executor.slot.slot import SlotSettings, run_slot
from freetrain_parsl.executor.submissions import Submissions, call_off, request_of
from freetrain_parsl.executor.values.specs import parse_trackers
from freetrain_parsl.executor.values.writer import ValueWriter
from freetrain_parsl.interpreters import module_command
from freetrain_parsl.planning.blocks import least_walltime
from freetrain_parsl.planning.policies import resolve_policy
from freetrain_parsl.planning.policies.base import Policy
from freetrain_parsl.planning.settings import PlannerSettings
from freetrain_parsl.protocol.options import SessionOptions, digest_of
from freetrain_parsl.settings import CheckpointSettings, Manners, TrainingSettings
from freetrain_parsl.settings_checks import check_duration
from freetrain_parsl.storage.measurements import read_rates
from freetrain_parsl.storage.posix import directory_name
from freetrain_parsl.storage.root import prepare_root
from freetrain_parsl.typed_arguments import wrong_types_refused
from freetrain_parsl.windows.base import OUR_JOBS, WindowSource
from freetrain_parsl.windows.node_kinds import WindowsByKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from concurrent.futures import Future

    from freetrain_parsl.executor.driver.plain_tasks import Task
    from freetrain_parsl.executor.htex.interchange_watch import InterchangeEnded, InterchangeRestarted
    from freetrain_parsl.executor.jobs.request import Training
    from freetrain_parsl.protocol.journal import Record

logger = logging.getLogger(__name__)

__all__ = ["FreeTrainExecutor"]

id_for_memo.register(TrainingRequest, cache_identity)  # for apps with `cache=True`

_INTERCHANGE_COMMAND = tuple(module_command("freetrain_parsl.executor.htex.interchange"))

_HTEX_HEARTBEAT = 2  # seconds; also the time in which HTEX detects a worker process that died
_HTEX_HEARTBEAT_TIMEOUT = 30  # seconds
_PORTS = (55000, 56000)  # of the control channel; the same range as HTEX's


class FreeTrainExecutor(HighThroughputExecutor):
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
        Decides which training gets how many nodes: a `Policy`, or the name of one with its defaults.

        ``milp``
            the optimal number of nodes of each training, rescaling costs included;
        ``window``
            the same, also by when the nodes close;
        ``equal-share``
            as many nodes for each: a simple baseline;
        ``fcfs``
            first come, first served, without backfilling.

        Policies for hosts that jobs share, such as ``ones``, are refused: they are for simulation and replay.
    planner
        Assumptions about the site: start-up time, shortest useful block, …
    trainings
        How trainings run: timeouts, restarts, threads.
    manners
        Limits on the load on the batch system.
    checkpoint_dir
        Directory of the checkpoints; must be reachable from the nodes. A training resumes from the checkpoints of its
        name that it finds there. Default: ``checkpoints`` in Parsl's run directory.
    checkpoints
        When checkpoints are written, and how many are kept.
    slots_per_node
        Worker places per node: its number of accelerators, or 1.
    grace
        Time between the batch system's signal and its kill.
    address
        IPv4 or IPv6 address at which nodes reach this host, or a host name, which is resolved here. Default: all
        addresses of its network interfaces; each node uses the first that answers.
    interface
        Network interface for the traffic between the members of a training: its name, or, if names differ between
        nodes, its network (``10.1.0.0/16``). Default: the one that reaches the driver.
    node_python
        Python interpreter on the nodes: a path, or a command name such as ``python``, which is looked up on PATH after
        the provider's ``worker_init``. Its versions of Python, Parsl and FreeTrain must match the driver's. Default:
        the path of the driver's interpreter.
    container
        Container in which the nodes' worker pools run. Default: none.
    log_dir
        Directory of the trainings' logs: what they print, one in order for each; see ``freetrain logs``. Default:
        ``logs`` in Parsl's run directory.
    tracker
        Where the values of `session.log` of trainings go that name no tracker themselves: ``"csv"``,
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
        manners: Manners | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoints: CheckpointSettings | None = None,
        slots_per_node: int = 1,
        grace: timedelta = timedelta(seconds=5),
        address: str | None = None,
        interface: str | None = None,
        node_python: str | None = None,
        container: Container | None = None,
        log_dir: str | Path | None = None,
        tracker: Any = None,
        job_tag: str | None = None,
        available_accelerators: int | list[str] = 0,
        worker_port_range: tuple[int, int] = (54000, 55000),
        worker_debug: bool = False,
        encrypted: bool = True,
    ) -> None:
        planner = planner or PlannerSettings()
        self._kinds = named_kinds(node_kinds)
        if not self._kinds:
            if provider is None:
                from freetrain_parsl.cluster.provider import EmbeddedClusterProvider

                provider = EmbeddedClusterProvider()
            accelerators = (
                available_accelerators if isinstance(available_accelerators, int) else tuple(available_accelerators)
            )
            self._kinds = {"": NodeKind("", provider, windows, slots_per_node, accelerators)}
        elif provider is not None or windows is not None or slots_per_node != 1 or available_accelerators:
            raise InvalidSettings(
                "FreeTrainExecutor: with node_kinds, give provider, windows, slots_per_node and available_accelerators "
                "of each kind only"
            )
        provider = next(iter(self._kinds.values())).provider
        for kind in self._kinds.values():
            refuse_provider(kind.provider, kind.windows, planner.max_nodes_per_block)
        if not re.fullmatch(r"[A-Za-z0-9._-]+", label):
            raise InvalidSettings(f"FreeTrainExecutor: label {label!r} may hold letters, digits, '.', '_' and '-' only")
        check_duration("FreeTrainExecutor: grace", grace)
        if checkpoint_dir is not None:
            prepare_root(Path(checkpoint_dir))
        if interface is not None:
            check_interface(interface)
        reached_at = getattr(provider, "driver_address", None) if address is None else resolved(address)
        if node_python is not None:
            check_node_python(node_python)
        self.policy = policy
        self._policy = resolve_policy(policy)
        self.windows = windows
        self.node_kinds = tuple(node_kinds)
        self.planner = planner
        self.trainings = trainings or TrainingSettings()
        self.manners = manners or Manners()
        self.checkpoint_dir = checkpoint_dir
        self.checkpoints = checkpoints or CheckpointSettings()
        self.slots_per_node = slots_per_node
        self.grace = grace
        self.interface = interface
        self.node_python = node_python
        self.container = container
        self.log_dir = log_dir
        self.tracker = tracker
        self._default_trackers = parse_trackers(tracker)
        self.job_tag = job_tag or secrets.token_hex(4)
        super().__init__(
            label=label,
            provider=provider,
            launch_cmd=node_command(node_python, container, ()),
            interchange_launch_cmd=_INTERCHANGE_COMMAND,
            address=reached_at or "127.0.0.1",  # else HTEX searches for addresses, partly on the internet
            worker_port_range=worker_port_range,
            worker_debug=worker_debug,
            cores_per_worker=1e-3,  # the number of slots is ours, not derived by HTEX from the cores
            max_workers_per_node=slots_per_node,
            available_accelerators=available_accelerators,
            heartbeat_period=_HTEX_HEARTBEAT,
            heartbeat_threshold=_HTEX_HEARTBEAT_TIMEOUT,
            block_error_handler=noop_error_handler,
            encrypted=encrypted,
        )
        self.address = reached_at
        self.all_addresses = driver_addresses() if reached_at is None else {reached_at}
        # HTEX fails the whole executor if one node has another Python; the driver checks each slot's `Hello` instead.
        self._check_python_mismatch = False
        inits = [getattr(kind.provider, "worker_init", "") or "" for kind in self._kinds.values()]
        # What another Python, or a container, has installed is not known here.
        self._node_modules = NodeModules(inits) if node_python is None and container is None else None
        self._driver: ControlLoop | None = None
        self._log_handler: logging.Handler | None = None
        self._logs: LogWriter | None = None
        self._values: ValueWriter | None = None
        self._checkpoint_root = Path()
        self._files: ValueFiles | None = None
        self._observers: dict[str, Callable[[Sequence[str]], None]] = {}
        self._submitter: JobSubmitter | None = None
        self._watch: InterchangeWatch | None = None
        self._refusal: Exception | None = None  # why nothing more is accepted, though trainings may still run
        self._exit = OrderlyExit(self._end_blocks)
        self._slot_settings: SlotSettings | None = None
        self._blocks = HtexBlocks(self, self.job_prefix, self._kinds)
        self._submissions = Submissions()
        self._fence = DriverFence()

    def obey(self, fence: DriverFence) -> None:
        """Let a fence end this executor, without a change to what its run has; to be called before it is started."""
        self._fence = fence

    # Parsl's executor interface.

    @property
    def status_polling_interval(self) -> int:
        """Zero, to disable Parsl's poller and strategies: this executor manages its blocks itself."""
        return 0

    @property
    def journal_path(self) -> Path:
        """Path of this run's journal; it exists once the executor has started."""
        return Path(self.logdir) / "journal.sqlite"

    @property
    def job_prefix(self) -> str:
        """Prefix of the names of this run's batch jobs."""
        return f"{OUR_JOBS}{self.label}.{self.job_tag}."

    def monitor_resources(self) -> bool:
        """Return false: Parsl's resource monitoring forks inside the worker, which torch's threads do not survive."""
        return False

    def start(self) -> None:
        """Start HTEX's interchange, the job submitter and the control loop."""
        script_dir = getattr(self.provider, "script_dir", None)  # set by Parsl
        for kind in self._kinds.values():
            provider: Any = kind.provider
            if hasattr(provider, "script_dir"):
                provider.script_dir = script_dir
            if hasattr(provider, "ensure_started"):
                provider.ensure_started()
        run_dir = Path(self.run_dir).absolute()
        check_run_directory(run_dir)
        if run_dir != Path.cwd():  # equal only without a DataFlowKernel, and then it is not Parsl's directory
            run_dir.chmod(0o700)  # Parsl makes it world-readable, but it holds the user's data
        Path(self.logdir).mkdir(mode=0o700, parents=True, exist_ok=True)
        root = Path(self.checkpoint_dir) if self.checkpoint_dir is not None else Path(self.run_dir) / "checkpoints"
        root = root.absolute()
        root_identity = prepare_root(root)
        self._checkpoint_root = root
        run = directory_name(f"{self.label}.{self.job_tag}")
        self._files = ValueFiles(root, root_identity, run, secrets.token_hex(8))
        self._files.clear()
        self._log_handler = log_to(Path(self.logdir) / "freetrain.log")
        log_dir = Path(self.log_dir or Path(self.run_dir) / "logs").absolute()
        self._logs = LogWriter(log_dir, allowed=self._fence.allows)
        self._values = ValueWriter(root, Path(self.logdir).absolute(), allowed=self._fence.allows)
        starter = getattr(self.provider, "node_starter", "")
        self.launch_cmd = node_command(self.node_python, self.container, (run_dir, root, log_dir), starter)
        super().start()  # type: ignore[no-untyped-call]  # Parsl's
        source = self._window_source()
        planner_settings = self.planner.in_seconds()
        source.check(least_walltime(planner_settings))
        server = SlotServer(self.cert_dir, _PORTS, sorted(self.all_addresses))
        heartbeat_timeout = self.trainings.heartbeat_timeout.total_seconds()
        poll_interval = self.manners.poll_interval.total_seconds()
        self._slot_settings = SlotSettings(
            addresses=tuple(sorted(self.all_addresses)),
            port=server.port,
            cert_dir=self.cert_dir,
            beat=min(1.0, heartbeat_timeout / 5),
            heartbeat_timeout=heartbeat_timeout,
            grace=self.grace.total_seconds(),
            interface=self.interface,
            log_dir=str(log_dir),
            files=self._files,
        )
        self._submitter = JobSubmitter(
            source,
            launch=self._blocks.launch,
            post=self._post,
            interval=poll_interval,
            submissions_per_minute=self.manners.submissions_per_minute,
            max_refusals=self.manners.max_refusals,
            max_failed_blocks=self.manners.max_failed_blocks,
            last_words=self._blocks.last_words,
            job_prefix=self.job_prefix,
            require=self._fence.require,
        )
        self._watch = InterchangeWatch(
            HtexInterchange(self, self._submit_slot, self._watch_slot_task),
            post=self._post,
            give_up=self._interchange_is_lost,
        )
        self._driver = ControlLoop(
            policy=self._policy,
            planner_settings=planner_settings,
            server=server,
            submitter=self._submitter,
            journal=Journal(self.journal_path, observe=self._observe),
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
            node_kinds={name: kind.slots for name, kind in self._kinds.items() if name},
            outdated=3 * poll_interval,
            heartbeat_timeout=heartbeat_timeout,
            submit_slot=self._watch.submit,
            fail_all=self._fail_all,
            refuse_new=self._refuse_new,
            take_output=self._logs.take,
            take_values=self._take_values,
            check_driver=self._fence.check,
            clock=time.time,
        )
        self._logs.start()
        self._values.start()
        self._driver.start()
        self._submitter.start()
        self._watch.start()
        self._exit.arm()

    def _start_result_queue_thread(self) -> None:
        """Start HTEX's thread; called by HTEX once it has made its sockets."""
        guard_sockets(self)
        super()._start_result_queue_thread()  # type: ignore[no-untyped-call]  # Parsl's

    def initialize_scaling(self) -> None:
        """Compose the launch command of each kind of node; called by HTEX when it starts."""
        self._blocks.compose_commands()

    def _window_source(self) -> WindowSource:
        sources = {name: kind.windows or window_source_for(kind.provider) for name, kind in self._kinds.items()}
        return sources[""] if "" in sources else WindowsByKind(sources)

    def submit(  # type: ignore[override]  # a training's future is not HTEX's
        self, func: Callable[..., Any], resource_specification: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Submit a training, or queue an ordinary task; never blocks.

        Parameters
        ----------
        func
            The user's function.
        resource_specification
            Empty for ordinary tasks; contains a `TrainingRequest` for training apps.
        *args, **kwargs
            Its arguments.

        Raises
        ------
        InvalidResourceSpecification
            It has keys that this executor does not support.
        InvalidTrainer
            A training of that name is running, or something that its function uses cannot be pickled.
        TrainingCancelled
            It was cancelled before Parsl launched it, or this is one of Parsl's retries.
        """
        request: TrainingRequest | None = resource_specification.get(SPECIFICATION_KEY)
        if request is not None and self._submissions.was_cancelled(request):
            raise TrainingCancelled(f"training {request.name!r} was cancelled")
        if (error := self._refusal or (self.executor_exception if self.bad_state_is_set else None)) is not None:
            raise unshared(error)
        unknown = set(resource_specification) - {SPECIFICATION_KEY}
        if unknown:
            raise InvalidResourceSpecification(
                unknown, f"{self.label} takes no resource specification; its planner assigns the slots"
            )
        kwargs.pop("parsl_resource_specification", None)
        if request is None:
            payload = pack_task(func, args, kwargs)
            self._check_modules(func, {type(value).__module__ for value in (*args, *kwargs.values())})
            return self._accept(self._submissions.add_task(payload))
        refuse_unknown_kinds(request, self._kinds)
        if self._values is not None:
            self._values.track(request.name, self._default_trackers if request.trackers is None else request.trackers)
        imported: set[str] = set()
        training = self._submissions.add_training(request, pack_or_refuse(func, args, kwargs, imported))
        self._check_modules(func, imported)
        if line := check_suggestion([(func, request.options.code)]):
            logger.info("training %s: %s", request.name, line)
        if request.likeness:
            threads = self.trainings.threads_per_slot
            training.curve_key = digest_of([request.likeness, str(self.slots_per_node), str(threads)])
            training.rates = read_rates(self._checkpoint_root, training.curve_key)
        future = self._accept(training)
        if self._submissions.was_cancelled(request):  # perhaps before it was posted
            self._to_driver(CancelTraining(future))
        return future

    def _check_modules(self, func: Callable[..., Any], imported: Collection[str]) -> None:
        if self._node_modules is not None:
            for function in functions_of(func):
                self._node_modules.check(function, imported)

    def _accept(self, item: Training | Task) -> Future[Any]:
        self._to_driver(item)
        return item.future

    def _to_driver(self, item: Training | Task | CancelTraining) -> None:
        assert self._driver is not None, "Parsl starts an executor before it submits to it"
        self._driver.post(item)

    def cancel(self, future: Future[Any]) -> bool:
        """Cancel one training, waiting or running, and keep its checkpoint; may be called from any thread.

        Its processes first save its state. Then `future` fails with `TrainingCancelled`, unless the training has
        finished or failed meanwhile, and its nodes become available to other trainings. A training that has not
        started, or that Parsl has not launched yet, also because it waits for the results of other apps, does not
        start. Parsl's retries do not run it again, but a new call of the app does, also with ``cache=True``.

        Parameters
        ----------
        future
            The future that the training app returned.

        Returns
        -------
        bool
            Whether it is being cancelled; false if it is done, not a training of this executor, or waits for the
            results of other apps although Parsl was cleaned up: then it never ends.
        """
        if self._driver is None or future.done():
            return False
        request = request_of(future, self) if isinstance(future, AppFuture) else self._submissions.request_of(future)
        if request is None:
            return False
        if (own := self._submissions.cancel(request)) is not None:
            self._driver.post(CancelTraining(own))
        if not isinstance(future, AppFuture):
            return True
        future.add_done_callback(lambda _: self._submissions.launched_no_more(request))
        return call_off(future)

    def observe_values(self, training: str, observer: Callable[[Sequence[str]], None]) -> None:
        """Pass what a training logs to a function, too, as soon as it arrives; to be called before the training begins.

        A training that resumes passes again what it has logged before.

        Parameters
        ----------
        training
            Its name.
        observer
            Called with rows as in `Logged`, in the control loop's thread; must neither block nor raise.
        """
        self._observers[training] = observer

    def stop_observing(self, training: str) -> None:
        """Undo `observe_values`."""
        self._observers.pop(training, None)

    def outstanding(self) -> int:
        """Return the number of trainings and tasks that are not done."""
        return len(self._submissions)

    def scale_out_facade(self, n: int) -> list[str]:  # noqa: ARG002 - Parsl's signature
        """Do nothing: the planner requests blocks."""
        return []

    def scale_in_facade(self, n: int, max_idletime: float | None = None) -> list[str]:  # noqa: ARG002 - Parsl's signature
        """Do nothing: the planner releases blocks, and `shutdown` ends the remaining ones."""
        return []

    def shutdown(self, timeout: float = 10.0) -> None:
        """End slots, cancel all blocks, stop the threads and the interchange; futures that are not done fail."""
        if self._watch is not None:
            self._watch.stop(timeout)
        self._end_blocks(timeout)
        self._exit.disarm()
        if not self.bad_state_is_set:
            reason = f"executor {self.label!r} was shut down before this was done; checkpoints are kept"
            self._end_futures(TrainingInterrupted(reason))
        if self._logs is not None and self._values is not None:
            self._logs.close()
            self._values.close()
        if self._files is not None:
            self._files.close()
        super().shutdown(timeout)
        keep_private(Path(self.run_dir))
        for kind in self._kinds.values():
            provider: Any = kind.provider
            if hasattr(provider, "close"):
                provider.close()
        if self._log_handler is not None:
            logging.getLogger("freetrain_parsl").removeHandler(self._log_handler)
            self._log_handler.close()
            self._log_handler = None

    def _end_blocks(self, timeout: float = 10.0) -> None:
        if self._submitter is not None and self._driver is not None:
            self._driver.stop(timeout)
            self._submitter.close(timeout)

    # The control loop's thread.

    def _take_values(self, training: str, rows: Sequence[str]) -> None:
        assert self._values is not None, "made before the control loop"
        self._values.take(training, rows)
        if (observer := self._observers.get(training)) is not None:
            observer(rows)

    def _observe(self, entry: Record) -> None:
        assert self._logs is not None, "made before the control loop"
        assert self._values is not None, "likewise"
        self._logs.note(entry)
        self._values.note(entry)

    # The job submitter's thread, and that of the interchange watch.

    def _post(self, item: SubmitterMessage | InterchangeEnded | InterchangeRestarted) -> None:
        assert self._driver is not None, "the job submitter is started after the control loop"
        self._blocks.follow(item)
        self._driver.post(item)

    def _submit_slot(self, token: str) -> Future[Any]:
        future: Future[Any] = super().submit(run_slot, {}, self._slot_settings, token)
        return future

    def _watch_slot_task(self, token: str, future: Future[Any]) -> None:
        future.add_done_callback(lambda done: self._on_slot_task_done(token, done))

    def _on_slot_task_done(self, token: str, future: Future[Any]) -> None:
        assert self._driver is not None, "slot tasks are submitted by the driver"
        self._driver.post(SlotTaskEnded(token, future.exception()))

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

    def _end_futures(self, error: Exception) -> None:
        """Fail all futures that are not done, and all later submissions."""
        self._executor_exception = error
        self._executor_bad_state.set()
        self._submissions.fail_all(error)
