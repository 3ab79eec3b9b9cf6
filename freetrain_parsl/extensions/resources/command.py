"""``freetrain allocate``: divides several kinds of resources among jobs with workers and parameter servers."""

from __future__ import annotations

import json as json_format
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.options import check_targets, known_name, split_names
from freetrain_parsl.cli.windows import format_duration
from freetrain_parsl.errors import InvalidSettings, UsageError
from freetrain_parsl.extensions.resources.demands import ResourceProblem
from freetrain_parsl.extensions.resources.instances import read_instance
from freetrain_parsl.extensions.resources.policies import (
    RESOURCE_POLICIES,
    KnapsackPolicy,
    ResourceDecision,
    ResourcePolicy,
    reasons_for_nothing,
)
from freetrain_parsl.report.output import write_output
from freetrain_parsl.screen import say

_LONGEST = 86_400.0  # seconds of a decision


def allocate(
    instance: Annotated[
        Path | None, typer.Argument(metavar="INSTANCE", help="JSON file with the resources and the jobs.")
    ] = None,
    policy: Annotated[str, typer.Option(metavar="NAME[,NAME]", help="Policies: smd, smd-two-stage, esw, optimus.")] = (
        "smd"
    ),
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="Use the best choices found after this time.")
    ] = 10.0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures to this file.")] = None,
    example: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Only write an example instance to this file.")
    ] = None,
) -> None:
    """Divide several kinds of resources among jobs, and show what each gets, or why it gets nothing."""
    if example is not None:
        check_targets([], {"--example": example})
        _write(example, (files("freetrain_parsl.extensions.resources") / "example.json").read_text(encoding="utf-8"))
        say(str(example))
        return
    if instance is None:
        raise UsageError("allocate: INSTANCE is missing; 'freetrain allocate --example FILE' writes one to try it with")
    policies = [_policy(name, time_limit) for name in split_names("--policy", policy)]
    check_targets([instance], {"--json": json})
    problem = read_instance(instance).problem
    decisions = {one.name: one.allocate(problem) for one in policies}
    if json is not None:
        figures = allocation_figures(instance, problem, decisions)
        _write(json, json_format.dumps(figures, indent=2, allow_nan=False) + "\n")
    print_allocation(Screen(highlight=False), instance, problem, decisions)


def _policy(name: str, time_limit: float) -> ResourcePolicy:
    if not 0 < time_limit <= _LONGEST:
        raise InvalidSettings(f"--time-limit: must be more than 0 and at most {_LONGEST:,.0f} s, got {time_limit:g}")
    kind = RESOURCE_POLICIES[known_name("--policy", name, RESOURCE_POLICIES)]
    return kind(time_limit=timedelta(seconds=time_limit)) if issubclass(kind, KnapsackPolicy) else kind()


def allocation_figures(
    instance: Path, problem: ResourceProblem, decisions: Mapping[str, ResourceDecision]
) -> dict[str, Any]:
    """Describe the decisions of all policies for JSON; times in seconds."""
    return {
        "instance": str(instance),
        "load": problem.load,
        "capacity": dict(zip(problem.resources, problem.capacity, strict=True)),
        "policies": [
            {
                "policy": name,
                "utility": decision.utility,
                "bound": decision.bound,
                "solve_seconds": decision.solve_seconds,
                "used": dict(zip(problem.resources, problem.used(decision.chosen.values()), strict=True)),
                "jobs": _job_figures(problem, decision),
            }
            for name, decision in decisions.items()
        ],
    }


def _job_figures(problem: ResourceProblem, decision: ResourceDecision) -> list[dict[str, Any]]:
    reasons = reasons_for_nothing(problem, decision)
    rows: list[dict[str, Any]] = []
    for job in problem.jobs:
        chosen = decision.chosen.get(job.name)
        rows.append(
            {
                "job": job.name,
                "workers": chosen.workers if chosen else 0,
                "servers": chosen.servers if chosen else 0,
                "seconds": chosen.seconds if chosen else None,
                "utility": chosen.utility if chosen else 0.0,
                "uses": dict(zip(problem.resources, chosen.demand, strict=True)) if chosen else {},
                "why_nothing": reasons.get(job.name),
            }
        )
    return rows


def print_allocation(
    console: Screen, instance: Path, problem: ResourceProblem, decisions: Mapping[str, ResourceDecision]
) -> None:
    """Print the policies' totals if there are several, then one row per job for each policy."""
    capacity = ", ".join(f"{there:g} {name}" for name, there in zip(problem.resources, problem.capacity, strict=True))
    console.print(f"{instance.name}: {len(problem.jobs)} jobs, load {problem.load:.2f}, {capacity}")
    if len(decisions) > 1:
        console.print()
        console.print(_totals(problem, decisions))
    for name, decision in decisions.items():
        console.print()
        console.print(
            f"{name}: utility {decision.utility:,.2f}, bound {decision.bound:,.2f}, "
            f"decided in {decision.solve_seconds:.2f} s"
        )
        console.print(_job_table(problem, decision))
        for job, reason in reasons_for_nothing(problem, decision).items():
            console.print(f"{job} gets nothing: {reason}")


def _totals(problem: ResourceProblem, decisions: Mapping[str, ResourceDecision]) -> Table:
    best = max(decision.utility for decision in decisions.values())
    table = _table("policy", ["utility", "of best", "jobs", *problem.resources, "seconds"])
    for name, decision in decisions.items():
        table.add_row(
            name,
            f"{decision.utility:,.2f}",
            f"{decision.utility / best:.1%}" if best > 0 else "-",
            str(len(decision.chosen)),
            *_shares(problem, problem.used(decision.chosen.values())),
            f"{decision.solve_seconds:.2f}",
        )
    return table


def _job_table(problem: ResourceProblem, decision: ResourceDecision) -> Table:
    table = _table("job", ["workers", "servers", "finishes in", "utility", *problem.resources])
    for name, chosen in decision.chosen.items():
        table.add_row(
            Text(name),
            str(chosen.workers),
            str(chosen.servers),
            format_duration(chosen.seconds),
            f"{chosen.utility:,.2f}",
            *(f"{needed:g}" for needed in chosen.demand),
        )
    used = problem.used(decision.chosen.values())
    table.add_section()
    table.add_row("used", "", "", "", f"{decision.utility:,.2f}", *(f"{amount:g}" for amount in used))
    table.add_row("share", "", "", "", "", *_shares(problem, used))
    return table


def _table(first: str, others: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(Text(name), justify="right", no_wrap=True)
    return table


def _shares(problem: ResourceProblem, used: Sequence[float]) -> list[str]:
    return [f"{amount / there:.0%}" if there > 0 else "-" for amount, there in zip(used, problem.capacity, strict=True)]


def _write(file: Path, text: str) -> None:
    try:
        write_output(file, text)
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from error
