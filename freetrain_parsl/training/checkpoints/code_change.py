"""What becomes of a checkpoint that other code wrote: never gone on from without a word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import CodeChanged
from freetrain_parsl.protocol.options import Code

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.storage.posix import CheckpointDirectory
    from freetrain_parsl.training.checkpoints.format import Restored

__all__ = ["accept_code", "code_facts", "other_code_of_this_call"]

_NAMES_SHOWN = 4


def code_facts(code: Code | None) -> dict[str, Any]:
    """Return what a manifest tells of a training's code."""
    if code is None:
        return {}
    return {"code": code.identity, "code_parts": dict(code.parts), "code_python": code.python}


def accept_code(
    restored: Restored, options: SessionOptions, directory: CheckpointDirectory
) -> tuple[Restored | None, str]:
    """Decide whether a training goes on from a checkpoint, by the code that wrote it.

    Parameters
    ----------
    restored
        The newest intact checkpoint.
    options
        The training's code, and what to do on a change.
    directory
        The training's, open for writing.

    Returns
    -------
    restored, note
        The checkpoint, or ``None`` to begin anew; and what the user should know, empty for nothing.

    Raises
    ------
    CodeChanged
        The code has changed, and nobody has said what to do.
    CheckpointError
        The old checkpoints cannot be set aside.
    """
    before = _code_in(restored.manifest)
    if options.code is None or before is None:
        return restored, ""
    if options.code.python != before.python:
        return restored, (
            f"checkpoint {restored.entry.path} was written under Python {before.python}, this is "
            f"{options.code.python}: whether the code has changed since cannot be said; going on from it"
        )
    changes = options.code.changes_since(before)
    if not changes:
        return restored, ""
    what = f"checkpoint {restored.entry.path} was written by other code (changed: {_listed(changes)})"
    if options.on_code_change == "resume":
        return restored, f"{what}; going on from it, as on_code_change='resume' says"
    if options.on_code_change == "restart":
        aside = directory.set_aside()
        return None, f"{what}; beginning anew, as on_code_change='restart' says; the old checkpoints are in {aside}"
    raise CodeChanged(
        f"training {options.name!r}: {what}; undo the change, go on from the checkpoint with on_code_change='resume', "
        "or begin anew with on_code_change='restart' (an option of the app and of a campaign's trainings; on the "
        "command line: freetrain resume --on-code-change resume)"
    )


def other_code_of_this_call(options: SessionOptions, directory: CheckpointDirectory) -> str:
    """Say whether the same call has checkpoints of other code, under another name that was derived from it."""
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
        f"beginning anew: its code has changed since {name}, which has a checkpoint of step {step}; to go on from "
        f"that: options(name={name!r}, on_code_change='resume')"
    )


def _code_in(manifest: Mapping[str, Any]) -> Code | None:
    parts, python = manifest.get("code_parts"), manifest.get("code_python")
    if not isinstance(parts, dict) or not isinstance(python, str):
        return None
    return Code(str(manifest.get("code")).partition("#")[0], parts, python)


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
