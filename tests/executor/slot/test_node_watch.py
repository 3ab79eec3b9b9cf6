"""A job on a shared node: what it takes of the node's memory, and when it leaves a node that closes."""

from __future__ import annotations

import os
import stat
import tempfile
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.executor.slot.neighbours import (
    Neighbour,
    clear_traces,
    neighbours_of,
    publish,
    use_own_temporary_directory,
)
from freetrain_parsl.executor.slot.node_share import Lane
from freetrain_parsl.executor.slot.node_watch import NodeWatch, memory_of, over_share, saving_of

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30


class _Proc:
    """A ``/proc`` of made-up processes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, pid: int, parent: int, upper: int, exact: int | None = None) -> None:
        """Add a process that uses so many bytes, or, counted exactly, so many."""
        children = self.path / f"{parent}/task/{parent}/children"
        if children.parent.exists():
            children.write_text(f"{children.read_text() if children.exists() else ''}{pid} ")
        (self.path / f"{pid}/task/{pid}").mkdir(parents=True, exist_ok=True)
        (self.path / f"{pid}/task/{pid}/children").touch()
        self.grow(pid, upper, exact)

    def grow(self, pid: int, upper: int, exact: int | None = None) -> None:
        status = (
            f"Name:\tpt: x\nVmRSS:\t999999999 kB\nRssAnon:\t{upper // 1024 - 8} kB\nRssFile:\t9 kB\nRssShmem:\t8 kB\n"
        )
        (self.path / f"{pid}/status").write_text(status)
        exact = upper if exact is None else exact
        (self.path / f"{pid}/smaps_rollup").write_text(
            f"0-1 ---p [rollup]\nPss: 77777777 kB\nPss_Anon: {exact // 1024 - 4} kB\nPss_Shmem: 4 kB\n"
        )


@pytest.fixture
def proc(tmp_path: Path) -> _Proc:
    return _Proc(tmp_path / "proc")


def test_the_memory_of_a_slot_is_that_of_all_its_processes(proc: _Proc) -> None:
    proc.add(10, 1, 10 * MIB)
    proc.add(11, 10, 4 * GIB, 1 * GIB)
    proc.add(12, 11, 4 * GIB, 1 * GIB)  # a data worker with the same data set
    proc.add(20, 1, 50 * GIB)
    assert memory_of(10, exact=False, proc=proc.path) == 8 * GIB + 10 * MIB
    assert memory_of(10, exact=True, proc=proc.path) == 2 * GIB + 10 * MIB
    assert memory_of(99, exact=True, proc=proc.path) == 0


def test_an_old_kernel_that_does_not_tell_what_is_shared_gives_an_upper_bound(proc: _Proc) -> None:
    proc.add(10, 1, 4 * GIB)
    (proc.path / "10/smaps_rollup").write_text("Pss: 7 kB\n")
    assert memory_of(10, exact=True, proc=proc.path) == 4 * GIB


def test_own_memory_is_found() -> None:
    block = bytearray(os.urandom(1)) * (64 * MIB)
    found = memory_of(os.getpid(), exact=True)
    assert len(block) < found <= memory_of(os.getpid(), exact=False)


@pytest.mark.parametrize(
    ("amounts", "ended"),
    [
        ({"a": 9, "b": 3}, ["a"]),
        ({"a": 9, "b": 8, "c": 1}, ["a"]),
        ({"a": 9, "b": 9}, ["b"]),  # one of them
        ({"a": 4, "b": 3}, []),  # something else fills the node
        ({"a": 9}, []),  # it disturbs nobody
    ],
)
def test_the_job_that_is_furthest_over_its_share_is_ended_and_no_other(
    amounts: dict[str, int], ended: list[str]
) -> None:
    jobs = [Neighbour(name, place) for place, name in enumerate(amounts)]
    used = list(amounts.values())
    assert [
        one.job for one in jobs if over_share(one, [o for o in jobs if o != one], 5, lambda place: used[place])
    ] == ended


def test_a_job_that_has_all_slots_of_a_node_is_never_ended() -> None:
    jobs = [Neighbour("a", place) for place in range(4)]
    assert not over_share(jobs[0], jobs[1:], 5, lambda _: 9)


def test_the_save_times_of_the_other_jobs_add_up() -> None:
    """Of a job's members, one writes."""
    others = [Neighbour("b", 2, 3.0), Neighbour("b", 3, 0.0), Neighbour("c", 4, 2.5), Neighbour("a", 5, 9.0)]
    assert saving_of("a", others) == 5.5
    assert saving_of("a", []) == 0.0


class _Node:
    """A node with two slots, of which the first is ours."""

    def __init__(self, tmp_path: Path, proc: _Proc) -> None:
        self.pool = tmp_path / "pool"
        self.pool.mkdir()
        self.memory: tuple[int, int] | None = (20 * GIB, 10 * GIB)
        self.now = 0.0
        self.told: list[str] = []
        self.ended: list[str] = []
        self.saving: list[float] = []
        proc.add(os.getppid(), 1, 2 * GIB)
        proc.add(77, 1, 1 * GIB)
        self.watch = NodeWatch(
            "training job 'ours'",
            Lane(0, 2),
            self.pool,
            tell=self.told.append,
            end=self.ended.append,
            saving=self.saving.append,
            proc=proc.path,
            memory=lambda: self.memory,
            clock=lambda: self.now,
        )

    def neighbour(self, save_seconds: float = 0.0) -> None:
        publish(self.pool, 1, Neighbour("theirs", 77, save_seconds))

    def look(self) -> None:
        self.now += 1.0
        self.watch.look()


@pytest.fixture
def node(tmp_path: Path, proc: _Proc) -> _Node:
    return _Node(tmp_path, proc)


def test_a_job_over_its_share_is_told_once_and_ended_only_if_the_node_runs_out(node: _Node, proc: _Proc) -> None:
    node.neighbour()
    node.look()
    assert not node.told
    proc.grow(os.getppid(), 12 * GIB)
    for _ in range(30):
        node.look()
    (told,) = node.told
    assert told == (
        "freetrain: training job 'ours' uses 12.0 GiB of host memory, more than its share of 10.0 GiB (1 of 2 slots): "
        "if the node runs out of memory, it is ended\n"
    )
    assert not node.ended
    node.memory = 20 * GIB, GIB // 4
    for _ in range(3):
        node.look()
    (reason,) = node.ended
    assert "used 12.0 GiB of host memory, its share was 10.0 GiB (1 of 2 slots), and the node had 0.2 GiB" in reason
    assert "\n" not in reason


def test_memory_that_processes_have_in_common_is_not_held_against_a_job(node: _Node, proc: _Proc) -> None:
    node.neighbour()
    proc.grow(os.getppid(), 12 * GIB, 3 * GIB)
    node.memory = 20 * GIB, GIB // 4
    node.look()
    assert not node.told
    assert not node.ended


def test_a_job_without_neighbours_is_not_ended(node: _Node, proc: _Proc) -> None:
    proc.grow(os.getppid(), 19 * GIB)
    node.memory = 20 * GIB, GIB // 4
    node.look()
    assert len(node.told) == 1
    assert not node.ended


def test_a_node_that_does_not_know_its_memory_ends_nothing(node: _Node, proc: _Proc) -> None:
    node.neighbour()
    proc.grow(os.getppid(), 19 * GIB)
    node.memory = None
    node.look()
    assert not node.told
    assert not node.ended


def test_slots_of_a_node_know_how_long_the_others_write(node: _Node) -> None:
    node.look()
    node.neighbour(4.0)
    node.watch.takes(2.0, "member 1")
    node.watch.takes(1.5, "member 2")
    node.look()
    assert node.saving == [0.0, 4.0]
    assert [(one.job, one.save_seconds) for one in neighbours_of(node.pool, 1)] == [("training job 'ours'", 3.5)]
    clear_traces(node.pool, 1)
    node.look()
    assert node.saving[-1] == 0.0


def test_files_of_a_slot_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    publish(tmp_path, 2, Neighbour("b", 5))
    (tmp_path / "slot-1").write_text("{")
    (tmp_path / "slot-3").write_text('{"other": 1}')
    assert neighbours_of(tmp_path, 0) == [Neighbour("b", 5)]
    publish(tmp_path / "gone", 1, Neighbour("a", 1))  # best effort


def test_temporary_files_of_a_slot_are_its_own_and_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "shared"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    use_own_temporary_directory(tmp_path, 3)
    own = tmp_path / "t3"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(own)
    assert os.environ.pop("TORCHINDUCTOR_CACHE_DIR").startswith(f"{tmp_path / 'shared'}/torchinductor_")
    (own / "deep").mkdir()
    clear_traces(tmp_path, 2)
    assert own.exists()
    clear_traces(tmp_path, 3)
    assert not own.exists()


def test_what_a_job_left_that_cannot_be_removed_does_not_send_the_next_one_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "t3" / "read-only").mkdir(parents=True)
    use_own_temporary_directory(tmp_path, 3)
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(tmp_path / "t3")


def test_a_link_in_place_of_the_temporary_files_is_removed_and_not_followed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").touch()
    (tmp_path / "t3").symlink_to(theirs)
    clear_traces(tmp_path, 3)
    assert list(theirs.iterdir()) == [theirs / "file"]
    assert not (tmp_path / "t3").is_symlink()
