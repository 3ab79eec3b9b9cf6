"""A slot takes its share of a node, and no more: accelerator, cores, threads, host memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.executor.slot.node_share import (
    Lane,
    core_share,
    memory_of_node,
    number_visible_devices,
    physical_cores,
)

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


def _machine(system: Path, *, cores: int, numa: dict[int, str], hyperthreads: bool = True) -> None:
    """Describe a machine whose second hyperthreads are numbered after all the first ones, as Linux does."""
    for cpu in range(cores * (2 if hyperthreads else 1)):
        core = cpu % cores
        siblings = f"{core},{core + cores}" if hyperthreads else f"{core}"
        _write(system / f"cpu/cpu{cpu}/topology/thread_siblings_list", f"{siblings}\n")
    for node, cpus in numa.items():
        _write(system / f"node/node{node}/cpulist", f"{cpus}\n")
    _write(system / "node/possible", "0-1\n")


def test_no_two_slots_share_a_core_though_its_hyperthreads_have_distant_numbers(tmp_path: Path) -> None:
    """As on Perlmutter: 64 cores, 128 hyperthreads, four NUMA nodes, four accelerators."""
    numa = {node: f"{16 * node}-{16 * node + 15},{64 + 16 * node}-{64 + 16 * node + 15}" for node in range(4)}
    _machine(tmp_path, cores=64, numa=numa)
    cores = physical_cores(range(128), tmp_path)
    shares = [core_share(Lane(rank, 4), cores) for rank in range(4)]
    assert [share and share.threads for share in shares] == [16] * 4
    assert [share and share.cpus for share in shares] == [
        frozenset({*range(16 * node, 16 * node + 16), *range(64 + 16 * node, 80 + 16 * node)}) for node in range(4)
    ]


def test_slots_of_one_socket_stay_there_if_the_cores_do_not_divide_evenly(tmp_path: Path) -> None:
    """As on Aurora: two sockets of 52 cores, the first of each for the system, and 12 slots."""
    _machine(tmp_path, cores=104, numa={0: "0-51", 1: "52-103"}, hyperthreads=False)
    cores = physical_cores([cpu for cpu in range(104) if cpu not in (0, 52)], tmp_path)
    shares = [core_share(Lane(rank, 12), cores) for rank in range(12)]
    assert {share.threads for share in shares if share} == {8}
    assert [{cpu // 52 for cpu in share.cpus} for share in shares if share] == [{0}] * 6 + [{1}] * 6
    assert len({cpu for share in shares if share for cpu in share.cpus}) == 12 * 8


def test_numbers_of_processors_that_alternate_between_sockets(tmp_path: Path) -> None:
    _machine(tmp_path, cores=8, numa={0: "0,2,4,6", 1: "1,3,5,7"}, hyperthreads=False)
    cores = physical_cores(range(8), tmp_path)
    assert [core_share(Lane(rank, 2), cores).cpus for rank in (0, 1)] == [{0, 2, 4, 6}, {1, 3, 5, 7}]  # type: ignore[union-attr]


def test_a_machine_that_does_not_describe_itself_is_divided_by_number(tmp_path: Path) -> None:
    cores = physical_cores([3, 1, 2, 0], tmp_path)
    assert cores == [(0,), (1,), (2,), (3,)]


def test_more_slots_than_cores_are_not_bound_and_have_one_thread_each() -> None:
    share = core_share(Lane(2, 4), [(0,), (1,)])
    assert share is not None
    assert (share.cpus, share.threads) == (frozenset(), 1)


def test_the_only_slot_of_a_node_keeps_what_the_process_has() -> None:
    assert core_share(Lane(0, 1), [(0,), (1,)]) is None
    assert core_share(Lane(0, 4), []) is None  # not Linux


@pytest.mark.parametrize(
    ("rank", "count", "lane"),
    [("2", "4", Lane(2, 4)), ("", "", Lane()), ("4", "4", Lane()), ("x", "4", Lane())],
)
def test_the_lane_is_the_workers_number(monkeypatch: pytest.MonkeyPatch, rank: str, count: str, lane: Lane) -> None:
    monkeypatch.setenv("PARSL_WORKER_RANK", rank)
    monkeypatch.setenv("PARSL_WORKER_COUNT", count)
    assert Lane.of_worker() == lane


_TAKE = """
import json, os, subprocess, sys, torch
from freetrain_parsl.executor.slot.node_share import CoreShare
CoreShare(frozenset({min(os.sched_getaffinity(0))}), 1).take()
count = "import os; print(len(os.sched_getaffinity(0)))"
child = subprocess.run([sys.executable, "-c", count], capture_output=True)
threads = os.environ["OMP_NUM_THREADS"], torch.get_num_threads()
print(json.dumps([len(os.sched_getaffinity(0)), int(child.stdout), *threads]))
"""


@pytest.mark.parametrize(("given", "threads"), [(None, 1), ("2", 2)])
def test_a_share_is_inherited_and_a_number_of_threads_of_the_site_stays(given: str | None, threads: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if given is not None:
        environment["OMP_NUM_THREADS"] = given
    done = subprocess.run([sys.executable, "-c", _TAKE], env=environment, capture_output=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [1, 1, str(threads), threads]


@pytest.mark.parametrize(("left", "numbered"), [("3", "0"), ("2,3", "0,1"), ("GPU-4b2c1a9f", "0")])
def test_hip_counts_what_rocr_leaves(left: str, numbered: str) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": left, "ROCR_VISIBLE_DEVICES": left, "ZE_AFFINITY_MASK": left}
    number_visible_devices(environment)
    assert environment.pop("HIP_VISIBLE_DEVICES") == numbered
    assert set(environment.values()) == {left}


def test_a_node_without_accelerators_stays_as_it_is() -> None:
    environment: dict[str, str] = {}
    number_visible_devices(environment)
    assert environment == {}


def _meminfo(proc: Path, total: int, available: int) -> None:
    _write(proc / "meminfo", f"MemTotal:  {total // 1024} kB\nMemFree: 1 kB\nMemAvailable:  {available // 1024} kB\n")


def test_memory_is_the_machines_less_a_reserve(tmp_path: Path) -> None:
    _meminfo(tmp_path, 40 * GIB, 30 * GIB)
    assert memory_of_node(tmp_path, tmp_path / "none") == (38 * GIB, 30 * GIB)
    _meminfo(tmp_path, 512 * GIB, 30 * GIB)
    assert memory_of_node(tmp_path, tmp_path / "none") == (508 * GIB, 30 * GIB)


@pytest.mark.parametrize(
    ("line", "directory", "limit", "used"),
    [
        ("0::/job/step", "job", "memory.max", "memory.current"),
        ("4:memory:/job/step", "memory/job", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_memory_is_what_the_batch_system_leaves(
    tmp_path: Path, line: str, directory: str, limit: str, used: str
) -> None:
    """Files that the kernel keeps in memory count as available."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    _meminfo(proc, 400 * GIB, 300 * GIB)
    _write(proc / "self/cgroup", f"1:name=systemd:/\n{line}\n")
    _write(cgroups / directory / "step" / limit, "max\n" if limit == "memory.max" else f"{2**63 - 4096}\n")
    _write(cgroups / directory / limit, f"{100 * GIB}\n")
    _write(cgroups / directory / used, f"{70 * GIB}\n")
    _write(cgroups / directory / "memory.stat", f"anon 5\ninactive_file {10 * GIB}\nactive_file {5 * GIB}\n")
    assert memory_of_node(proc, cgroups) == (96 * GIB, 45 * GIB)


def test_where_nothing_is_known_of_memory_nothing_is_said(tmp_path: Path) -> None:
    assert memory_of_node(tmp_path, tmp_path) is None
