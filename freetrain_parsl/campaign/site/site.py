"""A site: the settings of a `FreeTrainExecutor` for one cluster, read from a YAML file."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.files.yaml_file import Section, Variables, user_path
from freetrain_parsl.campaign.site.home import read_home
from freetrain_parsl.campaign.site.site_nodes import read_block, read_kinds, read_name, read_node
from freetrain_parsl.errors import InvalidInput, did_you_mean
from freetrain_parsl.executor.batch.systems import SYSTEMS
from freetrain_parsl.executor.values.specs import parse_trackers
from freetrain_parsl.location import PACKAGE
from freetrain_parsl.planning.settings import PlannerSettings, RescaleCosts
from freetrain_parsl.settings import CheckpointSettings, Manners, TrainingSettings
from freetrain_parsl.strict_yaml import read_text
from freetrain_parsl.windows.system import given_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.campaign.site.home import HomeKind
    from freetrain_parsl.campaign.site.site_nodes import NodeShape, SiteKind
    from freetrain_parsl.planning.policies import PolicyLike

__all__ = ["Site", "find_site_file", "read_costs", "shipped_sites"]

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
    """Read the sections planner, manners and trainings: the arguments of planner and executor."""
    planner, manners, trainings = top.section("planner"), top.section("manners"), top.section("trainings")
    pending = given_values(max_pending_blocks=manners.count("max_pending_blocks"))
    settings = planner.checked(
        PlannerSettings, **planner.fields_of(PlannerSettings, without=("max_pending_blocks",)), **pending
    )
    own = trainings.fields_of(TrainingSettings, positive=True, zero=("max_restarts",))
    if trainings.has("rescale_costs"):
        own["rescale_costs"] = read_costs(trainings.section("rescale_costs"))
    executor = given_values(
        policy=_read_policy(trainings),
        grace=trainings.duration("grace", positive=True),
        trainings=TrainingSettings(**own),
        manners=Manners(**manners.fields_of(Manners, positive=True)),
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
    costs = RescaleCosts(**section.fields_of(RescaleCosts))
    section.done()
    return costs
