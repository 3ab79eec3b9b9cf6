"""``@training_app``: turns a training function into a Parsl app."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, overload

from parsl.app.app import AppBase
from parsl.dataflow.dflow import DataFlowKernel, DataFlowKernelLoader
from parsl.dataflow.memoization import id_for_memo

from freetrain_parsl.errors import InvalidSettings, InvalidTrainer
from freetrain_parsl.planning.curves.scaling import CurveLike, ScalingCurve
from freetrain_parsl.planning.settings import RescaleCosts
from freetrain_parsl.training.checkpoints.code_identity import code_of
from freetrain_parsl.training.signature import check_signature

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime, timedelta

    from parsl.dataflow.futures import AppFuture

    from freetrain_parsl.executor.trainings import TrainingRequest
    from freetrain_parsl.protocol.options import Code, OnCodeChange

__all__ = ["TrainingApp", "training_app"]


@dataclass(frozen=True)
class _Options:
    """The options that a call may override; see `training_app`."""

    min_nodes: int = 1
    max_nodes: int = 1
    scaling: CurveLike = None
    priority: float = 1.0
    deadline: datetime | timedelta | None = None
    samples: int | None = None
    epochs: int | None = None
    rescale_costs: RescaleCosts | None = None
    seed: int = 0
    checkpoint_interval: timedelta | None = None
    name: str | None = None
    on_code_change: OnCodeChange = "refuse"


class TrainingApp(AppBase):
    """A training function that Parsl runs on idle nodes; created by `training_app`.

    Calling it returns a Parsl ``AppFuture`` for the function's return value. The plain function is ``.func``.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        options: _Options,
        *,
        data_flow_kernel: DataFlowKernel | None = None,
        executors: Sequence[str] | Literal["all"] = "all",
        cache: bool = False,
    ) -> None:
        if isinstance(executors, str) and executors != "all":
            raise InvalidTrainer(f"executors={executors!r}: give a list of labels, [{executors!r}], or 'all'")
        check_signature(func)
        if not isinstance(options.rescale_costs, (RescaleCosts, type(None))):
            raise InvalidTrainer(f"rescale_costs must be RescaleCosts(up, down, start), got {options.rescale_costs!r}")
        super().__init__(
            func,
            data_flow_kernel=data_flow_kernel,
            executors="all" if isinstance(executors, str) else list(executors),
            cache=cache,
            ignore_for_cache=["parsl_resource_specification"],
        )
        self.__doc__ = func.__doc__
        self.__module__ = func.__module__
        self.__wrapped__ = func
        self._options = options
        self._curve = ScalingCurve.of(options.scaling)
        # Raises at the decorator if the description is invalid. Not every function's name can be a training's.
        called = func.__name__ if func.__name__.isidentifier() and func.__name__.isascii() else ""
        self.request(called.lstrip("_") or "training" if options.name is None else options.name)

    @property
    def training_function(self) -> Callable[..., Any]:
        """The plain function; `run_alone` calls it."""
        function: Callable[..., Any] = self.func
        return function

    def options(self, **changes: Any) -> TrainingApp:
        """Return a copy of the app with some of the decorator's arguments changed.

        Raises
        ------
        InvalidTrainer
            An argument is unknown, or the description is invalid.

        Examples
        --------
        >>> @training_app(max_nodes=4)
        ... def train(session, lr=0.1): ...
        >>> urgent = train.options(name="urgent", priority=10.0)
        """
        known = {item.name for item in fields(_Options)}
        if unknown := sorted(set(changes) - known):
            raise InvalidTrainer(f"training_app has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
        return TrainingApp(
            self.func,
            replace(self._options, **changes),
            data_flow_kernel=self.data_flow_kernel,
            executors=self.executors,
            cache=self.cache,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> AppFuture:
        """Submit the training; the arguments are those of the function without ``session``.

        Raises
        ------
        TypeError
            The function does not accept these arguments.
        """
        from freetrain_parsl.executor.executor import SPECIFICATION_KEY

        self.check_arguments(*args, **kwargs)
        kernel = self.data_flow_kernel or DataFlowKernelLoader.dfk()
        code = code_of(self.func)
        call = "" if self._options.name else self._call_name(args, kwargs)
        name = self._options.name or _derived_name(call, code)
        request = self.request(name, code, call)
        return kernel.submit(
            self.func,
            app_args=args,
            executors=[self._executor_label(kernel)],
            cache=self.cache,
            ignore_for_cache=self.ignore_for_cache,
            app_kwargs={
                **self.kwargs,
                **kwargs,
                "parsl_resource_specification": {SPECIFICATION_KEY: request},
            },
            join=False,
        )

    def check_arguments(self, *args: Any, **kwargs: Any) -> None:
        """Check the arguments of a call, excluding ``session``.

        Raises
        ------
        TypeError
            The function does not accept them.
        """
        signature = inspect.signature(self.func)
        session, *others = signature.parameters.values()
        if session.name in kwargs and session.kind is session.POSITIONAL_OR_KEYWORD:
            raise TypeError(f"{self.__name__}(): the argument {session.name!r} is the session, which is not passed")
        try:
            signature.bind(None, *args, **{**self.kwargs, **kwargs})
        except TypeError as error:
            taken = ", ".join(str(parameter) for parameter in others) or "none"
            raise TypeError(f"{self.__name__}(): {error}; the arguments after the session are: {taken}") from None

    def request(self, name: str, code: Code | None = None, call: str = "") -> TrainingRequest:
        """Return the description of one training of this app, for the executor.

        Parameters
        ----------
        name
            Name of the training.
        code, call
            See `SessionOptions`.
        """
        from freetrain_parsl.executor.trainings import TrainingRequest, session_options

        options = self._options
        return TrainingRequest(
            options=session_options(
                name,
                seed=options.seed,
                epochs=options.epochs,
                checkpoint_interval=options.checkpoint_interval,
                on_code_change=options.on_code_change,
                code=code,
                call=call,
            ),
            min_nodes=options.min_nodes,
            max_nodes=options.max_nodes,
            scaling=self._curve,
            priority=options.priority,
            deadline=options.deadline,
            samples=options.samples,
            costs=None if options.rescale_costs is None else options.rescale_costs.in_seconds(),
        )

    def _call_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Derive a name from function and arguments; with the code's digest, later runs find checkpoints by it."""
        try:
            key = id_for_memo([list(args), kwargs, self._options.seed])
        except ValueError:
            raise InvalidTrainer(
                f"{self.__name__}: no stable name can be derived from these arguments; "
                f"give one: {self.__name__}.options(name='…')(…)"
            ) from None
        return f"{self.__name__.lstrip('_')}-{hashlib.sha256(key).hexdigest()[:8]}"

    def _executor_label(self, kernel: DataFlowKernel) -> str:
        from freetrain_parsl.executor.executor import FreeTrainExecutor

        ours = [label for label, executor in kernel.executors.items() if isinstance(executor, FreeTrainExecutor)]
        if self.executors != "all":
            ours = [label for label in ours if label in self.executors]
        if len(ours) != 1:
            found = f"{len(ours)} of them ({', '.join(ours)}): choose with executors=[…]" if ours else "none"
            raise InvalidSettings(f"{self.__name__} needs one FreeTrainExecutor in the loaded Config, found {found}")
        return str(ours[0])


def _derived_name(call: str, code: Code) -> str:
    return f"{call}-{code.digest[:8]}"


@overload
def training_app(function: Callable[..., Any]) -> TrainingApp: ...
@overload
def training_app(
    function: None = None,
    *,
    min_nodes: int = ...,
    max_nodes: int = ...,
    scaling: CurveLike = ...,
    priority: float = ...,
    deadline: datetime | timedelta | None = ...,
    samples: int | None = ...,
    epochs: int | None = ...,
    rescale_costs: RescaleCosts | None = ...,
    seed: int = ...,
    checkpoint_interval: timedelta | None = ...,
    name: str | None = ...,
    on_code_change: OnCodeChange = ...,
    executors: Sequence[str] | Literal["all"] = ...,
    cache: bool = ...,
    data_flow_kernel: DataFlowKernel | None = ...,
) -> Callable[[Callable[..., Any]], TrainingApp]: ...
def training_app(
    function: Callable[..., Any] | None = None,
    *,
    executors: Sequence[str] | Literal["all"] = "all",
    cache: bool = False,
    data_flow_kernel: DataFlowKernel | None = None,
    **options: Any,
) -> TrainingApp | Callable[[Callable[..., Any]], TrainingApp]:
    """Turn a training function into a Parsl app.

    The function's first parameter is the `TrainingSession`; the others are the arguments of the call. The training
    runs on as many nodes as the planner assigns to it; it is moved, resized and resumed as windows open and close. Its
    future resolves to the function's return value when the whole training is done.

    Parameters
    ----------
    function
        The training function, when the decorator is used without parentheses.
    min_nodes, max_nodes
        Bounds on the number of nodes while the training runs. Default: one node.
    scaling
        Samples per second as a function of the number of nodes: a mapping, a `ScalingCurve`, or a CSV or YAML file.
        Default: each doubling keeps 90 % of the efficiency. ``"learn"``: begin on `min_nodes`, measure, and try twice
        as many nodes while that pays off. Measured rates replace the stated ones in any case.
    priority
        Weight for objectives that use one.
    deadline
        When the training should be finished, for the objective ``deadline``: a time (without a time zone, in that of
        the driver), or the time after its submission.
    samples, epochs
        Total work. With `epochs`, ``session.epochs()`` needs no argument. Both are optional: the session reports the
        total to the planner once it is known.
    rescale_costs
        Training time lost by a change of nodes. Default: the executor's.
    seed
        Seed of all random numbers of the training.
    checkpoint_interval
        Time between periodic checkpoints. Default: the executor's.
    name
        Name of the training and its checkpoints. Default: derived from function, arguments and code, so that a call
        of edited code starts over.
    on_code_change
        What to do if the newest checkpoint was written by different code: ``"refuse"`` raises `CodeChanged`,
        ``"resume"`` resumes from it, ``"restart"`` sets the old checkpoints aside and starts over.
    executors, cache, data_flow_kernel
        As in Parsl's ``python_app``; exactly one of the executors must be a FreeTrainExecutor.

    Raises
    ------
    InvalidTrainer
        The description is invalid, e.g. ``min_nodes`` exceeds ``max_nodes``, or the function has no first parameter
        for the session.

    Examples
    --------
    >>> @training_app(max_nodes=4)
    ... def train(session, lr=0.1): ...
    >>> train.__name__
    'train'
    """
    known = {item.name for item in fields(_Options)}
    if unknown := sorted(set(options) - known):
        raise InvalidTrainer(f"training_app has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")

    def decorate(func: Callable[..., Any]) -> TrainingApp:
        return TrainingApp(
            func, _Options(**options), executors=executors, cache=cache, data_flow_kernel=data_flow_kernel
        )

    return decorate if function is None else decorate(function)
