"""``freetrain checkpoints``: list, verify and prune saved checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from freetrain_parsl.campaign.run import read_site
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.campaign.stored_run import DATABASE, StoredRun
from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.sources import errors_in_one_line
from freetrain_parsl.errors import UsageError
from freetrain_parsl.screen import say, say_json

if TYPE_CHECKING:
    from freetrain_parsl.campaign.catalogue import Listed
    from freetrain_parsl.storage.posix import CheckpointDirectory

__all__ = ["checkpoints"]

Place = Annotated[
    Path,
    typer.Argument(
        metavar="[DIR]", help="A run directory, its checkpoint directory, or that of one training job in it."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")]
TrainingOption = Annotated[str | None, typer.Option("--training", metavar="NAME", help="Only for this training job.")]

checkpoints = typer.Typer(
    help="Show, verify or remove checkpoints.", no_args_is_help=True, pretty_exceptions_enable=False
)


@checkpoints.command()
def ls(directory: Place = Path(), json: JsonOption = False) -> None:
    """Show all checkpoints. Only file sizes are checked; use `verify` to check the contents."""
    from freetrain_parsl.campaign.catalogue import find_trainings, list_checkpoints

    with errors_in_one_line("checkpoints ls"):
        found = list(list_checkpoints(find_trainings(_checkpoints_of(directory)), read=False))
        _show(found, "complete", json=json)


@checkpoints.command()
def verify(directory: Place = Path(), json: JsonOption = False) -> None:
    """Verify all checkpoints against their checksums; exit code 1 if any is damaged."""
    from freetrain_parsl.campaign.catalogue import find_trainings, list_checkpoints

    with errors_in_one_line("checkpoints verify"):
        found = list(list_checkpoints(find_trainings(_checkpoints_of(directory)), read=True))
        _show(found, "intact", json=json)
    if any(checkpoint.problem for checkpoint in found):
        raise typer.Exit(1)


@checkpoints.command()
def prune(
    directory: Place = Path(),
    keep: Annotated[int, typer.Option(metavar="N", help="Number of intact checkpoints to keep per training job.")] = 0,
    training: TrainingOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
) -> None:
    """Remove checkpoints that are older than the newest N intact ones of their training job.

    For a run directory whose site has a home on Globus, also those at home.
    """
    from freetrain_parsl.campaign.catalogue import choose_training, find_trainings, removable

    with errors_in_one_line("checkpoints prune"):
        if keep < 1:
            raise UsageError("give the number of checkpoints to keep per training job, at least 1, e.g. --keep 2")
        is_run = (directory / DATABASE).is_file()
        store = RunStore(directory.absolute()) if is_run else None  # it refuses the runs of others
        trainings = choose_training(find_trainings(_checkpoints_of(directory)), training)
        doomed = [(owner, old) for name, owner in trainings.items() for old in removable(name, owner, keep)]
        _remove(doomed, dry_run=dry_run)
        if store is not None and (home := read_site(store).home) is not None:
            home.prune(store, keep, training, say, dry_run=dry_run)


def _checkpoints_of(directory: Path) -> Path:
    """Return the checkpoint directory of a run, if its site file names one; else the directory itself."""
    if not (directory / DATABASE).is_file():
        return directory
    return read_site(StoredRun(directory.absolute())).checkpoint_dir or directory


def _remove(doomed: Iterable[tuple[CheckpointDirectory, Listed]], *, dry_run: bool) -> None:
    count = size = 0
    for owner, old in doomed:
        if not dry_run:
            owner.remove(old.entry)
        say(f"{'would remove' if dry_run else 'removed'} {old.entry.path}")
        count += 1
        size += old.manifest.get("bytes") or 0
    say(f"{count} checkpoints, {_bytes(size)}, {'would be removed' if dry_run else 'removed'}")


def _show(found: list[Listed], question: str, *, json: bool) -> None:
    if json:
        say_json([_row(checkpoint, question) for checkpoint in found])
        return
    table = Table(box=SIMPLE_HEAD)
    table.add_column("training", overflow="fold")
    for name in ("step", "epoch", "size"):
        table.add_column(name, justify="right")
    table.add_column("written", no_wrap=True)
    table.add_column("reason")
    table.add_column(question)
    for checkpoint in found:
        facts = checkpoint.manifest
        table.add_row(
            checkpoint.training,
            str(checkpoint.entry.step),
            str(facts.get("epoch", "")),
            _bytes(facts["bytes"]) if "bytes" in facts else "",
            _local_time(facts.get("written")),
            str(facts.get("reason", "")),
            Text("no", style="red") if checkpoint.problem else "yes",
        )
    Screen().print(table)
    for checkpoint in found:
        if checkpoint.problem:
            say(checkpoint.problem)


def _row(checkpoint: Listed, question: str) -> dict[str, Any]:
    facts = checkpoint.manifest
    facts_of_it = {name: facts.get(name) for name in ("epoch", "bytes", "written", "reason", "world_size", "code")}
    return {
        "training": checkpoint.training,
        "step": checkpoint.entry.step,
        **facts_of_it,
        "path": str(checkpoint.entry.path),
        question: not checkpoint.problem,
        "problem": checkpoint.problem or None,
    }


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"


def _local_time(written: object) -> str:
    try:
        return datetime.fromisoformat(str(written)).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return ""
