"""Profiles of two invented applications, computed by a formula, as files and as objects."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from freetrain_parsl.extensions.simulate.jobs.profiles import read_profiles

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.extensions.simulate.application import Application

LIMITS = {
    # name: epochs, init_batch, max_batch, min_local_batch, max_local_batch, seconds a sample, seconds of an exchange
    "net": (4, 32, 512, 8, 64, 0.01, 0.05),
    "table": (2, 256, 1024, 32, 1024, 0.001, 0.02),
}
NOISE = 4.0  # variance of the gradient relative to its square, at the initial batch
STEPS = 500  # of the initial batch, in an epoch


def write_profiles(directory: Path, nodes: int = 2, gpus: int = 2) -> Path:
    """Write the three files: step times linear in samples and hosts, and efficiency without a change over epochs."""
    applications = ["application,epochs,init_batch,max_batch,min_local_batch,max_local_batch"]
    throughput = ["application,nodes,gpus,placement,local_batch,step_time,sync_time"]
    efficiency = ["application,batch,epoch,progress,iterations,metric,grad_sqr,grad_var"]
    for name, (*limits, sample, exchange) in LIMITS.items():
        applications.append(",".join(map(str, [name, *limits])))
        epochs, first, largest, least, most = limits
        for hosts in range(1, nodes + 1):
            for placement in product(range(1, gpus + 1), repeat=hosts):
                sync = exchange * hosts * (sum(placement) > 1)
                for local in (least, most):
                    digits = "".join(map(str, placement))
                    throughput.append(
                        f"{name},{hosts},{sum(placement)},{digits},{local},{local * sample + sync:.6f},{sync:.6f}"
                    )
        batch = first
        while batch <= largest:
            worth = (NOISE + 1) / (NOISE * first / batch + 1)
            for epoch in range(1, epochs + 1):
                done = STEPS * epoch
                efficiency.append(f"{name},{batch},{epoch},{done},{done / worth:.3f},0.5,1.0,{NOISE}")
            batch *= 2
    for file, lines in (("applications", applications), ("throughput", throughput), ("efficiency", efficiency)):
        (directory / f"{file}.csv").write_text("\n".join(lines) + "\n")
    return directory


def small_applications(directory: Path) -> dict[str, Application]:
    """Return the invented applications."""
    return read_profiles(write_profiles(directory))
