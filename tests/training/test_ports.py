"""Plain scripts of the documentation and their ports: the same result, however the processes come and go."""

from __future__ import annotations

import difflib
import re
import runpy
from functools import cache
from itertools import cycle
from typing import TYPE_CHECKING, Any

import pytest
from habits import HELD, PORTS, assert_close, blocks_of, practise_port, run_plain
from naive_ports import NAIVE
from training_crew import run_member

from freetrain_parsl.extensions.checking.run import check
from freetrain_parsl.training.fragment import Finished, Membership, Paused

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from crew import Crew
    from training_crew import Outcome

    from freetrain_parsl.extensions.checking.report import CheckReport

pytestmark = pytest.mark.slow
of_each_port = pytest.mark.parametrize("port", PORTS)

AT = 9
"""A step in the middle of an epoch of every script."""
TOLERANCE = 1e-9
"""Of float64: the order of sums depends on the number of processes."""


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the plain scripts where they may write their files."""
    monkeypatch.chdir(tmp_path)


plain = cache(run_plain)


def finished(outcome: Outcome | None) -> tuple[Any, list[tuple[int, int]]]:
    """Return the result of a port, and the number of processes by step."""
    assert outcome is not None
    assert isinstance(outcome.end, Finished), outcome.error
    return outcome.end.value


def alone(root: Path, port: str, **disturbance: Any) -> Outcome:
    return run_member(practise_port, {"port": port, **disturbance}, root=root, membership=Membership("net"))


@of_each_port
def test_on_one_process_the_port_is_the_script_bit_by_bit(tmp_path: Path, port: str) -> None:
    value, sizes = finished(alone(tmp_path, port))
    assert_close(value, plain(port), 0.0)
    assert max(step for step, _ in sizes) > AT


@of_each_port
def test_paused_and_resumed_after_every_step_it_is_still_the_script_bit_by_bit(tmp_path: Path, port: str) -> None:
    """Nothing that the loop needs is in local variables."""
    every_step = frozenset(range(1, 1000))
    fragments = [alone(tmp_path, port, pause_at=every_step)]
    while isinstance(fragments[-1].end, Paused):
        fragments.append(alone(tmp_path, port, pause_at=every_step))
    value, _ = finished(fragments[-1])
    assert_close(value, plain(port), 0.0)
    assert len(fragments) > AT


@pytest.mark.parametrize(("port", "size"), zip(PORTS, cycle((3, 1))))
def test_in_a_group_that_changes_the_port_is_the_script(crew: Crew, tmp_path: Path, port: str, size: int) -> None:
    run = crew.start(2, tmp_path, practise_port, port=port, hold_at=AT)
    run.until(lambda: (tmp_path / "net" / "files" / HELD).exists() or run.ended)
    run.regroup(size)
    outcomes = [finished(outcome) for outcome in run.outcomes()]
    value, sizes = outcomes[0]
    assert_close(value, plain(port), TOLERANCE)
    assert {size for _, size in sizes} == {2, size}
    assert len(outcomes) == size
    for other, _ in outcomes[1:]:
        assert_close(other, value, 0.0)


@of_each_port
def test_after_the_failure_of_a_process_in_a_step_the_port_is_the_script(crew: Crew, tmp_path: Path, port: str) -> None:
    outcomes = crew.start(2, tmp_path, practise_port, port=port, die_at=AT).outcomes()
    value, sizes = finished(outcomes[0])
    assert_close(value, plain(port), TOLERANCE)
    assert {size for _, size in sizes} == {2, 1}


@pytest.mark.parametrize("port", ["gan", "gradient-penalty"])
def test_after_a_failure_between_the_steps_of_a_batch_only_the_second_one_is_made(
    crew: Crew, tmp_path: Path, port: str
) -> None:
    outcomes = crew.start(2, tmp_path, practise_port, port=port, die_at=AT, die_between=True).outcomes()
    value, sizes = finished(outcomes[0])
    assert_close(value, plain(port), TOLERANCE)
    assert [size for step, size in sizes if step == AT] == [2, 1]


@of_each_port
def test_paused_on_two_processes_and_resumed_on_three_the_port_is_the_script(
    crew: Crew, tmp_path: Path, port: str
) -> None:
    paused = crew.run(2, tmp_path, practise_port, port=port, pause_at=frozenset([AT]))
    assert all(outcome and isinstance(outcome.end, Paused) for outcome in paused)
    for outcome in crew.run(3, tmp_path, practise_port, port=port):
        value, _ = finished(outcome)
        assert_close(value, plain(port), TOLERANCE)


def checked(port: str, file: Path, edits: Sequence[tuple[str, str]] = ()) -> CheckReport:
    """Check the port of a page as a file, as its readers would."""
    blocks = blocks_of(PORTS[port])
    code = blocks["session"]
    for before, after in edits:
        assert before in code, before
        code = code.replace(before, after)
    file.write_text(f"{blocks['common']}\n\n{code}", encoding="utf-8")
    names = runpy.run_path(str(file))
    return check(names["train"])


@of_each_port
def test_a_check_finds_nothing_in_the_port(tmp_path: Path, port: str) -> None:
    report = checked(port, tmp_path / "ported.py")
    assert report.holds, str(report)


@of_each_port
def test_a_check_names_what_the_page_warns_of(tmp_path: Path, port: str) -> None:
    report = checked(port, tmp_path / "naive.py", NAIVE[port].edits)
    assert not report.holds
    said = " ".join(str(report).split())
    assert [part for part in NAIVE[port].named if part not in said] == []


def without_new_bodies(code: str, plain_code: str) -> list[str]:
    """Return the lines of a port; of functions and classes that the script does not have, only the first line."""
    lines, is_new = [], False
    for line in code.splitlines():
        if line[:1].strip():
            is_new = line not in plain_code and not line.startswith("def train(")
            lines.append(line)
        elif not is_new:
            lines.append(line)
    return lines


@of_each_port
def test_the_page_names_every_line_that_changes(port: str) -> None:
    """In its table, on the side of the script or on that of the port; a "…" stands for the rest of a line."""
    text = PORTS[port].read_text(encoding="utf-8")
    blocks = blocks_of(PORTS[port])
    rows = re.findall(r"^\| (.*?) ?\| (.*?) ?\| .*\|$", text.split("## What changes")[1], re.MULTILINE)[1:]
    named = [[span.rstrip("…") for row in rows for span in re.findall(r"`([^`]+)`", row[side])] for side in (0, 1)]
    before, after = blocks["plain"].splitlines(), without_new_bodies(blocks["session"], blocks["plain"])
    differences = difflib.ndiff(*([line.strip() for line in lines] for lines in (before, after)))
    changes = [line for line in differences if line[0] in "-+" and line[2:]]
    unnamed = [line for line in changes if not any(span in line for span in named[line[0] == "+"])]
    assert unnamed == []
    for side, code in ((0, blocks["plain"]), (1, blocks["session"])):
        assert [span for span in named[side] if span not in code] == []
