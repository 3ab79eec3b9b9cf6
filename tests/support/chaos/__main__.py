"""Run chaos episodes: ``python -m tests.support.chaos bare 1-20``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.errors import UsageError
from tests.support import bed_command
from tests.support.chaos.episode import EpisodeReport, choose_menu, seeds_of, summary
from tests.support.chaos.scene import FILL, EpisodeSettings, Scene, run_episode
from tests.support.chaos.trainings import SHARED_SUBJECTS, SUBJECTS, chosen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def main(arguments: Sequence[str]) -> int:
    """Run episodes, print one line per episode and a summary; return 1 if any has a problem."""
    options = _parser().parse_args(arguments)
    try:
        seeds = seeds_of(options.seeds)
        run = _runner(options)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    reports = []
    for report in _in_processes(options, seeds) if options.jobs > 1 else map(run, seeds):
        print(report.to_json() if options.lines else _line(report), flush=True)
        reports.append(report)
    if not options.lines:
        figures = summary(reports)
        print(json.dumps(figures, indent=2))
        if options.json is not None:
            everything = {**figures, "reports": [json.loads(report.to_json()) for report in reports]}
            options.json.write_text(json.dumps(everything, indent=2), encoding="utf-8")
    return int(any(report.problems for report in reports))


def _runner(options: argparse.Namespace) -> Callable[[int], EpisodeReport]:
    """Return the function that runs the episode of a seed, after validating the options."""
    root = options.directory or Path(tempfile.gettempdir()) / f"freetrain-chaos-{options.kind}"
    shared = options.kind.startswith("shared")
    subjects = chosen(options.only, SHARED_SUBJECTS if shared else SUBJECTS)
    if options.kind.endswith("campaign"):
        from tests.support.chaos.campaign import CAMPAIGN_FAULTS, CampaignScene

        faults, strikes, limit = CAMPAIGN_FAULTS, (2, 6), 300.0
        make_scene: Callable[[EpisodeSettings, Path, Path], Scene] = partial(
            CampaignScene, subjects=subjects, slots_per_node=4 if shared else 1
        )
    else:
        from tests.support.chaos.bare import BARE_FAULTS, SHARED_FAULTS, BareScene, warm_up
        from tests.support.chaos.bare_plan import BarePlan

        faults, strikes, limit = BARE_FAULTS, ((1, 4) if options.short else (3, 9)), 150.0
        if shared:
            faults, strikes, limit = SHARED_FAULTS, ((1, 4) if options.short else (2, 7)), 240.0

        def make_scene(settings: EpisodeSettings, directory: Path, checkpoints: Path) -> Scene:
            plan = BarePlan(directory, checkpoints, subjects)
            if shared:
                plan = plan.shared()
            short = replace(plan, epochs=2, samples=256, heartbeat_timeout=3.0, peer_timeout=3.0)
            return BareScene(settings, short if options.short else plan)

        warm_up()
    menu = choose_menu(options.faults, {**faults, FILL: 1.0})
    return lambda seed: run_episode(
        options.kind, EpisodeSettings(seed, menu, root, strikes, limit, options.disk), make_scene
    )


def _in_processes(options: argparse.Namespace, seeds: Sequence[int]) -> Iterator[EpisodeReport]:
    """Distribute the seeds over processes, one episode at a time each; yield the reports in seed order."""
    again = [*bed_command("tests.support.chaos"), options.kind]
    for name in ("faults", "only", "disk", "directory"):
        if (value := getattr(options, name)) is not None:
            again += [f"--{name}", str(value)]
    again += ["--short"] if options.short else []

    def one(seed: int) -> EpisodeReport:
        done = subprocess.run([*again, "--lines", str(seed)], check=False, capture_output=True, text=True)
        if not done.stdout:
            return EpisodeReport(options.kind, seed, (), 0, (f"the episode's process failed: {done.stderr}",), 0.0)
        return EpisodeReport.from_json(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(options.jobs) as pool:
        yield from pool.map(one, seeds)


def _line(report: EpisodeReport) -> str:
    faults = ", ".join(f"{fault.at:g} s {fault.fault} ({fault.detail})" for fault in report.faults)
    verdict = "; ".join(report.problems) or "ok"
    begin = f"{report.kind} {report.seed}: {report.seconds:g} s, {report.trainings} training jobs"
    return f"{begin}, {faults or 'no fault'}: {verdict}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos", description=__doc__)
    parser.add_argument(
        "kind",
        choices=["bare", "shared", "campaign", "shared-campaign"],
        help="bare: without HTEX, seconds; campaign: whole runs, minutes; shared…: training jobs share nodes",
    )
    parser.add_argument("seeds", help="a number, or a range such as 1-20")
    parser.add_argument("--faults", metavar="NAME=WEIGHT,…", help="faults to draw from, with relative frequencies")
    parser.add_argument("--only", metavar="NAME,…", help="training jobs of the episodes, such as sharded,replicated")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent episodes (default 1)")
    parser.add_argument("--disk", type=int, metavar="BYTES", help="keep checkpoints on a tmpfs of this size (root)")
    parser.add_argument("--short", action="store_true", help="short training jobs with few faults, seconds each")
    parser.add_argument("--directory", type=Path, help="directory for the files of failed episodes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all reports and the summary")
    parser.add_argument("--lines", action="store_true", help="print one line of JSON for each episode")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
