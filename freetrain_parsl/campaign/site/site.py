"""A site: the settings of a `FreeTrainExecutor` for one cluster, read from a YAML file."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.files.yaml_file import Section, Variables, user_path
from freetrain_parsl.campaign.site.home import read_home
from freetrain_parsl.campaign.site.site_nodes import read_block, read_kinds, read_name, read_node
from freetrain_parsl.errors import InvalidInput, did_you_mean
from freetrain_parsl.executor.batch.systems import SYSTEMS
from freetrain_parsl.executor.values.tracker import parse_trackers
from freetrain_parsl.location import PACKAGE
from freetrain_parsl.planning.settings import PlannerSettings, RescaleCosts
from freetrain_parsl.settings import CheckpointSettings, RateLimits, TrainingSettings
from freetrain_parsl.strict_yaml import read_text
from freetrain_parsl.windows.system import given_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.campaign.site.home import HomeKind
    from freetrain_parsl.campaign.site.site_nodes import NodeShape, SiteKind
    from freetrain_parsl.planning.policies import PolicyLike

__all__ = ["SITE_FILE", "OwnSite", "Site", "find_own_site", "find_site_file", "read_costs", "shipped_sites"]

_LEAST_FREE = 256 * 10**6  # bytes


@dataclass(frozen=True)
class Site:
    """A validated site file. The batch system has not been queried yet.

    Parameters
    ----------
    name
        Display name, not used in file names.
    system
        Name of its batch system: ``slurm``, ``pbs``, ….
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
    home
        Where checkpoints live beyond the site; ``None``: nowhere.
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
    home: HomeKind | None = None

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
        node = read_node(top.section("node"), system)
        block = read_block(top.section("block"), system)
        kinds = read_kinds(top, system, block, node)
        planner, executor = _read_settings(top)
        network, checkpoints = top.section("network"), top.section("checkpoints")
        executor["checkpoints"] = CheckpointSettings(
            **given_values(interval=checkpoints.duration("interval", positive=True))
        )
        executor |= given_values(
            address=read_name(network, "driver_address"),
            interface=read_name(network, "node_interface"),
        )
        tracker = top.value("tracker")
        top.checked(parse_trackers, tracker, key="tracker")
        executor |= given_values(tracker=tracker)
        driver_interface = read_name(network, "driver_interface")
        if driver_interface and "address" in executor:
            raise network.refusal("give driver_address or driver_interface, not both", "driver_address")
        directory, least_free = checkpoints.path("directory"), checkpoints.memory("least_free")
        directory = None if directory is None else directory.absolute()
        home = read_home(checkpoints, directory)
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
            checkpoint_dir=directory,
            least_free=_LEAST_FREE if least_free is None else least_free,
            kinds=kinds,
            home=home,
        )

    @property
    def slots_per_node(self) -> dict[str, int]:
        """Kind of node -> number of its slots; the only kind has the name ``""``."""
        return {kind.name: kind.node.slots for kind in self.kinds} or {"": self.node.slots}

    @property
    def units_per_node(self) -> int:
        """Number of slots of a node if training jobs share nodes, which must have equal numbers; otherwise 1."""
        counts = set(self.slots_per_node.values())
        return counts.pop() if self.node.share and len(counts) == 1 else 1

    def of_kind(self, kind: SiteKind) -> Site:
        """Return the site as if it had nodes of one kind only."""
        inits = (self.block.get("worker_init"), kind.block.get("worker_init"))
        block = {**self.block, **kind.block, **given_values(worker_init="\n".join(filter(None, inits)) or None)}
        return replace(self, block=block, node=kind.node, kinds=())

    @property
    def node_counts(self) -> dict[str, int]:
        """Kind of node -> how many there are, as far as the file states it; the only kind is ``""``."""
        if self.kinds:
            return {kind.name: len(kind.block["only"]) for kind in self.kinds if "only" in kind.block}
        return {"": self.block["nodes"]} if "nodes" in self.block else {}

    @property
    def outlives_driver(self) -> bool:
        """Whether the batch system outlives the driver: all except the driver's own embedded cluster."""
        return SYSTEMS[self.system].outlives_driver(self.block)


def shipped_sites() -> dict[str, Path]:
    """Find the shipped site files: next to the package in a checkout, inside it when installed."""
    for directory in (PACKAGE.parent / "configs", PACKAGE / "configs"):
        if (directory / "local.yaml").is_file():
            return {file.stem: file for file in sorted(directory.glob("*.yaml"))}
    return {}


def find_site_file(path: Path) -> Path:
    """Resolve a path, or the bare name of a shipped file."""
    path = user_path(str(path))
    try:
        exists = path.exists() and not path.is_dir()  # a directory may have the name of a site
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


def _read_settings(top: Section) -> tuple[PlannerSettings, dict[str, Any]]:
    """Read the sections planner, rate_limits and training jobs: the arguments of planner and executor."""
    planner, rate_limits, trainings = top.section("planner"), top.section("rate_limits"), top.section("trainings")
    pending = given_values(
        max_pending_blocks=rate_limits.count("max_pending_blocks"),
        standby_blocks=rate_limits.count("standby_blocks", least=0),
    )
    limits = ("max_pending_blocks", "standby_blocks")
    settings = planner.checked(PlannerSettings, **planner.fields_of(PlannerSettings, without=limits), **pending)
    own = trainings.fields_of(TrainingSettings, positive=True, zero=("max_restarts",))
    if (bind_cores := trainings.flag("bind_cores")) is not None:
        own["bind_cores"] = bind_cores
    if trainings.has("rescale_costs"):
        own["rescale_costs"] = read_costs(trainings.section("rescale_costs"))
    executor = given_values(
        policy=_read_policy(trainings),
        grace=trainings.duration("grace", positive=True),
        trainings=TrainingSettings(**own),
        rate_limits=RateLimits(**rate_limits.fields_of(RateLimits, positive=True)),
    )
    for section in (planner, rate_limits, trainings):
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
    costs = RescaleCosts(**section.fields_of(RescaleCosts))
    section.done()
    return costs


SITE_FILE = Path("site.yaml")
"""Name of the file. Parent directories are not searched: what is used can be seen in the directory."""


@dataclass(frozen=True)
class OwnSite:
    """What the current directory has for a command without ``--config``.

    Parameters
    ----------
    site
        The site of `SITE_FILE`; ``None`` if there is none, or if it is not used.
    remark
        One line for the user: that the file is used, or why not; empty if there is none.
    """

    site: Site | None = None
    remark: str = ""


class _NotUsed(Exception):
    """The file could be somebody else's; the text says why."""


class _Absent(Exception):
    """There is no file."""


def find_own_site(variables: Variables, directory: Path = Path(), *, option: str = "--config") -> OwnSite:
    """Read the site file of the current directory, if it is the caller's.

    Its ``worker_init`` runs as the caller: a file of another user, or one that any user can write, is used only when
    it is named with ``--config``.

    Parameters
    ----------
    variables
        Values of ``${NAME}`` in it.
    directory
        Where to look instead of in the current directory.
    option
        What names another file, for the remark.

    Raises
    ------
    InvalidInput
        The caller's file cannot be read, or a value in it is invalid.
    """
    try:
        text = read_text(directory / SITE_FILE, "site file", opener=_open_own)
    except _Absent:
        return OwnSite()
    except _NotUsed as error:
        return OwnSite(remark=f"{SITE_FILE} is not used, {error}; to use it nevertheless, name it with {option}")
    site = Site.parse(text, str(directory / SITE_FILE), variables)
    return OwnSite(site, f"using {SITE_FILE}; {option} chooses another site")


def _open_own(name: str, flags: int) -> int:
    """Open a file as `open` does, but only the caller's own regular file: what is checked is what is read."""
    try:
        # Without waiting for the writer of a pipe.
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _Absent from None
    except OSError as error:
        why = "it is a symbolic link" if Path(name).is_symlink() else f"it cannot be opened: {error.strerror or error}"
        raise _NotUsed(why) from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        why = "it is not a regular file"
    elif found.st_uid != os.geteuid():
        why = f"it belongs to another user (uid {found.st_uid})"
    elif found.st_mode & stat.S_IWOTH:
        why = "any user can write it"
    else:
        return descriptor
    os.close(descriptor)
    raise _NotUsed(why)
