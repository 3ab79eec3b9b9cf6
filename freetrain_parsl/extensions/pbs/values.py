"""Formats of PBS output: JSON that may need repair, sizes, durations, dates, lists of vnodes."""

from __future__ import annotations

import json
import math
import re
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from freetrain_parsl.errors import UnreadableAnswer

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Answer",
    "as_date",
    "as_duration",
    "as_mebibytes",
    "as_number",
    "as_text",
    "as_vnodes",
    "mapping",
    "read_answer",
    "write_duration",
]

# One attribute per line, `"name":<tab>value` and possibly a comma, in every version of PBS.
_PAIR = re.compile(r'(?P<name>\s*"[^"]*":\s*)(?P<value>.*?)(?P<comma>,?)\s*$')
_BROKEN_ESCAPE = re.compile(r'\\(?!["\\/bfnrtu])')
_SIZE = re.compile(r"(?P<number>[0-9]{1,18})(?P<unit>[kmgtp]?)(?P<kind>[bw]?)", re.IGNORECASE)
_UNITS = {unit: 1024.0**power for power, unit in enumerate(("", "k", "m", "g", "t", "p"))}
_END_OF_TIME = 1e11  # seconds since the epoch, the year 5138
_WORD_BYTES = 8  # the unit `w` is a word of the server's machine
_CHUNK_VNODE = re.compile(r"[(+]\s*(?P<vnode>[^:+()\s]+)")


class Answer(NamedTuple):
    """A command's JSON: its content, when the server wrote it (s since the epoch), and the repairs made."""

    content: Mapping[str, Any]
    time: float
    notes: tuple[str, ...]


def read_answer(text: str, command: str) -> Answer:
    """Parse the output of ``-F json``.

    PBS does not always print valid JSON: older versions do not escape quotes, backslashes or line feeds in values, and
    a string that looks like a number (``inf``, ``007``, ``1.``) is printed without quotes. Such lines are repaired,
    and their number is reported in `Answer.notes`.

    Raises
    ------
    UnreadableAnswer
        It cannot be repaired; the message contains the command and the line.
    """
    notes: tuple[str, ...] = ()
    try:
        content = json.loads(text, strict=False)
    except RecursionError:
        raise UnreadableAnswer(f"{command} returned invalid output: it is nested too deeply") from None
    except ValueError:
        mended, lines = _mend(text)
        try:
            content = json.loads(mended, strict=False)
        except json.JSONDecodeError as error:
            line = (mended.splitlines() or [""])[error.lineno - 1].strip()
            raise UnreadableAnswer(f"{command} returned invalid output in line {error.lineno}: {line[:80]!r}") from None
        except (ValueError, RecursionError):  # a number with thousands of digits, or nested too deeply
            raise UnreadableAnswer(f"{command} returned invalid output: a number or a list is out of range") from None
        notes = (f"{command} printed {lines} lines that are not valid JSON; they were repaired",)
    if not isinstance(content, dict) or not isinstance(content.get("timestamp"), (int, float)):
        raise UnreadableAnswer(f"{command} returned invalid output: no timestamp in {text.strip()[:80]!r}")
    if not 0 <= content["timestamp"] < _END_OF_TIME:
        raise UnreadableAnswer(f"{command} returned invalid output: timestamp {str(content['timestamp'])[:80]}")
    return Answer(content, float(content["timestamp"]), notes)


def _mend(text: str) -> tuple[str, int]:
    """Convert PBS's lines to JSON; also count the repaired ones."""
    lines, mended = [], 0
    for line in _join_broken(text):
        match = _PAIR.fullmatch(line)
        if match is None or match["value"] in ("{", "[", "{}", "[]") or _is_json(match["value"]):
            lines.append(line)
            continue
        mended += 1
        value = match["value"]
        if len(value) > 1 and value.startswith('"') and value.endswith('"'):
            inside = _BROKEN_ESCAPE.sub(r"\\\\", value[1:-1])
            value = '"' + re.sub(r'(?<!\\)"', r"\"", inside) + '"'
        else:
            value = json.dumps(value)
        lines.append(f"{match['name']}{value}{match['comma']}")
    return "\n".join(lines), mended


def _join_broken(text: str) -> list[str]:
    """Join values that contain line feeds: a line that begins no pair or bracket belongs to the previous one."""
    joined: list[str] = []
    for line in text.splitlines():
        if joined and not re.match(r'\s*("[^"]*":\s|[{}\[\]])', line) and _PAIR.fullmatch(joined[-1]):
            joined[-1] += "\\n" + line
        else:
            joined.append(line)
    return joined


def _is_json(value: str) -> bool:
    try:
        json.loads(value, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


def mapping(value: object, what: str) -> Mapping[str, Any]:
    """Check that a value is a mapping.

    Raises
    ------
    UnreadableAnswer
        It is not; `what` is the location for the message.
    """
    if not isinstance(value, dict):
        raise UnreadableAnswer(f"{what}: expected attributes, got {str(value)[:80]!r}")
    return value


def as_text(value: object) -> str:
    """Return a value as a string: PBS prints a name such as 1234 as a number."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list):
        return ",".join(map(as_text, value))
    return str(value)


def as_number(value: object, otherwise: float = 0.0) -> float:
    """Parse a count; return `otherwise` for other values, such as ``<various>`` or an indirect ``@vnode``."""
    try:
        number = float(as_text(value))
    except ValueError:
        return otherwise
    return number if math.isfinite(number) else otherwise


def as_mebibytes(value: object) -> int:
    """Parse a size, MiB: ``16gb``, ``158900144kb``, ``4096`` (bytes), ``2mw`` (words); zero for other values."""
    match = _SIZE.fullmatch(as_text(value).strip())
    if match is None:
        return 0
    unit = _WORD_BYTES if match["kind"].lower() == "w" else 1
    return int(int(match["number"]) * _UNITS[match["unit"].lower()] * unit // 2**20)


@lru_cache(maxsize=4096)
def _seconds(text: str) -> float | None:
    parts = text.strip().split(":")
    if not 1 <= len(parts) <= 3 or not all(re.fullmatch(r"\d+(\.\d*)?", part) for part in parts):
        return None
    seconds = 0.0
    for part in parts:
        seconds = 60 * seconds + float(part)
    return seconds


def as_duration(value: object) -> float | None:
    """Parse a duration, seconds: ``01:30:00``, ``90:00`` or a bare number; ``None`` if missing."""
    return _seconds(as_text(value))


def write_duration(seconds: float) -> str:
    """Format a duration for PBS, rounded down to whole seconds: ``HH:MM:SS``."""
    minutes, whole = divmod(int(seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{whole:02}"


@lru_cache(maxsize=4096)
def _epoch(text: str) -> float | None:
    if text.isdecimal():
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%a %b %d %H:%M:%S %Y"))
    except (ValueError, OverflowError):
        return None


def as_date(value: object) -> float | None:
    """Parse a date, seconds since the epoch: ``Sat Nov 21 02:37:25 2026``, in local time, or a bare number.

    ``None`` if missing or malformed.
    """
    return _epoch(as_text(value).strip())


@lru_cache(maxsize=16384)
def as_vnodes(text: str) -> tuple[str, ...]:
    """List the distinct vnodes of an ``exec_vnode`` or ``resv_nodes``: ``(a:ncpus=4+b:ncpus=2)+(c:ncpus=4)``."""
    text = text.strip()
    if not text:
        return ()
    if not text.startswith("("):
        text = f"({text}"
    return tuple(dict.fromkeys(match["vnode"] for match in _CHUNK_VNODE.finditer(text)))
