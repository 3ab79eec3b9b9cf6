"""The report of a replay: one HTML page without scripts, fonts or other external resources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.extensions.pages.dates import TimeAxis, period
from freetrain_parsl.extensions.replay.page.policies import comparison, policy_by_policy, use_figures, what_if_table
from freetrain_parsl.extensions.replay.page.sites import site_parts
from freetrain_parsl.extensions.replay.page.sweeps import sweep_parts
from freetrain_parsl.extensions.replay.page.wording import (
    WORDS,
    best_first,
    dedicated_nodes,
    describe,
    duration,
    is_attainable,
    losses_met,
    most_finished,
    percent,
)
from freetrain_parsl.report.markup import cards, document, element, page, terms
from freetrain_parsl.report.output import write_output

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from xml.etree.ElementTree import Element

__all__ = ["write_page"]


def write_page(result: Mapping[str, Any], path: Path) -> None:
    """Write the report of a replay as one self-contained HTML file.

    `result` is as written by ``freetrain replay --json``, with ``series`` and ``solve_histogram``; ``None`` is a dash.
    """
    write_output(path, document(_report(result)))


def _report(result: Mapping[str, Any]) -> Element:
    axis = TimeAxis.of(result["log"])
    if "sites" in result:
        return page(
            f"{result['log']['name']}: what idle nodes of several sites could have trained",
            *site_parts(result, axis),
            *_site_reproduction(result),
        )
    labelled = _labelled(result["policies"])
    return page(
        f"{result['log']['name']}: what idle nodes could have trained",
        *(
            sweep_parts(result, most_finished(labelled), axis)
            if "fusion" in result
            else _trainer_parts(result, best_first(labelled), axis)
        ),
        *_reproduction(result),
    )


def _trainer_parts(result: Mapping[str, Any], policies: Sequence[Mapping[str, Any]], axis: TimeAxis) -> list[Element]:
    return [
        *_opening(result, policies),
        *comparison(policies, axis),
        *what_if_table(result, policies),
        *policy_by_policy(policies, axis),
        *terms(WORDS | {f"Lost to {loss.name}": loss.meaning for loss in losses_met(policies).values()}),
    ]


def _labelled(policies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add to each policy a ``label`` with its differences from the others, and ``shared`` with what they share."""
    differing = [key for key in ("knowledge", "horizon") if len({entry[key] for entry in policies}) > 1]
    common = [key for key in ("knowledge", "horizon") if key not in differing]
    return [
        {
            **entry,
            "label": ", ".join(part for part in (entry["policy"], describe(entry, differing)) if part),
            "shared": describe(entry, common),
        }
        for entry in policies
    ]


def _opening(result: Mapping[str, Any], policies: Sequence[Mapping[str, Any]]) -> list[Element]:
    log, trainers, best = result["log"], result["trainers"], policies[0]
    span, dates = duration(log["seconds"]), period(log)
    eyebrow = f"FreeTrain replay of {log['name']}" + (f", {dates}" if dates else "")
    if not log["mean_idle"]:
        return [
            element("p", eyebrow, class_="eyebrow"),
            element("h1", f"None of the {log['nodes']:,} nodes was idle"),
            element("p", f"In {span} this log has no idle nodes, so there was nothing to train in.", class_="lede"),
        ]
    candidates = sum(map(is_attainable, policies))
    chosen = f"planned by {best['label']}" + (f", the best of {candidates} plans compared" if candidates > 1 else "")
    begin = (
        "Training in them would have done "
        if is_attainable(best)
        else "With closing times known, which is an \
upper bound that no real plan can reach, training in them would have done "
    )
    return [
        element("p", eyebrow, class_="eyebrow"),
        element("h1", f"Your idle nodes: {log['mean_idle']:,.1f} of {log['nodes']:,} on average"),
        element(
            "p",
            begin,
            element("strong", percent(best["efficiency"], 0)),
            f" of what {dedicated_nodes(log['mean_idle'])} do in the same {span}: "
            f"{_several(trainers['count'], 'training')} ({trainers['spec']}), {chosen}.",
            class_="lede",
        ),
        *(element("p", note, class_="warning") for note in result["notes"]),
        cards(
            [
                ("Efficiency", percent(best["efficiency"]), "of the same training jobs on dedicated nodes"),
                ("Share of the oracle", percent(best["oracle_ratio"]), "no plan can exceed the oracle's 100 %"),
                *use_figures(log, best),
            ]
        ),
    ]


def _reproduction(result: Mapping[str, Any]) -> list[Element]:
    log = result["log"]
    skipped = f" {log['skipped']:,} lines of the log could not be read and were skipped." if log["skipped"] else ""
    if log["masked"]:
        masked = sum(seconds for _, seconds in log["masked"])
        skipped += f" {duration(masked)} that look like outages were removed and are excluded from all figures."
    if log["zero_length"]:
        skipped += f" {log['zero_length']:,} jobs of less than a second took nodes for an instant."
    accounting = {
        "paper": "as published: starting a training job costs nothing",
        "full": "in full: starting a training job is charged too",
    }.get(result["cost"], result["cost"])
    planning = {
        "learned": " Policies learned the scaling curves.",
        "default": " Policies assumed the default scaling curve.",
    }.get(result["curves"], "")
    if (start := result["blocks_start_in"]) is not None:
        planning += f" Nodes were requested as blocks, which train {duration(start)} after their start."
    return [
        element("h2", "To reproduce this page"),
        element("pre", element("code", result["command"])),
        element(
            "p",
            f"FreeTrain {result['version']}. Log: {log['name']}, {log['nodes']:,} nodes, {duration(log['seconds'])}, "
            f"{log['events']:,} changes of the idle set.{skipped} Training jobs: {result['trainers']['spec']}, "
            "objective "
            f"{result['trainers']['objective']}. Costs are charged {accounting}.{planning}",
            class_="note",
        ),
    ]


def _site_reproduction(result: Mapping[str, Any]) -> list[Element]:
    logs = "; ".join(
        f"{site['site']}: {site['name']}, {site['nodes']:,} nodes, {site['events']:,} changes of the idle set"
        for site in result["sites"]
    )
    return [
        element("h2", "To reproduce this page"),
        element("pre", element("code", result["command"])),
        element(
            "p",
            f"FreeTrain {result['version']}. {logs}. Training jobs: {result['trainers']['spec']}, objective "
            f"{result['trainers']['objective']}. Costs: {result['cost']}.",
            class_="note",
        ),
    ]


def _several(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"
