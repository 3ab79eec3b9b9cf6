"""Descriptions of training jobs, from ``@training_app`` and from the executor's settings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from freetrain_parsl.errors import InvalidApp, InvalidSettings
from freetrain_parsl.executor.values.tracker import parse_trackers
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
from freetrain_parsl.planning.sizes import ANY_COUNT, AllowedCounts
from freetrain_parsl.protocol.options import SessionOptions, digest_of
from freetrain_parsl.settings_checks import check_count

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from freetrain_parsl.executor.jobs.size import Size
    from freetrain_parsl.executor.payloads.value_files import ValueFiles
    from freetrain_parsl.executor.values.tracker import TrackerSpec
    from freetrain_parsl.planning.curves.scaling import ScalingCurve
    from freetrain_parsl.protocol.options import Code
    from freetrain_parsl.storage.measurements import Rates

__all__ = [
    "SPECIFICATION_KEY",
    "Fuse",
    "Fusion",
    "Limits",
    "SharedSettings",
    "Training",
    "TrainingRequest",
    "cache_identity",
    "fusion_of",
]

SPECIFICATION_KEY = "freetrain"
"""Key of the `TrainingRequest` in Parsl's resource specification."""

Fuse: TypeAlias = "Literal['auto'] | int"
"""Whether a job may run fused with others: ``"auto"``, False, or the maximum number of jobs, at least 2."""

_MOST_NODES = 1_000_000  # more than any cluster has; the planner tabulates a rate for each number of nodes
_LARGEST_COUNT = (1 << 53) - 1  # that a message or the journal can hold


def _is_training_name(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", value) is not None


@dataclass(frozen=True)
class Fusion:
    """The training jobs with which a training job may run fused, in one process.

    Parameters
    ----------
    key
        Equal for the training jobs of one function with the same code: these may run fused.
    limit
        Maximum number of training jobs that run fused; ``None``: not limited by the user.
    """

    key: str
    limit: int | None = None


def fusion_of(fuse: object, code: Code | None) -> Fusion | None:
    """Return the training jobs that one may run fused with; ``None``: none, or its code is unknown.

    Parameters
    ----------
    fuse
        A value of `Fuse`.
    code
        The training job's code.

    Raises
    ------
    InvalidApp
        `fuse` has another value.
    """
    limit = fuse if isinstance(fuse, int) and not isinstance(fuse, bool) else None
    if not (fuse == "auto" or fuse is False or (limit is not None and limit >= 2)):
        raise InvalidApp(f"fuse must be 'auto', False or a whole number of at least 2, got {fuse!r}")
    return None if fuse is False or code is None else Fusion(digest_of([code.identity]), limit)


def trackers_of(value: object) -> tuple[TrackerSpec, ...]:
    """Return the trackers that an app's option names.

    Raises
    ------
    InvalidApp
        It names an unknown tracker or option, or one whose package is not installed.
    """
    try:
        return parse_trackers(value)
    except InvalidSettings as error:
        raise InvalidApp(str(error)) from None


@dataclass(frozen=True)
class TrainingRequest:
    """One call of a training app, as submitted to the executor.

    Parameters
    ----------
    options
        Options of its session; the executor fills in the rest: checkpoint directory, threads, failure rate.
    min_nodes, max_nodes
        Bounds on its number of units: nodes, or slots where jobs share nodes.
    scaling
        Samples per second as a function of the number of units.
    priority
        Positive weight, for objectives that use one.
    samples
        Total work in samples; ``None``: known only once the session has its loader and epochs.
    costs
        Rescale costs; ``None``: the executor's.
    deadline
        Time by which it should finish, or duration after its submission; for objectives that use one.
    fusion
        The training jobs with which it may run fused; ``None``: none.
    node_kinds
        Kinds of nodes on which it may run; empty: any.
    scaling_by_kind
        Kind of node -> `scaling` there, where it differs.
    trackers
        Trackers of the values that it logs; ``None``: the executor's.
    likeness
        Equal for training jobs that are as fast as each other on the same nodes (`likeness_of`); empty: unknown.
    size
        Its size as stated by its user, until `on_nodes` has converted it; `min_nodes`, `max_nodes` and curves then are
        for nodes of one slot. ``None``: they are in units.
    """

    options: SessionOptions
    min_nodes: int
    max_nodes: int
    scaling: ScalingCurve
    priority: float = 1.0
    samples: int | None = None
    costs: CostsInSeconds | None = None
    deadline: datetime | timedelta | None = None
    fusion: Fusion | None = None
    node_kinds: tuple[str, ...] = ()
    scaling_by_kind: Mapping[str, ScalingCurve] = field(default_factory=dict, hash=False)
    trackers: tuple[TrackerSpec, ...] | None = None
    likeness: str = ""
    size: Size | None = None

    def __post_init__(self) -> None:
        if not _is_training_name(self.name):
            raise InvalidApp(
                f"training name {self.name!r} must be 1 to 128 letters, digits, '.', '_' or '-', "
                "the first a letter or digit"
            )
        try:
            for word, number in (("min_nodes", self.min_nodes), ("max_nodes", self.max_nodes)):
                check_count(f"training job {self.name!r}: {word}", number, most=_MOST_NODES)
            for word, count in (("samples", self.samples), ("epochs", self.options.epochs)):
                if count is not None:
                    check_count(f"training job {self.name!r}: {word}", count, most=_LARGEST_COUNT)
        except InvalidSettings as error:
            raise InvalidApp(str(error)) from None
        if type(self.priority) not in (int, float):
            raise InvalidApp(f"training job {self.name!r}: priority must be a number, got {self.priority!r}")
        if not isinstance(self.deadline, (datetime, timedelta, type(None))):
            raise InvalidApp(
                f"training job {self.name!r}: deadline must be a datetime or a timedelta, got {self.deadline!r}"
            )
        if isinstance(self.deadline, timedelta) and self.deadline <= timedelta(0):
            raise InvalidApp(f"training job {self.name!r}: deadline must be positive, got {self.deadline}")
        replicas = self.options.replicas
        if replicas > 1 and self.max_nodes < replicas * self.min_nodes:
            raise InvalidApp(
                f"training job {self.name!r}: replicas={replicas} of at least min_nodes={self.min_nodes} each need "
                f"max_nodes={replicas * self.min_nodes} or more, got {self.max_nodes}"
            )
        self.trainer()  # its own checks

    @property
    def name(self) -> str:
        """Name of the training job and its checkpoints; letters, digits, ``.``, ``_`` and ``-``."""
        return self.options.name

    def on_nodes(self, slots_per_node: Mapping[str, int], units_per_node: int = 1) -> TrainingRequest:
        """Return the request with its size and curves in the units of a site.

        Parameters
        ----------
        slots_per_node
            Kind of node -> its number of slots; the only kind has the name ``""``.
        units_per_node
            Number of slots of a node where jobs share nodes, 1 where the unit is the node.

        Raises
        ------
        InvalidApp
            No job can have its size on these nodes.
        """
        if self.size is None:
            return self
        size, who = self.size, f"training job {self.name!r}"
        counts = self._slots(slots_per_node)
        if len(counts) > 1 and size.counts_accelerators:
            raise InvalidApp(
                f"{who}: {size.least or size.most}: its kinds of nodes have different numbers of accelerators "
                f"({', '.join(map(str, counts))}); give node_kinds=[…] of one number, or min_nodes and max_nodes"
            )
        slots = counts[-1]
        least, most = size.in_units(who, slots, units_per_node)
        return replace(
            self,
            size=None,
            min_nodes=least,
            max_nodes=most,
            scaling=size.curve_in_units(self.scaling, slots, units_per_node),
            scaling_by_kind={
                kind: size.curve_in_units(curve, slots, units_per_node) for kind, curve in self.scaling_by_kind.items()
            },
        )

    def rounding(self, slots_per_node: Mapping[str, int], units_per_node: int = 1) -> str:
        """Return what `on_nodes` rounds up to whole nodes; empty: nothing."""
        return "" if self.size is None else self.size.rounding(self._slots(slots_per_node)[-1], units_per_node)

    def _slots(self, slots_per_node: Mapping[str, int]) -> list[int]:
        """Return the different numbers of slots of the nodes on which it may run, in order."""
        usable = {slots for kind, slots in slots_per_node.items() if not self.node_kinds or kind in self.node_kinds}
        return sorted(usable) or [1]

    def trainer(self, costs: CostsInSeconds | None = None, submitted: float = 0.0) -> PlannedJob:
        """Return the training job as the planner sees it."""
        return PlannedJob(
            name=self.name,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            curve=self.scaling,
            costs=self.costs or costs or CostsInSeconds(),
            work_left=float("inf") if self.samples is None else float(self.samples),
            priority=self.priority,
            deadline=self._deadline(submitted),
            submitted=submitted,
            node_kinds=self.node_kinds,
            curves=self.scaling_by_kind,
            allowed_counts=self.counts,
        )

    @property
    def counts(self) -> AllowedCounts:
        """The numbers of units that can be divided into its replicas, each of which needs at least `min_nodes`."""
        replicas = self.options.replicas
        return AllowedCounts(replicas=replicas, replica_of=self.min_nodes) if replicas > 1 else ANY_COUNT

    def _deadline(self, submitted: float) -> float | None:
        if isinstance(self.deadline, timedelta):
            return submitted + self.deadline.total_seconds()
        try:
            return None if self.deadline is None else self.deadline.timestamp()
        except (ValueError, OverflowError):  # the years 1 and 9999, in some time zones
            raise InvalidApp(f"training job {self.name!r}: deadline {self.deadline} is out of range") from None


def cache_identity(request: TrainingRequest, output_ref: bool = False) -> bytes:  # noqa: ARG001, FBT001, FBT002 - Parsl's
    """Identify a request in Parsl's cache of results: its options affect the result as the arguments do."""
    options = request.options
    code = "" if options.code is None else options.code.identity
    return repr((options.name, options.seed, options.epochs, code)).encode()


def session_options(name: str, **options: Any) -> SessionOptions:
    """Return the options of a training job's session.

    Raises
    ------
    InvalidApp
        An option is out of range.
    """
    try:
        return SessionOptions(name, **options)
    except InvalidSettings as error:
        raise InvalidApp(str(error)) from None


@dataclass(frozen=True)
class Limits:
    """Timeouts in seconds, and the number of restarts.

    Parameters
    ----------
    peer_timeout
        If all members only wait for each other for this long, their connections are broken. Also the time within which
        members must end after a failure.
    meeting_timeout
        Time for which the members of a new group wait for each other.
    silence_timeout
        Time for which members may compute after a failure, as in a long validation, before they come to the meeting of
        the new group, if no other waits there.
    max_restarts
        Number of crashes, on nodes that were not taken, after which a training job restarts without reaching a new
        step.
    """

    peer_timeout: float = 10.0
    meeting_timeout: float = 60.0
    silence_timeout: float = 1800.0
    max_restarts: int = 3


@dataclass(frozen=True)
class SharedSettings:
    """Settings that all training jobs of a driver share.

    Parameters
    ----------
    options
        Session options set by the executor: location and interval of checkpoints, threads per process.
    costs
        Rescale costs of training jobs that do not state them, until they are measured.
    limits
        Timeouts, and the number of restarts.
    values
        The files with large results.
    """

    options: SessionOptions
    costs: CostsInSeconds = field(default_factory=CostsInSeconds)
    limits: Limits = field(default_factory=Limits)
    values: ValueFiles | None = None


@dataclass
class Training:
    """A submitted training job.

    Parameters
    ----------
    request
        Its description.
    payload
        Its function with arguments.
    future
        Its future.
    curve_key
        Key under which its scaling curve is kept; empty: it is not kept.
    rates
        The rates that training jobs of this key have measured before.
    sharded_on
        The numbers of units that its model allows, if one of this key was sharded before; otherwise ``None``.
    """

    request: TrainingRequest
    payload: bytes
    future: Future[Any]
    curve_key: str = ""
    rates: Rates = field(default_factory=dict)
    sharded_on: AllowedCounts | None = None

    @property
    def name(self) -> str:
        """The training job's name."""
        return self.request.name
