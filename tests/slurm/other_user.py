"""Run by test_two_users.py in a separate process: another user's FreeTrain on the same cluster."""

import json
import sys
from pathlib import Path

import parsl
from parsl.launchers import SrunLauncher
from parsl.providers import SlurmProvider

from tests.batch_systems.backends import WORKER_INIT
from tests.batch_systems.driving import Driver


def main(directory: str, nodes: str) -> None:
    """Load Parsl, wait for a line on standard input, train, and print the outcome."""
    provider = SlurmProvider(partition="preemptible", launcher=SrunLauncher(), worker_init=WORKER_INIT)
    driver = Driver(provider, Path(directory)).load()
    print("loaded", flush=True)
    sys.stdin.readline()
    future = driver.train(nodes=int(nodes))
    driver.finish(future)
    parsl.dfk().cleanup()
    print(json.dumps(future.result()["metrics"]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
