"""What squeue and scontrol print with ``--json``, read; pure functions of text.

Slurm 22.05 writes plain numbers and words; 23.02 and later ``{"set", "infinite", "number"}`` and lists of words.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from freetrain_parsl.windows.slurm_jobs import JobRecord
from freetrain_parsl.windows.slurm_text import make_node

if TYPE_CHECKING:
    from freetrain_parsl.windows.state import Node

__all__ = ["parse_json_jobs", "parse_json_nodes"]


def parse_json_jobs(text: str) -> list[JobRecord]:
    """Read ``squeue --json``.

    Raises
    ------
    ValueError
        It is not what squeue prints, or of a version that does not tell where jobs are planned.
    """
    return [_job(item) for item in _items(text, "jobs")]


def parse_json_nodes(text: str) -> dict[str, Node]:
    """Read ``scontrol --json show nodes``, or ``sinfo --json`` of Slurm 22.05.

    Raises
    ------
    ValueError
        It is not what they print.
    """
    return {item["name"]: _node(item) for item in _items(text, "nodes")}


def _items(text: str, key: str) -> list[dict[str, Any]]:
    try:
        items = json.loads(text)[key]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"it is not JSON with {key!r}") from None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"{key!r} is no list of records")
    return items


def _job(item: dict[str, Any]) -> JobRecord:
    try:
        states = _words(item["job_state"])
        minutes = _number(item["time_limit"])
        return JobRecord(
            str(item["job_id"]),
            item["partition"],
            "COMPLETING" if "COMPLETING" in states else states[0],
            item["user_name"],
            None if minutes is None else minutes * 60,
            _time(item["start_time"]),
            _time(item["end_time"]),
            int(_number(item["node_count"]) or 1),
            item["nodes"],
            item["scheduled_nodes"],
            item["required_nodes"],
            _number(item["priority"]) or 0.0,
            item["state_reason"],
            item["features"],
            item["name"],
        )
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"a job lacks {error}") from None


def _node(item: dict[str, Any]) -> Node:
    try:
        words = [*_words(item["state"]), *_words(item.get("state_flags", []))]
        return make_node(
            item["name"],
            [word.upper() for word in words],
            item["reason"],
            tuple(item["partitions"]),
            (int(item.get("effective_cpus") or item["cpus"]), int(item["alloc_cpus"])),
            (item["gres"], item["gres_used"]),
            (int(item["real_memory"]), int(item["alloc_memory"])),
            _words(item["active_features"]),
            _time(item["last_busy"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"a node lacks {error}") from None


def _number(value: Any) -> float | None:
    """Read a number of either shape; ``None`` if it is not set."""
    if isinstance(value, dict):
        if value.get("infinite"):
            return math.inf
        return float(value["number"]) if value.get("set") else None
    return None if value is None else float(value)


def _time(value: Any) -> float | None:
    """Read a point in time; ``None`` if it is not set, zero or never."""
    time = _number(value)
    return time if time and math.isfinite(time) else None


def _words(value: Any) -> list[str]:
    """Read a word, words separated by commas, or a list of words."""
    return list(value) if isinstance(value, list) else [word for word in str(value).split(",") if word]
