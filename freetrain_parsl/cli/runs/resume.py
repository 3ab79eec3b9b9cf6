"""``freetrain resume``: continues a campaign that was stopped, or whose driver died."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from freetrain_parsl.campaign.detached import drive_detached
from freetrain_parsl.campaign.directories import find_run, kind_of
from freetrain_parsl.campaign.run import CampaignRun, refuse_living_driver
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.cli.runs.campaign_view import drive_and_report, print_detached
from freetrain_parsl.cli.runs.run_directory import RunDirectory
from freetrain_parsl.cli.sources import errors_in_one_line
from freetrain_parsl.errors import UsageError
from freetrain_parsl.executor.htex.worker_pool import import_lean_parsl
from freetrain_parsl.protocol.options import check_on_code_change

if TYPE_CHECKING:
    from freetrain_parsl.protocol.options import OnCodeChange

__all__ = ["resume"]


def resume(
    run_dir: RunDirectory = None,
    config: Path | None = typer.Option(
        None, metavar="SITE", help="Continue with another site file. Default: the run's original one."
    ),
    retry_failed: bool = typer.Option(
        False, "--retry-failed", help="Retry all failed training jobs from their checkpoints."
    ),
    retry: list[str] = typer.Option([], "--retry", metavar="NAME", help="Retry this failed or cancelled training job."),
    on_code_change: str | None = typer.Option(
        None,
        metavar="CHOICE",
        help="What to do with training jobs whose code has changed: 'refuse', 'resume' from their checkpoints, or "
        "'restart'. Default: as set in the campaign.",
    ),
    detach: bool = typer.Option(False, "--detach", help="Return at once; the driver continues in the background."),
    json: bool = typer.Option(False, "--json", help="Print the results as JSON at the end; progress goes to stderr."),
) -> None:
    """Clean up after a dead driver, then continue the unfinished training jobs."""
    with errors_in_one_line("resume"):
        if detach and json:
            raise UsageError("--detach and --json exclude each other; 'freetrain status --json' prints the results")
        if on_code_change is not None:
            check_on_code_change(on_code_change)
        directory = find_run(run_dir)
        if (kind := kind_of(RunStore(directory.absolute()))) is not None:  # it refuses the runs of others
            if config is not None or on_code_change is not None or detach:
                raise UsageError(
                    f"{directory} is {kind.described}: it continues with the files of its start, here; give only "
                    "--retry, --retry-failed and --json"
                )
            kind.resume(directory, retry=retry, retry_failed=retry_failed, as_json=json)
            return
        import_lean_parsl()  # before site and apps import Parsl
        campaign_run = CampaignRun.reopen(directory, config, cast("OnCodeChange | None", on_code_change))
        refuse_living_driver(campaign_run.store)
        if retry_failed:
            campaign_run.store.retry_failed()
        for name in retry:
            campaign_run.store.retry(name)
        if detach:
            drive_detached(campaign_run.directory, config=config, on_code_change=on_code_change)
            print_detached(campaign_run.directory)
            return
    drive_and_report(campaign_run, as_json=json, resuming=True)
