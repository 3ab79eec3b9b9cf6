"""``freetrain run``: runs the trainings of a campaign file at the site described by a site file."""

from __future__ import annotations

from pathlib import Path

import typer

from freetrain_parsl.campaign.campaign import Campaign
from freetrain_parsl.campaign.run import CampaignRun
from freetrain_parsl.campaign.site import Site
from freetrain_parsl.campaign.yaml_file import Variables
from freetrain_parsl.cli.campaign_view import drive_and_report
from freetrain_parsl.cli.sources import errors_in_one_line

__all__ = ["run"]


def run(
    campaign: Path = typer.Argument(help="Campaign file: the trainings."),
    config: str = typer.Option(
        "local", metavar="SITE", help="Site file, or the name of a shipped one, such as polaris."
    ),
    settings: list[str] = typer.Option([], "--set", metavar="NAME=VALUE", help="Value of ${NAME} in the files."),
    run_dir: Path | None = typer.Option(None, help="Directory for all files. Default: a new ./freetrain-run-<time>."),
    assigned: Path | None = typer.Option(
        None, metavar="FILE", help="Train only those that this file assigns to the site, for coordinators of sites."
    ),
    json: bool = typer.Option(False, "--json", help="Print the results as JSON at the end; progress goes to stderr."),
) -> None:
    """Run the trainings of a campaign on the idle nodes of a site."""
    with errors_in_one_line("run"):
        variables = Variables.parse(settings)
        site = Site.load(config, variables)
        trainings = Campaign.load(campaign, variables)
        variables.refuse_unused()
        campaign_run = CampaignRun.create(trainings, site, run_dir, assignment=assigned)
    drive_and_report(campaign_run, as_json=json)
