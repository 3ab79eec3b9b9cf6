"""``@training_app``: turns a training function into a Parsl app."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, cast, overload

from parsl.app.app import AppBase
from parsl.dataflow.dflow import DataFlowKernelLoader
from parsl.dataflow.futures import AppFuture
from parsl.dataflow.memoization import id_for_memo

from freetrain_parsl.app_options import AppOptions, Scaling, curves_of, kinds_of
from freetrain_parsl.errors import InvalidApp, InvalidSettings
from freetrain_parsl.executor.jobs.likeness import likeness_of
from freetrain_parsl.planning.settings import RescaleCosts
from freetrain_parsl.protocol.options import SessionOptions, snapshot_steps
from freetrain_parsl.sweep import SweepPoint, check_template, combined, fill_template, is_template, zipped
from freetrain_parsl.training.checkpoints.code.code_identity import code_of
from freetrain_parsl.training.data.staging import described, paths_of
from freetrain_parsl.training.signature import bind_call, check_signature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from parsl.dataflow.dflow import DataFlowKernel

    from freetrain_parsl.executor.executor import FreeTrainExecutor
    from freetrain_parsl.executor.jobs.request import TrainingRequest
    from freetrain_parsl.executor.jobs.size import Size
    from freetrain_parsl.protocol.options import Code, StagedPath

__all__ = ["Scaling", "TrainingApp", "training_app"]

_P = ParamSpec("_P")


class TrainingFuture(AppFuture):
    """What a training app returns: Parsl's future of the function's return value."""

    @property
    def fusion(self) -> str:
        """With how many others its training job runs fused, or why it is not, as ``freetrain status`` says.

        Empty before it starts, and if nothing is known against it.
        """
        from freetrain_parsl.report.futures import state_of

        state = state_of(self)
        return "" if state is None else state.fusion_remark()


class TrainingApp(AppBase):
    """A training function that Parsl runs on idle nodes; created by `training_app`.

    Calling it returns a `TrainingFuture` for the function's return value. The plain function is ``.func``.
    """

    def __init__(self, func: Callable[..., Any], options: AppOptions) -> None:
        executors = options.executors
        if isinstance(executors, str) and executors != "all":
            raise InvalidApp(f"executors={executors!r}: give a list of labels, [{executors!r}], or 'all'")
        check_signature(func)
        if not isinstance(options.rescale_costs, (RescaleCosts, type(None))):
            raise InvalidApp(f"rescale_costs must be RescaleCosts(up, down, start), got {options.rescale_costs!r}")
        super().__init__(
            func,
            data_flow_kernel=options.data_flow_kernel,
            executors="all" if isinstance(executors, str) else list(executors),
            cache=options.cache,
        )
        self.__doc__ = func.__doc__
        self.__module__ = func.__module__
        self.__wrapped__ = func
        self._options = options
        self._curve, self._curves = curves_of(options.scaling)
        self._node_kinds = kinds_of(options.node_kinds) or tuple(self._curves)
        # Raises at the decorator if the description is invalid. Not every function's name can be a training job's.
        called = func.__name__ if func.__name__.isidentifier() and func.__name__.isascii() else ""
        if is_template(options.name):
            check_template(func, options.name)
        if options.name is None or is_template(options.name):
            self.request(called.lstrip("_") or "training")
        else:
            self.request(options.name)

    @property
    def training_function(self) -> Callable[..., Any]:
        """The plain function; `run_local` calls it."""
        function: Callable[..., Any] = self.func
        return function

    @property
    def stage(self) -> tuple[StagedPath, ...]:
        """What its training jobs read from copies on the nodes."""
        return paths_of(self._options.stage)

    @property
    def node_kinds(self) -> tuple[str, ...]:
        """The kinds of nodes on which its training jobs may run; empty: any."""
        return self._node_kinds

    @property
    def size(self) -> Size:
        """The bounds on the size of its training jobs."""
        return self._options.size

    def options(self, **changes: Any) -> TrainingApp:
        """Return a copy of the app with some of the decorator's arguments changed.

        Raises
        ------
        InvalidApp
            An argument is unknown, or the description is invalid.

        Examples
        --------
        >>> @training_app(max_nodes=4)
        ... def train(session, lr=0.1): ...
        >>> urgent = train.options(name="urgent", priority=10.0)
        """
        return TrainingApp(self.func, self._options.changed(**changes))

    def __call__(self, /, *args: Any, **kwargs: Any) -> AppFuture:
        """Submit the training job; the arguments are the function's without ``session``.

        Raises
        ------
        TypeError
            The function does not accept these arguments.
        """
        self.check_arguments(*args, **kwargs)
        return self.submit(self.call_request(args, kwargs), args, kwargs)

    def sweep(self, /, *args: Any, seeds: Iterable[int] | None = None, **kwargs: Any) -> list[AppFuture]:
        """Submit one training job for each position of lists of arguments, which have the same length.

        Parameters
        ----------
        *args, **kwargs
            Arguments of the function. A list, or any other iterable except strings and mappings, has one value for
            each training job; anything else is the same for all of them.
        seeds
            The seeds of the training jobs. Default: the app's seed for all.

        Returns
        -------
        list of AppFuture
            The training jobs' futures, in the order of the lists.

        Raises
        ------
        InvalidApp
            The lists differ in length, one is empty, or two training jobs would be the same; nothing is submitted.
        TypeError
            The function does not accept these arguments.

        Examples
        --------
        >>> @training_app
        ... def train(session, lr, weight_decay=0.0): ...
        >>> futures = train.sweep(lr=[1e-3, 3e-3, 1e-2], weight_decay=[0, 0.1, 0.2])  # doctest: +SKIP
        """
        caller = self._caller("sweep")
        return self._submit_points(zipped(args, kwargs, seeds, caller=caller), caller)

    def grid(self, /, *args: Any, seeds: Iterable[int] | None = None, **kwargs: Any) -> list[AppFuture]:
        """Submit one training job for each combination of the values of lists of arguments.

        Parameters, results and errors are as for `sweep`, but the lists may differ in length. The values of the last
        list vary fastest; `seeds` count as the last.

        Examples
        --------
        >>> @training_app
        ... def train(session, lr, weight_decay=0.0): ...
        >>> futures = train.grid(lr=[1e-3, 1e-2], weight_decay=[0, 0.1], seeds=range(3))  # doctest: +SKIP
        """
        caller = self._caller("grid")
        return self._submit_points(combined(args, kwargs, seeds, caller=caller), caller)

    def at_points(self, points: Sequence[SweepPoint], caller: str) -> list[TrainingApp]:
        """Return the app of each training job of a sweep: with its seed and, if this app has a name, a name of its own.

        Parameters
        ----------
        points
            The arguments of each training job.
        caller
            Begins the messages of errors.

        Raises
        ------
        InvalidApp
            Two training jobs have the same arguments and seed, or the same name.
        TypeError
            The function does not accept the arguments of a training job.
        """
        apps: list[TrainingApp] = []
        names: dict[str, int] = {}
        identities: dict[bytes, int] = {}
        for number, point in enumerate(points, start=1):
            self.check_arguments(*point.args, **point.kwargs)
            own: dict[str, Any] = {} if point.seed is None else {"seed": point.seed}
            if not self._has_name_per_call:
                own["name"] = f"{self._options.name}-{number}"
            app = self.options(**own) if own else self
            name, _ = app.names_of(point.args, point.kwargs)
            identity = _identity(point) or name.encode()
            if (first := identities.setdefault(identity, number)) != number:
                raise InvalidApp(
                    f"{caller}: training jobs {first} and {number} have the same arguments and seed; give each "
                    "combination once, or vary the seed: seeds=range(…)"
                )
            if (first := names.setdefault(name, number)) != number:
                raise InvalidApp(
                    f"{caller}: training jobs {first} and {number} are both named {name!r}; name them after the "
                    "arguments "
                    "in which they differ, as in options(name='lr{lr}')"
                )
            apps.append(app)
        return apps

    def check_arguments(self, /, *args: Any, **kwargs: Any) -> None:
        """Check the arguments of a call, excluding ``session``.

        Raises
        ------
        TypeError
            The function does not accept them.
        """
        bind_call(self.__name__, inspect.signature(self.func), args, {**self.kwargs, **kwargs})

    def request(self, name: str, code: Code | None = None, call: str = "") -> TrainingRequest:
        """Return the description of one training job of this app, for the executor.

        Parameters
        ----------
        name
            Name of the training job.
        code, call
            See `SessionOptions`.
        """
        from freetrain_parsl.executor.jobs.request import TrainingRequest, fusion_of, session_options, trackers_of

        options = self._options
        try:
            copies = snapshot_steps(options.snapshot_every)
        except InvalidSettings as error:
            raise InvalidApp(f"training job {name!r}: {error}") from None
        has_replicas = options.replicas != 1
        if has_replicas and copies:
            raise InvalidApp(
                f"training job {name!r}: replicas={options.replicas} cannot be combined with snapshot_every={copies}: "
                "each replica is a copy of the others; leave snapshot_every out"
            )
        session = {
            **options.shared_with(SessionOptions),
            "name": name,
            "code": code,
            "call": call,
            "snapshot_every": copies,
            "stage": self.stage,
        }
        size = options.size
        size.check(f"training job {name!r}")
        least, most = size.assumed
        converted = {
            "min_nodes": least,
            "max_nodes": most,
            "size": size,
            "options": session_options(**session),
            "scaling": self._curve,
            "costs": None if options.rescale_costs is None else options.rescale_costs.in_seconds(),
            "fusion": fusion_of(False if has_replicas else options.fuse, code),
            "node_kinds": self._node_kinds,
            "scaling_by_kind": self._curves,
            "trackers": None if options.tracker is None else trackers_of(options.tracker),
        }
        return TrainingRequest(**{**options.shared_with(TrainingRequest), **converted})

    def names_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, str]:
        """Return the name of a call's training job, without the code's digest, and its prefix if it is derived."""
        name = self._options.name
        if name is None:
            call = self._call_name(args, kwargs)
            return call, call
        if is_template(name):
            return fill_template(self.func, name, args, {**self.kwargs, **kwargs}, seed=self._options.seed), ""
        return name, ""

    def call_request(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        code: Code | None = None,
        stage: tuple[StagedPath, ...] | None = None,
    ) -> TrainingRequest:
        """Return the description of the training job of one call.

        Parameters
        ----------
        args, kwargs
            The arguments of the call, which have been checked.
        code
            The code of the function, if it is known already.
        stage
            What it stages, if it is described already.

        Raises
        ------
        InvalidApp
            A file that is to be staged is missing.
        """
        code = code_of(self.func) if code is None else code
        name, call = self.names_of(args, kwargs)
        request = self.request(f"{call}-{code.digest[:8]}" if call else name, code, call)
        likeness = likeness_of(self.func, code, args, {**self.kwargs, **kwargs})
        stage = described(self.stage) if stage is None else stage
        return replace(request, options=replace(request.options, stage=stage), likeness=likeness)

    def submit(self, request: TrainingRequest, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TrainingFuture:
        """Submit the training job of one call, described by `call_request`."""
        from freetrain_parsl.executor.jobs.request import SPECIFICATION_KEY

        kernel = self.data_flow_kernel or DataFlowKernelLoader.dfk()
        future = kernel.submit(
            self.func,
            app_args=args,
            executors=[self.executor_of(kernel).label],
            cache=self.cache,
            ignore_for_cache=self.ignore_for_cache,
            app_kwargs={
                **self.kwargs,
                **kwargs,
                "parsl_resource_specification": {SPECIFICATION_KEY: request},
            },
            join=False,
        )
        future.__class__ = TrainingFuture  # Parsl makes the object
        return cast("TrainingFuture", future)

    def executor_of(self, kernel: DataFlowKernel | None = None) -> FreeTrainExecutor:
        """Return the executor of its training jobs.

        Parameters
        ----------
        kernel
            The kernel to search. Default: the app's kernel, or else the loaded one.

        Raises
        ------
        InvalidSettings
            There is none, or there are several.
        """
        from freetrain_parsl.executor.executor import FreeTrainExecutor

        kernel = kernel or self.data_flow_kernel or DataFlowKernelLoader.dfk()
        ours = {label: one for label, one in kernel.executors.items() if isinstance(one, FreeTrainExecutor)}
        if self.executors != "all":
            ours = {label: one for label, one in ours.items() if label in self.executors}
        if len(ours) != 1:
            found = f"{len(ours)} of them ({', '.join(ours)}): choose with executors=[…]" if ours else "none"
            raise InvalidSettings(f"{self.__name__} needs one FreeTrainExecutor in the loaded Config, found {found}")
        return next(iter(ours.values()))

    @property
    def _has_name_per_call(self) -> bool:
        """Whether the name depends on the arguments: derived from them, or a template."""
        return self._options.name is None or is_template(self._options.name)

    def _caller(self, method: str) -> str:
        """Return a method's name in messages; refuse a function with a parameter `seeds`, which it takes itself."""
        if "seeds" in inspect.signature(self.func).parameters:
            raise InvalidApp(
                f"{self.__name__}.{method}: the function has a parameter 'seeds', but {method}() takes the seeds of "
                "the training jobs by that name; rename the parameter"
            )
        return f"{self.__name__}.{method}"

    def _submit_points(self, points: Sequence[SweepPoint], caller: str) -> list[AppFuture]:
        """Submit the training jobs of a sweep, after all of them have been checked."""
        code, stage = code_of(self.func), described(self.stage)  # once: there may be thousands of points, and of files
        requests = [
            (app, app.call_request(point.args, point.kwargs, code, stage), point)
            for app, point in zip(self.at_points(points, caller), points, strict=True)
        ]
        return [app.submit(request, point.args, point.kwargs) for app, request, point in requests]

    def _call_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Derive a name from function and arguments; with the code's digest, later runs find checkpoints by it."""
        try:
            key = id_for_memo([list(args), dict(kwargs), self._options.seed])
        except ValueError:
            raise InvalidApp(
                f"{self.__name__}: no stable name can be derived from these arguments; "
                f"give one: {self.__name__}.options(name='…')(…)"
            ) from None
        return f"{self.__name__.lstrip('_')}-{hashlib.sha256(key).hexdigest()[:8]}"


def _identity(point: SweepPoint) -> bytes | None:
    """Return a key, equal for equal points; ``None``: an argument has no stable identity."""
    try:
        return bytes(id_for_memo([list(point.args), dict(point.kwargs), point.seed]))
    except ValueError:
        return None


class _Decorator(Protocol[_P]):
    """The type of `training_app`: its options are the parameters of `AppOptions`."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # no option is positional
        self, function: Callable[..., Any], /
    ) -> TrainingApp: ...
    @overload
    def __call__(self, /, *args: _P.args, **options: _P.kwargs) -> Callable[[Callable[..., Any]], TrainingApp]: ...


def _with_options(_options: Callable[_P, AppOptions]) -> Callable[[Callable[..., Any]], _Decorator[_P]]:
    return lambda decorator: cast("_Decorator[_P]", decorator)


@_with_options(AppOptions)
def training_app(
    function: Callable[..., Any] | None = None, **options: Any
) -> TrainingApp | Callable[[Callable[..., Any]], TrainingApp]:
    """Turn a training function into a Parsl app.

    The function's first parameter is the `TrainingSession`; the others are the arguments of the call. The training job
    runs on as many nodes as the planner assigns to it; it is moved, resized and resumed as windows open and close. Its
    future resolves to the function's return value when the whole training job is done.

    Parameters
    ----------
    function
        The training function, when the decorator is used without parentheses.
    min_nodes, max_nodes
        Bounds on the number of whole nodes while the training job runs. Where jobs share nodes, the default is from one
        accelerator to one node; elsewhere it is one node. A larger minimum is the default of the maximum.
    accelerators
        Exact number of accelerators, for a size in accelerators instead of nodes. Where jobs do not share nodes, it is
        rounded up to whole nodes.
    min_accelerators, max_accelerators
        Bounds on the number of accelerators; each instead of the one in nodes.
    scaling
        Samples per second as a function of the number of nodes: a mapping, a `ScalingCurve`, or a CSV or YAML file. If
        a bound is given in accelerators, as a function of the number of accelerators. Default: each doubling keeps 90 %
        of the efficiency. ``"learn"``: begin on the smallest size, measure, and try twice as much while that pays off.
        Measured rates replace the stated ones in any case. Where jobs share nodes, a part of a node is assumed to have
        its share of the rate of one node, until it is measured. Where a site has several kinds of nodes: one of these
        for each kind, ``{"gpu": {1: 900.0}, "cpu": {1: 40.0, 4: 150.0}}``; the training job then runs on these kinds
        only, unless `node_kinds` is given.
    priority
        Weight for objectives that use one.
    deadline
        Time by which the training job should finish, for the objective ``deadline``: a datetime (without a time zone,
        in the driver's), or a duration after its submission.
    samples, epochs
        Total work. With `epochs`, ``session.epochs()`` needs no argument. Both are optional: the session reports the
        total to the planner once it is known.
    rescale_costs
        Training time lost by a change of nodes. Default: the executor's.
    seed
        Seed of all random numbers of the training job.
    checkpoint_interval
        Time between periodic checkpoints. Default: the executor's.
    name
        Name of the training job and its checkpoints; can contain arguments and the seed, with a plain format:
        ``"lr{lr:.0e}-{seed}"``. Default: derived from function, arguments and code, so that a call of edited code
        starts over.
    on_code_change
        What to do if the newest checkpoint was written by different code: ``"refuse"`` raises `CodeChanged`,
        ``"resume"`` resumes from it, ``"restart"`` sets the old checkpoints aside and starts over.
    snapshot_every
        Of a sharded model: number of steps after which each process copies its part of the state to the memory of
        another node, from where the training job continues after the loss of a node, instead of from its newest
        checkpoint. ``"auto"``: chosen by the cost and the failure rate, where memory allows; ``None`` or ``False``:
        no copies.
    replicas
        Of a sharded model: number of replicas where there are nodes for them, each with the whole state on at least
        `min_nodes` nodes. When one loses a node, the others continue without repeating a step.
    fuse
        Whether the training job may run fused with others of the same function and code, in one process, with the
        results that it has alone: ``"auto"`` where that is faster, False, or the maximum number of training jobs in one
        process.
    node_kinds
        Kinds of nodes on which the training job may run, at a site that has several. Default: any of them. It runs on
        one kind at a time.
    tracker
        Tracker of the values of ``session.log``: ``"csv"``, ``"tensorboard"``, ``"mlflow"``, ``"wandb"``,
        ``"module:Class"``, a mapping from these to options, or a list. Default: the executor's.
    stage
        Files and directories that each node copies to its own storage, once for all its training jobs:
        ``session.staged`` returns where. Names that are not absolute are looked up in the current directory of the
        process that calls the app, or that of a campaign's file.
    executors, cache, data_flow_kernel
        As in Parsl's ``python_app``; exactly one of the executors must be a FreeTrainExecutor.

    Raises
    ------
    InvalidApp
        The description is invalid, e.g. ``min_nodes`` exceeds ``max_nodes`` or a bound is given twice, or the function
        has no first parameter for the session.

    Examples
    --------
    >>> @training_app(max_nodes=4)
    ... def train(session, lr=0.1): ...
    >>> train.__name__
    'train'
    """
    given = AppOptions().changed(**options)
    return partial(TrainingApp, options=given) if function is None else TrainingApp(function, given)
