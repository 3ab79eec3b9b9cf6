"""Choose the batch system to query, and its options: from a site file, the command line, or what is installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from freetrain_parsl.errors import FreeTrainError, UsageError, did_you_mean
from freetrain_parsl.executor.batch.systems import SYSTEMS
from freetrain_parsl.planning.settings import DEFAULT_COSTS, PlannerSettings, RescaleCosts
from freetrain_parsl.screen import say
from freetrain_parsl.windows.system import NodeResources

if TYPE_CHECKING:
    from freetrain_parsl.campaign.files.yaml_file import Variables
    from freetrain_parsl.campaign.site.site import Site
    from freetrain_parsl.planning.policies import PolicyLike
    from freetrain_parsl.windows.base import WindowSource
    from freetrain_parsl.windows.system import BatchSystem

ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="SITE",
        help="Site file, or the name of a shipped one, such as polaris. Default: your site.yaml in this directory.",
    ),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Value of ${NAME} in the files.")
]
SystemOption = Annotated[
    str | None,
    typer.Option("--system", metavar="slurm|pbs|local", help="Batch system to query. Default: the installed one."),
]
PartitionOption = Annotated[str | None, typer.Option("--partition", metavar="NAME", help="Partition, or PBS queue.")]
AccountOption = Annotated[str | None, typer.Option("--account", metavar="NAME", help="Account of the jobs.")]
QosOption = Annotated[str | None, typer.Option("--qos", metavar="NAME", help="Quality of service (Slurm).")]
ConstraintOption = Annotated[
    str | None, typer.Option("--constraint", metavar="WORDS", help="Features that nodes must have (Slurm).")
]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", metavar="NAME|DIR", help="Embedded cluster to query, if several run.")
]

_LEAST_INTERVAL = 2.0  # seconds between rounds of queries to a shared batch system


@dataclass(frozen=True)
class SourceOptions:
    """Command-line options about the batch system; see the options' own help."""

    config: ConfigOption = None
    system: SystemOption = None
    partition: PartitionOption = None
    account: AccountOption = None
    qos: QosOption = None
    constraint: ConstraintOption = None
    cluster: ClusterOption = None


@dataclass(frozen=True)
class ChosenSource:
    """A batch system to query.

    Parameters
    ----------
    source
        Window source that queries it.
    title
        Its name in headings.
    settings, policy, costs
        From the site, or the defaults; `costs` for training jobs that do not set any.
    least_interval
        Minimum seconds between rounds of queries.
    remark
        Why this one was chosen, if there were several; lines for standard error.
    speeds
        Kind of node -> its speed, where the site has several kinds.
    slots_per_node
        Kind of node -> its number of slots; the only kind has the name ``""``.
    units_per_node
        Number of slots of a node where training jobs share nodes, otherwise 1.
    describe_unused
        Returns which GPUs of the nodes no block uses; empty: none.
    """

    source: WindowSource
    title: str
    settings: PlannerSettings = field(default_factory=PlannerSettings)
    policy: PolicyLike = "milp"
    costs: RescaleCosts = DEFAULT_COSTS
    least_interval: float = _LEAST_INTERVAL
    remark: str = ""
    speeds: Mapping[str, float] = field(default_factory=dict)
    slots_per_node: Mapping[str, int] = field(default_factory=lambda: {"": 1})
    units_per_node: int = 1
    describe_unused: Callable[[], str] = str


@contextmanager
def errors_in_one_line(verb: str) -> Iterator[None]:
    """End a read-only verb: report any error in one line on standard error, with exit code 2."""
    try:
        yield
    except FreeTrainError as error:
        say(f"freetrain {verb}: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def with_source_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a read-only verb ``--set`` and the options of `SourceOptions`.

    They replace its parameter `options`, and it is called with a `SourceOptions` and the `Variables`. An error is
    reported in one line, see `errors_in_one_line`.
    """
    shared = {**get_type_hints(SourceOptions, include_extras=True), "set_": SetOption}

    @wraps(verb)
    def call(**given: Any) -> None:
        with errors_in_one_line(verb.__name__):
            options = {name: given.pop(name) for name in shared}
            variables = read_variables(options.pop("set_"))
            verb(options=SourceOptions(**options), variables=variables, **given)

    own = inspect.signature(verb).parameters
    call.__annotations__ = {name: own[name].annotation for name in own if name not in ("options", "variables")}
    types = get_type_hints(call, include_extras=True) | shared
    names = [word for name in own if name != "variables" for word in (shared if name == "options" else [name])]
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # for typer
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=own[name].default if name in own else None,
                annotation=types[name],
            )
            for name in names
        ]
    )
    return call


def read_variables(settings: list[str] | None) -> Variables:
    """Parse the values of ``--set``."""
    from freetrain_parsl.campaign.files.yaml_file import Variables

    return Variables.parse(settings or ())


def choose_source(options: SourceOptions, variables: Variables) -> ChosenSource:
    """Choose the batch system: the site's, else the one named, else that of ``site.yaml``, else the installed one.

    A ``site.yaml`` in the current directory is not used beside any other option: they say what to query.

    Parameters
    ----------
    options
        From the command line.
    variables
        For the site file.

    Raises
    ------
    UsageError
        Options contradict each other, or no batch system is available.
    ClusterGone
        The chosen embedded cluster is not running.
    """
    if options.config is not None:
        return _from_site(options, variables)
    from freetrain_parsl.campaign.site.site import SITE_FILE, find_own_site

    remark = ""
    if options != SourceOptions():
        if SITE_FILE.exists():
            given = ", ".join(f"--{name}" for name, value in asdict(options).items() if value is not None)
            remark = f"{SITE_FILE} is not used, since {given} was given"
    else:
        own = find_own_site(variables)
        if own.site is not None:
            return _of_site(own.site, own.remark)
        remark = own.remark
    system, why = _choose_system(options)
    request = _request(options)
    for name in request:
        if name not in system.options:
            raise UsageError(f"--{name} is not an option for {system.title}")
    return ChosenSource(
        _make_source(system, request),
        _title(system, options.partition),
        least_interval=_LEAST_INTERVAL if system.shared else 0.0,
        remark="\n".join(filter(None, (remark, why))),
    )


def _from_site(options: SourceOptions, variables: Variables) -> ChosenSource:
    from freetrain_parsl.campaign.site.site import Site

    for name, value in asdict(options).items():
        if name != "config" and value is not None:
            raise UsageError(f"--{name} and --config: the site file sets this; give only one of them")
    return _of_site(Site.load(str(options.config), variables))


def _of_site(site: Site, remark: str = "") -> ChosenSource:
    from freetrain_parsl.campaign.site.providers import ask_slots, describe_unused, make_window_source

    system, site = SYSTEMS[site.system], ask_slots(site)
    kinds = ", ".join(kind.name for kind in site.kinds)
    partition = site.block.get(system.queue)
    title = f"{system.title}, nodes of the kinds {kinds}" if kinds else _title(system, partition)
    source = make_window_source(site)
    return ChosenSource(
        source,
        f"site {site.name}, {title}",
        settings=site.planner_settings,
        policy=site.executor_settings.get("policy", ChosenSource.policy),
        costs=site.executor_settings["trainings"].rescale_costs,
        speeds={kind.name: kind.speed for kind in site.kinds},
        slots_per_node=site.slots_per_node,
        units_per_node=site.units_per_node,
        describe_unused=partial(describe_unused, site, source),
        least_interval=_LEAST_INTERVAL if system.shared else 0.0,
        remark=remark,
    )


def known_systems() -> list[BatchSystem]:
    """Return all batch systems; which comes first is chosen first: those that are shared."""
    return sorted(SYSTEMS.usable(), key=lambda system: not system.shared)


def system_named(name: str) -> BatchSystem:
    """Return the batch system that ``--system`` names.

    Raises
    ------
    UsageError
        There is no such batch system.
    """
    if name not in SYSTEMS:
        *first, last = (system.name for system in known_systems())
        raise UsageError(
            f"--system must be {', '.join(first)} or {last}, got {name!r}{did_you_mean(name, [*first, last])}"
        )
    return SYSTEMS[name]


def unshared_system() -> BatchSystem:
    """Return the batch system that needs nothing but this host."""
    return known_systems()[-1]


def _choose_system(options: SourceOptions) -> tuple[BatchSystem, str]:
    """Return the system, and why it was chosen if others are available."""
    if options.system is not None:
        return system_named(options.system), ""
    if options.cluster is not None:
        return unshared_system(), ""
    here = [system for system in known_systems() if system.is_here()] or [unshared_system()]
    chosen, *others = here
    if not others:
        return chosen, ""
    choices = " or ".join(f"--system {system.name}" for system in others)
    return chosen, f"using {chosen.title}, since {chosen.command} is on PATH; use {choices} for another"


def _request(options: SourceOptions) -> dict[str, str]:
    """Return the options that choose nodes."""
    named = {key: value for key, value in asdict(options).items() if key not in ("config", "system")}
    return {key: value for key, value in named.items() if value is not None}


def _make_source(system: BatchSystem, request: Mapping[str, str]) -> WindowSource:
    """Return the source of the windows of the nodes that these options choose, as a site file would."""
    block = {system.queue if name == "partition" else name: value for name, value in request.items()}
    return system.source(block, NodeResources())


def _title(system: BatchSystem, partition: str | None) -> str:
    if not system.queue:
        return system.title.removeprefix("the ")
    return f"{system.title}, {f'{system.queue} {partition}' if partition else f'default {system.queue}'}"
