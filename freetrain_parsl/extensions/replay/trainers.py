"""The trainers of a replay: built-in sets after the BFTrainer paper, and user-defined lists."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.extensions.replay.accelerators import over_accelerators
from freetrain_parsl.extensions.replay.trainer_files import MODELS, numbered, read_trainers
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds, PlannedJob
from freetrain_parsl.planning.objectives.base import PRIORITY, SPEEDUP, THROUGHPUT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from freetrain_parsl.extensions.replay.trainer_files import Model
    from freetrain_parsl.planning.objectives.base import Objective

__all__ = ["TrainerSet", "trainer_set", "with_costs"]

_MAX_NODES = 64
"""Of each built-in trainer: the range in which the models were measured."""

_HPO = {"shufflenet": replace(MODELS["shufflenet"], costs=CostsInSeconds(up=18.0, down=12.0))}
"""Costs of all jobs in the paper's hyperparameter search."""

_SINGLE_SECONDS = 24 * 3600.0
"""Length of a job that uses one accelerator: a fine-tuning run of a day."""

_WORTH: Final[dict[str, Objective]] = {"throughput": THROUGHPUT, "speedup": SPEEDUP, "priority": PRIORITY}


@dataclass(frozen=True)
class TrainerSet:
    """The trainers of a replay.

    Parameters
    ----------
    name
        As given by the user.
    trainers
        `PlannedJob.submitted` and `PlannedJob.deadline` are seconds after the log's start.
    objective
        Name of the suitable objective: one of `_WORTH`.
    sweeps
        The trainers by sweep, if they are members of sweeps: those of one differ in their names only.
    """

    name: str
    trainers: tuple[PlannedJob, ...]
    objective: str
    sweeps: Mapping[str, tuple[PlannedJob, ...]] = field(default_factory=dict)

    @property
    def worth(self) -> Objective:
        """The objective: the value of samples."""
        return _WORTH[self.objective]


def trainer_set(spec: str, kinds: Collection[str] = (), *, accelerators: int | None = None) -> TrainerSet:
    """Make a built-in set, or read one from a file.

    Parameters
    ----------
    spec
        ``hpo:N``: N ShuffleNets, as in a hyperparameter search; objective throughput. ``mixed:N``: N trainers that
        cycle through the seven `MODELS`; objective speed-up. Both are endless, on 1 to 64 nodes each, and submitted at
        the log's start. ``single:N``: N ShuffleNets that use one accelerator each, for a day of it; also beside one of
        the other two, as in ``single:60,hpo:4``. ``sweep:NxLIST``: a sweep of N members for each trainer of a list;
        objective throughput. Anything else is the path of a list, see `read_trainers`; its objective is priority if
        priorities differ, else throughput if all have the same curve, else speed-up.
    kinds
        The kinds of nodes for which a list may have curves.
    accelerators
        Accelerators of a node: the trainers are then described over these. ``None``: over nodes.

    Raises
    ------
    InvalidSettings
        The set does not exist or would be empty.
    InvalidInput
        The file is invalid; the message contains the line.
    """
    if re.match(r"(hpo|mixed|single):", spec):
        return _built_in(spec, accelerators)
    if spec.startswith("sweep:"):
        return _sweeps(spec)
    path = Path(spec)
    if path.suffix.lower() not in (".yaml", ".yml", ".csv"):
        raise InvalidSettings(
            f"unknown trainers {spec!r}; give hpo:N, mixed:N, single:N, sweep:NxLIST, or the path of a .yaml or .csv "
            "list"
        )
    trainers = read_trainers(path, MODELS, partial(_of_other_kinds, kinds))
    if accelerators is not None:
        trainers = tuple(over_accelerators(trainer, accelerators) for trainer in trainers)
    objective = "speedup"
    if len({trainer.priority for trainer in trainers}) > 1:
        objective = "priority"
    elif len({(trainer.curve, *trainer.curves.values()) for trainer in trainers}) == 1:
        objective = "throughput"
    return TrainerSet(path.name, trainers, objective)


def _built_in(spec: str, accelerators: int | None) -> TrainerSet:
    trainers: dict[str, tuple[PlannedJob, ...]] = {}
    for part in spec.split(","):
        kind, _, number = part.partition(":")
        if kind not in ("hpo", "mixed", "single"):
            raise InvalidSettings(f"trainers {spec!r}: unknown {part!r}; give hpo:N, mixed:N or single:N")
        if not re.fullmatch(r"[0-9]{1,6}", number) or int(number) == 0:
            raise InvalidSettings(f"trainers {spec!r}: expected a number after the colon, as in {kind}:10")
        if kind in trainers or {kind, *trainers} >= {"hpo", "mixed"}:
            raise InvalidSettings(f"trainers {spec!r}: give each kind once, and either hpo or mixed")
        if kind == "single":
            if accelerators is None:
                raise InvalidSettings(f"trainers {spec!r}: single jobs use one accelerator; add --accelerators N")
            trainers[kind] = _singles(int(number), accelerators)
            continue
        trainers[kind] = _endless(_HPO if kind == "hpo" else MODELS, int(number))
        if accelerators is not None:
            trainers[kind] = tuple(over_accelerators(trainer, accelerators) for trainer in trainers[kind])
    objective = "speedup" if "mixed" in trainers else "throughput"
    return TrainerSet(spec, tuple(chain.from_iterable(trainers.values())), objective)


def _singles(count: int, accelerators: int) -> tuple[PlannedJob, ...]:
    """Make jobs of one accelerator that end."""
    model = _HPO["shufflenet"]
    rate = model.curve(1) / accelerators
    curve, work = ScalingCurve({1: rate}), rate * _SINGLE_SECONDS
    return tuple(
        PlannedJob(numbered("single", index, count), 1, 1, curve, model.costs, work, unit=rate)
        for index in range(count)
    )


def _of_other_kinds(kinds: Collection[str], trainer: PlannedJob) -> str | None:
    unknown = [kind for kind in trainer.curves if kind not in kinds]
    if unknown and not kinds:
        given = ", ".join(unknown)
        return f"its curve is for kinds of nodes ({given}); 'freetrain replay --kind NAME=NODES' states which these are"
    return f"no nodes are of kind {unknown[0]!r}; there are {', '.join(kinds)}" if unknown else None


def with_costs(trainers: TrainerSet, up: float, down: float) -> TrainerSet:
    """Set the seconds that all trainers lose when they grow or shrink; the cost of a start is kept."""

    def changed(items: Iterable[PlannedJob]) -> tuple[PlannedJob, ...]:
        return tuple(replace(item, costs=replace(item.costs, up=up, down=down)) for item in items)

    sweeps = {name: changed(members) for name, members in trainers.sweeps.items()}
    return replace(trainers, trainers=changed(trainers.trainers), sweeps=sweeps)


def _sweeps(spec: str) -> TrainerSet:
    """Make a sweep of each trainer of a list."""
    match = re.fullmatch(r"sweep:([0-9]{1,5})x(.+)", spec)
    if match is None or int(match[1]) == 0:
        raise InvalidSettings(f"trainers {spec!r}: expected a number and trainers, as in sweep:64xtrainers.yaml")
    number, inner = int(match[1]), match[2]
    if inner.startswith("sweep:"):
        raise InvalidSettings(f"trainers {spec!r}: a sweep cannot be swept; give a list of trainers")
    sweeps = {}
    for trainer in trainer_set(inner).trainers:
        if math.isinf(trainer.work_left):
            raise InvalidSettings(
                f"trainers {spec!r}: {trainer.name!r} never ends, so no member of its sweep would; "
                "give a list with the key 'work'"
            )
        sweeps[trainer.name] = tuple(
            replace(trainer, name=numbered(trainer.name, index, number)) for index in range(number)
        )
    members = tuple(member for sweep in sweeps.values() for member in sweep)
    name = f"sweep:{number}x{Path(inner).name}"
    return TrainerSet(name, members, "throughput", sweeps)


def _endless(models: Mapping[str, Model], count: int) -> tuple[PlannedJob, ...]:
    turns = islice(cycle(models.items()), count)
    return tuple(
        PlannedJob(numbered(name, index, count), 1, _MAX_NODES, model.curve, model.costs)
        for index, (name, model) in enumerate(turns)
    )
