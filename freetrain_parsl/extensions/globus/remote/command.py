"""``freetrain remote``: campaigns at a site from any machine, through Globus Compute."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from freetrain_parsl.campaign.store import TrainingRecord
from freetrain_parsl.campaign.summary import ago
from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.runs.campaign_view import print_trainings
from freetrain_parsl.errors import FreeTrainError, RemoteError, UsageError
from freetrain_parsl.extensions.globus.remote.campaign import RemoteCampaign, RunRecords
from freetrain_parsl.extensions.globus.remote.compute import HUNG, ComputeEndpoint, call_within, poll_delays
from freetrain_parsl.extensions.globus.remote.messages import Versions, field_of
from freetrain_parsl.extensions.globus.remote.preparation import prepare
from freetrain_parsl.screen import say, say_json, say_text

if TYPE_CHECKING:
    from freetrain_parsl.campaign.detached import RunStatus

__all__ = ["remote"]

T = TypeVar("T")

remote = typer.Typer(help="Run campaigns at a site from any machine, through Globus Compute.", no_args_is_help=True)

RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="Run, or its campaign file. Default: the newest one started from here."),
]
EndpointOption = Annotated[
    str | None, typer.Option("--endpoint", metavar="UUID", help="Endpoint. Default: where the run was started.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]

_LOOK = 0.2  # seconds
_GOOD_ENDS = ("finished", "stopped", "interrupted")


@remote.command()
def start(
    campaign: Path = typer.Argument(help="Campaign file: the training jobs."),
    endpoint: str = typer.Option(metavar="UUID", help="Endpoint of Globus Compute at the site."),
    config: str = typer.Option("local", metavar="SITE", help="Site file here, or the name of a shipped one."),
    settings: list[str] = typer.Option([], "--set", metavar="NAME=VALUE", help="Value of ${NAME} in the files."),
    include: list[Path] = typer.Option([], metavar="FILE", help="Send this file, too, such as a word list."),
    any_versions: bool = typer.Option(
        False, "--any-versions", help="Accept other versions of Python, freetrain-parsl and torch at the site."
    ),
    json: JsonOption = False,
) -> None:
    """Send a campaign to a site and start its driver there."""
    with _errors("start"):
        place = ComputeEndpoint(endpoint)
        preparation = prepare(campaign, config, settings=settings, include=include, any_versions=any_versions)
        started = RemoteCampaign.of(preparation, campaign, place, RunRecords())
        if not json:
            packed = preparation.packed
            size = f"{packed.archive.files} files, {len(packed.archive.data) / 1e3:.1f} kB"
            say(f"{started.run}: {len(packed.campaign.trainings)} training jobs, {size}, to endpoint {place.id}")
            if packed.left_out:
                say(f"left out, as their names look like secrets: {', '.join(packed.left_out)}")
        _show(_answer(started.submit(preparation), json), json)


@remote.command()
def check(endpoint: str = typer.Option(metavar="UUID", help="Endpoint of Globus Compute at the site.")) -> None:
    """Call a site, and compare the versions of the software there with those here."""
    with _errors("check"):
        place = ComputeEndpoint(endpoint)
        with ThreadPoolExecutor(1) as calls:
            answer = _answer(calls.submit(call_within, HUNG, lambda: place.call({"verb": "check"})))
        there, here = Versions.parse(field_of(answer, "versions", dict)), Versions.installed()
        say(f"{field_of(answer, 'host', str)}: {there}")
        if mismatch := here.mismatch(there):
            say(f"here: {here}; {mismatch}")
            raise typer.Exit(1)


@remote.command()
def status(run: RunArgument = None, endpoint: EndpointOption = None, json: JsonOption = False) -> None:
    """Show the training jobs of a run, and whether its driver is alive."""
    with _errors("status"):
        _show(_answer(RemoteCampaign.attach(run, endpoint=endpoint).status(), json), json)


@remote.command()
def logs(
    run: RunArgument = None,
    endpoint: EndpointOption = None,
    follow: bool = typer.Option(False, "--follow", "-f", help="Continue until the run ends."),
) -> None:
    """Print the output of the driver."""
    with _errors("logs"):
        campaign = RemoteCampaign.attach(run, endpoint=endpoint)
        answer = _answer(campaign.logs(), quiet=True)
        say_text(answer["text"])
        delays = poll_delays(2.0, 1.3, 20.0)
        while follow and answer["state"] in ("starting", "running", "stopping"):
            time.sleep(next(delays))
            answer = _answer(campaign.logs(answer["offset"]), quiet=True)
            say_text(answer["text"])
            if answer["text"]:
                delays = poll_delays(2.0, 1.3, 20.0)


@remote.command()
def results(run: RunArgument = None, endpoint: EndpointOption = None, json: JsonOption = False) -> None:
    """Show the results of the training jobs."""
    with _errors("results"):
        trainings = _answer(RemoteCampaign.attach(run, endpoint=endpoint).results(), json)
        if json:
            say_json({"trainings": trainings})
        else:
            print_trainings(Screen(), _records(trainings))
        if any(item["state"] != "finished" for item in trainings) or not trainings:
            raise typer.Exit(1)


@remote.command()
def stop(run: RunArgument = None, endpoint: EndpointOption = None, json: JsonOption = False) -> None:
    """Ask the driver to save all training jobs, cancel its batch jobs and exit."""
    with _errors("stop"):
        _show(_answer(RemoteCampaign.attach(run, endpoint=endpoint).stop(), json), json)


@remote.command()
def resume(
    run: RunArgument = None,
    endpoint: EndpointOption = None,
    retry_failed: bool = typer.Option(False, "--retry-failed", help="Retry all failed training jobs."),
    retry: list[str] = typer.Option([], "--retry", metavar="NAME", help="Retry this failed or cancelled training job."),
    on_code_change: str | None = typer.Option(None, metavar="CHOICE", help="As of 'freetrain resume'."),
    json: JsonOption = False,
) -> None:
    """Continue a run that was stopped, or whose driver died."""
    with _errors("resume"):
        campaign = RemoteCampaign.attach(run, endpoint=endpoint)
        future = campaign.resume(retry=retry, retry_failed=retry_failed, on_code_change=on_code_change)
        _show(_answer(future, json), json)


@remote.command()
def clean(
    run: RunArgument = None,
    endpoint: EndpointOption = None,
    delete: bool = typer.Option(False, "--delete", help="Delete the run's files and checkpoints at the site, too."),
) -> None:
    """Cancel the jobs that a dead driver has left at the site."""
    with _errors("clean"):
        answer = _answer(RemoteCampaign.attach(run, endpoint=endpoint).clean(delete=delete))
        say(answer["message"])
        if not answer["done"]:
            raise typer.Exit(1)


@remote.command("list")
def list_runs() -> None:
    """List the runs that were started from here."""
    with _errors("list"):
        now = time.time()
        for record in RunRecords().all():
            say(f"{record.run}  {ago(now - record.created)}  endpoint {record.endpoint}  {record.campaign}")


@contextmanager
def _errors(verb: str) -> Iterator[None]:
    """Report any error in one line; exit with code 2 if the input is wrong, 1 if the service or the site failed."""
    try:
        yield
    except FreeTrainError as error:
        say(f"freetrain remote {verb}: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(130)  # otherwise the interpreter would wait for the call, whose answer nobody needs


def _answer(future: Future[T], quiet: bool = False) -> T:
    """Wait for an answer; Ctrl-C ends the wait, not the run."""
    console = Screen(stderr=True)
    with console.status("waiting for the site") if not quiet and console.is_terminal else nullcontext():
        while not wait([future], _LOOK).done:  # a wait without a timeout would not notice Ctrl-C
            pass
    return future.result()


def _show(status: RunStatus, json: bool) -> None:
    """Print a state; exit with code 1 if the run has failed or died."""
    if json:
        say_json(status.as_json())
    else:
        console = Screen()
        message = f": {status.message}" if status.message else ""
        console.say(f"{status.run} {status.state}{message}")
        console.say(f"on {status.host}, in {status.directory}")
        if status.summary is not None:
            print_trainings(console, _records(status.summary["trainings"]))
    if status.over and status.state not in _GOOD_ENDS:
        raise typer.Exit(1)


def _records(trainings: list[Mapping[str, Any]]) -> list[TrainingRecord]:
    try:
        return [TrainingRecord(**{**item, "nodes": tuple(item["nodes"])}) for item in trainings]
    except (KeyError, TypeError):
        raise RemoteError(
            "the site sent unexpected training jobs; is another version of freetrain-parsl there?"
        ) from None
