"""Kinds of nodes in a recorded log, which does not state them: by the names of the nodes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from freetrain_parsl.errors import FreeTrainError, InvalidInput, InvalidSettings
from freetrain_parsl.extensions.replay.logs.logs import where_named
from freetrain_parsl.settings_checks import check_kind_name, check_speed
from freetrain_parsl.windows.hostlist import expand_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from freetrain_parsl.extensions.replay.holes import HoleLog
    from freetrain_parsl.extensions.replay.trainers import TrainerSet

__all__ = ["KindOfNodes", "read_kinds", "state_kinds", "with_kinds"]

_WILDCARD = re.compile(r"[*?]")


@dataclass(frozen=True)
class KindOfNodes:
    """Nodes that are alike.

    Parameters
    ----------
    name
        What trainers call it.
    nodes
        Their names: a pattern with ``*`` and ``?``, or a list as Slurm writes it, such as ``a[001-064]``.
    speed
        Throughput of a node relative to those of other kinds, for trainers without a curve for each kind.
    """

    name: str
    nodes: str
    speed: float = 1.0

    def names(self, nodes: Iterable[str]) -> set[str]:
        """Return those of some nodes that are of this kind."""
        if _WILDCARD.search(self.nodes):
            return {node for node in nodes if fnmatchcase(node, self.nodes)}
        return set(nodes) & set(expand_hosts(self.nodes))


def read_kinds(options: Sequence[str]) -> tuple[KindOfNodes, ...]:
    """Read ``NAME=NODES[:SPEED]``, one for each kind.

    Raises
    ------
    InvalidSettings
        An option has another form, or a name is repeated.
    """
    kinds: dict[str, KindOfNodes] = {}
    for option in options:
        name, _, rest = option.partition("=")
        nodes, colon, speed = rest.partition(":")
        if not (name and nodes):
            raise InvalidSettings(f"--kind {option}: give NAME=NODES[:SPEED], as in gpu=a[001-064]:20 or cpu=nid*")
        check_kind_name(name)
        if "[" in nodes and _WILDCARD.search(nodes):
            raise InvalidSettings(f"--kind {option}: give a list with [...] or a pattern with * and ?, not both")
        if name in kinds:
            raise InvalidSettings(f"--kind {option}: kind {name!r} is given twice")
        kinds[name] = KindOfNodes(name, nodes, _speed(option, speed) if colon else 1.0)
        try:
            kinds[name].names(())
        except (FreeTrainError, ValueError) as error:
            raise InvalidSettings(f"--kind {option}: {error}") from None
    return tuple(kinds.values())


def _speed(option: str, text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        raise InvalidSettings(f"--kind {option}: the speed must be a number, got {text!r}") from None
    check_speed(f"--kind {option}: the speed", speed)
    return speed


def state_kinds(log: HoleLog, path: Path, kinds: Sequence[KindOfNodes]) -> None:
    """State the kinds of all nodes of a log that are ever idle.

    Raises
    ------
    InvalidInput
        A node is of no kind, or of several; the message contains the line that names it first.
    InvalidSettings
        No idle node is of some kind.
    """
    if not kinds:
        return
    idle = list(dict.fromkeys(hole.node for change in log.changes() for hole in change.opened))
    of_kind = {kind.name: kind.names(idle) for kind in kinds}
    found = Counter(node for nodes in of_kind.values() for node in nodes)
    if (wrong := next((node for node in idle if found[node] != 1), None)) is not None:
        where = where_named(path, wrong)
        if where is None:
            raise InvalidInput(
                f"{path}: no job names the node that is called {wrong!r} here, so that it has no kind; kinds of nodes "
                "need a log that names all of them: give the number of those that it names with --nodes"
            )
        several = "of several kinds" if found[wrong] else "of no kind"
        raise InvalidInput(f"{where}: node {wrong!r} is {several}; each node must match one --kind NAME=NODES")
    for name, nodes in of_kind.items():
        if not nodes:
            raise InvalidSettings(f"--kind {name}: no node of this kind is ever idle in {path}")
    log.kinds = {node: name for name, nodes in of_kind.items() for node in nodes}


def with_kinds(trainers: TrainerSet, kinds: Sequence[KindOfNodes]) -> TrainerSet:
    """Return the trainers with a curve for each kind: a stated one without a kind is that of the fastest."""
    if not kinds:
        return trainers
    if trainers.sweeps:
        raise InvalidSettings("--kind: does not work with sweeps; give other trainers")
    fastest = max(kind.speed for kind in kinds)
    return replace(
        trainers,
        trainers=tuple(
            one
            if one.curves
            else replace(one, curves={kind.name: one.curve.scaled(kind.speed / fastest) for kind in kinds})
            for one in trainers.trainers
        ),
    )
