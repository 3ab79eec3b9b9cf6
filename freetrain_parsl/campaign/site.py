"""A site: the settings of a `FreeTrainExecutor` for one cluster, read from a YAML file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.yaml_file import Section, Variables, user_path
from freetrain_parsl.errors import InvalidInput, did_you_mean
from freetrain_parsl.executor.settings import CheckpointSettings, Manners, TrainingSettings
from freetrain_parsl.planning.settings import PlannerSettings, RescaleCosts
from freetrain_parsl.strict_yaml import read_text
from freetrain_parsl.trackers.settings import parse_trackers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.executor.htex.launch import Container
    from freetrain_parsl.planning.policies import PolicyLike

__all__ = ["NodeShape", "Site", "shipped_sites"]

SYSTEMS = ("local", "slurm", "pbs")
LAUNCHERS = ("srun", "mpiexec", "mpirun", "single")

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
        file = _find(Path(path))
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
        )

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


def _find(path: Path) -> Path:
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
        words = {
            "slurm": ("partition", "account", "qos", "constraint", "gres", "scheduler_options", "windows_in"),
            "pbs": ("queue", "account", "select_options", "scheduler_options", "windows_in"),
        }[system]
        block |= _given(**{word: _word(section, word) for word in words})
        block |= _given(
            launcher=section.choice("launcher", LAUNCHERS),
            launcher_overrides=section.text("launcher_overrides"),
            command_timeout=section.duration("command_timeout"),
        )
        if system == "pbs":
            block |= _given(launcher_bind=section.text("launcher_bind"), preemptible=section.flag("preemptible"))
            if "launcher_bind" in block and block.get("launcher", "mpiexec") != "mpiexec":
                raise section.refusal("requires the launcher mpiexec", "launcher_bind")
        prefix = {"slurm": "#SBATCH", "pbs": "#PBS"}[system]
        for line in filter(None, map(str.strip, block.get("scheduler_options", "").splitlines())):
            if not line.startswith(f"{prefix} "):
                raise section.refusal(f"each line begins with '{prefix} ', got {line!r}", "scheduler_options")
    section.done()
    return block


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
    gpus = section.count("gpus", least=0, most=_MOST_SLOTS)
    accelerators: int | tuple[str, ...] = gpus or 0
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
    shape = NodeShape(
        cores=section.count("cores"),
        gpus=gpus,
        memory=section.memory("memory"),
        slots=slots or number or 1,
        accelerators=accelerators,
        exclusive=section.flag("exclusive") is not False,
        python=_read_python(section),
        container=_read_container(section),
    )
    section.done()
    return shape


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
