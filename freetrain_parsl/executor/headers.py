"""The messages that driver and slots exchange: for each type its header fields and what they may hold.

Headers are checked where they enter, against `TO_DRIVER` or `TO_SLOT`, so that the code behind may rely on them.
Fields beyond those named here are kept and ignored: a newer peer may send more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Check: TypeAlias = "Callable[[Any], bool]"
    Fields: TypeAlias = "Mapping[str, Check]"

__all__ = ["TO_DRIVER", "TO_SLOT", "fault_in", "is_name"]

_LONGEST_NAME = 1024
_LONGEST_TEXT = 1 << 16
_LARGEST_INTEGER = 1 << 53  # exact in JSON and in SQLite
_MOST_VERSIONS = 32
_LONGEST_TIME = 1e12  # seconds


def is_name(value: Any) -> bool:
    """Whether it can stand in a log line, in the journal and on a terminal: printable, at most 1024 characters."""
    return isinstance(value, str) and len(value) <= _LONGEST_NAME and value.isprintable()


def _is_text(value: Any) -> bool:
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)  # half a character cannot be stored


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST_INTEGER


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_integer(value)


def _is_time(value: Any) -> bool:
    """Seconds; comparisons with NaN are false."""
    return _is_number(value) and -_LONGEST_TIME < value < _LONGEST_TIME


def _is_duration(value: Any) -> bool:
    return _is_time(value) and value >= 0


def _is_path(value: Any) -> bool:
    """Of any bytes: those that are not UTF-8 travel as halves of characters."""
    return isinstance(value, str)


def _is_seed(value: Any) -> bool:
    return isinstance(value, int)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_versions(value: Any) -> bool:
    """Few names with a name each: see `executor.environment`."""
    if not isinstance(value, dict) or len(value) > _MOST_VERSIONS:
        return False
    return all(map(is_name, value)) and all(map(is_name, value.values()))


def _is_progress(value: Any) -> bool:
    return isinstance(value, dict) and fault_in(value, PROGRESS) is None


def _is_code(value: Any) -> bool:
    """Whether it has the fields of `training.identity.Code`."""
    if not isinstance(value, dict) or value.keys() != {"name", "parts", "python"}:
        return False
    parts = value["parts"]
    return (
        isinstance(parts, dict)
        and all(map(_is_text, [*parts, *parts.values()]))
        and _is_text(value["name"])
        and _is_text(value["python"])
    )


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _one_of(*values: str) -> Check:
    return lambda value: isinstance(value, str) and value in values


def _list_of(check: Check, least: int = 0) -> Check:
    return lambda value: isinstance(value, list) and len(value) >= least and all(map(check, value))


class _Optional:
    """A field that may be left out."""

    def __init__(self, check: Check) -> None:
        self._check = check

    def __call__(self, value: Any) -> bool:
        return self._check(value)


PROGRESS: Fields = {
    "step": _is_count,
    "epoch": _is_count,
    "samples": _is_count,
    "samples_total": _or_none(_is_count),
    "slot_seconds": _is_duration,
    "loss": _or_none(_is_number),
    "rate": _or_none(_is_number),
    "samples_lost": _is_count,
    "duplicate_samples": _is_count,
    "checkpoint_step": _or_none(_is_count),
    "resumed_from": _or_none(_is_count),
    "write_seconds": _is_duration,
    "refused_checkpoints": _list_of(_is_text),
    "in_place": _is_flag,
    "storage_problem": _Optional(_is_text),
    "next_save": _Optional(_is_duration),
    "code_note": _Optional(_is_text),
}
"""The fields of `training.terms.Progress`."""

_OF_ANY: Fields = {"n": _Optional(_is_count), "seen": _Optional(_is_count)}  # see `executor.delivery`
_OF_RUN: Fields = {"trainer": is_name, "run": _is_count}

_UNREACHABLE = _Optional(_list_of(_list_of(_is_count)))  # pairs of ranks

TO_DRIVER: Mapping[str, Fields] = {
    "hello": {
        "token": is_name,
        "node": is_name,
        "block": is_name,
        "pid": _is_count,
        "versions": _Optional(_is_versions),
        "fault": _Optional(_is_text),
    },
    "beat": {
        "waited": _Optional(_is_duration),
        "run": _Optional(_or_none(_is_count)),
        "task": _Optional(_or_none(_is_count)),
    },
    "notice": {"closes_in": _is_time, "gone": _is_flag},
    "progress": {**_OF_RUN, "progress": _is_progress},
    "ready": _OF_RUN,
    "stranded": {**_OF_RUN, "generation": _is_count, "reason": _is_text, "unreachable": _UNREACHABLE},
    "regrouped": {**_OF_RUN, "generation": _is_count, "paused": _is_duration, "transferred": _is_duration},
    "ended": {
        **_OF_RUN,
        "outcome": _one_of("finished", "paused", "failed", "peer_lost", "storage"),
        "progress": _Optional(_is_progress),
        "reason": _Optional(_is_text),
        "generation": _Optional(_is_count),
        "unreachable": _UNREACHABLE,
        "condition": _Optional(_is_text),
    },
    "task_ended": {"task": _is_count, "outcome": _one_of("finished", "failed")},
    "kv": {
        "group": is_name,
        "request": _is_count,
        "operation": _one_of("set", "get", "add", "check", "delete"),
        "keys": _list_of(_is_text, least=1),
        "timeout": _is_duration,
        "amount": _is_integer,
    },
    "resumed": {},
    "probe": {},
}
"""What a slot may say."""

TO_SLOT: Mapping[str, Fields] = {
    "welcome": {"closes_in": _or_none(_is_time)},
    "beat": {},
    "run": {
        **_OF_RUN,
        "joining": _is_flag,
        "generation": _Optional(_is_count),
        "rank": _Optional(_is_count),
        "world_size": _Optional(_is_count),
        "meeting_timeout": _is_duration,
        "checkpoint_root": _is_path,
        "checkpoint_interval": _or_none(_is_duration),
        "mean_time_between_losses": _is_number,
        "keep": _is_count,
        "save_margin": _is_duration,
        "seed": _is_seed,
        "threads": _or_none(_is_count),
        "epochs": _or_none(_is_count),
        "root_identity": _Optional(_is_text),
        "code": _Optional(_or_none(_is_code)),
        "on_code_change": _Optional(_one_of("refuse", "resume", "restart")),
        "call": _Optional(_is_text),
    },
    "regroup": {
        **_OF_RUN,
        "next": _is_count,
        "rank": _or_none(_is_count),
        "world_size": _is_count,
        "abort": _is_flag,
    },
    "pause": _OF_RUN,
    "task": {"task": _is_count},
    "kv": {"group": is_name, "request": _is_count, "ok": _is_flag, "number": _is_integer},
    "resumed": {},
    "exit": {"now": _is_flag, "node": _is_flag},
    "probe": {},
}
"""What the driver may say."""


def fault_in(header: Mapping[str, Any], fields: Fields) -> str | None:
    """Say what is wrong with a header; ``None`` if all is well."""
    for name, check in {**fields, **_OF_ANY}.items():
        if name not in header:
            if not isinstance(check, _Optional):
                return f"it has no {name!r}"
        elif not check(header[name]):
            return f"its {name!r} is {_brief(header[name])}"
    return None


def _brief(value: Any, length: int = 80) -> str:
    """Show a value of any size in one short line."""
    if _is_number(value) or isinstance(value, (bool, type(None))):
        return repr(value)
    if isinstance(value, str):
        return ascii(value[:length])
    return f"a {type(value).__name__}"
