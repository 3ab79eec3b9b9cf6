"""The nodes of a site: what its file says of a job's resource request, of each node, and of kinds of nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from freetrain_parsl.executor.batch.systems import SYSTEMS
from freetrain_parsl.executor.htex.node_start import IMAGE_CHOICES
from freetrain_parsl.settings_checks import check_kind_name
from freetrain_parsl.windows.system import NodeResources, given_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from freetrain_parsl.campaign.files.yaml_file import Section
    from freetrain_parsl.executor.htex.launch import Container

__all__ = ["NodeShape", "SiteKind", "read_block", "read_kinds", "read_name", "read_node"]

_NAME = r"[A-Za-z0-9._:@%-]{1,255}"
_MOST_SLOTS = 1024
_AUTO = "auto"


@dataclass(frozen=True)
class NodeShape(NodeResources):
    """What a site file says of each node: the resources that a block requests, and how it runs training jobs.

    Parameters
    ----------
    cores, gpus, memory, exclusive
        See `NodeResources`.
    slots
        Training jobs that run on it concurrently: its accelerators, or 1.
    accelerators
        Number or names, one per slot.
    python
        Python of the nodes, a path or a name on PATH after ``worker_init``; ``None``: the driver's.
    container
        Container in which it runs.
    image
        Whether nodes start from an image of their Python environment: ``auto``, ``off``, ``always`` or ``full``.
    share
        Whether training jobs share it, each with some of its slots.
    asks_slots
        Whether the batch system is to be asked for its accelerators, which are then requested and make its slots.
    """

    slots: int = 1
    accelerators: int | tuple[str, ...] = 0
    python: str | None = None
    container: Container | None = None
    image: str = "auto"
    share: bool = True
    asks_slots: bool = False


@dataclass(frozen=True)
class SiteKind:
    """A kind of nodes of a site.

    Parameters
    ----------
    name
        Its name.
    block
        Keys of the ``block`` section that differ for it.
    node
        Resources requested on each of its nodes.
    speed
        Assumed throughput of a node relative to those of other kinds.
    """

    name: str
    block: Mapping[str, Any]
    node: NodeShape
    speed: float = 1.0


def read_block(section: Section, system: str) -> dict[str, Any]:
    """Read the resource request of a job; the keys depend on the batch system."""
    block = given_values(worker_init=section.text("worker_init")) | SYSTEMS[system].read_block(section)
    section.done()
    return block


def read_kinds(top: Section, system: str, block: Mapping[str, Any], node: NodeShape) -> tuple[SiteKind, ...]:
    """Read the section ``kinds``: for each kind of node, what differs from the sections ``block`` and ``node``."""
    section = top.section("kinds")
    names = section.keys()
    if not names:
        return ()
    if len(names) == 1:
        raise top.refusal("a single kind has no name: write its keys into the sections block and node", "kinds")
    if "nodes" in block:
        raise top.refusal("the kinds have the nodes; remove block.nodes", "kinds")
    for name in names:
        section.checked(check_kind_name, name, key=name)
    sections = {name: section.section(name) for name in names}
    blocks = SYSTEMS[system].read_kinds(sections, block)
    kinds: list[SiteKind] = []
    for name, keys in sections.items():
        own = given_values(worker_init=keys.text("worker_init")) | blocks[name]
        shape = _read_resources(keys, node, system)
        speed = keys.number("speed", positive=True)
        kind = SiteKind(name, own, shape, 1.0 if speed is None else speed)
        _refuse_same_nodes(section, kind, kinds)
        kinds.append(kind)
        keys.done()
    return tuple(kinds)


def _refuse_same_nodes(section: Section, kind: SiteKind, others: Iterable[SiteKind]) -> None:
    for other in others:
        shared = set(kind.block.get("only", ())) & set(other.block.get("only", ()))
        ignored = ("worker_init", "only")
        same = all(
            kind.block.get(key) == other.block.get(key) for key in {*kind.block, *other.block}.difference(ignored)
        )
        if shared or (same and "only" not in kind.block and kind.node == other.node):
            raise section.refusal(
                f"its nodes are those of {other.name!r}; give it another partition or nodes", kind.name
            )


def read_name(section: Section, key: str) -> str | None:
    """Read an address or interface, which becomes part of the command that starts the workers."""
    value = section.text(key)
    if value is not None and not re.fullmatch(_NAME, value):
        raise section.refusal(f"must be an address or a name of letters, digits and '.:_-@%', got {value[:80]!r}", key)
    return value


def read_node(section: Section, system: str) -> NodeShape:
    """Read the section ``node``; its keys depend on the batch system."""
    shape = _read_resources(section, NodeShape(), system)
    share = section.flag("share") is not False
    image = section.choice("image", IMAGE_CHOICES) or "auto"
    shape = replace(shape, python=_read_python(section), container=_read_container(section), image=image, share=share)
    section.done()
    return shape


def _read_resources(section: Section, default: NodeShape, system: str) -> NodeShape:
    """Read the resources requested on each node; those that are not given are the default's."""
    if not SYSTEMS[system].requests_resources:
        if section.value("slots") == _AUTO:
            raise section.refusal(f"the batch system {system} does not report accelerators; give a number", "slots")
        return replace(default, slots=section.count("slots", most=_MOST_SLOTS) or default.slots)
    gpus = section.count("gpus", least=0, most=_MOST_SLOTS)
    accelerators: int | tuple[str, ...] = default.accelerators if gpus is None else gpus
    names = section.value("accelerators")
    if isinstance(names, list) and 0 < len(names) <= _MOST_SLOTS and all(map(_names_accelerator, names)):
        accelerators = tuple(map(str, names))
    elif isinstance(names, int) and not isinstance(names, bool) and 0 <= names <= _MOST_SLOTS:
        accelerators = names
    elif names is not None:
        raise section.refusal("must be a number, or a list of names in quotes, such as ['0.0', '0.1']", "accelerators")
    number = accelerators if isinstance(accelerators, int) else len(accelerators)
    asks = section.value("slots") == _AUTO
    slots = None if asks else section.count("slots", most=_MOST_SLOTS)
    if slots is not None and number and slots > number:
        raise section.refusal(f"there are {number} accelerators for {slots} slots; a slot needs its own", "slots")
    same = accelerators == default.accelerators
    cores, memory, exclusive = section.count("cores"), section.memory("memory"), section.flag("exclusive")
    return replace(
        default,
        cores=default.cores if cores is None else cores,
        gpus=default.gpus if gpus is None else gpus,
        memory=default.memory if memory is None else memory,
        slots=slots or (default.slots if same else number or 1),
        accelerators=accelerators,
        asks_slots=(asks or (default.asks_slots and slots is None)) and not number,
        exclusive=default.exclusive if exclusive is None else exclusive,
    )


def _names_accelerator(name: object) -> bool:
    """Return whether it is a valid device name, such as ``0.1`` or a UUID, in the command that starts the workers."""
    return isinstance(name, str | int) and re.fullmatch(_NAME, str(name)) is not None


def _read_python(section: Section) -> str | None:
    from freetrain_parsl.executor.htex.launch import check_node_python

    python = section.text("python")
    if python is not None:
        section.checked(check_node_python, python, key="python")
    return python


def _read_container(section: Section) -> Container | None:
    """Read ``node.container``: the image, and lists of directories and options."""
    if not section.has("container"):
        return None
    from freetrain_parsl.executor.htex.launch import Container

    keys = section.section("container")
    lists = {}
    for key in ("binds", "options"):
        values = keys.value(key)
        if values is not None and not (isinstance(values, list) and all(isinstance(value, str) for value in values)):
            raise keys.refusal("should be a list, such as ['--nv']", key)
        lists[key] = tuple(values or ())
    given = given_values(image=keys.required("image", "/images/torch.sif"), command=keys.text("command"), **lists)
    container = keys.checked(Container, **given)
    keys.done()
    return container
