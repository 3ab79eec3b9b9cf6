"""Fault injection into processes and files of this machine, without their cooperation.

Each fault is a function on process ids or directories of this machine; lasting faults are context managers that undo
them. `Injector` injects random faults, reproducibly from a seed. The faults of connections and of slowed processes need
Linux 5.6 or later.
"""

from __future__ import annotations

from freetrain_parsl.testing.faults.connections import cut, partition
from freetrain_parsl.testing.faults.files import Damage, corrupt_checkpoint, fill_disk
from freetrain_parsl.testing.faults.injector import (
    PROCESS_FAULTS,
    Fault,
    InjectedFault,
    Injector,
    Strike,
    Target,
    corrupting,
    filling,
    slots_on_this_machine,
)
from freetrain_parsl.testing.faults.processes import kill, kill_all, resume, slow, stop, stopped

__all__ = [
    "PROCESS_FAULTS",
    "Damage",
    "Fault",
    "InjectedFault",
    "Injector",
    "Strike",
    "Target",
    "corrupt_checkpoint",
    "corrupting",
    "cut",
    "fill_disk",
    "filling",
    "kill",
    "kill_all",
    "partition",
    "resume",
    "slots_on_this_machine",
    "slow",
    "stop",
    "stopped",
]
