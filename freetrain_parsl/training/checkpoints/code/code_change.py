"""Handling of checkpoints written by other code: a training job never resumes from them silently."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.errors import CodeChanged

if TYPE_CHECKING:
    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.storage.posix import CheckpointDirectory
    from freetrain_parsl.training.checkpoints.format import Restored

__all__ = ["accept_code", "other_code_of_this_call"]

_NAMES_SHOWN = 4


def accept_code(
    restored: Restored, options: SessionOptions, directory: CheckpointDirectory
) -> tuple[Restored | None, str]:
    """Decide whether a training job resumes from a checkpoint, by the code that wrote it.

    Parameters
    ----------
    restored
        The newest intact checkpoint.
    options
        Contains the training job's code, and what to do if it has changed.
    directory
        The training job's checkpoint directory, open for writing.

    Returns
    -------
    restored, note
        The checkpoint, or ``None`` to start over; and a note for the user, or an empty string.

    Raises
    ------
    CodeChanged
        The code has changed, and `on_code_change` does not allow it.
    CheckpointError
        The old checkpoints cannot be moved away.
    """
    before = restored.code
    if options.code is None or before is None:
        return restored, ""
    if options.code.python != before.python:
        return restored, (
            f"checkpoint {restored.entry.path} was written with Python {before.python}, this is "
            f"{options.code.python}: cannot determine whether the code has changed since; resuming from it"
        )
    changes = options.code.changes_since(before)
    if not changes:
        return restored, ""
    what = f"checkpoint {restored.entry.path} was written by other code (changed: {_listed(changes)})"
    if options.on_code_change == "resume":
        return restored, f"{what}; resuming from it (on_code_change='resume')"
    if options.on_code_change == "restart":
        aside = directory.set_aside()
        return None, f"{what}; starting over (on_code_change='restart'); the old checkpoints are in {aside}"
    raise CodeChanged(
        f"training job {options.name!r}: {what}; undo the change, resume from the checkpoint with "
        "on_code_change='resume', "
        "or start over with on_code_change='restart' (an option of the app and of a campaign's training jobs; on the "
        "command line: freetrain resume --on-code-change resume)"
    )


def other_code_of_this_call(options: SessionOptions, directory: CheckpointDirectory) -> str:
    """Return a note if the same call has checkpoints of other code, under another name derived from the call."""
    if not options.call:
        return ""
    others = []
    for path in sorted(options.checkpoint_root.glob(f"{options.call}-*")):
        other = type(directory)(options.checkpoint_root, path.name)
        if path != directory.path and other.path == path and (entries := other.entries()):
            others.append((entries[0].path.stat().st_mtime, path.name, entries[0].step))
    if not others:
        return ""
    _, name, step = max(others)
    return (
        f"starting over: its code has changed since {name}, which has a checkpoint of step {step}; to resume from "
        f"it: options(name={name!r}, on_code_change='resume')"
    )


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
