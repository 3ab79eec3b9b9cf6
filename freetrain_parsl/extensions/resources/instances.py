"""Instances of the problem with several resources, read from JSON.

An instance has the cluster's ``resources`` and ``capacity``, and its ``jobs``, trained with parameter servers. See
``docs/reference/resources.md`` for all fields.

Yu, Wu, Ji & Liu (SMD, INFOCOM 2021, arXiv 2105.13855) describe a synchronous step by the layers of the network:
gradients are pushed while earlier layers are still in the backward pass, and the next forward pass begins while the
parameters of later layers are still being pulled. They bound its duration by a sum of ratios of workers and servers.
Here the same model is evaluated exactly. With w workers, p servers, layers 1 to L of sizes s_l, and the batch b divided
among the workers::

    backward_l = backward_{l+1} + B_l b / w                    from the last layer to the first
    push_l = max(backward_l, push_{l+1}) + s_l / R             one transfer at a time, in the order of the backward pass
    pull_l = pull_{l-1} + s_l / R,  pull_0 = push_1            one at a time, in the order of the forward pass
    forward_l = max(forward_{l-1}, pull_l) + F_l b / w         the step ends with forward_L

Every layer is divided equally among the servers, and the workers move in lockstep, so that each of them transfers at
R = min(N, S p / w): its own network, or its share of the servers'. The pulls need no wait for their layer's push, since
the layer that is pulled first is the last one to be pushed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from freetrain_parsl.errors import InvalidApp, InvalidInput, UsageError, did_you_mean
from freetrain_parsl.extensions.resources.demands import ResourceJob, ResourceProblem, SigmoidUtility
from freetrain_parsl.planning.solvers.multiple_choice import fits
from freetrain_parsl.strict_yaml import read_text, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from freetrain_parsl.extensions.resources.demands import Completion

__all__ = ["WORKER_MBPS", "LayeredTraining", "ResourceInstance", "parse_instance", "read_instance"]

Table = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
WORKER_MBPS = 1250.0
"""Megabytes per second of a worker's network, unless a job states another rate: 10 Gbit/s."""

_HOUR = 3600.0
_SMALLEST, _LARGEST = 1e-12, 1e15  # numbers in a file other than zero: their products are finite
_SHOWN = 60  # characters of a wrong value in a message


@dataclass(frozen=True)
class LayeredTraining:
    """A network's layers, and the networks of its workers and servers.

    Parameters
    ----------
    forward, backward
        F_l and B_l, seconds per sample, in the order of the forward pass.
    sizes
        s_l, megabytes of each layer's parameters.
    batch
        b, samples of all workers together in a step.
    worker_rate
        N, megabytes per second of a worker's network, in each direction.
    server_rate
        S, megabytes per second of a server's network, in each direction.

    Raises
    ------
    InvalidApp
        Not the same number of layers in each list, or none; negative values; or a batch or rate that is not positive.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    sizes: tuple[float, ...]
    batch: float
    worker_rate: float
    server_rate: float

    def __post_init__(self) -> None:
        if not self.forward or not len(self.forward) == len(self.backward) == len(self.sizes):
            layers = f"{len(self.forward)}, {len(self.backward)} and {len(self.sizes)}"
            raise InvalidApp(f"layers: forward, backward and sizes need one value for each layer, got {layers}")
        for name in ("forward", "backward", "sizes"):
            if not all(math.isfinite(value) and value >= 0 for value in getattr(self, name)):
                raise InvalidApp(f"layers: {name} must be zero or more, got {getattr(self, name)!r}")
        for name in ("batch", "worker_rate", "server_rate"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidApp(f"layers: {name} must be positive, got {getattr(self, name)!r}")

    def step_seconds(self, workers: Counts, servers: Counts) -> Table:
        """Return the seconds of a step for each pair of numbers of workers and servers, which are positive."""
        samples = self.batch / workers
        per_megabyte = 1 / np.minimum(self.worker_rate, self.server_rate * servers / workers)
        computed, transferred = np.zeros(len(workers)), np.zeros(len(workers))
        for backward, size in zip(reversed(self.backward), reversed(self.sizes), strict=True):
            computed = computed + backward * samples
            transferred = np.maximum(computed, transferred) + size * per_megabyte
        computed = transferred
        for forward, size in zip(self.forward, self.sizes, strict=True):
            transferred = transferred + size * per_megabyte
            computed = np.maximum(computed, transferred) + forward * samples
        return computed


@dataclass(frozen=True, eq=False)
class ResourceInstance:
    """An instance.

    Parameters
    ----------
    problem
        Its resources and jobs.
    seed
        The seed that it was generated with, if any.
    """

    problem: ResourceProblem
    seed: int | None = None


def read_instance(file: Path) -> ResourceInstance:
    """Read an instance.

    Raises
    ------
    InvalidInput
        The file cannot be read or is no instance; the message names file and field.
    """
    text = read_text(file, "instance")
    try:
        document = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{shown(file)}:{error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a duplicate, NaN, a number of thousands of digits, deep nesting
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidInput(f"{shown(file)}: not JSON: {why}") from None
    return parse_instance(document, shown(file))


def parse_instance(document: object, source: str) -> ResourceInstance:
    """Check the JSON document of an instance and return the instance; `source` is its name in messages.

    Raises
    ------
    InvalidInput
        It is no instance.
    """
    top = _Object(document, source, "", required=("resources", "capacity", "jobs"), optional=("seed", "load"))
    resources = top.texts("resources")
    capacity = top.numbers("capacity", len(resources))
    jobs = tuple(
        _job(_Object(entry, source, f"jobs[{index}]", required=_JOB_FIELDS, optional=("worker_MBps",)), capacity)
        for index, entry in enumerate(top.list("jobs"))
    )
    seed = top.number("seed") if "seed" in top.fields else None
    try:
        problem = ResourceProblem(resources, capacity, jobs)
    except UsageError as error:
        raise InvalidInput(f"{source}: {error}") from None
    return ResourceInstance(problem, None if seed is None else int(seed))


_JOB_FIELDS = (
    *("name", "forward", "backward", "size", "batch", "iterations", "worker", "server", "limit", "server_MBps"),
    *("t1", "t2", "t3"),
)


def _job(fields: _Object, capacity: tuple[float, ...]) -> ResourceJob:
    layers = fields.numbers("forward", least=1)
    training = LayeredTraining(
        layers,
        fields.numbers("backward", len(layers)),
        fields.numbers("size", len(layers)),
        fields.positive("batch"),
        fields.positive("worker_MBps") if "worker_MBps" in fields.fields else WORKER_MBPS,
        fields.positive("server_MBps"),
    )
    worker, server, limit = (fields.numbers(name, len(capacity)) for name in ("worker", "server", "limit"))
    smallest = np.add(worker, server)
    for name, most in (("limit", limit), ("worker", capacity)):
        if not fits(smallest, np.array(most)):
            whose = "its limit is" if name == "limit" else "the capacity is"
            raise fields.refusal(
                name, f"one worker and one server need {smallest.tolist()} together, {whose} {list(most)}"
            )
    if not any(layers) and not any(training.backward) and not any(training.sizes):
        raise fields.refusal("forward", "a step takes no time: all layers are zero")
    return ResourceJob(
        fields.text("name"),
        worker,
        server,
        limit,
        _completion(training, fields.positive("iterations")),
        SigmoidUtility(fields.number("t1"), fields.number("t2") / _HOUR, fields.number("t3") * _HOUR),
    )


def _completion(training: LayeredTraining, steps: float) -> Completion:
    return lambda workers, servers: steps * training.step_seconds(workers, servers)


class _Object:
    """A JSON object whose fields are checked as they are read.

    Parameters
    ----------
    value
        The object.
    source, path
        Where it is, for messages.
    required, optional
        Names of its fields; all others are refused.
    """

    def __init__(
        self, value: object, source: str, path: str, *, required: Sequence[str], optional: Sequence[str]
    ) -> None:
        self._source, self._path = source, path
        if not isinstance(value, dict):
            raise InvalidInput(f"{source}: {path or 'the document'}: expected an object, got {_brief(value)}")
        self.fields: Mapping[str, Any] = value
        known = (*required, *optional)
        for name in value:
            if name not in known:
                shown_name = name if name.isprintable() and len(name) <= _SHOWN else _brief(name)
                raise self.refusal(shown_name, f"unknown field{did_you_mean(name, known)}")
        for name in required:
            if name not in value:
                raise self.refusal(name, "missing")

    def refusal(self, field: str, problem: str) -> InvalidInput:
        """Return the error about a field."""
        return InvalidInput(f"{self._source}: {'.'.join(filter(None, (self._path, field)))}: {problem}")

    def list(self, name: str) -> list[Any]:
        value = self.fields[name]
        if not isinstance(value, list):
            raise self.refusal(name, f"expected a list, got {_brief(value)}")
        return value

    def text(self, name: str) -> str:
        value = self.fields[name]
        if not (isinstance(value, str) and value.strip() and value.isprintable()):
            raise self.refusal(name, f"expected a name, got {_brief(value)}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.list(name)
        if not (values and all(isinstance(value, str) and value.strip() and value.isprintable() for value in values)):
            raise self.refusal(name, f"expected a list of names, got {_brief(values)}")
        return tuple(values)

    def number(self, name: str) -> float:
        """Return a number of zero or more."""
        return self._number(name, self.fields[name])

    def positive(self, name: str) -> float:
        value = self.number(name)
        if value == 0:
            raise self.refusal(name, "must be more than zero")
        return value

    def numbers(self, name: str, length: int | None = None, *, least: int = 0) -> tuple[float, ...]:
        """Return a list of numbers of zero or more, of this length or of at least `least`."""
        values = self.list(name)
        if (length is not None and len(values) != length) or len(values) < least:
            wanted = f"at least {least}" if length is None else length
            raise self.refusal(name, f"expected {wanted} numbers, got {len(values)}")
        return tuple(self._number(f"{name}[{index}]", value) for index, value in enumerate(values))

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(name, f"expected a number, got {_brief(value)}")
        if value < 0:
            raise self.refusal(name, f"must be zero or more, got {_brief(value)}")
        if value != 0 and not _SMALLEST <= value <= _LARGEST:
            raise self.refusal(name, f"must be zero, or from {_SMALLEST:g} to {_LARGEST:g}, got {_brief(value)}")
        return float(value)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"the field {_brief(name)} is there twice")
        fields[name] = value
    return fields
