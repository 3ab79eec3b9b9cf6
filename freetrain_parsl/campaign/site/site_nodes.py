"""The nodes of a site: what its file says of a job's resource request, of each node, and of kinds of nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from freetrain_parsl.cluster.nodesets import NodeNames
from freetrain_parsl.settings_checks import check_kind_name
from freetrain_parsl.windows.hostlist import expand_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from freetrain_parsl.campaign.files.yaml_file import Section
    from freetrain_parsl.executor.htex.launch import Container

__all__ = ["NodeShape", "SiteKind", "given_values", "read_block", "read_kinds", "read_name", "read_node"]

LAUNCHERS = ("srun", "mpiexec", "mpirun", "single")

_WORDS = {
    "slurm": ("partition", "account", "qos", "constraint", "gres", "scheduler_options", "windows_in"),
    "pbs": ("queue", "account", "select_options", "scheduler_options", "windows_in"),
}
"""Keys that choose the nodes of a job."""

_NAME = r"[A-Za-z0-9._:@%-]{1,255}"
_MOST_SLOTS = 1024
_MOST_EMBEDDED = 10_000  # nodes of an embedded cluster, which are processes on one host


@dataclass(frozen=True)
class NodeShape:
    """Resources that a block requests on each node; ``None`` if not set.

    Parameters
    ----------
    cores, gpus
        Counts.
    memory
        Bytes.
    slots
        Trainings that run on it concurrently: its accelerators, or 1.
    accelerators
        Number or names, one per slot.
    exclusive
        Whether blocks take whole nodes.
    python
        Python of the nodes, a path or a name on PATH after ``worker_init``; ``None``: the driver's.
    container
        Container in which it runs.
    """

    cores: int | None = None
    gpus: int | None = None
    memory: int | None = None
    slots: int = 1
    accelerators: int | tuple[str, ...] = 0
    exclusive: bool = True
    python: str | None = None
    container: Container | None = None


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


def given_values(**values: Any) -> dict[str, Any]:
    """Keep only the keys set in the file: the others have the package's own defaults."""
    return {key: value for key, value in values.items() if value is not None}


def read_block(section: Section, system: str) -> dict[str, Any]:
    """Read the resource request of a job; the keys depend on the batch system."""
    block = given_values(worker_init=section.text("worker_init"))
    if system == "local":
        block |= given_values(
            cluster=section.text("cluster"),
            nodes=section.count("nodes", most=_MOST_EMBEDDED),
            grace=section.duration("grace"),
        )
        if "cluster" in block and len(block.keys() & {"nodes", "grace"}):
            raise section.refusal("a named cluster has its own nodes and grace; remove these", "cluster")
    else:
        block |= _read_words(section, system)
        block |= given_values(
            launcher=section.choice("launcher", LAUNCHERS),
            launcher_overrides=section.text("launcher_overrides"),
            command_timeout=section.duration("command_timeout"),
        )
        if system == "pbs":
            block |= given_values(launcher_bind=section.text("launcher_bind"), preemptible=section.flag("preemptible"))
            if "launcher_bind" in block and block.get("launcher", "mpiexec") != "mpiexec":
                raise section.refusal("requires the launcher mpiexec", "launcher_bind")
    section.done()
    return block


def _read_words(section: Section, system: str) -> dict[str, Any]:
    """Read the words of a resource request, which choose the nodes."""
    words = given_values(**{word: _word(section, word) for word in _WORDS[system]})
    prefix = {"slurm": "#SBATCH", "pbs": "#PBS"}[system]
    for line in filter(None, map(str.strip, words.get("scheduler_options", "").splitlines())):
        if not line.startswith(f"{prefix} "):
            raise section.refusal(f"each line begins with '{prefix} ', got {line!r}", "scheduler_options")
    return words


def read_kinds(top: Section, system: str, block: Mapping[str, Any], node: NodeShape) -> tuple[SiteKind, ...]:
    """Read the section ``kinds``: for each kind of node, what differs from the sections ``block`` and ``node``."""
    section = top.section("kinds")
    names = section.keys()
    if not names:
        return ()
    if len(names) == 1:
        raise top.refusal("a single kind has no name: write its keys into the sections block and node", "kinds")
    if system == "local" and "nodes" in block:
        raise top.refusal("the kinds have the nodes; remove block.nodes", "kinds")
    kinds: list[SiteKind] = []
    first = 0
    for name in names:
        section.checked(check_kind_name, name, key=name)
        keys = section.section(name)
        own = given_values(worker_init=keys.text("worker_init"))
        if system == "local":
            own |= _read_nodes(keys, named="cluster" in block, first=first)
            first += len(own["only"])
            shape = replace(node, slots=keys.count("slots", most=_MOST_SLOTS) or node.slots)
        else:
            own |= _read_words(keys, system)
            shape = _read_resources(keys, node)
        speed = keys.number("speed")
        if speed is not None and speed <= 0:
            raise keys.refusal(f"must be more than zero, got {speed:g}", "speed")
        kind = SiteKind(name, own, shape, 1.0 if speed is None else speed)
        _refuse_same_nodes(section, kind, kinds)
        kinds.append(kind)
        keys.done()
    if system == "local" and "cluster" not in block:  # the names follow from the size of the whole cluster
        all_names = NodeNames(first).names
        kinds = [replace(k, block={**k.block, "only": tuple(all_names[i] for i in k.block["only"])}) for k in kinds]
    return tuple(kinds)


def _read_nodes(section: Section, *, named: bool, first: int) -> dict[str, Any]:
    """Read the nodes of a kind: their names in a running cluster, else their number, as positions from `first`."""
    if named:
        text = section.required("nodes", "'n[00-03]'")
        try:
            return {"only": tuple(expand_hosts(text))}
        except ValueError as error:
            raise section.refusal(f"{error}, such as n[00-03]", "nodes") from None
    if not section.has("nodes"):
        raise section.refusal("is missing; give the number of nodes of this kind", "nodes")
    return {"only": tuple(range(first, first + (section.count("nodes", most=_MOST_EMBEDDED) or 0)))}


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


def _word(section: Section, key: str) -> str | None:
    """Read a value that Parsl inserts into a script or command line unquoted: it must not inject anything."""
    value = section.text(key) or None  # empty: an optional ${NAME:-} without a value
    if key != "scheduler_options" and value is not None and not re.fullmatch(r"[^\s;$`\"'\\<>]+", value):
        raise section.refusal(f"must not contain blanks or shell metacharacters, got {value!r}", key)
    return value


def read_node(section: Section, system: str) -> NodeShape:
    """Read the section ``node``; its keys depend on the batch system."""
    if system == "local":
        slots = section.count("slots", most=_MOST_SLOTS)
        shape = NodeShape(slots=slots or 1, python=_read_python(section), container=_read_container(section))
        section.done()
        return shape
    shape = _read_resources(section, NodeShape())
    shape = replace(shape, python=_read_python(section), container=_read_container(section))
    section.done()
    return shape


def _read_resources(section: Section, default: NodeShape) -> NodeShape:
    """Read the resources requested on each node; those that are not given are the default's."""
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
    slots = section.count("slots", most=_MOST_SLOTS)
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
