"""``freetrain replay``: estimates what the idle nodes of a recorded log would have trained."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.options import (
    check_targets,
    choice,
    known_name,
    on_progress_of,
    progress_bars,
    split_names,
    write_json,
    write_outputs,
)
from freetrain_parsl.errors import InvalidSettings, UsageError
from freetrain_parsl.extensions.fusion.curve import FusionCurve
from freetrain_parsl.extensions.replay.accelerators import Accelerators
from freetrain_parsl.extensions.replay.block_site import BlockSettings
from freetrain_parsl.extensions.replay.comparison import Contestant, compare
from freetrain_parsl.extensions.replay.logs.example import write_example
from freetrain_parsl.extensions.replay.logs.logs import open_log
from freetrain_parsl.extensions.replay.logs.node_kinds import KindOfNodes, read_kinds, state_kinds, with_kinds
from freetrain_parsl.extensions.replay.page.frame import write_page
from freetrain_parsl.extensions.replay.simulation import Cost, Curves, Knowledge, ReplaySettings
from freetrain_parsl.extensions.replay.sites.comparison import compare_sites
from freetrain_parsl.extensions.replay.sites.options import (
    number_or_nan,
    open_sites,
    read_site_options,
    refuse_beside_sites,
    show_sites,
    site_terms,
)
from freetrain_parsl.extensions.replay.sweeps.arrays import fusion_curve
from freetrain_parsl.extensions.replay.sweeps.sweeps import compare_fusion
from freetrain_parsl.extensions.replay.terminal import (
    heading,
    kinds_table,
    result_table,
    summary,
    sweep_summary,
    sweep_table,
    what_if_table,
)
from freetrain_parsl.extensions.replay.trainers import TrainerSet, trainer_set, with_costs
from freetrain_parsl.planning.objectives.base import OBJECTIVES
from freetrain_parsl.planning.policies import POLICIES
from freetrain_parsl.planning.settings import PlannerSettings
from freetrain_parsl.screen import say

__all__ = ["replay"]

_LONGEST_STARTUP = 86_400  # seconds


def replay(
    log: Annotated[
        Path | None, typer.Argument(metavar="LOG", help="Idle log (CSV), job log (SWF) or sacct's text; may end in .gz")
    ] = None,
    trainers: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="hpo:N, mixed:N, single:N, a list (.yaml, .csv), or sweep:NxLIST."),
    ] = None,
    fusion: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Throughput of a sweep's arrays: a curve's name, or .csv or .json."),
    ] = None,
    policy: Annotated[str, typer.Option(metavar="NAME[,NAME]", help="Allocation policies.")] = "milp",
    knowledge: Annotated[
        str, typer.Option(metavar="NAME[,NAME]", help="Knowledge of closings: none, estimated or perfect.")
    ] = "none",
    cost: Annotated[str, typer.Option(metavar="NAME", help="Costs: paper, or full (also charges starts).")] = "paper",
    start_seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Cost of a start, with --cost full. Default: 30.")
    ] = None,
    horizon: Annotated[
        str, typer.Option(metavar="SECONDS", help="Expected duration of a decision: seconds, or adaptive.")
    ] = "adaptive",
    objective: Annotated[
        str | None, typer.Option(metavar="NAME", help="What policies maximise. Default: depends on the trainers.")
    ] = None,
    curves: Annotated[str, typer.Option(metavar="NAME", help="Scaling curves: known, learned, or default.")] = "known",
    concurrent: Annotated[
        int | None, typer.Option(metavar="N", help="Trainers in a decision, first come, first served. Default: all.")
    ] = None,
    blocks: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Request nodes as blocks, which need this long until they train."),
    ] = None,
    nodes_per_block: Annotated[
        int | None, typer.Option(metavar="N", help="With --blocks: size of the largest block. Default: no limit.")
    ] = None,
    rescale_seconds: Annotated[
        str | None, typer.Option(metavar="UP,DOWN", help="Cost of a rescale, for all trainers.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", help="Size of the cluster, if not in the log.")] = None,
    processors_per_node: Annotated[
        int | None, typer.Option(metavar="N", help="Processors per node of an SWF log. Default: from its header.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(metavar="NAME", help="Use only this partition of an SWF log. Needs --nodes, its size.")
    ] = None,
    lenient: Annotated[bool, typer.Option("--lenient", help="Skip and count malformed lines of the log.")] = False,
    mask_outages: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Remove 3 hours or more with this share of nodes idle.")
    ] = None,
    node_hour_price: Annotated[
        float | None, typer.Option(metavar="PRICE", help="Price of a node-hour, in any currency.")
    ] = None,
    accelerators: Annotated[
        int | None, typer.Option(metavar="N", help="Accelerators of each node, which training jobs share.")
    ] = None,
    whole_nodes: Annotated[
        bool, typer.Option("--whole-nodes", help="With --accelerators: training jobs do not share nodes.")
    ] = False,
    kind: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NODES[:SPEED]", help="Nodes of a kind, by name; once for each kind."),
    ] = None,
    site: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=LOG[,KEY=VALUE]", help="Instead of LOG, several: sites among which training jobs move."
        ),
    ] = None,
    transfers: Annotated[
        str | None, typer.Option(metavar="MB/S|FILE", help="With --site: transfer rates. Default: 100 MB/s.")
    ] = None,
    state_size: Annotated[
        float | None, typer.Option(metavar="MB", help="With --site: size of a training job's state. Default: 1000.")
    ] = None,
    look: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="With --site: time between decisions. Default: 600.")
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Also replay with other costs of rescales and starts (16 more replays).")
    ] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures to this file.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML report to this file.")] = None,
    example: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only write example inputs into this directory.")
    ] = None,
) -> None:
    """Replay a recorded log, and show what its idle nodes would have trained."""
    if example is not None:
        for file in write_example(example):
            say(str(file))
        return
    if (log is None and not site) or trainers is None:
        missing = "LOG" if log is None and not site else "--trainers"
        raise UsageError(f"replay: {missing} is missing; 'freetrain replay --example DIR' writes inputs to try it with")
    try:
        kinds = read_kinds(kind or [])
        units = _accelerators(accelerators, whole_nodes=whole_nodes)
        if units is not None:
            others = {"--kind": kind, "--site": site, "--blocks": blocks, "--fusion": fusion}
            _refuse(others, "does not work with --accelerators; leave out one of them")
        chosen = _trainers(trainers, rescale_seconds, kinds, accelerators)
        contestants = _contestants(policy, knowledge, objective or chosen.objective, horizon)
        settings = replace(_settings(cost, curves, start_seconds, concurrent), blocks=_blocks(blocks, nodes_per_block))
        fused = _fusion(fusion, chosen, what_if=what_if)
        _check_price(node_hour_price)
        lists = [Path(re.sub(r"^sweep:[0-9]+x", "", trainers)), *([] if fusion is None else [Path(fusion)])]
        price = node_hour_price
        if kinds:
            other = None if settings.curves is Curves.KNOWN else curves
            _refuse({"--blocks": blocks, "--curves": other}, "does not work with --kind; leave out one of them")
        if site:
            refuse_beside_sites(
                {
                    "--kind": kind,
                    "LOG": log,
                    "--nodes": nodes,
                    "--processors-per-node": processors_per_node,
                    "--partition": partition,
                    "--fusion": fusion,
                    "--what-if": what_if,
                }
            )
            options = read_site_options(site)
            terms = site_terms(options, transfers, state_size, look)
            check_targets([*lists, *(one.log for one in options)], {"--json": json, "--report": report})
            with progress_bars() as progress:
                advance = on_progress_of(progress)
                logs = open_sites(options, lenient=lenient, mask_idle_above=mask_outages)
                result = compare_sites(
                    logs, chosen, _only(contestants), settings, terms, price_per_node_hour=price, on_progress=advance
                )
        else:
            moving = {"--transfers": transfers, "--state-size": state_size, "--look": look}
            _refuse(moving, "is about moves between sites; give sites with --site NAME=LOG")
            assert log is not None
            check_targets([log, *lists], {"--json": json, "--report": report})
            with progress_bars() as progress:
                advance = on_progress_of(progress)
                advance(f"reading {log.name}", 0.0)
                holes = open_log(
                    log,
                    nodes=nodes,
                    lenient=lenient,
                    processors_per_node=processors_per_node,
                    partition=partition,
                    mask_idle_above=mask_outages,
                )
                state_kinds(holes, log, kinds)
                advance(f"reading {log.name}", 1.0)
                if fused is not None:
                    result = compare_fusion(
                        holes, chosen, fused, contestants, settings, price_per_node_hour=price, on_progress=advance
                    )
                else:
                    result = compare(
                        holes,
                        chosen,
                        contestants,
                        settings,
                        price_per_node_hour=price,
                        accelerators=units,
                        with_what_if=what_if,
                        on_progress=advance,
                    )
    except KeyboardInterrupt:
        say("freetrain: interrupted; nothing was written", err=True)
        raise typer.Exit(130) from None
    result["command"] = shlex.join(["freetrain", *sys.argv[1:]])
    (show_sites if site else _show)(result)
    write_outputs(result, (json, write_json), (report, write_page))


# Options.


def _accelerators(number: int | None, *, whole_nodes: bool) -> Accelerators | None:
    if number is None:
        if whole_nodes:
            raise InvalidSettings("--whole-nodes: nodes are whole unless they have several --accelerators; give both")
        return None
    return Accelerators(number, shared=not whole_nodes)


def _trainers(
    spec: str, rescale_seconds: str | None, kinds: Sequence[KindOfNodes], accelerators: int | None
) -> TrainerSet:
    chosen = with_kinds(trainer_set(spec, [kind.name for kind in kinds], accelerators=accelerators), kinds)
    if chosen.sweeps and accelerators is not None:
        raise InvalidSettings("--accelerators: does not work with sweeps; give other trainers")
    if rescale_seconds is None:
        return chosen
    seconds = [number_or_nan(part) for part in rescale_seconds.split(",")]
    if len(seconds) != 2 or not all(math.isfinite(value) and value >= 0 for value in seconds):
        raise InvalidSettings(
            f"--rescale-seconds {rescale_seconds}: give UP,DOWN, seconds of zero or more, as in 18,12"
        )
    return with_costs(chosen, *seconds)


def _fusion(spec: str | None, trainers: TrainerSet, *, what_if: bool) -> tuple[str, FusionCurve] | None:
    """Return the name and the curve for sweeps; ``None`` for other trainers."""
    if not trainers.sweeps:
        if spec is not None:
            raise InvalidSettings("--fusion: only members of sweeps are fused; give --trainers sweep:NxLIST")
        return None
    if what_if:
        raise InvalidSettings("--what-if: does not work with sweeps; use --rescale-seconds and --start-seconds")
    spec = spec or "none"
    return Path(spec).name, fusion_curve(spec)


def _contestants(policies: str, knowledge: str, objective: str, horizon: str) -> list[Contestant]:
    """List all combinations of policy and knowledge."""
    known_name("--objective", objective, OBJECTIVES)
    names = [known_name("--policy", name, POLICIES) for name in split_names("--policy", policies)]
    known = [choice("--knowledge", name, Knowledge) for name in split_names("--knowledge", knowledge)]
    ahead = None if horizon == "adaptive" else _seconds("--horizon", horizon)
    contestants = [Contestant(name, item, objective, ahead) for name in names for item in known]
    for one in contestants:
        one.make()  # reject invalid combinations before the log is read
    return contestants


def _only(contestants: Sequence[Contestant]) -> Contestant:
    if len(contestants) > 1:
        raise InvalidSettings("--site: several sites are replayed with one policy and one knowledge; give one of each")
    return contestants[0]


def _refuse(given: Mapping[str, object], reason: str) -> None:
    """Refuse options that are given, for the same reason."""
    for option, value in given.items():
        if value is not None:
            raise InvalidSettings(f"{option}: {reason}")


def _settings(cost: str, curves: str, start_seconds: float | None, concurrent: int | None) -> ReplaySettings:
    charged = choice("--cost", cost, Cost)
    if start_seconds is not None and charged is not Cost.FULL:
        raise InvalidSettings("--start-seconds: starts are charged with --cost full only; give both")
    settings = ReplaySettings(cost=charged, curves=choice("--curves", curves, Curves), concurrent=concurrent)
    return settings if start_seconds is None else replace(settings, start_seconds=start_seconds)


def _blocks(startup: float | None, most_nodes: int | None) -> BlockSettings | None:
    if startup is None:
        if most_nodes is not None:
            raise InvalidSettings("--nodes-per-block: blocks are requested with --blocks only; give both")
        return None
    if not 0 <= startup <= _LONGEST_STARTUP:
        raise InvalidSettings(f"--blocks: must be 0 to {_LONGEST_STARTUP:,} seconds, got {startup:g}")
    if most_nodes is not None and most_nodes < 1:
        raise InvalidSettings(f"--nodes-per-block: must be at least 1, got {most_nodes}")
    return BlockSettings(PlannerSettings(startup=timedelta(seconds=startup), max_nodes_per_block=most_nodes))


def _check_price(price: float | None) -> None:
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise InvalidSettings(f"--node-hour-price must be zero or more, got {price:g}")


def _seconds(option: str, text: str) -> float:
    value = number_or_nan(text)
    if not 0 < value < timedelta.max.total_seconds():
        raise InvalidSettings(f"{option} {text}: give a positive number of seconds, or adaptive")
    return value


# Output.


def _show(result: Mapping[str, Any]) -> None:
    console = Screen(highlight=False)
    console.print(heading(result))
    console.print()
    sweeps = "fusion" in result
    console.print(sweep_table(result) if sweeps else result_table(result))
    console.print()
    if result.get("idle_by_kind"):
        console.print(kinds_table(result))
        console.print()
    console.print(sweep_summary(result) if sweeps else summary(result))
    for note in result["notes"]:
        console.print(f"Note: {note}")
    if "what_if" in result:
        console.print()
        console.print(what_if_table(result))
    for entry in result["policies"]:
        if entry["refused"]:
            say(
                f"freetrain: warning: policy {entry['policy']!r}, closings {entry['knowledge']}: "
                f"{entry['refused']:,} of {entry['refused'] + entry['solves']:,} decisions refused, the last good "
                f"allocation was kept; the first: {entry['first_refusal']}",
                err=True,
            )
