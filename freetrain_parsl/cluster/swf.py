"""Reader of job logs in Standard Workload Format (https://www.cs.huji.ac.il/labs/parallel/workload/swf.html).

A log is text: comments begin with ``;``, those in its header are ``; Name: value``; every other line is a job with 18
numbers, -1 for unknown.
"""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from freetrain_parsl.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_FIELDS = 18
_CANCELLED = 5  # status


@dataclass(frozen=True)
class SwfJob:
    """A job that ran.

    Parameters
    ----------
    number
        Its number in the log.
    submit, wait, run
        When it was submitted, how long it waited and ran, seconds; 0 for less than one.
    nodes
        Number of its nodes.
    requested_time
        Its walltime, seconds; ``None`` if unknown.
    status
        0 failed, 1 completed, 5 cancelled; others as defined by the format.
    """

    number: int
    submit: float
    wait: float
    run: float
    nodes: int
    requested_time: float | None
    status: int


class _Line(NamedTuple):
    number: float
    submit: float
    wait: float
    run: float
    processors: float
    requested_processors: float
    requested_time: float
    status: float
    partition: float


class SwfLog:
    """A job log, read line by line on each iteration.

    Jobs that never ran or whose size is unknown are skipped and counted in `unusable`. A job that had processors and
    ran for 0 seconds, that is, less than one, did run.

    Parameters
    ----------
    path
        The log, compressed if its name ends in ``.gz``.
    lenient
        Skip malformed lines and count them in `malformed` instead of rejecting the log.
    processors_per_node
        Number of processors per node; ``None`` to take ``MaxProcs / MaxNodes``, or 1 if either is missing.
    partition
        Read only the jobs of this partition, given by number or by its name in the header.

    Attributes
    ----------
    header : dict
        Name -> value of the comments in the header.
    partitions : dict
        Number -> name of the partitions in the header.
    unusable, malformed : int
        Lines skipped by the latest iteration.

    Raises
    ------
    InvalidInput
        The log cannot be read, or the partition is not in its header; while iterating, a line is malformed.
    """

    def __init__(
        self,
        path: Path,
        *,
        lenient: bool = False,
        processors_per_node: int | None = None,
        partition: str | None = None,
    ) -> None:
        self.path = path
        self.lenient = lenient
        self.unusable = 0
        self.malformed = 0
        self.header: dict[str, str] = {}
        self.partitions: dict[int, str] = {}
        self._processors_per_node = processors_per_node
        for _, line in self._lines():
            if not line.startswith(";"):
                break
            name, colon, value = line[1:].partition(":")
            if colon:
                self.header.setdefault(name.strip(), value.strip())
                self._note_partition(name.strip(), value.split())
        self._partition = None if partition is None else self._number_of(partition)

    @property
    def nodes(self) -> int:
        """Number of nodes of the logged cluster: ``MaxNodes``, or else the nodes of ``MaxProcs``."""
        nodes = self._header_number("MaxNodes")
        if nodes is None and (processors := self._header_number("MaxProcs")) is not None:
            nodes = math.ceil(processors / self.processors_per_node)
        if nodes is None:
            raise InvalidInput(f"{self.path}: the header has neither MaxNodes nor MaxProcs; add line '; MaxNodes: N'")
        return nodes

    @property
    def processors_per_node(self) -> float:
        """As given, else ``MaxProcs / MaxNodes``; 1 if either is missing."""
        if self._processors_per_node is not None:
            return self._processors_per_node
        nodes, processors = self._header_number("MaxNodes"), self._header_number("MaxProcs")
        return max(1.0, processors / nodes) if nodes and processors else 1.0

    def __iter__(self) -> Iterator[SwfJob]:
        self.unusable = self.malformed = 0
        per_node = self.processors_per_node
        for number, text in self._lines():
            if text.startswith(";"):
                continue
            line = _parse(text)
            if line is None:
                if not self.lenient:
                    raise InvalidInput(
                        f"{self.path}, line {number}: expected {_FIELDS} numbers, got {text[:80]!r}; "
                        "fix it, or read the log leniently to skip such lines"
                    )
                self.malformed += 1
                continue
            processors = line.processors if line.processors > 0 else line.requested_processors
            if self._partition is not None and line.partition != self._partition:
                continue
            ran = line.run > 0 or (line.run == 0 and line.processors > 0 and line.status != _CANCELLED)
            if processors <= 0 or not ran or line.submit < 0:
                self.unusable += 1
                continue
            yield SwfJob(
                int(line.number),
                line.submit,
                max(0.0, line.wait),
                line.run,
                math.ceil(processors / per_node),
                line.requested_time if line.requested_time > 0 else None,
                int(line.status),
            )

    def _note_partition(self, name: str, words: Sequence[str]) -> None:
        if name == "Partition" and words and words[0].isdecimal():
            self.partitions[int(words[0])] = " ".join(words[1:])

    def _number_of(self, partition: str) -> int:
        """Return the number of a partition given by number or by name."""
        by_name = {name: number for number, name in self.partitions.items() if name}
        number = int(partition) if partition.isascii() and partition.isdecimal() else by_name.get(partition)
        if number is None or (self.partitions and number not in self.partitions):
            known = ", ".join(f"{number} ({name})" for number, name in self.partitions.items())
            listed = f"its header lists {known}" if known else "its header lists none; give a partition's number"
            raise InvalidInput(f"{self.path}: no partition {partition!r}; {listed}")
        return number

    def _header_number(self, name: str) -> int | None:
        words = self.header.get(name, "").split()
        return int(words[0]) if words and words[0].isdecimal() and int(words[0]) > 0 else None

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Yield (number, text) of the lines that are not empty."""
        try:
            with (
                self.path.open("rb") as opened,
                gzip.open(opened) if self.path.name.endswith(".gz") else opened as lines,
            ):
                for number, raw in enumerate(lines, start=1):
                    if text := raw.decode("utf-8", errors="replace").strip():
                        yield number, text
        except (OSError, EOFError, zlib.error) as error:
            raise InvalidInput(
                f"{self.path}: cannot be read as a job log: {getattr(error, 'strerror', None) or error}"
            ) from error


def _parse(text: str) -> _Line | None:
    words = text.split()
    if len(words) != _FIELDS:
        return None
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        return None
    if not all(map(math.isfinite, numbers)):
        return None
    number, submit, wait, run, processors, _, _, requested_processors, requested_time, _, status = numbers[:11]
    return _Line(
        number, submit, wait, run, processors, requested_processors, requested_time, status, partition=numbers[15]
    )
