"""``freetrain run``: runs the trainings of a campaign file at the site described by a site file."""

from __future__ import annotations

from pathlib import Path

import typer

from freetrain_parsl.campaign.campaign import Campaign
from freetrain_parsl.campaign.run import CampaignRun
from freetrain_parsl.campaign.site import Site
from freetrain_parsl.campaign.yaml_file import Variables
from freetrain_parsl.cli.campaign_view import drive_and_report, print_detached
from freetrain_parsl.cli.sources import errors_in_one_line
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.remote.detached import drive_detached

__all__ = ["run"]


def run(
    campaign: Path = typer.Argument(help="Campaign file: the trainings."),
    config: str = typer.Option(
        "local", metavar="SITE", help="Site file, or the name of a shipped one, such as polaris."
    ),
    settings: list[str] = typer.Option([], "--set", metavar="NAME=VALUE", help="Value of ${NAME} in the files."),
    run_dir: Path | None = typer.Option(None, help="Directory for all files. Default: a new ./freetrain-run-<time>."),
    detach: bool = typer.Option(
        False, "--detach", help="Return once the run is created; its driver goes on in the background."
    ),
    json: bool = typer.Option(False, "--json", help="Print the results as JSON at the end; progress goes to stderr."),
) -> None:
    """Run the trainings of a campaign on the idle nodes of a site."""
    with errors_in_one_line("run"):
        if detach and json:
            raise InvalidInput("--detach and --json exclude each other; 'freetrain status --json' prints the results")
        variables = Variables.parse(settings)
        site = Site.load(config, variables)
        trainings = Campaign.load(campaign, variables)
        variables.refuse_unused()
        campaign_run = CampaignRun.create(trainings, site, run_dir)
        if detach:
            drive_detached(campaign_run.directory)
            print_detached(campaign_run.directory)
            return
    drive_and_report(campaign_run, as_json=json)
