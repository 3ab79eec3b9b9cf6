"""``freetrain run``: runs the training jobs of a campaign file at the site of a site file, or at several sites."""

from __future__ import annotations

from pathlib import Path

import typer

from freetrain_parsl.campaign.detached import drive_detached
from freetrain_parsl.campaign.directories import RUN_KINDS
from freetrain_parsl.campaign.files.campaign import Campaign
from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.run import CampaignRun
from freetrain_parsl.campaign.site.site import Site, find_own_site
from freetrain_parsl.cli.runs.campaign_view import drive_and_report, print_detached
from freetrain_parsl.cli.sources import errors_in_one_line
from freetrain_parsl.errors import UsageError
from freetrain_parsl.executor.check_suggestion import check_suggestion
from freetrain_parsl.executor.htex.worker_pool import import_lean_parsl
from freetrain_parsl.screen import say
from freetrain_parsl.training.checkpoints.code.code_identity import code_of

__all__ = ["run"]


def run(
    campaign: Path = typer.Argument(help="Campaign file: the training jobs."),
    config: str | None = typer.Option(
        None,
        metavar="SITE",
        help="Site file, or the name of a shipped one, such as polaris. Default: your site.yaml here, else local.",
    ),
    sites: Path | None = typer.Option(None, metavar="FILE", help="Run at the sites of this list instead."),
    settings: list[str] = typer.Option([], "--set", metavar="NAME=VALUE", help="Value of ${NAME} in the files."),
    run_dir: Path | None = typer.Option(None, help="Directory for all files. Default: a new ./freetrain-run-<time>."),
    assigned: Path | None = typer.Option(
        None, metavar="FILE", help="Train only those that this file assigns to the site, for coordinators of sites."
    ),
    include: list[Path] = typer.Option([], metavar="FILE", help="With --sites: send this file, too."),
    any_versions: bool = typer.Option(
        False, "--any-versions", help="With --sites: accept other versions of Python, freetrain-parsl and torch there."
    ),
    detach: bool = typer.Option(
        False, "--detach", help="Return once the run is created; its driver continues in the background."
    ),
    json: bool = typer.Option(False, "--json", help="Print the results as JSON at the end; progress goes to stderr."),
) -> None:
    """Run the training jobs of a campaign on the idle nodes of a site, or of several sites."""
    if sites is not None:
        with errors_in_one_line("run"):
            if config is not None or assigned is not None:
                raise UsageError(
                    "--sites: the list names the site files and assigns the training jobs; give only --sites"
                )
            if detach:
                raise UsageError("--detach is not for --sites; the sites' drivers continue without this command")
        RUN_KINDS["sites"]().create(
            campaign,
            sites,
            run_dir,
            settings=settings,
            include=include,
            any_versions=any_versions,
            as_json=json,
        )
        return
    with errors_in_one_line("run"):
        if include or any_versions:
            raise UsageError("--include and --any-versions are for --sites")
        if detach and json:
            raise UsageError("--detach and --json exclude each other; 'freetrain status --json' prints the results")
        variables = Variables.parse(settings)
        import_lean_parsl()  # before site and apps import Parsl
        site = Site.load(config, variables) if config is not None else _site_here(variables)
        trainings = Campaign.load(campaign, variables)
        variables.refuse_unused()
        campaign_run = CampaignRun.create(trainings, site, run_dir, assignment=assigned)
        _suggest_check(trainings)
        if detach:
            drive_detached(campaign_run.directory)
            print_detached(campaign_run.directory)
            return
    drive_and_report(campaign_run, as_json=json)


def _site_here(variables: Variables) -> Site:
    """Return the site of the user's ``site.yaml`` in this directory, else the embedded cluster's."""
    own = find_own_site(variables)
    if own.remark:
        say(own.remark, err=True)
    return Site.load("local", variables) if own.site is None else own.site


def _suggest_check(campaign: Campaign) -> None:
    """Print a line if functions of the campaign were never checked."""
    apps = {id(training.app.func): training.app for training in campaign.trainings}
    if line := check_suggestion([(app.func, code_of(app.func)) for app in apps.values()]):
        say(line, err=True)
