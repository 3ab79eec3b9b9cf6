"""Instances of the problem with several resources: read from JSON, or random.

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

from freetrain_parsl.errors import InvalidInput, InvalidSettings, InvalidTrainer, UsageError, did_you_mean
from freetrain_parsl.extensions.resources.demands import ResourceJob, ResourceProblem, SigmoidUtility
from freetrain_parsl.planning.solvers.multiple_choice import fits
from freetrain_parsl.settings_checks import check_count
from freetrain_parsl.strict_yaml import read_text, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from freetrain_parsl.extensions.resources.demands import Completion

__all__ = ["WORKER_MBPS", "LayeredTraining", "ResourceInstance", "generate_instance", "parse_instance", "read_instance"]

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
    InvalidTrainer
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
            raise InvalidTrainer(f"layers: forward, backward and sizes need one value for each layer, got {layers}")
        for name in ("forward", "backward", "sizes"):
            if not all(math.isfinite(value) and value >= 0 for value in getattr(self, name)):
                raise InvalidTrainer(f"layers: {name} must be zero or more, got {getattr(self, name)!r}")
        for name in ("batch", "worker_rate", "server_rate"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidTrainer(f"layers: {name} must be positive, got {getattr(self, name)!r}")

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


@dataclass(frozen=True)
class _Network:
    """A family of jobs: layers, milliseconds of a forward pass per sample, megabytes of parameters."""

    layers: int
    forward_ms: float
    megabytes: float


_NETWORKS: Mapping[str, _Network] = {
    "alexnet": _Network(8, 0.233, 233),
    "googlenet": _Network(12, 0.5, 27),
    "inception": _Network(14, 1.9, 92),
    "lstm": _Network(4, 0.667, 250),
    "mobilenet": _Network(14, 0.2, 17),
    "resnet50": _Network(16, 1.367, 98),
    "transformer": _Network(12, 3.667, 420),
    "vgg16": _Network(16, 5.167, 528),
}
_RESOURCES = ("gpu", "cpu", "memory", "disk")
_WORKER = ((1, 4), (1, 10), (2, 32), (5, 10))  # least and most of each resource
_SERVER = ((0, 0), (1, 10), (2, 32), (5, 10))
_AT_LIMIT = (4, 20)  # workers, and servers, that the job's own limit is made for


def generate_instance(jobs: int, *, load: float, seed: int) -> dict[str, Any]:
    """Return a random instance as the document that `parse_instance` reads.

    Each job is one of eight networks. Its limit is what 4 to 20 workers and 4 to 20 servers need, and within that it
    takes at least 0.3 to 1.2 times its critical time. A tenth of the jobs do not care about time, and for a third it is
    a deadline.

    Parameters
    ----------
    jobs
        Number of jobs.
    load
        Sum of the jobs' limits as a multiple of the capacity, the same for all resources.
    seed
        The same seed gives the same instance.

    Raises
    ------
    InvalidSettings
        No jobs, or a load that is not positive.
    """
    check_count("jobs of an instance", jobs)
    if not (math.isfinite(load) and load > 0):
        raise InvalidSettings(f"the load of an instance must be positive, got {load!r}")
    rng = np.random.default_rng(seed)
    made = [_random_job(rng, index) for index in range(jobs)]
    wanted = np.sum([job["limit"] for job in made], axis=0)
    # A job that is alone, or a high load, must not make the cluster too small for one worker and one server.
    least = np.max([np.add(job["worker"], job["server"]) for job in made], axis=0)
    capacity = np.maximum(np.ceil(wanted / load), least)
    return {
        "seed": seed,
        "load": load,
        "resources": list(_RESOURCES),
        "capacity": capacity.tolist(),
        "jobs": made,
    }


def _random_job(rng: np.random.Generator, index: int) -> dict[str, Any]:
    name = str(rng.choice(list(_NETWORKS)))
    network = _NETWORKS[name]
    shares, sizes = rng.dirichlet(np.ones(network.layers), 2)
    forward = network.forward_ms / 1000 * shares
    worker, server = ([int(rng.integers(low, high + 1)) for low, high in ranges] for ranges in (_WORKER, _SERVER))
    workers, servers = rng.integers(_AT_LIMIT[0], _AT_LIMIT[1] + 1, 2)
    limit = [int(workers * one + servers * other) for one, other in zip(worker, server, strict=True)]
    batch, rate = int(rng.integers(32, 513)), float(rng.uniform(300, 1250))
    critical = float(rng.uniform(1, 15))
    training = LayeredTraining(
        tuple(forward), tuple(2 * forward), tuple(network.megabytes * sizes), batch, WORKER_MBPS, rate
    )
    job = ResourceJob(name, tuple(worker), tuple(server), tuple(limit), training.step_seconds, float)
    step = job.combinations.seconds.min()
    seconds = critical * _HOUR * float(rng.uniform(0.3, 1.2))
    return {
        "name": f"{name}-{index}",
        "forward": _rounded(forward),
        "backward": _rounded(2 * forward),
        "size": _rounded(network.megabytes * sizes),
        "batch": batch,
        "worker": worker,
        "server": server,
        "server_MBps": round(rate, 2),
        "limit": limit,
        "t1": round(float(rng.uniform(1, 100)), 4),
        "t2": _steepness(rng),
        "t3": round(critical, 4),
        "iterations": max(1, round(seconds / step)),
    }


def _steepness(rng: np.random.Generator) -> float:
    """Draw how a job cares about time, per hour: 10 % not at all, 55 % gradually, 35 % as about a deadline."""
    kind = rng.random()
    if kind < 0.1:
        return 0.0
    return round(float(rng.uniform(0.01, 1.0) if kind < 0.65 else rng.uniform(4, 6)), 4)


def _rounded(values: npt.NDArray[np.float64]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
