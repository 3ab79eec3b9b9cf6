"""Parsers of the output of squeue and scontrol with ``--json``; pure functions of text.

Slurm 22.05 prints plain numbers and strings; 23.02 and later ``{"set", "infinite", "number"}`` and lists of strings.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import UnreadableAnswer
from freetrain_parsl.windows.slurm.jobs import SlurmJob
from freetrain_parsl.windows.slurm.text_parser import count_tasks, make_node

if TYPE_CHECKING:
    from freetrain_parsl.windows.state import Node

__all__ = ["parse_json_jobs", "parse_json_nodes"]


def parse_json_jobs(text: str) -> list[SlurmJob]:
    """Parse ``squeue --json``.

    Raises
    ------
    UnreadableAnswer
        It is not output of squeue, or from a version that does not report where jobs are planned.
    """
    return [_job(item) for item in _items(text, "jobs")]


def parse_json_nodes(text: str) -> dict[str, Node]:
    """Parse ``scontrol --json show nodes``, or ``sinfo --json`` of Slurm 22.05.

    Raises
    ------
    UnreadableAnswer
        It is not their output.
    """
    nodes = [_node(item) for item in _items(text, "nodes")]
    return {node.name: node for node in nodes}


def _items(text: str, key: str) -> list[dict[str, Any]]:
    try:
        items = json.loads(text)[key]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UnreadableAnswer(f"it is not JSON with {key!r}") from None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise UnreadableAnswer(f"{key!r} is not a list of records")
    return items


def _job(item: dict[str, Any]) -> SlurmJob:
    try:
        states = _words(item["job_state"])
        minutes = _number(item["time_limit"])
        return SlurmJob(
            str(item["job_id"]),
            _text(item, "partition"),
            "COMPLETING" if "COMPLETING" in states else states[0],
            _text(item, "user_name"),
            None if minutes is None else minutes * 60,
            _time(item["start_time"]),
            _time(item["end_time"]),
            int(_number(item["node_count"]) or 1),
            _text(item, "nodes"),
            _text(item, "scheduled_nodes"),
            _text(item, "required_nodes"),
            _number(item["priority"]) or 0.0,
            _text(item, "state_reason"),
            _text(item, "features"),
            _text(item, "name"),
            count_tasks(str(item.get("array_task_string") or "")),
        )
    except KeyError as error:
        raise UnreadableAnswer(f"a job lacks {error}") from None
    except (IndexError, TypeError, ValueError, OverflowError) as error:
        raise UnreadableAnswer(f"a job has an attribute of an unexpected type: {error}") from None


def _node(item: dict[str, Any]) -> Node:
    try:
        words = [*_words(item["state"]), *_words(item.get("state_flags", []))]
        return make_node(
            _text(item, "name"),
            [word.upper() for word in words],
            _text(item, "reason"),
            tuple(_words(item["partitions"])),
            (int(item.get("effective_cpus") or item["cpus"]), int(item["alloc_cpus"])),
            (_text(item, "gres"), _text(item, "gres_used")),
            (int(item["real_memory"]), int(item["alloc_memory"])),
            _words(item["active_features"]),
            _time(item["last_busy"]),
        )
    except KeyError as error:
        raise UnreadableAnswer(f"a node lacks {error}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise UnreadableAnswer(f"a node has an attribute of an unexpected type: {error}") from None


def _text(item: dict[str, Any], key: str) -> str:
    value = item[key]
    if not isinstance(value, str):
        raise TypeError(f"{key} is {str(value)[:80]!r}")
    return value


def _number(value: Any) -> float | None:
    """Parse a number in either format; ``None`` if it is not set."""
    if isinstance(value, dict):
        if value.get("infinite"):
            return math.inf
        return float(value["number"]) if value.get("set") else None
    return None if value is None else float(value)


def _time(value: Any) -> float | None:
    """Parse a point in time; ``None`` if it is not set, zero or never."""
    time = _number(value)
    return time if time and math.isfinite(time) else None


def _words(value: Any) -> list[str]:
    """Parse a string, strings separated by commas, or a list of strings."""
    return list(map(str, value)) if isinstance(value, list) else [word for word in str(value).split(",") if word]
