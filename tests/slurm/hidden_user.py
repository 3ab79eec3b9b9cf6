"""Run by test_hidden_jobs.py as an ordinary user who cannot see others' jobs: trains until commanded to finish."""

import json
import sys
from pathlib import Path

import parsl
from parsl.launchers import SrunLauncher
from parsl.providers import SlurmProvider

from tests.batch_systems.backends import WORKER_INIT
from tests.batch_systems.driving import Driver


def main(directory: str, partition: str) -> None:
    """Load Parsl, train, finish at a line on standard input, and print the outcome."""
    provider = SlurmProvider(partition=partition, launcher=SrunLauncher(), worker_init=WORKER_INIT, cmd_timeout=10)
    driver = Driver(provider, Path(directory)).load()
    future = driver.train(nodes=1, epochs=60)
    driver.until_step()
    print("trains", flush=True)
    print(driver.until_block_ended("yielded"), flush=True)
    sys.stdin.readline()
    driver.finish(future)
    parsl.dfk().cleanup()
    print(json.dumps(future.result()["metrics"]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
