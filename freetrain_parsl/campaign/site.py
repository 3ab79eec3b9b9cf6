"""A site: how a `FreeTrainExecutor` is made for one machine, read from a YAML file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.yaml_file import Section, Variables, user_path
from freetrain_parsl.errors import InvalidInput, did_you_mean
from freetrain_parsl.planning.model import RescaleCosts
from freetrain_parsl.planning.settings import PlannerSettings
from freetrain_parsl.strict_yaml import read_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from parsl.providers.base import ExecutionProvider

    from freetrain_parsl.executor.executor import FreeTrainExecutor
    from freetrain_parsl.executor.htex.launch import Container
    from freetrain_parsl.windows.base import WindowSource

__all__ = ["NodeShape", "Site", "shipped_sites"]

SYSTEMS = ("local", "slurm", "pbs")
LAUNCHERS = ("srun", "mpiexec", "mpirun", "single")

_MANNERS = ("max_pending_blocks",)  # settings of the planner that stand among the manners in a file
_NAME = r"[A-Za-z0-9._:@%-]{1,255}"
_MOST_SLOTS = 1024
_MOST_EMBEDDED = 10_000  # nodes of an embedded cluster: they are processes of one machine
_LEAST_FREE = 256 * 10**6  # bytes


@dataclass(frozen=True)
class NodeShape:
    """What a block asks of each node; ``None`` where it does not say.

    Parameters
    ----------
    cores, gpus
        Counts.
    memory
        Bytes.
    slots
        Trainings that run on it side by side: its accelerators, or 1.
    accelerators
        How many, or their names, one a slot.
    exclusive
        Whether blocks take whole nodes.
    python
        The nodes' Python, by path or by a name that is on PATH after ``worker_init``; ``None``: the driver's.
    container
        What it runs in.
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
    """A site file that was read and checked. Nothing was asked of the batch system yet.

    Parameters
    ----------
    name
        For people, and part of no file name.
    system
        ``local`` (the embedded cluster), ``slurm`` or ``pbs``.
    file
        As it was named.
    text
        The file's text, as it was.
    variables
        What ``${NAME}`` stood for in it.
    block
        Keys of the section of that name: what a job asks for.
    node
        What a block asks of each node.
    planner_settings
        What is assumed of the site.
    executor_settings
        The other arguments of `FreeTrainExecutor`.
    driver_interface
        Network interface of this host at which the nodes reach the driver; ``None``: found out by trying.
    checkpoint_dir
        ``None``: in the run directory.
    least_free
        Bytes that must be free where checkpoints go.
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
            The file, or the name of one that is shipped, such as ``polaris``.
        variables
            Values for ``${NAME}``; default: the environment.

        Raises
        ------
        InvalidInput
            It cannot be read, or says what cannot be; file and line are named.
        """
        file = _find(Path(path))
        return cls.parse(read_text(file, "site file"), str(file), variables or Variables())

    @classmethod
    def parse(cls, text: str, file: str, variables: Variables) -> Site:
        """Read the text of a site file; `file` is its name in messages."""
        top = Section.parse(text, file, variables)
        name = top.text("site") or Path(file).stem
        system = top.choice("system", SYSTEMS)
        if system is None:
            raise top.refusal(f"'system' is missing; it is one of {', '.join(SYSTEMS)}")
        node = _read_node(top.section("node"), system)
        block = _read_block(top.section("block"), system)
        planner, executor = _read_settings(top)
        network, checkpoints = top.section("network"), top.section("checkpoints")
        executor |= _given(
            address=_name(network, "driver_address"),
            interface=_name(network, "node_interface"),
            checkpoint_interval=checkpoints.duration("interval", positive=True),
        )
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
        """Whether the batch system runs on when the driver ends: all but an embedded cluster of the driver's own."""
        return self.system != "local" or "cluster" in self.block

    def provider(self, import_paths: Sequence[Path] = (), run_dir: Path | None = None) -> ExecutionProvider:
        """Make the Parsl provider that submits this site's blocks.

        Parameters
        ----------
        import_paths
            Directories that the nodes, too, must find modules in.
        run_dir
            For an embedded cluster of the driver's own.

        Raises
        ------
        UsageError
            Parsl refuses the keys.
        """
        from freetrain_parsl.campaign.providers import make_provider

        return make_provider(self, import_paths, run_dir)

    def window_source(self) -> WindowSource:
        """Make what asks the site's batch system, without Parsl.

        Raises
        ------
        ClusterGone
            It is an embedded cluster, and not running.
        """
        from freetrain_parsl.campaign.providers import make_window_source

        return make_window_source(self)

    def executor(
        self, *, run_dir: Path | None = None, run_id: str | None = None, import_paths: Sequence[Path] = ()
    ) -> FreeTrainExecutor:
        """Make the executor; it is Parsl's to start.

        Parameters
        ----------
        run_dir
            Checkpoints go there unless the site says otherwise.
        run_id
            Part of the names of its jobs.
        import_paths
            Directories that the nodes, too, must find modules in.

        Raises
        ------
        UsageError, CheckpointError
            It refuses the settings.
        """
        from freetrain_parsl.campaign.providers import driver_address
        from freetrain_parsl.executor.executor import FreeTrainExecutor

        settings = dict(self.executor_settings)
        if self.driver_interface is not None:
            settings["address"] = driver_address(self.driver_interface, self.file)
        accelerators = self.node.accelerators
        container = self.node.container
        if container is not None and import_paths:
            container = replace(container, binds=(*map(str, import_paths), *container.binds))
        checkpoints = self.checkpoint_dir or (None if run_dir is None else run_dir / "checkpoints")
        return FreeTrainExecutor(
            provider=self.provider(import_paths, run_dir),
            windows=None if self.system == "local" else self.window_source(),
            planner=self.planner_settings,
            checkpoint_dir=checkpoints,
            slots_per_node=self.node.slots,
            available_accelerators=accelerators if isinstance(accelerators, int) else list(accelerators),
            node_python=self.node.python,
            container=container,
            job_tag=run_id,
            **settings,
        )


def shipped_sites() -> dict[str, Path]:
    """Find the site files that come with the package: beside it in a checkout, inside it when installed."""
    package = Path(__file__).parents[1]
    for directory in (package.parent / "configs", package / "configs"):
        if (directory / "local.yaml").is_file():
            return {file.stem: file for file in sorted(directory.glob("*.yaml"))}
    return {}


def _find(path: Path) -> Path:
    """Take a path as it is, and a bare name as that of a shipped file."""
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
            f"there is no file {path}, and no shipped site of that name{did_you_mean(str(path), shipped)}; "
            f"shipped: {', '.join(shipped) or 'none'}"
        )
    return shipped[str(path)]


def _given(**values: Any) -> dict[str, Any]:
    """Keep the keys that the file has: what it does not say is the product's own default."""
    return {key: value for key, value in values.items() if value is not None}


def _read_block(section: Section, system: str) -> dict[str, Any]:
    """Read what a job asks for; the keys are those of the batch system."""
    block = _given(worker_init=section.text("worker_init"))
    if system == "local":
        block |= _given(
            cluster=section.text("cluster"),
            nodes=section.count("nodes", most=_MOST_EMBEDDED),
            grace=section.duration("grace"),
        )
        if "cluster" in block and len(block.keys() & {"nodes", "grace"}):
            raise section.refusal("a cluster that is named has its own nodes and grace; leave these out", "cluster")
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
                raise section.refusal("belongs to the launcher mpiexec", "launcher_bind")
        prefix = {"slurm": "#SBATCH", "pbs": "#PBS"}[system]
        for line in filter(None, map(str.strip, block.get("scheduler_options", "").splitlines())):
            if not line.startswith(f"{prefix} "):
                raise section.refusal(f"each line begins with '{prefix} ', got {line!r}", "scheduler_options")
    section.done()
    return block


def _name(section: Section, key: str) -> str | None:
    """Read an address or an interface; it becomes part of the command that starts the workers."""
    value = section.text(key)
    if value is not None and not re.fullmatch(_NAME, value):
        raise section.refusal(f"is an address or a name of letters, digits and '.:_-@%', got {value[:80]!r}", key)
    return value


def _word(section: Section, key: str) -> str | None:
    """Read a value that Parsl puts into a script or a command line as it is: nothing may come after it."""
    value = section.text(key)
    if key != "scheduler_options" and value is not None and not re.fullmatch(r"[^\s;$`\"'\\<>]+", value):
        raise section.refusal(f"may hold no blanks and nothing special to a shell, got {value!r}", key)
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
        raise section.refusal("is a number, or a list of their names in quotes, such as ['0.0', '0.1']", "accelerators")
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
    """Whether it can be a device's name, such as ``0.1`` or a UUID, in the command that starts the workers."""
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
    """Read planner, manners and trainings: the arguments of planner and executor."""
    planner, manners, trainings = top.section("planner"), top.section("manners"), top.section("trainings")
    values: dict[str, Any] = {}
    for item in fields(PlannerSettings):
        section = manners if item.name in _MANNERS else planner
        if item.type == "float":
            duration = section.duration(item.name)
            values |= _given(**{item.name: None if duration is None else duration.total_seconds()})
        else:
            values |= _given(**{item.name: section.count(item.name)})
    settings = planner.checked(PlannerSettings, **values)
    executor = _given(
        poll_interval=manners.duration("poll_interval", positive=True),
        submissions_per_minute=manners.count("submissions_per_minute"),
        max_refusals=manners.count("max_refusals"),
        max_failed_blocks=manners.count("max_failed_blocks"),
        policy=trainings.text("policy"),
        threads_per_slot=trainings.count("threads_per_slot"),
        grace=trainings.duration("grace", positive=True),
        heartbeat_timeout=trainings.duration("heartbeat_timeout", positive=True),
        peer_timeout=trainings.duration("peer_timeout", positive=True),
        max_restarts=trainings.count("max_restarts", least=0),
    )
    if "policy" in executor:
        from freetrain_parsl.planning.policies import resolve_policy

        trainings.checked(resolve_policy, executor["policy"], key="policy")
    if trainings.has("rescale_costs"):
        executor["rescale_costs"] = read_costs(trainings.section("rescale_costs"))
    for section in (planner, manners, trainings):
        section.done()
    return settings, executor


def read_costs(section: Section) -> RescaleCosts:
    """Read ``up``, ``down`` and ``start``, each a length of time."""
    durations = {item.name: section.duration(item.name) for item in fields(RescaleCosts)}
    section.done()
    return RescaleCosts(**{name: value.total_seconds() for name, value in durations.items() if value is not None})
