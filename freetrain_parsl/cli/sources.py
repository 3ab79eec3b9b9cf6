"""Choose the batch system to query, and its options: from a site file, the command line, or what is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from freetrain_parsl.errors import FreeTrainError, UsageError, did_you_mean
from freetrain_parsl.planning.settings import DEFAULT_COSTS, PlannerSettings, RescaleCosts
from freetrain_parsl.screen import say

if TYPE_CHECKING:
    from freetrain_parsl.campaign.files.yaml_file import Variables
    from freetrain_parsl.campaign.site.site import Site
    from freetrain_parsl.planning.policies import PolicyLike
    from freetrain_parsl.windows.base import WindowSource

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

_COMMANDS = {"slurm": "sinfo", "pbs": "pbsnodes"}  # if on PATH, the system is available
_TITLES = {"slurm": "Slurm", "pbs": "PBS", "local": "the embedded cluster"}
_OPTIONS = {
    "slurm": ("partition", "account", "qos", "constraint"),
    "pbs": ("partition", "account"),
    "local": ("cluster",),
}
_LEAST_INTERVAL = 2.0  # seconds between rounds of queries to a shared batch system


@dataclass(frozen=True)
class SourceOptions:
    """Command-line options about the batch system; see the options' own help."""

    config: str | None = None
    system: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    cluster: str | None = None


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
        From the site, or the defaults; `costs` for trainings that do not set any.
    least_interval
        Minimum seconds between rounds of queries.
    remark
        Why this one was chosen, if there were several; lines for standard error.
    speeds
        Kind of node -> its speed, where the site has several kinds.
    """

    source: WindowSource
    title: str
    settings: PlannerSettings = field(default_factory=PlannerSettings)
    policy: PolicyLike = "milp"
    costs: RescaleCosts = DEFAULT_COSTS
    least_interval: float = _LEAST_INTERVAL
    remark: str = ""
    speeds: Mapping[str, float] = field(default_factory=dict)


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
    from freetrain_parsl.campaign.site.own_site import SITE_FILE, find_own_site

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
    for name in ("partition", "account", "qos", "constraint", "cluster"):
        if getattr(options, name) is not None and name not in _OPTIONS[system]:
            raise UsageError(f"--{name} is not an option for {_TITLES[system]}")
    return ChosenSource(
        _make_source(system, options),
        _title(system, options.partition),
        least_interval=0.0 if system == "local" else _LEAST_INTERVAL,
        remark="\n".join(filter(None, (remark, why))),
    )


def _from_site(options: SourceOptions, variables: Variables) -> ChosenSource:
    from freetrain_parsl.campaign.site.site import Site

    for name in ("system", "partition", "account", "qos", "constraint", "cluster"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} and --config: the site file sets this; give only one of them")
    return _of_site(Site.load(str(options.config), variables))


def _of_site(site: Site, remark: str = "") -> ChosenSource:
    from freetrain_parsl.campaign.site.providers import make_window_source

    partition = site.block.get("queue" if site.system == "pbs" else "partition")
    kinds = ", ".join(kind.name for kind in site.kinds)
    title = f"{_TITLES[site.system]}, nodes of the kinds {kinds}" if kinds else _title(site.system, partition)
    return ChosenSource(
        make_window_source(site),
        f"site {site.name}, {title}",
        settings=site.planner_settings,
        policy=site.executor_settings.get("policy", ChosenSource.policy),
        costs=site.executor_settings["trainings"].rescale_costs,
        speeds={kind.name: kind.speed for kind in site.kinds},
        least_interval=0.0 if site.system == "local" else _LEAST_INTERVAL,
        remark=remark,
    )


def check_system(name: str) -> None:
    """Check the value of ``--system``.

    Raises
    ------
    UsageError
        There is no such batch system.
    """
    if name not in _OPTIONS:
        raise UsageError(f"--system must be slurm, pbs or local, got {name!r}{did_you_mean(name, _OPTIONS)}")


def installed_systems() -> list[str]:
    """Return the batch systems whose commands are on PATH."""
    return [system for system, command in _COMMANDS.items() if shutil.which(command)]


def _choose_system(options: SourceOptions) -> tuple[str, str]:
    """Return the system's name, and why it was chosen if others are available."""
    if options.system is not None:
        check_system(options.system)
        return options.system, ""
    if options.cluster is not None:
        return "local", ""
    here = installed_systems()
    if not here:
        return "local", ""
    others = [*here[1:], *(["local"] if _embedded_cluster_runs() else [])]
    if not others:
        return here[0], ""
    choices = " or ".join(f"--system {system}" for system in others)
    return here[0], f"using {_TITLES[here[0]]}, since {_COMMANDS[here[0]]} is on PATH; use {choices} for another"


def _embedded_cluster_runs() -> bool:
    from freetrain_parsl.cluster.registry import running_clusters

    return bool(running_clusters())


def _make_source(system: str, options: SourceOptions) -> WindowSource:
    if system == "slurm":
        from freetrain_parsl.windows.slurm.source import SlurmWindowSource

        return SlurmWindowSource(
            partition=options.partition, account=options.account, qos=options.qos, constraint=options.constraint
        )
    if system == "pbs":
        from freetrain_parsl.extensions.pbs.source import PbsWindowSource

        return PbsWindowSource(queue=options.partition, account=options.account)
    from freetrain_parsl.cluster.client import ClusterClient
    from freetrain_parsl.cluster.window_source import LocalWindowSource

    return LocalWindowSource(ClusterClient(options.cluster))


def _title(system: str, partition: str | None) -> str:
    if system == "local":
        return "embedded cluster"
    word = "queue" if system == "pbs" else "partition"
    return f"{_TITLES[system]}, {f'{word} {partition}' if partition else f'default {word}'}"
