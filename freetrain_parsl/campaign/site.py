"""A site: the settings of a `FreeTrainExecutor` for one cluster, read from a YAML file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.yaml_file import Section, Variables, user_path
from freetrain_parsl.cluster.nodesets import NodeNames
from freetrain_parsl.errors import InvalidInput, did_you_mean
from freetrain_parsl.executor.node_kinds import check_kind_name
from freetrain_parsl.executor.settings import CheckpointSettings, Manners, TrainingSettings
from freetrain_parsl.planning.settings import PlannerSettings, RescaleCosts
from freetrain_parsl.storage.globus.places import CollectionPath, GlobusSettings
from freetrain_parsl.strict_yaml import read_text
from freetrain_parsl.trackers.settings import parse_trackers
from freetrain_parsl.windows.slurm.hostlist import expand_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from freetrain_parsl.executor.htex.launch import Container
    from freetrain_parsl.planning.policies import PolicyLike

__all__ = ["NodeShape", "Site", "SiteKind", "find_site_file", "shipped_sites"]

SYSTEMS = ("local", "slurm", "pbs")
LAUNCHERS = ("srun", "mpiexec", "mpirun", "single")

_WORDS = {
    "slurm": ("partition", "account", "qos", "constraint", "gres", "scheduler_options", "windows_in"),
    "pbs": ("queue", "account", "select_options", "scheduler_options", "windows_in"),
}
"""Keys that choose the nodes of a job."""

_MANNERS = ("max_pending_blocks",)  # planner settings in the file's ``manners`` section
_NAME = r"[A-Za-z0-9._:@%-]{1,255}"
_MOST_SLOTS = 1024
_MOST_EMBEDDED = 10_000  # nodes of an embedded cluster, which are processes on one host
_LEAST_FREE = 256 * 10**6  # bytes


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


@dataclass(frozen=True)
class Site:
    """A validated site file. The batch system has not been queried yet.

    Parameters
    ----------
    name
        Display name, not used in file names.
    system
        ``local`` (the embedded cluster), ``slurm`` or ``pbs``.
    file
        Path as given.
    text
        Original text of the file.
    variables
        Values of ``${NAME}`` in it.
    block
        Keys of the ``block`` section: the resource request of a job.
    node
        Resources requested on each node.
    planner_settings
        Settings of the planner.
    executor_settings
        The other arguments of `FreeTrainExecutor`.
    driver_interface
        Network interface of this host at which the nodes reach the driver; ``None``: determined by trying.
    checkpoint_dir
        ``None``: in the run directory.
    least_free
        Bytes that must be free in the checkpoint directory.
    kinds
        The kinds of nodes, where there are several.
    globus
        Where checkpoints are carried to, and where the checkpoint directory is on Globus.
    """

    name: str
    system: str
    file: str
    text: str = field(repr=False)
    variables: Mapping[str, str]
    block: Mapping[str, Any]
    node: NodeShape
    planner_settings: PlannerSettings
    executor_settings: Mapping[str, Any]
    driver_interface: str | None = None
    checkpoint_dir: Path | None = None
    least_free: int = _LEAST_FREE
    kinds: tuple[SiteKind, ...] = ()
    globus: GlobusSettings | None = None

    @classmethod
    def load(cls, path: str | Path, variables: Variables | None = None) -> Site:
        """Read a site file.

        Parameters
        ----------
        path
            The file, or the name of a shipped one, such as ``polaris``.
        variables
            Values for ``${NAME}``; default: the environment.

        Raises
        ------
        InvalidInput
            It cannot be read, or a value is invalid; the message gives file and line.
        """
        file = find_site_file(Path(path))
        return cls.parse(read_text(file, "site file"), str(file), variables or Variables())

    @classmethod
    def parse(cls, text: str, file: str, variables: Variables) -> Site:
        """Parse the text of a site file; `file` is its name in messages."""
        top = Section.parse(text, file, variables)
        name = top.text("site") or Path(file).stem
        system = top.choice("system", SYSTEMS)
        if system is None:
            raise top.refusal(f"'system' is missing; it is one of {', '.join(SYSTEMS)}")
        node = _read_node(top.section("node"), system)
        block = _read_block(top.section("block"), system)
        kinds = _read_kinds(top, system, block, node)
        planner, executor = _read_settings(top)
        network, checkpoints = top.section("network"), top.section("checkpoints")
        executor["checkpoints"] = CheckpointSettings(**_given(interval=checkpoints.duration("interval", positive=True)))
        executor |= _given(
            address=_name(network, "driver_address"),
            interface=_name(network, "node_interface"),
        )
        tracker = top.value("tracker")
        top.checked(parse_trackers, tracker, key="tracker")
        executor |= _given(tracker=tracker)
        driver_interface = _name(network, "driver_interface")
        if driver_interface and "address" in executor:
            raise network.refusal("give driver_address or driver_interface, not both", "driver_address")
        directory, least_free = checkpoints.path("directory"), checkpoints.memory("least_free")
        globus = _read_globus(checkpoints, directory)
        for section in (network, checkpoints, top):
            section.done()
        return cls(
            name=name,
            system=system,
            file=file,
            text=text,
            variables=dict(variables.used),
            block=block,
            node=node,
            planner_settings=planner,
            executor_settings=executor,
            driver_interface=driver_interface,
            checkpoint_dir=None if directory is None else directory.absolute(),
            least_free=_LEAST_FREE if least_free is None else least_free,
            kinds=kinds,
            globus=globus,
        )

    def of_kind(self, kind: SiteKind) -> Site:
        """Return the site as if it had nodes of one kind only."""
        inits = (self.block.get("worker_init"), kind.block.get("worker_init"))
        block = {**self.block, **kind.block, **_given(worker_init="\n".join(filter(None, inits)) or None)}
        return replace(self, block=block, node=kind.node, kinds=())

    @property
    def outlives_driver(self) -> bool:
        """Whether the batch system outlives the driver: all except the driver's own embedded cluster."""
        return self.system != "local" or "cluster" in self.block


def shipped_sites() -> dict[str, Path]:
    """Find the shipped site files: next to the package in a checkout, inside it when installed."""
    package = Path(__file__).parents[1]
    for directory in (package.parent / "configs", package / "configs"):
        if (directory / "local.yaml").is_file():
            return {file.stem: file for file in sorted(directory.glob("*.yaml"))}
    return {}


def find_site_file(path: Path) -> Path:
    """Resolve a path, or the bare name of a shipped file."""
    path = user_path(str(path))
    try:
        exists = path.exists()
    except OSError as error:
        raise InvalidInput(f"site file {str(path)[:80]!r}…: {error.strerror or error}") from None
    if exists or path.suffix or len(path.parts) > 1:
        return path
    shipped = shipped_sites()
    if str(path) not in shipped:
        raise InvalidInput(
            f"no such file: {path}, and no shipped site of that name{did_you_mean(str(path), shipped)}; "
            f"shipped: {', '.join(shipped) or 'none'}"
        )
    return shipped[str(path)]


def _given(**values: Any) -> dict[str, Any]:
    """Keep only the keys set in the file: the others have the package's own defaults."""
    return {key: value for key, value in values.items() if value is not None}


def _read_block(section: Section, system: str) -> dict[str, Any]:
    """Read the resource request of a job; the keys depend on the batch system."""
    block = _given(worker_init=section.text("worker_init"))
    if system == "local":
        block |= _given(
            cluster=section.text("cluster"),
            nodes=section.count("nodes", most=_MOST_EMBEDDED),
            grace=section.duration("grace"),
        )
        if "cluster" in block and len(block.keys() & {"nodes", "grace"}):
            raise section.refusal("a named cluster has its own nodes and grace; remove these", "cluster")
    else:
        block |= _read_words(section, system)
        block |= _given(
            launcher=section.choice("launcher", LAUNCHERS),
            launcher_overrides=section.text("launcher_overrides"),
            command_timeout=section.duration("command_timeout"),
        )
        if system == "pbs":
            block |= _given(launcher_bind=section.text("launcher_bind"), preemptible=section.flag("preemptible"))
            if "launcher_bind" in block and block.get("launcher", "mpiexec") != "mpiexec":
                raise section.refusal("requires the launcher mpiexec", "launcher_bind")
    section.done()
    return block


def _read_words(section: Section, system: str) -> dict[str, Any]:
    """Read the words of a resource request, which choose the nodes."""
    words = _given(**{word: _word(section, word) for word in _WORDS[system]})
    prefix = {"slurm": "#SBATCH", "pbs": "#PBS"}[system]
    for line in filter(None, map(str.strip, words.get("scheduler_options", "").splitlines())):
        if not line.startswith(f"{prefix} "):
            raise section.refusal(f"each line begins with '{prefix} ', got {line!r}", "scheduler_options")
    return words


def _read_kinds(top: Section, system: str, block: Mapping[str, Any], node: NodeShape) -> tuple[SiteKind, ...]:
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
        own = _given(worker_init=keys.text("worker_init"))
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


def _name(section: Section, key: str) -> str | None:
    """Read an address or interface, which becomes part of the command that starts the workers."""
    value = section.text(key)
    if value is not None and not re.fullmatch(_NAME, value):
        raise section.refusal(f"must be an address or a name of letters, digits and '.:_-@%', got {value[:80]!r}", key)
    return value


def _word(section: Section, key: str) -> str | None:
    """Read a value that Parsl inserts into a script or command line unquoted: it must not inject anything."""
    value = section.text(key)
    if key != "scheduler_options" and value is not None and not re.fullmatch(r"[^\s;$`\"'\\<>]+", value):
        raise section.refusal(f"must not contain blanks or shell metacharacters, got {value!r}", key)
    return value


def _read_node(section: Section, system: str) -> NodeShape:
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
    given = _given(image=keys.required("image", "/images/torch.sif"), command=keys.text("command"), **lists)
    container = keys.checked(Container, **given)
    keys.done()
    return container


def _read_globus(checkpoints: Section, directory: Path | None) -> GlobusSettings | None:
    """Read ``checkpoints.globus``: where the checkpoint directory is on Globus, and home."""
    if not checkpoints.has("globus"):
        return None
    if directory is None:
        raise checkpoints.refusal("needs checkpoints.directory: the directory that the collection shows", "globus")
    keys = checkpoints.section("globus")
    home = keys.section("home")
    local, there = (
        section.checked(
            CollectionPath,
            section.required("collection", "6c54cade-bde5-45c1-bdea-f4bd71dba2cc"),
            section.required("path", "/~/freetrain"),
        )
        for section in (keys, home)
    )
    settings = keys.checked(GlobusSettings, local, there, **_given(lease=keys.duration("lease")))
    for section in (home, keys):
        section.done()
    return settings


def _read_settings(top: Section) -> tuple[PlannerSettings, dict[str, Any]]:
    """Read the sections planner, manners and trainings: the arguments of planner and executor."""
    planner, manners, trainings = top.section("planner"), top.section("manners"), top.section("trainings")
    values: dict[str, Any] = {}
    for item in fields(PlannerSettings):
        section = manners if item.name in _MANNERS else planner
        read = section.duration if item.type == "timedelta" else section.count
        values |= _given(**{item.name: read(item.name)})
    settings = planner.checked(PlannerSettings, **values)
    costs = trainings.section("rescale_costs")
    executor = _given(
        policy=_read_policy(trainings),
        grace=trainings.duration("grace", positive=True),
        trainings=TrainingSettings(
            **_given(
                rescale_costs=read_costs(costs) if trainings.has("rescale_costs") else None,
                heartbeat_timeout=trainings.duration("heartbeat_timeout", positive=True),
                peer_timeout=trainings.duration("peer_timeout", positive=True),
                max_restarts=trainings.count("max_restarts", least=0),
                threads_per_slot=trainings.count("threads_per_slot"),
            )
        ),
        manners=Manners(
            **_given(
                poll_interval=manners.duration("poll_interval", positive=True),
                submissions_per_minute=manners.count("submissions_per_minute"),
                max_refusals=manners.count("max_refusals"),
                max_failed_blocks=manners.count("max_failed_blocks"),
            )
        ),
    )
    for section in (planner, manners, trainings):
        section.done()
    return settings, executor


def _read_policy(trainings: Section) -> PolicyLike | None:
    name, objective = trainings.text("policy"), trainings.text("objective")
    if name is None and objective is None:
        return None
    from freetrain_parsl.planning.policies import DEFAULT_POLICY, resolve_policy

    name = name or DEFAULT_POLICY
    trainings.checked(resolve_policy, name, key="policy")
    return name if objective is None else trainings.checked(resolve_policy, name, objective, key="objective")


def read_costs(section: Section) -> RescaleCosts:
    """Read the durations ``up``, ``down`` and ``start``."""
    costs = RescaleCosts(**_given(**{item.name: section.duration(item.name) for item in fields(RescaleCosts)}))
    section.done()
    return costs
