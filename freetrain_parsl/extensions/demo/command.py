"""``freetrain demo``: real training jobs on the idle nodes of a busy embedded cluster, shown live."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.live import Live

from freetrain_parsl.cli.console import Screen
from freetrain_parsl.errors import InvalidSettings, UsageError
from freetrain_parsl.executor.run_directory import check_new_run_directory
from freetrain_parsl.interpreters import FREETRAIN, script_command
from freetrain_parsl.location import PACKAGE
from freetrain_parsl.screen import say

if TYPE_CHECKING:
    from freetrain_parsl.cluster.provider import EmbeddedClusterProvider
    from freetrain_parsl.cluster.workload import MainJob
    from freetrain_parsl.executor.executor import FreeTrainExecutor
    from freetrain_parsl.report.projection.run import RunState

__all__ = ["demo"]

_QUEUE_LENGTH = timedelta(seconds=90)
_DELAY_TOLERANCE = 1.0  # seconds; a real batch system's own scheduling cycle is longer


@dataclass(frozen=True)
class _Entry:
    """A training job of the demo: an app, its bounds on nodes, and its arguments."""

    name: str
    app: str
    max_nodes: int
    arguments: dict[str, Any]


# Work for two or three minutes on two cores, in training jobs that differ in size and in how far they scale.
_CAMPAIGN = (
    _Entry("digits-wide", "digits", 4, {"epochs": 40, "width": 48, "lr": 0.05}),
    _Entry("digits-slow", "digits", 2, {"epochs": 30, "width": 32, "lr": 0.02}),
    _Entry("digits-fast", "digits", 2, {"epochs": 30, "width": 32, "lr": 0.1}),
    _Entry("digits-small", "digits", 1, {"epochs": 40, "width": 16, "lr": 0.05}),
    _Entry("char-lm-wide", "char_lm", 4, {"epochs": 10, "width": 64, "lr": 2e-3, "characters": 60_000}),
    _Entry("char-lm-low", "char_lm", 2, {"epochs": 10, "width": 48, "lr": 1e-3, "characters": 50_000}),
    _Entry("char-lm-high", "char_lm", 2, {"epochs": 10, "width": 48, "lr": 4e-3, "characters": 50_000}),
)


def demo(
    nodes: int = typer.Option(8, help="Virtual nodes of the embedded cluster."),
    seed: int = typer.Option(2, help="Seed of the main queue."),
    policy: str = typer.Option("milp", help="Allocation policy: milp, window, ones, equal-share or fcfs."),
    job_log: Path | None = typer.Option(
        None,
        help="Main queue from a job log in Standard Workload Format (.swf, .swf.gz) instead of a generated one.",
    ),
    compression: float = typer.Option(1000.0, help="Seconds of the job log per second."),
    log_start: float = typer.Option(0.0, help="Hour of the job log at which to start."),
    time_limit: float = typer.Option(600.0, help="Seconds after which the demo is aborted."),
    run_dir: Path | None = typer.Option(None, help="Directory for all files. Default: a new ./freetrain-run-<time>."),
    json_file: Path | None = typer.Option(None, "--json", help="Write the figures to this file."),
    page: bool = typer.Option(False, "--page", help="Serve the live page while the demo runs, and print its address."),
) -> None:
    """Run seven training jobs on the idle nodes of a small busy cluster, and show how much they used."""
    from freetrain_parsl.executor.htex.worker_pool import import_lean_parsl
    from freetrain_parsl.planning.policies import resolve_policy

    console = Screen()
    _check_extras(page=page)
    resolve_policy(policy)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UsageError(f"--json {json_file}: there is no directory {json_file.absolute().parent}")
    workload = _workload(nodes, seed, job_log, compression, log_start, time_limit)
    directory = _new_run_directory(run_dir)
    import_lean_parsl()  # before the apps import Parsl
    with _interruptible():
        figures = _run(console, directory, nodes, workload, policy, time_limit, page=page)
    if json_file is not None:
        _write_json(json_file, figures)
    if figures["trainings_completed"] < len(_CAMPAIGN):
        left = len(_CAMPAIGN) - figures["trainings_completed"]
        console.print(f"{left} training jobs did not complete", style="bold red")
        raise typer.Exit(1)


def _write_json(file: Path, figures: dict[str, Any]) -> None:
    from freetrain_parsl.report.output import write_output

    try:
        write_output(file, json.dumps(figures, indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"--json {file}: cannot be written: {error.strerror}") from error


def _check_extras(*, page: bool) -> None:
    needed = ("sklearn", "matplotlib", *(("starlette", "uvicorn") if page else ()))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        extras = "examples,report,dashboard" if page else "examples,report"
        raise UsageError(f"the demo needs {' and '.join(missing)}: pip install 'freetrain-parsl[{extras}]'")


def _new_run_directory(wanted: Path | None) -> Path:
    directory = wanted or Path(f"freetrain-run-{datetime.now().astimezone():%Y%m%d-%H%M%S}")
    made = not directory.exists()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(f"--run-dir {directory} is not empty; give a new one")
        check_new_run_directory(directory, made=made)
    except OSError as error:
        raise UsageError(f"--run-dir {directory}: {error.strerror}; choose another directory") from None
    return directory.absolute()


def _workload(
    nodes: int, seed: int, job_log: Path | None, compression: float, log_start: float, time_limit: float
) -> list[MainJob]:
    from freetrain_parsl.cluster.workload import generate_workload, read_workload

    if time_limit <= 0:
        raise InvalidSettings(f"--time-limit must be positive, got {time_limit:g}")
    if job_log is None:
        # Jobs of 15 s: many windows in the first 90 s.
        return generate_workload(
            nodes=nodes, duration=_QUEUE_LENGTH, seed=seed, load=0.85, mean_run=timedelta(seconds=12)
        )
    return read_workload(
        job_log,
        nodes=nodes,
        compression=compression,
        start=timedelta(hours=log_start),
        duration=_QUEUE_LENGTH * compression,
        seed=seed,
        lenient=True,
    )


def _apps_directory() -> Path:
    """Find the example apps: next to the package in a checkout, inside it when installed."""
    for directory in (PACKAGE.parent / "apps", PACKAGE / "apps"):
        if (directory / "digits.py").is_file():
            return directory
    raise UsageError("the example apps are not installed; run the demo from a checkout of the repository")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make SIGTERM end the demo cleanly, as Ctrl-C does."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        say("freetrain: interrupted; everything was stopped", err=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(
    console: Screen, directory: Path, nodes: int, workload: list[MainJob], policy: str, time_limit: float, *, page: bool
) -> dict[str, Any]:
    import parsl
    from parsl.config import Config

    from freetrain_parsl.cluster.provider import EmbeddedClusterProvider
    from freetrain_parsl.report.figures import run_figures
    from freetrain_parsl.report.projection.run import RunState

    console.say(f"run directory: {directory}")
    provider = EmbeddedClusterProvider(nodes=nodes, workload=tuple(workload), cluster_dir=str(directory / "cluster"))
    executor = _executor(provider, directory, policy)
    apps = _load_apps()
    settings = Config(executors=[executor], run_dir=str(directory / "parsl"), strategy="none", initialize_logging=True)
    with _warm_start(), parsl.load(settings):
        run = RunState(executor.journal_path)
        cluster = provider.ensure_started()
        futures = {
            entry.name: apps[entry.app].options(name=entry.name, max_nodes=min(entry.max_nodes, nodes))(
                **entry.arguments
            )
            for entry in _CAMPAIGN
        }
        with _live_page(console, directory) if page else nullcontext():
            _watch(console, run, futures, cluster.nodes, time_limit)
        usage, delays, history = cluster.usage(), cluster.delays(), cluster.history()
        main_jobs = {stay["job"] for stay in history if stay["kind"] == "main"}
        results = {name: f.result() for name, f in futures.items() if f.done() and f.exception() is None}
    figures = run_figures(
        run.refresh(),
        usage=usage,
        delays=delays,
        main_jobs=len(main_jobs),
        results=results,
        delay_tolerance=_DELAY_TOLERANCE,
    )
    _report(console, run, figures, history, directory)
    return figures


def _executor(provider: EmbeddedClusterProvider, directory: Path, policy: str) -> FreeTrainExecutor:
    """Return settings scaled to windows of seconds instead of minutes."""
    from freetrain_parsl.executor.executor import FreeTrainExecutor
    from freetrain_parsl.planning.policies import POLICIES, Policy
    from freetrain_parsl.planning.settings import PlannerSettings, RescaleCosts
    from freetrain_parsl.settings import CheckpointSettings, RateLimits, TrainingSettings

    second = timedelta(seconds=1)
    make_policy: Callable[..., Policy] = POLICIES[policy]
    return FreeTrainExecutor(
        provider=provider,
        policy=make_policy(horizon=timedelta(seconds=20)),
        checkpoint_dir=directory / "checkpoints",
        planner=PlannerSettings(
            startup=timedelta(seconds=6),
            min_useful=timedelta(seconds=5),
            closing_margin=timedelta(seconds=2),
            max_walltime=timedelta(minutes=2),
            idle_timeout=timedelta(seconds=5),
            settle=timedelta(seconds=1.5),
            max_nodes_per_block=2,
        ),
        trainings=TrainingSettings(
            rescale_costs=RescaleCosts(up=second, down=second, start=second), threads_per_slot=1
        ),
        rate_limits=RateLimits(poll_interval=timedelta(seconds=1), submissions_per_minute=120),
        checkpoints=CheckpointSettings(interval=timedelta(seconds=5)),
    )


def _load_apps() -> dict[str, Any]:
    """Import the example apps here, and make them importable on the nodes."""
    directory = str(_apps_directory())
    sys.path.insert(0, directory)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [directory, os.environ.get("PYTHONPATH")]))
    return {name: importlib.import_module(name).train for name in ("digits", "char_lm")}


@contextmanager
def _warm_start() -> Iterator[None]:
    """Let the nodes, which are all on this machine, import Parsl and torch once."""
    from freetrain_parsl.extensions.demo.warm_start.owner import WarmStart

    with WarmStart() as server:
        os.environ.update(server.environment)
        yield


@contextmanager
def _live_page(console: Screen, directory: Path) -> Iterator[None]:
    """Serve the page of the run in another process, which ends with the block."""
    command = [*script_command(FREETRAIN), "dashboard", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = next((line.strip() for line in server.stdout or () if "http://" in line), "not served")
            console.say(f"live page: {address}")
            yield
        finally:
            server.terminate()


def _watch(
    console: Screen,
    run: RunState,
    futures: dict[str, Future[Any]],
    nodes: Callable[[], dict[str, Any]],
    time_limit: float,
) -> None:
    """Show the run until all futures are done or the time limit is reached."""
    from freetrain_parsl.executor.driver.clock import SteadyClock
    from freetrain_parsl.report.live import live_view

    clock = SteadyClock()
    begin = clock()
    printed: dict[str, str] = {}
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while clock() - begin < time_limit and not all(future.done() for future in futures.values()):
            run.refresh()
            now = clock()
            if console.is_terminal:
                live.update(live_view(run, nodes(), now, now - begin, "FreeTrain demo"))
            else:
                _print_changes(console, run, printed, now - begin)
            time.sleep(0.25)


def _print_changes(console: Screen, run: RunState, printed: dict[str, str], elapsed: float) -> None:
    """Print one line per training job whose nodes or state have changed (without a terminal)."""
    for training in run.trainings.values():
        line = training.state + (f" on {', '.join(training.nodes)}" if training.nodes else "")
        if printed.get(training.name) != line:
            printed[training.name] = line
            share = training.share_done
            done = "" if share is None else f", {share:.0%} done"
            console.say(f"{elapsed:6.1f} s  {training.name:14} {line}{done}")


def _report(
    console: Screen, run: RunState, figures: dict[str, Any], history: list[dict[str, Any]], directory: Path
) -> None:
    from rich.table import Table

    from freetrain_parsl.report.live import training_table
    from freetrain_parsl.report.timeline import draw_timeline

    console.print(training_table(run.trainings.values()))
    for training in run.trainings.values():
        if training.error:
            console.say(f"{training.name}: {training.error}", style="bold red")
    table = Table(box=None, show_header=False, padding=(0, 2))
    rows = {
        "training jobs completed": f"{figures['trainings_completed']} of {figures['trainings']}",
        "fragments, rescales, resumes": (
            f"{figures['fragments']}, {figures['rescales']}, {figures['resumes_from_checkpoint']}"
        ),
        "samples lost, repeated": f"{figures['samples_lost']}, {figures['duplicate_samples']} of {figures['samples']}",
        "idle node-seconds offered": f"{figures['idle_node_seconds_offered']:.0f}",
        "  held by us": f"{figures['idle_node_seconds_used']:.0f}",
        "  in steps that counted": f"{figures['useful_node_seconds']:.0f}",
        "main jobs, delayed": (
            f"{figures['main_jobs']}, {figures['main_jobs_delayed']} by more than {_DELAY_TOLERANCE:g} s "
            f"(worst {figures['main_job_delay_seconds_max']:.2f} s)"
        ),
        "solver": (
            f"{figures['solver']['solves']} solves, median {figures['solver']['median_ms']:.1f} ms, "
            f"max {figures['solver']['max_ms']:.1f} ms"
        ),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    picture = directory / "timeline.png"
    draw_timeline(run, history, picture, title="Nodes over time: main jobs grey, training jobs coloured")
    console.say(f"timeline: {picture}")
    for line in _next_commands(directory):
        console.say(line)


def _next_commands(directory: Path) -> list[str]:
    """Return the commands that open the run, as they are typed in the current directory."""
    script, run = Path(sys.executable).with_name("freetrain"), _typed(directory)
    # `make demo` does not activate the environment.
    known = not script.is_file() or shutil.which("freetrain") == str(script)
    freetrain = "freetrain" if known else _typed(script)
    commands = [
        (f"dashboard {run}", "the page of this run, in your browser; Ctrl-C ends it"),
        (f"status {run}", "its training jobs"),
        (f"explain {run}", "why each is where it is"),
        (f"logs {run} {_CAMPAIGN[0].name}", "what one of them printed"),
        (f"report {run}", "what the run used, by cause, and gave back"),
    ]
    width = max(len(command) for command, _ in commands)
    return ["", *(f"{freetrain} {command:{width}}  # {what}" for command, what in commands)]


def _typed(path: Path) -> str:
    """Return a path as it is typed in the current directory."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
