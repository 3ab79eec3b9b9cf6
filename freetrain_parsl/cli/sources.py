"""Which batch system a verb asks, and with which options: a site file, options of the command line, or what is here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freetrain_parsl.errors import FreeTrainError, UsageError, did_you_mean
from freetrain_parsl.planning.model import DEFAULT_COSTS, RescaleCosts
from freetrain_parsl.planning.settings import PlannerSettings

if TYPE_CHECKING:
    from freetrain_parsl.campaign.yaml_file import Variables
    from freetrain_parsl.windows.base import WindowSource

ConfigOption = Annotated[
    str | None,
    typer.Option("--config", metavar="SITE", help="Site file, or the name of one that is shipped, such as polaris."),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Value of ${NAME} in the files.")
]
SystemOption = Annotated[
    str | None,
    typer.Option("--system", metavar="slurm|pbs|local", help="Batch system to ask. Default: the one that is here."),
]
PartitionOption = Annotated[str | None, typer.Option("--partition", metavar="NAME", help="Partition, or queue of PBS.")]
AccountOption = Annotated[str | None, typer.Option("--account", metavar="NAME", help="Account of the jobs.")]
QosOption = Annotated[str | None, typer.Option("--qos", metavar="NAME", help="Quality of service (Slurm).")]
ConstraintOption = Annotated[
    str | None, typer.Option("--constraint", metavar="WORDS", help="Features that nodes must have (Slurm).")
]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", metavar="NAME|DIR", help="Embedded cluster to ask, if several run.")
]

_COMMANDS = {"slurm": "sinfo", "pbs": "pbsnodes"}  # whose being on PATH tells that the system is here
_TITLES = {"slurm": "Slurm", "pbs": "PBS", "local": "the embedded cluster"}
_OPTIONS = {
    "slurm": ("partition", "account", "qos", "constraint"),
    "pbs": ("partition", "account"),
    "local": ("cluster",),
}
_LEAST_INTERVAL = 2.0  # seconds between rounds of queries to a batch system that others use


@dataclass(frozen=True)
class SourceOptions:
    """What the command line says of the batch system; see the options' own help."""

    config: str | None = None
    system: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    cluster: str | None = None


@dataclass(frozen=True)
class ChosenSource:
    """A batch system to ask.

    Parameters
    ----------
    source
        What asks it.
    title
        What it is called in headings.
    settings, policy, costs
        Of the site, or the defaults; `costs` for trainings that state none.
    least_interval
        Seconds between rounds of queries, at least.
    remark
        Why it was this one, where there was a choice.
    """

    source: WindowSource
    title: str
    settings: PlannerSettings = field(default_factory=PlannerSettings)
    policy: str = "milp"
    costs: RescaleCosts = DEFAULT_COSTS
    least_interval: float = _LEAST_INTERVAL
    remark: str = ""


@contextmanager
def errors_in_one_line(verb: str) -> Iterator[None]:
    """End a verb that only asks: whatever goes wrong is one line on standard error, and exit code 2."""
    try:
        yield
    except FreeTrainError as error:
        typer.echo(f"freetrain {verb}: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def read_variables(settings: list[str] | None) -> Variables:
    """Read what ``--set`` gave."""
    from freetrain_parsl.campaign.yaml_file import Variables

    return Variables.parse(settings or ())


def choose_source(options: SourceOptions, variables: Variables) -> ChosenSource:
    """Choose the batch system: the site's, else the one named, else the one that is here.

    Parameters
    ----------
    options
        Of the command line.
    variables
        For the site file.

    Raises
    ------
    UsageError
        Options contradict each other, or no batch system is here.
    ClusterGone
        The embedded cluster that was meant does not run.
    """
    if options.config is not None:
        return _from_site(options, variables)
    system, remark = _choose_system(options)
    for name in ("partition", "account", "qos", "constraint", "cluster"):
        if getattr(options, name) is not None and name not in _OPTIONS[system]:
            raise UsageError(f"--{name} is no option for {_TITLES[system]}")
    return ChosenSource(
        _make_source(system, options),
        _title(system, options.partition),
        least_interval=0.0 if system == "local" else _LEAST_INTERVAL,
        remark=remark,
    )


def _from_site(options: SourceOptions, variables: Variables) -> ChosenSource:
    from freetrain_parsl.campaign.site import Site

    for name in ("system", "partition", "account", "qos", "constraint", "cluster"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} and --config: the site file says that; leave one of them out")
    site = Site.load(str(options.config), variables)
    given: dict[str, Any] = {
        name: site.executor_settings[key]
        for name, key in (("policy", "policy"), ("costs", "rescale_costs"))
        if key in site.executor_settings
    }
    partition = site.block.get("queue" if site.system == "pbs" else "partition")
    return ChosenSource(
        site.window_source(),
        f"site {site.name}, {_title(site.system, partition)}",
        settings=site.planner_settings,
        least_interval=0.0 if site.system == "local" else _LEAST_INTERVAL,
        **given,
    )


def _choose_system(options: SourceOptions) -> tuple[str, str]:
    """Name the system, and say why this one if others are here too."""
    if options.system is not None:
        if options.system not in _OPTIONS:
            hint = did_you_mean(options.system, _OPTIONS)
            raise UsageError(f"--system must be slurm, pbs or local, got {options.system!r}{hint}")
        return options.system, ""
    if options.cluster is not None:
        return "local", ""
    here = [system for system, command in _COMMANDS.items() if shutil.which(command)]
    if not here:
        return "local", ""
    others = [*here[1:], *(["local"] if _embedded_cluster_runs() else [])]
    if not others:
        return here[0], ""
    choices = " or ".join(f"--system {system}" for system in others)
    return here[0], f"asked {_TITLES[here[0]]}, since {_COMMANDS[here[0]]} is on PATH; {choices} asks another"


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
        from freetrain_parsl.windows.pbs.source import PbsWindowSource

        return PbsWindowSource(queue=options.partition, account=options.account)
    from freetrain_parsl.cluster.client import ClusterClient
    from freetrain_parsl.cluster.window_source import LocalWindowSource

    return LocalWindowSource(ClusterClient(options.cluster))


def _title(system: str, partition: str | None) -> str:
    if system == "local":
        return "embedded cluster"
    word = "queue" if system == "pbs" else "partition"
    return f"{_TITLES[system]}, {f'{word} {partition}' if partition else f'default {word}'}"
